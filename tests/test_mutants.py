"""Every step of the exchange, broken in every way that an operator knows: found, or known to be no fault."""

from __future__ import annotations

import os
from collections import Counter

import pytest

from ithaca import run_ranks
from ithaca.verify.equivalent import EQUIVALENT, reason
from ithaca.verify.mutants import Mutant, hunted, mutants

#: Schedules that each scenario gets to find a mutant, on two ranks and on three.
SCHEDULES = 12


CORES = len(os.sched_getaffinity(0))


def surviving(process: int, some: list[Mutant]) -> list[str]:
    return [str(mutant) for mutant in some[process::CORES] if hunted(mutant, SCHEDULES) is None]


def judge(some: list[Mutant]) -> None:
    survivors = [each for part in run_ranks(surviving, CORES, some, timeout=7200) for each in part]
    print(f"\n{len(some)} mutants, {len(some) - len(survivors)} killed")
    for why, count in Counter(map(reason, survivors)).items():
        print(f"  {count} survived: {why}")
    assert not [survivor for survivor in survivors if reason(survivor) is None]


@pytest.mark.fast
def test_the_operators_reach_every_step() -> None:
    operators = Counter(mutant.operator for mutant in mutants())
    assert {"drop", "swap with the next", "do early", "do twice", "wrong rank", "one rank less"} <= set(operators)
    functions = {mutant.function for mutant in mutants()}
    assert {"slot_of", "_Targets.of", "_SlotCall._write", "_SlotCall._lease", "_SlotCall._refuse"} <= functions
    assert sum(operators.values()) > 300


@pytest.mark.fast
def test_no_reason_is_out_of_date() -> None:
    names = [str(mutant) for mutant in mutants()]
    stale = [known for group in EQUIVALENT.values() for known in group if not any(n.startswith(known) for n in names)]
    assert not stale


@pytest.mark.full
def test_some_mutants() -> None:
    judge([mutant for i, mutant in enumerate(mutants()) if reason(str(mutant)) is None and i % 20 == 3])


@pytest.mark.chaos
@pytest.mark.timeout(7200)
def test_all_mutants() -> None:
    judge(list(mutants()))
