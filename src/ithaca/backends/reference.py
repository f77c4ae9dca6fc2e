"""Attention written out, for comparison: the sum that every dense kernel approximates."""

from __future__ import annotations

import torch
from torch import Tensor


def dense_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: Tensor | None = None,
    scale: float | None = None,
    causal: bool = False,
) -> Tensor:
    """``[B, S, H, D]`` in, ``[B, S_q, H, D_v]`` out, in the dtype of the inputs; K and V may have fewer heads (GQA).

    A row without any key is zero.
    """
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], dim=1) for t in (k, v))
    scores = q @ k.transpose(-1, -2) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf")) if mask.dtype is torch.bool else scores + mask.to(scores)
    if causal:
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.masked_fill(later, float("-inf"))
    out: Tensor = scores.softmax(dim=-1).nan_to_num(nan=0.0) @ v
    return out.transpose(1, 2)
