"""Masks: over the whole sequence on every rank, or a shard on each, which then moves as a lane.

True takes part, and a number is added to the scores. A key that is masked for a query has no weight in its sum; a query
whose keys are all masked has the sum zero.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ithaca.errors import InvalidInputError
from ithaca.geometry import Layout, Span


def is_mask(dtype: torch.dtype) -> bool:
    """Whether a mask may have this dtype."""
    return dtype is torch.bool or dtype.is_floating_point


def whole(mask: Tensor, batch: int, heads: int, q_len: int, kv_len: int, here: str, mine: Span) -> Tensor:
    """A mask over the whole lengths, as ``[B | 1, mine | 1, S_q | 1, S_kv]``."""
    full = mask[:, None, None, :] if mask.dim() == 2 else mask
    fits = full.dim() == 4 and all(
        size == required or (size == 1 and may_be_one)
        for size, required, may_be_one in zip(
            full.shape, (batch, heads, q_len, kv_len), (True, True, mask.dim() == 2, False), strict=True
        )
    )
    if not fits:
        raise InvalidInputError(
            f"{here}a mask was required to be [{batch}, {kv_len}] or "
            f"[{batch}|1, {heads}|1, {q_len}, {kv_len}]; received {list(mask.shape)}"
        )
    return full if full.shape[1] == 1 else full[:, mine.start : mine.stop]


def shard(mask: Tensor, q: Tensor, k: Tensor, here: str, *, whole_keys: bool) -> Tensor:
    """This rank's shard as a lane: of keys ``[B, S_kv_local, 1, 1]``, of queries ``[B, S_local, H, S_kv]``."""
    if mask.dim() == 2 and whole_keys:
        raise InvalidInputError(
            f"{here}a mask over the queries was required to be in shards where every rank holds K and V whole; "
            f"received {list(mask.shape)}, over the keys: give it whole"
        )
    if mask.dim() == 2 and mask.shape[0] in (1, q.shape[0]) and mask.shape[1] == k.shape[1]:
        return mask[:, :, None, None]
    rows = mask.dim() == 4 and mask.shape[0] in (1, q.shape[0]) and mask.shape[1] in (1, q.shape[2])
    if rows and mask.shape[2] == q.shape[1]:
        return mask.transpose(1, 2)
    raise InvalidInputError(
        f"{here}the shard of a mask was required to be [{q.shape[0]}|1, {k.shape[1]}], over this rank's keys, or "
        f"[{q.shape[0]}|1, {q.shape[2]}|1, {q.shape[1]}, S_kv], over its queries; received {list(mask.shape)}"
    )


def arrived(lane: Tensor, layout: Layout, over_keys: bool) -> Tensor:
    """What has come of all ranks' shards, as `whole` has it."""
    rows = lane if layout is Layout.HND else lane.transpose(1, 2)
    return rows.transpose(2, 3) if over_keys else rows
