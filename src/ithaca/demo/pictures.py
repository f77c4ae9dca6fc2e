"""Videos of the demo as files: an animation, and a contact sheet of all frames."""

from __future__ import annotations

from pathlib import Path

import imageio.v3 as iio
import torch
from torch import Tensor
from torch.nn.functional import interpolate, pad

_SCALE, _MARGIN, _GREY = 10, 4, 0.25
_FRAME_MS = 150


def write_gif(path: Path, videos: Tensor) -> None:
    """``videos`` ``[N, frames, height, width]`` in 0..1 side by side, endlessly."""
    frames = torch.stack([torch.cat(list(_tiles(videos[:, i])), dim=1) for i in range(videos.shape[1])])
    iio.imwrite(path, _bytes(frames), duration=_FRAME_MS, loop=0)


def write_contact_sheet(path: Path, videos: Tensor) -> None:
    """One row a video, one column a frame."""
    iio.imwrite(path, _bytes(torch.cat([torch.cat(list(_tiles(video)), dim=1) for video in videos], dim=0)))


def _tiles(frames: Tensor) -> Tensor:
    """``[N, height, width]``, enlarged so that a person sees the shapes and not the pixels, with a grey frame."""
    large = interpolate(frames[:, None].float(), scale_factor=_SCALE, mode="bicubic", align_corners=False).clamp(0, 1)
    return pad(large[:, 0], (_MARGIN,) * 4, value=_GREY)


def _bytes(image: Tensor) -> object:
    return (image * 255).round().byte().numpy()
