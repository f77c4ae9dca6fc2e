"""Peer memory of simulated ranks, which live in one process: every operation is a point at which another may go on.

Who goes on is for `Scheduling` to say, and what each has seen of the others is for `History`; this module is the
machine that they watch. There is no time: nothing is ever late, and a wait that nobody can end is a deadlock, which
`Scheduling` finds.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass, field
from typing import Protocol, cast

import torch
from torch import Tensor

from ithaca.errors import ExchangeClosedError, GrowthError, IthacaError, PeerDiedError
from ithaca.exchange.peer_memory.interface import Message, PeerMemory, Signal, Wait

Stamp = tuple[int, ...]


class Scheduling(Protocol):
    """Who runs when."""

    def point(self) -> None:
        """Let another go on, perhaps."""

    def block(self, ready: Callable[[], bool], why: Callable[[], str]) -> None:
        """Let others go on until ``ready()``."""


class History(Protocol):
    """What has happened before what."""

    def send(self) -> Stamp: ...

    def receive(self, stamp: Stamp) -> None: ...


@dataclass
class SimulatedSegment:
    """The slot of one lane on one rank; its stamps lie in a segment of their own."""

    rank: int
    role: str
    generation: int
    capacity: int
    memory: bytearray
    stamps: SimulatedSegment | None = None


@dataclass
class SimulatedMachine:
    """What simulated ranks share. ``limit`` is the most that a slot can have, in bytes."""

    world_size: int
    agents: Scheduling
    history: History
    limit: int = 1 << 20
    #: By address: what lies there. For whoever watches reads and writes.
    segments: dict[int, SimulatedSegment] = field(default_factory=dict)
    closed: set[int] = field(default_factory=set)
    signals: dict[tuple[Signal, str, int, int], deque[Stamp]] = field(default_factory=dict)
    inbox: defaultdict[tuple[Message, int, int], deque[tuple[object, Stamp]]] = field(
        default_factory=lambda: defaultdict(deque)
    )
    #: For each rank: who gave up, and why.
    aborts: defaultdict[int, list[str]] = field(default_factory=lambda: defaultdict(list))

    def tokens(self, signal: Signal, role: str, source: int, dest: int) -> deque[Stamp]:
        """What ``source`` has told ``dest`` and it has not taken yet. A credit is there from the start."""
        key = (signal, role, source, dest)
        if key not in self.signals:
            self.signals[key] = deque([(0,) * len(self.history.send())] if signal is Signal.CREDIT else [])
        return self.signals[key]


class SimulatedPeerMemory(PeerMemory):
    """The view of one simulated rank."""

    def __init__(self, machine: SimulatedMachine, rank: int) -> None:
        self.rank, self.world_size, self.generation = rank, machine.world_size, 0
        self.machine = machine
        self._segments: dict[str, list[SimulatedSegment]] = {}
        self._taken: dict[int, deque[bytes]] = {r: deque() for r in range(machine.world_size)}
        self._ended, self._waits = False, 0

    @property
    def _peers(self) -> list[int]:
        return [rank for rank in range(self.world_size) if rank != self.rank]

    # -- announcements ---------------------------------------------------------------------------------------------

    def announce(self, header: bytes) -> None:
        self._post(Message.HEADER, header)

    def announcement(self, rank: int) -> bytes:
        payload = self._read(Message.HEADER, rank)
        assert isinstance(payload, bytes)
        return payload

    def put_back(self, rank: int, header: bytes) -> None:
        self.machine.inbox[Message.HEADER, rank, self.rank].appendleft((header, self.machine.history.send()))

    def _post(self, kind: Message, payload: object) -> None:
        self.machine.agents.point()
        for rank in self._peers:
            self.machine.inbox[kind, self.rank, rank].append((payload, self.machine.history.send()))

    def _read(self, kind: Message, rank: int) -> object:
        payload, stamp = self.machine.inbox[kind, rank, self.rank].popleft()
        self.machine.history.receive(stamp)
        return payload

    # -- slots -----------------------------------------------------------------------------------------------------

    def capacity(self, role: str) -> tuple[int, ...]:
        return tuple(segment.capacity for segment in self._segments.get(role, ()))

    def trim(self) -> None:
        self.machine.agents.point()
        self._segments.clear()
        self.generation += 1

    def slot(self, rank: int, role: str, nbytes: int) -> Tensor:
        if nbytes == 0:
            return torch.empty(0, dtype=torch.uint8)
        return self._over(self._segments[role][rank])[:nbytes]

    def stamps(self, rank: int, role: str) -> Tensor:
        segment = self._segments[role][rank].stamps
        assert segment is not None
        return self._over(segment).view(torch.int64)

    def _over(self, segment: SimulatedSegment) -> Tensor:
        memory = torch.frombuffer(segment.memory, dtype=torch.uint8)
        self.machine.segments[memory.data_ptr()] = segment
        return memory

    def grow(self, role: str, capacities: tuple[int, ...]) -> Generator[Wait, None, None]:
        capacity, generation = capacities[self.rank], self.generation + 1
        problem = f"rank {self.rank} has no {capacity} bytes" if capacity > self.machine.limit else ""
        made = SimulatedSegment(self.rank, role, generation, capacity, bytearray(1 if problem else max(1, capacity)))
        nbytes = 8 * self.world_size
        made.stamps = SimulatedSegment(self.rank, f"{role} (stamps)", generation, nbytes, bytearray(nbytes))
        self._post(Message.GROWTH, (made, problem))
        yield Wait(Message.GROWTH, role, set(self._peers), lambda: f"its new memory for lane {role}")
        segments = {self.rank: made}
        for rank in self._peers:
            theirs, their_problem = cast("tuple[SimulatedSegment, str]", self._read(Message.GROWTH, rank))
            problem = problem or their_problem
            if (theirs.role, theirs.generation, theirs.capacity) != (role, generation, capacities[rank]):
                problem = problem or f"rank {rank} grows {theirs.role} to {theirs.capacity} bytes"
            segments[rank] = theirs
        self._post(Message.MAPPED, problem)
        yield Wait(Message.MAPPED, role, set(self._peers), lambda: f"its word on new memory for lane {role}")
        for rank in self._peers:
            problem = problem or str(self._read(Message.MAPPED, rank))
        self.generation = generation
        if problem:
            raise GrowthError(f"lane {role} could not grow to {capacities}, seen from rank {self.rank}: {problem}")
        self._segments[role] = [segments[rank] for rank in range(self.world_size)]

    # -- signals ---------------------------------------------------------------------------------------------------

    def signal(self, signal: Signal, role: str, ranks: Iterable[int]) -> None:
        for rank in ranks:
            self.machine.agents.point()
            if self.rank not in self.machine.closed:
                self.machine.tokens(signal, role, self.rank, rank).append(self.machine.history.send())
        self.machine.agents.point()

    def wait(self, wait: Wait, *, block: bool) -> bool:
        self.machine.agents.point()
        self._waits += 1
        try:
            return self._wait(wait, block)
        finally:
            self._waits -= 1

    def _wait(self, wait: Wait, block: bool) -> bool:
        while True:
            self._take(wait)
            if not wait.pending:
                return True
            if self.machine.aborts[self.rank]:
                raise ExchangeClosedError(self.machine.aborts[self.rank].pop(0))
            gone = wait.pending & self.machine.closed
            if gone:
                raise PeerDiedError(f"rank {min(gone)} closed, and was expected to send {wait.expecting()}")
            if not block:
                return False
            self.machine.agents.block(lambda: self._changed(wait), lambda: self._why(wait))

    def _take(self, wait: Wait) -> None:
        if self._ended:
            raise ExchangeClosedError(f"rank {self.rank} closed the exchange while it waited for {wait.expecting()}")
        for rank in tuple(wait.pending):
            if self._there(wait, rank):
                if isinstance(wait.kind, Signal):
                    tokens = self.machine.tokens(wait.kind, wait.role, rank, self.rank)
                    self.machine.history.receive(tokens.popleft())
                wait.pending.discard(rank)

    def _there(self, wait: Wait, rank: int) -> bool:
        if isinstance(wait.kind, Signal):
            return bool(self.machine.tokens(wait.kind, wait.role, rank, self.rank))
        return bool(self.machine.inbox[wait.kind, rank, self.rank])

    def _changed(self, wait: Wait) -> bool:
        """Whether a wait would end now, or fail."""
        return (
            self._ended
            or bool(self.machine.aborts[self.rank])
            or bool(wait.pending & self.machine.closed)
            or all(self._there(wait, rank) for rank in wait.pending)
        )

    def _why(self, wait: Wait) -> str:
        missing = sorted(rank for rank in wait.pending if not self._there(wait, rank))
        return f"rank {self.rank} waits for {wait.expecting()} from rank(s) {missing}"

    # -- the end ---------------------------------------------------------------------------------------------------

    def abort(self, error: BaseException) -> None:
        for rank in self._peers:
            self.machine.aborts[rank].append(f"rank {self.rank} gave up: {type(error).__name__}: {error}")

    def interrupt(self) -> None:
        self._ended = True

    def close(self) -> None:
        if self._waits:
            raise IthacaError(f"rank {self.rank} gave its memory back while a wait still looked at it")
        self._ended = True
        self.machine.closed.add(self.rank)
