"""Lanes at a byte an element: each token of each head has a scale of its own, which travels behind its values.

A row of ``D`` values is sent as ``D`` bytes and four more, ``(D + 4) / 2D`` of what bf16 takes (a scale a token, as in
SageAttention, arXiv:2410.02367, here for the wire and not for the kernel). Such a lane is turned back on arrival, into
memory of this rank: it is never lent. A row that holds NaN or infinity comes out as NaN.

- "int8": 254 even steps about the middle of the row; behind it that and the step, in bf16. Both are rounded before
  they are used, so they cost no accuracy, and a row that does not lie about zero costs none either.
- "float8": e4m3, the largest magnitude of the row being its largest; behind it the scale, in fp32. Small values keep
  their three bits of mantissa.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity

from ithaca.errors import InvalidInputError

SCALE_NBYTES = 4
FORMATS = ("int8", "float8")
_STEPS = 127
_LARGEST = 448.0  # of e4m3
_ROUNDED_UP = 1 + 2**-8  # a number that is rounded to bf16 after this is not below what it was


def pack(tensor: Tensor, format: str) -> Tensor:
    """``[..., D]`` as bytes ``[..., D + 4]``."""
    values = tensor.float()
    if not values.numel():
        return torch.empty(
            (*tensor.shape[:-1], tensor.shape[-1] + SCALE_NBYTES), dtype=torch.uint8, device=tensor.device
        )
    if format == "int8":
        low, high = values.aminmax(dim=-1, keepdim=True)
        middle = ((low + high) / 2).bfloat16()
        reach = torch.maximum(high - middle.float(), middle.float() - low)
        step = _or_one(reach / _STEPS * _ROUNDED_UP).bfloat16()
        small = ((values - middle.float()) / step.float()).round().to(torch.int8)
        behind = torch.cat((middle, step), dim=-1)
    else:
        behind = _or_one(values.abs().amax(dim=-1, keepdim=True) / _LARGEST)
        small = (values / behind).to(torch.float8_e4m3fn)
    return torch.cat((small.view(torch.uint8), behind.view(torch.uint8)), dim=-1)


def _or_one(scale: Tensor) -> Tensor:
    return torch.where(scale == 0, 1.0, scale)


def unpack(packed: Tensor, format: str, dtype: torch.dtype) -> Tensor:
    """What `pack` was given, as far as it is still there."""
    small, behind = packed[..., :-SCALE_NBYTES], packed[..., -SCALE_NBYTES:].contiguous()
    if format == "int8":
        middle, step = behind.view(torch.bfloat16).float().chunk(2, dim=-1)
        values = small.view(torch.int8) * step + middle
    else:
        values = small.view(torch.float8_e4m3fn).float() * behind.view(torch.float32)
    return values.to(dtype)


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
