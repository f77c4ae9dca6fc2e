"""A peer that dies, stays away or leaves is named within the deadline, and the survivors can go on without it."""

from __future__ import annotations

import os
import signal
import time

import pytest
import torch
import torch.distributed as dist
from cases import mine, one_rank, qkv

from ithaca import (
    ExchangeClosedError,
    PeerDiedError,
    PeerTimeoutError,
    RankFailedError,
    RankPool,
    SdpaBackend,
    UlyssesAttention,
)

pytestmark = [pytest.mark.full, pytest.mark.alone]

DEADLINE = 4.0


def attention(rank: int, sizes: tuple[int, ...], attn: UlyssesAttention) -> None:
    whole = qkv(sum(sizes), sum(sizes), heads=4)
    out = attn.forward_async(*(lambda t=t: mine(t, sizes, rank) for t in whole))
    torch.testing.assert_close(out, mine(one_rank(*whole), sizes, rank), rtol=0, atol=1e-5)


def one_goes(rank: int, exchange: str, how: str) -> tuple[str, str, float, str]:
    """Rank 1 of three goes in its second call, after V has left; the others report, then form a group of two."""
    os.environ["ITHACA_TIMEOUT"] = str(DEADLINE)
    attn = UlyssesAttention(SdpaBackend(), exchange=exchange)
    attention(rank, (3, 4, 5), attn)
    q, k, v = (mine(t, (3, 4, 5), rank) for t in qkv(12, 12, heads=4))

    def go() -> torch.Tensor:
        if rank == 1:
            if how == "killed with a child" and os.fork() == 0:
                time.sleep(2 * DEADLINE)  # holds the sockets of its parent open: only the pidfd tells of its end
                os._exit(0)
            if how.startswith("killed"):
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(2.5 * DEADLINE)
        return q

    started = time.monotonic()
    try:
        attn.forward_async(go, lambda: k, lambda: v)
    except (PeerDiedError, PeerTimeoutError) as error:
        kind, message, seconds = type(error).__name__, str(error), time.monotonic() - started
    with pytest.raises(ExchangeClosedError, match="closed by an earlier error") as closed:
        attn(q, k, v)
    if rank != 1:
        store = dist.PrefixStore("survivors", dist.distributed_c10d._get_default_store())
        dist.destroy_process_group()
        dist.init_process_group("gloo", store=store, rank=rank // 2, world_size=2)
        attention(rank // 2, (6, 2), UlyssesAttention(SdpaBackend(), exchange=exchange))
    return kind, message, seconds, str(closed.value)


@pytest.mark.parametrize(
    ("exchange", "how"), [("slots", "killed"), ("slots", "killed with a child"), ("collective", "killed")]
)
def test_a_killed_rank_is_named_and_survivors_go_on(exchange: str, how: str) -> None:
    first, killed, third = RankPool(3).run_tolerant(one_goes, exchange, how, timeout=60)
    assert isinstance(killed, RankFailedError) and "exit code -9" in str(killed)
    for result in (first, third):
        assert not isinstance(result, RankFailedError), result
        kind, message, seconds, _ = result
        assert kind == "PeerDiedError" and "rank 1" in message.replace("rank(s) [1", "rank 1"), message
        assert seconds < (DEADLINE / 2 if exchange == "slots" else 2 * DEADLINE), "slots learn of a death at once"


def test_a_late_rank_is_named_with_what_was_expected() -> None:
    first, late, third = RankPool(3).run_tolerant(one_goes, "slots", "late", timeout=60)
    for result in (first, third):
        assert not isinstance(result, RankFailedError), result
        kind, message, seconds, _ = result
        assert kind == "PeerTimeoutError" and seconds < 2 * DEADLINE
        assert "its header" in message and "rank(s) [1]" in message, message
    assert not isinstance(late, RankFailedError), late
    assert late[0] == "PeerTimeoutError" and "gave up" in late[1], late  # it learns of it when it comes back


def test_a_late_rank_on_the_collective() -> None:
    first, late, third = RankPool(3).run_tolerant(one_goes, "collective", "late", timeout=60)
    assert not isinstance(late, RankFailedError) and "rank 1 expected its" in late[1], late
    for result in (first, third):
        assert not isinstance(result, RankFailedError), result
        assert result[0] in ("PeerTimeoutError", "PeerDiedError") and result[2] < 2 * DEADLINE, result


def leaves(rank: int) -> str:
    """Rank 1 destroys its exchange between two calls: harmless to a call that is done, an error to the next."""
    attn = UlyssesAttention(SdpaBackend(), exchange="slots")
    attention(rank, (3, 5), attn)
    if rank == 1:
        attn.exchange.destroy()
        dist.barrier()
        return ""
    dist.barrier()
    with pytest.raises(PeerDiedError, match="rank 1") as raised:
        attention(rank, (3, 5), attn)
    return str(raised.value)


def test_a_rank_that_leaves_is_missed_by_the_next_call() -> None:
    assert "its exchange closed" in RankPool(2).run_tolerant(leaves, timeout=60)[0]  # type: ignore[operator]


def dead_before_it_starts(rank: int) -> str:
    """Rank 1 is gone, and its connections closed, before the others begin their next call."""
    os.environ["ITHACA_TIMEOUT"] = str(DEADLINE)
    attn = UlyssesAttention(SdpaBackend(), exchange="collective")
    attention(rank, (3, 4, 5), attn)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(1)
    with pytest.raises((PeerDiedError, PeerTimeoutError)) as raised:
        attention(rank, (3, 4, 5), attn)
    return str(raised.value)


def test_the_collective_names_who_was_dead_before_the_call() -> None:
    first, _, third = RankPool(3).run_tolerant(dead_before_it_starts, timeout=60)
    for said in (first, third):
        assert isinstance(said, str) and "its header of call 2 step 0 of rank(s) [1]" in said, said
