"""The process that ranks are forked from. It has torch loaded, no threads, and ends with its caller.

It alone is a parent to the ranks: it tells the caller how each ends, ends all of them when the caller is gone, however
that came about, and the kernel ends them if it is itself killed.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import importlib
import json
import os
import select
import signal
import socket
import struct
import sys
import traceback
from collections.abc import Mapping
from typing import Any

from ithaca.launch.rank import live

#: A rank's pid, or less than 0 for the errno of a fork that failed; later, its exit code.
NUMBER = struct.Struct("!q")
#: How often it is looked whether the caller is there, in ms. Its end of the socket closes with it, and is seen at once,
#: but for a process that the caller forked and that has a copy.
_LOOK = 1000
_PR_SET_PDEATHSIG = 1
#: Signals that whoever ends the caller may send to all that is near: this process goes when the caller does.
_NOT_ITS_OWN = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def serve(requests: int, caller: int) -> None:
    """Fork a rank for each message on the socket ``requests``, for as long as the process ``caller`` lives.

    A message names modules to import before the fork, and brings two descriptors: the rank's end of its connection,
    and one to which this process writes a `NUMBER` for the pid and one for the exit code.
    """
    signal.pthread_sigmask(signal.SIG_SETMASK, ())  # what the caller's thread has blocked is its own
    woken, wake = socket.socketpair()
    woken.setblocking(False)
    wake.setblocking(False)
    signal.set_wakeup_fd(wake.fileno())
    handlers: dict[signal.Signals, Any] = {
        signal.SIGCHLD: lambda *_: None,
        **dict.fromkeys(_NOT_ITS_OWN, signal.SIG_IGN),
    }
    previous = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    ranks: dict[int, socket.socket] = {}
    with socket.socket(fileno=requests) as callers_end:
        poll = select.poll()
        poll.register(callers_end, select.POLLIN)
        poll.register(woken, select.POLLIN)
        while os.getppid() == caller:
            ready = {fd for fd, _ in poll.poll(_LOOK)}
            with contextlib.suppress(BlockingIOError):
                woken.recv(4096)
            _report_ends(ranks)
            if callers_end.fileno() not in ready:
                continue
            modules, fds, _, _ = socket.recv_fds(callers_end, 1 << 16, 2, socket.MSG_CMSG_CLOEXEC)
            if not modules:
                break
            jobs, status = (socket.socket(fileno=fd) for fd in fds)
            jobs.setblocking(True)
            status.setblocking(True)
            _import(json.loads(modules))
            server, number = os.getpid(), _fork()
            if number == 0:
                for mine in (callers_end, woken, wake, status, *ranks.values()):
                    mine.close()
                _become_rank(jobs, server, previous)
            jobs.close()
            _tell(status, number)
            if number > 0:
                ranks[number] = status
            else:
                status.close()
    for pid in ranks:
        _kill_group(pid)
    os._exit(0)


def _import(modules: list[str]) -> None:
    for name in modules:
        with contextlib.suppress(Exception):  # the rank that needs it says so
            importlib.import_module(name)
    gc.freeze()  # a collection in a rank would write to, and so copy, all pages that they share


def _fork() -> int:
    try:
        return os.fork()
    except OSError as error:
        return -(error.errno or 1)


def _tell(status: socket.socket, number: int) -> None:
    with contextlib.suppress(OSError):  # the caller has given it up
        status.sendall(NUMBER.pack(number))


def _report_ends(ranks: dict[int, socket.socket]) -> None:
    for pid in list(ranks):
        if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            continue
        _kill_group(pid)  # while nobody else can have its number
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        status = ranks.pop(pid)
        _tell(status, code)
        status.close()


def _kill_group(rank: int) -> None:
    """A rank with all that it has started."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(rank, signal.SIGKILL)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(rank, signal.SIGKILL)


def _become_rank(jobs: socket.socket, server: int, handlers: Mapping[signal.Signals, Any]) -> None:
    code = 1
    try:
        os.setsid()
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != server:  # it ended before that call
            os._exit(1)
        signal.set_wakeup_fd(-1)
        for number, handler in handlers.items():
            signal.signal(number, handler)
        live(jobs)
        atexit._run_exitfuncs()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        os._exit(code)
