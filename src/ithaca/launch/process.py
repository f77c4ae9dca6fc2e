"""A rank's process, as its caller has it, and the server that it is forked from."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Sequence
from multiprocessing.spawn import get_executable

from ithaca.errors import RankFailedError
from ithaca.launch.messages import Connection
from ithaca.launch.server import NUMBER

#: How long the server may take to load torch and fork, in seconds.
_START = 300.0
#: How long it may take to end once it has been told to.
_STOP = 5.0


class RankProcess:
    """A process that answers jobs. `rank.py` says how it lives, `server.py` how it ends."""

    def __init__(self, rank: int, preload: Sequence[str]) -> None:
        self.rank = rank
        #: None while it runs, and of one whose server was killed.
        self.exit_code: int | None = None
        self._ended = False
        jobs, theirs = socket.socketpair()
        self.connection = Connection(jobs)
        self._status, status = socket.socketpair()
        try:
            with theirs, status:
                _running_server().request(preload, (theirs, status))
            self.pid = self._started()
        except BaseException:
            self.close()
            raise

    def _started(self) -> int:
        number = self._number(_START)
        if number is None:
            raise RankFailedError(
                f"rank {self.rank} was required to start; the process that ranks are forked from "
                + ("has ended" if self._ended else f"has not done it within {_START:g} s")
            )
        if number < 0:
            raise RankFailedError(f"rank {self.rank} was required to start; it cannot: {os.strerror(-number)}")
        return number

    def _number(self, timeout: float) -> int | None:
        """The next that the server has to say of it; None if there is nothing within ``timeout`` seconds."""
        poll = select.poll()
        poll.register(self._status, select.POLLIN)
        if not poll.poll(max(0.0, timeout) * 1000):
            return None
        data = self._status.recv(NUMBER.size)
        if len(data) == NUMBER.size:
            return int(NUMBER.unpack(data)[0])
        self._ended = True
        return None

    def register(self, poll: select.poll) -> None:
        """Have ``poll`` wake for an answer, for its end, and for room for what is unsent."""
        poll.register(self.connection, select.POLLIN | (select.POLLOUT if self.connection.unsent else 0))
        poll.register(self._status, select.POLLIN)

    def wait(self, timeout: float) -> bool:
        """Whether it has ended within ``timeout`` seconds."""
        if not self._ended:
            code = self._number(timeout)
            if code is not None:
                self.exit_code, self._ended = code, True
        return self._ended

    def send_signal(self, number: signal.Signals) -> None:
        if not self.wait(0):
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        """End it by force, from another thread than the one that waits for it."""
        if not self._ended:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)

    def close(self) -> None:
        self.connection.close()
        self._status.close()


def end(processes: list[RankProcess], creator: int, grace: float) -> None:
    """End ranks: by hanging up, and those that do not go, by force, each time after ``grace`` seconds.

    It can be called again after an interruption. In a process that was forked from the ``creator`` it only closes what
    this one has of them.
    """
    if os.getpid() == creator:
        for process in processes:
            process.connection.hang_up()
        for demand in (None, signal.SIGTERM, signal.SIGKILL):
            deadline = time.monotonic() + grace
            if demand is not None:
                for process in processes:
                    process.send_signal(demand)
            for process in processes:
                process.wait(deadline - time.monotonic())
    while processes:
        processes[-1].close()
        processes.pop()


class _Server:
    """The caller's hold on the process of `server.py`, which ends when this does."""

    def __init__(self) -> None:
        self._creator = os.getpid()
        self._requests, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        code = (
            f"import sys; sys.path[:] = {[path or os.getcwd() for path in sys.path]!r}; "
            f"from ithaca.launch.server import serve; serve({theirs.fileno()}, {self._creator})"
        )
        with theirs:
            self._process = subprocess.Popen(
                [os.fsdecode(get_executable()), *subprocess._args_from_interpreter_flags(), "-c", code],  # type: ignore[attr-defined]
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # what a terminal sends is for the caller
            )
        self._requests.settimeout(_START)
        weakref.finalize(self, _stop, self._process, self._requests, self._creator)

    @property
    def usable(self) -> bool:
        """Whether it is this process's own, and there."""
        return self._creator == os.getpid() and self._process.poll() is None

    def request(self, preload: Sequence[str], fds: tuple[socket.socket, socket.socket]) -> None:
        """Have a rank forked."""
        message = json.dumps(list(preload)).encode()
        socket.send_fds(self._requests, [message], [sock.fileno() for sock in fds])


def _stop(process: subprocess.Popen[bytes], requests: socket.socket, creator: int) -> None:
    if os.getpid() == creator:
        with contextlib.suppress(OSError):  # it has ended already
            requests.shutdown(socket.SHUT_RDWR)
        try:
            process.wait(_STOP)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    requests.close()


_lock = threading.Lock()
_server: _Server | None = None


def _running_server() -> _Server:
    global _server
    with _lock:
        if _server is None or not _server.usable:
            _server = _Server()
        return _server
