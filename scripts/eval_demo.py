"""How often a digit that the demo model draws is read as the digit of its prompt.

    python scripts/eval_demo.py

The reader is a support vector machine trained on the same digits on the same canvas. It looks at an 8x8 window around
the light of the middle frame, as a person looks where the digit is. Prints the share of right readings, that of the
reader on real digits that it was not trained on, and how often the drift goes where the prompt says.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from demo_data import DIGIT, digits, drifting
from sklearn.model_selection import cross_val_score
from sklearn.svm import SVC
from torch import Tensor

from ithaca.demo.model import CANVAS, FRAMES, WEIGHTS, DemoVideoModel, generate
from ithaca.demo.vocabulary import DIRECTIONS, prompt

#: Light below this is the black canvas.
_DARK = 0.1


def look(frames: Tensor) -> tuple[Tensor, Tensor]:
    """Of frames ``[N, H, W]`` in 0..1: the window around the light, ``[N, 64]``, and the light's centre, ``[N, 2]``."""
    light = (frames - _DARK).clamp(min=0)
    place = torch.arange(CANVAS, dtype=frames.dtype)
    total = light.sum(dim=(1, 2)).clamp(min=1e-6)
    centre = torch.stack(((light.sum(2) * place).sum(1), (light.sum(1) * place).sum(1)), dim=1) / total[:, None]
    corner = (centre - (DIGIT - 1) / 2).round().long().clamp(0, CANVAS - DIGIT)
    pixels = torch.arange(DIGIT)
    rows, columns = (corner[:, axis, None] + pixels for axis in (0, 1))
    windows = frames[torch.arange(len(frames))[:, None, None], rows[:, :, None], columns[:, None, :]]
    return windows.flatten(1), centre


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weights", type=Path, default=WEIGHTS)
    parser.add_argument("--samples", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()

    images, labels = digits()
    directions = torch.arange(len(images)) % len(DIRECTIONS)
    real = (drifting(images, directions, torch.Generator().manual_seed(0))[:, 0, FRAMES // 2] + 1) / 2
    pixels = look(real)[0].numpy()
    reader = SVC(C=10, gamma=0.1)
    own = cross_val_score(reader, pixels, labels.numpy(), cv=5).mean()
    reader.fit(pixels, labels.numpy())

    wanted = [(i % 10, list(DIRECTIONS)[i // 10 % len(DIRECTIONS)]) for i in range(args.samples)]
    model = DemoVideoModel.load(args.weights)
    videos = torch.cat(
        [
            generate(model, [prompt(*each) for each in wanted[start : start + 20]], seed=args.seed + start)
            for start in range(0, args.samples, 20)
        ]
    )
    middle, _ = look(videos[:, FRAMES // 2])
    right = torch.tensor(reader.predict(middle.numpy())) == torch.tensor([digit for digit, _ in wanted])
    begins, ends = look(videos[:, 0])[1], look(videos[:, -1])[1]
    steps = torch.tensor([DIRECTIONS[direction] for _, direction in wanted])
    moved = ((ends - begins) * steps).sum(dim=1) > (FRAMES - 1) / 2
    print(f"digits read as their prompt says: {right.float().mean():.1%} of {args.samples}")
    print(f"drifts that go where their prompt says: {moved.float().mean():.1%}")
    print(f"the reader's own accuracy on real digits (5-fold): {own:.1%}")
    for digit in range(10):
        mine = torch.tensor([d == digit for d, _ in wanted])
        print(f"  {digit}: {right[mine].float().mean():.0%}")


if __name__ == "__main__":
    main()
