"""`SlotExchange`: every rank writes its share of a lane straight into its final place on every other rank.

**The ordering rule.** A slot may be written only with a *credit* for it, and a credit comes only from the release of
the lease of what lay there before. Nothing else orders the reuse of a slot. Ranks start with one credit each.
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator

from torch import Tensor

from ithaca.errors import StaleSlotError, UnsupportedError
from ithaca.exchange.agreement import Header, settle
from ithaca.exchange.copy_stream import CopyStream, Task, copy_stream
from ithaca.exchange.interface import AGREED, Call, Exchange
from ithaca.exchange.lease import Lease
from ithaca.exchange.peer_memory.interface import Message, PeerMemory, Signal, Wait
from ithaca.exchange.plan_builder import PlanBuilder
from ithaca.exchange.sanitizer import poison
from ithaca.plan import Lane, aligned


class SlotExchange(Exchange):
    """The exchange over peer memory. No collective runs after its set-up."""

    kind = "slots"

    def __init__(self, memory: PeerMemory, timeout: float, copy: str | CopyStream = "auto") -> None:
        super().__init__(memory.rank, memory.world_size, timeout)
        self.memory = memory
        self.targets = _Targets(memory)
        try:
            self.stream = (
                copy if isinstance(copy, CopyStream) else copy_stream(memory, copy, f"ithaca-copy-{memory.rank}")
            )
        except BaseException:
            memory.close()
            raise

    def check(self, role: str, tensor: Tensor) -> None:
        super().check(role, tensor)
        if tensor.device.type != "cpu":
            raise UnsupportedError(
                f"rank {self.rank}: slots of this host carry CPU tensors; received lane {role} on {tensor.device}"
            )

    def _new_call(self, header: Header, builder: PlanBuilder) -> Call:
        return _SlotCall(self, header, builder)

    def _trim(self) -> None:
        self.memory.trim()
        self.targets.forget()

    def _shut(self, error: BaseException | None) -> None:
        if error is not None:
            self.memory.abort(error)
        self.memory.interrupt()
        self.stream.close()
        self.memory.close()
        self.targets.forget()


def slot_of(memory: PeerMemory, lane: Lane, rank: int) -> Tensor:
    """A fresh view of a rank's slot, as the lane has it."""
    return memory.slot(rank, lane.role, lane.slot_nbytes[rank]).view(lane.dtype).view(lane.slot_shape(rank))


class _Targets:
    """Where this rank's shares land: views of its peers' slots, kept while the slots stay where they are."""

    def __init__(self, memory: PeerMemory) -> None:
        self._memory = memory
        self._generation = memory.generation
        self._views: dict[Lane, tuple[Tensor, ...]] = {}

    def of(self, lane: Lane) -> tuple[Tensor, ...]:
        """The view for each receiver; NHD."""
        memory = self._memory
        if memory.generation != self._generation or len(self._views) > 256:
            self.forget()
        if lane not in self._views:
            ranks = range(memory.world_size)
            self._views[lane] = tuple(lane.place(slot_of(memory, lane, r), memory.rank, r) for r in ranks)
        return self._views[lane]

    def forget(self) -> None:
        self._views.clear()
        self._generation = self._memory.generation


