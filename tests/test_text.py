"""Joint attention (MM-DiT): text that every rank holds is attended to once, moves not, and comes back whole to all."""

from __future__ import annotations

import re
from itertools import product
from typing import Any

import pytest
import torch
from cases import GatedBackend, NhdBackend, mine
from conftest import Run
from torch import Tensor

from ithaca import AttentionBackend, IthacaError, SdpaBackend, UlyssesAttention
from ithaca.backends.reference import dense_attention
from ithaca.heads import Heads

pytestmark = pytest.mark.full

EXCHANGES = ["slots", "collective"]
BACKENDS: dict[str, type[AttentionBackend] | Any] = {
    "hnd": SdpaBackend,
    "nhd": lambda: NhdBackend(True),
    "copies": NhdBackend,
}
HEADS, KV_HEADS, DIM, V_DIM = 6, 2, 8, 4


def streams(text: int, image: int, batch: int = 2) -> list[tuple[Tensor, Tensor]]:
    """Text and image of Q, K and V."""
    generator = torch.Generator().manual_seed(9)
    kinds = ((HEADS, DIM), (KV_HEADS, DIM), (KV_HEADS, V_DIM))
    return [tuple(torch.randn(batch, n, h, d, generator=generator) for n in (text, image)) for h, d in kinds]  # type: ignore


def joined(text: Tensor, image: Tensor, first: bool) -> Tensor:
    return torch.cat((text, image) if first else (image, text), dim=1)


def jointly(rank: int, exchange: str, kind: str, first: bool, sizes: tuple[int, ...], text: int, mode: str) -> None:
    attn = UlyssesAttention(BACKENDS[kind](), exchange=exchange)
    parts = streams(text, sum(sizes))
    whole = [joined(t, i, first).double() for t, i in parts]
    lengths = torch.tensor([text, max(0, text - 2)])  # of the text of each sample
    seen = joined(torch.arange(text)[None] < lengths[:, None], torch.ones(2, sum(sizes), dtype=torch.bool), first)
    q, k, v = (joined(t, mine(i, sizes, rank), first) for t, i in parts)
    for mask in (None, seen):
        options: dict[str, Any] = {"text_tokens": text, "text_first": first, "mask": mask}
        before = attn.exchange.counters.bytes_moved
        if mode == "sync":
            heads = Heads(len(sizes)).seen(HEADS, KV_HEADS)
            out = attn(q, k, v, **options)
        else:
            heads = Heads(len(sizes)).seen(None, KV_HEADS).seen(HEADS, None)
            out = attn.forward_async(lambda: q, lambda: k, lambda: v, **options)
        expected = dense_attention(*whole, mask=None if mask is None else mask[:, None, None])
        e_text, e_image = (
            (expected[:, :text], expected[:, text:])
            if first
            else (
                expected[:, expected.shape[1] - text :],
                expected[:, : expected.shape[1] - text],
            )
        )
        required = joined(e_text, mine(e_image, sizes, rank), first)
        assert out.shape == required.shape
        assert not out.numel() or (out - required).abs().max() < 1e-5
        others = [r for r in range(len(sizes)) if r != rank]
        mine_q = len(heads.q_spans[rank])
        sent = sizes[rank] * sum(len(heads.q_spans[r]) * DIM + len(heads.kv_spans[r]) * (DIM + V_DIM) for r in others)
        home = mine_q * V_DIM * (sum(sizes[r] for r in others) + text * len(others))
        assert attn.exchange.counters.bytes_moved - before == 2 * 4 * (sent + home)


@pytest.mark.parametrize("exchange", EXCHANGES)
@pytest.mark.parametrize("kind", BACKENDS)
@pytest.mark.parametrize("first", [True, False])
def test_text_and_image(on_ranks: Run, exchange: str, kind: str, first: bool) -> None:
    for sizes, text in (((3, 5), 4), ((0, 2), 3), ((0, 0), 4), ((2, 3), 0), ((1, 0, 4), 5)):
        for mode in ("sync", "async"):
            on_ranks(len(sizes), jointly, exchange, kind, first, sizes, text, mode)


