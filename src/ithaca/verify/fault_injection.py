"""Programs of simulated ranks in which something goes wrong, as it should: the right error on every rank, and on."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from ithaca.backends.sdpa import SdpaBackend
from ithaca.errors import (
    ClosureError,
    CorruptHeaderError,
    ExchangeClosedError,
    GrowthError,
    InvalidInputError,
    IthacaError,
    PeerDiedError,
    PeerRefusedError,
    PlanMismatchError,
    StaleSlotError,
    UnsupportedError,
)
from ithaca.exchange.lease import Lease
from ithaca.exchange.peer_memory.simulated import SimulatedMachine, SimulatedPeerMemory
from ithaca.geometry import Layout
from ithaca.strategies.ulysses import UlyssesAttention
from ithaca.verify.simulated_rank import HEAD_DIM, HEADS, SimulatedRank, attention, one_layer, raises


def stale(sim: SimulatedRank, source: int) -> None:
    """A share that ``source`` says it has written, and has not, is found by its stamp in sanitize mode."""
    attn, reader = attention(sim, borrows=False, sanitize=True), (source + 1) % sim.ranks
    one_layer(sim, attn, 0, [1] * sim.ranks, [2] * sim.ranks)
    if sim.rank == source:
        memory: Any = sim.memory
        here, unwritten = memory.stamps, torch.zeros(sim.ranks, dtype=torch.int64)
        memory.stamps = lambda rank, role: unwritten if (rank, role) == (reader, "v") else here(rank, role)
    call = partial(one_layer, sim, attn, 9, [1] * sim.ranks, [2] * sim.ranks)
    if sim.rank == reader:
        raises(StaleSlotError, call, f"rank {reader}: lane v was required to hold what rank {source} wrote in call 2")
    else:
        raises((ExchangeClosedError, PeerDiedError), call)


def closure_raises(sim: SimulatedRank) -> None:
    """One rank's closure raises, after none, one or two lanes; the call after it is right."""
    attn = attention(sim)

    def boom() -> Tensor:
        raise ValueError("boom")

    good = torch.ones(1, 1, HEADS, HEAD_DIM)
    for layer, bad in enumerate(("v", "q", "k")[: sim.layers]):
        culprit = layer % sim.ranks
        closures = {role: boom if role == bad and sim.rank == culprit else (lambda: good) for role in "qkv"}
        error = ClosureError if sim.rank == culprit else PeerRefusedError
        raises(error, partial(attn.forward_async, closures["q"], closures["k"], closures["v"]))
        one_layer(sim, attn, layer, [1] * sim.ranks, [2] * sim.ranks)


