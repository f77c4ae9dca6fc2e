"""The schedules that are too many for every day: nothing is wrong in any."""

from __future__ import annotations

import os
import time
from itertools import product

import pytest

from ithaca.verify import explore
from ithaca.verify.exploration import COPIES
from ithaca.verify.scenarios import SCENARIOS

pytestmark = pytest.mark.chaos

CORES = len(os.sched_getaffinity(0))


@pytest.mark.timeout(1800)
def test_ten_thousand_schedules() -> None:
    started = time.monotonic()
    report = explore("self", ranks=2, layers=3, schedules=10_000, seed=1_000_000, processes=CORES)
    print(f"\n{report.schedules} schedules of 2 ranks x 3 layers, {report.steps} steps, {report.accesses} accesses")
    print(f"in {time.monotonic() - started:.0f} s, {len(report.findings)} findings")
    assert report.schedules == 10_000 and not report.findings


@pytest.mark.timeout(3600)
def test_many_schedules_of_everything() -> None:
    schedules = steps = 0
    for scenario, ranks, copies in product(SCENARIOS, (2, 3, 4), COPIES):
        report = explore(scenario, ranks=ranks, copies=copies, schedules=200, seed=2_000_000, processes=CORES)
        schedules, steps = schedules + report.schedules, steps + report.steps
        assert not report.findings, report.findings[0]
    print(f"\n{schedules} schedules of {len(SCENARIOS)} scenarios on 2, 3 and 4 ranks, {steps} steps, 0 findings")


@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("scenario", "layers", "preemptions"), [("self", 1, 2), ("outer", 3, 2), ("destroyed", 1, 2)])
def test_every_schedule_of_two_preemptions(scenario: str, layers: int, preemptions: int) -> None:
    report = explore(scenario, layers=layers, preemptions=preemptions, schedules=200_000)
    print(f"\n{scenario}, {layers} layer(s): all {report.schedules} schedules of up to {preemptions} preemptions")
    assert report.exhausted and not report.findings
