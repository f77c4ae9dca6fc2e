"""Gradients through attention across ranks: of what is sharded, equal to one rank's; of what is not, in sum."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cases import GatedBackend, NhdBackend, mine, qkv
from conftest import Run
from gradients import close, seeded, summed
from test_shapes import KINDS, Shape, backend, call, held, whole
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ithaca import AttentionBackend, SdpaBackend, UlyssesAttention
from ithaca.backends.reference import dense_attention

pytestmark = pytest.mark.full

EXCHANGES = ["slots", "collective"]
SIZES = (3, 5)


def all_shapes(rank: int, exchange: str, shapes: list[Shape]) -> None:
    attns: dict[str, UlyssesAttention] = {}
    for shape in shapes:
        attn = attns.setdefault(shape.backend, UlyssesAttention(backend(shape), exchange=exchange))
        everything = [t.double().requires_grad_() for t in whole(shape)]
        wanted = dense_attention(*everything)
        weight = seeded(*wanted.shape)
        (wanted * weight).sum().backward()
        pieces = [t.clone().requires_grad_() for t in held(rank, shape)]
        before = attn.exchange.counters.bytes_moved
        out = call(attn, shape, *pieces)
        forward, before = attn.exchange.counters.bytes_moved - before, attn.exchange.counters.bytes_moved
        (out * mine(weight, shape.q_sizes, rank)).sum().backward()
        moved = torch.tensor([forward, attn.exchange.counters.bytes_moved - before])
        assert summed(moved).unique().numel() == 1, moved  # over all ranks, as many bytes go back as came
        close(pieces[0].grad, mine(everything[0].grad, shape.q_sizes, rank))
        for piece, t in zip(pieces[1:], everything[1:], strict=True):
            assert piece.grad is not None and t.grad is not None
            if shape.whole_kv:
                close(summed(piece.grad), t.grad)
            else:
                close(piece.grad, mine(t.grad, shape.keys, rank))


@pytest.mark.parametrize("exchange", EXCHANGES)
@pytest.mark.parametrize("kind", KINDS)
def test_every_shape(on_ranks: Run, exchange: str, kind: str) -> None:
    for ranks, shapes in KINDS[kind].items():
        shapes = [replace(s, mode=m, backend=b) for s in shapes for m, b in (("sync", "hnd"), ("vqk", "nhd"))]
        on_ranks(ranks, all_shapes, exchange, shapes)


def jointly(rank: int, exchange: str, ranks: int, text: int, first: bool, whole_keys: bool) -> None:
    """Text with gates, keys masked for one sample: each rank holds its part of the text's gradient."""
    attn = UlyssesAttention(GatedBackend(), exchange=exchange)
    sizes = (3, 0, 4)[:ranks]
    tokens, heads, dim = text + sum(sizes), 5, 8
    rest = slice(text, None) if first else slice(0, sum(sizes))
    of_text = slice(0, text) if first else slice(sum(sizes), None)
    everything = {name: seeded(2, tokens, heads, dim, seed=i) for i, name in enumerate(("q", "k", "v", "fine"))}
    weight, seen = seeded(2, tokens, heads, dim), torch.ones(2, tokens, dtype=torch.bool)
    seen[1, of_text.start or 0] = False

    def local(t: Tensor) -> Tensor:
        image = mine(t[:, rest], sizes, rank)
        return torch.cat((t[:, of_text], image) if first else (image, t[:, of_text]), dim=1)

    reference = {name: t.double().requires_grad_() for name, t in everything.items()}
    wanted = dense_attention(*(reference[n] for n in "qkv"), mask=seen[:, None, None]) * reference["fine"]
    (wanted * weight).sum().backward()
    everywhere = ("k", "v") if whole_keys else ()
    pieces = {name: (t if name in everywhere else local(t)).clone().requires_grad_() for name, t in everything.items()}
    out = attn(
        *(pieces[n] for n in "qkv"),
        gates={"fine": pieces["fine"]},
        mask=seen,
        text_tokens=text,
        text_first=first,
        kv_replicated=whole_keys,
    )
    close(out, local(wanted))
    share = torch.ones(tokens, 1, 1)
    share[of_text] = 0.25 if rank == 0 else 0.75 / (ranks - 1)  # each rank's loss has a part of the text's
    (out * local(weight * share)).sum().backward()
    mine_rest, mine_text = (
        (slice(text, None), slice(0, text)) if first else (slice(0, sizes[rank]), slice(sizes[rank], None))
    )
    for name, piece in pieces.items():
        required = reference[name].grad
        assert piece.grad is not None and required is not None
        if name in everywhere:
            close(summed(piece.grad), required)
            continue
        close(piece.grad[:, mine_rest], mine(required[:, rest], sizes, rank))
        close(summed(piece.grad[:, mine_text]), required[:, of_text])


@pytest.mark.parametrize("exchange", EXCHANGES)
@pytest.mark.parametrize("first", [True, False])
def test_text_gates_and_masks(on_ranks: Run, exchange: str, first: bool) -> None:
    for ranks in (2, 3):
        for whole_keys in (False, True):
            on_ranks(ranks, jointly, exchange, ranks, 4, first, whole_keys)


