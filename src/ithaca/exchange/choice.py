"""Which exchange serves a process group: chosen alike on all ranks, made once, and told in one log line.

The ranks put what they ask for and where they run under one key of the group's store, read what the others put, and
run one pure function over it. So a rank that asks for something else is an error on all ranks, not a hang.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ithaca.errors import ExchangeUnavailableError, InvalidInputError, IthacaError, PlanMismatchError, UnsupportedError
from ithaca.exchange.collective import CollectiveExchange
from ithaca.exchange.copy_stream import COPY_MODES
from ithaca.exchange.interface import Exchange
from ithaca.exchange.mesh import process_group
from ithaca.exchange.peer_memory.host import HostPeerMemory
from ithaca.exchange.peer_memory.probe import NEEDS, lacking
from ithaca.exchange.rendezvous import Rendezvous
from ithaca.exchange.slots import SlotExchange
from ithaca.version import __version__

log = logging.getLogger("ithaca")

EXCHANGES = ("auto", "slots", "collective")
DEFAULT_TIMEOUT = 60.0
#: The longest deadline, in seconds (twelve days): `poll` takes 2**31 milliseconds, gloo's clock 2**63 nanoseconds.
LONGEST_TIMEOUT = 1e6


def deadline_seconds() -> float:
    """How long a rank waits for a peer: ``ITHACA_TIMEOUT`` in seconds, 60 by default, `LONGEST_TIMEOUT` at most."""
    text = os.environ.get("ITHACA_TIMEOUT", "")
    try:
        seconds = float(text or DEFAULT_TIMEOUT)
    except ValueError:
        seconds = -1.0
    if not 0 < seconds < float("inf"):
        raise InvalidInputError(f"ITHACA_TIMEOUT was required to be a number of seconds above zero; received {text!r}")
    return min(seconds, LONGEST_TIMEOUT)


def host_facts() -> dict[str, Any]:
    """Where this process runs, as far as slots care; ``missing`` names what the system lacks or refuses of their needs.

    `OSError` where that can't be told, for want of descriptors or memory.
    """
    facts: dict[str, Any] = {"host": sys.platform, "pid": os.getpid()}

    def place() -> None:
        facts["host"] = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        # Abstract sockets belong to a network namespace, process numbers to a process namespace.
        facts["spaces"] = [os.stat(f"/proc/self/ns/{space}").st_ino for space in ("net", "pid")]
        facts["user"] = os.getuid()

    facts["missing"] = lacking({**NEEDS, "/proc": place})
    return facts


def choose(facts: list[dict[str, Any]]) -> tuple[str, str]:
    """The kind of exchange and the reason, from what the ranks of a group said of themselves."""
    for key in ("version", "want", "copy", "device"):
        if len({f[key] for f in facts}) > 1:
            said = ", ".join(f"rank {rank}: {f[key]!r}" for rank, f in enumerate(facts))
            raise PlanMismatchError(f"all ranks were required to ask for the same {key} of exchange; received {said}")
    if f"{facts[0]['device']}:" not in facts[0]["backend"]:
        raise UnsupportedError(
            f"tensors were required to be where the process group ({facts[0]['backend']}) can carry them; "
            f"received some on {facts[0]['device']}"
        )
    hindrance = _hindrance(facts)
    if hindrance and facts[0]["want"] == "slots":
        raise ExchangeUnavailableError(f"slots were asked for, but {hindrance}")
    if hindrance or facts[0]["want"] == "collective":
        return "collective", hindrance or "asked for"
    return "slots", "all ranks are on one Linux host and the tensors on CPU"


def _hindrance(facts: list[dict[str, Any]]) -> str:
    for rank, f in enumerate(facts):
        if f["device"] != "cpu":
            return f"rank {rank} has its tensors on {f['device']}"
        if f["missing"]:
            return f"rank {rank} runs without {', '.join(f['missing'])}"
        for key, what in (("host", "host"), ("spaces", "network or process namespace"), ("user", "user")):
            if f[key] != facts[0][key]:
                return f"rank {rank} is of another {what} than rank 0"
    return ""


@dataclass
class _GroupState:
    """What this process has made for one process group."""

    chosen: dict[tuple[str, str, str], Exchange] = field(default_factory=dict)
    made: dict[str, Exchange] = field(default_factory=dict)
    #: Counts the attempts to set one up: those that this rank was in, and those that failed before it came.
    attempts: int = 0
    #: Whether this rank left an attempt that the others took for a success.
    left_behind: bool = False


_groups: weakref.WeakKeyDictionary[dist.ProcessGroup, _GroupState] = weakref.WeakKeyDictionary()


def exchange_for(
    group: dist.ProcessGroup | DeviceMesh | None = None,
    want: str = "auto",
    *,
    copy: str = "auto",
    device: torch.device = torch.device("cpu"),  # noqa: B008
) -> Exchange:
    """The exchange of ``group``: the default group if None; a mesh of one dimension will do. Collective the first time,
    then a look-up.

    ``want``: "auto" takes slots where all ranks are on one Linux host with CPU tensors, else the collective; "slots"
    and "collective" force one. ``copy`` says where slots' copies run: "thread", "inline", or "auto", a thread where
    every rank has a core to spare for it.
    """
    if want not in EXCHANGES or copy not in COPY_MODES:
        raise InvalidInputError(
            f"the exchange was required to be one of {EXCHANGES} and its copies one of {COPY_MODES}; "
            f"received {want!r} and {copy!r}"
        )
    pg = process_group(group) or dist.group.WORLD
    if pg is None or dist.get_rank(pg) < 0:
        raise InvalidInputError("an exchange was required to be of a process group that this process is in")
    state = _groups.setdefault(pg, _GroupState())
    asked = (want, copy, device.type)
    if asked not in state.chosen:
        state.chosen[asked] = _make(pg, state, want, copy, device)
    return state.chosen[asked]


def _make(pg: dist.ProcessGroup, state: _GroupState, want: str, copy: str, device: torch.device) -> Exchange:
    with _next_attempt(pg, state) as rendezvous:
        said = {**host_facts(), "want": want, "copy": copy, "device": device.type, "version": __version__}
        said["backend"] = dist.get_backend_config(pg)

        def watch(rank: int, theirs: dict[str, Any]) -> None:
            if not _hindrance([said, theirs]):  # else its process number means nothing here
                rendezvous.watch(rank, theirs["pid"])

        kind, reason = choose(rendezvous.share("choice", said, "the choice of an exchange", watch))
        made = f"{kind} {copy}" if kind == "slots" else f"{kind} {device}"
        if made in state.made:
            rendezvous.conclude()
            return state.made[made]
        exchange: Exchange | None = None
        try:
            if kind == "slots":
                exchange = SlotExchange(HostPeerMemory.connect(rendezvous), rendezvous.timeout, copy)
            else:
                exchange = CollectiveExchange(pg, device, rendezvous.timeout)
            exchange.reason = reason
            rendezvous.conclude()
            state.made[made] = exchange
            weakref.finalize(pg, exchange.destroy)  # runs at the interpreter's exit too
        except BaseException:
            if exchange is not None:
                exchange.destroy()
            raise
    ranks, level = exchange.world_size, logging.INFO if exchange.rank == 0 else logging.DEBUG
    log.log(level, "exchange of %d ranks: %s (%s)", ranks, kind, reason)
    return exchange


@contextlib.contextmanager
def _next_attempt(pg: dist.ProcessGroup, state: _GroupState) -> Iterator[Rendezvous]:
    """The next attempt of the group. One that failed before this rank came is an error here too, once and at once."""
    rank, world_size, timeout = dist.get_rank(pg), dist.get_world_size(pg), deadline_seconds()
    if state.left_behind:
        raise ExchangeUnavailableError(
            f"a new process group is required: rank {rank} was interrupted in a set-up that the other ranks finished"
        )
    try:
        store = pg.get_group_store()
    except RuntimeError as error:
        raise ExchangeUnavailableError(f"a process group with a store was required on rank {rank}: {error}") from error
    missed: IthacaError | None = None
    while True:
        rendezvous = Rendezvous(store, f"ithaca/exchange/{state.attempts}", rank, world_size, timeout)
        if not rendezvous.is_over():
            break
        missed = rendezvous.why() or missed
        state.attempts += 1
    if missed is not None:
        raise missed
    state.attempts += 1
    try:
        with rendezvous:
            yield rendezvous
    finally:
        state.left_behind = rendezvous.left_behind
