"""Lanes at a byte an element: each token of each head has a scale of its own, which travels behind its values.

A row of ``D`` values is sent as ``D`` bytes and four for its scale, ``(D + 4) / 2D`` of what bf16 takes. The scale maps
the largest magnitude of a row to that of the format (SageAttention's per-token quantization, arXiv:2410.02367, here
for the wire and not for the kernel). Such a lane is turned back on arrival, into memory of this rank: it is never lent.
A row that holds NaN or infinity comes out as NaN.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity

from ithaca.errors import InvalidInputError

SCALE_NBYTES = 4
_FORMATS = {"int8": (torch.int8, 127.0), "float8": (torch.float8_e4m3fn, 448.0)}
FORMATS = tuple(_FORMATS)


def pack(tensor: Tensor, format: str) -> Tensor:
    """``[..., D]`` as bytes ``[..., D + 4]``."""
    dtype, largest = _FORMATS[format]
    values = tensor.float()
    scale = values.abs().amax(dim=-1, keepdim=True) / largest if values.numel() else values[..., :1]
    scale = torch.where(scale == 0, 1.0, scale)
    scaled = values / scale
    small = scaled.round().to(dtype) if dtype is torch.int8 else scaled.to(dtype)
    return torch.cat((small.view(torch.uint8), scale.contiguous().view(torch.uint8)), dim=-1)


def unpack(packed: Tensor, format: str, dtype: torch.dtype) -> Tensor:
    """What `pack` was given, as far as it is still there."""
    values = packed[..., :-SCALE_NBYTES].view(_FORMATS[format][0]).float()
    scale = packed[..., -SCALE_NBYTES:].contiguous().view(torch.float32)
    return (values * scale).to(dtype)


@dataclass(frozen=True)
class Loss:
    """What a format costs a tensor: cosine of it and what arrives, largest and root mean square difference."""

    cosine: float
    largest: float
    rms: float


def loss(tensor: Tensor, format: str) -> Loss:
    """Pack, unpack, and compare; in the dtype of the tensor."""
    if format not in FORMATS:
        raise InvalidInputError(f"a format of {FORMATS} was required; received {format!r}")
    before, after = tensor.double(), unpack(pack(tensor, format), format, tensor.dtype).double()
    off = (before - after).abs()
    cosine = cosine_similarity(before.flatten(), after.flatten(), dim=0)
    return Loss(float(cosine), float(off.max()), float(off.square().mean().sqrt()))
