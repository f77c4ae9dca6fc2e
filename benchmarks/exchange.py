"""Q, K and V in and O back, without attention: slots against the collective and against a plain copy of the bytes.

    make bench                                   # two and four ranks at 4,096 tokens
    make bench-growth                            # 64 to 32,768 tokens and 1 to 8 ranks; a plot and all numbers in docs/

All three take turns in one run on the same ranks, so what the machine does meanwhile hits them alike. A turn is a few
round trips in a row, as the layers of a model make them, and lasts from when its first rank begins to when its last one
is done; the table has the medians over turns, by round trip, and their ratios.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

from ithaca import Exchange, Layout, Splits, exchange_for, run_ranks

BATCH, HEADS, HEAD_DIM, DTYPE = 1, 12, 128, torch.bfloat16
TOKENS = 4096
ROLES = ("v", "q", "k")
IN_A_ROW = 3
CONTENDERS = ("slots", "collective", "memcpy")
#: What growth is shown over: tokens on two ranks, and ranks at `TOKENS`.
TOKENS_GROW, RANKS_GROW = (64, 256, 1024, 4096, 16384, 32768), (1, 2, 4, 8)


@dataclass(frozen=True)
class Point:
    """Milliseconds by round trip for each contender: the median over turns, and the middle half of them."""

    ranks: int
    tokens: int
    median: dict[str, float]
    quartiles: dict[str, tuple[float, float]]

    def ratio(self, one: str, other: str) -> float:
        return self.median[one] / self.median[other]


def round_trip(exchange: Exchange, lanes: dict[str, torch.Tensor], out: torch.Tensor) -> None:
    """One call as an attention layer makes it, for a backend that reads the slots and prefers HND."""
    with exchange.call(ROLES, Layout.HND) as call:
        call.push(**lanes)
        with call.wait():
            pass
        call.push_out(out, Layout.HND)
        with call.wait_out():
            pass


def measure(rank: int, ranks: int, tokens: int, turns: int) -> dict[str, list[tuple[float, float]]]:
    """When each turn began and ended on this rank, in seconds of the host's monotonic clock."""
    mine = Splits.even(tokens, ranks).sizes[rank]
    heads = Splits.even(HEADS, ranks).sizes[rank]
    lanes = {role: torch.randn(BATCH, mine, HEADS, HEAD_DIM).to(DTYPE) for role in ROLES}
    out = torch.randn(BATCH, tokens, heads, HEAD_DIM).to(DTYPE).transpose(1, 2)  # as CPU SDPA returns it
    sources = [*lanes.values(), out]
    copies = [torch.empty_like(source) for source in sources]
    slots, collective = exchange_for(want="slots"), exchange_for(want="collective")

    def memcpy() -> None:
        for copy, source in zip(copies, sources, strict=True):
            copy.copy_(source)

    contenders: dict[str, Callable[[], None]] = {
        "slots": lambda: round_trip(slots, lanes, out),
        "collective": lambda: round_trip(collective, lanes, out),
        "memcpy": memcpy,
    }
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in contenders}
    for turn in range(turns + 1):  # the first warms up
        for name, run in contenders.items():
            dist.barrier()
            start = time.monotonic()
            for _ in range(IN_A_ROW):
                run()
            if turn:
                times[name].append((start, time.monotonic()))
    return times


def point(ranks: int, tokens: int, turns: int) -> Point:
    """All contenders at one size."""
    of_ranks = run_ranks(measure, ranks, ranks, tokens, turns)
    median, quartiles = {}, {}
    for name in CONTENDERS:
        took = [
            (max(end for _, end in each) - min(start for start, _ in each)) * 1e3 / IN_A_ROW
            for each in zip(*(times[name] for times in of_ranks), strict=True)
        ]
        low, median[name], high = statistics.quantiles(took, n=4)
        quartiles[name] = (low, high)
    return Point(ranks, tokens, median, quartiles)


def table(points: list[Point], turns: int) -> Table:
    result = Table(title=f"Q, K, V in and O back: B{BATCH} H{HEADS} D{HEAD_DIM} bf16, {turns} turns of {IN_A_ROW}")
    columns = ("ranks", "tokens", *(f"{name} ms" for name in CONTENDERS), "collective / slots", "slots / memcpy")
    for column in columns:
        result.add_column(column, justify="right")
    for each in points:
        ratios = (each.ratio("collective", "slots"), each.ratio("slots", "memcpy"))
        numbers = [*(f"{each.median[name]:.3f}" for name in CONTENDERS), *(f"{ratio:.2f}" for ratio in ratios)]
        result.add_row(str(each.ranks), str(each.tokens), *numbers)
    return result


def plot(points: list[Point], path: Path, title: str) -> None:
    """Time over tokens and over ranks, with the middle half of the turns shaded."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (over_tokens, over_ranks) = pyplot.subplots(1, 2, figsize=(11, 4), layout="constrained")
    by_tokens = [each for each in points if each.ranks == 2]
    by_ranks = [each for each in points if each.tokens == TOKENS]
    panels = (
        (over_tokens, by_tokens, [each.tokens for each in by_tokens], "tokens, on 2 ranks"),
        (over_ranks, by_ranks, [each.ranks for each in by_ranks], f"ranks, at {TOKENS} tokens"),
    )
    for axes, some, at, label in panels:
        for name in CONTENDERS:
            low, high = zip(*(each.quartiles[name] for each in some), strict=True)
            axes.plot(at, [each.median[name] for each in some], marker="o", label=name)
            axes.fill_between(at, low, high, alpha=0.2)
        axes.set(xscale="log", yscale="log", xlabel=label, ylabel="ms a round trip")
        axes.set_xticks(at, [str(n) for n in at])
        axes.minorticks_off()
        axes.grid(True, alpha=0.3)
        axes.legend()
    figure.suptitle(title)
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--growth", type=Path, metavar="FOLDER", help="Grow tokens and ranks; write a plot and JSON.")
    asked = parser.parse_args()
    sizes = {(ranks, TOKENS) for ranks in (2, 4)}
    if asked.growth:
        sizes = {(2, tokens) for tokens in TOKENS_GROW} | {(ranks, TOKENS) for ranks in RANKS_GROW}
    points = [point(ranks, tokens, asked.turns) for ranks, tokens in sorted(sizes)]
    Console().print(table(points, asked.turns))
    if asked.growth:
        machine = f"{len(os.sched_getaffinity(0))} cores of {platform.machine()}, torch {torch.__version__}"
        when = f"{date.today()}, {machine}, {asked.turns} turns of {IN_A_ROW}"
        plot(points, asked.growth / "exchange-growth.png", f"Q, K, V in and O back, H{HEADS} D{HEAD_DIM} bf16 ({when})")
        report = {"when": when, "points": [asdict(each) for each in points]}
        (asked.growth / "exchange-growth.json").write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
