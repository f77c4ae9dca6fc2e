"""A set-up that fails is over on all ranks at once, leaves nothing open, and can be tried again."""

from __future__ import annotations

import errno
import gc
import logging
import os
import resource
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cases import mine, one_rank, qkv
from chaos import holdings, more
from conftest import Run

from ithaca import ExchangeUnavailableError, IthacaError, SdpaBackend, UlyssesAttention, exchange_for, run_ranks
from ithaca.exchange import choice
from ithaca.exchange.interface import Exchange
from ithaca.exchange.peer_memory import handshake, host
from ithaca.exchange.rendezvous import Rendezvous

pytestmark = [pytest.mark.full, pytest.mark.alone]

#: So long that who waits for it is found out.
DEADLINE = 20.0


def works(rank: int, ranks: int, exchange: Exchange) -> None:
    sizes = tuple(2 + r for r in range(ranks))
    whole = qkv(sum(sizes), sum(sizes), heads=4)
    group = exchange.group if exchange.kind == "collective" else exchange.test_group  # type: ignore[attr-defined]
    out = UlyssesAttention(SdpaBackend(), group=group, exchange=exchange)(*(mine(t, sizes, rank) for t in whole))
    torch.testing.assert_close(out, mine(one_rank(*whole), sizes, rank), rtol=0, atol=1e-5)


def attempt(group: dist.ProcessGroup, want: str, copy: str = "inline") -> Exchange:
    exchange = exchange_for(group, want, copy=copy)
    exchange.test_group = group  # type: ignore[attr-defined]
    return exchange


def late(rank: int, ranks: int, want: str) -> list[str]:
    """Rank 0 comes when the others have given up for the second time; all try until it works."""
    os.environ["ITHACA_TIMEOUT"] = "1"
    group, errors = dist.new_group(list(range(ranks))), []
    dist.barrier()
    time.sleep(2.5 if rank == 0 else 0)
    for _ in range(10):
        try:
            exchange = attempt(group, want)
            break
        except IthacaError as error:
            errors.append(f"{type(error).__name__}: {error}")
            assert errors[-1].startswith("PeerTimeoutError") and "rank(s) [0]" in errors[-1], errors
    works(rank, ranks, exchange)
    return errors


@pytest.mark.parametrize("want", ["slots", "collective"])
@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_that_missed_each_other_try_again(ranks: int, want: str) -> None:
    first, *others = run_ranks(late, ranks, ranks, want, timeout=60)
    assert len(first) == 1 and "gave up: rank" in first[0]  # the last that failed without it, once and at once
    assert all(len(errors) == 2 for errors in others), others


def failing(where: str, error: BaseException) -> Callable[[], None]:
    """Make a point of the set-up raise ``error``, once. What undoes it."""
    owner: Any
    owner, name = {
        "before its facts": (choice, "host_facts"),
        "after the choice": (choice, "choose"),
        "before its address": (host, "connect_peers"),
        "before it connects": (handshake, "_call"),
        "before it accepts": (handshake._Callers, "are_here"),
        "when a peer is there": (handshake, "_peer"),
        "after the hand-shake": (host.HostPeerMemory, "__init__"),
        "for want of a thread": (threading.Thread, "start"),
        "when it would be ready": (Rendezvous, "conclude"),
    }[where]
    true = getattr(owner, name)

    def fails(*args: Any, **kwargs: Any) -> Any:
        setattr(owner, name, true)
        raise error

    setattr(owner, name, fails)
    return lambda: setattr(owner, name, true)


def fails_once(rank: int, victim: int, where: str) -> list[str]:
    os.environ["ITHACA_TIMEOUT"] = str(DEADLINE)
    group = dist.new_group([0, 1, 2])
    dist.barrier()
    copy, before, started = "thread" if "thread" in where else "inline", holdings(), time.monotonic()
    error = RuntimeError("no thread") if "thread" in where else OSError(errno.EMFILE, "Too many open files")
    undo = failing(where, error) if rank == victim else lambda: None
    with pytest.raises(ExchangeUnavailableError) as raised:
        attempt(group, "slots", copy)
    said, seconds = str(raised.value), time.monotonic() - started
    del raised, error
    undo()
    gc.collect()
    left = more(holdings(), before)
    exchange = attempt(group, "slots", copy)
    works(rank, 3, exchange)
    exchange.destroy()
    dist.barrier()
    dist.destroy_process_group(group)
    assert seconds < DEADLINE / 2 and not left, (seconds, left)
    return [said]


