"""`CollectiveExchange`: the same calls over ``all_to_all_single`` of any torch.distributed backend.

Shares travel as bytes, packed per receiver, so that every dtype can go and gloo cannot mistake one for another. The
receive buffer is rank-major: only NHD with a batch of one can be read where it lies; all else is assembled once.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from ithaca.errors import (
    ExchangeClosedError,
    IthacaError,
    LeaseError,
    PeerDiedError,
    PeerTimeoutError,
    UnsupportedError,
)
from ithaca.exchange.agreement import HEADER_NBYTES, Header, settle
from ithaca.exchange.interface import Call, Exchange
from ithaca.exchange.lease import Lease, borrowed
from ithaca.exchange.plan_builder import PlanBuilder
from ithaca.exchange.sanitizer import poison
from ithaca.geometry import Layout
from ithaca.plan import Lane

_TAG = 0x17ACA  # keeps headers apart from the caller's own messages, where the backend has tags


class CollectiveExchange(Exchange):
    """The exchange over a process group's own collectives: other hosts, macOS, NCCL."""

    kind = "collective"

    def __init__(self, group: dist.ProcessGroup, device: torch.device, timeout: float) -> None:
        super().__init__(dist.get_rank(group), dist.get_world_size(group), timeout)
        self.device = device
        self._group = weakref.ref(group)  # the group owns its exchange, not the other way round
        self._buffers: dict[str, Tensor] = {}
        self._leased: set[str] = set()

    def _new_call(self, header: Header, builder: PlanBuilder) -> Call:
        return _CollectiveCall(self, header, builder)

    def _trim(self) -> None:
        self._buffers.clear()

    def _shut(self, error: BaseException | None) -> None:
        if error is None:  # else somebody may still hold what he was lent, which owns nothing
            self._buffers.clear()

    def check(self, role: str, tensor: Tensor) -> None:
        super().check(role, tensor)
        if tensor.device.type != self.device.type:
            raise UnsupportedError(
                f"rank {self.rank}: this exchange was made for {self.device}; received lane {role} on {tensor.device}"
            )

    @property
    def group(self) -> dist.ProcessGroup:
        group = self._group()
        if group is None:
            raise ExchangeClosedError(f"rank {self.rank}: the process group of this exchange was destroyed")
        return group

    # -- what a call uses ------------------------------------------------------------------------------------------

    def buffer(self, name: str, nbytes: int) -> Tensor:
        """The first ``nbytes`` of a buffer that stays for the next call, and grows as needed."""
        held = self._buffers.get(name)
        if held is None or held.numel() < nbytes:
            held = self._buffers[name] = torch.empty(nbytes, dtype=torch.uint8, device=self.device)
        return held[:nbytes]

    def agree(self, header: Header) -> list[Header]:
        """One round of headers, point to point, so that the rank that stays away can be named."""
        mine = torch.frombuffer(bytearray(header.encode()), dtype=torch.uint8).to(self.device)
        theirs = {r: torch.empty_like(mine) for r in range(self.world_size) if r != self.rank}
        self.counters.header_rounds += 1
        what = f"its header of call {header.call} step {header.step}"
        self._complete_all(self._swap(mine, theirs, what), what)
        return [
            header if rank == self.rank else Header.decode(bytes(theirs[rank].tolist()), rank)
            for rank in range(self.world_size)
        ]

    def _swap(self, mine: Tensor, theirs: dict[int, Tensor], what: str) -> list[tuple[tuple[int, ...], dist.Work]]:
        """Start to send ``mine`` to every other rank and to receive its own; with each work, whom it is with."""
        group = self.group
        if self.device.type == "cpu":  # one by one: gloo refuses what is with a dead peer as it starts
            works: list[tuple[tuple[int, ...], dist.Work]] = []
            for rank, received in theirs.items():
                with self.expecting((rank,), what):
                    started = (
                        dist.isend(mine, group=group, tag=_TAG, group_dst=rank),
                        dist.irecv(received, group=group, tag=_TAG, group_src=rank),
                    )
                works += [((rank,), work) for work in started if work is not None]
            return works
        operations = [
            dist.P2POp(op, tensor, group=group, tag=_TAG, group_peer=rank)
            for rank, received in theirs.items()
            for op, tensor in ((dist.isend, mine), (dist.irecv, received))
        ]
        everyone = tuple(theirs)
        with self.expecting(everyone, what):  # NCCL gives one work for the whole batch; torch takes no empty one
            return [(everyone, work) for work in (dist.batch_isend_irecv(operations) if operations else ())]

    def all_to_all(self, received: Tensor, sent: Tensor, sizes: Sequence[int], out_sizes: Sequence[int]) -> dist.Work:
        """Start one. Between CPU ranks it fails by itself at the deadline: gloo cannot take one back that nobody waits
        for any more, and destroying the group, whose own timeout is minutes, would wait for it.
        """
        options = dist.AllToAllOptions()
        options.asyncOp = True
        if self.device.type == "cpu":  # NCCL's watchdog ends the process at such a timeout
            options.timeout = timedelta(seconds=self.timeout)
        return self.group.alltoall_base(received, sent, list(sizes), list(out_sizes), options)

    def _complete_all(self, works: list[tuple[tuple[int, ...], dist.Work]], what: str) -> None:
        """Wait for all within one deadline; past it, name all that are late: one may only be waiting for another."""
        deadline = time.monotonic() + self.timeout
        late: dict[int, RuntimeError] = {}
        for ranks, work in works:
            try:
                work.wait(timedelta(seconds=max(0.001, deadline - time.monotonic())))
            except RuntimeError as error:
                if not _timed_out(error):
                    raise self._failure(ranks, what, error) from error
                late.update(dict.fromkeys(ranks, error))
        if late:
            first = next(iter(late.values()))
            raise self._failure(late, what, first) from first

    def complete(self, work: dist.Work, ranks: Sequence[int], what: str) -> None:
        """Wait for ``work`` within the deadline."""
        with self.expecting(ranks, what):
            work.wait(timedelta(seconds=self.timeout))

    @contextmanager
    def expecting(self, ranks: Sequence[int], what: str) -> Iterator[None]:
        """Say of a failure of the process group what this rank expected of whom."""
        try:
            yield
        except RuntimeError as error:
            raise self._failure(ranks, what, error) from error

    def _failure(self, ranks: Iterable[int], what: str, error: RuntimeError) -> IthacaError:
        text = f"rank {self.rank} expected {what} of rank(s) {sorted(ranks)}; the process group said: {error}"
        return (PeerTimeoutError if _timed_out(error) else PeerDiedError)(text)

    def take(self, role: str) -> None:
        if role in self._leased:
            raise LeaseError(f"rank {self.rank}: lane {role} was received while the lease of its buffer is out")
        self._leased.add(role)

    def give_back(self, role: str) -> None:
        self._leased.discard(role)


