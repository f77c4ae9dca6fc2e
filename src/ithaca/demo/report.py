"""The demo's tables, and how like one another two videos are."""

from __future__ import annotations

import torch
from rich.table import Table
from torch import Tensor
from torchmetrics.functional.image import peak_signal_noise_ratio, structural_similarity_index_measure

from ithaca.demo import jobs
from ithaca.demo.variants import Measured

_CAPTION = "MB: sent between ranks in a run, by all of them together"


def video_table(of_ranks: list[list[Measured]], ranks: int, videos: int, steps: int) -> Table:
    table = Table(
        title=f"{videos} video(s), {steps} steps, one thread a rank, {ranks} ranks against one", caption=_CAPTION
    )
    for column in ("", "s/step", "s", "speed-up", "MB", "max diff", "PSNR dB", "SSIM"):
        table.add_column(column, justify="right", no_wrap=True)
    one = of_ranks[0][0]
    for measured, moved in _rows(of_ranks):
        seconds = measured.seconds
        row = [measured.variant.name, f"{seconds / steps:.4f}", f"{seconds:.2f}", f"{one.seconds / seconds:.2f}x"]
        if measured is not one:
            row += [f"{moved / 1e6:.1f}", *_likeness(measured.output, one.output)]
        table.add_row(*row)
    return table


def block_table(of_ranks: list[list[Measured]], ranks: int) -> Table:
    table = Table(
        title=f"one block of Wan-1.3B's shape ({jobs.BLOCK_HEADS} heads x {jobs.BLOCK_HEAD_DIM}, "
        f"{jobs.BLOCK_TOKENS} tokens, bf16), one thread a rank, {ranks} ranks against one"
    )
    for column in ("", "s", "speed-up", "MB", "max diff"):
        table.add_column(column, justify="right", no_wrap=True)
    one = of_ranks[0][0]
    for measured, moved in _rows(of_ranks):
        row = [measured.variant.name, f"{measured.seconds:.3f}", f"{one.seconds / measured.seconds:.2f}x"]
        if measured is not one:
            row += [f"{moved / 1e6:.1f}", f"{max_difference(measured.output, one.output):.2g}"]
        table.add_row(*row)
    return table


def verdict(of_ranks: list[list[Measured]], ranks: int) -> str:
    """What the first table shows, in words."""
    one = of_ranks[0][0].seconds
    best = {
        kind: max(one / m.seconds for m in of_ranks[0] if m.variant.exchange == kind)
        for kind in ("slots", "collective")
    }
    gains = {kind: f"{gain:.1f} times as fast" if gain >= 1.1 else "no faster" for kind, gain in best.items()}
    return (
        f"On {ranks} ranks so small a model is {gains['slots']} through slots and {gains['collective']} through gloo: "
        f"there is little work beside the exchange."
    )


def _rows(of_ranks: list[list[Measured]]) -> list[tuple[Measured, int]]:
    """Rank 0's measurement of each variant, with the bytes that all ranks moved."""
    return [(each[0], sum(m.bytes_moved for m in each)) for each in zip(*of_ranks, strict=True)]


def max_difference(video: Tensor, reference: Tensor) -> float:
    return float((video.double() - reference.double()).abs().max())


def psnr(video: Tensor, reference: Tensor) -> float:
    """In dB, for pictures in 0..1; infinite for equal ones."""
    if torch.equal(video, reference):
        return float("inf")
    return float(peak_signal_noise_ratio(video, reference, data_range=1.0))


def ssim(video: Tensor, reference: Tensor) -> float:
    value = structural_similarity_index_measure(
        video.flatten(0, 1)[:, None], reference.flatten(0, 1)[:, None], data_range=1.0
    )
    assert isinstance(value, Tensor)
    return float(value)


def _likeness(video: Tensor, reference: Tensor) -> list[str]:
    return [
        f"{max_difference(video, reference):.2g}",
        f"{psnr(video, reference):.1f}",
        f"{ssim(video, reference):.4f}",
    ]
