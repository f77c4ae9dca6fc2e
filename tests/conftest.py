"""Ranks for the tests: warm processes that every test shares, in pools of two, three and four."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from ithaca import RankPool

TIERS = {"fast", "full", "chaos", "soak"}

Run = Callable[..., list[Any]]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A test of no tier would run nowhere or everywhere, depending on who asks."""
    stray = [item.nodeid for item in items if len(TIERS & {mark.name for mark in item.iter_markers()}) != 1]
    if stray:
        raise pytest.UsageError(
            f"each test was required to be of one of the tiers {sorted(TIERS)}; these are not: {stray}"
        )


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
