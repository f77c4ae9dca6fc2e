"""Ranks that are killed, stopped or delayed at a chosen step or moment; what the others say then, and leave behind."""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import random
import re
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from cases import mine, one_rank, qkv

from ithaca import IthacaError, RankPool, SdpaBackend, UlyssesAttention

DEADLINE = 1.5
#: What can be expected of a peer, as errors say it.
EXPECTED = re.compile(
    r"its header, as this rank's .+ \(call \d+ step \d+"
    r"|its (header|share of lane \w+) of call \d+( step \d+)?"
    r"|(its share|a credit) of lane \w+ in call \d+"
    r"|its (new memory|word on new memory) for lane \w+"
)
#: What a victim does at its step.
FATES = ("kill", "stop", "delay")


@dataclass(frozen=True)
class Outcome:
    """What a survivor has to tell."""

    error: str
    message: str
    #: From the first call after which the victim was gone for sure, to the error.
    seconds: float
    left: str
    steps: int


def layer(rank: int, ranks: int, attn: UlyssesAttention, times: int = 1) -> None:
    """One layer, held against one rank. More ``times`` the tokens make its slots grow."""
    sizes = tuple(times * (2 + r) for r in range(ranks))
    whole = qkv(sum(sizes), sum(sizes), heads=4)
    out = attn.forward_async(*(lambda t=t: mine(t, sizes, rank) for t in whole))
    torch.testing.assert_close(out, mine(one_rank(*whole), sizes, rank), rtol=0, atol=1e-5)


def holdings() -> Counter[str]:
    """What this process holds of the system: descriptors by kind, threads by name, and mappings of slots."""
    held: Counter[str] = Counter()
    for fd in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{fd}")
        except OSError:
            continue
        held[
            "descriptor " + target.split("[")[0].split(":")[0] + target.partition("[")[2][:8].strip("0123456789]")
        ] += 1
    for thread in threading.enumerate():
        held[f"thread {thread.name}"] += 1
    with open("/proc/self/maps") as maps:
        held["mapping of a slot"] += sum("memfd:ithaca" in line for line in maps)
    return held


def at_large() -> Counter[str]:
    """What this process holds, the processes that descend from it, and the shared memory that has a name."""
    held = holdings()
    parents = {}
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError), open(f"/proc/{pid}/stat") as stat:
            parents[pid] = stat.read().rpartition(")")[2].split()[1]
    for pid in parents:
        ancestor: str | None = pid
        while ancestor in parents:
            ancestor = parents[ancestor]
            if ancestor == str(os.getpid()):
                held["process"] += 1
    held["shared memory that nobody maps"] += len(_orphans())
    return held


def _orphans() -> set[str]:
    """Named memory that no living process has: another program of this machine may have some of its own.

    Nor are the semaphores of `multiprocessing` ours, which a program that was killed leaves to its resource tracker.
    """
    names = {name for name in os.listdir("/dev/shm") if not name.startswith("sem.mp-")}
    for pid in filter(str.isdigit, os.listdir("/proc") if names else ()):
        with contextlib.suppress(OSError), open(f"/proc/{pid}/maps") as maps:
            text = maps.read()
            names = {name for name in names if name not in text}
    return names


def more(after: Counter[str], before: Counter[str]) -> str:
    return ", ".join(f"{count} x {what}" for what, count in (after - before).items() if count > 0)


def at_step(attn: UlyssesAttention, exchange: str, step: int, act: Callable[[], None]) -> list[int]:
    """Make ``act`` happen just before the ``step``-th operation of the protocol; the result counts them."""
    count = [0]

    def before(fn: Callable[..., Any]) -> Callable[..., Any]:
        def stepped(*args: Any, **kwargs: Any) -> Any:
            count[0] += 1
            if count[0] == step:
                act()
            return fn(*args, **kwargs)

        return stepped

    if exchange == "slots":
        memory: Any = attn.exchange
        memory = memory.memory
        for name in ("announce", "announcement", "signal", "wait", "slot", "grow", "capacity"):
            setattr(memory, name, before(getattr(memory, name)))
    else:
        ex: Any = attn.exchange
        for name in ("agree", "all_to_all", "complete", "take", "give_back"):
            setattr(ex, name, before(getattr(ex, name)))
        dist.isend, dist.irecv = before(dist.isend), before(dist.irecv)
    return count


def fate(kind: str) -> Callable[[], None]:
    def act() -> None:
        if kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif kind == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        else:
            time.sleep(2 * DEADLINE)

    return act


def endangered(rank: int, ranks: int, exchange: str, victim: int, kind: str, step: int, port: int) -> Outcome:
    """Run layers until something happens. ``step`` 0: somebody else decides the moment; -1: two layers, and no more.

    ``port`` is that of the store through which the ranks tell the parent how far they are.
    """
    os.environ["ITHACA_TIMEOUT"] = str(DEADLINE)
    store = dist.TCPStore("127.0.0.1", port, None, is_master=False)
    dist.barrier()
    before = holdings()
    attn = UlyssesAttention(SdpaBackend(), exchange=exchange)
    layer(rank, ranks, attn)
    count = at_step(attn, exchange, step, fate(kind)) if rank == victim and step else [0]
    store.set(f"ready {rank}", "yes")
    error: Exception | None = None
    started = time.monotonic()
    layers = 2 if step < 0 else 100_000
    try:
        for _ in range(layers):
            started = time.monotonic()
            layer(rank, ranks, attn, times=8)  # the first of them grows
    except IthacaError as caught:
        error = caught
    seconds = time.monotonic() - started
    name, message = type(error).__name__, str(error)
    error = None
    attn.exchange.destroy()
    del attn
    gc.collect()
    left = more(holdings(), before)
    if rank != victim and step >= 0 and ranks > 2:
        survivors = [r for r in range(ranks) if r != victim]
        prefix = dist.PrefixStore("survivors", store)
        dist.destroy_process_group()
        dist.init_process_group(
            "gloo", store=prefix, rank=survivors.index(rank), world_size=len(survivors), timeout=timedelta(seconds=20)
        )
        layer(survivors.index(rank), len(survivors), UlyssesAttention(SdpaBackend(), exchange=exchange))
    store.set(f"done {rank}", "yes")
    return Outcome(name, message, seconds, left, count[0])