def _timed_out(error: RuntimeError) -> bool:
    return "timed out" in str(error).lower() or "timeout" in str(error).lower()


class _Flight:
    """A lane under way: what it sends and receives, and the work that does it."""

    def __init__(self, exchange: CollectiveExchange, lane: Lane, tensor: Tensor, header: Header | None = None) -> None:
        self.exchange, self.lane, self.head = exchange, lane, HEADER_NBYTES if header else 0
        exchange.take(lane.role)
        self.tensor = tensor
        me, everyone = exchange.rank, range(exchange.world_size)
        self.sizes = [self.head + lane.share_nbytes(source, me) for source in everyone]
        out_sizes = [self.head + lane.share_nbytes(me, dest) for dest in everyone]
        sent = exchange.buffer(f"send {lane.role}", sum(out_sizes))
        self.received = exchange.buffer(f"receive {lane.role}", sum(self.sizes))
        for dest, chunk in enumerate(torch.split(sent, out_sizes)):
            if header:
                chunk[: self.head] = torch.frombuffer(bytearray(header.encode()), dtype=torch.uint8)
            if tensor.numel():
                share = lane.take(tensor, me, dest)
                chunk[self.head :].view(lane.dtype).view(share.shape).copy_(share)
        self.others = tuple(rank for rank in everyone if rank != me)
        with exchange.expecting(self.others, f"its share of lane {lane.role}"):
            self.work = exchange.all_to_all(self.received, sent, self.sizes, out_sizes)
        exchange.counters.bytes_moved += lane.moved_nbytes[me]

    def land(self, call: int) -> None:
        self.exchange.complete(self.work, self.others, f"its share of lane {self.lane.role} of call {call}")

    def headers(self) -> list[Header]:
        return [
            Header.decode(bytes(chunk[: self.head].tolist()), source)
            for source, chunk in enumerate(torch.split(self.received, self.sizes))
        ]

    def in_place(self) -> Tensor | None:
        """What has arrived as a view of the receive buffer, if its rank-major shares are in the lane's order."""
        lane = self.lane
        plain = lane.batch == 1 and lane.layout is Layout.NHD and not self.head and not lane.text.tokens
        if plain and self._gathers_tokens():
            return borrowed(self.received).view(lane.dtype).view(lane.slot_shape(self.exchange.rank))
        return None

    def assembly(self) -> tuple[Tensor, list[Tensor], list[Tensor]]:
        """A fresh tensor in the lane's layout, and the copies that fill it: where to, and from where."""
        lane, me = self.lane, self.exchange.rank
        whole = torch.empty(lane.slot_shape(me), dtype=lane.dtype, device=self.received.device)
        chunks = torch.split(self.received, self.sizes)
        shares = [c[self.head :].view(lane.dtype).view(lane.share_shape(s, me)) for s, c in enumerate(chunks)]
        places = [lane.place(whole, source, me) for source in range(lane.ranks)]
        if lane.text.tokens:
            to, text = lane.own_text(whole, self.tensor, me)
            places.append(to)
            shares.append(text)
        return whole, places, shares

    def _gathers_tokens(self) -> bool:
        """Whether the shares of all ranks follow one another along the tokens."""
        me = self.exchange.rank
        wanted = self.lane.wants[me].heads
        return all(shares[me].heads == wanted for shares in self.lane.shares)


