"""The ways in which the demo runs one and the same thing, and what is measured of each."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ithaca.diffusers import parallelize
from ithaca.exchange.choice import exchange_for
from ithaca.exchange.counters import Counters

N = TypeVar("N", bound=nn.Module)


@dataclass(frozen=True)
class Variant:
    """``exchange`` None: one rank, one thread, nothing of Ithaca."""

    name: str
    exchange: str | None
    asynchronous: bool = False


VARIANTS = (
    Variant("one rank", None),
    Variant("sync, slots", "slots"),
    Variant("async, slots", "slots", asynchronous=True),
    Variant("sync, gloo", "collective"),
    Variant("async, gloo", "collective", asynchronous=True),
)


@dataclass(frozen=True)
class Measured:
    """One variant on one rank: ``bytes_moved`` is what it sent to others in a run, ``output`` the whole result."""

    variant: Variant
    seconds: float
    bytes_moved: int
    output: Tensor


def measure_variants(
    rank: int,
    ranks: int,
    module: N,
    transformer: Callable[[N], nn.Module],
    run: Callable[[N, str], Tensor],
    repeats: int,
) -> list[Measured]:
    """Run every variant on a copy of ``module``, whose ``transformer(module)`` is what gets parallelized. Collective.

    ``run(module, label)`` returns the output; the label is empty in the warm-up that comes before ``repeats`` timed
    runs, of which the fastest counts. In the first variant rank 0 works while the others wait.
    """
    results = []
    for variant in VARIANTS:
        mine = copy.deepcopy(module)
        counters = Counters()
        if variant.exchange is not None:
            parallelize(
                transformer(mine), ulysses_degree=ranks, exchange=variant.exchange, asynchronous=variant.asynchronous
            )
            counters = exchange_for(want=variant.exchange).counters
        best, moved, output = float("inf"), 0, torch.empty(0)
        for repeat in range(repeats + 1):
            before = counters.bytes_moved
            dist.barrier()
            started = time.perf_counter()
            if rank == 0 or variant.exchange is not None:
                output = run(mine, variant.name if repeat else "")
            seconds = time.perf_counter() - started
            dist.barrier()
            moved = counters.bytes_moved - before
            best = min(best, seconds) if repeat else best
        results.append(Measured(variant, best, moved, output))
    return results
