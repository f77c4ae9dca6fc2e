"""What is wrong with a call in compiled code reaches every rank, though the tracer is who finds it."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from cases import mine, one_rank, qkv
from conftest import Run
from torch import Tensor

from ithaca import IthacaError, SdpaBackend, UlyssesAttention

pytestmark = pytest.mark.full


class Mute:
    def __repr__(self) -> str:
        raise RuntimeError("no text")


BAD: dict[str, dict[str, Any]] = {
    "scale NaN": {"scale": math.nan},
    "scale beyond a float": {"scale": 10**400},
    "scale without text": {"scale": Mute()},
    "compress unknown": {"compress": "int4"},
    "text negative": {"text_tokens": -1},
    "splits huge": {"seq_splits": [10**30, 1]},
    "heads of three ranks": {"head_splits": [1, 1, 2]},
    "no such option": {"scal": 1.0},
    "a gate with a comma": {"gates": {"a,b": torch.ones(1)}},
    "a mask of integers": {"mask": torch.ones(1, 8, dtype=torch.int32)},
    "no such order": {"issue_order": ("q", "k", "k")},
}


def refused(rank: int, exchange: str) -> dict[str, str]:
    attn = UlyssesAttention(SdpaBackend(), exchange=exchange)
    whole = qkv(8, 8, heads=4)
    q, k, v = (mine(t, (3, 5), rank) for t in whole)
    expected = mine(one_rank(*whole), (3, 5), rank)
    said = {}
    for name, options in BAD.items():
        for asynchronous in (False, True):
            if "issue_order" in options and not asynchronous:
                continue

            def call(options: dict[str, Any], at_once: bool = not asynchronous) -> Tensor:
                if at_once:
                    return attn(q, k, v, **options) * 2
                return attn.forward_async(lambda: q * 1, lambda: k * 1, lambda: v * 1, **options) * 2

            torch._dynamo.reset()
            compiled: Callable[..., Tensor] = torch.compile(call, fullgraph=True)
            try:
                compiled(options if rank else {})
                said[f"{name} {asynchronous}"] = "nothing"
            except IthacaError as error:
                said[f"{name} {asynchronous}"] = type(error).__name__
            torch.testing.assert_close(compiled({}), 2 * expected, rtol=0, atol=1e-5)
    return said


@pytest.mark.timeout(240)
@pytest.mark.parametrize("exchange", ["slots", "collective"])
def test_a_wrong_request_in_compiled_code_reaches_every_rank(on_ranks: Run, exchange: str) -> None:
    here, there = on_ranks(2, refused, exchange, timeout=200)
    assert len(here) == 2 * len(BAD) - 1
    assert set(here.values()) == {"PeerRefusedError"}, here
    assert set(there.values()) == {"InvalidInputError"}, there
