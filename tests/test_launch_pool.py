"""One pool over many jobs: memory, ranks that stand still, callers on several threads, and what ranks may start."""

from __future__ import annotations

import math
import os
import pickle
import signal
import socket
import struct
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from left_over import alive, nothing_is_left, until  # noqa: F401
from torch.utils.data import DataLoader

from ithaca import InvalidInputError, RankFailedError, RankPool, UnsupportedError, run_ranks

pytestmark = [pytest.mark.full, pytest.mark.alone]


def pid(rank: int) -> int:
    return os.getpid()


def sleeps(rank: int, *args: object) -> None:
    time.sleep(600)


def echo(rank: int, value: Any) -> Any:
    return value


def makes_a_cycle(rank: int, size: int) -> int:
    """The resident memory of this process, in KiB, with one more cycle of garbage in it."""
    cycle: list[object] = [bytearray(size)]
    cycle.append(cycle)
    return int(Path("/proc/self/statm").read_text().split()[1]) * (os.sysconf("SC_PAGE_SIZE") // 1024)


def test_memory_is_flat_over_1000_jobs_that_leave_cycles() -> None:
    with RankPool(1) as pool:
        sizes = [pool.run(makes_a_cycle, 200_000)[0] for _ in range(1000)]
    assert sizes[-1] - sizes[99] < 60_000, sizes[::100]  # all of the garbage is 175 MiB


def test_a_rank_that_is_stopped_takes_no_longer_than_the_timeout() -> None:
    with RankPool(2) as pool:
        os.kill(pool.run(pid)[1], signal.SIGSTOP)
        started = time.monotonic()
        with pytest.raises(RankFailedError, match=r"rank\(s\) \[1\] did not finish within 2 s"):
            pool.run(echo, bytes(10_000_000), timeout=2)
        assert time.monotonic() - started < 20


def stops_in_its_answer(rank: int) -> bytes:
    from ithaca.launch import rank as this

    def half(jobs: socket.socket, answer: bytes) -> None:
        jobs.sendall(struct.pack("!Q", len(answer)) + answer[: len(answer) // 2])
        os.kill(os.getpid(), signal.SIGSTOP)

    this.send = half
    return bytes(1_000_000)


def test_a_rank_that_stops_in_the_middle_of_its_answer_takes_no_longer_than_the_timeout() -> None:
    with pytest.raises(RankFailedError, match=r"rank\(s\) \[0\] did not finish within 3 s"):
        run_ranks(stops_in_its_answer, 1, timeout=3)


def test_much_goes_both_ways() -> None:
    data = os.urandom(30_000_000)
    assert run_ranks(echo, 2, data) == [data, data]


def dies_and_leaves_a_helper(rank: int, file: str) -> None:
    if rank == 1:
        helper = os.fork()
        if helper == 0:
            time.sleep(600)
        Path(file).write_text(str(helper))
        os._exit(5)
    time.sleep(600)


def test_a_rank_that_forked_a_helper_and_died_is_noticed(tmp_path: Path) -> None:
    file = tmp_path / "helper"
    try:
        with pytest.raises(RankFailedError, match="rank 1 ended with exit code 5"):
            run_ranks(dies_and_leaves_a_helper, 2, str(file), timeout=20)
        helpers = {int(file.read_text())}
        assert until(lambda: not alive(helpers), 5)
    finally:
        for helper in alive({int(file.read_text())}):
            os.kill(helper, signal.SIGKILL)


def dies_slowly(rank: int) -> None:
    if rank == 1:
        time.sleep(0.05)
        os._exit(5)
    raise ConnectionError("it has gone")


def test_a_death_is_told_before_the_errors_that_it_brings() -> None:
    with pytest.raises(RankFailedError, match="rank 1 ended with exit code 5"):
        run_ranks(dies_slowly, 2)


def returns_twice(rank: int) -> str:
    if os.fork() == 0:
        return "what the rank has forked"
    time.sleep(1)
    return "the rank"


def test_what_a_rank_has_forked_does_not_answer_for_it() -> None:
    assert run_ranks(returns_twice, 2) == ["the rank", "the rank"]


def test_a_rank_that_died_between_jobs_is_noticed() -> None:
    with RankPool(2) as pool:
        os.kill(pool.run(pid)[1], signal.SIGKILL)
        assert until(lambda: not pool.alive, 5)
        with pytest.raises(RankFailedError, match="rank 1 ended with exit code -9 and no result"):
            pool.run(sleeps, bytes(10_000_000), timeout=20)


def test_no_limit() -> None:
    with RankPool(1) as pool:
        for timeout in (None, math.inf, 1e300, 10**400):
            assert pool.run(echo, 1, timeout=timeout) == [1]


@pytest.mark.parametrize("timeout", [0, -1, math.nan, True, "2", -math.inf])
def test_what_is_no_timeout(timeout: Any) -> None:
    with RankPool(1) as pool:
        with pytest.raises(
            InvalidInputError, match="a timeout of more than 0 seconds, or None, was required; received"
        ):
            pool.run(pid, timeout=timeout)
        assert pool.run(echo, 1) == [1]


def test_threads_get_their_own_results_or_are_refused() -> None:
    wrong: list[object] = []
    refused, answered = [0], [0]

    def calls(number: int) -> None:
        for turn in range(50):
            try:
                result = pool.run(echo, (number, turn), timeout=30)
            except UnsupportedError:
                refused[0] += 1
                time.sleep(0.001)
            except BaseException as error:
                wrong.append(error)
            else:
                answered[0] += 1
                if result != [(number, turn)] * 2:
                    wrong.append(result)

    with RankPool(2) as pool:
        pool.run(pid)
        threads = [threading.Thread(target=calls, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not wrong and answered[0] and refused[0]
        assert pool.run(echo, "next") == ["next", "next"]


def test_closed_by_another_thread() -> None:
    pool = RankPool(2)
    pids = set(pool.run(pid))
    threading.Timer(1, pool.close).start()
    with pytest.raises(RankFailedError, match=r"rank \d ended with exit code -9 and no result"):
        pool.run(sleeps, timeout=60)
    assert not pool.alive and not alive(pids)


def closes(signum: int, frame: object) -> None:
    _closed_by_signal[0].close()


_closed_by_signal: list[RankPool] = []


def test_closed_by_a_signal_in_the_middle_of_a_job() -> None:
    pool = RankPool(2)
    pool.run(pid)
    _closed_by_signal[:] = [pool]
    previous = signal.signal(signal.SIGUSR1, closes)
    try:
        threading.Timer(1, os.kill, (os.getpid(), signal.SIGUSR1)).start()
        with pytest.raises(RankFailedError, match="no result"):
            pool.run(sleeps, timeout=60)
    finally:
        signal.signal(signal.SIGUSR1, previous)
        _closed_by_signal.clear()


def loads(rank: int, method: str) -> list[int]:
    loader = DataLoader(torch.arange(4), num_workers=2, multiprocessing_context=method)  # type: ignore[arg-type, var-annotated]
    return [int(each) for each in loader]


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_data_loader_with_workers_works_in_a_rank(method: str) -> None:
    assert run_ranks(loads, 2, method, timeout=120) == [[0, 1, 2, 3]] * 2


def nested(rank: int) -> list[int]:
    return run_ranks(echo, 2, rank)


def test_a_rank_has_ranks_of_its_own() -> None:
    assert run_ranks(nested, 2, timeout=120) == [[0, 0], [1, 1]]


def listeners(rank: int = 0) -> list[str]:
    """The addresses on which this process listens, as the kernel writes them."""
    inodes = set()
    for fd in os.listdir("/proc/self/fd"):
        try:
            inodes.add(os.readlink(f"/proc/self/fd/{fd}"))
        except OSError:
            continue
    found = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in inodes:
                found.append(fields[1].partition(":")[0])
    return found


def with_groups(rank: int) -> list[str]:
    group = dist.new_group(backend="gloo")
    dist.barrier(group)
    return listeners()


def test_nobody_listens_beyond_the_loopback() -> None:
    loopback = {"0100007F", "00000000000000000000000001000000", "0000000000000000FFFF00000100007F"}
    with RankPool(2) as pool:
        of_ranks = pool.run(with_groups)
        here = listeners()
    assert here and set(here) <= loopback
    for found in of_ranks:
        assert found and set(found) <= loopback


def environment(rank: int, name: str) -> tuple[str | None, str]:
    return os.environ.get(name), os.getcwd()


def test_ranks_have_the_environment_and_directory_of_now(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("ITHACA_TEST", "here")
    monkeypatch.chdir(tmp_path)
    assert run_ranks(environment, 1, "ITHACA_TEST") == [("here", str(tmp_path))]


def imported(rank: int, module: str) -> bool:
    import sys

    return module in sys.modules


def test_preload_works_for_any_pool() -> None:
    assert run_ranks(imported, 1, "tabnanny") == [False]
    with RankPool(1, preload=("tabnanny", "there.is.no.such.module")) as pool:
        assert pool.run(imported, "tabnanny") == [True]


def test_a_job_that_cannot_be_sent_leaves_the_pool_alive() -> None:
    class Unprintable:
        def __call__(self, rank: int) -> None: ...

        def __str__(self) -> str:
            raise ZeroDivisionError

        __repr__ = __str__

    with RankPool(1) as pool:
        for fn in (lambda rank: rank, Unprintable()):
            with pytest.raises(InvalidInputError, match="that can be pickled were required"):
                pool.run(fn)
        with pytest.raises(InvalidInputError, match="that can be pickled were required"):
            pool.run(echo, threading.Lock())
        assert pool.run(echo, 1) == [1]


class Bad(Exception):
    def __str__(self) -> str:
        raise SystemExit("on purpose")

    @property
    def __notes__(self) -> list[str]:
        raise KeyboardInterrupt


def fails_badly(rank: int) -> None:
    raise Bad


def returns_what_cannot_be_sent(rank: int) -> Any:
    return threading.Lock()


class Unloadable:
    def __reduce__(self) -> tuple[Any, ...]:
        return (raise_on_load, ())


def raise_on_load() -> None:
    raise pickle.UnpicklingError("on purpose")


def returns_what_cannot_be_loaded(rank: int) -> Unloadable:
    return Unloadable()


@pytest.mark.parametrize(
    ("fn", "told"),
    [
        (fails_badly, "rank 0 failed:\n(?s:.*)Bad"),
        (returns_what_cannot_be_sent, "rank 0 failed:\n(?s:.*)cannot pickle"),
        (
            returns_what_cannot_be_loaded,
            "rank 0 returned what this process cannot unpickle: UnpicklingError: on purpose",
        ),
    ],
)
def test_errors_and_results_that_are_hard_to_tell(fn: Any, told: str) -> None:
    with pytest.raises(RankFailedError, match=told):
        run_ranks(fn, 1, timeout=60)
