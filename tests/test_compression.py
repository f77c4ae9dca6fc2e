"""Lanes as bytes: what they cost on the wire, what they cost in accuracy, and that the rest is as ever."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from cases import NhdBackend, mine
from conftest import Run
from hypothesis import given
from hypothesis import strategies as st

from ithaca import InvalidInputError, IthacaError, SdpaBackend, UlyssesAttention
from ithaca.backends.reference import dense_attention
from ithaca.strategies.compression import FORMATS, loss, pack, unpack

EXCHANGES = ["slots", "collective"]
HEADS, KV_HEADS, DIM = 6, 2, 16
#: Largest error of a value, in parts of the largest of its row.
STEP = {"int8": 0.52 / 127, "float8": 1 / 16}


@pytest.mark.fast
@given(st.sampled_from(FORMATS), st.floats(1e-6, 1e6), st.integers(1, 9), st.integers(0, 100))
def test_a_value_is_off_by_half_a_step_at_most(format: str, magnitude: float, dim: int, seed: int) -> None:
    tensor = torch.randn(2, 3, 2, dim, generator=torch.Generator().manual_seed(seed)) * magnitude
    tensor[0, 0] = 0.0
    packed = pack(tensor, format)
    assert packed.dtype is torch.uint8 and packed.shape == (2, 3, 2, dim + 4)
    back = unpack(packed, format, torch.float32)
    limit = tensor.abs().amax(-1, keepdim=True) * STEP[format] * 1.001
    assert ((back - tensor).abs() <= limit).all() and (back[0, 0] == 0).all()


@pytest.mark.fast
def test_what_is_no_number_stays_none() -> None:
    for format in FORMATS:
        tensor = torch.ones(1, 1, 3, 4)
        tensor[0, 0, 0, 1], tensor[0, 0, 1, 1] = math.nan, math.inf
        back = unpack(pack(tensor, format), format, torch.float32)
        assert back[0, 0, 0, 1].isnan() and not back[0, 0, 1].isfinite().all() and (back[0, 0, 2] == 1).all()
        assert pack(torch.zeros(1, 0, 3, 4), format).shape == (1, 0, 3, 8)


@pytest.mark.fast
def test_the_loss_is_reported() -> None:
    tensor = torch.randn(1, 200, 4, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    assert loss(tensor, "int8").cosine > 0.9999 > loss(tensor, "float8").cosine > 0.999
    assert 0 < loss(tensor, "int8").rms < loss(tensor, "int8").largest < 0.05
    with pytest.raises(InvalidInputError, match="received 'int4'"):
        loss(tensor, "int4")


def whole(dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(2, 8, h, DIM, generator=generator).to(dtype) for h in (HEADS, KV_HEADS, KV_HEADS)]


COMPRESS: list[Any] = [
    "int8",
    "float8",
    {"q": "int8"},
    {"k": "float8", "v": "int8"},
    {"q": "int8", "k": "int8", "v": "int8", "out": "int8"},
    {"out": "float8"},
]


def compressed(rank: int, exchange: str, asynchronous: bool) -> None:
    """Attention over what arrives, and the bytes that it took."""
    for backend in (SdpaBackend(), NhdBackend(True), NhdBackend()):
        attn = UlyssesAttention(backend, exchange=exchange)
        for compress in COMPRESS:
            for extra in ({}, {"text_tokens": 2}, {"kv_replicated": True}):
                tensors, sizes = whole(), (3, 5)
                formats = dict.fromkeys("qkv", compress) if isinstance(compress, str) else compress
                text = extra.get("text_tokens", 0)
                if text:
                    tensors, sizes = [torch.cat((t[:, :2], t), 1) for t in tensors], (3, 5)
                moving = "q" if "kv_replicated" in extra else "qkv"
                arrived = [
                    unpack(pack(t, formats[r]), formats[r], t.dtype) if r in formats and r in moving else t
                    for r, t in zip("qkv", tensors, strict=True)
                ]
                if text:  # a rank's own text takes the same way
                    expected = dense_attention(*arrived)
                    expected = torch.cat((expected[:, :2], mine(expected[:, 2:], sizes, rank)), 1)
                    q, k, v = (torch.cat((t[:, :2], mine(t[:, 2:], sizes, rank)), 1) for t in tensors)
                else:
                    expected = mine(dense_attention(*arrived), sizes, rank)
                    q, k, v = (mine(t, sizes, rank) if r in moving else t for r, t in zip("qkv", tensors, strict=True))
                if "out" in formats:
                    expected = unpack(pack(expected, formats["out"]), formats["out"], expected.dtype)
                before = attn.exchange.counters.bytes_moved
                out = (
                    attn.forward_async(lambda q=q: q, lambda k=k: k, lambda v=v: v, compress=compress, **extra)  # type: ignore
                    if asynchronous
                    else attn(q, k, v, compress=compress, **extra)
                )
                # A value on the edge between two steps may fall on either side.
                tolerance = expected.abs().max() * STEP[formats["out"]] * 2.1 if "out" in formats else 1e-5
                assert (out - expected).abs().max() <= tolerance, (compress, extra)
                row = {role: DIM + 4 if role in formats else 4 * DIM for role in ("q", "k", "v", "out")}
                heads = {"q": HEADS // 2, "k": KV_HEADS // 2, "v": KV_HEADS // 2}
                sent = sum(2 * sizes[rank] * heads[role] * row[role] for role in moving)
                home = 2 * (sizes[1 - rank] + text) * (HEADS // 2) * row["out"]
                assert attn.exchange.counters.bytes_moved - before == sent + home, (compress, extra)


@pytest.mark.full
@pytest.mark.parametrize("exchange", EXCHANGES)
@pytest.mark.parametrize("asynchronous", [False, True])
def test_compressed_lanes(on_ranks: Run, exchange: str, asynchronous: bool) -> None:
    on_ranks(2, compressed, exchange, asynchronous)


def refused(rank: int, exchange: str) -> list[str]:
    attn = UlyssesAttention(SdpaBackend(), exchange=exchange)
    q, k, v = (mine(t, (3, 5), rank) for t in whole())
    said = []
    for compress in ("int4", {"x": "int8"}, {"q": "int8"} if rank else None, 8):
        with pytest.raises(IthacaError) as raised:
            attn(q, k, v, compress=compress)  # type: ignore[arg-type]
        said.append(f"{type(raised.value).__name__}: {raised.value}")
    mixed = whole(torch.float64 if rank else torch.float32)
    with pytest.raises(IthacaError) as raised:
        attn(*(mine(t, (3, 5), rank) for t in mixed), compress="int8")
    assert attn(q, k, v).shape == q.shape
    return [*said, str(raised.value)]


@pytest.mark.full
@pytest.mark.parametrize("exchange", EXCHANGES)
def test_what_no_compression_can_be(on_ranks: Run, exchange: str) -> None:
    for format, role, differs, number, mixed in on_ranks(2, refused, exchange):
        assert all("compress was required to be one of ('int8', 'float8')" in said for said in (format, role, number))
        assert differs.startswith("PlanMismatchError") and "q as int8" in differs
        assert "uint8 for float32" in mixed and "uint8 for float64" in mixed  # bytes look alike: the header tells
