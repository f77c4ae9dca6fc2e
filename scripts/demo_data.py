"""Handwritten digits (scikit-learn's 8x8 set), each drifting over a black canvas: what the demo model learns."""

from __future__ import annotations

import torch
from sklearn.datasets import load_digits
from torch import Tensor

from ithaca.demo.model import CANVAS, FRAMES
from ithaca.demo.vocabulary import DIRECTIONS, prompt, tokenize

DIGIT = 8
_STEPS = torch.tensor(list(DIRECTIONS.values()))


def digits() -> tuple[Tensor, Tensor]:
    """All 1,797 digits as ``[N, 8, 8]`` in 0..1, and their labels ``[N]``."""
    data = load_digits()
    return torch.tensor(data.images, dtype=torch.float32) / 16, torch.tensor(data.target)


def drifting(images: Tensor, directions: Tensor, generator: torch.Generator) -> Tensor:
    """Videos ``[N, 1, FRAMES, CANVAS, CANVAS]`` in -1..1 of ``images`` moving one pixel a frame.

    Along the drift a digit starts at one border, give or take a pixel; across it, near the middle.
    """
    n, room = len(images), CANVAS - DIGIT
    steps = _STEPS[directions]
    jitter = torch.randint(0, room - FRAMES + 2, (n, 1), generator=generator)
    across = torch.randint(2, room - 1, (n, 2), generator=generator)
    start = torch.where(steps > 0, jitter, torch.where(steps < 0, room - jitter, across))
    corner = start[:, None] + steps[:, None] * torch.arange(FRAMES)[:, None]
    pixels = torch.arange(DIGIT)
    rows = (corner[..., 0, None] + pixels)[..., :, None]
    columns = (corner[..., 1, None] + pixels)[..., None, :]
    video = torch.full((n, 1, FRAMES, CANVAS, CANVAS), -1.0)
    video[torch.arange(n)[:, None, None, None], 0, torch.arange(FRAMES)[:, None, None], rows, columns] = (
        images[:, None] * 2 - 1
    )
    return video


def token_table() -> Tensor:
    """Token ids ``[10, directions, words]`` of every prompt."""
    return torch.tensor([[tokenize(prompt(digit, direction)) for direction in DIRECTIONS] for digit in range(10)])