@pytest.mark.parametrize(
    ("where", "victim"),
    [
        ("before its facts", 0),
        ("after the choice", 2),
        ("before its address", 1),
        ("before it connects", 1),
        ("before it accepts", 0),
        ("when a peer is there", 0),
        ("after the hand-shake", 2),
        ("for want of a thread", 1),
        ("when it would be ready", 0),
    ],
)
def test_a_failure_anywhere_is_everybodys_at_once(on_ranks: Run, where: str, victim: int) -> None:
    for rank, (said,) in enumerate(on_ranks(3, fails_once, victim, where)):
        assert f"rank {victim} could not set the exchange up" in said, said
        assert ("no thread" if "thread" in where else "[Errno 24]") in said, said
        assert (rank == victim) == ("gave up" not in said), said


def out_of_descriptors(rank: int) -> int:
    """With 1, 2, 3... descriptors left on rank 1: an error on all, then a retry, until there are enough."""
    os.environ["ITHACA_TIMEOUT"] = str(DEADLINE)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    for spare in range(40):
        group = dist.new_group([0, 1, 2])
        dist.barrier()
        before, started = holdings(), time.monotonic()
        if rank == 1:
            taken = {int(fd) for fd in os.listdir("/proc/self/fd")}
            free = [fd for fd in range(soft) if fd not in taken]
            resource.setrlimit(resource.RLIMIT_NOFILE, (free[spare], hard))
        try:
            said, exchange = "", attempt(group, "auto")
        except IthacaError as error:
            said = str(error)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        gc.collect()
        if said:
            assert "[Errno 24]" in said and time.monotonic() - started < DEADLINE / 2, said
            assert not (left := more(holdings(), before)), (spare, left)
            exchange = attempt(group, "auto")
        assert exchange.kind == "slots"
        works(rank, 3, exchange)
        exchange.destroy()
        dist.destroy_process_group(group)
        if not said:
            return spare
    raise AssertionError("there were never enough descriptors")


def test_out_of_descriptors_in_the_middle_of_set_up() -> None:
    first, second, third = run_ranks(out_of_descriptors, 3)
    assert first == second == third > 5


def refused(rank: int, call: str, number: int) -> tuple[str, str, str]:
    """The kernel refuses a call on rank 1: what `auto` takes, what it says, and what asking for slots gives."""
    group = dist.new_group([0, 1])
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    log = logging.getLogger("ithaca")
    level = log.level
    log.addHandler(handler)
    log.setLevel(logging.DEBUG)
    true = getattr(os, call)

    def refuse(*args: Any) -> int:
        raise OSError(number, os.strerror(number))

    try:
        if rank == 1:
            setattr(os, call, refuse)
        exchange = attempt(group, "auto")
        works(rank, 2, exchange)
        with pytest.raises(ExchangeUnavailableError) as raised:
            attempt(group, "slots")
    finally:
        setattr(os, call, true)
        log.removeHandler(handler)
        log.setLevel(level)
    assert exchange.kind == "collective" and any(exchange.reason in line for line in lines), (exchange.kind, lines)
    exchange.destroy()
    dist.barrier()
    dist.destroy_process_group(group)
    return exchange.kind, exchange.reason, str(raised.value)


@pytest.mark.parametrize(
    ("call", "number"), [("pidfd_open", errno.EPERM), ("memfd_create", errno.ENOSYS), ("eventfd", errno.EINVAL)]
)
def test_auto_does_without_what_is_refused(on_ranks: Run, call: str, number: int) -> None:
    for kind, reason, asked in on_ranks(2, refused, call, number):
        assert kind == "collective" and reason == f"rank 1 runs without {call} ({os.strerror(number)})"
        assert reason in asked


def interrupted(rank: int) -> tuple[str, str]:
    """Ctrl-C on rank 1 when rank 0 is free to go on: what each is told, now and when it tries again."""
    os.environ["ITHACA_TIMEOUT"] = str(DEADLINE)
    group, before, true = dist.new_group([0, 1]), holdings(), choice.weakref.finalize

    def ctrl_c(*args: Any) -> None:
        raise KeyboardInterrupt

    said, one = [], torch.ones(1, 2, 2, 4)
    if rank == 1:
        choice.weakref.finalize = ctrl_c  # type: ignore[misc, assignment]
        with pytest.raises(KeyboardInterrupt):
            attempt(group, "slots", "thread")
        choice.weakref.finalize = true  # type: ignore[misc]
        gc.collect()
        assert not (left := more(holdings(), before)), left
    for _ in range(2):
        with pytest.raises(IthacaError) as raised:
            UlyssesAttention(SdpaBackend(), group=group, exchange=attempt(group, "slots", "thread"))(one, one, one)
        said.append(str(raised.value))
    return said[0], said[1]


def test_a_rank_that_was_left_behind_says_that_a_new_group_is_required() -> None:
    (first, again), retried = run_ranks(interrupted, 2, timeout=DEADLINE / 2)
    assert "its exchange closed" in first and "closed by an earlier error" in again
    assert all("a new process group is required: rank 1 was interrupted" in said for said in retried)
