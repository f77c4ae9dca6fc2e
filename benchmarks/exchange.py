"""Q, K and V in and O back, without attention: slots against the collective and against a plain copy of the bytes.

    make bench

All three take turns in one run on the same ranks, so what the machine does meanwhile hits them alike. A turn is a few
round trips in a row, as the layers of a model make them, and lasts from when its first rank begins to when its last one
is done; the table has the medians over turns, by round trip, and their ratios.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

from ithaca import Exchange, Layout, Splits, exchange_for, run_ranks

BATCH, TOKENS, HEADS, HEAD_DIM, DTYPE = 1, 4096, 12, 128, torch.bfloat16
ROLES = ("v", "q", "k")
IN_A_ROW = 3


def round_trip(exchange: Exchange, lanes: dict[str, torch.Tensor], out: torch.Tensor) -> None:
    """One call as an attention layer makes it, for a backend that reads the slots and prefers HND."""
    with exchange.call(ROLES, Layout.HND) as call:
        call.push(**lanes)
        with call.wait():
            pass
        call.push_out(out, Layout.HND)
        with call.wait_out():
            pass


def measure(rank: int, ranks: int, turns: int) -> dict[str, list[tuple[float, float]]]:
    """When each turn began and ended on this rank, in seconds of the host's monotonic clock."""
    tokens = Splits.even(TOKENS, ranks).sizes[rank]
    heads = Splits.even(HEADS, ranks).sizes[rank]
    lanes = {role: torch.randn(BATCH, tokens, HEADS, HEAD_DIM).to(DTYPE) for role in ROLES}
    out = torch.randn(BATCH, TOKENS, heads, HEAD_DIM).to(DTYPE).transpose(1, 2)  # as CPU SDPA returns it
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=20)
    turns = parser.parse_args().turns
    table = Table(
        title=f"Q, K, V in and O back: B{BATCH} S{TOKENS} H{HEADS} D{HEAD_DIM} bf16, {turns} turns of {IN_A_ROW}"
    )
    for column in ("ranks", "slots ms", "collective ms", "memcpy ms", "collective / slots", "slots / memcpy"):
        table.add_column(column, justify="right")
    for ranks in (2, 4):
        of_ranks = run_ranks(measure, ranks, ranks, turns)
        ms = {
            name: statistics.median(
                max(end for _, end in each) - min(start for start, _ in each)
                for each in zip(*(times[name] for times in of_ranks), strict=True)
            )
            * 1e3
            / IN_A_ROW
            for name in of_ranks[0]
        }
        table.add_row(
            str(ranks),
            *(f"{ms[name]:.2f}" for name in ("slots", "collective", "memcpy")),
            f"{ms['collective'] / ms['slots']:.2f}",
            f"{ms['slots'] / ms['memcpy']:.2f}",
        )
    Console().print(table)


if __name__ == "__main__":
    main()
