"""Gradients through compiled calls: as in eager code, with the backward held by what the graph saves."""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from cases import GatedBackend, mine, qkv
from conftest import Run
from gradients import close, seeded, summed
from test_autograd import EXCHANGES, SIZES, Block
from test_compile import hold_copies_back
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ithaca import SdpaBackend, UlyssesAttention, exchange_for, run_ranks
from ithaca.backends.reference import dense_attention
from ithaca.strategies import registry

pytestmark = [pytest.mark.full, pytest.mark.timeout(300)]

HOW: dict[str, Callable[[nn.Module], Callable[[Tensor], Tensor]]] = {
    "plain": lambda model: torch.compile(model, fullgraph=True),
    "dynamic": lambda model: torch.compile(model, fullgraph=True, dynamic=True),
    "block by block": lambda model: nn.Sequential(*(torch.compile(block, fullgraph=True) for block in model)),  # type: ignore
    "checkpoint": lambda model: torch.compile(lambda x: checkpoint(model, x, use_reentrant=False), fullgraph=True),
    "checkpoint around": lambda model: functools.partial(checkpoint, torch.compile(model), use_reentrant=False),
}


class Sync(Block):
    """Q, K and V leave together."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (linear(x).unflatten(2, (self.heads, -1)) for linear in (self.q, self.k, self.v))
        heads = dense_attention(q, k, v) if self.attn is None else self.attn(q, k, v)
        return x + self.o(heads.flatten(2))


def trained(rank: int, exchange: str, how: str, kind: type[Block], lengths: Sequence[tuple[int, ...]]) -> None:
    torch._dynamo.reset()
    attn = UlyssesAttention(SdpaBackend(), exchange=exchange)
    across, alone = (nn.Sequential(kind(a), kind(a)).double() for a in (attn, None))
    run = HOW[how](across)
    for sizes in lengths:
        whole = seeded(2, sum(sizes), 12).double()
        for model in (across, alone):
            model.zero_grad()
        here, there = mine(whole, sizes, rank).clone().requires_grad_(), whole.requires_grad_()
        weight = seeded(*whole.shape, seed=3)
        hidden = run(here)
        expected = alone(there)
        close(hidden, mine(expected, sizes, rank), 1e-9)
        (hidden * mine(weight, sizes, rank)).sum().backward()
        (expected * weight).sum().backward()
        close(here.grad, mine(there.grad, sizes, rank), 1e-9)
        for p, required in zip(across.parameters(), alone.parameters(), strict=True):
            assert p.grad is not None and required.grad is not None
            close(summed(p.grad), required.grad, 1e-9)
    gc.collect()
    assert not registry._backwards._objects


@pytest.mark.parametrize("exchange", EXCHANGES)
@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("kind", [Block, Sync])
def test_training(on_ranks: Run, exchange: str, how: str, kind: type[Block]) -> None:
    lengths = [SIZES, (4, 2), (1, 6), (5, 3)] if how == "dynamic" else [SIZES]
    on_ranks(2, trained, exchange, how, kind, lengths, timeout=240)


def shapes(rank: int, exchange: str) -> None:
    """Shared heads, text, gates and keys that every rank holds whole; gradients of some only."""
    torch._dynamo.reset()
    attn = UlyssesAttention(GatedBackend(), exchange=exchange)
    q, k, v = qkv(8, 8, heads=6)
    k, v, fine = k[:, :, :2], v[:, :, :2], seeded(1, 8, 6, 16)
    cases: dict[str, tuple[dict[str, Any], dict[str, Tensor], set[str]]] = {
        "gates": ({}, {"fine": fine}, {"q", "k", "v", "fine"}),
        "values alone": ({}, {}, {"v"}),
        "text": ({"text_tokens": 2, "text_first": False}, {}, {"q", "k", "v"}),
        "whole keys": ({"kv_replicated": True}, {}, {"q", "k"}),
    }
    for options, gates, roles in cases.values():
        text, whole_keys = options.get("text_tokens", 0), "kv_replicated" in options

        def local(t: Tensor, role: str, text: int = text, whole_keys: bool = whole_keys) -> Tensor:
            if whole_keys and role in "kv":
                return t
            sizes = (3, 5 - text)
            return torch.cat((mine(t[:, : 8 - text], sizes, rank), t[:, 8 - text :]), dim=1)

        everything = {"q": q, "k": k, "v": v, **gates}
        reference = {n: t.double().requires_grad_(n in roles) for n, t in everything.items()}
        weight = seeded(1, 8, 6, 16, seed=8)
        wanted = dense_attention(*(reference[n] for n in "qkv"))
        wanted = wanted * reference["fine"] if gates else wanted
        (wanted * weight).sum().backward()
        share = torch.ones(8, 1, 1)
        share[8 - text :] = 0.5
        pieces = {n: local(t, n).clone().requires_grad_(n in roles) for n, t in everything.items()}

        for at_once in (True, False):

            def run(pieces: dict[str, Tensor], at_once: bool = at_once, options: dict[str, Any] = options) -> Tensor:
                made = {n: t * 1.0 for n, t in pieces.items()}
                given = {n: made[n] for n in made if n not in "qkv"}
                if at_once:
                    return attn(made["q"], made["k"], made["v"], gates=given, **options)
                return attn.forward_async(*(lambda n=n: made[n] for n in "qkv"), gates=given, **options)

            for piece in pieces.values():
                piece.grad = None
            out = torch.compile(run, fullgraph=True)(pieces)
            close(out, local(wanted, "out"))
            (out * local(weight * share, "out")).sum().backward()
            for name, piece in pieces.items():
                if name not in roles:
                    assert piece.grad is None
                    continue
                grad, required = piece.grad, reference[name].grad
                assert grad is not None and required is not None
                if whole_keys and name in "kv":
                    close(summed(grad), required)
                    continue
                own = grad.shape[1] - text
                close(grad[:, :own], local(required, name)[:, :own])
                close(summed(grad[:, own:]), required[:, 8 - text :])


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_shapes(on_ranks: Run, exchange: str) -> None:
    on_ranks(2, shapes, exchange, timeout=240)


def twice(rank: int, exchange: str) -> None:
    """One tensor for K and V, and a mask that travels as a lane: the tracer sees each of them twice."""
    torch._dynamo.reset()
    attn = UlyssesAttention(SdpaBackend(), exchange=exchange)
    q, k, _ = qkv(8, 8, heads=3)
    mask = seeded(1, 8) > -0.5
    q64, k64 = (t.double().requires_grad_() for t in (q, k))
    dense_attention(q64, k64, k64, mask=mask[:, None, None]).square().sum().backward()
    shard = mask.split(SIZES, dim=1)[rank]
    for at_once in (True, False):

        def run(q: Tensor, k: Tensor, mask: Tensor, at_once: bool = at_once) -> Tensor:
            k = k * 1.0
            if at_once:
                return attn(q, k, k, mask=mask, mask_sharded=True)
            return attn.forward_async(lambda: q * 1.0, lambda: k, lambda: k, mask=mask, mask_sharded=True)

        pieces = [mine(t, SIZES, rank).clone().requires_grad_() for t in (q, k)]
        torch.compile(run, fullgraph=True)(*pieces, shard).square().sum().backward()
        for piece, t in zip(pieces, (q64, k64), strict=True):
            assert t.grad is not None
            close(piece.grad, mine(t.grad, SIZES, rank), 1e-4)


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_a_tensor_may_be_given_twice(on_ranks: Run, exchange: str) -> None:
    on_ranks(2, twice, exchange, timeout=240)


def held_back(rank: int) -> None:
    """Copies that begin only when they are waited for, and a second backward through the same call."""
    attn = UlyssesAttention(SdpaBackend(), exchange=exchange_for(want="slots", copy="thread"))
    layers = nn.Sequential(*(Block(attn) for _ in range(3)))
    x = seeded(2, 6, 12, seed=rank)
    layers(x).square().sum().backward()
    expected = [p.grad for p in layers.parameters()]
    hold_copies_back()
    layers.zero_grad()
    loss = torch.compile(layers, fullgraph=True)(x).square().sum()
    loss.backward(retain_graph=True)
    loss.backward()
    for p, once in zip(layers.parameters(), expected, strict=True):
        assert once is not None
        torch.testing.assert_close(p.grad, 2 * once, rtol=1e-4, atol=1e-4)


def test_sources_live_until_they_were_read_however_late_the_copy_is() -> None:
    run_ranks(held_back, 2)


def accumulated(rank: int) -> None:
    """Forward twice, through graphs of one block each, before the backward of either."""
    attn = UlyssesAttention(SdpaBackend())
    blocks = nn.Sequential(*(Block(attn) for _ in range(2)))
    batches = [seeded(2, 3 + rank, 12, seed=seed) for seed in (1, 2)]
    for x in batches:
        blocks(x).square().sum().backward()
    expected = [p.grad for p in blocks.parameters()]
    blocks.zero_grad()
    torch._dynamo.reset()
    compiled = HOW["block by block"](blocks)
    losses = [compiled(x).square().sum() for x in batches]
    for loss in losses:
        loss.backward()
    for p, required in zip(blocks.parameters(), expected, strict=True):
        torch.testing.assert_close(p.grad, required, rtol=1e-4, atol=1e-4)


def test_several_graphs_and_forwards_ahead_of_their_backward(on_ranks: Run) -> None:
    on_ranks(2, accumulated)


def test_one_rank_needs_no_group() -> None:
    torch._dynamo.reset()
    q, k, v = (t.double().requires_grad_() for t in qkv(7, 6, heads=4))
    attn = UlyssesAttention(SdpaBackend())
    dense_attention(q, k, v).sum().backward()
    pieces = [t.detach().clone().requires_grad_() for t in (q, k, v)]
    torch.compile(lambda q, k, v: attn(q, k, v), fullgraph=True)(*pieces).sum().backward()
    for piece, t in zip(pieces, (q, k, v), strict=True):
        assert t.grad is not None
        close(piece.grad, t.grad)


def test_a_backward_that_is_gone_is_told() -> None:
    call = registry.LocalBackward(layout=SdpaBackend().layout, shapes={})
    kept = registry.handle_of(call)
    assert registry.backward_of(kept) is call
    copy = kept.clone()
    del kept
    with pytest.raises(Exception, match="the very tensor that it was given"):
        registry.backward_of(copy)
