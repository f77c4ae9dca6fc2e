"""Every shape that models send: equal to one rank in float64, in every mode, on both exchanges."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from cases import NhdBackend, mine
from conftest import Run
from torch import Tensor

from ithaca import AttentionBackend, Capabilities, IthacaError, SdpaBackend, Splits, UlyssesAttention
from ithaca.backends.reference import dense_attention
from ithaca.heads import Heads

pytestmark = pytest.mark.full

EXCHANGES = ["slots", "collective"]
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-12, torch.bfloat16: 2e-2, torch.float16: 3e-3}


@dataclass(frozen=True)
class Shape:
    """One call. ``mode``: "sync", or the issue order of an async one."""

    q_sizes: tuple[int, ...]
    kv_sizes: tuple[int, ...] = ()
    heads: int = 4
    kv_heads: int = 4
    head_dim: int = 8
    v_dim: int = 8
    batch: int = 2
    dtype: torch.dtype = torch.float32
    mode: str = "sync"
    backend: str = "hnd"
    whole_kv: bool = False
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def keys(self) -> tuple[int, ...]:
        return self.kv_sizes or self.q_sizes


def whole(shape: Shape) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)

    def make(tokens: int, heads: int, dim: int) -> Tensor:
        return torch.randn(shape.batch, tokens, heads, dim, generator=generator).to(shape.dtype)

    return (
        make(sum(shape.q_sizes), shape.heads, shape.head_dim),
        make(sum(shape.keys), shape.kv_heads, shape.head_dim),
        make(sum(shape.keys), shape.kv_heads, shape.v_dim),
    )


def backend(shape: Shape) -> AttentionBackend:
    return {"hnd": SdpaBackend, "nhd": lambda: NhdBackend(True), "copies": NhdBackend}[shape.backend]()


def held(rank: int, shape: Shape) -> list[Tensor]:
    """What a rank has of Q, K and V."""
    q, k, v = whole(shape)
    if shape.whole_kv:
        return [mine(q, shape.q_sizes, rank), k, v]
    return [mine(q, shape.q_sizes, rank), mine(k, shape.keys, rank), mine(v, shape.keys, rank)]


def call(attn: UlyssesAttention, shape: Shape, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    options = {"kv_replicated": True, **shape.options} if shape.whole_kv else shape.options
    if shape.mode == "sync":
        return attn(q, k, v, **options)
    return attn.forward_async(lambda: q, lambda: k, lambda: v, issue_order=tuple(shape.mode), **options)


def needed(rank: int, shape: Shape) -> int:
    """Bytes that a rank must send: its tokens of what the others' heads need, and the outputs of its heads."""
    ranks = len(shape.q_sizes)
    heads = Heads(ranks, None if "head_splits" not in shape.options else Splits(tuple(shape.options["head_splits"])))
    if shape.mode[0] == "q":
        heads = heads.seen(shape.heads, None).seen(None, shape.kv_heads)
    elif shape.mode == "sync" or shape.whole_kv:
        heads = heads.seen(shape.heads, shape.kv_heads)
    else:
        heads = heads.seen(None, shape.kv_heads).seen(shape.heads, None)
    others = [r for r in range(ranks) if r != rank]
    queries = shape.q_sizes[rank] * sum(len(heads.q_spans[r]) for r in others) * shape.head_dim
    keys = shape.head_dim + shape.v_dim
    keys *= 0 if shape.whole_kv else shape.keys[rank] * sum(len(heads.kv_spans[r]) for r in others)
    home = len(heads.q_spans[rank]) * sum(shape.q_sizes[r] for r in others) * shape.v_dim
    return shape.batch * shape.dtype.itemsize * (queries + keys + home)


