"""The backward of an attention call: gradients come in as the output left, and go home as the inputs came.

**The convention.** The loss of the group is the sum of what its ranks compute, so a gradient is that of this sum with
regard to the tensor that a rank holds. For what is sharded that is the gradient on one rank. For what every rank holds
(weights, text, K and V with ``kv_replicated``) each rank gets its part, and the sum over the group is that of one rank.

A call that anything requires a gradient of attends on copies that this rank owns, never on slots, and keeps the graph
of its own backend from them to its heads. Backward is two more calls without a way home: the output's gradient comes in
as queries do; after the backend's own backward, gradients go home with tokens and heads in each other's place, for then
what a rank holds is a range of heads, and what it wants one of tokens. Heads that several ranks attended to arrive from
each, and are summed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from ithaca.errors import IthacaError, UnsupportedError
from ithaca.exchange.interface import Exchange
from ithaca.exchange.refusal import told
from ithaca.geometry import Layout, Span
from ithaca.plan import OUT, TEXT_OUT, CallPlan, Lane, as_nhd


@dataclass(kw_only=True)
class LocalBackward:
    """The backward of a backend that has attended on this rank.

    ``shapes``: of what it was given, in its layout, for each role that requires a gradient. ``roots`` are where the
    graph begins, by role, and ``end`` where it ends: None if there was nothing to attend to.
    """

    layout: Layout
    shapes: dict[str, tuple[int, ...]]
    roots: dict[str, GradientEdge] = field(default_factory=dict)
    end: GradientEdge | None = None

    def attend(self, inputs: Mapping[str, Tensor], run: Callable[[dict[str, Tensor]], Tensor], who: str) -> Tensor:
        """Let the backend ``run`` on inputs that it may keep, and note its graph."""
        anchor = torch.empty(0, requires_grad=True)
        made: Any = _Root.apply(anchor, *(inputs[role] for role in self.shapes))  # type: ignore[no-untyped-call]
        rooted: dict[str, Tensor] = dict(zip(self.shapes, made, strict=True))
        self.roots = {role: get_gradient_edge(tensor) for role, tensor in rooted.items()}
        out = run({**inputs, **rooted})
        if not out.requires_grad:
            raise UnsupportedError(
                f"{who} was required to give a result that has a gradient, as {', '.join(rooted)} require one; "
                f"it has none"
            )
        self.end = get_gradient_edge(out)
        return out.detach()

    def gradients(self, grad_out: Tensor, keep_graph: bool) -> dict[str, Tensor]:
        """Those of the roles that require one, like what the caller gave, from that of the result; NHD."""
        found = self.through_backend(as_nhd(grad_out, self.layout), keep_graph)
        return {role: as_nhd(grad, self.layout) for role, grad in found.items()}

    def through_backend(self, heads: Tensor, keep_graph: bool) -> dict[str, Tensor]:
        """Gradients of what the backend was given, by its own graph."""
        found: Any = [None] * len(self.shapes)
        if self.end is not None:
            found = torch.autograd.grad(
                [self.end], [*self.roots.values()], [heads], retain_graph=keep_graph, allow_unused=True
            )
        return {
            role: heads.new_zeros(shape) if grad is None else grad
            for (role, shape), grad in zip(self.shapes.items(), found, strict=True)
        }


@dataclass(kw_only=True)
class GroupBackward(LocalBackward):
    """The backward of one call of a group. ``heads``: query heads of each rank; ``kv_heads``: what this one reads
    of K and V."""

    exchange: Exchange
    plan: CallPlan
    heads: tuple[Span, ...]
    kv_heads: Span
    number: int
    sanitize: bool

    def gradients(self, grad_out: Tensor, keep_graph: bool) -> dict[str, Tensor]:
        """As on one rank. Collective."""
        heads = self._bring_in(grad_out)
        try:
            found = self.through_backend(heads, keep_graph)
        except Exception as error:
            if not (isinstance(error, IthacaError) and error.group_knows):
                with contextlib.suppress(IthacaError):
                    self.exchange.refuse(f"backward of call {self.number} raised {told(error)}")
            raise
        return self._bring_home(found)

    def _exchanged(
        self, lanes: dict[str, Tensor], layout: Layout, wanted: Mapping[str, tuple[Span, ...]]
    ) -> dict[str, Tensor]:
        """What has arrived, owned."""
        if not lanes:
            return {}
        terms = f"backward of call {self.number}"
        with self.exchange.call(
            tuple(lanes), layout, gathered=True, wanted=wanted, terms=terms, sanitize=self.sanitize
        ) as call:
            call.push(**lanes)
            with call.wait() as arrived:
                return arrived.own()

    def _bring_in(self, grad_out: Tensor) -> Tensor:
        """The gradient of this rank's heads, over all tokens, in the backend's layout."""
        text = self.plan.queries.text
        others = grad_out.shape[1] - text.tokens
        lanes = {OUT: grad_out[:, text.rest(others).slice]}
        if text.tokens:
            lanes[TEXT_OUT] = grad_out[:, text.span(others).slice]
        here = self._exchanged(lanes, self.layout, dict.fromkeys(lanes, self.heads))
        if not text.tokens:
            return here[OUT]
        dim = 1 if self.layout is Layout.NHD else 2
        # Every rank was given all of the text, so each has a gradient for it.
        summed = here[TEXT_OUT].unflatten(dim, (len(self.heads), text.tokens)).sum(dim)
        return torch.cat((summed, here[OUT]) if text.first else (here[OUT], summed), dim)

    def _bring_home(self, found: dict[str, Tensor]) -> dict[str, Tensor]:
        """Each gradient in the shape of what the caller gave."""
        lanes = {lane.role: lane for lane in self.plan.lanes if lane.role in found}
        nhd = {role: as_nhd(grad, self.layout) for role, grad in found.items()}
        leaving, wanted = {}, {}
        for role, lane in lanes.items():
            others = lane.text.rest(nhd[role].shape[1] - lane.text.tokens)
            leaving[role] = nhd[role][:, others.slice].transpose(1, 2)
            wanted[role] = tuple(
                Span(held.tokens.start - others.start, held.tokens.stop - others.start) for held in lane.holds
            )
        home = self._exchanged(leaving, Layout.HND, wanted)
        result = {role: self._at_home(lane, home[role], nhd[role]) for role, lane in lanes.items()}
        for role, _, shape in self.plan.whole:
            if role in found:
                result[role] = nhd[role].new_zeros(shape)
                result[role][:, :, self.kv_heads.slice] = nhd[role]
        return result

    def _at_home(self, lane: Lane, arrived: Tensor, mine: Tensor) -> Tensor:
        """``arrived``: ``[B, S_local, H', D]``, the heads of one rank behind those of another."""
        rank, text = self.exchange.rank, lane.text
        spans, heads = [wanted.heads for wanted in lane.wants], len(lane.holds[rank].heads)
        grad = arrived
        if [head for span in spans for head in range(span.start, span.stop)] != [*range(heads)]:
            grad = arrived.new_zeros(*arrived.shape[:2], heads, arrived.shape[3])
            for span, part in zip(spans, arrived.split([len(span) for span in spans], dim=2), strict=True):
                grad[:, :, span.slice] += part
        if not text.tokens:
            return grad
        of_text = grad.new_zeros(grad.shape[0], text.tokens, *grad.shape[2:])
        of_text[:, :, spans[rank].slice] = mine[:, text.span(mine.shape[1] - text.tokens).slice]
        return torch.cat((of_text, grad) if text.first else (grad, of_text), dim=1)


class _Root(torch.autograd.Function):
    """Where the graph of a backend begins: nothing is further back, and no input is kept for it."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
        return tuple(tensor.detach() for tensor in inputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, ...]:
        return (None,) * (1 + len(grads))


class Attached(torch.autograd.Function):
    """The result of a call, attached to what the caller gave. Its forward computes nothing."""

    @staticmethod
    def forward(ctx: Any, backward: LocalBackward, result: list[Tensor], *sources: Tensor) -> Tensor:
        ctx.call = backward
        # A checkpoint that computes a region again stops in the middle of it, at the last tensor that anybody saves.
        # Were that one of the backend's, it would stop inside the call.
        ctx.save_for_backward(torch.empty(0))
        return result.pop()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        _ = ctx.saved_tensors  # raises, on every rank alike, where the graph was freed
        call: LocalBackward = ctx.call
        found = call.gradients(grad, torch._C._autograd._get_current_graph_task_keep_graph())
        return (None, None, *(found[role] for role in call.shapes))


def attach(backward: LocalBackward, result: Tensor, sources: Mapping[str, Tensor]) -> Tensor:
    """``result`` with a gradient towards ``sources``."""
    attached: Tensor = Attached.apply(backward, [result], *(sources[role] for role in backward.shapes))  # type: ignore[no-untyped-call]
    return attached
