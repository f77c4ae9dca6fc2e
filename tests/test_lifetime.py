"""Many layers, with backends that read late: every output equals a reference that knows nothing of slots, bit for bit.

And the control: the same exchange with its ordering rule broken, and nothing else, fails on data, every time.
"""

from __future__ import annotations

import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from cases import mine
from conftest import Run
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from ithaca import Layout, SdpaBackend, Splits, UlyssesAttention, exchange_for
from ithaca.exchange import slots
from ithaca.exchange.lease import Lease
from ithaca.exchange.peer_memory.interface import Signal

pytestmark = pytest.mark.full

LAYERS, REPLAYS, HEADS, HEAD_DIM = 8, 4, 4, 16


class Late(SdpaBackend):
    """Reads its inputs some time after it was called, a different time on each rank and in each layer."""

    def __init__(self, rank: int) -> None:
        self.rank, self.calls = rank, 0

    @property
    def capabilities(self):  # type: ignore[no-untyped-def]
        from dataclasses import replace

        return replace(super().capabilities, accepts_unowned_inputs=True)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, **options: object) -> Tensor:
        self.calls += 1
        time.sleep(0.004 * ((self.rank + self.calls) % 3))
        return super().forward(q, k, v, **options)  # type: ignore[arg-type]


def projections(x: Tensor, context: Tensor, layer: int) -> tuple[Tensor, Tensor, Tensor]:
    """Q of ``x``, K and V of ``context``, each ``[B, S, H, D]``: different in every layer."""
    generator = torch.Generator().manual_seed(layer)
    weights = torch.randn(3, HEAD_DIM, HEAD_DIM, generator=generator) * HEAD_DIM**-0.5
    return x @ weights[0], context @ weights[1], context @ weights[2]


def gathered(piece: Tensor, sizes: tuple[int, ...]) -> Tensor:
    """By a plain collective: pieces padded to one length, gathered and cut."""
    padded = piece.new_zeros(piece.shape[0], max(sizes), *piece.shape[2:])
    padded[:, : piece.shape[1]] = piece
    everything = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(everything, padded)
    return torch.cat([each[:, :size] for each, size in zip(everything, sizes, strict=True)], dim=1)


def reference(
    q: Tensor, k: Tensor, v: Tensor, q_sizes: tuple[int, ...], kv_sizes: tuple[int, ...], rank: int
) -> Tensor:
    """Everything gathered, all heads attended to a slice at a time as the ranks do, and this rank's tokens kept."""
    whole = [gathered(q, q_sizes), gathered(k, kv_sizes), gathered(v, kv_sizes)]
    heads = Splits.even(HEADS, len(q_sizes)).sizes
    slices = zip(*(t.transpose(1, 2).split(heads, dim=1) for t in whole), strict=True)
    outs = [scaled_dot_product_attention(*(t.contiguous() for t in part)) for part in slices]
    return mine(torch.cat(outs, dim=1).transpose(1, 2), q_sizes, rank)


def layers(rank: int, ranks: int, exchange: str, copy: str, cross: bool) -> None:
    attn = UlyssesAttention(Late(rank), exchange=exchange_for(want=exchange, copy=copy))
    q_sizes = tuple(3 + 2 * r for r in range(ranks))
    kv_sizes = tuple(6 - r for r in range(ranks)) if cross else q_sizes
    order = ("q", "k", "v") if cross else ("v", "q", "k")
    for replay in range(REPLAYS):
        generator = torch.Generator().manual_seed(100 + replay)
        x = mine(torch.randn(2, sum(q_sizes), HEADS, HEAD_DIM, generator=generator), q_sizes, rank)
        context = mine(torch.randn(2, sum(kv_sizes), HEADS, HEAD_DIM, generator=generator), kv_sizes, rank)
        expected = x
        for layer in range(LAYERS):
            parts = projections(x, context if cross else x, layer)
            x = x + attn.forward_async(*(lambda p=p: p for p in parts), issue_order=order)
            parts = projections(expected, context if cross else expected, layer)
            expected = expected + reference(*parts, q_sizes, kv_sizes, rank)
            assert torch.equal(x, expected), (replay, layer)


@pytest.mark.parametrize("cross", [False, True], ids=["self", "cross"])
@pytest.mark.parametrize(("exchange", "copy"), [("slots", "thread"), ("slots", "inline"), ("collective", "auto")])
@pytest.mark.parametrize("ranks", [2, 4])
def test_layers_with_late_readers(on_ranks: Run, ranks: int, exchange: str, copy: str, cross: bool) -> None:
    on_ranks(ranks, layers, ranks, exchange, copy, cross, timeout=150)


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