def compared(rank: int, exchange: str, shapes: list[Shape]) -> None:
    attns: dict[str, UlyssesAttention] = {}
    for shape in shapes:
        attn = attns.setdefault(shape.backend, UlyssesAttention(backend(shape), exchange=exchange))
        before = attn.exchange.counters.bytes_moved
        out = call(attn, shape, *held(rank, shape))
        expected = mine(dense_attention(*(t.double() for t in whole(shape))), shape.q_sizes, rank)
        off = (out.double() - expected).abs().max() if out.numel() else 0.0
        assert out.shape == expected.shape and out.dtype == shape.dtype, shape
        assert off <= TOLERANCE[shape.dtype], (shape, off)
        assert attn.exchange.counters.bytes_moved - before == needed(rank, shape), shape


MODES = ["sync", "vqk", "qkv", "kvq"]
BACKENDS = ["hnd", "nhd", "copies"]


def everywhere(shapes: list[Shape]) -> list[Shape]:
    """Each in every mode, with a backend that reads slots in either layout and one that gets copies."""
    return [
        replace(shape, mode=mode, backend=backend)
        for shape, mode, backend in itertools.product(shapes, MODES, BACKENDS)
    ]


KINDS: dict[str, dict[int, list[Shape]]] = {
    "lengths": {
        2: [Shape((3, 5)), Shape((1, 1)), Shape((0, 4)), Shape((7, 0), (2, 9))],
        3: [Shape((3, 0, 1)), Shape((1, 2, 3), (0, 0, 4))],
        4: [Shape((1, 0, 0, 0)), Shape((2, 1, 2, 2))],
    },
    "heads": {
        2: [Shape((3, 5), heads=3, kv_heads=3), Shape((3, 5), heads=1, kv_heads=1)],
        3: [
            Shape((2, 2, 1), heads=2, kv_heads=2),
            Shape((2, 2, 1), heads=7, kv_heads=7, options={"head_splits": (1, 4, 2)}),
            Shape((2, 2, 1), heads=5, kv_heads=5, options={"head_splits": [0, 5, 0]}),
        ],
    },
    "gqa": {
        2: [
            Shape((3, 5), heads=6, kv_heads=2),
            Shape((3, 5), heads=6, kv_heads=3),
            Shape((3, 5), heads=8, kv_heads=1),
            Shape((3, 5), heads=9, kv_heads=3, options={"head_splits": (2, 7)}),
        ],
        3: [
            Shape((3, 1, 2), heads=12, kv_heads=4),
            Shape((3, 1, 2), heads=8, kv_heads=2),
            Shape((3, 1, 2), heads=20, kv_heads=4, options={"head_splits": (3, 13, 4)}),
            Shape((3, 1, 2), heads=6, kv_heads=2, options={"head_splits": (0, 1, 5)}),
        ],
        4: [Shape((1, 2, 0, 3), heads=4, kv_heads=2), Shape((1, 2, 0, 3), heads=6, kv_heads=1)],
    },
    "cross-attention": {
        2: [Shape((3, 5), (4, 2)), Shape((3, 5), (6,), whole_kv=True), Shape((3, 0), (1,), whole_kv=True)],
        3: [
            Shape((2, 1, 3), (0, 7, 1), heads=6, kv_heads=2),
            Shape((2, 1, 3), (5,), heads=6, kv_heads=2, whole_kv=True),
            Shape((2, 1, 3), (5,), heads=6, kv_heads=2, whole_kv=True, options={"head_splits": (1, 1, 4)}),
        ],
    },
    "values of another head dim": {2: [Shape((3, 5), v_dim=4), Shape((3, 5), (4, 2), v_dim=16, heads=6, kv_heads=2)]},
    "stated lengths": {
        2: [
            Shape((3, 5), options={"seq_splits": (3, 5)}),
            Shape((3, 5), (4, 2), options={"seq_splits": [3, 5], "kv_seq_splits": [4, 2]}),
        ],
    },
}


@pytest.mark.parametrize("exchange", EXCHANGES)
@pytest.mark.parametrize("kind", KINDS)
def test_shapes(on_ranks: Run, exchange: str, kind: str) -> None:
    for ranks, shapes in KINDS[kind].items():
        on_ranks(ranks, compared, exchange, everywhere(shapes))


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_dtypes(on_ranks: Run, exchange: str) -> None:
    shapes = [Shape((3, 5), dtype=dtype, heads=6, kv_heads=2) for dtype in TOLERANCE]
    on_ranks(2, compared, exchange, everywhere(shapes))


