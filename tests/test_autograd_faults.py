"""Gradients that only some lanes or ranks require, of what is gathered; and what goes wrong on the way back."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from cases import mine, qkv
from conftest import Run
from gradients import close, seeded, summed
from torch import Tensor

from ithaca import IthacaError, SdpaBackend, UlyssesAttention, exchange_for
from ithaca.backends.reference import dense_attention
from ithaca.sharding import gather

pytestmark = pytest.mark.full

EXCHANGES = ["slots", "collective"]
SIZES = (3, 5)


class Opaque(SdpaBackend):
    """Has no backward."""

    def forward(self, *args: Tensor, **options: Any) -> Tensor:
        return super().forward(*(t.detach() for t in args), **options)


class BreaksInBackward(SdpaBackend):
    def __init__(self, here: bool) -> None:
        super().__init__()
        self.here = here

    def forward(self, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        if self.here and q.requires_grad:
            q.register_hook(lambda grad: 1 / 0)
        return super().forward(q, k, v, **options)


def told(rank: int, exchange: str, how: str) -> str:
    """What goes wrong on one rank or on all, what each is told; the next training step is right."""
    attn = UlyssesAttention(SdpaBackend(), exchange=exchange)
    q, k, v = (mine(t, SIZES, rank).clone().requires_grad_() for t in qkv(8, 8, heads=4))
    mask = torch.zeros(1, 8, requires_grad=True)

    def twice(keep: bool) -> None:
        out = attn(q, k, v)
        out.sum().backward(retain_graph=keep)
        first = q.grad
        assert first is not None
        first = first.clone()
        out.sum().backward()
        assert q.grad is not None
        torch.testing.assert_close(q.grad, 2 * first)

    def crossed() -> None:
        one, other = attn(q, k, v), attn(k, q, v)
        for out in (one, other) if rank else (other, one):
            out.sum().backward()

    def again() -> None:
        (grad,) = torch.autograd.grad(attn(q, k, v).square().sum(), q, create_graph=True)
        grad.sum().backward()

    calls: dict[str, Callable[[], object]] = {
        "one rank requires grad": lambda: attn(q if rank else q.detach(), k, v),
        "one rank requires grad of whole keys": lambda: attn(
            q.detach(), *((t if rank else t.detach()) for t in (k[:, :3], v[:, :3])), kv_replicated=True
        ),
        "compressed": lambda: attn(q, k, v, compress="int8"),
        "mask": lambda: attn(q, k, v, mask=mask),
        "no backward": lambda: UlyssesAttention(Opaque(), exchange=exchange)(q, k, v),
        "breaks": lambda: UlyssesAttention(BreaksInBackward(rank == 1), exchange=exchange)(q, k, v).sum().backward(),
        "twice": lambda: twice(True),
        "twice, freed": lambda: twice(False),
        "another order": crossed,
        "double backward": again,
    }
    said = "nothing"
    try:
        calls[how]()
    except (IthacaError, ZeroDivisionError, RuntimeError) as error:
        said = f"{type(error).__name__}: {error}"
    fresh = [t.detach().clone().requires_grad_() for t in (q, k, v)]
    attn(*fresh).sum().backward()
    everything = [t.double().requires_grad_() for t in qkv(8, 8, heads=4)]
    dense_attention(*everything).sum().backward()
    for piece, t in zip(fresh, everything, strict=True):
        close(piece.grad, mine(t.grad, SIZES, rank))
    return said


@pytest.mark.parametrize("exchange", EXCHANGES)
@pytest.mark.parametrize(
    ("how", "says"),
    [
        (
            "one rank requires grad",
            "PlanMismatchError.*rank 1 sent .*q [^,]*, 5, 4, 16. float32 that requires grad into HND",
        ),
        ("one rank requires grad of whole keys", "PlanMismatchError.*out of plan"),
        ("compressed", "UnsupportedError: rank .: v requires grad, and lanes that are sent as bytes"),
        ("mask", "mask was required not to require grad"),
        ("no backward", "Opaque was required to give a result that has a gradient, as k, q, v require one"),
        ("breaks", "ZeroDivisionError|PeerRefusedError.*rank 1 refused: backward of call .* raised ZeroDivisionError"),
        ("twice", "^nothing$"),
        ("twice, freed", "RuntimeError: Trying to backward through the graph a second time"),
        ("another order", "PlanMismatchError.*backward of call"),
        ("double backward", "RuntimeError: trying to differentiate twice a function that was marked"),
    ],
)
def test_what_goes_wrong_is_told_to_all(on_ranks: Run, exchange: str, how: str, says: str) -> None:
    for said in on_ranks(2, told, exchange, how):
        assert re.search(says, said, re.DOTALL), said


def some_only(rank: int, exchange: str, roles: str) -> None:
    """Only what requires a gradient is sent back: as many bytes as it came with, and those of the output."""
    attn = UlyssesAttention(SdpaBackend(), exchange=exchange)
    everything = {
        name: t.double().requires_grad_(name in roles) for name, t in zip("qkv", qkv(8, 8, heads=4), strict=True)
    }
    dense_attention(*everything.values()).sum().backward()
    pieces = {n: mine(t, SIZES, rank).float().detach().requires_grad_(n in roles) for n, t in everything.items()}
    out = attn(*pieces.values())
    before = attn.exchange.counters.bytes_moved
    out.sum().backward()
    moved = torch.tensor(attn.exchange.counters.bytes_moved - before)
    assert int(summed(moved)) == (1 + len(roles)) * 8 * 2 * 16 * 4  # tokens, heads that move, head dim, bytes
    for name, piece in pieces.items():
        if name in roles:
            close(piece.grad, mine(everything[name].grad, SIZES, rank))
        else:
            assert piece.grad is None


@pytest.mark.parametrize("exchange", EXCHANGES)
@pytest.mark.parametrize("roles", ["q", "kv", "qkv"])
def test_only_what_requires_a_gradient_goes_back(on_ranks: Run, exchange: str, roles: str) -> None:
    on_ranks(2, some_only, exchange, roles)


def gathered(rank: int, exchange: str) -> None:
    """Each rank's loss is over all tokens: a gather hands their sum back."""
    ex = exchange_for(want=exchange)
    whole = seeded(2, 8, 3).requires_grad_()
    piece = mine(whole, SIZES, rank).detach().clone().requires_grad_()
    order = torch.randperm(8, generator=torch.Generator().manual_seed(2))
    for places in (None, order):
        piece.grad = None
        out = gather(piece, 1, ex, places)
        weight = seeded(2, 8, 3, seed=rank)
        (out * weight).sum().backward()
        total = sum(seeded(2, 8, 3, seed=r) for r in range(2))
        assert isinstance(total, Tensor)
        close(piece.grad, mine(total if places is None else total[:, places], SIZES, rank))


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_gathering(on_ranks: Run, exchange: str) -> None:
    on_ranks(2, gathered, exchange)
