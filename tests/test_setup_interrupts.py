"""Ctrl-C at any line of a set-up, a growth or an end: nothing stays open once the end is asked for again.

And callers in the way: the hand-shake's socket is open to every process of this host.
"""

from __future__ import annotations

import contextlib
import gc
import linecache
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from test_peer_memory import connected, grow
from torch.distributed import HashStore

import ithaca
from ithaca import IthacaError
from ithaca.exchange.peer_memory import handshake
from ithaca.exchange.peer_memory.host import HostPeerMemory
from ithaca.exchange.rendezvous import Rendezvous
from ithaca.exchange.slots import SlotExchange

pytestmark = [pytest.mark.full, pytest.mark.filterwarnings("ignore::ResourceWarning")]

OURS = str(Path(ithaca.__file__).parent)


@pytest.fixture(autouse=True)
def _little_garbage() -> Iterator[None]:
    """A full collection, of which there are many here, need not go over all that is imported."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


def open_files() -> int:
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


@contextlib.contextmanager
def interrupted_at(line: int) -> Iterator[list[bool]]:
    """Ctrl-C before the ``line``-th line of ours that this thread runs in here; whether it came to that."""
    count, struck = 0, [False]

    def trace(frame: FrameType, event: str, arg: Any) -> Any:
        nonlocal count
        if not frame.f_code.co_filename.startswith(OURS):
            return None
        # Python gives a line event before the end of a with block, outside of it, where no signal can be handled.
        if event == "line" and not linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip().startswith(
            "with"
        ):
            count += 1
            if count == line:
                struck[0] = True
                raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        with contextlib.suppress(KeyboardInterrupt):
            yield struck
    finally:
        sys.settrace(before)


def every_line(attempt: Callable[[int], bool], most: int) -> None:
    """``attempt(line)`` for one line after the other, until one is beyond the last."""
    for line in range(1, most):
        if not attempt(line):
            assert line > 10
            return
    raise AssertionError(f"more than {most} lines")


@pytest.mark.parametrize("copy", ["inline", "thread"])
@pytest.mark.parametrize("how", ["destroyed again", "closed by an error, then destroyed"])
def test_an_interrupted_end_is_finished_by_the_next(copy: str, how: str) -> None:
    before = open_files()

    def attempt(line: int) -> bool:
        pair = connected()
        grow(pair, "v", (64, 64))
        exchanges = [SlotExchange(memory, 5.0, copy) for memory in pair]
        with interrupted_at(line) as struck:
            if how.startswith("closed"):
                exchanges[0]._close(IthacaError("an error"))
            else:
                exchanges[0].destroy()
        for exchange in exchanges:
            exchange.destroy()
        held = open_files()  # while the objects live
        assert held == before, (line, held, before)
        return struck[0]

    every_line(attempt, 400)


def test_an_interrupted_growth_leaves_nothing() -> None:
    before = open_files()

    def attempt(line: int) -> bool:
        first, second = connected(timeout=0.2)

        def one(memory: HostPeerMemory) -> None:
            for wait in memory.grow("v", (64, 64)):
                memory.wait(wait, block=True)

        with ThreadPoolExecutor(1) as pool:
            other = pool.submit(one, second)
            with interrupted_at(line) as struck:
                one(first)
            first.close()
            with contextlib.suppress(IthacaError):
                other.result()
        second.close()
        assert open_files() == before, line
        return struck[0]

    every_line(attempt, 600)


def test_an_interrupted_set_up_leaves_nothing_and_is_told() -> None:
    before = open_files()

    def one(store: HashStore, rank: int) -> HostPeerMemory:
        with Rendezvous(store, "key", rank, 2, 20.0) as rendezvous:
            memory = HostPeerMemory.connect(rendezvous)
            try:
                rendezvous.conclude()
            except BaseException:
                memory.close()
                raise
            return memory

    def attempt(line: int) -> bool:
        store, started = HashStore(), time.monotonic()
        with ThreadPoolExecutor(1) as pool:
            other = pool.submit(one, store, 1 - line % 2)
            memory = None
            with interrupted_at(line) as struck:
                memory = one(store, line % 2)
            if memory is not None:
                memory.close()
            # Interrupted before the attempt had begun, it has told nobody: let the other go.
            with contextlib.suppress(KeyboardInterrupt), Rendezvous(store, "key", line % 2, 2, 20.0):
                raise KeyboardInterrupt
            try:
                other.result().close()
            except IthacaError as error:
                assert "KeyboardInterrupt" in str(error), error
                del error
        assert time.monotonic() - started < 10
        del other
        assert open_files() == before, line
        return struck[0]

    every_line(attempt, 3000)


def test_a_crowd_of_callers_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Strangers fill the queue of those who call; they say nothing, and come from a process that is expected."""
    monkeypatch.setattr(handshake.socket, "SOMAXCONN", 2)
    store = HashStore()

    def one(rank: int) -> HostPeerMemory:
        with Rendezvous(store, "key", rank, 2, 10.0) as rendezvous:
            return HostPeerMemory.connect(rendezvous)

    true = handshake._call

    def call(rendezvous: Rendezvous, other: int, facts: Any, opened: contextlib.ExitStack) -> handshake.Peer:
        with contextlib.suppress(BlockingIOError):
            while True:
                crowd.append(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
                crowd[-1].setblocking(False)
                crowd[-1].connect(facts["address"])
        return true(rendezvous, other, facts, opened)

    crowd: list[socket.socket] = []
    monkeypatch.setattr(handshake, "_call", call)
    monkeypatch.setattr(handshake, "_Callers", slowly(handshake._Callers))
    with ThreadPoolExecutor(2) as pool:
        for memory in pool.map(one, range(2)):
            memory.close()
    assert len(crowd) > 2
    for stranger in crowd:
        stranger.close()


def slowly(callers: Any) -> Any:
    """Rank 0 is not there to accept for a while."""

    def made(rendezvous: Rendezvous, *args: Any) -> Any:
        time.sleep(0.5 * (1 - rendezvous.rank))
        return callers(rendezvous, *args)

    return made
