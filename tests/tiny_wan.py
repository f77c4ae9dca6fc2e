"""A Wan transformer of a few thousand parameters, and what it is given."""

from __future__ import annotations

from typing import Any

import torch
from diffusers import WanTransformer3DModel

HEADS, HEAD_DIM, LAYERS, BATCH = 4, 12, 2, 2
#: Frames, height and width of the latents, with patches of (1, 2, 2).
GRIDS = {"24 tokens": (2, 6, 8), "15 tokens": (1, 6, 10), "2 tokens": (1, 2, 4)}


def wan(layers: int = LAYERS) -> WanTransformer3DModel:
    torch.manual_seed(0)
    model = WanTransformer3DModel(
        num_attention_heads=HEADS,
        attention_head_dim=HEAD_DIM,
        in_channels=4,
        out_channels=4,
        text_dim=10,
        freq_dim=16,
        ffn_dim=32,
        num_layers=layers,
        rope_max_seq_len=32,
    )
    return model.eval().requires_grad_(False)


def inputs(grid: tuple[int, int, int], per_token: bool = False) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(1)
    tokens = grid[0] * grid[1] * grid[2] // 4
    timestep = torch.rand(BATCH, tokens, generator=generator) * 999 if per_token else torch.tensor([3.0, 700.0])
    return {
        "hidden_states": torch.randn(BATCH, 4, *grid, generator=generator),
        "timestep": timestep,
        "encoder_hidden_states": torch.randn(BATCH, 5, 10, generator=generator),
        "return_dict": False,
    }
