"""Ranks for the tests: warm processes that every test shares, in pools of two, three and four."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch

from ithaca import RankPool

#: Each tier, and what runs it.
TIERS = {"fast": "pytest -m fast", "full": "pytest -m full", "chaos": "make chaos", "soak": "make soak"}
#: Tests of the tiers that were left out of this run as a whole.
LEFT_OUT = pytest.StashKey[Counter[str]]()

Run = Callable[..., list[Any]]


def tiers(item: pytest.Item) -> set[str]:
    return TIERS.keys() & {mark.name for mark in item.iter_markers()}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A test of no tier would run nowhere or everywhere, depending on who asks."""
    stray = [item.nodeid for item in items if len(tiers(item)) != 1]
    if stray:
        raise pytest.UsageError(
            f"each test was required to be of one of the tiers {sorted(TIERS)}; these are not: {stray}"
        )


def pytest_configure(config: pytest.Config) -> None:
    if hasattr(config, "workerinput"):
        torch.set_num_threads(1)  # beside other workers


def pytest_deselected(items: Sequence[pytest.Item]) -> None:
    for item in items:
        item.config.stash.setdefault(LEFT_OUT, Counter()).update(tiers(item))


def pytest_collection_finish(session: pytest.Session) -> None:
    left_out = session.config.stash.setdefault(LEFT_OUT, Counter())
    for tier in set().union(*map(tiers, session.items)):
        del left_out[tier]
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["left out"] = dict(left_out)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Every worker has collected all tests, so any one's word will do."""
    node.config.stash[LEFT_OUT] = Counter(getattr(node, "workeroutput", {}).get("left out", {}))


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """What this run does not show, so that nobody takes it for more than it is."""
    terminalreporter.section("not run")
    for report in terminalreporter.stats.get("skipped", ()):
        terminalreporter.line(f"{report.nodeid}: {report.longrepr[2].removeprefix('Skipped: ')}")
    for tier, number in sorted(config.stash.get(LEFT_OUT, Counter()).items()):
        terminalreporter.line(f"{number} of the tier {tier}, which `{TIERS[tier]}` runs")
    device = "there is a device here, but no test for it" if torch.cuda.is_available() else "no device here"
    terminalreporter.line(f"CUDA and NCCL: {device}; nothing of them is tested")
    terminalreporter.line("several hosts, macOS: nothing of them is tested")


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
