"""Ranks end with their caller, their pool, their server: whatever ends those, and nothing stays behind."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from left_over import alive, descendants, held, left, nothing_is_left, until  # noqa: F401

from ithaca import RankFailedError, RankPool, UnsupportedError, run_ranks
from ithaca.launch import pool as pool_module
from ithaca.launch.process import RankProcess

pytestmark = [pytest.mark.full, pytest.mark.alone]

BURNS = """
import os, sys, time
from pathlib import Path
from ithaca import RankPool

def burn(rank, folder):
    Path(folder, f"rank{rank}").touch()
    while True:
        pass

def pid(rank):
    return os.getpid()

if __name__ == "__main__":
    if sys.argv[2] == "forked" and os.fork() == 0:
        time.sleep(600)
    pool = RankPool(2)
    if sys.argv[2] == "forked" and os.fork() == 0:
        time.sleep(600)
    if sys.argv[2] == "open":
        print(*pool.run(pid))
    else:
        pool.run(burn, sys.argv[1])
"""


def start(folder: Path, how: str) -> subprocess.Popen[str]:
    """A script that has ranks, with a folder of its own for temporary files."""
    (folder / "job.py").write_text(BURNS)
    (folder / "tmp").mkdir()
    environ = {**os.environ, "TMPDIR": str(folder / "tmp")}
    command = [sys.executable, str(folder / "job.py"), str(folder), how]
    return subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGHUP, signal.SIGKILL, "forked"])
def test_ranks_that_burn_the_cores_end_with_their_caller(how: str | signal.Signals, tmp_path: Path) -> None:
    caller = start(tmp_path, "forked" if how == "forked" else "")
    assert until(lambda: all((tmp_path / f"rank{rank}").exists() for rank in range(2)), 60)
    forked = {pid for pid in descendants(caller.pid) if how == "forked" and is_a_copy(pid, caller.pid)}
    others = descendants(caller.pid) - forked
    assert len(others) >= 3
    caller.send_signal(signal.SIGKILL if how == "forked" else how)
    caller.wait(10)
    try:
        assert until(lambda: not alive(others), 10), alive(others)
        assert os.listdir(tmp_path / "tmp") == []
    finally:
        for pid in alive(others) | forked:
            os.kill(pid, signal.SIGKILL)
    caller.communicate()


def is_a_copy(pid: int, caller: int) -> bool:
    return Path(f"/proc/{pid}/cmdline").read_bytes() == Path(f"/proc/{caller}/cmdline").read_bytes()


def test_a_pool_left_open_ends_with_its_script(tmp_path: Path) -> None:
    caller = start(tmp_path, "open")
    out, _ = caller.communicate(timeout=60)
    assert caller.returncode == 0 and out.count("\n") == 1, out
    assert not alive({int(pid) for pid in out.split()})
    assert os.listdir(tmp_path / "tmp") == []


def pid(rank: int) -> int:
    return os.getpid()


def test_a_pool_that_is_dropped_ends() -> None:
    pool = RankPool(2)
    pids = set(pool.run(pid))
    assert alive(pids) == pids
    del pool
    assert until(lambda: not alive(pids), 5)


def test_ranks_end_with_their_server_and_the_next_pool_has_another() -> None:
    pool = RankPool(2)
    server = int(Path(f"/proc/{pool.run(pid)[0]}/stat").read_text().rpartition(")")[2].split()[1])
    threading.Timer(1, os.kill, (server, signal.SIGKILL)).start()
    with pytest.raises(RankFailedError, match=r"rank \d ended with exit code that is not known"):
        pool.run(sleeps, timeout=60)
    assert run_ranks(pid, 1)


def sleeps(rank: int) -> None:
    time.sleep(600)


def in_a_fork(act: Callable[[], object]) -> int:
    """The exit code of a process that is forked from this one, does something, and ends as scripts do."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            act()
            code = 0
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_a_process_forked_from_the_caller_neither_ends_nor_uses_its_pool() -> None:
    with RankPool(2) as pool:
        pids = pool.run(pid)

        def uses() -> None:
            assert not pool.alive
            with pytest.raises(UnsupportedError, match="of the process it was forked from"):
                pool.run(pid)
            pool.close()

        assert in_a_fork(uses) == 0
        assert pool.alive and pool.run(pid) == pids


