"""Tensors that all ranks can make alike, and what one rank would compute from them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from ithaca import AttentionBackend, Capabilities, Layout, SdpaBackend, Splits


def qkv(
    q_tokens: int, kv_tokens: int, heads: int, head_dim: int = 16, batch: int = 1, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor, Tensor]:
    """Seeded ``[B, S, H, D]``, equal wherever it is called."""
    generator = torch.Generator().manual_seed(7)
    lengths = (q_tokens, kv_tokens, kv_tokens)
    q, k, v = (torch.randn(batch, n, heads, head_dim, generator=generator).to(dtype) for n in lengths)
    return q, k, v


def mine(tensor: Tensor, sizes: Sequence[int], rank: int, dim: int = 1) -> Tensor:
    """The piece of ``rank`` when ``dim`` is cut into ``sizes``."""
    return tensor.split(list(sizes), dim)[rank]


def one_rank(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, scale: float | None = None) -> Tensor:
    """Plain SDPA over NHD."""
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    return scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale).transpose(1, 2)


def one_rank_by_slices(q: Tensor, k: Tensor, v: Tensor, ranks: int) -> Tensor:
    """Plain SDPA on one rank, the heads of one slice at a time, each in fresh contiguous memory."""
    sizes = list(Splits.even(q.shape[2], ranks).sizes)
    slices = zip(*(t.transpose(1, 2).split(sizes, dim=1) for t in (q, k, v)), strict=True)
    outs = [scaled_dot_product_attention(*(t.contiguous() for t in part)) for part in slices if part[0].shape[1]]
    return torch.cat(outs, dim=1).transpose(1, 2)


class NhdBackend(SdpaBackend):
    """SDPA that wants NHD, and says for itself whether it takes slots."""

    def __init__(self, accepts_unowned_inputs: bool = False) -> None:
        super().__init__(Layout.NHD)
        self.accepts = accepts_unowned_inputs
        self.seen: list[tuple[int, int]] = []

    @property
    def capabilities(self) -> Capabilities:
        return replace(super().capabilities, accepts_unowned_inputs=self.accepts)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, q_len: int, kv_len: int, **options: object) -> Tensor:
        self.seen.append((q_len, kv_len))
        return super().forward(q, k, v, q_len=q_len, kv_len=kv_len, **options)  # type: ignore[arg-type]


class RaisingBackend(SdpaBackend):
    """Raises on one rank."""

    def __init__(self, here: bool) -> None:
        super().__init__()
        self.here = here

    def forward(self, *args: Tensor, **options: object) -> Tensor:
        if self.here:
            raise RuntimeError("kernel on fire")
        return super().forward(*args, **options)  # type: ignore[arg-type]


BACKENDS: dict[str, type[AttentionBackend]] = {"hnd": SdpaBackend, "nhd": NhdBackend}


class GatedBackend(SdpaBackend):
    """SDPA whose result is multiplied by the gates that it is given. Accepts slots."""

    @property
    def capabilities(self) -> Capabilities:
        return replace(super().capabilities, gates=frozenset({"compress", "fine"}), accepts_unowned_inputs=True)

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, *, gates: Mapping[str, Tensor] | None = None, **options: Any
    ) -> Tensor:
        out = super().forward(q, k, v, **options)
        for gate in (gates or {}).values():
            out = out * gate
        return out

    def reference(
        self, q: Tensor, k: Tensor, v: Tensor, *, gates: Mapping[str, Tensor] | None = None, **options: Any
    ) -> Tensor:
        out = super().reference(q, k, v, **options)
        for gate in (gates or {}).values():
            out = out * gate
        return out
