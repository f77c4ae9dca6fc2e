"""As many gates as a call can have, with names as long as they may be, beside a mask in shards."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from cases import GatedBackend, mine, qkv
from conftest import Run

from ithaca import Capabilities, UlyssesAttention
from ithaca.backends.reference import dense_attention

pytestmark = pytest.mark.full

#: Eleven bytes each.
NAMES = ("compression", "fine-graine", "gate of ä!", "block.topk%", "'[({<>})]'\\")
SIZES = (3, 0, 5)


class Gates(GatedBackend):
    @property
    def capabilities(self) -> Capabilities:
        return replace(super().capabilities, gates=frozenset(NAMES))


def gated(rank: int, exchange: str, compiled: bool) -> None:
    attn = UlyssesAttention(Gates(), exchange=exchange)
    generator = torch.Generator().manual_seed(3)
    whole = qkv(8, 8, heads=6, head_dim=8, batch=2)
    gates = {name: torch.rand(2, 8, 6, 1, generator=generator) for name in NAMES}
    seen = torch.rand(2, 8, generator=generator) > 0.3
    expected = dense_attention(*whole, mask=seen[:, None, None])
    for gate in gates.values():
        expected = expected * gate
    q, k, v = (mine(t, SIZES, rank) for t in whole)
    local = {name: mine(gate, SIZES, rank) for name, gate in gates.items()}

    def call(at_once: bool, **options: Any) -> torch.Tensor:
        if at_once:
            return attn(q, k, v, gates=local, **options)
        return attn.forward_async(lambda: q * 1, lambda: k * 1, lambda: v * 1, gates=local, **options)

    fn = torch.compile(call, fullgraph=True) if compiled else call
    for at_once in (True, False):
        for options in ({"mask": seen}, {"mask": mine(seen, SIZES, rank), "mask_sharded": True}):
            torch._dynamo.reset()
            torch.testing.assert_close(fn(at_once, **options), mine(expected, SIZES, rank), rtol=0, atol=1e-5)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("exchange", ["slots", "collective"])
def test_five_gates_of_eleven_bytes_and_a_mask_in_shards(on_ranks: Run, exchange: str, compiled: bool) -> None:
    assert {len(name.encode()) for name in NAMES} == {11}
    on_ranks(3, gated, exchange, compiled, timeout=200)
