"""Wan: self-attention across ranks, issued lane by lane; cross-attention stays local.

Queries of the cross-attention are this rank's tokens and the text is whole on every rank, so it needs no exchange at
all: diffusers' own processor runs there unchanged and not one byte moves.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

import torch
from diffusers import WanTransformer3DModel
from diffusers.models.transformers.transformer_wan import WanAttnProcessor
from torch import Tensor, nn

from ithaca.diffusers import setting
from ithaca.errors import UnsupportedError
from ithaca.strategies.options import Compress
from ithaca.strategies.ulysses import UlyssesAttention


class UlyssesWanProcessor:
    """The processor of a Wan self-attention. ``asynchronous`` False computes Q, K and V before any of them leaves."""

    def __init__(self, attention: UlyssesAttention, asynchronous: bool, compress: Compress) -> None:
        self.attention, self.asynchronous, self.compress = attention, asynchronous, compress

    @property
    def _attention_backend(self) -> object:
        """What diffusers' ``set_attention_backend`` sets."""
        return None

    @_attention_backend.setter
    def _attention_backend(self, backend: object) -> None:
        setting.check("the attention backend of a parallelized model", backend, self.attention)

    def __call__(
        self,
        attn: nn.Module,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        rotary_emb: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        compute_q, compute_k, compute_v = _projections(attn, hidden_states, rotary_emb)
        to_out, dropout = attn.to_out  # type: ignore[misc]

        def project_out(heads: Tensor) -> Tensor:
            projected: Tensor = dropout(to_out(heads.flatten(2, 3)))
            return projected

        if self.asynchronous:
            return self.attention.forward_async(
                compute_q,
                compute_k,
                compute_v,
                project_out=project_out,
                mask=attention_mask,
                compress=self.compress,
            )
        return project_out(
            self.attention(compute_q(), compute_k(), compute_v(), mask=attention_mask, compress=self.compress)
        )


def _projections(attn: Any, hidden_states: Tensor, rotary_emb: tuple[Tensor, Tensor] | None) -> Any:
    """Closures for Q, K and V, each ``[B, S_local, H, D]``."""
    if attn.fused_projections:
        # One matmul gives all three: V's closure runs it, and what is left to overlap is norm and rotation.
        fused: list[Tensor] = []

        def part(i: int) -> Tensor:
            if not fused:
                fused.extend(attn.to_qkv(hidden_states).chunk(3, dim=-1))
            return fused[i]

        to_q, to_k, to_v = (partial(part, i) for i in range(3))
    else:
        to_q, to_k, to_v = (partial(linear, hidden_states) for linear in (attn.to_q, attn.to_k, attn.to_v))

    def normed(project: Any, norm: nn.Module) -> Tensor:
        heads = _heads(norm(project()), attn.heads)
        return heads if rotary_emb is None else _rotate(heads, *rotary_emb)

    def value() -> Tensor:
        return _heads(to_v(), attn.heads)

    return partial(normed, to_q, attn.norm_q), partial(normed, to_k, attn.norm_k), value


def _heads(features: Tensor, heads: int) -> Tensor:
    """``[B, S, H * D]`` as ``[B, S, H, D]``."""
    return features.view(*features.shape[:2], heads, features.shape[2] // heads)


def _rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of interleaved pairs, as Wan has it; ``cos`` and ``sin`` are this rank's rows."""
    even, odd = heads[..., 0::2], heads[..., 1::2]
    cos, sin = cos[..., 0::2], sin[..., 1::2]
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1).flatten(-2).type_as(heads)


def tokens(model: WanTransformer3DModel, hidden_states: Tensor, *args: object, **kwargs: object) -> int:
    """Tokens that the latents ``[B, C, F, H, W]`` make, a patch each."""
    sizes = zip(hidden_states.shape[2:], model.config.patch_size, strict=True)
    return math.prod(size // patch for size, patch in sizes)


def blocks(model: WanTransformer3DModel) -> Iterable[nn.Module]:
    """What a cache may skip."""
    return model.blocks.children()  # type: ignore[no-any-return]


def self_attentions(model: WanTransformer3DModel) -> Iterator[tuple[str, Any]]:
    """The attentions that go across the ranks, as they are now, by name."""
    for name, block in model.blocks.named_children():
        yield f"blocks.{name}.attn1", getattr(block, "attn1", None)


def install(
    model: WanTransformer3DModel, attention: UlyssesAttention, asynchronous: bool, compress: Compress = None
) -> None:
    """Give every self-attention of ``model`` its processor."""
    for name, attn in self_attentions(model):
        if type(attn.processor) is not WanAttnProcessor:
            raise UnsupportedError(
                f"{name} was required to have diffusers' own WanAttnProcessor; it has {type(attn.processor).__name__}"
            )
    for _, attn in self_attentions(model):
        attn.set_processor(UlyssesWanProcessor(attention, asynchronous, compress))
