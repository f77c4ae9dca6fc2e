"""What slots need of the system, tried and not looked up: a kernel, a sandbox or a seccomp profile may refuse it."""

from __future__ import annotations

import errno
import io
import os
import secrets
import socket
from collections.abc import Callable, Mapping

from ithaca.exchange.peer_memory.handshake import peer_of
from ithaca.exchange.peer_memory.segment import Segment, allocate

#: Not a lack of the system but of the moment.
_SCARCE = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)


def lacking(needs: Mapping[str, Callable[[], object]]) -> list[str]:
    """The names of ``needs`` that fail here, with the reason.

    `OSError` where descriptors or memory have run out, which says nothing about the system.
    """
    missing = []
    for name, trial in needs.items():
        try:
            trial()
        except AttributeError:
            missing.append(name)
        except OSError as error:
            if error.errno in _SCARCE:
                raise
            missing.append(f"{name} ({error.strerror or error})")
    return missing


def _memory() -> None:
    with allocate(1) as memory:
        Segment.map(memory.fileno(), 1)


def _sockets() -> None:
    with (
        socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener,
        socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as caller,
    ):
        address = f"\0ithaca-{secrets.token_hex(16)}"
        listener.bind(address)
        listener.listen()
        caller.connect(address)
        if peer_of(caller) != (os.getpid(), os.getuid()):
            raise OSError(errno.EPROTO, "the kernel does not say who is at the other end")
        callee, _ = listener.accept()
        with callee:
            socket.send_fds(caller, [b"one"], [listener.fileno()])
            callee.setblocking(False)
            io.FileIO(os.dup(listener.fileno())).close()  # where there is no room for one, it gets lost in silence
            received = [*map(io.FileIO, socket.recv_fds(callee, 8, 1)[1])]
            for each in received:
                each.close()
            if not received:
                raise OSError(errno.EPROTO, "a descriptor that was sent did not arrive")


NEEDS: Mapping[str, Callable[[], object]] = {
    "memfd_create": _memory,
    "eventfd": lambda: io.FileIO(os.eventfd(0, os.EFD_SEMAPHORE | os.EFD_NONBLOCK | os.EFD_CLOEXEC)).close(),
    "pidfd_open": lambda: io.FileIO(os.pidfd_open(os.getpid())).close(),
    "sockets that carry descriptors": _sockets,
}
