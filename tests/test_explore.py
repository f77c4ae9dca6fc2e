"""Simulated ranks under chosen schedules: nothing is wrong with the exchange, and every planted fault is found."""

from __future__ import annotations

from math import comb
from typing import Any

import pytest
from faulty import FAULTS, FreesOnGrowth, faulty

from ithaca import InvalidInputError
from ithaca.exchange.peer_memory.simulated import SimulatedPeerMemory
from ithaca.verify import explore
from ithaca.verify.exploration import COPIES, Finding
from ithaca.verify.races import RaceDetector
from ithaca.verify.scenarios import SCENARIOS
from ithaca.verify.schedule import AgentScheduler, BoundedScheduler

pytestmark = pytest.mark.fast


@pytest.mark.parametrize("copies", COPIES)
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_nothing_is_wrong_in_random_schedules(ranks: int, copies: str) -> None:
    steps = accesses = 0
    for scenario in SCENARIOS:
        report = explore(scenario, ranks=ranks, copies=copies, schedules=4, seed=1000 * ranks)
        assert report.schedules == 4 and not report.findings, report.findings[0]
        steps, accesses = steps + report.steps, accesses + report.accesses
    assert steps > 10_000 and accesses > 2_000


@pytest.mark.parametrize(
    ("scenario", "layers", "copies", "preemptions"),
    [("self", 1, "inline", 1), ("outer", 2, "inline", 1), ("outer", 1, "agent", 0), ("destroyed", 1, "inline", 1)],
)
def test_nothing_is_wrong_in_any_schedule_of_few_preemptions(
    scenario: str, layers: int, copies: str, preemptions: int
) -> None:
    report = explore(scenario, layers=layers, copies=copies, preemptions=preemptions, schedules=20_000)
    assert report.exhausted and not report.findings, report
    assert report.schedules > 100


@pytest.mark.parametrize("memory", [SimulatedPeerMemory, FreesOnGrowth])
def test_processes_share_the_schedules_and_report_the_same(memory: type[SimulatedPeerMemory]) -> None:
    options: dict[str, Any] = {"copies": "agent", "schedules": 15, "seed": 3, "memory": memory}
    alone = explore("outer", **options)
    assert explore("outer", **options, processes=2) == alone
    assert alone.schedules == 15 and bool(alone.findings) == (memory is FreesOnGrowth)


@pytest.mark.parametrize("trips", [1, 2, 3])
def test_exhaustive_means_every_schedule_once(trips: int) -> None:
    traces, path = [], ()
    while path is not None:
        scheduler = BoundedScheduler(path, preemptions=100)
        agents, trace = AgentScheduler(scheduler), []

        def go(name: str, agents: AgentScheduler = agents, trace: list[str] = trace) -> None:
            for _ in range(trips):
                agents.point()
                trace.append(name)

        for name in "ab":
            agents.add(name, lambda name=name, go=go: go(name))
        agents.run()
        traces.append("".join(trace))
        path = scheduler.next_path
    # Each agent has trips + 1 parts between its start, its points and its end; the last of a run needs no decision.
    assert len(set(traces)) == comb(2 * trips, trips)
    assert len(traces) == comb(2 * trips + 2, trips + 1)


def found(**options: Any) -> Finding:
    """The first finding of any scenario."""
    for schedules in (1, 20):
        for scenario in SCENARIOS:
            for copies in COPIES:
                report = explore(scenario, copies=copies, schedules=schedules, stop_at_first=True, **options)
                if report.findings:
                    return report.findings[0]
    raise AssertionError("no scenario finds anything")


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found_and_found_again(fault: str) -> None:
    exchange = faulty(fault)
    finding = found(exchange=exchange)
    copies = [c for c in COPIES if _again(finding, c, exchange) == [finding]]
    assert copies, f"{finding} is not found again from its schedule's id"


def _again(finding: Finding, copies: str, exchange: Any) -> list[Finding]:
    return explore(finding.scenario, copies=copies, schedule=finding.schedule, exchange=exchange).findings


def test_growth_that_frees_what_is_leased_is_found() -> None:
    assert found(memory=FreesOnGrowth).scenario == "outer"
    report = explore("outer", copies="agent", memory=FreesOnGrowth, schedules=50)
    assert any("SlotRaceError" in finding.error for finding in report.findings)


def test_a_race_is_one_though_the_data_came_out_right(monkeypatch: pytest.MonkeyPatch) -> None:
    options: dict[str, Any] = {"layers": 1, "schedules": 30, "exchange": faulty("signal before the write")}
    races = explore("self", **options).findings
    assert len(races) == 30
    for race in races:
        for part in (
            "SlotRaceError: nothing orders a ",
            "read by rank ",
            "write by rank ",
            "slots.py",
            "simulated_rank.py",
        ):
            assert part in race.error, race.error
        assert "the slot of lane " in race.error and f"(schedule {race.schedule})" in race.error
    monkeypatch.setattr(RaceDetector, "_access", lambda *args: None)
    wrong = explore("self", **options).findings  # what looking at the data finds
    assert 0 < len(wrong) < 25


def test_a_deadlock_says_who_waits_for_whom() -> None:
    (finding,) = explore("self", schedules=1, exchange=faulty("no credit")).findings
    for part in ("DeadlockError", "rank 0 waits for a credit of lane v in call 2 from rank(s) [0, 1]", "seed-0"):
        assert part in finding.error, finding.error


@pytest.mark.parametrize(
    "wrong",
    [
        {"scenario": "nope"},
        {"copies": "nowhere"},
        {"ranks": 5},
        {"layers": 0},
        {"schedule": "x"},
        {"schedule": "seed-x"},
    ],
)
def test_what_cannot_be_explored(wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidInputError, match="required"):
        explore(**wrong)
