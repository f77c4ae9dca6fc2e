"""The copy stream: tasks of an exchange, run in issue order, beside the caller's own work where a core is free.

A task is a generator that yields a `Wait` wherever it depends on a peer, and is resumed once that has come. So the
same code runs on a thread that sleeps in each wait, or inline: then `submit` and every later call carry the tasks as
far as they go without blocking, and `flush` carries them to their end.
"""

from __future__ import annotations

import os
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Generator

from ithaca.errors import ExchangeClosedError
from ithaca.exchange.peer_memory.interface import PeerMemory, Wait

Task = Generator[Wait, None, None]

COPY_MODES = ("auto", "thread", "inline")


class CopyStream(ABC):
    """After a task has failed, those behind it are dropped, until `flush` has raised the error."""

    @abstractmethod
    def submit(self, task: Task) -> None: ...

    @abstractmethod
    def flush(self) -> None:
        """Block until all tasks are done; raise the error of the one that failed."""

    @abstractmethod
    def close(self) -> None:
        """Drop what has not run. Never blocks for a peer."""


class InlineStream(CopyStream):
    """Tasks run in the caller, whenever it comes by."""

    def __init__(self, memory: PeerMemory) -> None:
        self._memory = memory
        self._tasks: deque[Task] = deque()
        self._waiting: Wait | None = None
        self._error: BaseException | None = None
        self._closed = False

    def submit(self, task: Task) -> None:
        if self._closed:
            raise ExchangeClosedError("a task was submitted to a copy stream that is closed")
        if self._error is None:
            self._tasks.append(task)
            self._advance(block=False)

    def flush(self) -> None:
        self._advance(block=True)
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def close(self) -> None:
        self._closed = True
        self._drop()

    def _drop(self) -> None:
        self._tasks.clear()
        self._waiting = None

    def _advance(self, *, block: bool) -> None:
        try:
            while self._tasks:
                if self._waiting is not None and not self._memory.wait(self._waiting, block=block):
                    return
                self._waiting = next(self._tasks[0], None)
                if self._waiting is None:
                    self._tasks.popleft()
        except BaseException as error:
            self._drop()
            self._error = error


class ThreadStream(CopyStream):
    """Tasks run on one thread of their own; it alone waits for peers, so that one thread reads what they send."""

    def __init__(self, memory: PeerMemory, name: str) -> None:
        self._memory = memory
        self._tasks: deque[Task] = deque()
        self._error: BaseException | None = None
        self._busy = self._closed = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, task: Task) -> None:
        with self._changed:
            if self._closed:
                raise ExchangeClosedError("a task was submitted to a copy stream that is closed")
            if self._error is None:
                self._tasks.append(task)
                self._changed.notify_all()

    def flush(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: not (self._tasks or self._busy))
            if self._closed and self._error is None:
                raise ExchangeClosedError("the copy stream was closed while tasks of it were waited for")
            if self._error is not None:
                error, self._error = self._error, None
                raise error

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._tasks.clear()
            self._changed.notify_all()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._tasks or self._closed)
                if self._closed:
                    return
                task, self._busy = self._tasks.popleft(), True
            error: BaseException | None = None
            try:
                for wait in task:
                    self._memory.wait(wait, block=True)
            except BaseException as raised:
                error = raised
            with self._changed:
                self._busy = False
                if error is not None:
                    self._error = error
                    self._tasks.clear()
                self._changed.notify_all()


def copy_stream(memory: PeerMemory, mode: str, name: str) -> CopyStream:
    """A thread where every rank of this host has a core to spare for it, else inline; ``mode`` can force either."""
    spare = len(os.sched_getaffinity(0)) >= 2 * memory.world_size
    if mode == "thread" or (mode == "auto" and spare):
        return ThreadStream(memory, name)
    return InlineStream(memory)