class _CollectiveCall(Call):
    _exchange: CollectiveExchange

    def __init__(self, exchange: CollectiveExchange, header: Header, builder: PlanBuilder) -> None:
        super().__init__(exchange, header, builder)
        self._flights: list[_Flight] = []

    def _push(self, header: Header, tensors: dict[str, Tensor]) -> None:
        for lane in settle(self._exchange.agree(header), self._exchange.rank):
            self.lanes.append(lane)
            self._flights.append(_Flight(self._exchange, lane, tensors[lane.role]))

    def _wait(self) -> Lease:
        self._land()
        return self._lease()

    def _land(self) -> None:
        for flight in self._flights:
            flight.land(self._header.call)

    def _lease(self) -> Lease:
        landed, self._flights = self._flights, []
        tensors: dict[str, Tensor] = {}
        to: list[Tensor] = []
        come: list[Tensor] = []
        unowned = set()
        for flight in landed:
            role, view = flight.lane.role, flight.in_place()
            if view is not None:
                tensors[role] = view
                unowned.add(role)
            else:
                tensors[role], places, shares = flight.assembly()
                to += places
                come += shares
        if to:
            torch._foreach_copy_(to, come)  # all lanes in one operation, which on a device is one launch
        return Lease(tensors, frozenset(unowned), lambda: self._give_back(landed))

    def _poison(self, roles: frozenset[str]) -> None:
        for lane in self.lanes:
            if lane.role in roles:
                poison(self._exchange.buffer(f"receive {lane.role}", lane.slot_nbytes[self._exchange.rank]))

    def _give_back(self, flights: list[_Flight]) -> None:
        for flight in flights:
            self._exchange.give_back(flight.lane.role)

    def _push_out(self, header: Header, parts: dict[Lane, Tensor]) -> None:
        self.lanes.extend(parts)
        # The header rides on the data: by now all ranks know all sizes, and a second round would cost its latency.
        self._flights.extend(_Flight(self._exchange, lane, out, header) for lane, out in parts.items())

    def _wait_out(self) -> Lease:
        self._land()
        settle(self._flights[0].headers(), self._exchange.rank)
        return self._lease()

    def _refuse(self, reason: str) -> None:
        header = self._next_header().refused(reason)
        if self.plan is None:
            settle(self._exchange.agree(header), self._exchange.rank)
        else:
            nothing = torch.empty(0, dtype=self.plan.out[0].dtype)
            self._flights.extend(_Flight(self._exchange, lane, nothing, header) for lane in self.plan.out)
            self._wait_out()

    def _drain(self) -> None:
        self._land()
        landed, self._flights = self._flights, []
        self._give_back(landed)
