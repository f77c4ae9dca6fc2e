"""Cutting whole tensors along their tokens, and gathering them again. Uneven pieces are the general case."""

from __future__ import annotations

import math

from torch import Tensor

from ithaca.exchange.interface import Exchange
from ithaca.geometry import Layout, Splits

_GATHER = "gather"


def cut(tensor: Tensor, dim: int, rank: int, ranks: int) -> Tensor:
    """This rank's piece of a tensor that every rank holds whole: a view."""
    mine = Splits.even(tensor.shape[dim], ranks).spans[rank]
    return tensor.narrow(dim, mine.start, len(mine))


def gather(piece: Tensor, dim: int, exchange: Exchange) -> Tensor:
    """The whole of a tensor of which every rank holds a piece along ``dim``, in the order of the ranks. Collective.

    Pieces may differ in their length, and in nothing else. The result is the caller's.
    """
    rows = piece.movedim(dim, 0)
    with exchange.call((_GATHER,), Layout.NHD, gathered=True, terms=f"gather dim {dim} of {[*rows.shape[1:]]}") as call:
        call.push(**{_GATHER: rows.reshape(1, rows.shape[0], 1, math.prod(rows.shape[1:]))})
        with call.wait() as whole:
            lane = whole.own()[_GATHER]
    return lane.view(lane.shape[1], *rows.shape[1:]).movedim(0, dim)
