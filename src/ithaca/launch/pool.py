"""Jobs for ranks of this machine: `run_ranks` for one, `RankPool` for several on the same ranks."""

from __future__ import annotations

import math
import os
import pickle
import select
import socket
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, TypeVar

import torch.distributed as dist

from ithaca.errors import InvalidInputError, RankFailedError, UnsupportedError
from ithaca.launch.job import Outcome, check_guarded, pickle_job, setup_of, text_of
from ithaca.launch.process import RankProcess, end

T = TypeVar("T")

#: How long ranks that are no longer wanted get to end, in seconds: after success, and after a failure, when most of
#: them hang in a call whose peer is gone.
_GRACE, _GRACE_OF_FAILURE = 5.0, 0.2
#: How many descriptors must be free for a store, which without them tries for five minutes.
_DESCRIPTORS_OF_A_STORE = 16
#: The longest that is waited in one go, in seconds.
_LONGEST_WAIT = 3600.0


def run_ranks(fn: Callable[..., T], ranks: int, *args: Any, timeout: float | None = 300.0) -> list[T]:
    """Run ``fn(rank, *args)`` in ``ranks`` fresh processes and return their results in the order of the ranks.

    Each has a gloo group over all of them as its default group, ``cores / ranks`` threads, and this process's
    environment, directory and path. ``fn``, its arguments and results travel by pickle, so ``fn`` is a module's own
    function, and a script that calls this does so under ``if __name__ == "__main__"``. On the first failure, or after
    ``timeout`` seconds (None and infinity: no limit), the other ranks are ended and `RankFailedError` is raised with
    the first failed rank's own traceback. This process hosts the store, on the loopback, so that the ranks that outlive
    one's death can still form a new group.

    No rank outlives this process, however that ends, and what a rank has started itself ends with the rank.

    Raises `InvalidInputError` where ``fn`` or its arguments cannot be sent, a count or a timeout is none, or a script
    calls this whenever it is imported.
    """
    with RankPool(ranks) as pool:
        return pool.run(fn, *args, timeout=timeout)


class RankPool:
    """Ranks that stay, with their group, for one job after another; a job that fails ends them all.

    ``preload`` names modules that the server which ranks are forked from imports once, for these ranks and all later
    ones. A pool does one job at a time: a call while another thread's runs is refused with `UnsupportedError`. Ranks
    end with `close`, with the pool, and with this process.
    """

    def __init__(self, ranks: int, preload: Sequence[str] = ()) -> None:
        if not isinstance(ranks, int) or isinstance(ranks, bool) or ranks < 1:
            raise InvalidInputError(f"at least one rank was required, as an integer; received {ranks!r}")
        check_guarded()
        self.ranks = ranks
        self._holder: dict[str, object] = {}
        self._clean = True
        self._processes: list[RankProcess] = []
        self._creator = os.getpid()
        weakref.finalize(self, end, self._processes, self._creator, _GRACE_OF_FAILURE)
        try:
            self._store: dist.TCPStore | None = _store_on_loopback()
            for rank in range(self.ranks):
                self._processes.append(RankProcess(rank, preload))
                setup = setup_of(rank, self.ranks, self._store.port)
                self._processes[-1].connection.put(pickle.dumps(setup))
        except BaseException as error:
            self._end(_GRACE_OF_FAILURE)
            if isinstance(error, (OSError, RuntimeError)):
                raise RankFailedError(f"{ranks} rank(s) were required to start; they cannot: {error}") from error
            raise

    @property
    def alive(self) -> bool:
        """Whether it takes another job."""
        if not self._clean or os.getpid() != self._creator:
            return False
        return bool(self._processes) and not any(process.wait(0) for process in self._processes)

    def run(self, fn: Callable[..., T], *args: Any, timeout: float | None = 300.0) -> list[T]:
        """As `run_ranks`, in these processes."""
        return self._run(fn, args, timeout, tolerant=False)

    def run_tolerant(
        self, fn: Callable[..., T], *args: Any, timeout: float | None = 300.0
    ) -> list[T | RankFailedError]:
        """As `run`, but let the others finish when one fails or dies, and give its error in the place of its result.

        The pool ends after it.
        """
        return self._run(fn, args, timeout, tolerant=True)

    def _run(self, fn: Callable[..., Any], args: tuple[Any, ...], timeout: float | None, tolerant: bool) -> list[Any]:
        limit = _seconds(timeout)
        job = pickle_job(fn, args)
        if os.getpid() != self._creator:
            raise UnsupportedError(
                "a pool of this process was required; received one of the process it was forked from"
            )
        with self._held() as alone:
            if not alone:
                raise UnsupportedError("a pool does one job at a time; received another one while the first still runs")
            try:
                results = self._results(job, limit, tolerant)
                self._clean = not tolerant
                return results
            finally:
                if not self._clean:
                    self._end(_GRACE_OF_FAILURE)

    @contextmanager
    def _held(self) -> Iterator[bool]:
        """Whether no other call is under way; none will be until the end of the block, if so."""
        mine = object()
        try:
            yield self._holder.setdefault("call", mine) is mine
        finally:  # an interruption may come at any line, so what counts is who holds it, not what was noted of that
            if self._holder.get("call") is mine:
                self._holder.clear()

    def _results(self, job: bytes, limit: float, tolerant: bool) -> list[Any]:
        if not self._clean or not self._processes:
            raise RankFailedError("a pool that is alive was required; this one has ended, by a failure or `close`")
        self._clean = False  # until all have answered
        deadline = time.monotonic() + limit
        for process in self._processes:
            process.connection.put(job)
        results: dict[int, Any] = {}
        while len(results) < self.ranks:
            waiting = [process for process in self._processes if process.rank not in results]
            if not _some_ready(waiting, deadline):
                late = [process.rank for process in waiting]
                raise RankFailedError(f"rank(s) {late} did not finish within {limit:g} s")
            for process in waiting:
                try:
                    if (answer := self._answer(process)) is not None:
                        results[process.rank] = _value(process.rank, answer)
                except RankFailedError as error:
                    if not tolerant:
                        _raise_death([each for each in waiting if each is not process], error)
                        raise
                    results[process.rank] = error
        return [results[rank] for rank in range(self.ranks)]

    def _answer(self, process: RankProcess) -> bytearray | None:
        """What it has answered, if it has; its end is an error when nothing came before it."""
        ended = process.wait(0)
        process.connection.send_some()
        try:
            answer = process.connection.receive_some()
        except EOFError:
            answer, ended = None, True
            process.wait(_GRACE)
        if answer is None and ended:
            raise _death(process)
        return answer

    def close(self) -> None:
        """End the ranks: by asking, and if they do not go, by force. A job that another thread has running fails."""
        with self._held() as alone:
            if alone:
                self._end(_GRACE)
            else:  # who has the job clears up
                for process in list(self._processes):
                    process.kill()

    def _end(self, grace: float) -> None:
        end(self._processes, self._creator, grace)
        self._store = None  # an error's traceback may hold the pool for longer

    def __enter__(self) -> RankPool:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


