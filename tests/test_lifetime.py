"""Many layers, with backends that read late: every output equals a reference that knows nothing of slots, bit for bit.

And the control: the same exchange with its ordering rule broken, and nothing else, fails on data, every time.
"""

from __future__ import annotations

import time
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch._dynamo
import torch.distributed as dist
from cases import GatedBackend, mine
from conftest import Run
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from ithaca import Capabilities, Layout, Splits, UlyssesAttention, exchange_for
from ithaca.exchange import slots
from ithaca.exchange.lease import Lease
from ithaca.exchange.peer_memory.interface import Signal

pytestmark = pytest.mark.full

LAYERS, REPLAYS, HEADS, HEAD_DIM = 8, 4, 4, 16


class Late(GatedBackend):
    """Reads its inputs late: after a real delay, or exactly when it is its turn.

    In a turn, a rank reads only when those before it have read, in an order that rotates from layer to layer: so each
    is in every place while its peers are as far ahead as anything lets them.
    """

    def __init__(self, rank: int, ranks: int) -> None:
        super().__init__()
        self.rank, self.ranks, self.calls, self.in_turn = rank, ranks, 0, False
        self.store, self.name = dist.distributed_c10d._get_default_store(), ""

    @property
    def capabilities(self) -> Capabilities:
        return replace(super().capabilities, accepts_unowned_inputs=True)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        self.calls += 1
        place = (self.rank + self.calls) % self.ranks
        if not self.in_turn:
            time.sleep(0.004 * ((self.rank + self.calls) % 3))
            return super().forward(q, k, v, **options)
        if place:
            self.store.wait([f"{self.name} {self.calls} {place - 1}"], timedelta(seconds=30))
        out = super().forward(q, k, v, **options)
        self.store.set(f"{self.name} {self.calls} {place}", "read")
        return out


