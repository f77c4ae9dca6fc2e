"""Ranks of one group that are set up differently: an error on every rank, which says who sent what."""

from __future__ import annotations

import os
import time

import pytest
import torch
from cases import GatedBackend, mine, one_rank, qkv

from ithaca import (
    IthacaError,
    Layout,
    PeerTimeoutError,
    PlanMismatchError,
    RankPool,
    SdpaBackend,
    UlyssesAttention,
    run_ranks,
)
from ithaca.exchange import choice

pytestmark = pytest.mark.full

EXCHANGES = ["slots", "collective"]


def differs(rank: int, exchange: str, how: str) -> str:
    """What this rank is told; then the group works."""
    here = rank == 1
    whole = qkv(8, 8, heads=4)
    q, k, v = (mine(t, (3, 5), rank) for t in whole)
    options: dict[str, object] = {}
    attn = UlyssesAttention(SdpaBackend(), exchange=exchange)
    odd = attn
    if how == "version":
        ours, choice.__version__ = choice.__version__, "9.9" if here else choice.__version__
    elif how == "layout":
        odd = UlyssesAttention(SdpaBackend(Layout.NHD if here else Layout.HND), exchange=exchange)
    elif how == "lanes":
        odd = UlyssesAttention(GatedBackend(), exchange=exchange)
        options = {"gates": {"fine": torch.ones_like(q)}} if here else {}
    elif how == "sanitize":
        odd = UlyssesAttention(SdpaBackend(), exchange=exchange, sanitize=here)
    try:
        odd(q, k, v, **options)
    except IthacaError as error:
        said = f"{type(error).__name__}: {error}"
    if how == "version":
        choice.__version__ = ours
    torch.testing.assert_close(attn(q, k, v), mine(one_rank(*whole), (3, 5), rank), rtol=0, atol=1e-5)
    return said


@pytest.mark.parametrize("exchange", EXCHANGES)
@pytest.mark.parametrize(
    ("how", "parts"),
    [
        ("version", ("the same version of exchange", "rank 1: '9.9'")),
        ("layout", ("rank 0 sent v [1, 3, 4, 16] float32 into HND", "rank 1 sent v [1, 5, 4, 16] float32 into NHD")),
        ("lanes", ("order v-q-k,", "order v-gate.fine-q-k,")),
        ("sanitize", ("rank 0 sent", "rank 1 sent")),
    ],
)
def test_ranks_that_differ_are_told(exchange: str, how: str, parts: tuple[str, ...]) -> None:
    for said in run_ranks(differs, 2, exchange, how, timeout=60):
        assert said.startswith(PlanMismatchError.__name__) and all(part in said for part in parts), said


def fewer_layers(rank: int, exchange: str) -> str:
    """Rank 1 has one layer less, and goes on to something else."""
    os.environ["ITHACA_TIMEOUT"] = "2"
    attn = UlyssesAttention(SdpaBackend(), exchange=exchange)
    one = torch.ones(1, 2, 4, 8)
    for _ in range(3 - rank):
        try:
            attn(one, one, one)
        except IthacaError as error:
            return f"{type(error).__name__}: {error}"
    time.sleep(4)
    return ""


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_a_rank_with_fewer_layers_is_found_by_the_deadline(exchange: str) -> None:
    first, _ = RankPool(2).run_tolerant(fewer_layers, exchange, timeout=30)
    assert isinstance(first, str) and first.startswith(PeerTimeoutError.__name__), first
    assert "rank(s) [1]" in first and "its header" in first and "call 3 step 0" in first, first
