"""Every read and write of every simulated slot, and what orders them: vector clocks (Lamport 1978, Mattern 1988).

Two accesses of the same bytes, one of them a write, must be ordered by something that the program waited for. If they
are not, some schedule has them the other way round, so they are a race even where this schedule got the data right.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ithaca.errors import SlotRaceError
from ithaca.exchange.peer_memory.simulated import SimulatedMachine, SimulatedSegment, Stamp
from ithaca.verify.schedule import Agent, AgentScheduler

_OURS = ("verify/races.py", "torch/")


class VectorClocks:
    """One counter an agent; an agent knows of the others what was sent to it."""

    def __init__(self, agents: AgentScheduler, count: int) -> None:
        self._agents = agents
        self._known = [[1 if a == b else 0 for a in range(count)] for b in range(count)]

    def send(self) -> Stamp:
        me = self._agents.current
        if me is None:
            return (0,) * len(self._known)
        stamp = tuple(self._known[me.number])
        self._known[me.number][me.number] += 1
        return stamp

    def receive(self, stamp: Stamp) -> None:
        me = self._agents.current
        if me is not None:
            known = self._known[me.number]
            for agent, count in enumerate(stamp):
                if count > known[agent]:
                    known[agent] = count

    def now(self, agent: int) -> int:
        return self._known[agent][agent]

    def knows(self, agent: int, other: int, count: int) -> bool:
        """Whether what ``other`` did at its ``count`` is in the past of ``agent``."""
        return self._known[agent][other] >= count


@dataclass(frozen=True)
class Access:
    """``mask`` has a bit for each byte."""

    agent: Agent
    count: int
    write: bool
    mask: int
    place: str

    def __str__(self) -> str:
        return f"a {'write' if self.write else 'read'} by {self.agent.name} at {self.place}"


class RaceDetector(TorchDispatchMode):
    """Maps tensor operations, the backend's too, to slots; raises `SlotRaceError` at the second of a racing pair."""

    def __init__(self, machine: SimulatedMachine, agents: AgentScheduler, clocks: VectorClocks) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._machine, self._agents, self._clocks = machine, agents, clocks
        self._past: dict[int, list[Access]] = {}
        #: The first race found: an agent under test may swallow the error that is raised in it.
        self.found: SlotRaceError | None = None
        self.accesses = 0

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing compiles here, and the wrapper costs as much as all the rest

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        for place, write in _touched(func):
            if place < len(args):
                value = args[place]
                for tensor in value if isinstance(value, list) else (value,):
                    if not isinstance(tensor, Tensor):
                        continue  # a number in the place of a tensor
                    segment = self._machine.segments.get(tensor.untyped_storage().data_ptr())
                    if segment is not None and tensor.numel():
                        self._access(segment, tensor, write)
        return func(*args, **kwargs) if kwargs else func(*args)

    def _access(self, segment: SimulatedSegment, tensor: Tensor, write: bool) -> None:
        agent = self._agents.current
        if agent is None:
            return
        clocks, self.accesses = self._clocks, self.accesses + 1
        mask = _mask(tensor.storage_offset(), tuple(tensor.shape), tensor.stride(), tensor.element_size())
        access = Access(agent, clocks.now(agent.number), write, mask, _place())
        kept = []
        for other in self._past.get(id(segment), ()):
            before = clocks.knows(agent.number, other.agent.number, other.count)
            if not before and (write or other.write) and mask & other.mask and other.agent is not agent:
                self._report(segment, other, access)
            covered = other.mask & ~mask == 0 and (before or other.agent is agent) and (write or not other.write)
            if not covered:
                kept.append(other)
        self._past[id(segment)] = [*kept, access]

    def _report(self, segment: SimulatedSegment, first: Access, second: Access) -> None:
        race = SlotRaceError(
            f"nothing orders {first} and {second}: both touch the slot of lane {segment.role} on rank {segment.rank} "
            f"(schedule {self._agents.scheduler.schedule})"
        )
        self.found = self.found or race
        raise race


@lru_cache(maxsize=4096)
def _mask(offset: int, shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int) -> int:
    """The bytes that a tensor touches."""
    places = {offset}
    for size, stride in zip(shape, strides, strict=True):
        places = {place + i * stride for place in places for i in range(size)}
    element = (1 << itemsize) - 1
    mask = 0
    for place in places:
        mask |= element << (place * itemsize)
    return mask


@lru_cache(maxsize=1024)
def _touched(func: Any) -> tuple[tuple[int, bool], ...]:
    """The arguments of an operator whose memory it touches, and whether it writes it: a view only names it."""
    if func in (torch.ops.aten.detach.default, torch.ops.aten.empty_like.default):
        return ()
    return tuple(
        (place, a.alias_info is not None and a.alias_info.is_write)
        for place, a in enumerate(func._schema.arguments)
        if str(a.type) in ("Tensor", "List[Tensor]") and (a.alias_info is None or a.alias_info.is_write)
    )


def _place() -> str:
    """The line of the caller's code, or of this library's."""
    frame = sys._getframe(2)
    while frame.f_back is not None and any(part in frame.f_code.co_filename for part in _OURS):
        frame = frame.f_back
    parts = frame.f_code.co_filename.rsplit("/", 2)
    return f"{'/'.join(parts[-2:])}:{frame.f_lineno} ({frame.f_code.co_name})"