def test_ranks_end_when_asked_also_while_a_forked_process_has_their_sockets() -> None:
    pool = RankPool(2)
    pool.run(pid)
    processes = list(pool._processes)
    forked = os.fork()
    if forked == 0:
        time.sleep(600)
        os._exit(0)
    try:
        pool.close()
        assert [process.exit_code for process in processes] == [0, 0]  # by themselves, not by a signal
    finally:
        os.kill(forked, signal.SIGKILL)
        os.waitpid(forked, 0)


def test_a_process_forked_from_the_caller_has_ranks_of_its_own() -> None:
    def has_its_own() -> None:
        assert len(set(run_ranks(pid, 2))) == 2

    with RankPool(1) as pool:
        assert in_a_fork(has_its_own) == 0
        assert len(pool.run(pid)) == 1


def test_an_interrupted_job_ends_the_pool() -> None:
    pool = RankPool(2)
    pids = set(pool.run(pid))
    threading.Timer(1, os.kill, (os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        pool.run(sleeps, timeout=60)
    assert not pool.alive and not alive(pids)
    with pytest.raises(RankFailedError, match="has ended"):
        pool.run(pid)


def test_an_interrupted_start_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(rank: int, *args: Any) -> Any:
        if rank == 1:
            raise KeyboardInterrupt
        return setup_of(rank, *args)

    setup_of = pool_module.setup_of
    monkeypatch.setattr(pool_module, "setup_of", interrupted)
    before = held()
    with pytest.raises(KeyboardInterrupt) as kept:
        RankPool(3)
    assert left(before) == "", kept


def test_an_interrupted_end_can_be_finished(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(process: RankProcess, timeout: float) -> bool:
        raise KeyboardInterrupt

    pool = RankPool(2)
    pids = set(pool.run(pid))
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(RankProcess, "wait", interrupted)
        pool.close()
    with pytest.raises(RankFailedError, match=r"has ended|no result"):
        pool.run(pid)
    pool.close()
    assert not alive(pids)


def test_two_interruptions_leave_no_answer_for_the_next_job(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second comes before the ranks were told to end, so an answer to the first job may still come."""

    def interrupted(*_: Any) -> Any:
        raise KeyboardInterrupt

    pool = RankPool(1)
    with monkeypatch.context() as patched:
        patched.setattr(pool_module, "_some_ready", interrupted)
        patched.setattr(pool_module, "end", interrupted)
        with pytest.raises(KeyboardInterrupt):
            pool.run(pid)
    with pytest.raises(RankFailedError, match="has ended"):
        pool.run(os.getpgid)
    pool.close()


def dies(rank: int) -> None:
    os._exit(3)


def test_the_error_of_a_dead_rank_keeps_no_descriptor() -> None:
    before = held()
    kept: list[BaseException] = []
    for _ in range(2):
        try:
            run_ranks(dies, 2)
        except RankFailedError as error:
            kept.append(error)
    kept += [error for error in RankPool(2).run_tolerant(dies) if isinstance(error, RankFailedError)]
    assert len(kept) == 4 and left(before) == ""


def test_a_start_without_descriptors_is_told_and_leaves_nothing() -> None:
    before, limits = held(), resource.getrlimit(resource.RLIMIT_NOFILE)
    used = len(os.listdir("/proc/self/fd"))
    told: list[str] = []
    for spare in range(1, 40, 3):
        resource.setrlimit(resource.RLIMIT_NOFILE, (used + spare, limits[1]))
        try:
            RankPool(8).close()
        except RankFailedError as error:
            told.append(str(error))
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert len(told) > 5 and all("Too many open files" in each for each in told) and left(before) == ""
