"""Cutting whole tensors along their tokens, and gathering them again. Uneven pieces are the general case.

What goes along the tokens is cut alike: hidden states, masks, position ids, tables of a rotary embedding, real or
complex, each along its own dim. ``order`` is for models whose tokens are sharded in another order than they come in:
place ``i`` of the sharded sequence holds token ``order[i]``.
"""

from __future__ import annotations

import math
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ithaca.errors import InvalidInputError
from ithaca.exchange.interface import Exchange
from ithaca.exchange.plain import plain
from ithaca.exchange.refusal import known, told
from ithaca.geometry import Layout, Span, Splits

_GATHER = "gather"

Tree = TypeVar("Tree")


def cut(whole: Tree, dim: int, rank: int, splits: int | Splits, order: Tensor | None = None) -> Tree:
    """This rank's piece of a tensor that every rank holds whole, or of each in lists, tuples and dicts of them.

    ``splits``: the tokens of each rank; or the number of ranks, over which each tensor is cut evenly, whatever its
    length (a model with several streams). A view, unless there is an ``order``.
    """

    def one(tensor: object) -> object:
        if not isinstance(tensor, Tensor):
            return tensor
        sizes = splits if isinstance(splits, Splits) else Splits.even(tensor.shape[dim], splits)
        if sizes.total != tensor.shape[dim]:
            raise InvalidInputError(
                f"rank {rank}: {sizes.total} tokens were required along dim {dim}, as the splits {sizes.sizes} say; "
                f"received {list(tensor.shape)}"
            )
        mine = sizes.spans[rank]
        if order is None:
            return tensor.narrow(dim, mine.start, len(mine))
        _check(order, tensor.shape[dim], rank)
        return tensor.index_select(dim, order[mine.slice].to(tensor.device))

    cut_tree: Tree = pytree.tree_map(one, whole)
    return cut_tree


def gather(piece: Tensor, dim: int, exchange: Exchange, order: Tensor | None = None) -> Tensor:
    """The whole of a tensor of which every rank holds a piece along ``dim``. Collective.

    Pieces may differ in their length, and in nothing else. The result is in the order of the ranks, or with the
    ``order`` that they were cut in, as it was before; it is the caller's. Backward is collective, too: the gradient of
    a piece is the sum of those that the ranks have for it.
    """
    try:
        complex_piece = piece.is_complex()
        rows = (torch.view_as_real(piece) if complex_piece else plain(piece, "a piece")).movedim(_dim(piece, dim), 0)
        flat = rows.reshape(rows.shape[0], math.prod(rows.shape[1:]))
    except Exception as error:
        refused = InvalidInputError(
            f"rank {exchange.rank}: gather was required to be given a tensor and one of its dims; "
            f"received {type(piece).__name__} and {dim!r}, which raised {told(error)}"
        )
        exchange.refuse(told(refused))  # the peers are in the call, or on their way
        known(refused)
        raise refused from error
    terms = f"gather dim {dim} of {[*rows.shape[1:]]}"
    if flat.requires_grad and torch.is_grad_enabled():
        gathered: Tensor = _Gather.apply(flat, exchange, terms)  # type: ignore[no-untyped-call]
    else:
        gathered, _ = _gathered(flat, exchange, terms, grad=False)
    tokens = gathered.view(gathered.shape[0], *rows.shape[1:])
    if order is not None:
        _check(order, tokens.shape[0], exchange.rank)
        tokens = tokens.index_select(0, order.argsort().to(tokens.device))
    whole = tokens.movedim(0, _dim(piece, dim))
    return torch.view_as_complex(whole.contiguous()) if complex_piece else whole


def _dim(tensor: Tensor, dim: int) -> int:
    """``dim`` counted from the front, which a last dim of real and imaginary parts does not shift."""
    return dim if dim >= 0 else dim + tensor.dim()


def _gathered(rows: Tensor, exchange: Exchange, terms: str, *, grad: bool) -> tuple[Tensor, tuple[Span, ...]]:
    """Rows ``[S_local, N]`` of all ranks, and where each rank's are."""
    with exchange.call((_GATHER,), Layout.NHD, gathered=True, terms=terms) as call:
        call.builder.grads.extend((_GATHER,) if grad else ())
        call.push(**{_GATHER: rows[None, :, None]})
        with call.wait() as whole:
            return whole.own()[_GATHER][0, :, 0], tuple(held.tokens for held in call.lanes[0].holds)


class _Gather(torch.autograd.Function):
    """Every rank was given all rows, so the gradient of one is the sum of theirs."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, exchange: Exchange, terms: str) -> Tensor:
        whole, ctx.spans = _gathered(rows, exchange, terms, grad=True)
        ctx.exchange, ctx.terms = exchange, terms
        return whole

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        exchange: Exchange = ctx.exchange
        # Rows in the place of heads: each rank has one "token" of all of them, and wants its own of every rank.
        wanted = {_GATHER: ctx.spans}
        terms = f"backward of {ctx.terms}"
        with exchange.call((_GATHER,), Layout.NHD, gathered=True, wanted=wanted, terms=terms) as call:
            call.push(**{_GATHER: grad[None, None]})
            with call.wait() as arrived:
                return arrived.own()[_GATHER][0].sum(0), None, None


def _check(order: Tensor, tokens: int, rank: int) -> None:
    if order.dim() != 1 or not torch.equal(order.sort().values.cpu(), torch.arange(tokens, dtype=order.dtype)):
        raise InvalidInputError(
            f"rank {rank}: order was required to be a permutation of {tokens} tokens; received {list(order.shape)}"
        )
