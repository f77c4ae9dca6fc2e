"""Train the demo's text-to-video model by flow matching (Lipman et al., 2023), on the CPU, from a seed.

    python scripts/train_demo.py --out src/ithaca/demo/weights.safetensors

Prints the loss as it goes. On two quiet cores the default takes about 50 minutes.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch
from demo_data import digits, drifting, token_table
from torch.optim.lr_scheduler import OneCycleLR
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from ithaca.demo.model import DemoVideoModel
from ithaca.demo.vocabulary import DIRECTIONS

PEAK, DROP_PROMPT = 1.2e-3, 0.1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=8000)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    torch.manual_seed(args.seed)
    generator = torch.Generator().manual_seed(args.seed)
    images, labels = digits()
    tokens = token_table()

    model = DemoVideoModel()
    # Explicit matmuls: the fused CPU kernel's bf16 backward takes a third of a step, this a tenth.
    model.transformer.set_attention_backend("_native_math")
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.999))
    optimizer = torch.optim.AdamW(model.parameters(), lr=PEAK, betas=(0.9, 0.99), weight_decay=0.01, fused=True)
    schedule = OneCycleLR(optimizer, PEAK, args.steps, pct_start=0.03, cycle_momentum=False, final_div_factor=100)
    running, started = 0.0, time.monotonic()
    for step in range(args.steps):
        pick = torch.randint(len(images), (args.batch,), generator=generator)
        direction = torch.randint(len(DIRECTIONS), (args.batch,), generator=generator)
        video = drifting(images[pick], direction, generator)
        prompts = tokens[labels[pick], direction]
        prompts = prompts * (torch.rand(args.batch, 1, generator=generator) > DROP_PROMPT)
        noise = torch.randn(video.shape, generator=generator)
        time_ = torch.sigmoid(torch.randn(args.batch, generator=generator))
        mix = time_.view(-1, 1, 1, 1, 1)
        with torch.autocast("cpu", torch.bfloat16):
            velocity = model((1 - mix) * video + mix * noise, time_ * 1000, prompts)
        loss = (velocity.float() - (noise - video)).square().mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        average.update_parameters(model)
        running = loss.item() if step == 0 else 0.99 * running + 0.01 * loss.item()
        if step % 100 == 99:
            print(f"step {step + 1:5d}  loss {running:.4f}  {time.monotonic() - started:6.0f} s", flush=True)
            average.module.save(args.out)


if __name__ == "__main__":
    main()
