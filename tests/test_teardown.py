"""However a rank ends, it ends: nothing hangs at the exit, and a peer that still expects something is told."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from cases import mine, one_rank, qkv
from chaos import holdings, more

from ithaca import SdpaBackend, UlyssesAttention, exchange_for, run_ranks

pytestmark = [pytest.mark.full, pytest.mark.alone]

COPIES = ["inline", "thread"]
Ranks = list[subprocess.Popen[str]]


@pytest.fixture
def store(tmp_path: Path) -> str:
    return str(tmp_path / "store")


def started(store: str, copy: str, how: str) -> Ranks:
    program = str(Path(__file__).with_name("one_rank.py"))
    return [
        subprocess.Popen(
            [sys.executable, program, str(rank), store, copy, how],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]


def ended(ranks: Ranks) -> Iterator[tuple[int, str, str]]:
    """Exit code, output and errors of each, within the time that an exit may take."""
    try:
        for rank in ranks:
            out, err = rank.communicate(timeout=60)
            yield rank.returncode, out, err
    finally:
        for rank in ranks:
            rank.kill()


@pytest.mark.parametrize("copy", COPIES)
@pytest.mark.parametrize("how", ["ends", "ends with a lease"])
def test_the_interpreter_ends_without_a_word(store: str, copy: str, how: str) -> None:
    for code, out, err in ended(started(store, copy, how)):
        assert code == 0 and out == "ready\n" and "Traceback" not in err, err


@pytest.mark.parametrize("copy", COPIES)
def test_a_rank_that_exits_inside_a_call(store: str, copy: str) -> None:
    (code, out, err), (other, heard, trouble) = ended(started(store, copy, "leaves inside a closure"))
    assert (code, out) == (3, "ready\n"), err
    assert other == 0 and "rank 0 gave up: SystemExit" in heard, (heard, trouble)


@pytest.mark.parametrize("copy", COPIES)
def test_ctrl_c(store: str, copy: str) -> None:
    ranks = started(store, copy, "interrupted")
    for rank in ranks:
        assert rank.stdout is not None and rank.stdout.readline() == "ready\n"
    time.sleep(0.5)  # rank 0 waits for rank 1, which waits for us
    ranks[0].send_signal(signal.SIGINT)
    ranks[0].wait(timeout=30)
    Path(f"{store}.go").touch()
    (code, _, err), (other, heard, trouble) = ended(ranks)
    assert code == -signal.SIGINT and "KeyboardInterrupt" in err, (code, err)
    assert other == 0 and "rank 0 gave up: KeyboardInterrupt" in heard, (heard, trouble)


def forgotten(rank: int, want: str, copy: str) -> str:
    """A group that is dropped takes its exchange with it."""
    before = None
    for _ in range(3):
        group = dist.new_group([0, 1])
        attn = UlyssesAttention(SdpaBackend(), group=group, exchange=exchange_for(group, want, copy=copy))
        whole = qkv(8, 8, heads=4)
        out = attn(*(mine(t, (3, 5), rank) for t in whole))
        torch.testing.assert_close(out, mine(one_rank(*whole), (3, 5), rank), rtol=0, atol=1e-5)
        dist.barrier()
        dist.destroy_process_group(group)
        del attn, group
        gc.collect()
        dist.barrier()
        left = holdings()
        if before is not None and (grown := more(left, before)):
            return grown
        before = left
    return ""


@pytest.mark.parametrize(("want", "copy"), [("slots", "inline"), ("slots", "thread"), ("collective", "auto")])
def test_garbage_collection_ends_an_exchange(want: str, copy: str) -> None:
    assert run_ranks(forgotten, 2, want, copy) == ["", ""]


def outlived(rank: int) -> list[float]:
    """A view of a slot, kept by somebody who should not have, when everything else is gone."""
    exchange = exchange_for(want="slots")
    memory = exchange.memory  # type: ignore[attr-defined]
    attn = UlyssesAttention(SdpaBackend(), exchange=exchange)
    one = torch.full((1, 2, 2, 4), float(rank + 1))
    attn(one, one, one)
    dist.barrier()
    view = memory.slot(rank, "v", 64).view(torch.float32)
    exchange.destroy()
    dist.destroy_process_group()
    del exchange, memory, attn
    gc.collect()
    return view.tolist()


def test_memory_lives_as_long_as_a_view_of_it() -> None:
    for values in run_ranks(outlived, 2):
        assert set(values) == {1.0, 2.0}


def slow_at_first(rank: int) -> float:
    """Rank 1 compiles, loads or allocates for twelve seconds before its first projection is there."""
    assert "ITHACA_TIMEOUT" not in os.environ
    attn, started = UlyssesAttention(SdpaBackend(), exchange="slots"), time.monotonic()
    whole = qkv(8, 8, heads=4)
    q, k, v = (mine(t, (3, 5), rank) for t in whole)

    def slow() -> torch.Tensor:
        time.sleep(12 * rank)
        return q

    out = attn.forward_async(slow, lambda: k, lambda: v)
    torch.testing.assert_close(out, mine(one_rank(*whole), (3, 5), rank), rtol=0, atol=1e-5)
    return time.monotonic() - started


def test_a_slow_first_call_is_waited_for() -> None:
    assert min(run_ranks(slow_at_first, 2)) >= 12
