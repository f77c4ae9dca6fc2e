"""The demo as a person meets it: two pictures and two tables."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from ithaca.demo.vocabulary import tokenize
from ithaca.errors import InvalidInputError
from ithaca.launch import RankPool

PROMPTS = ("a seven drifting up", "a three drifting left", "a zero drifting down")
STEPS = 20


def run_demo(prompts: Sequence[str], ranks: int, out: Path, seed: int = 0) -> None:
    """Draw ``prompts`` on one rank and on ``ranks``, write video.gif and frames.png to ``out``, print two tables."""
    for prompt in prompts:
        tokenize(prompt)
    if ranks < 2:
        raise InvalidInputError(f"the demo was required to run on two ranks or more; received {ranks}")
    console = Console()
    out.mkdir(parents=True, exist_ok=True)
    with RankPool(ranks, preload=("ithaca.demo.jobs",)) as pool:
        # Beside the ranks, which are importing the same: these take seconds.
        from ithaca.demo import jobs, report
        from ithaca.demo.pictures import write_contact_sheet, write_gif

        drawn = pool.run(jobs.videos, ranks, prompts, seed, STEPS)
        video = next(m.output for m in drawn[0] if m.variant.asynchronous)
        write_gif(out / "video.gif", video)
        write_contact_sheet(out / "frames.png", video)
        console.print(report.video_table(drawn, ranks, len(prompts), STEPS))
        console.print(report.verdict(drawn, ranks))
        console.print(f"Wrote {out / 'video.gif'} and {out / 'frames.png'}: {'; '.join(prompts)}.\n", markup=False)
        console.print(report.block_table(pool.run(jobs.block, ranks), ranks))
