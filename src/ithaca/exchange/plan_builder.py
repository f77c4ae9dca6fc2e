"""A call's plan, put together on one rank while its lanes leave one by one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ithaca.exchange.agreement import Claim
from ithaca.geometry import Layout, Span
from ithaca.heads import Heads, wanted
from ithaca.plan import CallPlan, Lane


@dataclass
class PlanBuilder:
    """Of one call, on one rank. What a strategy notes of a role counts from the push of that role on."""

    layout: Layout
    #: Who attends to which heads, as far as the lanes so far tell.
    heads: Heads
    #: Of a call without a way home, the heads of each rank by lane; all of them where nothing is said. Else None.
    gathered: Mapping[str, tuple[Span, ...]] | None = None
    #: K and V that every rank holds whole: role, dtype, shape.
    whole: list[tuple[str, torch.dtype, tuple[int, ...]]] = field(default_factory=list)
    #: Lanes that are sent as bytes: role, dtype and head dim that they stand for; of the output, what is sent.
    packed: list[tuple[str, torch.dtype, int]] = field(default_factory=list)
    #: Roles that require a gradient.
    grads: list[str] = field(default_factory=list)

    def claim(self, tensors: Mapping[str, Tensor]) -> tuple[tuple[Claim, ...], tuple[tuple[Span, ...], ...]]:
        """What to say of lanes that leave together, and the heads of each that every rank wants."""
        stand_for = {role: dtype for role, dtype, _ in self.packed}
        claims = tuple(
            Claim(role, t.dtype, self.layout, tuple(t.shape), stand_for.get(role), role in self.grads)
            for role, t in tensors.items()
        )
        lanes = tuple((role, tensor.shape[2]) for role, tensor in tensors.items())
        if self.gathered is not None:
            all_ranks = range(self.heads.ranks)
            return claims, tuple(
                self.gathered.get(role) or tuple(Span(0, heads) for _ in all_ranks) for role, heads in lanes
            )
        self.heads, spans = wanted(self.heads, lanes)
        return claims, spans

    def add_whole(self, role: str, tensor: Tensor) -> None:
        """Take note of K or V ``[B, S, H, D]`` that every rank holds whole: part of the plan, and does not move."""
        self.heads = self.heads.seen(None, tensor.shape[2], moves=False)
        self.whole.append((role, tensor.dtype, tuple(tensor.shape)))

    def build(self, lanes: Sequence[Lane]) -> CallPlan:
        """The plan, once all lanes are agreed on."""
        return CallPlan.attention(tuple(lanes), tuple(self.whole), tuple(self.packed), tuple(sorted(self.grads)))
