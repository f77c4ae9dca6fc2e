"""How the ranks of one Linux host find each other: one Unix socket a pair, and proof of who is at its other end.

The process group's store carries an address and a nonce for each rank. Sockets live in the abstract namespace, so
nothing has a name in any file system; a connection counts only if the kernel says that it comes from the same user
and from the very process that published the nonce.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import struct
import time
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from torch.distributed import DistStoreError, Store

from ithaca.errors import ExchangeUnavailableError, PeerTimeoutError

_HELLO = struct.Struct("<I32s")  # rank, nonce of the rank that is called
_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid


@dataclass
class Peer:
    """Another rank's process: a non-blocking ``SOCK_SEQPACKET`` socket to it, and a pidfd that tells of its end."""

    rank: int
    socket: socket.socket
    pidfd: int

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)  # a child forked meanwhile holds it open too
        self.socket.close()
        os.close(self.pidfd)


def read_facts(store: Store, key: str, rank: int, world_size: int, timeout: float, what: str) -> list[dict[str, Any]]:
    """Wait until every rank has put its facts under ``key``; ``PeerTimeoutError`` names the first that has not."""
    facts = []
    deadline = time.monotonic() + timeout
    for other in range(world_size):
        name = f"{key}/{other}"
        try:
            store.wait([name], timedelta(seconds=max(0.01, deadline - time.monotonic())))
        except DistStoreError:
            raise PeerTimeoutError(
                f"rank {rank} waited {timeout:g} s for {what} of rank {other}, which has not published it"
            ) from None
        facts.append(json.loads(store.get(name)))
    return facts


def put_facts(store: Store, key: str, rank: int, facts: dict[str, Any]) -> None:
    store.set(f"{key}/{rank}", json.dumps(facts))


def connect_peers(rank: int, world_size: int, store: Store, key: str, timeout: float) -> dict[int, Peer]:
    """Connect to every other rank of the group. Collective; whatever fails, nothing stays open."""
    deadline = time.monotonic() + timeout
    peers: dict[int, Peer] = {}
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        address, nonce = f"\0ithaca-{secrets.token_hex(16)}", secrets.token_hex(16)
        listener.bind(address)
        listener.listen(world_size)
        put_facts(store, key, rank, {"address": address, "nonce": nonce, "pid": os.getpid()})
        facts = read_facts(store, key, rank, world_size, timeout, "the socket address")
        try:
            for other in range(rank):
                peers[other] = _call(rank, other, facts[other], deadline)
            while len(peers) < world_size - 1:
                peer = _accept(listener, rank, nonce, facts, deadline, missing=set(range(world_size)) - {rank, *peers})
                if peer is not None:
                    peers[peer.rank] = peer
        except BaseException:
            for peer in peers.values():
                peer.close()
            raise
    return peers


def _call(rank: int, other: int, facts: dict[str, Any], deadline: float) -> Peer:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        connection.settimeout(max(0.01, deadline - time.monotonic()))
        connection.connect(facts["address"])
        if not _is(connection, facts["pid"]):
            raise ExchangeUnavailableError(f"rank {rank} reached a process that is not rank {other} at its address")
        connection.sendall(_HELLO.pack(rank, facts["nonce"].encode()))
        return _peer(other, connection, facts["pid"])
    except OSError as error:
        connection.close()
        raise ExchangeUnavailableError(f"rank {rank} could not connect to rank {other}: {error}") from error
    except BaseException:
        connection.close()
        raise


def _accept(
    listener: socket.socket, rank: int, nonce: str, facts: list[dict[str, Any]], deadline: float, missing: set[int]
) -> Peer | None:
    """The next caller, or None where it is nobody that was expected: strangers are hung up on, not obeyed."""
    listener.settimeout(max(0.01, deadline - time.monotonic()))
    try:
        connection, _ = listener.accept()
    except TimeoutError:
        raise PeerTimeoutError(
            f"rank {rank} waited until the deadline for a connection from rank(s) {sorted(missing)}"
        ) from None
    try:
        # The caller's process first: a stranger who connects and says nothing must not be waited for.
        if not any(_is(connection, facts[rank]["pid"]) for rank in missing):
            connection.close()
            return None
        connection.settimeout(max(0.01, deadline - time.monotonic()))
        hello = connection.recv(_HELLO.size + 1)
        if len(hello) == _HELLO.size:
            caller, said = _HELLO.unpack(hello)
            if (
                caller in missing
                and secrets.compare_digest(said, nonce.encode())
                and _is(connection, facts[caller]["pid"])
            ):
                return _peer(caller, connection, facts[caller]["pid"])
    except OSError:
        pass
    connection.close()
    return None


def _is(connection: socket.socket, pid: int) -> bool:
    """Whether the kernel says that the other end is process ``pid`` of this user."""
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    peer_pid, uid, _ = _CREDENTIALS.unpack(raw)
    return bool(peer_pid == pid and uid == os.getuid())


def _peer(rank: int, connection: socket.socket, pid: int) -> Peer:
    pidfd = os.pidfd_open(pid)
    connection.setblocking(False)
    return Peer(rank, connection, pidfd)
