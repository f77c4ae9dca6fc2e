"""What the ranks of the demo do: draw the videos, and run one block of Wan-1.3B's shape, in every variant."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import torch
from diffusers import WanTransformer3DModel
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from torch import Tensor

from ithaca.demo.model import DemoVideoModel, generate
from ithaca.demo.variants import Measured, measure_variants

BLOCK_TOKENS, BLOCK_HEADS, BLOCK_HEAD_DIM, BLOCK_FFN = 4096, 12, 128, 8960
BLOCK_REPEATS = 2
_TEXT_TOKENS, _TEXT_DIM = 512, 4096
_WARM_UP_STEPS = 2


def videos(rank: int, ranks: int, prompts: Sequence[str], seed: int, steps: int) -> list[Measured]:
    """The demo's videos ``[prompts, frames, height, width]`` in 0..1, in every variant."""

    def draw(model: DemoVideoModel, label: str) -> Tensor:
        if not label:
            return generate(model, prompts, seed=seed, steps=_WARM_UP_STEPS)
        with _progress(rank) as bar:
            task = bar.add_task(label, total=steps)
            return generate(model, prompts, seed=seed, steps=steps, on_step=lambda step: bar.advance(task))

    return measure_variants(rank, ranks, DemoVideoModel.load(), lambda model: model.transformer, draw, repeats=1)


def block(rank: int, ranks: int) -> list[Measured]:
    """A Wan transformer of one block of the 1.3B model's shape, in bf16 with seeded weights, in every variant."""
    torch.manual_seed(0)
    model = WanTransformer3DModel(
        num_attention_heads=BLOCK_HEADS,
        attention_head_dim=BLOCK_HEAD_DIM,
        ffn_dim=BLOCK_FFN,
        text_dim=_TEXT_DIM,
        num_layers=1,
    ).bfloat16()
    latents = torch.randn(1, 16, 4, 64, 64, dtype=torch.bfloat16)  # patches of (1, 2, 2): 4,096 tokens
    text = torch.randn(1, _TEXT_TOKENS, _TEXT_DIM, dtype=torch.bfloat16)
    timestep = torch.tensor([500])

    @torch.inference_mode()
    def once(model: WanTransformer3DModel, label: str) -> Tensor:
        with _progress(rank) as bar:
            task = bar.add_task(f"block, {label or 'warm-up'}", total=1)
            output: Tensor = model(latents, timestep, text, return_dict=False)[0]
            bar.advance(task)
            return output

    return measure_variants(rank, ranks, model, lambda model: model, once, repeats=BLOCK_REPEATS)


def _progress(rank: int) -> Progress:
    """Rank 0's, on standard error, so that what the demo prints can be piped."""
    return Progress(
        TextColumn("{task.description:>22}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=Console(file=sys.stderr),
        disable=rank != 0,
    )
