"""How the ranks of one Linux host find each other: one Unix socket a pair, and proof of who is at its other end.

The process group's store carries an address and a nonce for each rank. Sockets live in the abstract namespace, so
nothing has a name in any file system; a connection counts only if the kernel says that it comes from the same user
and from the very process that published the nonce.
"""

from __future__ import annotations

import contextlib
import io
import os
import secrets
import socket
import struct
from dataclasses import dataclass

from ithaca.errors import ExchangeUnavailableError
from ithaca.exchange.rendezvous import Facts, Rendezvous

_HELLO = struct.Struct("<I32s")  # rank, nonce of the rank that is called
_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid
#: How many callers are looked at in one go: between two, the rank sees whether the others are still there.
_CALLERS = 256


@dataclass
class Peer:
    """Another rank's process: a non-blocking ``SOCK_SEQPACKET`` socket to it, and a pidfd that tells of its end."""

    rank: int
    socket: socket.socket
    process: io.FileIO

    def close(self) -> None:
        """May be called again, and finishes then what an interrupt left open."""
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)  # a child forked meanwhile holds it open too
        self.socket.close()
        self.process.close()


def connect_peers(rendezvous: Rendezvous) -> dict[int, Peer]:
    """Connect to every other rank of the group. Collective; whatever fails, nothing stays open."""
    peers: dict[int, Peer] = {}
    with contextlib.ExitStack() as opened, socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        address, nonce = f"\0ithaca-{secrets.token_hex(16)}", secrets.token_hex(16)
        listener.setblocking(False)
        listener.bind(address)
        listener.listen(socket.SOMAXCONN)  # anybody on this host can call, and be in the way
        mine = {"address": address, "nonce": nonce, "pid": os.getpid()}
        facts = rendezvous.share(
            "address", mine, "its socket address", lambda rank, theirs: rendezvous.watch(rank, theirs["pid"])
        )
        callers = _Callers(rendezvous, listener, nonce, facts, opened)
        for other in range(rendezvous.rank):
            peers[other] = _call(rendezvous, other, facts[other], opened)
        rendezvous.until(callers.are_here, "a connection", callers.missing, callers.wakers)
        peers.update(callers.peers)
        opened.pop_all()
    return peers


def _call(rendezvous: Rendezvous, other: int, facts: Facts, opened: contextlib.ExitStack) -> Peer:
    connection = opened.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
    connection.setblocking(False)

    def connected() -> bool:
        try:
            connection.connect(facts["address"])
        except (BlockingIOError, ConnectionRefusedError):  # too many callers, or it has given up and will say so
            return False
        return True

    rendezvous.until(connected, "room for one more caller", {other})
    if peer_of(connection) != (facts["pid"], os.getuid()):
        raise ExchangeUnavailableError(
            f"rank {rendezvous.rank} reached a process that is not rank {other} at its address"
        )
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # gone again, which is told by other means
        connection.send(_HELLO.pack(rendezvous.rank, facts["nonce"].encode()))
    return _peer(rendezvous, other, connection, opened)


class _Callers:
    """Those who call this rank: the ranks above it, and strangers, who are hung up on, not obeyed."""

    def __init__(
        self,
        rendezvous: Rendezvous,
        listener: socket.socket,
        nonce: str,
        facts: list[Facts],
        opened: contextlib.ExitStack,
    ) -> None:
        self._rendezvous, self._listener, self._nonce, self._facts = rendezvous, listener, nonce.encode(), facts
        self._opened = opened
        self.missing = set(range(rendezvous.rank + 1, rendezvous.world_size))
        self.peers: dict[int, Peer] = {}
        #: The listener, and connections from processes that are expected, which have not said a word yet.
        self.wakers = [listener]

    def are_here(self) -> bool:
        for _ in range(_CALLERS):
            if not self.missing:
                break
            try:
                connection = self._opened.enter_context(self._listener.accept()[0])
            except BlockingIOError:
                break
            # The caller's process first: a stranger who connects and says nothing must not be waited for.
            if any(peer_of(connection) == (self._facts[rank]["pid"], os.getuid()) for rank in self.missing):
                connection.setblocking(False)
                self.wakers.append(connection)
            else:
                connection.close()
        for connection in self.wakers[1:]:
            try:
                self._listen(connection)
            except BlockingIOError:
                continue
            self.wakers.remove(connection)
        return not self.missing

    def _listen(self, connection: socket.socket) -> None:
        try:
            hello = connection.recv(_HELLO.size + 1)
        except ConnectionResetError:
            hello = b""
        if len(hello) == _HELLO.size:
            caller, said = _HELLO.unpack(hello)
            if (
                caller in self.missing
                and secrets.compare_digest(said, self._nonce)
                and peer_of(connection) == (self._facts[caller]["pid"], os.getuid())
            ):
                self.peers[caller] = _peer(self._rendezvous, caller, connection, self._opened)
                self.missing.discard(caller)
                return
        connection.close()


def peer_of(connection: socket.socket) -> tuple[int, int]:
    """Process and user at the other end, by what the kernel says."""
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _ = _CREDENTIALS.unpack(raw)
    return pid, uid


def _peer(rendezvous: Rendezvous, rank: int, connection: socket.socket, opened: contextlib.ExitStack) -> Peer:
    peer = Peer(rank, connection, rendezvous.process(rank))
    opened.callback(peer.close)
    return peer
