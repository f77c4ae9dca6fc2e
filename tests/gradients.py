"""Seeded tensors, sums over the ranks, and a comparison with what float64 gives."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor


def seeded(*shape: int, seed: int = 11) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def summed(tensor: Tensor) -> Tensor:
    total = tensor.clone()
    dist.all_reduce(total)
    return total


def close(found: Tensor | None, expected: Tensor, tolerance: float = 2e-5) -> None:
    assert found is not None and found.shape == expected.shape
    off = (found.double() - expected).abs().max() if expected.numel() else torch.zeros(())
    assert off <= tolerance, off
