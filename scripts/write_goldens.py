"""Write the golden frames that the tests hold the demo model to: one picture a prompt, all frames in a row.

    python scripts/write_goldens.py

Only after the weights have changed on purpose.
"""

from __future__ import annotations

from pathlib import Path

import imageio.v3 as iio

from ithaca.demo.model import DemoVideoModel, generate
from ithaca.demo.run import PROMPTS, STEPS

GOLDENS = Path(__file__).parent.parent / "tests" / "goldens"


def main() -> None:
    GOLDENS.mkdir(exist_ok=True)
    for prompt, video in zip(PROMPTS, generate(DemoVideoModel.load(), PROMPTS, steps=STEPS), strict=True):
        row = video.permute(1, 0, 2).flatten(1)
        iio.imwrite(GOLDENS / f"{prompt.replace(' ', '-')}.png", (row * 255).round().byte().numpy())


if __name__ == "__main__":
    main()
