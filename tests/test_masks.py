"""Masks, whole or in shards, boolean or additive: none is dropped, reordered, or let into the sum."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from cases import NhdBackend, mine
from conftest import Run
from torch import Tensor

from ithaca import Capabilities, IthacaError, SdpaBackend, UlyssesAttention
from ithaca.backends.reference import dense_attention

pytestmark = pytest.mark.full

EXCHANGES = ["slots", "collective"]
BATCH, HEADS, KV_HEADS, DIM = 2, 6, 2, 8
Q_SIZES, KV_SIZES = (3, 0, 5), (2, 4, 1)


@dataclass(frozen=True)
class Masked:
    """``over``: "keys" for ``[B, S_kv]``, "all" for ``[B, H, S_q, S_kv]``, "one" with one head and one batch."""

    over: str
    additive: bool
    sharded: bool
    causal: bool = False


CASES = [
    *(Masked(over, additive, sharded) for over in ("keys", "all", "one") for additive in (0, 1) for sharded in (0, 1)),
    *(Masked(over, False, sharded, causal=True) for over in ("none", "keys", "all") for sharded in (0, 1)),
]


def tensors(causal: bool) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    keys = sum(Q_SIZES if causal else KV_SIZES)
    shapes = ((sum(Q_SIZES), HEADS), (keys, KV_HEADS), (keys, KV_HEADS))
    q, k, v = (torch.randn(BATCH, n, heads, DIM, generator=generator) for n, heads in shapes)
    return q, k, v


def mask_of(case: Masked) -> Tensor | None:
    """With a row that has no key at all."""
    q_len, kv_len = sum(Q_SIZES), sum(Q_SIZES if case.causal else KV_SIZES)
    generator = torch.Generator().manual_seed(2)
    if case.over == "none":
        return None
    if case.over == "keys":
        mask = torch.rand(BATCH, kv_len, generator=generator) > 0.4
        mask[1] = False
    else:
        batch, heads = (BATCH, HEADS) if case.over == "all" else (1, 1)
        mask = torch.rand(batch, heads, q_len, kv_len, generator=generator) > 0.4
        mask[:, :, 2] = False
    if not case.additive:
        return mask
    return torch.randn(mask.shape, generator=generator).masked_fill(~mask, float("-inf"))


def shard_of(mask: Tensor, case: Masked, rank: int) -> Tensor:
    sizes = Q_SIZES if case.causal or case.over != "keys" else KV_SIZES
    return mine(mask, sizes, rank, dim=1 if case.over == "keys" else 2)


def masked(rank: int, exchange: str, nhd: bool, asynchronous: bool) -> None:
    attn = UlyssesAttention(NhdBackend(True) if nhd else SdpaBackend(), exchange=exchange)
    for case in CASES:
        whole, mask = tensors(case.causal), mask_of(case)
        kv_sizes = Q_SIZES if case.causal else KV_SIZES
        q, k, v = (mine(t, s, rank) for t, s in zip(whole, (Q_SIZES, kv_sizes, kv_sizes), strict=True))
        wide = None if mask is None else mask[:, None, None] if mask.dim() == 2 else mask
        if wide is not None and wide.dtype is not torch.bool:
            wide = wide.double()
        expected = mine(dense_attention(*(t.double() for t in whole), mask=wide, causal=case.causal), Q_SIZES, rank)
        options: dict[str, Any] = {"mask": mask, "causal": case.causal}
        if case.sharded and mask is not None:
            options.update(mask=shard_of(mask, case, rank), mask_sharded=True)
        out = (
            attn.forward_async(lambda q=q: q, lambda k=k: k, lambda v=v: v, **options)
            if asynchronous
            else attn(q, k, v, **options)
        )  # type: ignore[misc]
        assert out.isfinite().all(), case
        assert out.numel() == 0 or (out.double() - expected).abs().max() < 1e-5, case


@pytest.mark.parametrize("exchange", EXCHANGES)
@pytest.mark.parametrize("nhd", [False, True])
@pytest.mark.parametrize("asynchronous", [False, True])
def test_masks(on_ranks: Run, exchange: str, nhd: bool, asynchronous: bool) -> None:
    on_ranks(3, masked, exchange, nhd, asynchronous)


def padded(rank: int, exchange: str) -> None:
    """Keys that are padding take no part: the result is that of the keys without them, whatever they hold."""
    attn = UlyssesAttention(SdpaBackend(), exchange=exchange)
    q, k, v = tensors(causal=False)
    dense = dense_attention(q.double(), k.double(), v.double())
    keep = torch.zeros(BATCH, 3 * 5, dtype=torch.bool)
    places = torch.tensor([0, 1, 6, 7, 8, 9, 12])  # two, four and one of five on each rank, in their order
    keep[:, places] = True
    padded_k, padded_v = (torch.full((BATCH, 15, KV_HEADS, DIM), 1e4) for _ in range(2))
    padded_k[:, places], padded_v[:, places] = k, v
    pieces = (mine(q, Q_SIZES, rank), mine(padded_k, (5, 5, 5), rank), mine(padded_v, (5, 5, 5), rank))
    for options in ({"mask": keep}, {"mask": mine(keep, (5, 5, 5), rank), "mask_sharded": True}):
        out = attn(*pieces, **options)  # type: ignore[arg-type]
        assert out.numel() == 0 or (out - mine(dense, Q_SIZES, rank)).abs().max() < 1e-5


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_padding_takes_no_part(on_ranks: Run, exchange: str) -> None:
    on_ranks(3, padded, exchange)


class Plain(SdpaBackend):
    """Takes no mask and is not causal."""

    @property
    def capabilities(self) -> Capabilities:
        return replace(super().capabilities, masks=False, causal=False)


def refused(rank: int, exchange: str, how: str) -> str:
    attn = UlyssesAttention(SdpaBackend(), exchange=exchange)
    q, k, v = (mine(t, s, rank) for t, s in zip(tensors(False), (Q_SIZES, KV_SIZES, KV_SIZES), strict=True))
    keys = torch.ones(BATCH, KV_SIZES[rank], dtype=torch.bool)
    rows = torch.ones(BATCH, 1, Q_SIZES[rank], 7, dtype=torch.bool)
    calls = {
        "no masks": lambda: UlyssesAttention(Plain(), exchange=exchange)(q, k, v, mask=keys, mask_sharded=True),
        "not causal": lambda: UlyssesAttention(Plain(), exchange=exchange)(q, q, q, causal=True),
        "causal over others": lambda: attn(q, k, v, causal=True),
        "no mask": lambda: attn(q, k, v, mask_sharded=True),
        "a shard of nothing": lambda: attn(q, k, v, mask=torch.ones(BATCH, 9, dtype=torch.bool), mask_sharded=True),
        "keys here, rows there": lambda: attn(q, k, v, mask=rows if rank else keys, mask_sharded=True),
        "a shard of whole keys": lambda: attn(
            q, *tensors(False)[1:], mask=torch.ones(BATCH, 7, dtype=torch.bool), mask_sharded=True, kv_replicated=True
        ),
        "a shard here, a whole one there": lambda: attn(
            q, k, v, mask=torch.ones(BATCH, 7) if rank else torch.zeros(keys.shape), mask_sharded=not rank
        ),
    }
    try:
        calls[how]()
    except IthacaError as error:
        said = f"{type(error).__name__}: {error}"
    assert attn(q, k, v).shape == q.shape
    return said


@pytest.mark.parametrize("exchange", EXCHANGES)
@pytest.mark.parametrize(
    ("how", "says"),
    [
        (
            "no masks",
            "UnsupportedError: rank . Plain takes no mask, and none is ever dropped|UnsupportedError.*no mask",
        ),
        ("not causal", "Plain was required to attend causally, and cannot"),
        ("causal over others", "as many keys as queries; received 8 queries and 7 keys"),
        ("no mask", "a mask was required of which this rank holds a shard; received None"),
        ("a shard of nothing", "the shard of a mask was required to be"),
        ("a shard of whole keys", "a mask over the queries was required .* K and V whole; received \\[2, 7\\]"),
        ("keys here, rows there", "PlanMismatchError"),
        ("a shard here, a whole one there", "PlanMismatchError.*mask in shards"),
    ],
)
def test_what_no_mask_can_be(on_ranks: Run, exchange: str, how: str, says: str) -> None:
    for said in on_ranks(3, refused, exchange, how):
        assert re.search(says, said, re.DOTALL), said
