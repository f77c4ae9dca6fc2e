"""What simulated ranks are put through: each program runs on every rank, and raises where a result is wrong."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from ithaca.backends.reference import dense_attention
from ithaca.errors import (
    IthacaError,
)
from ithaca.geometry import Layout, Splits
from ithaca.plan import ALIGNMENT
from ithaca.verify import fault_injection as faults
from ithaca.verify.simulated_rank import HEAD_DIM, HEADS, SimulatedRank, attention, one_layer, whole

#: Tokens that do not fit where one did.
_MORE = ALIGNMENT // (HEAD_DIM * 4) + 1


@dataclass(frozen=True)
class Scenario:
    """``limit``: bytes that a slot can have."""

    about: str
    program: Callable[[SimulatedRank], None]
    limit: int = 1 << 20


def _self(sim: SimulatedRank) -> None:
    attn = attention(sim)
    for layer in range(sim.layers):
        sizes = [1 + rank for rank in range(sim.ranks)]
        one_layer(sim, attn, layer, sizes, sizes)


def _owned(sim: SimulatedRank) -> None:
    attn = attention(sim, borrows=False, layout=Layout.NHD)
    for layer in range(sim.layers):
        one_layer(sim, attn, layer, [2] * sim.ranks, [2] * sim.ranks, at_once=layer % 2 == 0)


def _cross(sim: SimulatedRank) -> None:
    attn = attention(sim, layout=Layout.NHD)
    q_sizes, kv_sizes = [1 + rank for rank in range(sim.ranks)], [2 - rank % 2 for rank in range(sim.ranks)]
    for layer in range(sim.layers):
        one_layer(sim, attn, layer, q_sizes, kv_sizes, issue_order=("q", "k", "v"))


def _joint(sim: SimulatedRank) -> None:
    """Text that every rank holds, which is written by its own rank alone and comes home to all."""
    attn = attention(sim)
    sizes = [1 + rank for rank in range(sim.ranks)]
    for layer in range(sim.layers):
        q, k, v, expected = whole(layer, sum(sizes) + 2, sum(sizes) + 2)
        mine = [torch.cat((t[:, :2], t[:, 2:].split(sizes, 1)[sim.rank]), 1) for t in (q, k, v)]
        out = attn.forward_async(*(lambda t=t: t for t in mine), text_tokens=2)
        if not torch.allclose(
            out, torch.cat((expected[:, :2], expected[:, 2:].split(sizes, 1)[sim.rank]), 1), atol=1e-5
        ):
            raise IthacaError(f"layer {layer} of rank {sim.rank} differs from one rank")


def _shared(sim: SimulatedRank) -> None:
    """One head of K and V for two of Q: two ranks are sent the same."""
    attn, sizes = attention(sim), [1 + rank for rank in range(sim.ranks)]
    for layer in range(sim.layers):
        q, k, v, _ = whole(layer, sum(sizes), sum(sizes))
        expected = dense_attention(q, k[:, :, :1], v[:, :, :1]).split(sizes, 1)[sim.rank]
        q, k, v = (t.split(sizes, 1)[sim.rank] for t in (q, k[:, :, :1], v[:, :, :1]))
        if not torch.allclose(attn(q, k, v), expected, atol=1e-5):
            raise IthacaError(f"layer {layer} of rank {sim.rank} differs from one rank")


def _growing(sim: SimulatedRank) -> None:
    """Lengths that grow, shrink and are zero on some ranks."""
    attn = attention(sim)
    for layer in range(sim.layers):
        # The third layer's lanes are the first one's, in memory that has moved since.
        tokens = (1, _MORE, 1, 2 * _MORE)[layer % 4]
        sizes = [tokens if (rank + layer) % 2 else 0 for rank in range(sim.ranks)]
        one_layer(sim, attn, layer, sizes, sizes, at_once=layer % 2 == 1)


def _trimmed(sim: SimulatedRank) -> None:
    """Memory is given back between calls, with a lease out too, and made again."""
    attn, exchange = attention(sim), sim.exchange
    for layer in range(sim.layers):
        one_layer(sim, attn, layer, [1] * sim.ranks, [2] * sim.ranks)
        with exchange.call(("gather",), Layout.NHD, gathered=True) as call:
            call.push(gather=torch.full((1, 1, 1, HEAD_DIM), float(sim.rank)))
            held = call.wait()
            call._leases.clear()
        exchange.trim()
        if any(sim.memory.capacity(role) for role in ("q", "k", "v", "out", "gather")) or exchange.targets._views:
            raise IthacaError(f"rank {sim.rank} has memory after it was trimmed")
        if held["gather"][0, :, 0, 0].tolist() != list(range(sim.ranks)):
            raise IthacaError(f"rank {sim.rank} held a lease, and its data changed")
        held.release()


def _sanitized(sim: SimulatedRank) -> None:
    """What was lent is poisoned at the end."""
    attn = attention(sim, borrows=False, sanitize=True)
    for layer in range(sim.layers):
        one_layer(sim, attn, layer, [1] * sim.ranks, [2] * sim.ranks)
    if not (sim.memory.slot(sim.rank, "out", 16) == 0xFF).all():
        raise IthacaError(f"rank {sim.rank} has no poison where its output was lent")


def _counted(sim: SimulatedRank) -> None:
    """The bytes that are said to have moved are those of the plan, and no lane grows that need not."""
    attn, sizes = attention(sim, borrows=False), list(range(1, sim.ranks))
    sizes.append(ALIGNMENT // (HEAD_DIM * 4) - sum(sizes))  # a slot that is filled to its last byte
    for layer in range(sim.layers):
        one_layer(sim, attn, layer, sizes, sizes)
    heads = Splits.even(HEADS, sim.ranks).sizes
    sent = 3 * sizes[sim.rank] * (HEADS - heads[sim.rank]) + heads[sim.rank] * (sum(sizes) - sizes[sim.rank])
    if sim.exchange.counters.bytes_moved != sim.layers * sent * HEAD_DIM * 4:
        raise IthacaError(f"rank {sim.rank} says that it has sent {sim.exchange.counters.bytes_moved} bytes")
    if sim.memory.generation != 4:
        raise IthacaError(f"four lanes were required to grow once each; there were {sim.memory.generation} growths")


def _outer(sim: SimulatedRank) -> None:
    """A lease that is held while the next push is on its way, as an outer strategy holds one; lengths grow."""
    exchange = sim.exchange
    held = None
    for layer in range(sim.layers):
        value = float(layer + 1)
        with exchange.call(("gather",), Layout.NHD, gathered=True) as call:
            call.push(gather=torch.full((1, 1 + layer // 2 * _MORE, 1, HEAD_DIM), value + sim.rank))
            if held is not None:
                for rank in range(sim.ranks):
                    sim.point()
                    tokens = 1 + (layer - 1) // 2 * _MORE
                    if not (held["gather"][:, rank * tokens : (rank + 1) * tokens] == value - 1 + rank).all():
                        raise IthacaError(f"rank {sim.rank} held a lease, and its data changed")
                held.release()
            held = call.wait()
            call._leases.clear()
    assert held is not None
    held.release()


SCENARIOS: dict[str, Scenario] = {
    "self": Scenario("self-attention on slots, lengths that differ between ranks", _self),
    "owned": Scenario("a backend that gets copies; calls at once and lane by lane", _owned),
    "cross": Scenario("cross-attention with Q first and other lengths", _cross),
    "joint": Scenario("text that every rank holds, beside the image", _joint),
    "shared-heads": Scenario("a head of K and V that two ranks need", _shared),
    "growing": Scenario("lengths that grow, shrink and are zero", _growing),
    "trimmed": Scenario("memory is given back between calls", _trimmed),
    "sanitized": Scenario("sanitize mode", _sanitized),
    "counted": Scenario("bytes are counted", _counted),
    "outer": Scenario("a lease that is held across the next push", _outer),
    "closure-raises": Scenario("a closure raises on one rank", faults.closure_raises),
    "backend-raises": Scenario("a backend raises on one rank", faults.backend_raises),
    "orders-differ": Scenario("ranks disagree on the issue order", faults.orders_differ),
    "too-large": Scenario("growth fails on all ranks or none", faults.too_large, limit=512),
    "refuses": Scenario("a rank refuses a call", faults.refuses),
    "corrupt-header": Scenario("a rank sends what is no header", faults.corrupt_header),
    "bad-input": Scenario("tensors that no slot can carry", faults.bad_input),
    "verdict-replaced": Scenario("a caller turns the group's error into one of its own", faults.verdict_replaced),
    "late-error": Scenario("a rank fails with its output on the way, another has refused", faults.late_error),
    "stale-first": Scenario("the first rank's share is not what its signal says", partial(faults.stale, source=0)),
    "stale-second": Scenario("the second rank's share is not what its signal says", partial(faults.stale, source=1)),
    "abandoned": Scenario("a rank leaves a call for good", faults.abandoned),
    "leaves-with-lease": Scenario("a rank leaves with what the others wait for", faults.leaves_with_lease),
    "destroyed": Scenario("a rank destroys its exchange", faults.destroyed),
    "no-thread": Scenario("set-up fails", faults.no_thread),
}
