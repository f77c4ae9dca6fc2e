"""Autocast at the mouth of a call: lanes leave in the dtype that attention on one rank would cast them to.

By then fewer bytes are on the wire, and ranks whose autocast differs find out as they do with any other dtype.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ithaca.heads import MASK

#: What ``torch.autocast`` casts: neither float64 nor float8.
CAST = (torch.float32, torch.float16, torch.bfloat16)


def autocast(role: str, tensor: Tensor) -> Tensor:
    """A lane in the dtype of the autocast that is on, if any. A mask stays as it is."""
    kind = tensor.device.type
    if role == MASK or tensor.dtype not in CAST or not torch.amp.is_autocast_available(kind):
        return tensor
    return tensor.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else tensor