def gated(rank: int, exchange: str) -> None:
    """Gates have rows for the text too."""
    attn = UlyssesAttention(GatedBackend(), exchange=exchange)
    parts = streams(3, 8)
    gate = torch.rand(2, 11, HEADS, V_DIM, generator=torch.Generator().manual_seed(4))
    q, k, v = (joined(t, mine(i, (3, 5), rank), True) for t, i in parts)
    mine_gate = joined(gate[:, :3], mine(gate[:, 3:], (3, 5), rank), True)
    expected = dense_attention(*(joined(t, i, True) for t, i in parts)) * gate
    out = attn(q, k, v, gates={"fine": mine_gate}, text_tokens=3, seq_splits=(3, 5))
    assert (out - joined(expected[:, :3], mine(expected[:, 3:], (3, 5), rank), True)).abs().max() < 1e-5


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_gates_have_rows_for_the_text(on_ranks: Run, exchange: str) -> None:
    on_ranks(2, gated, exchange)


def beside(rank: int, exchange: str, asynchronous: bool) -> None:
    """Text beside K and V that every rank holds whole, and beside masks in shards, in which it has rows everywhere."""
    attn, sizes, text = UlyssesAttention(SdpaBackend(), exchange=exchange), (3, 5), 4
    tokens = text + sum(sizes)
    shapes = {"keys": (2, tokens), "all": (2, HEADS, tokens, tokens), "one": (1, 1, tokens, tokens)}
    for first, whole_keys, over in product((True, False), (True, False), (None, *shapes)):

        def held(whole: Tensor, dim: int = 1, first: bool = first) -> Tensor:
            """What this rank has of a whole tensor."""
            lengths = (text, *sizes) if first else (*sizes, text)
            parts = whole.split(lengths, dim)
            of_text, shard = (parts[0], parts[1 + rank]) if first else (parts[-1], parts[rank])
            return torch.cat((of_text, shard) if first else (shard, of_text), dim)

        q, k, v = (joined(t, i, first) for t, i in streams(text, sum(sizes)))
        options: dict[str, Any] = {"text_tokens": text, "text_first": first, "kv_replicated": whole_keys}
        mask = wide = None
        if over is not None:
            mask = wide = torch.rand(shapes[over], generator=torch.Generator().manual_seed(5)) > 0.4
            if over == "keys":
                wide = mask[:, None, None]
            sharded = over != "keys" or not whole_keys
            shard = held(mask, 1 if over == "keys" else 2) if sharded else mask
            options.update(mask=shard, mask_sharded=sharded)
        required = held(dense_attention(*(t.double() for t in (q, k, v)), mask=wide))
        mine_q, mine_k, mine_v = held(q), *((k, v) if whole_keys else (held(k), held(v)))
        if asynchronous:
            out = attn.forward_async(lambda t=mine_q: t, lambda t=mine_k: t, lambda t=mine_v: t, **options)  # type: ignore[misc]
        else:
            out = attn(mine_q, mine_k, mine_v, **options)
        assert (out - required).abs().max() < 1e-5, (first, whole_keys, over)


@pytest.mark.parametrize("exchange", EXCHANGES)
@pytest.mark.parametrize("asynchronous", [False, True])
def test_text_beside_whole_keys_and_masks_in_shards(on_ranks: Run, exchange: str, asynchronous: bool) -> None:
    on_ranks(2, beside, exchange, asynchronous)


def refused(rank: int, exchange: str, how: str) -> str:
    attn = UlyssesAttention(SdpaBackend(), exchange=exchange)
    q, k, v = (joined(t, mine(i, (3, 5), rank), True) for t, i in streams(3, 8))
    calls = {
        "too short": lambda: attn(q, k, v, text_tokens=7),
        "lengths that differ": lambda: attn(q, k, v, text_tokens=3 - rank),
        "first here, last there": lambda: attn(q, k, v, text_tokens=3, text_first=bool(rank)),
    }
    try:
        calls[how]()
    except IthacaError as error:
        said = f"{type(error).__name__}: {error}"
    assert attn(q, k, v, text_tokens=3).shape[1] == q.shape[1]
    return said


@pytest.mark.parametrize("exchange", EXCHANGES)
@pytest.mark.parametrize(
    ("how", "says"),
    [
        ("too short", "was required to hold 7 tokens of text; received 6"),
        ("lengths that differ", "PlanMismatchError.*3 tokens of text first.*2 tokens of text first"),
        ("first here, last there", "PlanMismatchError.*3 tokens of text last"),
    ],
)
def test_what_no_text_can_be(on_ranks: Run, exchange: str, how: str, says: str) -> None:
    for said in on_ranks(2, refused, exchange, how):
        assert re.search(says, said, re.DOTALL), said
