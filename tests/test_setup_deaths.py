"""A process that is gone in the middle of a set-up: found at once, and the right one is named; so is the store."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ithaca import (
    IthacaError,
    PeerDiedError,
    PeerTimeoutError,
    RankFailedError,
    RankPool,
    SdpaBackend,
    UlyssesAttention,
    exchange_for,
)
from ithaca.exchange import choice
from ithaca.exchange.peer_memory import handshake, host
from ithaca.exchange.rendezvous import Rendezvous

pytestmark = [pytest.mark.full, pytest.mark.alone]

#: So long that who waits for it is found out.
DEADLINE = 20.0
STEPS: dict[str, tuple[Any, str]] = {
    "before it says anything": (choice, "host_facts"),
    "after its facts": (Rendezvous, "until"),
    "after the choice": (choice, "choose"),
    "before its address": (host, "connect_peers"),
    "after its address": (handshake, "_Callers"),
    "before it connects": (handshake, "_call"),
    "connected": (handshake, "_peer"),
    "before it is ready": (host.HostPeerMemory, "__init__"),
}


def before(where: str, act: Callable[[], None]) -> None:
    owner, name = STEPS[where]
    true = getattr(owner, name)

    def stepped(*args: Any, **kwargs: Any) -> Any:
        act()
        return true(*args, **kwargs)

    setattr(owner, name, stepped)


def end(how: int) -> Callable[[], None]:
    """Let the others go as far as they get, and go."""

    def act() -> None:
        time.sleep(0.5)
        os.kill(os.getpid(), how)

    return act


def goes(rank: int, victim: int, where: str, how: int, deadline: float) -> tuple[str, str, float]:
    os.environ["ITHACA_TIMEOUT"] = str(deadline)
    dist.barrier()
    if rank == victim:
        before(where, end(how))
    started = time.monotonic()
    with pytest.raises((PeerDiedError, PeerTimeoutError)) as raised:
        exchange_for(want="slots")
    return type(raised.value).__name__, str(raised.value), time.monotonic() - started


@pytest.mark.parametrize(
    ("where", "victim"),
    [
        ("after its facts", 0),
        ("after the choice", 1),
        ("before its address", 2),
        ("after its address", 0),
        ("before it connects", 2),
        ("connected", 1),
        ("before it is ready", 2),
    ],
)
def test_a_death_in_the_set_up_is_found_at_once(where: str, victim: int) -> None:
    results = RankPool(3).run_tolerant(goes, victim, where, signal.SIGKILL, DEADLINE, timeout=60)
    assert isinstance(results[victim], RankFailedError)
    for rank in {0, 1, 2} - {victim}:
        result = results[rank]
        assert not isinstance(result, RankFailedError), result
        kind, said, seconds = result
        assert kind == "PeerDiedError" and f"rank {victim} (process gone)" in said and seconds < DEADLINE / 2, result
        assert all(f"rank {alive} (process gone)" not in said for alive in {0, 1, 2} - {victim}), said


@pytest.mark.parametrize(
    ("where", "victim"), [("before it says anything", 1), ("before it connects", 1), ("before it is ready", 2)]
)
def test_a_rank_that_stands_still_is_the_one_that_is_named(where: str, victim: int) -> None:
    """Stopped, it is found by the deadline only; those who wait for one that waits for it do not blame that one."""
    results = RankPool(3).run_tolerant(stands_still, victim, where, timeout=60)
    for rank in {0, 1, 2} - {victim}:
        assert f"rank(s) [{victim}]" in str(results[rank]), results


def stands_still(rank: int, victim: int, where: str) -> str:
    if rank == victim:
        before(where, lambda: time.sleep(4))
    os.environ["ITHACA_TIMEOUT"] = "2"
    dist.barrier()
    with pytest.raises(PeerTimeoutError) as raised:
        exchange_for(want="slots")
    return str(raised.value)


def without_store(rank: int, when: str) -> str:
    """Rank 0 hosts the store of the group, as under ``env://``, and is killed; rank 1 goes on."""
    os.environ["ITHACA_TIMEOUT"] = str(DEADLINE)
    outer = dist.distributed_c10d._get_default_store()
    if rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, None, is_master=True, wait_for_workers=False)
        outer.set("port", str(store.port))
    else:
        store = dist.TCPStore("127.0.0.1", int(outer.get("port")), None, is_master=False)
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    dist.barrier()
    if rank == 0:
        if when == "before the first call":
            os.kill(os.getpid(), signal.SIGKILL)
        before(when, end(signal.SIGKILL))
    elif when == "before the first call":
        time.sleep(0.5)
    started, said = time.monotonic(), ""
    for _ in range(2):  # again and again, and no worse
        with pytest.raises(IthacaError) as raised:
            exchange_for(want="auto")
        said += str(raised.value) + "\n"
    assert time.monotonic() - started < DEADLINE / 2
    return said


@pytest.mark.parametrize("when", ["before the first call", "before it says anything", "after the choice", "connected"])
def test_a_store_that_goes_away_is_named(when: str) -> None:
    _, said = RankPool(2).run_tolerant(without_store, when, timeout=60)
    assert not isinstance(said, RankFailedError), said
    first, second, *_ = said.splitlines()
    assert "lost the store" in first or "rank 0 (process gone)" in first, first
    assert "lost the store" in second and "Rank 0 hosts it" in second, second


def patient(rank: int, want: str, seconds: str) -> None:
    """``ITHACA_TIMEOUT`` of any size: a set-up and a call in which each waits for the other a while."""
    os.environ["ITHACA_TIMEOUT"] = seconds
    try:
        group = dist.new_group([0, 1])
        time.sleep(0.2 * rank)
        attn = UlyssesAttention(SdpaBackend(), group=group, exchange=want)
        one = torch.ones(1, 2, 2, 4)

        def slow() -> torch.Tensor:
            time.sleep(0.2 * (1 - rank))
            return one

        torch.testing.assert_close(attn.forward_async(slow, lambda: one, lambda: one), one)
        attn.exchange.destroy()
        dist.barrier()
        dist.destroy_process_group(group)
    finally:
        del os.environ["ITHACA_TIMEOUT"]


@pytest.mark.parametrize("want", ["slots", "collective"])
@pytest.mark.parametrize("seconds", ["2147484", "1e10"])
def test_any_deadline_works(on_ranks: Callable[..., Any], want: str, seconds: str) -> None:
    on_ranks(2, patient, want, seconds)
