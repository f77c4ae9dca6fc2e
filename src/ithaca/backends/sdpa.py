"""`torch.nn.functional.scaled_dot_product_attention` as a backend."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from ithaca.backends.interface import AttentionBackend, Capabilities
from ithaca.geometry import Layout


class SdpaBackend(AttentionBackend):
    """PyTorch's own attention, whichever of its kernels PyTorch picks.

    ``layout`` is what it asks for. HND is what the kernels read best; NHD, which they are given as a strided view, is
    what a collective can lend in place.
    """

    def __init__(self, layout: Layout = Layout.HND) -> None:
        self.layout = layout

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(
            layout=self.layout,
            dtypes=frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64}),
            gqa=True,
            masks=True,
            causal=True,
            # In inference it reads its inputs, returns fresh memory and keeps nothing.
            accepts_unowned_inputs=True,
        )

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        mask: Tensor | None = None,
        scale: float | None = None,
        causal: bool = False,
        q_len: int,
        kv_len: int,
    ) -> Tensor:
        if self.layout is Layout.NHD:
            q, k, v = (tensor.transpose(1, 2) for tensor in (q, k, v))
        if causal and mask is not None:
            later = torch.ones(q_len, kv_len, dtype=torch.bool, device=mask.device).triu(1)
            mask = mask & ~later if mask.dtype is torch.bool else mask.masked_fill(later, float("-inf"))
        shared = q.shape[1] != k.shape[1]
        out = scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=causal and mask is None, scale=scale, enable_gqa=shared
        )
        return out if self.layout is Layout.HND else out.transpose(1, 2)