def steps(ranks: int, exchange: str) -> int:
    """How many operations two layers take, on the rank that would be the victim; the first one's slots grow."""
    with RankPool(ranks) as pool:
        outcomes = pool.run(endangered, ranks, exchange, ranks - 1, "none", -1, pool._store.port, timeout=60)
    return outcomes[ranks - 1].steps


def judged(outcomes: list[Outcome | str], left: str, victim: int, kind: str, exchange: str) -> str:
    """What is wrong with how a run ended; "" if nothing."""
    wrong = [f"left behind: {left}"] if left else []
    expected = {"kill": ("PeerDiedError",), "stop": ("PeerTimeoutError",), "delay": ("PeerTimeoutError",)}[kind]
    if exchange == "collective":  # its process group may tell of a closed connection first, or of nothing in time
        expected = ("PeerDiedError", "PeerTimeoutError")
    for rank, outcome in enumerate(outcomes):
        if rank == victim and kind != "delay":
            continue
        if isinstance(outcome, str):
            wrong.append(f"rank {rank}: {outcome}")
            continue
        if outcome.left:
            wrong.append(f"rank {rank} left {outcome.left}")
        if rank == victim:
            if outcome.error not in (*expected, "PeerDiedError", "ExchangeClosedError"):
                wrong.append(f"rank {rank}, which was late, got {outcome.error}: {outcome.message}")
            continue
        if outcome.error not in expected:
            wrong.append(f"rank {rank} got {outcome.error}: {outcome.message}")
        named = f"rank {victim}" in outcome.message or str(victim) in outcome.message.partition("rank(s) [")[2]
        if not named or not EXPECTED.search(outcome.message):
            wrong.append(f"rank {rank} does not name rank {victim} and what it owes: {outcome.message}")
        if outcome.seconds > (DEADLINE / 2 if kind == "kill" and exchange == "slots" else 2 * DEADLINE):
            wrong.append(f"rank {rank} took {outcome.seconds:.2f} s")
    return "; ".join(wrong)


def run(
    ranks: int, exchange: str, victim: int, kind: str, step: int, moment: float | None = None
) -> tuple[list[Outcome | str], str]:
    """One run: what each rank has to tell, and what is left behind on this machine.

    With ``moment`` the parent strikes, so many seconds after all are at work, and not the victim itself.
    """
    _start_server()
    before = at_large()
    told = _struck(ranks, exchange, victim, kind, step, moment)
    gc.collect()  # an error and its traceback are a cycle, which holds the pool
    left = more(at_large(), before)
    if left:  # somebody else on this machine may have had named memory for a moment
        time.sleep(1)
        left = more(at_large(), before)
    return told, left


def _struck(ranks: int, exchange: str, victim: int, kind: str, step: int, moment: float | None) -> list[Outcome | str]:
    pool = RankPool(ranks)
    pid, store = pool._processes[victim].pid, pool._store
    assert pid is not None

    def strike() -> None:
        if moment is not None:
            store.wait([f"ready {rank}" for rank in range(ranks)], timedelta(seconds=30))
            time.sleep(moment)
            os.kill(pid, signal.SIGKILL if kind == "kill" else signal.SIGSTOP)
        if kind == "stop":  # until the others have told their outcome
            store.wait([f"done {rank}" for rank in range(ranks) if rank != victim], timedelta(seconds=50))
            os.kill(pid, signal.SIGKILL)

    striker = threading.Thread(target=strike)
    striker.start()
    try:
        outcomes = pool.run_tolerant(endangered, ranks, exchange, victim, kind, step, store.port, timeout=60)
    finally:
        striker.join()
    return [outcome if isinstance(outcome, Outcome) else str(outcome) for outcome in outcomes]


@functools.cache
def _start_server() -> None:
    """The process that ranks are forked from stays."""
    RankPool(1).close()


def doomed(ranks: int, exchange: str, victim: int, kind: str, step: int) -> str:
    """One run with a fate at a step; what is wrong with it."""
    return judged(*run(ranks, exchange, victim, kind, step), victim, kind, exchange)


def at_random(seed: int, exchange: str) -> str:
    """One run in which a rank is killed or stopped at a random moment; what is wrong with it."""
    chance = random.Random(seed)
    ranks, kind = chance.choice((2, 3, 4)), chance.choice(("kill", "kill", "kill", "stop"))
    victim, moment = chance.randrange(ranks), chance.uniform(0, 0.05)
    wrong = judged(*run(ranks, exchange, victim, kind, 0, moment), victim, kind, exchange)
    return f"seed {seed}, {ranks} ranks, {kind} of rank {victim}: {wrong}" if wrong else ""
