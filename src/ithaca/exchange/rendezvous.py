"""One attempt of a group's ranks to set something up together. It ends alike on all of them.

Ranks meet over the store of their group. Each attempt has one *verdict* there, a key that is written once, by whoever
knows first: that it is fine, when every rank has said that it is ready, or what went wrong. Whatever a rank finds
afterwards, the verdict stands. So no rank uses what another has given up, each can count its attempts by itself, and
one that comes late sees which attempts failed without it, and why.
"""

from __future__ import annotations

import io
import json
import os
import select
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from types import TracebackType
from typing import Any

from torch.distributed import PrefixStore, Store

from ithaca import errors
from ithaca.errors import ExchangeUnavailableError, IthacaError, PeerDiedError, PeerTimeoutError
from ithaca.exchange.refusal import known

_FINE = "fine"
_VERDICT = "verdict"
#: Seconds between two looks at the store, at first and at most.
_FIRST_PAUSE, _LONGEST_PAUSE = 0.001, 0.05
#: How much longer a rank listens that waits for all others at the end: one of them may only be waiting for another.
_LISTEN = 0.5

Facts = dict[str, Any]


class Rendezvous:
    """Use as a ``with`` block: whatever leaves it as an error ends the attempt, on every rank.

    ``name`` is the prefix of its keys in the store, equal on all ranks and used for one attempt only. ``timeout``
    bounds each wait in it, in seconds. All methods raise `PeerDiedError` when a rank's process or the store is gone,
    `PeerTimeoutError` past the deadline, and what another rank gave up for, as soon as it has.
    """

    def __init__(self, store: Store, name: str, rank: int, world_size: int, timeout: float) -> None:
        self.rank, self.world_size, self.timeout = rank, world_size, timeout
        #: Whether this rank left with an error when the others were already free to go on.
        self.left_behind = False
        self._store = PrefixStore(name, store)
        self._processes: dict[int, io.FileIO] = {}

    def is_over(self) -> bool:
        """Whether there is a verdict already, so that this rank has come too late for it."""
        return self._verdict() != ""

    def why(self) -> IthacaError | None:
        """What it failed for, if it is over and did."""
        verdict = self._verdict()
        return None if verdict in ("", _FINE) else self._told(verdict)

    def share(
        self, topic: str, mine: Facts, what: str, met: Callable[[int, Facts], None] = lambda rank, facts: None
    ) -> list[Facts]:
        """Every rank's facts under ``topic``; ``met`` is given each rank's as they come, ``what`` names them."""
        return self._share(topic, mine, what, met, self.timeout)

    def _share(
        self, topic: str, mine: Facts, what: str, met: Callable[[int, Facts], None], timeout: float
    ) -> list[Facts]:
        facts = {self.rank: mine}
        missing = set(range(self.world_size)) - {self.rank}

        def arrived() -> bool:
            for rank in sorted(missing):
                with self._asking():
                    said = self._store.get(f"{topic}/{rank}") if self._store.check([f"{topic}/{rank}"]) else None
                if said is not None:
                    facts[rank] = json.loads(said)
                    missing.discard(rank)
                    met(rank, facts[rank])
            return not missing

        with self._asking():
            self._store.set(f"{topic}/{self.rank}", json.dumps(mine))
        self.until(arrived, what, missing, timeout=timeout)
        return [facts[rank] for rank in range(self.world_size)]

    def watch(self, rank: int, pid: int) -> None:
        """From here on the end of ``rank``, process ``pid`` of this host, ends the attempt."""
        if rank not in self._processes:
            try:
                self._processes[rank] = io.FileIO(os.pidfd_open(pid))
            except ProcessLookupError:
                raise PeerDiedError(
                    f"rank {rank} (process gone) left in the set-up; seen from rank {self.rank}"
                ) from None

    def process(self, rank: int) -> io.FileIO:
        """A pidfd of a rank that is watched."""
        return io.FileIO(os.dup(self._processes[rank].fileno()))

    def until(
        self,
        done: Callable[[], bool],
        what: str,
        missing: set[int],
        wakers: Sequence[Any] = (),
        timeout: float | None = None,
    ) -> None:
        """Ask ``done`` again and again, and at once when there is something to read at ``wakers``, until it is true.

        ``what`` is expected of the ranks ``missing``.
        """
        deadline = time.monotonic() + (self.timeout if timeout is None else timeout)
        pause = _FIRST_PAUSE
        while not done():
            verdict = self._verdict()
            if verdict == _FINE:  # all are ready, and so is this: done() sees it now
                continue
            if verdict:
                raise self._told(verdict)
            if dead := self._dead(0.0):
                raise PeerDiedError(
                    f"rank {dead[0]} (process gone) was expected to stay for the set-up; seen from rank {self.rank}, "
                    f"which waited for {what} of rank(s) {sorted(missing)}"
                )
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                raise PeerTimeoutError(
                    f"rank {self.rank} waited {self.timeout:g} s for {what} of rank(s) {sorted(missing)}"
                )
            self._ready([*wakers, *self._processes.values()], min(pause, remaining))
            pause = min(2 * pause, _LONGEST_PAUSE)

    def conclude(self) -> None:
        """Say that this rank is ready; come back when every rank is, which is then settled for all."""
        listen = min(_LISTEN, self.timeout / 10)
        try:
            self._share("ready", {}, "its word that it is ready", lambda rank, facts: None, self.timeout + listen)
        except (PeerTimeoutError, PeerDiedError) as error:
            if self._decide(self._failure(error)) != _FINE:
                raise
        else:
            verdict = self._decide(_FINE)
            if verdict != _FINE:
                raise self._told(verdict)

    def __enter__(self) -> Rendezvous:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            if error is not None:
                self._give_up(error)
        finally:
            for process in self._processes.values():
                process.close()

    def _give_up(self, error: BaseException) -> None:
        """Make ``error`` the verdict if there is none yet, and raise what this rank should raise in its place."""
        mine = error
        if isinstance(error, Exception) and not isinstance(error, IthacaError):
            mine = ExchangeUnavailableError(f"rank {self.rank} could not set the exchange up: {error or repr(error)}")
        verdict = own = self._failure(mine)
        with suppress(PeerDiedError):  # the store is gone: the others see that as well
            verdict = self._decide(own)
        self.left_behind = verdict == _FINE
        known(mine)
        if isinstance(error, PeerDiedError | PeerTimeoutError) and verdict not in (own, _FINE):
            if (told := self._told(verdict)) and str(told) != str(error):
                raise told from error
        elif mine is not error:
            raise mine from error

    # -- the store -------------------------------------------------------------------------------------------------

    @contextmanager
    def _asking(self) -> Iterator[None]:
        """Say of a failure of the store what it means."""
        try:
            yield
        except RuntimeError as error:
            dead = self._dead(0.2)  # a process lets go of its connections a little before it is gone
            gone = f"rank {dead[0]} (process gone) took it along" if dead else "is the process gone that hosts it?"
            raise PeerDiedError(
                f"rank {self.rank} lost the store of the process group in the set-up: {gone} Rank 0 hosts it if the "
                f"group was made by env://. {str(error).splitlines()[0] if str(error) else repr(error)}"
            ) from error

    def _verdict(self) -> str:
        with self._asking():
            return self._store.get(_VERDICT).decode() if self._store.check([_VERDICT]) else ""

    def _decide(self, verdict: str) -> str:
        """Make ``verdict`` the one that stands, unless there is one; the one that does."""
        with self._asking():
            return bytes(self._store.compare_set(_VERDICT, "", verdict)).decode()

    def _failure(self, error: BaseException) -> str:
        return json.dumps({"rank": self.rank, "error": type(error).__name__, "text": str(error)})

    def _told(self, verdict: str) -> IthacaError:
        """The error of a rank that learns of another's."""
        said = json.loads(verdict)
        kind = getattr(errors, said["error"], None)
        if isinstance(kind, type) and issubclass(kind, IthacaError):
            told: IthacaError = kind(f"rank {said['rank']} gave up: {said['text']}")
        else:
            told = ExchangeUnavailableError(f"rank {said['rank']} gave up: {said['error']}: {said['text']}")
        known(told)
        return told

    # -- the processes ---------------------------------------------------------------------------------------------

    def _dead(self, seconds: float) -> list[int]:
        events = self._ready(list(self._processes.values()), seconds)
        return [rank for rank, process in self._processes.items() if process.fileno() in events]

    @staticmethod
    def _ready(files: Sequence[Any], seconds: float) -> set[int]:
        poller = select.poll()
        for file in files:
            poller.register(file, select.POLLIN)
        return {fd for fd, _ in poller.poll(seconds * 1000)}
