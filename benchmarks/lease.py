"""What it costs a layer that leases watch their slots, over making the views alone.

python benchmarks/lease.py
"""

from __future__ import annotations

import mmap
import statistics
import time
from collections.abc import Callable

import torch
from rich.console import Console
from torch import Tensor

from ithaca import Lease

MEMORY = mmap.mmap(-1, 1 << 20)
ROLES = ("q", "k", "v")


def views() -> dict[str, Tensor]:
    return {role: torch.frombuffer(MEMORY, dtype=torch.uint8, count=4096).view(torch.float32) for role in ROLES}


def watched() -> None:
    lease = Lease(views(), frozenset(ROLES), lambda: None)
    lease.release()


def microseconds(run: Callable[[], object], repeats: int = 2000) -> float:
    started = time.perf_counter()
    for _ in range(repeats):
        run()
    return (time.perf_counter() - started) / repeats * 1e6


def main() -> None:
    turns = [(microseconds(views), microseconds(watched)) for _ in range(15)]
    plain, lease = (statistics.median(each) for each in zip(*turns, strict=True))
    extra = statistics.median(lease - plain for plain, lease in turns)
    Console().print(f"views {plain:.1f} us, under a lease {lease:.1f} us: {extra:.1f} us for its checks")


if __name__ == "__main__":
    main()