def projections(x: Tensor, context: Tensor, first: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Q of ``x``, K and V of ``context``, and a gate of ``first``, lest it grow: each ``[B, S, H, D]``."""
    return x @ weights[0], context @ weights[1], context @ weights[2], first @ weights[3]


def gathered(piece: Tensor, sizes: tuple[int, ...]) -> Tensor:
    """By a plain collective: pieces padded to one length, gathered and cut."""
    padded = piece.new_zeros(piece.shape[0], max(sizes), *piece.shape[2:])
    padded[:, : piece.shape[1]] = piece
    everything = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(everything, padded)
    return torch.cat([each[:, :size] for each, size in zip(everything, sizes, strict=True)], dim=1)


def reference(
    q: Tensor, k: Tensor, v: Tensor, gate: Tensor | None, q_sizes: tuple[int, ...], kv_sizes: tuple[int, ...], rank: int
) -> Tensor:
    """Everything gathered, all heads attended to a slice at a time as the ranks do, and this rank's tokens kept."""
    whole = [gathered(q, q_sizes), gathered(k, kv_sizes), gathered(v, kv_sizes)]
    heads = Splits.even(HEADS, len(q_sizes)).sizes
    slices = zip(*(t.transpose(1, 2).split(heads, dim=1) for t in whole), strict=True)
    outs = [scaled_dot_product_attention(*(t.contiguous() for t in part)) for part in slices]
    out = mine(torch.cat(outs, dim=1).transpose(1, 2), q_sizes, rank)
    return out if gate is None else out * gate


def layers(rank: int, ranks: int, exchange: str, copy: str, cross: bool, gated: bool, compiled: bool) -> None:
    torch._dynamo.reset()
    backend = Late(rank, ranks)
    attn = UlyssesAttention(backend, exchange=exchange_for(want=exchange, copy=copy))
    q_sizes = tuple(3 + 2 * r for r in range(ranks))
    kv_sizes = tuple(6 - r for r in range(ranks)) if cross else q_sizes
    order = None if not cross else ("q", *(["gate.fine"] if gated else []), "k", "v")
    generator = torch.Generator().manual_seed(3)
    weights = torch.randn(LAYERS, 4, HEAD_DIM, HEAD_DIM, generator=generator) * HEAD_DIM**-0.5

    def attended(x: Tensor, context: Tensor) -> list[Tensor]:
        after, first = [], x
        for layer in range(LAYERS):
            q, k, v, gate = projections(x, context if cross else x, first, weights[layer])
            gates = {"fine": lambda gate=gate: gate} if gated else None
            x = x + attn.forward_async(lambda q=q: q, lambda k=k: k, lambda v=v: v, gates=gates, issue_order=order)
            after.append(x)
        return after

    if compiled:
        attended = torch.compile(attended, fullgraph=True)
    for replay in range(REPLAYS):
        backend.in_turn, backend.name = replay % 2 == 1, f"{exchange} {copy} {cross} {gated} {compiled} {replay}"
        generator = torch.Generator().manual_seed(100 + replay)
        x = mine(torch.randn(2, sum(q_sizes), HEADS, HEAD_DIM, generator=generator), q_sizes, rank)
        context = mine(torch.randn(2, sum(kv_sizes), HEADS, HEAD_DIM, generator=generator), kv_sizes, rank)
        results, expected = attended(x, context), x
        for layer, result in enumerate(results):
            q, k, v, gate = projections(expected, context if cross else expected, x, weights[layer])
            expected = expected + reference(q, k, v, gate if gated else None, q_sizes, kv_sizes, rank)
            assert result.isfinite().all() and torch.equal(result, expected), (replay, layer)
    assert backend.calls == LAYERS * REPLAYS


@pytest.mark.parametrize("gated", [False, True], ids=["plain", "gates"])
@pytest.mark.parametrize("cross", [False, True], ids=["self", "cross"])
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compile"])
@pytest.mark.parametrize(("exchange", "copy"), [("slots", "thread"), ("slots", "inline"), ("collective", "auto")])
@pytest.mark.parametrize("ranks", [2, 4])
def test_layers_with_late_readers(
    on_ranks: Run, ranks: int, exchange: str, copy: str, compiled: bool, cross: bool, gated: bool
) -> None:
    on_ranks(ranks, layers, ranks, exchange, copy, cross, gated, compiled, timeout=170)


def next_push(rank: int, early_credits: bool) -> bool:
    """Whether what rank 1 holds under a lease changed when rank 0 made its next push. No step depends on time alone.

    Rank 1 reads when rank 0's push has been carried out, or, if that never comes, when it has waited a while for it.
    """
    exchange = exchange_for(dist.new_group([0, 1]), "slots", copy="thread")
    store = dist.distributed_c10d._get_default_store()
    key = f"pushed with early credits {early_credits}"
    if early_credits:
        give_credits_early()
    first, second = (torch.full((1, 3, 2, 4), value) for value in (1.0, 2.0))
    with exchange.call(("gather",), Layout.NHD, gathered=True) as call:
        call.push(gather=first)
        lease = call.wait()
        if rank == 1:
            call._leases.clear()  # the lease outlives its call, as that of an outer strategy does
    with exchange.call(("gather",), Layout.NHD, gathered=True) as call:
        call.push(gather=second)
        if rank == 0:
            exchange.stream.flush()  # type: ignore[attr-defined]
            store.set(key, "yes")
            changed = False
        else:
            try:
                store.wait([key], timedelta(seconds=20 if early_credits else 0.5))
                pushed = True
            except dist.DistStoreError:
                pushed = False
            changed = bool((lease["gather"] != 1).any())
            assert pushed is early_credits
            lease.release()
        with call.wait() as after:
            assert (after["gather"] == 2).all()
    return changed


def give_credits_early() -> None:
    """Break the ordering rule and nothing else: credits go out with the lease, and not with its release."""
    lease_of = slots._SlotCall._lease

    def lease_early(call: slots._SlotCall) -> Lease:
        landed = list(call._due)
        lease = lease_of(call)
        lease._give_back = lambda: None
        for lane, sources in landed:
            call._memory.signal(Signal.CREDIT, lane.role, sources)
        return lease

    slots._SlotCall._lease = lease_early  # type: ignore[method-assign]


@pytest.mark.parametrize("repeat", range(3))
def test_without_the_ordering_rule_the_data_is_wrong(repeat: int) -> None:
    from ithaca import run_ranks

    assert run_ranks(next_push, 2, True) == [False, True]


def test_with_it_the_data_is_right() -> None:
    from ithaca import run_ranks

    assert run_ranks(next_push, 2, False) == [False, False]
