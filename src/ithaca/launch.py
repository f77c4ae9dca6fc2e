"""Ranks on this machine: fresh processes with a gloo group, started from a warm server so that torch loads once.

Everything also runs under ``torchrun``: nothing in the library asks who started the ranks.
"""

from __future__ import annotations

import gc
import multiprocessing as mp
import os
import pickle
import time
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from ithaca.errors import InvalidInputError, RankFailedError

T = TypeVar("T")

#: How long ranks that are no longer wanted get to end, in seconds: after success, and after a failure, when most of
#: them hang in a call whose peer is gone.
_GRACE, _GRACE_OF_FAILURE = 5.0, 0.2


def run_ranks(fn: Callable[..., T], ranks: int, *args: Any, timeout: float = 300.0) -> list[T]:
    """Run ``fn(rank, *args)`` in ``ranks`` fresh processes and return their results in the order of the ranks.

    Each has a gloo group over all of them as its default group, and ``cores / ranks`` threads. ``fn``, its arguments
    and results travel by pickle, so ``fn`` is a module's own function, and a script that calls this does so under
    ``if __name__ == "__main__"``. On the first failure, or after ``timeout`` seconds, the other ranks are ended and
    `RankFailedError` is raised with the first failed rank's own traceback. This process hosts the store, so that the
    ranks that outlive one's death can still form a new group.
    """
    with RankPool(ranks) as pool:
        return pool.run(fn, *args, timeout=timeout)


class RankPool:
    """Ranks that stay, with their group, for one job after another; a job that fails ends them all.

    ``preload`` names modules that the server which ranks are started from imports once for all of them, if this is the
    first pool of the process.
    """

    def __init__(self, ranks: int, preload: Sequence[str] = ()) -> None:
        if ranks < 1:
            raise InvalidInputError(f"at least one rank was required; received {ranks}")
        self.ranks = ranks
        self._store = dist.TCPStore("127.0.0.1", 0, None, is_master=True, wait_for_workers=False)
        context = mp.get_context("forkserver")
        context.set_forkserver_preload(["torch", "ithaca.launch", *preload])
        self._processes: list[BaseProcess] = []
        self._pipes: list[Connection] = []
        try:
            for rank in range(ranks):
                here, there = context.Pipe()
                self._pipes.append(here)
                process = context.Process(
                    target=_serve, args=(there, self._store.port, rank, ranks), name=f"ithaca-rank-{rank}", daemon=True
                )
                process.start()
                self._processes.append(process)
                there.close()
        except BaseException:
            self.close()
            raise

    @property
    def alive(self) -> bool:
        """Whether it takes another job."""
        return bool(self._processes)

    def run(self, fn: Callable[..., T], *args: Any, timeout: float = 300.0) -> list[T]:
        """As `run_ranks`, in these processes."""
        try:
            self._send(fn, args)
            return self._results(timeout, tolerant=False)
        except BaseException:
            self._end(_GRACE_OF_FAILURE)
            raise

    def run_tolerant(self, fn: Callable[..., T], *args: Any, timeout: float = 300.0) -> list[T | RankFailedError]:
        """As `run`, but let the others finish when one fails or dies, and give its error in the place of its result.

        The pool ends after it.
        """
        try:
            self._send(fn, args)
            return self._results(timeout, tolerant=True)
        finally:
            self._end(_GRACE_OF_FAILURE)

    def _send(self, fn: Callable[..., Any], args: tuple[Any, ...]) -> None:
        if not self.alive:
            raise RankFailedError("a pool that is alive was required; this one has ended, by a failure or `close`")
        try:
            job = pickle.dumps((fn, args))
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise InvalidInputError(
                f"a module's own function and arguments that can be pickled were required; received {fn!r}: {error}"
            ) from error
        for rank, pipe in enumerate(self._pipes):
            try:
                pipe.send_bytes(job)
            except OSError as error:
                raise RankFailedError(f"rank {rank} was required to take a job; it has died: {error}") from error

    def _results(self, timeout: float, tolerant: bool) -> list[Any]:
        deadline = time.monotonic() + timeout
        results: dict[int, Any] = {}
        while len(results) < self.ranks:
            waiting = {pipe: rank for rank, pipe in enumerate(self._pipes) if rank not in results}
            ready = wait(list(waiting), max(0.0, deadline - time.monotonic()))
            if not ready:
                raise RankFailedError(f"rank(s) {sorted(waiting.values())} did not finish within {timeout:g} s")
            for pipe in ready:
                rank = waiting[pipe]  # type: ignore[index]
                try:
                    results[rank] = self._result(rank)
                except RankFailedError as error:
                    if not tolerant:
                        raise
                    results[rank] = error
        return [results[rank] for rank in range(self.ranks)]

    def _result(self, rank: int) -> Any:
        try:
            fine, payload = pickle.loads(self._pipes[rank].recv_bytes())
        except (EOFError, ConnectionResetError):
            self._processes[rank].join(_GRACE)
            code = self._processes[rank].exitcode
            raise RankFailedError(f"rank {rank} ended with exit code {code} and no result") from None
        except Exception as error:
            raise RankFailedError(f"rank {rank} returned what this process cannot unpickle: {error!r}") from error
        if not fine:
            raise RankFailedError(f"rank {rank} failed:\n{payload}")
        return payload

    def close(self) -> None:
        """End the ranks: by asking, and if they do not go, by force."""
        self._end(_GRACE)

    def _end(self, grace: float) -> None:
        for pipe in self._pipes:
            pipe.close()
        for demand in (None, BaseProcess.terminate, BaseProcess.kill):
            deadline = time.monotonic() + grace
            for process in self._processes:
                if demand is not None and process.is_alive():
                    demand(process)
            for process in self._processes:
                process.join(max(0.0, deadline - time.monotonic()))
        for process in self._processes:
            process.close()
        self._pipes, self._processes = [], []

    def __enter__(self) -> RankPool:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


def _serve(pipe: Connection, port: int, rank: int, ranks: int) -> None:
    """A rank's life: join, then one job after another until the parent hangs up."""
    joined = False
    while True:
        try:
            job = pipe.recv_bytes()
        except (EOFError, ConnectionResetError):
            break
        try:
            if not joined:
                join_group(port, rank, ranks)
                joined = True
            fn, args = pickle.loads(job)
            gc.freeze()  # what is imported stays: a full collection over torch's modules stops a rank for 0.1 s
            message = pickle.dumps((True, fn(rank, *args)))
        except BaseException:
            message = pickle.dumps((False, traceback.format_exc()))
        try:
            pipe.send_bytes(message)
        except OSError:  # the parent has given this job up
            break
    if dist.is_initialized():
        dist.destroy_process_group()


def join_group(port: int, rank: int, ranks: int, timeout: float = 300.0) -> None:
    """Make this process one of ``ranks``: its share of the cores, and a default gloo group (store at ``port``)."""
    torch.set_num_threads(threads_for(ranks))
    store = dist.TCPStore("127.0.0.1", port, None, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=timeout))


def threads_for(ranks: int) -> int:
    """Threads for each of ``ranks`` on this machine: with more than their share, the ranks fight."""
    return max(1, len(os.sched_getaffinity(0)) // ranks)
