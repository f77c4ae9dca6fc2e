"""A call spoiled on one, two or all of three ranks, in every way: an error on each, at once, and the next is right."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from bad_calls import FAULTS, Given
from cases import GatedBackend, mine, one_rank, qkv
from conftest import Run
from torch import Tensor

from ithaca import IthacaError, PeerDiedError, PeerTimeoutError, UlyssesAttention

pytestmark = pytest.mark.full

SIZES = (3, 2, 4)
#: In seconds. A rank that waits for nothing but its turn needs milliseconds.
DEADLINE, AT_ONCE = "8", 4.0
WORSE = (PeerTimeoutError.__name__, PeerDiedError.__name__)


def attend(attn: UlyssesAttention, given: Given, form: str) -> Tensor:
    if form == "sync":
        return attn(*(given.lanes[role] for role in "qkv"), gates=given.gates, **given.options)
    closures: list[Callable[[], Any]] = [given.closures.get(role, lambda t=given.lanes[role]: t) for role in "qkv"]
    return attn.forward_async(
        *closures, gates=given.gates, issue_order=given.order, project_out=given.project_out, **given.options
    )


def verdict(attn: UlyssesAttention, given: Given, form: str) -> str:
    """The name of an error of ours, or what should not be."""
    try:
        given.inside(lambda: attend(UlyssesAttention(given.backend, attn.group, attn.exchange), given, form))
    except IthacaError as error:
        return type(error).__name__
    except Exception as error:
        return f"raw {type(error).__name__}"
    return "nothing"


@contextmanager
def group_of_three() -> Iterator[Callable[[], UlyssesAttention]]:
    """Makes attentions of exchanges that nobody else uses, and whose deadline is short."""
    made: list[UlyssesAttention] = []

    def make(exchange: str) -> UlyssesAttention:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("ITHACA_TIMEOUT", DEADLINE)
            made.append(UlyssesAttention(GatedBackend(), dist.new_group([0, 1, 2]), exchange))
            assert made[-1].exchange.timeout == float(DEADLINE)
            return made[-1]

    yield make  # type: ignore[misc]
    for attn in made:
        attn.exchange.destroy()


def spoiled(rank: int, exchange: str, culprits: tuple[int, ...]) -> list[str]:
    """What was not as it must be, on this rank."""
    torch.manual_seed(0)
    whole = (*qkv(9, 9, heads=6, head_dim=8, batch=2), torch.rand(2, 9, 6, 1))
    expected = mine(one_rank(*whole[:3]) * whole[3], SIZES, rank)
    wrong = []

    def given() -> Given:
        lanes = dict(zip(("q", "k", "v", "gate"), (mine(t, SIZES, rank).clone() for t in whole), strict=True))
        return Given(rank, lanes, {"fine": lanes.pop("gate")})

    with group_of_three() as make, torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        attn = make(exchange)  # type: ignore[call-arg]
        for count, (name, fault) in enumerate(FAULTS.items()):
            form = fault.forms[(count + len(culprits)) % len(fault.forms)]
            call = given()
            if rank in culprits:
                fault.spoil(call)
            dist.barrier()  # some take their time to be made
            started = time.monotonic()
            with torch.enable_grad() if "grad" in name else torch.no_grad():
                said = verdict(attn, call, form)
            took = time.monotonic() - started
            fine = said == "nothing" if fault.late and rank not in culprits else said.endswith("Error")
            closed = attn.exchange._ended is not None
            if " " in said or not fine or took > AT_ONCE or said in WORSE or closed:
                wrong.append(f"{name}, {form}: {said} after {took:.1f} s{', closed' if closed else ''}")
            try:
                right = torch.allclose(attend(attn, given(), ("sync", "async")[count % 2]), expected, rtol=0, atol=1e-5)
            except IthacaError as error:
                return [*wrong, f"after {name}, {form}: {type(error).__name__}: {error}"]
            if not right:
                wrong.append(f"the call after {name}")
    return wrong


@pytest.mark.parametrize("culprits", [(1,), (0, 2), (0, 1, 2)], ids=["one", "two", "all"])
@pytest.mark.parametrize("exchange", ["slots", "collective"])
def test_each_is_an_error_on_every_rank_and_the_next_call_is_right(
    on_ranks: Run, exchange: str, culprits: tuple[int, ...]
) -> None:
    assert len(FAULTS) >= 150
    assert on_ranks(3, spoiled, exchange, culprits) == [[], [], []]
