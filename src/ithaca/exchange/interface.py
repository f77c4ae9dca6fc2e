"""The exchange of one process group: calls, their lanes, and the lease of what has arrived.

    with exchange.call(("v", "q", "k"), layout) as call:
        call.push(v=v)                   # each leaves at once
        call.push(q=q, k=k)              # several lanes may share one agreement
        with call.wait() as inputs:      # a lease of all lanes
            out = attend(inputs["q"], inputs["k"], inputs["v"])
        call.push_out(out, layout)       # after release: peers may write the slots again
        with call.wait_out() as home:
            result = home["out"].clone()

An error inside the block is told to the other ranks in place of the next header, so that all leave the call
together and the exchange stays usable; an error that nobody can agree on any more closes it on all ranks.
"""

from __future__ import annotations

import contextlib
import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import replace
from types import TracebackType
from typing import TypeVar

import torch
from torch import Tensor

from ithaca.errors import (
    ExchangeClosedError,
    GrowthError,
    InvalidInputError,
    IthacaError,
    PeerRefusedError,
    PlanMismatchError,
    RetainedInputError,
    UnsupportedError,
)
from ithaca.exchange.agreement import DTYPES, LARGEST_DIM, LARGEST_NBYTES, Claim, Header, clipped
from ithaca.exchange.counters import Counters
from ithaca.exchange.lease import Lease
from ithaca.exchange.plain import plain
from ithaca.exchange.plan_builder import PlanBuilder
from ithaca.exchange.refusal import Refusal, known, told
from ithaca.exchange.sanitizer import watch_sources
from ithaca.geometry import Layout, Span, Splits, Text
from ithaca.heads import Heads
from ithaca.plan import OUT, CallPlan, Lane, as_nhd

#: Errors that every rank of the group raises alike, at the same step: after them the exchange goes on.
AGREED = (PlanMismatchError, PeerRefusedError, GrowthError)

T = TypeVar("T")


class Exchange(ABC):
    """The exchange of one process group, shared by all attention layers that use the group."""

    #: "slots" or "collective".
    kind: str

    def __init__(self, rank: int, world_size: int, timeout: float) -> None:
        self.rank, self.world_size, self.timeout = rank, world_size, timeout
        #: Why this exchange serves the group, in words.
        self.reason = ""
        self.counters = Counters()
        self._number = 0
        self._current: Call | None = None
        #: Why, if it has ended. Not the error itself, whose frames hold the caller's tensors.
        self._ended: str | None = None
        #: Whether all has been given back. An interrupt may come between the two: then `destroy` finishes the work.
        self._given_back = False
        self._entering = threading.Lock()
        self._process = os.getpid()

    def call(
        self,
        order: tuple[str, ...],
        layout: Layout,
        *,
        gathered: bool = False,
        terms: str = "",
        sanitize: bool = False,
        head_splits: Splits | None = None,
        text: Text = Text(),  # noqa: B008
        wanted: Mapping[str, tuple[Span, ...]] | None = None,
    ) -> Call:
        """Begin a call that will push the lanes of ``order``, received in ``layout``; use it as a ``with`` block.

        ``gathered``: there is no way home, and every rank receives all tokens of all heads, or of those that ``wanted``
        gives it of a lane; several ranks may want one, and one may be wanted by none. ``terms`` is
        text that must be equal on all ranks. ``head_splits``: the query heads of each rank, see `Heads`.
        ``text``: what every rank holds of each lane beside its own tokens.
        ``sanitize``: slots are poisoned when their leases end, and sources that were written too early are found.
        Refused while another call of the group is under way.
        """
        header = Header(call=-1, step=0, order=order, gathered=gathered, terms=clipped(terms), text=text)
        builder = PlanBuilder(layout, Heads(self.world_size, head_splits), (wanted or {}) if gathered else None)
        call = self._new_call(header, builder)
        call.sanitize = sanitize
        return call

    def _enter(self, call: Call) -> int:
        """Make ``call`` the one under way, and give its number, which is equal on all ranks."""
        with self._entering:
            if self._current is not None:
                raise InvalidInputError(
                    f"rank {self.rank}: one call at a time was required of a group; this one began inside another "
                    f"(a closure of it, or a second thread)"
                )
            if self._ended is not None:
                raise ExchangeClosedError(
                    f"rank {self.rank}: the exchange was closed by an earlier error: {self._ended}"
                )
            if os.getpid() != self._process:
                raise ExchangeClosedError(
                    f"rank {self.rank}: this process was forked from the one that this exchange belongs to"
                )
            self._current = call
            self._number += 1
        self.counters.calls += 1
        return self._number

    @abstractmethod
    def _new_call(self, header: Header, builder: PlanBuilder) -> Call: ...

    @abstractmethod
    def _trim(self) -> None:
        """Drop all receive memory. Every rank does."""

    @abstractmethod
    def _shut(self, error: BaseException | None) -> None:
        """End all that runs and give everything back; tell the peers ``error``, if any, where that can be done."""

    def check(self, role: str, tensor: Tensor) -> None:
        """Raise unless this exchange can carry ``tensor`` as a lane."""
        plain(tensor, f"rank {self.rank}: lane {role}")
        if tensor.dim() != 4 or max(tensor.shape) > LARGEST_DIM:
            raise InvalidInputError(
                f"rank {self.rank}: lane {role} was required to be [B, S_local, H, D], none above {LARGEST_DIM}; "
                f"received {list(tensor.shape)}"
            )
        if tensor.dtype not in DTYPES:
            raise UnsupportedError(
                f"rank {self.rank}: lane {role} was required to be of one of "
                f"{', '.join(str(d).removeprefix('torch.') for d in DTYPES)}; received {tensor.dtype}"
            )
        if tensor.nbytes > LARGEST_NBYTES:
            raise InvalidInputError(
                f"rank {self.rank}: lane {role} was required to have at most {LARGEST_NBYTES} bytes; "
                f"received {list(tensor.shape)} {tensor.dtype}"
            )

    def refuse(self, reason: str) -> None:
        """Enter the call that the peers are in, or will enter next, only to tell them why this rank won't take part.

        Blocks until they are there. They raise `PeerRefusedError`; then the exchange goes on.
        """
        with contextlib.suppress(Refusal), self.call((), Layout.NHD):
            raise Refusal(reason)

    def trim(self) -> None:
        """Give the memory in which lanes arrive back to the machine; the next call makes what it needs.

        Collective over the group, between two calls. What a lease still lends goes with the last tensor over it.
        """
        with self.call((), Layout.NHD, gathered=True, terms="trim") as call:
            call.push()
            call.wait().release()
            self._trim()

    def destroy(self) -> None:
        """Give everything back. A peer that still expects something of this rank gets an error; others do not."""
        if not self._given_back and os.getpid() == self._process:  # a forked child must not end its parent's
            self._ended = self._ended or f"rank {self.rank} called destroy()"
            self._shut(None)
            self._given_back = True

    def _close(self, error: BaseException) -> None:
        if self._ended is None:
            self._ended = told(error)
            self._shut(error)
            self._given_back = True


