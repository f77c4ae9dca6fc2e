"""Peer memory between CPU ranks of one Linux host: memfd, eventfd, pidfd, and one Unix socket a pair.

Nothing here has a name in any file system, so nothing can be left behind and no other user can open it. Memory is
sealed against resizing before it is handed over, so that a peer cannot make this rank fault. It is never unmapped
by hand: ``mmap.close`` succeeds under a living tensor, whose next read would then be a segmentation fault; the last
tensor over a mapping ends it.
A descriptor belongs to a `FileIO`, closed once, however often it is asked, or when collected: no interrupt leaks one.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import select
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Generator, Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ithaca import errors
from ithaca.errors import ExchangeClosedError, GrowthError, IthacaError, PeerDiedError, PeerTimeoutError
from ithaca.exchange.peer_memory.handshake import Peer, connect_peers
from ithaca.exchange.peer_memory.interface import Message, PeerMemory, Signal, Wait
from ithaca.exchange.peer_memory.segment import Segment, allocate
from ithaca.exchange.refusal import told
from ithaca.exchange.rendezvous import Rendezvous
from ithaca.plan import aligned

_MESSAGE_NBYTES = 4096
#: Longest that a rank past its deadline listens for why the late one is late, in seconds.
_LISTEN = 0.5
_HEADER, _GROWTH, _MAPPED, _ABORT = b"H", b"G", b"M", b"A"
_MOST = 2**62
_GROWTH_FORMAT = struct.Struct("<16sqq?")  # role, generation, capacity, whether this rank could
_MAPPED_FORMAT = struct.Struct("<q?")  # generation, whether this rank could
#: First byte of a message to its kind, and the least that must follow it.
_KINDS = {
    _HEADER: (Message.HEADER, 0),
    _GROWTH: (Message.GROWTH, _GROWTH_FORMAT.size),
    _MAPPED: (Message.MAPPED, _MAPPED_FORMAT.size),
}
#: Which errors keep their type when a rank passes on why it gave up.
_CONTAGIOUS = ("PeerDiedError", "PeerTimeoutError")
_Received = tuple[bytes, list[io.FileIO]]


@dataclass
class _Channel:
    """All that this rank holds for one lane: every rank's slot, and the eventfds both ways."""

    segments: list[Segment] = field(default_factory=list)
    #: ``mine[signal][rank]`` is what I wait on for ``rank``; ``theirs[signal][rank]`` is what ``rank`` waits on for me.
    mine: dict[Signal, dict[int, int]] = field(default_factory=dict)
    theirs: dict[Signal, dict[int, int]] = field(default_factory=dict)
    #: What the descriptors of both tables belong to.
    owners: list[io.FileIO] = field(default_factory=list)

    def close(self) -> None:
        for owner in self.owners:
            owner.close()
        self.mine, self.theirs, self.segments = {}, {}, []


