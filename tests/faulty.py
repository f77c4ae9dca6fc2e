"""Exchanges with one fault each, by changing the text of the real one."""

from __future__ import annotations

import inspect
import random
from collections.abc import Generator

import torch

from ithaca.exchange import slots
from ithaca.exchange.peer_memory.interface import Wait
from ithaca.exchange.peer_memory.simulated import SimulatedPeerMemory
from ithaca.exchange.slots import SlotExchange
from ithaca.verify.mutants import compiled

_LEASE = "return Lease(tensors, frozenset(tensors), give_back)"
_CREDIT = "self._memory.signal(Signal.CREDIT, lane.role, sources)"
_COPY = "targets[dest].copy_(lane.take(tensor, me, dest))"
_ARRIVED = "self._memory.signal(Signal.ARRIVED, lane.role, (dest,))"
_TAKE_CREDIT = 'yield self._expect(Signal.CREDIT, lane, self._everyone, "a credit")'
_LAND = 'yield self._expect(Signal.ARRIVED, lane, sources, "its share")'
_SLOT = "return memory.slot(rank, lane.role, lane.slot_nbytes[rank])"
_SETTLE = "headers = yield from self._headers(header)\n        return settle(headers, self._memory.rank)"
_GENERATION = "memory.generation != self._generation"

#: A fault's name to what it puts in the place of what.
FAULTS: dict[str, tuple[str, str]] = {
    "credit before the last read": (_LEASE, "give_back(); return Lease(tensors, frozenset(tensors), lambda: None)"),
    "credit given twice": (_CREDIT, f"{_CREDIT}; {_CREDIT}"),
    "no credit": (_CREDIT, "pass"),
    "signal before the write": (_COPY, f"{_ARRIVED}; {_COPY}; continue"),
    "a wait that skips a peer": (_LAND, _LAND.replace("sources", "sources[:-1]")),
    "the slot of another lane": (_SLOT, _SLOT.replace("lane.role", '"v" if lane.role == "k" else lane.role')),
    "output without a credit": (_TAKE_CREDIT, f'if lane.role != "out": {_TAKE_CREDIT}'),
    "ranks that differ in their issue order are not told": (
        _SETTLE,
        _SETTLE.replace("settle(headers", "settle([h if h.refusal else header for h in headers]"),
    ),
    "a lane of no tokens is skipped": (_TAKE_CREDIT, f"if not tensor.numel(): return\n        {_TAKE_CREDIT}"),
    "a stale generation is accepted": (_GENERATION, "False"),
}


def faulty(fault: str) -> type[SlotExchange]:
    old, new = FAULTS[fault]
    source = inspect.getsource(slots)
    assert source.count(old) == 1, f"{old!r} is not in the exchange any more"
    return compiled(source.replace(old, new))


class FreesOnGrowth(SimulatedPeerMemory):
    """Memory that is somebody else's as soon as a larger one is there, lease or no lease."""

    def grow(self, role: str, capacities: tuple[int, ...]) -> Generator[Wait, None, None]:
        held = self._segments.get(role)
        yield from super().grow(role, capacities)
        if held is not None:
            with torch.no_grad():
                self._over(held[self.rank]).fill_(0x7F)


class Garbles(SimulatedPeerMemory):
    """Rank 1 sends headers with a few bytes changed."""

    chance = random.Random(0)
    garbled = 0

    def announce(self, header: bytes) -> None:
        if self.rank == 1:
            data = bytearray(header)
            # Where something is said, more often than in the padding between.
            places = [i for i, byte in enumerate(data) if byte]
            for _ in range(self.chance.choice((1, 1, 2, 4))):
                place = self.chance.choice(places) if self.chance.random() < 0.7 else self.chance.randrange(len(data))
                data[place] = self.chance.choice((0, 1, 255, data[place] ^ 1, self.chance.randrange(256)))
            header = bytes(data)
            Garbles.garbled += 1
        super().announce(header)