class Call(ABC):
    """One call on this rank. See the module for its order of events."""

    def __init__(self, exchange: Exchange, header: Header, builder: PlanBuilder) -> None:
        self._exchange, self._header = exchange, header
        #: What is known of the plan so far.
        self.builder = builder
        self._pushed: list[str] = []
        self._leases: list[Lease] = []
        #: Lanes that all ranks agreed on, in issue order; the output's last.
        self.lanes: list[Lane] = []
        #: Known once all input lanes are.
        self.plan: CallPlan | None = None
        #: Whether the last step at which ranks meet is behind this one: an error from then on is its own affair.
        self._last_step_taken = False
        self._complete = False
        #: What the exchange itself raised in this call: an agreed verdict, or the end of it. The same types may come
        #: out of a closure that uses another group, and mean nothing here.
        self._verdict: BaseException | None = None
        self._fatal: BaseException | None = None
        self.sanitize = False
        self._source_checks: list[Callable[[], None]] = []

    @property
    def number(self) -> int:
        """Which call of the group this is; equal on all ranks."""
        return self._header.call

    # -- what a strategy calls --------------------------------------------------------------------------------------

    def push(self, **tensors: Tensor) -> None:
        """Send ``[B, S_local, H, D]`` tensors on their way, under one agreement; each is borrowed until `wait`."""
        due = self._header.order[len(self._pushed) : len(self._pushed) + len(tensors)]
        if tuple(tensors) != due:
            raise InvalidInputError(
                f"rank {self._exchange.rank}: lanes {due} were due in the order {self._header.order}; "
                f"received {tuple(tensors)}"
            )
        for role, tensor in tensors.items():
            self._exchange.check(role, tensor)
        claims, spans = self.builder.claim(tensors)
        self._pushed.extend(tensors)
        # Detached: the copies may run on another thread, where grad mode is on by default.
        header = self._next_header(claims=claims, wanted=spans)
        sources = {role: tensor.detach() for role, tensor in tensors.items()}
        self._last_step_taken = self._header.gathered and len(self._pushed) == len(self._header.order)
        if self.sanitize:
            self._source_checks.append(watch_sources(sources, self._exchange.rank))
        self._own(lambda: self._push(header, sources))

    def wait(self) -> Lease:
        """Block until all lanes of the call have arrived from all ranks; the sources are free again."""
        lease = self._leased(self._own(self._wait))
        while self._source_checks:
            self._source_checks.pop()()
        if self._header.gathered:
            self._complete = True
        else:
            self.plan = self.builder.build(self.lanes)
        return lease

    def push_out(self, out: Tensor, layout: Layout) -> None:
        """Send this rank's heads home: all tokens of the queries, in ``layout``; borrowed until `wait_out`."""
        if self.plan is None:
            raise InvalidInputError(
                f"rank {self._exchange.rank}: the inputs were required to be waited for before the output is pushed"
            )
        rank, lanes, queries = self._exchange.rank, self.plan.out, self.plan.queries
        required = queries.wants[rank].shape(layout, queries.batch, lanes[0].head_dim)
        if tuple(out.shape) != required or out.dtype != lanes[0].dtype:
            raise InvalidInputError(
                f"rank {rank}: the backend was required to return {list(required)} {lanes[0].dtype}; "
                f"received {list(out.shape)} {out.dtype}"
            )
        self._exchange.check(OUT, out)
        header, source = self._next_header(digest=self.plan.digest), as_nhd(out.detach(), layout)
        self._last_step_taken = True
        parts = {lane: source[:, lane.holds[rank].tokens.slice] for lane in lanes}
        self._own(lambda: self._push_out(header, parts))

    def wait_out(self) -> Lease:
        """Block until this rank's queries are home: ``lease["out"]``, and ``lease["out.text"]`` if there is text."""
        lease = self._leased(self._own(self._wait_out))
        self._complete = True
        return lease

    # -- what an exchange implements ---------------------------------------------------------------------------------

    @abstractmethod
    def _push(self, header: Header, tensors: dict[str, Tensor]) -> None: ...

    @abstractmethod
    def _wait(self) -> Lease: ...

    @abstractmethod
    def _push_out(self, header: Header, parts: dict[Lane, Tensor]) -> None: ...

    @abstractmethod
    def _wait_out(self) -> Lease: ...

    @abstractmethod
    def _refuse(self, reason: str) -> None:
        """Finish what was pushed, then take part in the next step with a refusal. Raises the verdict."""

    @abstractmethod
    def _poison(self, roles: frozenset[str]) -> None:
        """Poison this rank's slots of ``roles``."""

    @abstractmethod
    def _drain(self) -> None:
        """Take what has arrived of agreed lanes and was not leased, and give its slots back."""

    # -- the end of a call -------------------------------------------------------------------------------------------

    def __enter__(self) -> Call:
        self._header = replace(self._header, call=self._exchange._enter(self))
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        exchange = self._exchange
        try:
            if error is None and self._complete:
                for lease in self._leases:
                    self._release(lease)
            elif error is None:
                early = InvalidInputError(f"rank {exchange.rank}: a call was required to be gone through to its end")
                self._leave(early)
                raise early
            else:
                self._leave(error)
        finally:
            for lease in self._leases:
                lease.abandon()
                exchange.counters.leases_collected += lease.collected
            exchange._current = None

    def _own(self, step: Callable[[], T]) -> T:
        """Run a step of the exchange itself, and keep what it raises apart from what the caller's code raises.

        Outside of inference mode, whatever the caller is in: buffers and views that stay must be writable in the next
        call, which may be in another mode.
        """
        try:
            with torch.inference_mode(False), torch.no_grad():
                return step()
        except AGREED as verdict:
            self._verdict = verdict
            raise
        except IthacaError as error:
            self._fatal = error
            raise
        except Exception as error:
            # A copy that fails in the middle: what the peers have received by now is unknown.
            self._fatal = ExchangeClosedError(
                f"rank {self._exchange.rank} could not go on with the exchange: {told(error)}"
            )
            raise self._fatal from error

    def _release(self, lease: Lease) -> None:
        try:
            lease.release()
        except RetainedInputError as kept:
            self._exchange._close(kept)
            known(kept)
            raise

    def _leave(self, error: BaseException) -> None:
        """Bring all ranks out of a call that failed here, or close the exchange where that can't be done."""
        exchange = self._exchange
        if exchange._ended is not None:
            return
        kept = any(lease.retained for lease in self._leases)
        if error is self._fatal or kept or not isinstance(error, Exception):
            exchange._close(error)
            known(error)
            return
        try:
            with torch.inference_mode(False), torch.no_grad():
                self._go_on_without(error)
        except BaseException as fatal:  # peers that do not come to it: nothing to agree on any more
            exchange._close(fatal)
            if not isinstance(fatal, Exception):
                raise

    def _go_on_without(self, error: BaseException) -> None:
        for lease in self._leases:
            lease.abandon()
        if error is self._verdict:
            known(error)
        elif not self._last_step_taken:
            with contextlib.suppress(*AGREED):  # the verdict: this rank has the error that it came with
                self._refuse(str(error) if isinstance(error, Refusal) else told(error))
            known(error)
        self._drain()

    def _leased(self, lease: Lease) -> Lease:
        self._leases.append(lease)
        if self.sanitize:
            lease.before_give_back = lambda: self._poison_of(lease)
        return lease

    def _poison_of(self, lease: Lease) -> None:
        if self._exchange._ended is None:  # else there is no slot any more
            self._poison(lease.unowned)

    def _next_header(
        self,
        claims: tuple[Claim, ...] = (),
        wanted: tuple[tuple[Span, ...], ...] = (),
        digest: bytes = bytes(16),
    ) -> Header:
        header = replace(self._header, claims=claims, wanted=wanted, digest=digest)
        self._header = replace(self._header, step=self._header.step + 1)
        return header
