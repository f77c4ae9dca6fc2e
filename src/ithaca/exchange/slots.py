"""`SlotExchange`: every rank writes its share of a lane straight into its final place on every other rank.

**The ordering rule.** A slot may be written only with a *credit* for it, and a credit comes only from the release of
the lease of what lay there before. Nothing else orders the reuse of a slot. Ranks start with one credit each.
"""

from __future__ import annotations

from torch import Tensor

from ithaca.errors import UnsupportedError
from ithaca.exchange.agreement import Header, settle
from ithaca.exchange.copy_stream import Task, copy_stream
from ithaca.exchange.interface import Call, Exchange, Lease
from ithaca.exchange.peer_memory.interface import Message, PeerMemory, Signal, Wait
from ithaca.geometry import Layout
from ithaca.plan import Lane, aligned


class SlotExchange(Exchange):
    """The exchange over peer memory. No collective runs after its set-up."""

    kind = "slots"

    def __init__(self, memory: PeerMemory, timeout: float, copy: str = "auto") -> None:
        super().__init__(memory.rank, memory.world_size, timeout)
        self.memory = memory
        self.targets = _Targets(memory)
        self.stream = copy_stream(memory, copy, f"ithaca-copy-{memory.rank}")

    def check(self, role: str, tensor: Tensor) -> None:
        super().check(role, tensor)
        if tensor.device.type != "cpu":
            raise UnsupportedError(
                f"rank {self.rank}: slots of this host carry CPU tensors; received lane {role} on {tensor.device}"
            )

    def _new_call(self, header: Header, layout: Layout) -> Call:
        return _SlotCall(self, header, layout)

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
    def __init__(self, exchange: SlotExchange, header: Header, layout: Layout) -> None:
        super().__init__(exchange, header, layout)
        self._memory, self._stream, self._targets = exchange.memory, exchange.stream, exchange.targets
        self._everyone = range(exchange.world_size)
        self._undrained: list[Lane] = []

    # -- inputs --------------------------------------------------------------------------------------------------

    def _push(self, header: Header, tensors: dict[str, Tensor]) -> None:
        self._memory.announce(header.encode())
        self._stream.submit(self._send(header, tensors))

    def _wait(self) -> Lease:
        self._stream.submit(self._land())
        self._stream.flush()
        return self._lease()

    def _send(self, header: Header, tensors: dict[str, Tensor], known: Lane | None = None) -> Task:
        """Agree, then for each lane: grow if need be, and for each rank: take a credit, write, signal."""
        headers: list[Header] = []
        yield from self._agree(header, headers)
        lanes = settle(headers, self._memory.rank)
        for lane in (known,) if known else lanes:
            tensor = tensors[lane.role]
            yield from self._write(lane, tensor)

    def _agree(self, header: Header, headers: list[Header]) -> Task:
        """Collect every rank's header of this step into ``headers``; those of calls that ended early are dropped."""
        for rank in self._everyone:
            if rank == self._memory.rank:
                headers.append(header)
                continue
            while True:
                yield Wait(Message.HEADER, "", {rank}, lambda: f"its header, as this rank's {header}")
                theirs = Header.decode(self._memory.announcement(rank), rank)
                if theirs.call >= header.call:
                    break
            headers.append(theirs)

    def _write(self, lane: Lane, tensor: Tensor) -> Task:
        memory, me = self._memory, self._memory.rank
        required, held = lane.slot_nbytes, memory.capacity(lane.role)
        if not any(held) or any(need > have for need, have in zip(required, held, strict=True)):
            memory.grow(lane.role, tuple(aligned(max(pair)) for pair in zip(required, held, strict=True)))
        self.lanes.append(lane)
        self._undrained.append(lane)
        yield self._expect(Signal.CREDIT, lane, "a credit")
        targets = self._targets.of(lane)
        for step in self._everyone:
            dest = (me + 1 + step) % len(self._everyone)  # not all ranks write to the same one at the same time
            targets[dest].copy_(lane.take(tensor, me, dest))
            memory.signal(Signal.ARRIVED, lane.role, (dest,))
        self._exchange.counters.bytes_moved += lane.moved_nbytes[me]

    def _land(self) -> Task:
        for lane in self._undrained:
            yield self._expect(Signal.ARRIVED, lane, "its share")

    def _expect(self, signal: Signal, lane: Lane, what: str) -> Wait:
        call = self._header.call
        return Wait(signal, lane.role, set(self._everyone), lambda: f"{what} of lane {lane.role} in call {call}")

    def _lease(self) -> Lease:
        """A lease of all that has landed."""
        landed, self._undrained = self._undrained, []
        tensors = {lane.role: slot_of(self._memory, lane, self._memory.rank) for lane in landed}

        def give_back() -> None:
            for lane in landed:
                self._memory.signal(Signal.CREDIT, lane.role, self._everyone)

        return Lease(tensors, frozenset(tensors), give_back)

    # -- the output ----------------------------------------------------------------------------------------------

    def _push_out(self, header: Header, lane: Lane, out: Tensor) -> None:
        self._memory.announce(header.encode())
        self._stream.submit(self._send(header, {lane.role: out}, known=lane))

    def _wait_out(self) -> Lease:
        return self._wait()

    # -- an error ------------------------------------------------------------------------------------------------

    def _refuse(self, reason: str) -> None:
        self._stream.flush()
        header = self._next_header().refused(reason)
        self._memory.announce(header.encode())
        self._stream.submit(self._send(header, {}))
        self._stream.flush()

    def _drain(self) -> None:
        self._stream.submit(self._land())
        self._stream.flush()
        self._lease().release()
