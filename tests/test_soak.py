"""Many layers of many shapes: right throughout, and nothing grows that is not given back."""

from __future__ import annotations

import gc
import os
import threading
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from cases import mine, one_rank, qkv

from ithaca import SdpaBackend, UlyssesAttention, exchange_for, run_ranks
from ithaca.plan import aligned

RANKS = 4
SHAPES = 50
ROLES = ("q", "k", "v", "out")


@dataclass(frozen=True)
class Held:
    """What a rank holds of the machine."""

    resident_mib: float
    descriptors: int
    threads: int
    mapped_mib: float  #: slots, its own and its peers'


def held() -> Held:
    gc.collect()
    with open("/proc/self/status") as status:
        resident = next(int(line.split()[1]) for line in status if line.startswith("VmRSS")) / 1024
    mapped = 0
    with open("/proc/self/maps") as maps:
        for line in maps:
            if "memfd:ithaca" in line:
                start, end = (int(address, 16) for address in line.split()[0].split("-"))
                mapped += end - start
    return Held(resident, len(os.listdir("/proc/self/fd")), threading.active_count(), mapped / 2**20)


def soak(rank: int, copy: str, layers: int, samples: int) -> tuple[list[Held], int, int, Held]:
    """What is held after each of ``samples`` stretches, bytes of slots and the most a call needs, and after `trim`."""
    exchange = exchange_for(want="slots", copy=copy)
    attn = UlyssesAttention(SdpaBackend(), exchange=exchange)
    chance = torch.Generator().manual_seed(5)
    shapes = []
    needed = dict.fromkeys(ROLES, 0)
    for _ in range(SHAPES):
        sizes = torch.randint(0, 12, (RANKS,), generator=chance).tolist()
        sizes[0] += 1
        batch, heads, dim = (int(torch.randint(1, top, (), generator=chance)) for top in (3, 9, 17))
        whole = qkv(sum(sizes), sum(sizes), heads, dim, batch)
        pieces = [mine(t, sizes, rank).contiguous() for t in whole]
        shapes.append((pieces, mine(one_rank(*whole), sizes, rank).contiguous()))
        for role in ROLES:
            tokens, wanted = (
                (sizes[rank], heads) if role == "out" else (sum(sizes), heads // RANKS + (rank < heads % RANKS))
            )
            needed[role] = max(needed[role], aligned(batch * tokens * wanted * dim * 4))
    seen = []
    for layer in range(layers):
        (q, k, v), expected = shapes[layer * 7 % SHAPES]
        out = attn(q, k, v) if layer % 2 else attn.forward_async(lambda q=q: q, lambda k=k: k, lambda v=v: v)
        if not torch.allclose(out, expected, rtol=0, atol=1e-5):
            raise AssertionError(f"layer {layer} is off by {(out - expected).abs().max()}")
        if (layer + 1) % (layers // samples) == 0:
            seen.append(held())
    dist.barrier()
    memory = exchange.memory  # type: ignore[attr-defined]
    slots = sum(memory.capacity(role)[rank] for role in ROLES)
    exchange.trim()
    after = held()
    (q, k, v), expected = shapes[0]
    torch.testing.assert_close(attn(q, k, v), expected, rtol=0, atol=1e-5)
    return seen, slots, sum(needed.values()), after


def judge(copy: str, layers: int, samples: int, timeout: float) -> None:
    for rank, (seen, slots, needed, after) in enumerate(run_ranks(soak, RANKS, copy, layers, samples, timeout=timeout)):
        print(
            f"rank {rank}, copies {copy}, {layers} layers of {SHAPES} shapes: slots {slots} bytes, after trim {after}"
        )
        for sample in seen:
            print(f"  {sample}")
        warm, last = seen[1], seen[-1]
        assert len({(s.descriptors, s.threads, s.mapped_mib) for s in seen[1:]}) == 1, seen
        assert last.resident_mib < warm.resident_mib + 8, seen
        assert slots == needed and after.mapped_mib == 0 < last.mapped_mib


@pytest.mark.full
@pytest.mark.parametrize("copy", ["inline", "thread"])
def test_a_thousand_layers(copy: str) -> None:
    judge(copy, 1_000, 4, timeout=120)


@pytest.mark.soak
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("copy", ["inline", "thread"])
def test_a_hundred_thousand_layers(copy: str) -> None:
    judge(copy, 100_000, 10, timeout=3500)
