"""Run the real exchange and the real strategy on simulated ranks, through many schedules, and look at everything.

What counts as a finding, in any schedule: a race on a slot, a deadlock, an output that is not what one rank computes,
an error that was not called for, and signals left over at the end.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from ithaca.errors import ExchangeClosedError, InvalidInputError, IthacaError
from ithaca.exchange.copy_stream import CopyStream, Task
from ithaca.exchange.peer_memory.interface import Signal
from ithaca.exchange.peer_memory.simulated import SimulatedMachine, SimulatedPeerMemory, Stamp
from ithaca.exchange.slots import SlotExchange
from ithaca.launch import run_ranks
from ithaca.verify.races import RaceDetector, VectorClocks
from ithaca.verify.scenarios import SCENARIOS, Scenario
from ithaca.verify.schedule import AgentScheduler, BoundedScheduler, RandomScheduler, Scheduler, scheduler_of
from ithaca.verify.simulated_rank import SimulatedRank

COPIES = ("inline", "agent")
#: What an exploration on several processes may take, in seconds: a day.
_LONGEST = 86_400.0


@dataclass(frozen=True)
class Finding:
    """What went wrong in a schedule, which can be run again by its id."""

    scenario: str
    schedule: str
    error: str


@dataclass
class Report:
    """What was explored."""

    schedules: int = 0
    steps: int = 0
    accesses: int = 0
    #: Whether there is no schedule left within the bound.
    exhausted: bool = False
    findings: list[Finding] = field(default_factory=list)


class _AgentStream(CopyStream):
    """The copy thread, as an agent."""

    def __init__(self, machine: SimulatedMachine, memory: SimulatedPeerMemory, agents: AgentScheduler) -> None:
        self._machine, self._memory, self._agents = machine, memory, agents
        self._tasks: deque[tuple[Task, Stamp]] = deque()
        self._done: Stamp | None = None
        self._error: BaseException | None = None
        self._busy = self._closed = False
        agents.add(f"the copies of rank {memory.rank}", self._run, serves=True)

    def submit(self, task: Task) -> None:
        if self._closed:
            raise ExchangeClosedError("a task was submitted to a copy stream that is closed")
        if self._error is None:
            self._tasks.append((task, self._machine.history.send()))
        self._agents.point()

    def flush(self) -> None:
        self._agents.block(lambda: not self._tasks and not self._busy, lambda: f"rank {self._memory.rank} copies")
        if self._done is not None:
            self._machine.history.receive(self._done)
        if self._closed and self._error is None:
            raise ExchangeClosedError("the copy stream was closed while tasks of it were waited for")
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def close(self) -> None:
        """Waits for the task under way, as joining a thread does."""
        self._closed = True
        self._tasks.clear()
        if self._agents.current is not None:  # else the schedule is over
            self._agents.block(lambda: not self._busy, lambda: f"rank {self._memory.rank} ends its copies")

    def _run(self) -> None:
        while True:
            self._agents.block(lambda: bool(self._tasks) or self._closed, lambda: "")
            if self._closed:
                return
            (task, stamp), self._busy = self._tasks.popleft(), True
            self._machine.history.receive(stamp)
            try:
                for wait in task:
                    self._memory.wait(wait, block=True)
            except Exception as error:
                self._error = error
                self._tasks.clear()
            self._done, self._busy = self._machine.history.send(), False


def explore(
    scenario: str = "self",
    *,
    ranks: int = 2,
    layers: int = 3,
    copies: str = "inline",
    schedules: int = 1000,
    seed: int = 0,
    preemptions: int | None = None,
    schedule: str | None = None,
    exchange: type[SlotExchange] = SlotExchange,
    memory: type[SimulatedPeerMemory] = SimulatedPeerMemory,
    stop_at_first: bool = False,
    processes: int = 1,
) -> Report:
    """Run up to ``schedules`` schedules of a scenario (see `ithaca.verify.scenarios`) on simulated ranks.

    They are drawn at random from ``seed`` on; with ``preemptions``, all of those with at most that many are gone
    through instead; with ``schedule``, the one of that id is run again. ``copies`` says where the exchange's copies
    run: "inline", or as an "agent" of their own, as on a thread. ``exchange`` and ``memory`` are the classes under
    test. Random schedules are shared out among ``processes``, each of which needs to import them; the report is the
    same. Raises `InvalidInputError` where there is no such scenario, or no such way to run it.
    """
    if scenario not in SCENARIOS or copies not in COPIES or not 2 <= ranks <= 4 or layers < 1:
        raise InvalidInputError(
            f"a scenario of {', '.join(SCENARIOS)}, copies of {', '.join(COPIES)}, 2 to 4 ranks and a layer at least "
            f"were required; received {scenario!r}, {copies!r}, {ranks} ranks and {layers} layers"
        )
    if processes > 1 and preemptions is None and schedule is None:
        first = [seed + schedules * i // processes for i in range(processes + 1)]
        how: dict[str, Any] = {"ranks": ranks, "layers": layers, "copies": copies, "exchange": exchange}
        share = partial(explore, scenario, **how, memory=memory, stop_at_first=stop_at_first)
        return _sum(run_ranks(_part, processes, share, first, timeout=_LONGEST), stop_at_first)
    report, known = Report(), SCENARIOS[scenario]
    for scheduler in _schedulers(report, schedules, seed, preemptions, schedule):
        error = _run(known, ranks, layers, copies, scheduler, exchange, memory, report)
        report.schedules += 1
        if error:
            report.findings.append(Finding(scenario, scheduler.schedule, error))
            if stop_at_first:
                break
    return report


def _part(process: int, share: Callable[..., Report], first: Sequence[int]) -> Report:
    return share(schedules=first[process + 1] - first[process], seed=first[process])


def _sum(parts: Sequence[Report], stop_at_first: bool) -> Report:
    findings = [finding for part in parts for finding in part.findings]
    return Report(
        sum(part.schedules for part in parts),
        sum(part.steps for part in parts),
        sum(part.accesses for part in parts),
        findings=findings[:1] if stop_at_first else findings,
    )


def _schedulers(
    report: Report, schedules: int, seed: int, preemptions: int | None, schedule: str | None
) -> Iterator[Scheduler]:
    if schedule is not None:
        yield scheduler_of(schedule)
    elif preemptions is None:
        yield from (RandomScheduler(seed + i) for i in range(schedules))
    else:
        path: tuple[int, ...] | None = ()
        for _ in range(schedules):
            assert path is not None
            scheduler = BoundedScheduler(path, preemptions)
            yield scheduler
            path = scheduler.next_path
            if path is None:
                report.exhausted = True
                return


def _run(
    scenario: Scenario,
    ranks: int,
    layers: int,
    copies: str,
    scheduler: Scheduler,
    exchange: type[SlotExchange],
    memory: type[SimulatedPeerMemory],
    report: Report,
) -> str:
    """One schedule; what was found, or ""."""
    agents = AgentScheduler(scheduler)
    clocks = VectorClocks(agents, ranks * (2 if copies == "agent" else 1))
    machine = SimulatedMachine(ranks, agents, clocks, limit=scenario.limit)
    detector = RaceDetector(machine, agents, clocks)
    exchanges: list[SlotExchange] = []
    notes: set[str] = set()
    with torch.no_grad():
        mains = [
            agents.add(f"rank {rank}", _program(scenario, rank, layers, exchanges, notes, agents))
            for rank in range(ranks)
        ]
        for rank in range(ranks):
            own = memory(machine, rank)
            stream = _AgentStream(machine, own, agents) if copies == "agent" else "inline"
            exchanges.append(exchange(own, 60.0, stream))
        try:
            with detector:
                agents.run()
        except IthacaError as error:
            return f"{type(error).__name__}: {error}"
        finally:
            report.steps += agents.steps
            report.accesses += detector.accesses
    if detector.found is not None:
        return f"SlotRaceError: {detector.found}"
    errors = [f"{main.name}: {type(e).__name__}: {e}" for main in mains if (e := main.error) is not None]
    return "; ".join(errors) or _left_over(machine, exchanges)


def _program(
    scenario: Scenario, rank: int, layers: int, exchanges: list[SlotExchange], notes: set[str], agents: AgentScheduler
) -> Callable[[], None]:
    def until(condition: Callable[[], bool]) -> None:
        agents.block(condition, lambda: f"rank {rank} waits for something else")

    return lambda: scenario.program(
        SimulatedRank(rank, len(exchanges), layers, exchanges[rank], agents.point, notes, until)
    )


def _left_over(machine: SimulatedMachine, exchanges: Sequence[SlotExchange]) -> str:
    """What should not be there any more: in an exchange that has ended, and in a group that has not, where each
    arrival was to be taken and each credit to be back."""
    for exchange in exchanges:
        stream: Any = exchange.stream
        if exchange._ended is not None and (not stream._closed or exchange.targets._views):
            return f"left over: rank {exchange.rank} has ended its exchange, and still copies or holds views of slots"
    if machine.closed:
        return ""
    for (signal, role, source, dest), tokens in machine.signals.items():
        if len(tokens) != (signal is Signal.CREDIT):
            return f"left over: {len(tokens)} times {signal.value} of lane {role} from rank {source} for rank {dest}"
    return ""
