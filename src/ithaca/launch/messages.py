"""Messages over the socket between a caller and one of its ranks: a length of 8 bytes, then so many bytes."""

from __future__ import annotations

import contextlib
import socket
import struct
from collections import deque

_LENGTH = struct.Struct("!Q")


def send(sock: socket.socket, message: bytes) -> None:
    """Send a message whole, however long that takes."""
    sock.sendall(_LENGTH.pack(len(message)))
    sock.sendall(message)


def receive(sock: socket.socket) -> bytearray:
    """The next message; `EOFError` when the other end has hung up."""
    return _receive_exactly(sock, _LENGTH.unpack(_receive_exactly(sock, _LENGTH.size))[0])


def _receive_exactly(sock: socket.socket, size: int) -> bytearray:
    data = bytearray(size)
    view = memoryview(data)
    while view:
        got = sock.recv_into(view)
        if not got:
            raise EOFError
        view = view[got:]
    return data


class Connection:
    """The caller's end. Nothing here blocks, so a rank that stands still, or reads slowly, holds nobody up."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._unsent: deque[memoryview] = deque()
        self._start_message(_LENGTH.size, header=True)

    def _start_message(self, size: int, header: bool) -> None:
        self._data, self._filled, self._in_header = bytearray(size), 0, header

    def fileno(self) -> int:
        return self._sock.fileno()

    @property
    def unsent(self) -> bool:
        """Whether something waits for `send_some`."""
        return bool(self._unsent)

    def put(self, message: bytes) -> None:
        """Have a message sent by this and later calls of `send_some`."""
        self._unsent += (memoryview(_LENGTH.pack(len(message))), memoryview(message))
        self.send_some()

    def send_some(self) -> None:
        """Send what goes without waiting. That the rank is gone is found where its answer is read."""
        while self._unsent:
            try:
                sent = self._sock.send(self._unsent[0])
            except BlockingIOError:
                return
            except OSError:
                self._unsent.clear()
                return
            if sent == len(self._unsent[0]):
                self._unsent.popleft()
            else:
                self._unsent[0] = self._unsent[0][sent:]

    def receive_some(self) -> bytearray | None:
        """A message, if the rest of one is there; `EOFError` when the rank has hung up."""
        while True:
            while self._filled < len(self._data):
                try:
                    got = self._sock.recv_into(memoryview(self._data)[self._filled :])
                except BlockingIOError:
                    return None
                except ConnectionError:  # it ended with something unread
                    got = 0
                if not got:
                    raise EOFError
                self._filled += got
            data, was_header = self._data, self._in_header
            if was_header:
                self._start_message(_LENGTH.unpack(data)[0], header=False)
            else:
                self._start_message(_LENGTH.size, header=True)
                return data

    def hang_up(self) -> None:
        """End the connection also where a process forked from this one has the socket too."""
        self._unsent.clear()
        with contextlib.suppress(OSError):  # it has ended already
            self._sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._unsent.clear()
        self._sock.close()
