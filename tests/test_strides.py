"""Whatever the strides of an input, its bytes are copied once, into the slots; and dtypes that few backends read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from cases import mine
from conftest import Run
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ithaca import Capabilities, Layout, SdpaBackend, UlyssesAttention, exchange_for
from ithaca.backends.reference import dense_attention

pytestmark = pytest.mark.full

RANKS = 2


class Copies(TorchDispatchMode):
    """Elements that are copied, by operator."""

    def __init__(self) -> None:
        super().__init__()
        self.elements: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name = func.overloadpacket.__name__
        if name in ("copy_", "clone", "_to_copy", "contiguous", "_foreach_copy_", "cat"):
            given = args[0] if isinstance(args[0], list) else [args[0]]
            self.elements[name] += sum(tensor.numel() for tensor in given)
        return func(*args, **(kwargs or {}))


def projections(strides: str) -> tuple[Tensor, Tensor, Tensor]:
    """Q, K and V ``[B, S, H, D]`` of the whole sequence, with the strides that a model would have."""
    generator = torch.Generator().manual_seed(2)
    fused = torch.randn(2, 8, 3, 4, 16, generator=generator)
    q, k, v = (fused[:, :, i] for i in range(3))
    if strides == "heads first":
        q, k, v = (t.transpose(1, 2).contiguous().transpose(1, 2) for t in (q, k, v))
    elif strides == "packed":
        q, k, v = (t.contiguous() for t in (q, k, v))
    return q, k, v


def counted(rank: int, strides: str, layout: Layout) -> None:
    attn = UlyssesAttention(SdpaBackend(layout), exchange=exchange_for(want="slots", copy="inline"))
    whole = projections(strides)
    # Without grad mode, that they could have a gradient costs nothing.
    pieces = [mine(t, (3, 5), rank).requires_grad_() for t in whole]
    expected = mine(dense_attention(*whole), (3, 5), rank)
    with torch.no_grad():
        attn(*pieces)  # memory grows
        for call in (lambda: attn(*pieces), lambda: attn.forward_async(*(lambda t=t: t for t in pieces))):
            with Copies() as copies:
                out = call()
            assert (out - expected).abs().max() < 1e-5
            heads_here = 2 * 8 * 2 * 16  # both samples, all tokens, this rank's two heads
            into_slots = sum(piece.numel() for piece in pieces) + heads_here
            # The clone is the caller's own output.
            assert copies.elements == {"copy_": into_slots, "clone": pieces[0].numel()}, (strides, copies.elements)


@pytest.mark.parametrize("layout", Layout)
@pytest.mark.parametrize("strides", ["of a fused projection", "heads first", "packed"])
def test_an_input_is_copied_once(on_ranks: Run, strides: str, layout: Layout) -> None:
    on_ranks(RANKS, counted, strides, layout)


class Eighths(SdpaBackend):
    """Attends to float8 tensors, in float32, and returns what it was given."""

    @property
    def capabilities(self) -> Capabilities:
        return replace(
            super().capabilities,
            dtypes=frozenset({torch.float8_e4m3fn, torch.float8_e5m2}),
            accepts_unowned_inputs=True,
        )

    def forward(self, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        return super().forward(q.float(), k.float(), v.float(), **options).to(q.dtype)


def eighths(rank: int, exchange: str, dtype: torch.dtype) -> None:
    attn = UlyssesAttention(Eighths(), exchange=exchange)
    whole = [t.to(dtype) for t in projections("packed")]
    expected = mine(dense_attention(*(t.float() for t in whole)).to(dtype), (3, 5), rank)
    pieces = [mine(t, (3, 5), rank) for t in whole]
    before = attn.exchange.counters.bytes_moved
    for out in (attn(*pieces), attn.forward_async(*(lambda t=t: t for t in pieces))):
        assert out.dtype == dtype and (out.float() - expected.float()).abs().max() < 0.2
    sent = 3 * 2 * (3, 5)[rank] * 2 * 16 + 2 * (5, 3)[rank] * 2 * 16
    assert attn.exchange.counters.bytes_moved - before == 2 * sent  # a byte an element


@pytest.mark.parametrize("exchange", ["slots", "collective"])
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_float8_travels_as_bytes(on_ranks: Run, exchange: str, dtype: torch.dtype) -> None:
    on_ranks(RANKS, eighths, exchange, dtype)