def _seconds(timeout: float | None) -> float:
    if timeout is None:
        return math.inf
    if not isinstance(timeout, (int, float)) or isinstance(timeout, bool) or not timeout > 0:
        raise InvalidInputError(f"a timeout of more than 0 seconds, or None, was required; received {timeout!r}")
    try:
        return float(timeout)
    except OverflowError:
        return math.inf


def _store_on_loopback() -> dist.TCPStore:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        with ExitStack() as spare:
            for _ in range(_DESCRIPTORS_OF_A_STORE):
                spare.enter_context(listener.dup())
        port = listener.getsockname()[1]
        return dist.TCPStore(
            "127.0.0.1", port, None, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
        )


def _some_ready(processes: list[RankProcess], deadline: float) -> bool:
    """Wait until one of them has something to say, or can take more of its job; False at the deadline."""
    poll = select.poll()
    for process in processes:
        process.register(poll)
    while True:
        left = deadline - time.monotonic()
        if poll.poll(1000 * min(max(left, 0.0), _LONGEST_WAIT)):
            return True
        if left <= _LONGEST_WAIT:
            return False


def _death(process: RankProcess) -> RankFailedError:
    code = "that is not known" if process.exit_code is None else process.exit_code
    return RankFailedError(f"rank {process.rank} ended with exit code {code} and no result")


def _raise_death(others: list[RankProcess], error: RankFailedError) -> None:
    """The end of one of them, if there is one, is why ``error`` came, however fast that was told."""
    deadline = time.monotonic() + _GRACE_OF_FAILURE
    for process in others:
        if process.wait(deadline - time.monotonic()):
            raise _death(process) from error


def _value(rank: int, answer: bytearray) -> Any:
    try:
        outcome, value = pickle.loads(answer)
    except Exception as error:
        raise RankFailedError(
            f"rank {rank} returned what this process cannot unpickle: {type(error).__name__}: {text_of(error)}"
        ) from error
    if outcome is Outcome.UNGUARDED:
        raise InvalidInputError(value)
    if outcome is Outcome.FAILED:
        raise RankFailedError(f"rank {rank} failed:\n{value}")
    return value