class _Fails(SdpaBackend):
    def forward(self, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        raise RuntimeError("kernel on fire")


def backend_raises(sim: SimulatedRank) -> None:
    """One rank's backend raises, when all lanes have arrived: first where the output's slot is not there yet."""
    good = attention(sim)
    one = torch.ones(1, 1, HEADS, HEAD_DIM)
    for layer in range(sim.layers):
        culprit = layer % min(sim.ranks, HEADS)  # one that has heads to attend to
        attn = UlyssesAttention(_Fails(), exchange=sim.exchange) if sim.rank == culprit else good
        error = ClosureError if sim.rank == culprit else PeerRefusedError
        raises(error, partial(attn.forward_async, lambda: one, lambda: one, lambda: one))
        one_layer(sim, good, layer, [1] * sim.ranks, [1] * sim.ranks)


def orders_differ(sim: SimulatedRank) -> None:
    """Ranks that issue in another order are told, and then do better."""
    attn = attention(sim)
    one = torch.ones(1, 1, HEADS, HEAD_DIM)
    for layer in range(sim.layers):
        order = ("v", "q", "k") if sim.rank == layer % sim.ranks else ("q", "k", "v")
        call = partial(attn.forward_async, lambda: one, lambda: one, lambda: one, issue_order=order)
        raises(PlanMismatchError, call)
        one_layer(sim, attn, layer, [1] * sim.ranks, [1] * sim.ranks)


def too_large(sim: SimulatedRank) -> None:
    """Growth that some rank cannot follow: an error on all, and what was there still works."""
    attn = attention(sim)
    large = torch.ones(1, 40, HEADS, HEAD_DIM)
    for layer in range(sim.layers):
        one_layer(sim, attn, layer, [1] * sim.ranks, [2] * sim.ranks)
        raises(GrowthError, lambda: attn(large, large, large))
    one_layer(sim, attn, sim.layers, [1] * sim.ranks, [2] * sim.ranks)


class _Abandoned(BaseException):
    """What Ctrl-C is: not an error that ranks could agree on."""


def abandoned(sim: SimulatedRank) -> None:
    """A rank leaves in the middle of a call, for good; the others come later, and are told why at once."""
    attn, one = attention(sim), torch.ones(1, 1, HEADS, HEAD_DIM)
    one_layer(sim, attn, 0, [1] * sim.ranks, [1] * sim.ranks)
    leaves = sim.rank == sim.ranks - 1
    sim.notes.add(f"rank {sim.rank} is done")
    sim.until(lambda: len(sim.notes) == sim.ranks)  # who hears of it in the layer before may end there

    def q() -> Tensor:
        if leaves:
            raise _Abandoned
        return one

    if not leaves:
        sim.until(lambda: sim.ranks - 1 in sim.memory.machine.closed)
    call = partial(attn.forward_async, q, lambda: one, lambda: one)
    raises(_Abandoned if leaves else ExchangeClosedError, call, "" if leaves else "gave up: _Abandoned")
    raises(ExchangeClosedError, partial(attn, one, one, one), "closed by an earlier error")


def destroyed(sim: SimulatedRank) -> None:
    """A rank that has destroyed its exchange is missed by the next call of another."""
    attn, one = attention(sim), torch.ones(1, 1, HEADS, HEAD_DIM)
    one_layer(sim, attn, 0, [1] * sim.ranks, [1] * sim.ranks)
    if sim.rank == 0:
        sim.exchange.destroy()
    else:
        raises((PeerDiedError, ExchangeClosedError), partial(attn, one, one, one), "rank 0 closed")


def leaves_with_lease(sim: SimulatedRank) -> None:
    """A rank leaves with its lease of the last call and its push of the next: the others say what they miss of it."""

    def gather() -> None:
        with sim.exchange.call(("gather",), Layout.NHD, gathered=True) as call:
            call.push(gather=torch.ones(1, 1, 1, HEAD_DIM))
            if call._header.call == 2 and sim.rank == 0:
                sim.exchange.destroy()
            held.append(call.wait())
            if sim.rank == 0:
                call._leases.clear()

    held: list[Lease] = []
    gather()
    if sim.rank == 0:
        raises(ExchangeClosedError, gather)
    else:
        raises((PeerDiedError, ExchangeClosedError), gather, "was expected to send a credit of lane gather in call 2")


def refuses(sim: SimulatedRank) -> None:
    """A rank refuses a call before it begins, and is held up until the others are there."""
    attn, one = attention(sim), torch.ones(1, 1, HEADS, HEAD_DIM)
    for layer in range(sim.layers):
        one_layer(sim, attn, layer, [1] * sim.ranks, [2] * sim.ranks)
        sim.notes.add(f"rank {sim.rank} enters {layer}")
        if sim.rank == layer % sim.ranks:
            sim.exchange.refuse("no time")
            for rank in range(sim.ranks):
                if f"rank {rank} enters {layer}" not in sim.notes:
                    raise IthacaError(f"rank {sim.rank} has refused a call that rank {rank} did not enter yet")
        else:
            raises(PeerRefusedError, partial(attn, one, one, one), f"rank {layer % sim.ranks} refused: no time")
    one_layer(sim, attn, sim.layers, [1] * sim.ranks, [2] * sim.ranks)


def corrupt_header(sim: SimulatedRank) -> None:
    """What a rank sends is not a header: it is named, and the exchange is over."""
    one = torch.ones(1, 1, HEADS, HEAD_DIM)
    if sim.rank == 1:
        sim.memory.announce(bytes(1024))
    errors = (ExchangeClosedError,) if sim.rank == 1 else (CorruptHeaderError, ExchangeClosedError)
    raises(errors, partial(attention(sim), one, one, one), "rank 1 was required to send an Ithaca header")


def bad_input(sim: SimulatedRank) -> None:
    """A tensor that no exchange or not this one can carry: refused before it is announced, and told to the others."""
    attn, good = attention(sim), torch.ones(1, 1, HEADS, HEAD_DIM)
    bad = {InvalidInputError: torch.ones(1, 1, 2), UnsupportedError: torch.empty(1, 1, 2, 2, device="meta")}
    for layer, (error, tensor) in enumerate(bad.items()):

        def push(tensor: Tensor) -> None:
            with sim.exchange.call(("v", "q", "k"), Layout.HND) as call:
                call.push(v=tensor)
                call.push(q=good, k=good)
                call.wait()

        if sim.rank == layer % sim.ranks:
            raises(error, partial(push, tensor))
        else:
            raises(PeerRefusedError, partial(push, good))
        one_layer(sim, attn, layer, [1] * sim.ranks, [2] * sim.ranks)


def verdict_replaced(sim: SimulatedRank) -> None:
    """A caller that puts an error of its own in the place of the verdict refuses a call that the others have left."""
    attn, one = attention(sim), torch.ones(1, 1, 2, 2)

    def replaces(order: tuple[str, ...]) -> None:
        with sim.exchange.call(order, Layout.HND) as call:
            call.push(v=one)
            try:
                call.wait()
            except PlanMismatchError:
                if sim.rank == 0:
                    raise ValueError("something else") from None
                raise

    for layer in range(sim.layers):
        order = ("v", "q", "k") if sim.rank == 0 else ("v", "k", "q")
        raises(ValueError if sim.rank == 0 else PlanMismatchError, partial(replaces, order))
        one_layer(sim, attn, layer, [1] * sim.ranks, [1] * sim.ranks)


def late_error(sim: SimulatedRank) -> None:
    """One rank refuses the output; another has sent its own, and fails before it has waited for the others'."""
    attn, one = attention(sim), torch.ones(1, 1, HEADS, HEAD_DIM)

    def fails() -> None:
        with sim.exchange.call(("v", "q", "k"), Layout.NHD) as call:
            call.push(v=one, q=one, k=one)
            with call.wait() as inputs:
                out = inputs["q"].clone()
            if sim.rank == 0:
                raise ValueError("early")
            call.push_out(out, Layout.NHD)
            raise ValueError("late")

    for layer in range(sim.layers):
        one_layer(sim, attn, layer, [1] * sim.ranks, [1] * sim.ranks)
        raises(ValueError, fails)
    one_layer(sim, attn, sim.layers, [1] * sim.ranks, [1] * sim.ranks)


class _NoThread(str):
    """A copy mode for a machine that starts no thread."""

    __hash__ = str.__hash__

    def __eq__(self, other: object) -> bool:
        raise RuntimeError("can't start new thread")


def no_thread(sim: SimulatedRank) -> None:
    """An exchange that cannot be made gives its memory back."""
    shared = sim.memory.machine
    machine = SimulatedMachine(shared.world_size, shared.agents, shared.history)
    memory = SimulatedPeerMemory(machine, sim.rank)
    raises(RuntimeError, lambda: type(sim.exchange)(memory, 60.0, _NoThread()))
    if machine.closed != {sim.rank}:
        raise IthacaError(f"rank {sim.rank} did not close the memory of an exchange that could not be made")
