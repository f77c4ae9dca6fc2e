"""The demo: its model draws what it drew when it was trained, on any number of ranks, and the command shows it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import imageio.v3 as iio
import pytest
import torch
from conftest import Run
from torch import Tensor, nn
from typer.testing import CliRunner

from ithaca import InvalidInputError, parallelize
from ithaca.cli import app
from ithaca.demo.model import CANVAS, FRAMES, WEIGHTS, DemoVideoModel, generate
from ithaca.demo.pictures import write_contact_sheet, write_gif
from ithaca.demo.report import block_table, max_difference, psnr, ssim, verdict, video_table
from ithaca.demo.run import PROMPTS, STEPS
from ithaca.demo.variants import VARIANTS, Measured
from ithaca.demo.vocabulary import DIGITS, DIRECTIONS, UNCONDITIONAL, prompt, tokenize
from ithaca.strategies.compression import FORMATS, Loss, loss

pytestmark = pytest.mark.full

GOLDENS = Path(__file__).parent / "goldens"
#: The issue's own bar, in dB; 8-bit pictures alone cost about 59.
ENOUGH = 40.0


def goldens() -> Tensor:
    rows = [torch.from_numpy(iio.imread(GOLDENS / f"{p.replace(' ', '-')}.png")) for p in PROMPTS]
    return torch.stack([row.view(CANVAS, FRAMES, CANVAS).permute(1, 0, 2) for row in rows]).float() / 255


def drawn(rank: int, ranks: int) -> dict[str, Tensor]:
    """The three prompts on one rank, sync and async on several, and two controls."""
    videos = {}
    for name in ("one rank", "sync", "async", "rope shifted", "text dropped"):
        model = DemoVideoModel.load()
        if name != "one rank":
            parallelize(model.transformer, ulysses_degree=ranks, asynchronous=name != "sync")
        if name == "rope shifted":
            model.transformer.rope.register_forward_hook(lambda module, args, out: tuple(t.roll(1, 1) for t in out))
        if name == "text dropped":
            model.words.weight.data[:] = model.words.weight[0].clone()
        videos[name] = generate(model, PROMPTS, steps=STEPS)
    return videos


@pytest.mark.parametrize("ranks", [2, 3])
def test_the_video_is_the_same_on_any_number_of_ranks_and_as_golden(on_ranks: Run, ranks: int) -> None:
    expected = goldens()
    for videos in on_ranks(ranks, drawn, ranks, timeout=170):
        assert torch.equal(videos["one rank"], videos["sync"]) and torch.equal(videos["one rank"], videos["async"])
        assert psnr(videos["async"], expected) > ENOUGH
        for control in ("rope shifted", "text dropped"):
            assert psnr(videos[control], expected) < ENOUGH, f"{control} goes unnoticed"


def drawn_as_bytes(rank: int) -> tuple[dict[str, float], dict[str, Loss]]:
    """The videos with lanes as bytes against those without, and what a byte costs the model's own Q, K and V."""
    whole = generate(DemoVideoModel.load(), PROMPTS, steps=STEPS)
    lost: dict[str, Loss] = {}
    quality = {}
    for format in FORMATS:
        model = DemoVideoModel.load()
        parallelize(model.transformer, ulysses_degree=2, compress=format)
        attn = model.transformer.blocks[0].attn1

        def note(module: nn.Module, args: Any, out: Tensor, heads: int = attn.heads, format: str = format) -> None:
            if format == "int8":
                lost[f"lane {len(lost)}"] = loss(out.unflatten(-1, (heads, -1)).bfloat16(), format)

        for linear in (attn.to_q, attn.to_k, attn.to_v):
            linear.register_forward_hook(note)
        quality[format] = psnr(generate(model, PROMPTS, steps=STEPS), whole)
    return quality, lost


def test_lanes_as_bytes_cost_the_video_little(on_ranks: Run) -> None:
    for quality, lost in on_ranks(2, drawn_as_bytes, timeout=170):
        print(quality, min(each.cosine for each in lost.values()))
        assert quality["int8"] > 35 and quality["float8"] > 20
        assert len(lost) >= 3 * STEPS and all(each.cosine > 0.999 for each in lost.values())


def test_the_weights_are_small() -> None:
    assert WEIGHTS.stat().st_size <= 8e6
    assert 2e6 < sum(p.numel() for p in DemoVideoModel.load().parameters()) < 4e6


def test_every_prompt_has_its_own_tokens() -> None:
    tokens = [tokenize(prompt(digit, direction)) for digit in range(10) for direction in DIRECTIONS]
    assert len(set(tokens)) == 40 and UNCONDITIONAL not in tokens and len(DIGITS) == 10
    for text in ("a seven", "a seven drifting sideways", "an eight drifting up", "drifting a seven up", ""):
        with pytest.raises(InvalidInputError, match="a <digit> drifting <direction>"):
            tokenize(text)


def test_pictures(tmp_path: Path) -> None:
    videos = torch.rand(2, FRAMES, CANVAS, CANVAS)
    write_gif(tmp_path / "video.gif", videos)
    write_contact_sheet(tmp_path / "frames.png", videos)
    frames, sheet = iio.imread(tmp_path / "video.gif"), iio.imread(tmp_path / "frames.png")
    tile = 10 * CANVAS + 8
    assert frames.shape[:3] == (FRAMES, tile, 2 * tile) and sheet.shape == (2 * tile, FRAMES * tile)


def measured(seconds: tuple[float, ...]) -> list[list[Measured]]:
    video = torch.rand(1, FRAMES, CANVAS, CANVAS)
    return [
        [Measured(v, s, 0 if v.exchange is None else 10**6, video) for v, s in zip(VARIANTS, seconds, strict=True)]
        for _ in range(2)
    ]


def test_tables_say_what_was_measured(capsys: pytest.CaptureFixture[str]) -> None:
    from rich.console import Console

    results = measured((2.0, 1.0, 1.25, 2.0, 2.5))
    console = Console(width=120)
    console.print(video_table(results, 2, 1, STEPS))
    console.print(block_table(results, 2))
    text = capsys.readouterr().out
    for row in (["one rank", "2.00", "1.00x"], ["async, slots", "1.25", "1.60x", "2.0", "inf"]):
        assert any(all(word in line for word in row) for line in text.splitlines()), (row, text)
    assert "2.0 times as fast through slots and no faster through gloo" in verdict(results, 2)


def test_likeness() -> None:
    one = torch.rand(2, FRAMES, CANVAS, CANVAS)
    assert psnr(one, one) == float("inf") and ssim(one, one) == pytest.approx(1) and max_difference(one, one) == 0
    assert psnr(one + 0.01, one) == pytest.approx(40, abs=0.01) and max_difference(one + 0.5, one) == pytest.approx(0.5)


def test_the_command_tells_an_error_in_its_own_words() -> None:
    command = [sys.executable, "-m", "ithaca.cli", "demo", "--prompt", "a cat"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and "InvalidInputError" in done.stderr and "Traceback" not in done.stderr


def test_doctor_tries_the_exchanges() -> None:
    result = CliRunner().invoke(app, ["doctor"])
    assert result.exit_code == 0
    for what in ("slots", "collective"):
        assert any(what in line and line.rstrip(" │").endswith("works") for line in result.output.splitlines()), (
            result.output
        )