class NoSharing(SdpaBackend):
    """Takes no GQA."""

    @property
    def capabilities(self) -> Capabilities:
        return replace(super().capabilities, gqa=False)


def refused(rank: int, exchange: str, how: str) -> str:
    """A call that cannot be, and what is said of it; then one that can."""
    attn = UlyssesAttention(SdpaBackend(), exchange=exchange)
    q, k, v = (mine(t, (3, 5), rank) for t in whole(Shape((3, 5), heads=6, kv_heads=2)))
    text = torch.ones(2, 4 + rank, 2, 8)
    calls: dict[str, Callable[[], Tensor]] = {
        "not cut": lambda: attn(*whole(Shape((3, 5))), seq_splits=(3, 5)),
        "cut elsewhere": lambda: attn(q, k, v, seq_splits=(4, 4)),
        "keys cut elsewhere": lambda: attn(q, k, v, kv_seq_splits=(2, 6)),
        "splits of three": lambda: attn(q, k, v, seq_splits=(3, 5, 0)),
        "stated differently": lambda: attn(q, k, v, seq_splits=(3, 5) if rank else (3, 6)),
        "heads stated differently": lambda: attn(q, k, v, head_splits=(4, 2) if rank else (2, 4)),
        "heads of three": lambda: attn(q, k, v, head_splits=(2, 2, 2)),
        "heads that do not add up": lambda: attn(q, k, v, head_splits=(2, 2)),
        "no multiple": lambda: attn(q[:, :, :5], k, v),
        "no sharing": lambda: UlyssesAttention(NoSharing(), exchange=exchange)(q, k, v),
        "splits that are text": lambda: attn(q, k, v, seq_splits="3-5"),  # type: ignore[arg-type]
        "both": lambda: attn(q, text[:, :4], text[:, :4], kv_replicated=True, kv_seq_splits=(2, 2)),
        "text that differs": lambda: attn(q, text, text, kv_replicated=True),
        "whole here, cut there": lambda: attn(q, k, v, kv_replicated=rank == 1),
    }
    try:
        calls[how]()
    except IthacaError as error:
        said = f"{type(error).__name__}: {error}"
    out = attn(q, k, v)
    assert out.shape == q.shape
    return said


@pytest.mark.parametrize("exchange", EXCHANGES)
@pytest.mark.parametrize(
    ("how", "says"),
    [
        (
            "not cut",
            r"InvalidInputError: rank \d: v? ?.*q was required to have \d tokens.*the whole sequence: was it not",
        ),
        ("cut elsewhere", r"q was required to have 4 tokens, as the splits \(4, 4\) say; received [35]"),
        ("keys cut elsewhere", r"v was required to have \d tokens, as the splits \(2, 6\) say"),
        ("splits of three", r"splits were required to be one length for each of 2 ranks; received \(3, 5, 0\)"),
        ("stated differently", r"seq_splits 3-6.*|received 3|received 5|refused"),
        ("heads stated differently", "PlanMismatchError.*head_splits 2-4.*head_splits 4-2"),
        ("heads of three", r"one number of query heads for each of 2 ranks; received \(2, 2, 2\)"),
        ("heads that do not add up", r"add up to 6 query heads; received \(2, 2\)"),
        ("no multiple", "was required to be"),
        ("no sharing", r"was required to be \[2, \d, 2, 8\]|was required to be \[2, \d, 6, 8\]"),
        ("splits that are text", "seq_splits was required to be one number >= 0 a rank; received '3-5'"),
        ("both", "kv_seq_splits were received for keys that every rank was said to hold whole"),
        ("text that differs", "PlanMismatchError.*out of plan"),
        ("whole here, cut there", "PlanMismatchError.*kv_replicated"),
    ],
)
def test_what_cannot_be_is_refused_on_every_rank(on_ranks: Run, exchange: str, how: str, says: str) -> None:
    for said in on_ranks(2, refused, exchange, how):
        assert re.search(says, said, re.DOTALL), said