class Block(nn.Module):
    """A layer of a transformer, over this rank's tokens; ``attn`` None is all of it on one rank."""

    def __init__(self, attn: UlyssesAttention | None, heads: int = 3, dim: int = 4) -> None:
        super().__init__()
        self.attn, self.heads = attn, heads
        self.q, self.k, self.v, self.o = (nn.Linear(heads * dim, heads * dim) for _ in range(4))
        for i, p in enumerate(self.parameters()):
            with torch.no_grad():
                p.copy_(0.3 * seeded(*p.shape, seed=i))

    def forward(self, x: Tensor) -> Tensor:
        def project(linear: nn.Linear) -> Tensor:
            return linear(x).unflatten(2, (self.heads, -1))  # type: ignore[no-any-return]

        if self.attn is None:
            return x + self.o(dense_attention(project(self.q), project(self.k), project(self.v)).flatten(2))
        return x + self.attn.forward_async(
            *(lambda linear=linear: project(linear) for linear in (self.q, self.k, self.v)),
            project_out=lambda heads: self.o(heads.flatten(2)),
        )


CHECKPOINTS: dict[str, Callable[[nn.Module, Tensor], Tensor]] = {
    "none": lambda block, x: block(x),
    "non-reentrant": lambda block, x: checkpoint(block, x, use_reentrant=False),
    "reentrant": lambda block, x: checkpoint(block, x, use_reentrant=True),
}


def trained(rank: int, exchange: str, how: str, backend: type[AttentionBackend]) -> None:
    """Two layers, three steps of training; weights' gradients are summed over the group, and so stay alike."""
    run = CHECKPOINTS[how]
    attn = UlyssesAttention(backend(), exchange=exchange)
    whole, target = seeded(2, 8, 12), seeded(2, 8, 12, seed=5)
    x, y = (mine(t.double(), SIZES, rank) for t in (whole, target))
    across, alone = (nn.Sequential(Block(a), Block(a)) for a in (attn, None))
    across.double(), alone.double()
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.001) for model in (across, alone)]
    for _ in range(3):
        here, there = x.clone().requires_grad_(), whole.double().requires_grad_()
        hidden, expected = here, there
        for one, other in zip(across, alone, strict=True):
            hidden, expected = run(one, hidden), other(expected)
        for optimizer in optimizers:
            optimizer.zero_grad()
        (hidden - y).square().sum().backward()
        (expected - target).square().sum().backward()
        close(here.grad, mine(there.grad, SIZES, rank), 1e-9)
        for p, required in zip(across.parameters(), alone.parameters(), strict=True):
            assert p.grad is not None and required.grad is not None
            dist.all_reduce(p.grad)
            close(p.grad, required.grad, 1e-9)
        for optimizer in optimizers:
            optimizer.step()


@pytest.mark.parametrize("exchange", EXCHANGES)
@pytest.mark.parametrize("how", CHECKPOINTS)
@pytest.mark.parametrize("backend", [SdpaBackend, NhdBackend])
def test_training(on_ranks: Run, exchange: str, how: str, backend: type[AttentionBackend]) -> None:
    on_ranks(2, trained, exchange, how, backend)


def only_attention(rank: int, exchange: str) -> None:
    """A checkpointed region that ends with the backend: the recomputation stops at the last tensor that is saved."""
    attn = UlyssesAttention(SdpaBackend(), exchange=exchange)
    everything = [t.double().requires_grad_() for t in qkv(8, 8, heads=3)]
    dense_attention(*everything).sum().backward()
    for times in range(3):
        pieces = [mine(t, SIZES, rank).float().detach().requires_grad_() for t in everything]
        out = checkpoint(attn, *pieces, use_reentrant=False)
        assert out is not None
        for _ in range(times):
            out = out * 1.0
        out.sum().backward()
        for piece, t in zip(pieces, everything, strict=True):
            close(piece.grad, mine(t.grad, SIZES, rank))


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_a_checkpoint_around_attention_alone(on_ranks: Run, exchange: str) -> None:
    on_ranks(2, only_attention, exchange)


def owned(rank: int, exchange: str) -> None:
    """Two calls, then other ones that write all slots again, then backward; and all is freed after it."""
    backend = Remembering()
    attn = UlyssesAttention(backend, exchange=exchange)
    everything = [t.double().requires_grad_() for t in qkv(8, 8, heads=3)]
    dense_attention(*everything).sum().backward()
    pieces = [mine(t, SIZES, rank).float().detach().requires_grad_() for t in everything]
    out = attn(*pieces)
    with torch.no_grad():
        for _ in range(3):
            attn(*(torch.full_like(t, torch.nan) for t in pieces))
    assert backend.seen == [(True, rank_of(rank, 3)), *[(False, rank_of(rank, 3))] * 3]
    out.sum().backward()
    for piece, t in zip(pieces, everything, strict=True):
        close(piece.grad, mine(t.grad, SIZES, rank))
    gc.collect()
    assert not [ref for ref in backend.kept if ref() is not None]  # though `out` is still there


def rank_of(rank: int, heads: int) -> int:
    return heads // 2 + (rank < heads % 2)


class Remembering(SdpaBackend):
    """Notes whether its inputs require grad, how many heads there are, and which tensors they were."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[bool, int]] = []
        self.kept: list[weakref.ref[Any]] = []

    @property
    def capabilities(self) -> Any:
        return replace(super().capabilities, accepts_unowned_inputs=True)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        self.seen.append((q.requires_grad, q.shape[1]))
        self.kept += [weakref.ref(t.untyped_storage()) for t in (q, k, v)] if q.requires_grad else []
        return super().forward(q, k, v, **options)


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_what_is_saved_is_owned_and_freed(on_ranks: Run, exchange: str) -> None:
    on_ranks(2, owned, exchange)
