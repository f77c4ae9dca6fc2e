"""A rank's life: it becomes like its caller, joins the group, and does its jobs until the caller hangs up."""

from __future__ import annotations

import contextlib
import gc
import io
import os
import pickle
import socket
import sys
import traceback
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ithaca.launch.job import Outcome, Setup, UnguardedError, importing, prepare
from ithaca.launch.messages import receive, send


def live(jobs: socket.socket) -> None:
    """Answer each message of ``jobs`` with a pickled `Outcome` and its value."""
    try:
        setup: Setup = pickle.loads(receive(jobs))
        rank = _Rank(setup)
        pid = os.getpid()
        while True:
            answer = rank.answer(receive(jobs))
            if os.getpid() != pid:  # a process that the job has forked, and let return
                os._exit(0)
            send(jobs, answer)
            del answer
            gc.collect(1)  # Python counts objects, not bytes: cycles of a few large tensors would wait for 700 jobs
    except (EOFError, OSError):  # the caller wants no more of it
        pass
    if dist.is_initialized():
        dist.destroy_process_group()


class _Rank:
    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        self._joined = self._frozen = False
        self._unfit = b""
        try:
            prepare(setup)
        except BaseException as error:
            self._unfit = _failure(error)

    def answer(self, job: bytearray) -> bytes:
        """Do a job. Nothing of it stays behind but what it left itself."""
        if self._unfit:
            return self._unfit
        try:
            if not self._joined:
                join_group(self._setup.port, self._setup.rank, self._setup.ranks)
                self._joined = True
            return pickle.dumps((Outcome.RESULT, self._do(job)))
        except BaseException as error:
            return _failure(error)
        finally:
            for stream in (sys.stdout, sys.stderr):
                with contextlib.suppress(Exception):
                    stream.flush()

    def _do(self, job: bytearray) -> Any:
        unpickler = pickle.Unpickler(io.BytesIO(job))
        with importing():
            fn = unpickler.load()
            if not self._frozen:
                # What is imported stays: a full collection over torch's modules stops a rank for 0.1 s. Once, before
                # there is anything of a job: what is frozen as garbage is never collected.
                gc.freeze()
                self._frozen = True
            args = unpickler.load()
        return fn(self._setup.rank, *args)


def _failure(error: BaseException) -> bytes:
    if isinstance(error, UnguardedError):
        return pickle.dumps((Outcome.UNGUARDED, str(error)))
    try:
        text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    except BaseException as another:  # the caller's exceptions can do anything when they are asked for their text
        text = f"{type(error).__name__}, which cannot be shown: that raised {type(another).__name__}"
    return pickle.dumps((Outcome.FAILED, text))


def join_group(port: int, rank: int, ranks: int, timeout: float = 300.0) -> None:
    """Make this process one of ``ranks``: its share of the cores, and a default gloo group (store at ``port``).

    The group's own connections are on the loopback, unless ``GLOO_SOCKET_IFNAME`` says otherwise.
    """
    torch.set_num_threads(threads_for(ranks))
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    store = dist.TCPStore("127.0.0.1", port, None, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=timeout))


def threads_for(ranks: int) -> int:
    """Threads for each of ``ranks`` on this machine: with more than their share, the ranks fight."""
    return max(1, len(os.sched_getaffinity(0)) // ranks)
