"""What starting ranks leaves behind, as a fixture for the tests of it: nothing."""

from __future__ import annotations

import contextlib
import gc
import os
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator

import pytest
from chaos import _start_server, at_large, more


def held() -> Counter[str]:
    """Processes, descriptors, threads and temporary files, as of now."""
    gc.collect()
    now = at_large()
    del now["shared memory that nobody maps"]  # of others on this machine: launching takes none
    now["native thread"] += len(os.listdir("/proc/self/task"))
    now["temporary file"] += len(os.listdir(tempfile.gettempdir()))
    return now


@pytest.fixture(autouse=True)
def nothing_is_left(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing but the server that ranks are forked from, and what was there before."""
    monkeypatch.setenv("TMPDIR", str(tmp_path_factory.mktemp("temporary")))
    monkeypatch.setattr(tempfile, "tempdir", None)
    _start_server()
    before = held()
    yield
    if grown := left(before):
        pytest.fail(f"left behind: {grown}")


def left(before: Counter[str], seconds: float = 5) -> str:
    """What there is that was not there ``before``, once processes that were told to end have had time for it."""
    grown: list[str] = []

    def settled() -> bool:
        grown[:] = [more(held(), before)]
        return not grown[0]

    until(settled, seconds)
    return grown[0]


def until(true: Callable[[], bool], seconds: float) -> bool:
    """Wait for something to become true, for so long at the most."""
    deadline = time.monotonic() + seconds
    while not (done := true()) and time.monotonic() < deadline:
        time.sleep(0.05)
    return done


def descendants(pid: int) -> set[int]:
    """The processes that descend from one."""
    parents = {}
    for each in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError), open(f"/proc/{each}/stat") as stat:
            parents[int(each)] = int(stat.read().rpartition(")")[2].split()[1])
    found: set[int] = set()
    while more_of_them := {child for child, parent in parents.items() if parent in {pid, *found}} - found:
        found |= more_of_them
    return found


def alive(pids: set[int]) -> set[int]:
    """Those that have not ended; one that only waits to be reaped has."""
    running = set()
    for pid in pids:
        with contextlib.suppress(OSError), open(f"/proc/{pid}/stat") as stat:
            if stat.read().rpartition(")")[2].split()[0] not in "ZX":
                running.add(pid)
    return running