class HostPeerMemory(PeerMemory):
    """See the module. Made by `connect`, which is collective over the group whose store it is given."""

    def __init__(self, rank: int, world_size: int, peers: dict[int, Peer], timeout: float) -> None:
        self.rank, self.world_size, self.generation = rank, world_size, 0
        self.timeout = timeout
        #: Stamps lie behind the slot in the same segment.
        self._stamps_nbytes = aligned(8 * world_size)
        self._peers = peers
        self._channels: dict[str, _Channel] = {}
        self._inbox: dict[Message, dict[int, deque[_Received]]] = {
            kind: {r: deque() for r in range(world_size)} for kind in Message
        }
        self._hung_up: set[int] = set()
        self._ended = self._closed = False
        self._wake = io.FileIO(os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC))
        # A credit may be given by one thread while another closes: the descriptor must not be reused in between.
        self._closing = threading.RLock()  # a collector may run the end of this object inside `signal`

    @classmethod
    def connect(cls, rendezvous: Rendezvous) -> HostPeerMemory:
        """One for each rank that takes part in ``rendezvous``."""
        peers = connect_peers(rendezvous)
        try:
            return cls(rendezvous.rank, rendezvous.world_size, peers, rendezvous.timeout)
        except BaseException:
            for peer in peers.values():
                peer.close()
            raise

    # -- announcements ---------------------------------------------------------------------------------------------

    def announce(self, header: bytes) -> None:
        for rank in self._peers:
            self._send(rank, _HEADER + header)

    def announcement(self, rank: int) -> bytes:
        return self._inbox[Message.HEADER][rank].popleft()[0]

    def put_back(self, rank: int, header: bytes) -> None:
        self._inbox[Message.HEADER][rank].appendleft((header, []))

    # -- slots -----------------------------------------------------------------------------------------------------

    def capacity(self, role: str) -> tuple[int, ...]:
        channel = self._channels.get(role)
        return tuple(s.capacity - self._stamps_nbytes for s in channel.segments) if channel else ()

    def trim(self) -> None:
        for channel in self._channels.values():
            channel.segments = []
        self.generation += 1

    def slot(self, rank: int, role: str, nbytes: int) -> Tensor:
        if nbytes == 0:  # a `frombuffer` of count zero raises
            return torch.empty(0, dtype=torch.uint8)
        return torch.frombuffer(self._channels[role].segments[rank].memory, dtype=torch.uint8, count=nbytes)

    def stamps(self, rank: int, role: str) -> Tensor:
        segment = self._channels[role].segments[rank]
        return torch.frombuffer(
            segment.memory, dtype=torch.int64, count=self.world_size, offset=segment.capacity - self._stamps_nbytes
        )

    def grow(self, role: str, capacities: tuple[int, ...]) -> Generator[Wait, None, None]:
        """Two rounds over the sockets: everybody's descriptors, then everybody's word that they are mapped."""
        fds: list[io.FileIO] = []
        segments: dict[int, Segment] = {}
        try:
            yield from self._commit(role, capacities, fds, segments)
        except BaseException:
            for fd in fds:
                fd.close()
            segments.clear()  # whoever keeps the error keeps its frames, and they would keep the mappings
            raise

    def _commit(
        self, role: str, capacities: tuple[int, ...], fds: list[io.FileIO], segments: dict[int, Segment]
    ) -> Generator[Wait, None, None]:
        """``fds`` and ``segments`` collect what is open and must not stay so if this fails."""
        capacities = tuple(nbytes + self._stamps_nbytes for nbytes in capacities)
        me, capacity, generation = self.rank, capacities[self.rank], self.generation + 1
        first = role not in self._channels
        mine: dict[Signal, dict[int, int]] = {signal: {} for signal in Signal}
        theirs: dict[Signal, dict[int, int]] = {signal: {} for signal in Signal}
        memory, problem = None, ""
        try:
            memory = allocate(capacity)
            segments[me] = Segment.map(memory.fileno(), capacity)
            for rank in range(self.world_size) if first else ():
                for signal in Signal:
                    flags = os.EFD_SEMAPHORE | os.EFD_NONBLOCK | os.EFD_CLOEXEC
                    fds.append(io.FileIO(os.eventfd(signal is Signal.CREDIT, flags)))
                    mine[signal][rank] = fds[-1].fileno()
                    if rank == me:
                        fds.append(io.FileIO(os.dup(mine[signal][rank])))
                        theirs[signal][rank] = fds[-1].fileno()
        except (OSError, OverflowError) as error:
            problem = f"rank {me} could not make {capacity} bytes for lane {role}: {error}"
        head = _GROWTH_FORMAT.pack(role.encode(), generation, min(capacity, _MOST), not problem)
        try:
            for rank in self._peers:
                signals = [mine[signal][rank] for signal in Signal if first and not problem]
                handed = [memory.fileno(), *signals] if memory and not problem else []
                self._send(rank, _GROWTH + head + _encode(problem), handed)
        finally:
            if memory:
                memory.close()

        answers = yield from self._round(Message.GROWTH, role, "its new memory")
        fds.extend(fd for _, received in answers.values() for fd in received)
        required_fds = 3 if first else 1
        for rank, (payload, received) in answers.items():
            their_role, their_generation, their_capacity, fine = _GROWTH_FORMAT.unpack_from(payload)
            said = (their_role.rstrip(b"\0"), their_generation, their_capacity)
            required = (role.encode(), generation, capacities[rank])
            if not fine:
                problem = problem or payload[_GROWTH_FORMAT.size :].decode(errors="replace")
            elif said != required or len(received) != required_fds:
                problem = problem or (
                    f"rank {me} required {required} and {required_fds} descriptors of rank {rank}; "
                    f"received {said} and {len(received)}"
                )
            elif not problem:
                try:
                    segments[rank] = Segment.map(received[0].fileno(), their_capacity)
                    for signal, fd in zip(Signal, received[1:], strict=False):
                        theirs[signal][rank] = fd.fileno()
                except (OSError, OverflowError, ValueError) as error:
                    problem = f"rank {me} could not map the memory of rank {rank}: {error}"
        for rank in self._peers:
            self._send(rank, _MAPPED + _MAPPED_FORMAT.pack(generation, not problem) + _encode(problem))
        for rank, (payload, _) in (yield from self._round(Message.MAPPED, role, "its word on new memory")).items():
            if _MAPPED_FORMAT.unpack_from(payload) != (generation, True):
                problem = problem or f"rank {rank}: {payload[_MAPPED_FORMAT.size :].decode(errors='replace')}"
        self.generation = generation
        if problem:
            raise GrowthError(f"lane {role} could not grow to {capacities} bytes, seen from rank {me}: {problem}")

        for _, received in answers.values():
            received[0].close()  # the mapping stays without it
        channel = self._channels.setdefault(role, _Channel(mine=mine, theirs=theirs, owners=[*fds]))
        fds.clear()
        channel.segments = [segments[rank] for rank in range(self.world_size)]

    def _round(self, kind: Message, role: str, what: str) -> Generator[Wait, None, dict[int, _Received]]:
        yield Wait(kind, role, set(self._peers), lambda: f"{what} for lane {role}")
        return {rank: self._inbox[kind][rank].popleft() for rank in self._peers}

    # -- signals ---------------------------------------------------------------------------------------------------

    def signal(self, signal: Signal, role: str, ranks: Iterable[int]) -> None:
        with self._closing:
            if not self._closed:  # else there is nobody left to tell
                for rank in ranks:
                    os.eventfd_write(self._channels[role].theirs[signal][rank], 1)

    def wait(self, wait: Wait, *, block: bool) -> bool:
        deadline = time.monotonic() + self.timeout
        while True:
            self._take(wait)
            if not wait.pending:
                return True
            remaining = deadline - time.monotonic() if block else 0.0
            if block and remaining <= 0:
                raise self._late(wait)
            if not self._poll(wait, remaining) and not block:
                return False

    def _late(self, wait: Wait) -> PeerTimeoutError:
        """The error of a wait that is past its deadline.

        Who is late may only be waiting for another: two ranks whose deadlines end together tell each other, and listen.
        """
        text = f"rank {self.rank} waited {self.timeout:g} s for {wait.expecting()} from rank(s) {sorted(wait.pending)}"
        self.abort(PeerTimeoutError(text))
        listening = {self._peers[r].socket.fileno(): r for r in wait.pending if r in self._peers}
        until = time.monotonic() + min(_LISTEN, self.timeout / 10)
        while listening and (seconds := until - time.monotonic()) > 0:
            poller = select.poll()
            for fd in listening:
                poller.register(fd, select.POLLIN)
            for fd, _ in poller.poll(seconds * 1000):
                rank = listening[fd]
                try:
                    self._receive(rank)
                except IthacaError as theirs:
                    text += f"; {theirs}"
                    self._hung_up.add(rank)
                if rank in self._hung_up:
                    del listening[fd]
        return PeerTimeoutError(text)

    def _take(self, wait: Wait) -> None:
        if self._ended:
            raise ExchangeClosedError(f"rank {self.rank} closed the exchange while it waited for {wait.expecting()}")
        for rank in tuple(wait.pending):
            if isinstance(wait.kind, Message):
                taken = bool(self._inbox[wait.kind][rank])
            else:
                try:
                    os.eventfd_read(self._channels[wait.role].mine[wait.kind][rank])
                    taken = True
                except BlockingIOError:
                    taken = False
            if taken:
                wait.pending.discard(rank)

    def _poll(self, wait: Wait, seconds: float) -> bool:
        """Sleep until something that matters to ``wait`` may have come; False where nothing did in time."""
        poller = select.poll()
        poller.register(self._wake, select.POLLIN)
        sockets: dict[int, int] = {}
        deaths: dict[int, int] = {}
        for rank, peer in self._peers.items():
            if rank not in self._hung_up:
                sockets[peer.socket.fileno()] = rank
                poller.register(peer.socket.fileno(), select.POLLIN)
            if rank in wait.pending:
                deaths[peer.process.fileno()] = rank
                poller.register(peer.process, select.POLLIN)
        if isinstance(wait.kind, Signal):
            for rank in wait.pending:
                poller.register(self._channels[wait.role].mine[wait.kind][rank], select.POLLIN)
        if self._hung_up & wait.pending:
            seconds = 0.0  # known already: no event will tell of it again
        events = poller.poll(max(0.0, seconds) * 1000)
        for fd, _ in events:
            if fd in sockets:
                self._receive(sockets[fd])
        gone = {deaths[fd] for fd, _ in events if fd in deaths} | (self._hung_up & wait.pending)
        if gone:
            for rank in gone - self._hung_up:
                self._receive(rank)
            self._take(wait)  # what it said before its end still counts
            for rank in sorted(gone & wait.pending):
                raise PeerDiedError(
                    f"rank {rank} (process gone, or its exchange closed) was expected to send {wait.expecting()}; "
                    f"seen from rank {self.rank}"
                )
        return bool(events)

    # -- sockets ---------------------------------------------------------------------------------------------------

    def _send(self, rank: int, message: bytes, fds: list[int] | None = None) -> None:
        """A peer that is gone is not told; the wait for its answer names it."""
        connection = self._peers[rank].socket
        deadline = time.monotonic() + self.timeout
        while True:
            try:
                if fds:
                    socket.send_fds(connection, [message], fds)
                else:
                    connection.send(message)
                return
            except BlockingIOError:
                poller = select.poll()
                poller.register(connection.fileno(), select.POLLOUT)
                poller.register(self._wake, select.POLLIN)
                if self._ended or not poller.poll(max(0.0, deadline - time.monotonic()) * 1000):
                    raise PeerTimeoutError(
                        f"rank {rank} did not read what rank {self.rank} sent it for {self.timeout:g} s"
                    ) from None
            except OSError as error:
                if error.errno not in (errno.EPIPE, errno.ECONNRESET, errno.EBADF):
                    raise
                return

    def _receive(self, rank: int) -> None:
        """Sort what ``rank`` has sent so far; an abort is raised at once."""
        ends = 0
        while rank not in self._hung_up:
            try:
                connection = self._peers[rank].socket
                # In one line, so that an interrupt can't come between a descriptor and its owner.
                message, fds = (got := socket.recv_fds(connection, _MESSAGE_NBYTES, 4))[0], [*map(io.FileIO, got[1])]
            except BlockingIOError:
                return
            except OSError:
                message, fds = b"", []
            if not message and ends == 0:
                # The kernel tells of the end first where the peer left something of ours unread, or closed just now;
                # what it said before, why it gives up perhaps, is still in the queue.
                ends = 1
                continue
            kind, least = _KINDS.get(message[:1], (None, 0))
            if kind is not None and len(message) > least and (kind is Message.GROWTH or not fds):
                self._inbox[kind][rank].append((message[1:], fds))
            else:
                for fd in fds:
                    fd.close()
                if message[:1] == _ABORT:
                    name, _, text = (why := message[1:].decode(errors="replace")).partition(": ")
                    if name in _CONTAGIOUS:
                        raise getattr(errors, name)(f"rank {rank} gave up: {text}")
                    raise ExchangeClosedError(f"rank {rank} gave up: {why}")
                self._hung_up.add(rank)  # closed, or not one of ours

    # -- the end ---------------------------------------------------------------------------------------------------

    def abort(self, error: BaseException) -> None:
        message = _ABORT + _encode(told(error))
        for peer in self._peers.values():
            with contextlib.suppress(OSError):  # gone, or not reading: its own deadline tells it
                peer.socket.send(message)

    def interrupt(self) -> None:
        self._ended = True
        if not self._wake.closed:
            os.eventfd_write(self._wake.fileno(), 1)

    def close(self) -> None:
        """See `PeerMemory`. May be called again, and finishes then what an interrupt left open."""
        with self._closing:
            self._closed = self._ended = True
            for channel in self._channels.values():
                channel.close()
        for queue in self._inbox[Message.GROWTH].values():
            for fd in (fd for _, fds in queue for fd in fds):
                fd.close()
            queue.clear()
        for peer in self._peers.values():
            peer.close()
        self._wake.close()


def _encode(text: str) -> bytes:
    """For an error's text, whatever is in it."""
    return text.encode(errors="backslashreplace")[: _MESSAGE_NBYTES // 2]
