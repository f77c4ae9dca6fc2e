"""What the programs of simulated ranks are made of."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ithaca.backends.interface import Capabilities
from ithaca.backends.reference import dense_attention
from ithaca.backends.sdpa import SdpaBackend
from ithaca.errors import (
    IthacaError,
)
from ithaca.exchange.peer_memory.simulated import SimulatedPeerMemory
from ithaca.exchange.slots import SlotExchange
from ithaca.geometry import Layout
from ithaca.strategies.ulysses import UlyssesAttention

HEADS, HEAD_DIM = 2, 2


@dataclass(frozen=True)
class SimulatedRank:
    """Where a program runs."""

    rank: int
    ranks: int
    layers: int
    exchange: SlotExchange
    point: Callable[[], None]
    #: What ranks tell one another beside the exchange.
    notes: set[str]
    #: Let the others go on until this is so.
    until: Callable[[Callable[[], bool]], None]

    @property
    def memory(self) -> SimulatedPeerMemory:
        assert isinstance(self.exchange.memory, SimulatedPeerMemory)
        return self.exchange.memory


class Piecewise(SdpaBackend):
    """Attends on slots, one input after another, and lets others go on before each."""

    def __init__(self, point: Callable[[], None], layout: Layout = Layout.HND) -> None:
        super().__init__(layout)
        self.point = point
        self._said = replace(super().capabilities, accepts_unowned_inputs=True)

    @property
    def capabilities(self) -> Capabilities:
        return self._said

    def forward(self, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        read = []
        for tensor in (q, k, v):
            self.point()
            read.append(tensor.clone())
        self.point()
        return super().forward(*read, **options)


@functools.lru_cache(maxsize=256)
def whole(layer: int, q_tokens: int, kv_tokens: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Q, K and V of a layer, and what one rank makes of them."""
    generator = torch.Generator().manual_seed(layer)
    q, k, v = (torch.randn(1, n, HEADS, HEAD_DIM, generator=generator) for n in (q_tokens, kv_tokens, kv_tokens))
    return q, k, v, dense_attention(q, k, v)


def one_layer(
    sim: SimulatedRank,
    attn: UlyssesAttention,
    layer: int,
    q_sizes: Sequence[int],
    kv_sizes: Sequence[int],
    at_once: bool = False,
    **options: Any,
) -> None:
    """One layer, held against one rank."""
    *tensors, expected = whole(layer, sum(q_sizes), sum(kv_sizes))
    sizes = (q_sizes, kv_sizes, kv_sizes)
    q, k, v = (t.split(list(s), 1)[sim.rank].clone() for t, s in zip(tensors, sizes, strict=True))
    out = attn(q, k, v) if at_once else attn.forward_async(lambda: q, lambda: k, lambda: v, **options)
    for source in (q, k, v):
        source.fill_(float("nan"))  # the caller has them back
    mine = expected.split(list(q_sizes), 1)[sim.rank]
    if not torch.allclose(out, mine, atol=1e-5):
        raise IthacaError(f"layer {layer} of rank {sim.rank} differs from one rank by {(out - mine).abs().max()}")


def attention(
    sim: SimulatedRank, borrows: bool = True, layout: Layout = Layout.HND, sanitize: bool = False
) -> UlyssesAttention:
    backend = Piecewise(sim.point, layout) if borrows else _Owning(layout)
    return UlyssesAttention(backend, exchange=sim.exchange, sanitize=sanitize)


class _Owning(SdpaBackend):
    """Does not accept slots."""


def raises(
    error: type[BaseException] | tuple[type[BaseException], ...], call: Callable[[], object], saying: str = ""
) -> None:
    """Require an error that is exactly one of these, with a text in it."""
    try:
        call()
    except BaseException as raised:
        if type(raised) not in (error if isinstance(error, tuple) else (error,)) or saying not in str(raised):
            raise
        return
    raise IthacaError(f"{error} was required to be raised")
