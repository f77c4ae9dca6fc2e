"""The demo's text-to-video model: diffusers' Wan transformer, small, over pixels instead of VAE latents.

The weights that ship with the package were made by ``scripts/train_demo.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from diffusers import FlowMatchEulerDiscreteScheduler, WanTransformer3DModel
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from ithaca.demo.vocabulary import PROMPT_WORDS, UNCONDITIONAL, WORDS, tokenize

FRAMES, CANVAS = 8, 16
WEIGHTS = Path(__file__).with_name("weights.safetensors")

_TEXT_DIM = 64


class DemoVideoModel(nn.Module):
    """A Wan transformer with a learned vocabulary in the place of a text encoder.

    ``forward(video, timestep, tokens)`` takes ``[B, 1, F, H, W]`` in -1..1 with noise, ``[B]`` in 0..1000 and
    ``[B, PROMPT_WORDS]``, and returns the velocity (noise minus video) in the shape of ``video``.
    """

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(len(WORDS), _TEXT_DIM)
        # One embedding a place: the order of the words must not be lost on cross-attention.
        self.places = nn.Parameter(torch.zeros(PROMPT_WORDS, _TEXT_DIM))
        self.transformer = WanTransformer3DModel(
            patch_size=(1, 4, 4),
            num_attention_heads=4,
            attention_head_dim=48,
            in_channels=1,
            out_channels=1,
            text_dim=_TEXT_DIM,
            freq_dim=64,
            ffn_dim=768,
            num_layers=4,
            cross_attn_norm=True,
            qk_norm="rms_norm_across_heads",
            rope_max_seq_len=32,
        )

    def forward(self, video: Tensor, timestep: Tensor, tokens: Tensor) -> Tensor:
        text = self.words(tokens) + self.places
        velocity: Tensor = self.transformer(
            hidden_states=video, timestep=timestep, encoder_hidden_states=text, return_dict=False
        )[0]
        return velocity

    def save(self, path: Path) -> None:
        """Write the weights as bf16 safetensors."""
        save_file({name: tensor.bfloat16().contiguous() for name, tensor in self.state_dict().items()}, path)

    @classmethod
    def load(cls, path: Path = WEIGHTS) -> DemoVideoModel:
        """The trained model in fp32 and evaluation mode, from bf16 safetensors."""
        model = cls()
        model.load_state_dict({name: tensor.float() for name, tensor in load_file(path).items()})
        return model.eval().requires_grad_(False)


@torch.inference_mode()
def generate(
    model: DemoVideoModel,
    prompts: Sequence[str],
    *,
    seed: int = 0,
    steps: int = 20,
    guidance: float = 4.0,
    on_step: Callable[[int], None] = lambda step: None,
) -> Tensor:
    """Draw one video per prompt by flow matching with classifier-free guidance.

    Returns ``[B, FRAMES, CANVAS, CANVAS]`` in 0..1 (0 is black). The noise comes from ``seed`` alone, so every
    rank that calls this with the same arguments starts from the same noise. ``on_step(i)`` runs after step ``i``.
    """
    noise = torch.randn(len(prompts), 1, FRAMES, CANVAS, CANVAS, generator=torch.Generator().manual_seed(seed))
    tokens = torch.tensor([tokenize(text) for text in prompts] + [UNCONDITIONAL] * len(prompts))
    scheduler = FlowMatchEulerDiscreteScheduler()
    scheduler.set_timesteps(steps)
    video = noise
    for step, timestep in enumerate(scheduler.timesteps):
        both = model(video.repeat(2, 1, 1, 1, 1), timestep.expand(len(tokens)), tokens)
        conditional, unconditional = both.chunk(2)
        velocity = unconditional + guidance * (conditional - unconditional)
        video = scheduler.step(velocity, timestep, video, return_dict=False)[0]
        on_step(step)
    return ((video[:, 0] + 1) / 2).clamp(0, 1)
