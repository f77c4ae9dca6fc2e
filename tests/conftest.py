"""Ranks for the tests: warm processes that every test shares, in pools of two, three and four."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from ithaca import RankPool

Run = Callable[..., list[Any]]


@pytest.fixture(scope="session")
def _pools() -> Iterator[dict[int, RankPool]]:
    pools: dict[int, RankPool] = {}
    yield pools
    for pool in pools.values():
        pool.close()


@pytest.fixture
def on_ranks(_pools: dict[int, RankPool]) -> Run:
    """``on_ranks(n, fn, *args)`` runs ``fn(rank, *args)`` on ``n`` warm ranks and returns their results."""

    def run(ranks: int, fn: Callable[..., Any], *args: Any, timeout: float = 90) -> list[Any]:
        if ranks not in _pools or not _pools[ranks].alive:
            _pools[ranks] = RankPool(ranks)
        return _pools[ranks].run(fn, *args, timeout=timeout)

    return run
