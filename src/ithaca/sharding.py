"""Cutting whole tensors along their tokens, and gathering them again. Uneven pieces are the general case.

What goes along the tokens is cut alike: hidden states, masks, position ids, tables of a rotary embedding, real or
complex, each along its own dim. ``order`` is for models whose tokens are sharded in another order than they come in:
place ``i`` of the sharded sequence holds token ``order[i]``.
"""

from __future__ import annotations

import math
from typing import TypeVar

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ithaca.errors import InvalidInputError
from ithaca.exchange.interface import Exchange
from ithaca.geometry import Layout, Splits

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
    ``order`` that they were cut in, as it was before; it is the caller's.
    """
    if piece.is_complex():
        dim = dim if dim >= 0 else dim + piece.dim()
        return torch.view_as_complex(gather(torch.view_as_real(piece), dim, exchange, order).contiguous())
    rows = piece.movedim(dim, 0)
    with exchange.call((_GATHER,), Layout.NHD, gathered=True, terms=f"gather dim {dim} of {[*rows.shape[1:]]}") as call:
        call.push(**{_GATHER: rows.reshape(1, rows.shape[0], 1, math.prod(rows.shape[1:]))})
        with call.wait() as whole:
            lane = whole.own()[_GATHER]
    tokens = lane.view(lane.shape[1], *rows.shape[1:])
    if order is not None:
        _check(order, tokens.shape[0], exchange.rank)
        tokens = tokens.index_select(0, order.argsort().to(tokens.device))
    return tokens.movedim(0, dim)


def _check(order: Tensor, tokens: int, rank: int) -> None:
    if order.dim() != 1 or not torch.equal(order.sort().values.cpu(), torch.arange(tokens, dtype=order.dtype)):
        raise InvalidInputError(
            f"rank {rank}: order was required to be a permutation of {tokens} tokens; received {list(order.shape)}"
        )