class _SlotCall(Call):
    def __init__(self, exchange: SlotExchange, header: Header, builder: PlanBuilder) -> None:
        super().__init__(exchange, header, builder)
        self._memory, self._stream, self._targets = exchange.memory, exchange.stream, exchange.targets
        self._everyone = tuple(range(exchange.world_size))
        #: Lanes that have arrived or will, from which ranks, and are not leased yet.
        self._due: list[tuple[Lane, tuple[int, ...]]] = []

    # -- inputs --------------------------------------------------------------------------------------------------

    def _push(self, header: Header, tensors: dict[str, Tensor]) -> None:
        self._memory.announce(header.encode())
        self._stream.submit(self._send(header, tensors))

    def _wait(self) -> Lease:
        self._stream.submit(self._land())
        self._stream.flush()
        return self._lease()

    def _send(self, header: Header, tensors: dict[str, Tensor]) -> Task:
        for lane in (yield from self._agree(header)):
            if self._must_grow(lane):
                yield from self._grow(lane)
            yield from self._write(lane, tensors[lane.role])

    def _agree(self, header: Header) -> Generator[Wait, None, tuple[Lane, ...]]:
        """The lanes that follow from every rank's header of this step, or the error that every rank raises."""
        headers = yield from self._headers(header)
        return settle(headers, self._memory.rank)

    def _headers(self, header: Header) -> Generator[Wait, None, list[Header]]:
        """Every rank's header of this step; those of calls that ended early are dropped."""
        headers, mine = [], header.encode()
        for rank in self._everyone:
            theirs = header
            while rank != self._memory.rank:
                yield Wait(Message.HEADER, "", {rank}, lambda: f"its header, as this rank's {header}")
                said = self._memory.announcement(rank)
                theirs = header if said == mine else Header.decode(said, rank)
                if theirs.call > header.call:
                    self._memory.put_back(rank, said)
                if theirs.call >= header.call:
                    break
            headers.append(theirs)
        return headers

    def _must_grow(self, lane: Lane) -> bool:
        """Derived from the plan and the past alone, so alike on all ranks."""
        held = self._memory.capacity(lane.role)
        return not held or any(need > have for need, have in zip(lane.slot_nbytes, held, strict=True))

    def _grow(self, lane: Lane) -> Task:
        held = self._memory.capacity(lane.role) or (0,) * len(self._everyone)
        yield from self._memory.grow(
            lane.role, tuple(aligned(max(pair)) for pair in zip(lane.slot_nbytes, held, strict=True))
        )

    def _write(self, lane: Lane, tensor: Tensor) -> Task:
        """Take a credit of every rank; then for each, write its share and signal."""
        me = self._memory.rank
        self.lanes.append(lane)
        self._due.append((lane, self._everyone))
        yield self._expect(Signal.CREDIT, lane, self._everyone, "a credit")
        targets = self._targets.of(lane)
        if lane.text.tokens:
            mine, text = lane.own_text(slot_of(self._memory, lane, me), tensor, me)
            mine.copy_(text)
        for step in self._everyone:
            dest = (me + 1 + step) % len(self._everyone)  # not all ranks write to the same one at the same time
            targets[dest].copy_(lane.take(tensor, me, dest))
            if self.sanitize:
                self._memory.stamps(dest, lane.role)[me] = self._header.call
            self._memory.signal(Signal.ARRIVED, lane.role, (dest,))
        self._exchange.counters.bytes_moved += lane.moved_nbytes[me]

    def _land(self) -> Task:
        for lane, sources in self._due:
            yield self._expect(Signal.ARRIVED, lane, sources, "its share")

    def _expect(self, signal: Signal, lane: Lane, ranks: tuple[int, ...], what: str) -> Wait:
        call = self._header.call
        return Wait(signal, lane.role, set(ranks), lambda: f"{what} of lane {lane.role} in call {call}")

    def _lease(self) -> Lease:
        """A lease of all that has landed."""
        landed, self._due = self._due, []
        if self.sanitize:
            for lane, sources in landed:
                self._check_stamps(lane, sources)
        tensors = {lane.role: slot_of(self._memory, lane, self._memory.rank) for lane, _ in landed}

        def give_back() -> None:
            for lane, sources in landed:
                self._memory.signal(Signal.CREDIT, lane.role, sources)

        return Lease(tensors, frozenset(tensors), give_back)

    def _check_stamps(self, lane: Lane, sources: tuple[int, ...]) -> None:
        me, call = self._memory.rank, self._header.call
        stamps = self._memory.stamps(me, lane.role)
        for source in sources:
            if (stamp := int(stamps[source])) != call:
                raise StaleSlotError(
                    f"rank {me}: lane {lane.role} was required to hold what rank {source} wrote in call {call}; "
                    f"its stamp says call {stamp}"
                )

    def _poison(self, roles: frozenset[str]) -> None:
        for lane in self.lanes:
            if lane.role in roles and self._memory.capacity(lane.role):  # else it is trimmed
                poison(slot_of(self._memory, lane, self._memory.rank))

    # -- the output ----------------------------------------------------------------------------------------------

    def _push_out(self, header: Header, parts: dict[Lane, Tensor]) -> None:
        self._memory.announce(header.encode())
        self._stream.submit(self._send_out(header, parts))

    def _send_out(self, header: Header, parts: dict[Lane, Tensor]) -> Task:
        """Write first and read the headers then: all ranks know the plan, so what they can still say is a refusal."""
        grows = any(map(self._must_grow, parts))
        if grows:
            yield from self._agree(header)
        for lane, out in parts.items():
            if self._must_grow(lane):
                yield from self._grow(lane)
            yield from self._write(lane, out)
        if not grows:
            yield from self._agree_on_out(header, tuple(parts))

    def _agree_on_out(self, header: Header, lanes: tuple[Lane, ...]) -> Task:
        """Read the headers that go with an output. A rank that refused has not written its share."""
        headers = yield from self._headers(header)
        sources = tuple(rank for rank in self._everyone if not headers[rank].refusal)
        self._due = [(lane, sources) for lane in lanes]
        settle(headers, self._memory.rank)

    def _wait_out(self) -> Lease:
        return self._wait()

    # -- an error ------------------------------------------------------------------------------------------------

    def _refuse(self, reason: str) -> None:
        self._stream.flush()
        header = self._next_header().refused(reason)
        self._memory.announce(header.encode())
        if self.plan is None or any(map(self._must_grow, self.plan.out)):
            self._stream.submit(self._send(header, {}))
        else:
            self._stream.submit(self._agree_on_out(header, self.plan.out))
        self._stream.flush()

    def _drain(self) -> None:
        with contextlib.suppress(*AGREED):
            self._stream.flush()
        self._stream.submit(self._land())
        self._stream.flush()
        self._lease().release()
