"""Agents that take turns on one thread, under a scheduler that decides at every point, and can decide the same again.

An agent is a greenlet: it may stop in the middle of any call, and going on with another costs no thread switch. A
schedule is the list of the decisions, and has an id from which it can be replayed.
"""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

from ithaca.errors import DeadlockError, InvalidInputError
from ithaca.extras import require

try:
    from greenlet import GreenletExit, getcurrent, greenlet
except ModuleNotFoundError:
    require("verify", "exploring")
    raise


class Scheduler(ABC):
    """Decides who goes on."""

    @abstractmethod
    def choose(self, options: Sequence[int], current: int | None) -> int:
        """One of ``options`` (agents that can go on). ``current`` is the one that runs, if it is among them."""

    @property
    @abstractmethod
    def schedule(self) -> str:
        """The id of the decisions so far."""


class RandomScheduler(Scheduler):
    """Any of the options with the same chance; the seed is the id."""

    def __init__(self, seed: int) -> None:
        self._seed, self._random = seed, random.Random(seed)

    def choose(self, options: Sequence[int], current: int | None) -> int:
        return options[int(self._random.random() * len(options))]

    @property
    def schedule(self) -> str:
        return f"seed-{self._seed}"


class BoundedScheduler(Scheduler):
    """Follow ``path``, then always go on with who runs; an agent that could go on is interrupted ``preemptions`` times.

    ``path[i]`` is the place of the i-th decision among its options, the current agent's being first. `next_path` is
    the next one in depth-first order, so that following it from ``()`` goes through all schedules within the bound
    (Musuvathi and Qadeer, "Iterative context bounding", 2007).
    """

    def __init__(self, path: tuple[int, ...], preemptions: int) -> None:
        self._path, self._bound, self._used = path, preemptions, 0
        self._taken: list[tuple[int, int]] = []

    def choose(self, options: Sequence[int], current: int | None) -> int:
        if current is not None:
            options = [current, *(o for o in options if o != current)]
            if self._used >= self._bound:
                options = options[:1]
        step = len(self._taken)
        place = self._path[step] if step < len(self._path) else 0
        if place >= len(options):
            raise InvalidInputError(f"the schedule {self.schedule} does not fit: {len(options)} choices at step {step}")
        self._taken.append((place, len(options)))
        self._used += current is not None and place > 0
        return options[place]

    @property
    def schedule(self) -> str:
        places = [place for place, _ in self._taken]
        while places and places[-1] == 0:
            places.pop()
        return f"path-{self._bound}-" + ".".join(map(str, places))

    @property
    def next_path(self) -> tuple[int, ...] | None:
        for step in reversed(range(len(self._taken))):
            place, options = self._taken[step]
            if place + 1 < options:
                return (*(p for p, _ in self._taken[:step]), place + 1)
        return None


def scheduler_of(schedule: str) -> Scheduler:
    """The scheduler that takes the decisions of an id again."""
    kind, _, rest = schedule.partition("-")
    try:
        if kind == "seed":
            return RandomScheduler(int(rest))
        if kind == "path":
            bound, _, path = rest.partition("-")
            return BoundedScheduler(tuple(map(int, path.split("."))) if path else (), int(bound))
    except ValueError:
        pass
    raise InvalidInputError(f"a schedule's id was required, as in 'seed-7' or 'path-2-0.1'; received {schedule!r}")


class Agent:
    """Something that runs by turns. One that ``serves`` others need not end."""

    def __init__(self, number: int, name: str, run: Callable[[], object], serves: bool, hub: greenlet) -> None:
        self.number, self.name, self.serves = number, name, serves
        self.ready: Callable[[], bool] | None = None
        self.why: Callable[[], str] = lambda: ""
        self.error: BaseException | None = None
        self.result: object = None
        self._run = run
        self.greenlet = greenlet(self._go, parent=hub)

    def _go(self) -> None:
        try:
            self.result = self._run()
        except GreenletExit:
            raise
        except BaseException as error:
            self.error = error


class AgentScheduler:
    """The turns of a set of agents."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.agents: list[Agent] = []
        self.steps = 0
        self._over = False
        self._hub = getcurrent()
        self._by_greenlet: dict[greenlet, Agent] = {}

    def add(self, name: str, run: Callable[[], object], *, serves: bool = False) -> Agent:
        agent = Agent(len(self.agents), name, run, serves, self._hub)
        self.agents.append(agent)
        self._by_greenlet[agent.greenlet] = agent
        return agent

    @property
    def current(self) -> Agent | None:
        """The agent that runs; None outside of all."""
        return self._by_greenlet.get(getcurrent())

    def run(self) -> None:
        """Until all have ended that serve no other. `DeadlockError` if they cannot."""
        try:
            while any(not a.greenlet.dead and not a.serves for a in self.agents):
                options = self._options()
                if not options:
                    waiting = "; ".join(a.why() for a in self.agents if not a.greenlet.dead and not a.serves)
                    raise DeadlockError(f"nobody can go on in schedule {self.scheduler.schedule}: {waiting}")
                self.agents[self.scheduler.choose(options, None)].greenlet.switch()
        finally:
            self._over = True
            for agent in self.agents:
                agent.greenlet.throw()

    def point(self) -> None:
        me = self.current
        if me is None or self._over:
            return
        self.steps += 1
        options = self._options()
        if len(options) > 1:
            chosen = self.agents[self.scheduler.choose(options, me.number)]
            if chosen is not me:
                chosen.greenlet.switch()

    def block(self, ready: Callable[[], bool], why: Callable[[], str]) -> None:
        me = self.current
        if self._over or me is None:
            raise GreenletExit
        while not ready():
            me.ready, me.why = ready, why
            options = self._options()
            if options:
                self.agents[self.scheduler.choose(options, None)].greenlet.switch()
            else:
                self._hub.switch()  # to `run`, which says who waits for whom
            if self._over:
                raise GreenletExit
            me.ready = None

    def _options(self) -> list[int]:
        return [a.number for a in self.agents if not a.greenlet.dead and (a.ready is None or a.ready())]
