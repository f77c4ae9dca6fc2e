"""Calls that a machine makes up, good and bad, and what ranks say of them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from cases import mine, one_rank
from hypothesis import strategies as st
from torch import Tensor

from ithaca import ExchangeClosedError, IthacaError, SdpaBackend, UlyssesAttention

#: What can be wrong with one tensor, or with what returns it.
BAD_TENSORS = (
    "0-d",
    "3-D",
    "5-D",
    "one head more",
    "another head dim",
    "another batch",
    "another length than its pair",
    "another dtype",
    "complex",
    "sparse",
    "on meta",
    "requires grad",
    "huge",
    "no tensor",
    "a list",
    "raises",
    "negative strides",
)
#: What can be wrong with the call.
BAD_CALLS = ("scale is NaN", "scale is text", "mask of another shape", "mask of ints", "an order with a stranger")


@dataclass(frozen=True)
class RandomCall:
    """``bad`` is what is wrong, on ``rank``, with lane ``lane``; "" for nothing."""

    at_once: bool
    q_sizes: tuple[int, int]
    kv_sizes: tuple[int, int]
    batch: int
    heads: int
    head_dim: int
    dtype: torch.dtype
    strides: str
    values: str
    seed: int
    bad: str = ""
    rank: int = 0
    lane: str = "q"


_FINE = {
    "at_once": st.booleans(),
    "q_sizes": st.tuples(st.integers(0, 5), st.integers(0, 5)),
    "kv_sizes": st.tuples(st.integers(0, 5), st.integers(1, 5)),
    "batch": st.integers(0, 2),
    "heads": st.integers(1, 5),
    "head_dim": st.sampled_from([1, 4, 8]),
    "dtype": st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.float16]),
    "strides": st.sampled_from(["packed", "of a fused projection", "heads first", "every other", "expanded"]),
    "values": st.sampled_from(["normal", "NaN", "Inf", "zero"]),
    "seed": st.integers(0, 2**31),
}
GOOD = st.builds(RandomCall, **_FINE)
BAD = st.builds(
    RandomCall,
    **_FINE,
    bad=st.sampled_from(BAD_TENSORS + BAD_CALLS),
    rank=st.integers(0, 1),
    lane=st.sampled_from("qkv"),
)


def _laid_out(tensor: Tensor, strides: str) -> Tensor:
    """The same values in other memory."""
    b, s, h, d = tensor.shape
    if strides == "of a fused projection":
        home = torch.full((b, s, 3, h, d), math.nan, dtype=tensor.dtype)[:, :, 1]
    elif strides == "heads first":
        home = tensor.new_empty(b, h, s, d).transpose(1, 2)
    elif strides == "every other":
        home = torch.full((b, 2 * s, h, 2 * d), math.nan, dtype=tensor.dtype)[:, ::2, :, ::2]
    elif strides == "expanded" and d:
        return tensor[..., :1].expand(b, s, h, d)
    else:
        return tensor.clone()
    return home.copy_(tensor)


def whole(call: RandomCall) -> list[Tensor]:
    """Q, K and V of both ranks."""
    generator = torch.Generator().manual_seed(call.seed)
    lengths = (sum(call.q_sizes), sum(call.kv_sizes), sum(call.kv_sizes))
    tensors = [
        torch.randn(call.batch, n, call.heads, call.head_dim, generator=generator).to(call.dtype) for n in lengths
    ]
    if call.strides == "expanded":
        tensors = [t[..., :1].expand_as(t).clone() for t in tensors]
    for tensor in tensors:
        if call.values != "normal" and tensor.numel():
            tensor.view(-1)[call.seed % tensor.numel()] = {"NaN": math.nan, "Inf": math.inf, "zero": 0.0}[call.values]
    if call.strides == "expanded":
        tensors = [t[..., :1].expand_as(t).clone() for t in tensors]
    return tensors


def _spoiled(tensor: Tensor, bad: str) -> Any:
    b, s, h, d = tensor.shape
    made: dict[str, Any] = {
        "0-d": lambda: torch.tensor(1.0),
        "3-D": lambda: tensor.new_zeros(s, h, d),
        "5-D": lambda: tensor[None],
        "one head more": lambda: tensor.new_zeros(b, s, h + 1, d),
        "another head dim": lambda: tensor.new_zeros(b, s, h, d + 1),
        "another batch": lambda: tensor.new_zeros(b + 1, s, h, d),
        "another length than its pair": lambda: tensor.new_zeros(b, s + 1, h, d),
        "another dtype": lambda: tensor.to(torch.int32),
        "complex": lambda: tensor.to(torch.complex64),
        "sparse": lambda: tensor.to_sparse(),
        "on meta": lambda: tensor.to("meta"),
        "requires grad": lambda: tensor.clone().requires_grad_(),
        "huge": lambda: tensor.new_zeros(1).expand(b, 2**41, h, d),
        "no tensor": lambda: None,
        "a list": lambda: [tensor],
        "negative strides": lambda: torch.from_numpy(np.zeros((max(b, 1), s + 2, h, d), np.float32)[:, ::-1]),
        "raises": lambda: 1 // 0,
    }
    return made[bad]()


def _options(call: RandomCall, rank: int) -> dict[str, Any]:
    if call.rank != rank or call.bad not in BAD_CALLS:
        return {}
    kv = sum(call.kv_sizes)
    return {
        "scale is NaN": {"scale": math.nan},
        "scale is text": {"scale": "a lot"},
        "mask of another shape": {"mask": torch.zeros(3, kv + 7)},
        "mask of ints": {"mask": torch.zeros(1, 1, 1, kv, dtype=torch.int32)},
        "an order with a stranger": {} if call.at_once else {"issue_order": ("q", "k", "x")},
    }[call.bad]


def _make(rank: int, attn: UlyssesAttention, call: RandomCall, tensors: list[Tensor]) -> Any:
    lanes = dict(zip("qkv", (mine(t, s, rank) for t, s in zip(tensors, _sizes(call), strict=True)), strict=True))
    fine = {lane: _laid_out(tensor, call.strides) for lane, tensor in lanes.items()}
    closures: dict[str, Any] = {lane: (lambda t=tensor: t) for lane, tensor in fine.items()}
    if call.rank == rank and call.bad in BAD_TENSORS:
        # The length of Q is its own.
        lane = "k" if call.bad == "another length than its pair" and call.lane == "q" else call.lane
        closures[lane] = partial(_spoiled, lanes[lane], call.bad)
    options = _options(call, rank)
    if not call.at_once:
        return attn.forward_async(*(closures[lane] for lane in "qkv"), **options)
    values = []
    for lane in "qkv":
        try:
            values.append(closures[lane]())
        except Exception:  # a call at once has no closure that could raise: it gets what can't be made
            values.append(None)
    return attn(*values, **options)


def _sizes(call: RandomCall) -> tuple[tuple[int, int], ...]:
    return call.q_sizes, call.kv_sizes, call.kv_sizes


def verdict(rank: int, attn: UlyssesAttention, call: RandomCall) -> str:
    """What a rank says of a call: "exact", the name of an error of ours, or what should not be."""
    tensors = whole(call)
    try:
        out = _make(rank, attn, call, tensors)
    except ExchangeClosedError as error:
        return f"not fatal, and yet: {error}"
    except IthacaError as error:
        return type(error).__name__
    except Exception as error:
        return f"not one of ours: {type(error).__name__}: {error}"
    expected = mine(one_rank(*tensors), call.q_sizes, rank)
    tolerance = {torch.float32: 1e-5, torch.float64: 1e-12, torch.bfloat16: 2e-2, torch.float16: 3e-3}[call.dtype]
    try:
        torch.testing.assert_close(out, expected, rtol=tolerance, atol=tolerance, equal_nan=True)
    except AssertionError as error:
        return f"wrong: {error}"
    return "exact"


def judge(rank: int, exchange: str, calls: list[RandomCall]) -> list[str]:
    """The verdicts of one rank; the exchange must get through all of them."""
    attn = UlyssesAttention(SdpaBackend(), exchange=exchange)
    dist.barrier()
    return [verdict(rank, attn, call) for call in calls]
