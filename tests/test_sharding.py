"""Cut and gathered, everything that goes along the tokens is what it was, whatever divides what."""

from __future__ import annotations

import pytest
import torch
from cases import mine, one_rank, qkv
from conftest import Run
from torch import Tensor

from ithaca import (
    InvalidInputError,
    Layout,
    PeerRefusedError,
    SdpaBackend,
    Splits,
    UlyssesAttention,
    UnsupportedError,
    exchange_for,
)
from ithaca.sharding import cut, gather

TOKENS, SPLITS = 7, Splits((1, 4, 0, 2))


def along_the_tokens() -> dict[str, tuple[Tensor, int]]:
    """Kinds of tensors with their token dim."""
    angles = torch.arange(TOKENS * 6).view(TOKENS, 6) / 10
    return {
        "hidden states": (torch.randn(2, TOKENS, 5), 1),
        "hidden states in half": (torch.randn(2, TOKENS, 5).half(), -2),
        "cosines": (angles.cos(), 0),
        "a table of heads": (angles.sin().view(1, 1, TOKENS, 6), 2),
        "complex rotations": (torch.polar(torch.ones_like(angles), angles).view(1, TOKENS, 1, 6), 1),
        "complex, from the end": (torch.polar(torch.ones_like(angles), angles), -2),
        "position ids": (torch.arange(TOKENS * 3).view(TOKENS, 3), 0),
        "a key mask": (torch.rand(2, TOKENS) > 0.5, 1),
        "an additive mask": (torch.randn(2, 1, TOKENS, 11), 2),
        "a single row": (torch.randn(TOKENS), 0),
    }


@pytest.mark.fast
@pytest.mark.parametrize("kind", along_the_tokens())
@pytest.mark.parametrize("splits", [1, 2, 3, 9, SPLITS])
@pytest.mark.parametrize("permuted", [False, True])
def test_pieces_make_the_whole(kind: str, splits: int | Splits, permuted: bool) -> None:
    whole, dim = along_the_tokens()[kind]
    order = torch.randperm(TOKENS, generator=torch.Generator().manual_seed(0)) if permuted else None
    ranks = splits if isinstance(splits, int) else len(splits.sizes)
    pieces = [cut(whole, dim, rank, splits, order) for rank in range(ranks)]
    joined = torch.cat(pieces, dim)
    assert torch.equal(joined, whole if order is None else whole.index_select(dim, order))
    assert permuted or all(p.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr() for p in pieces)


@pytest.mark.fast
def test_streams_are_cut_each_by_its_own_length() -> None:
    streams = {"image": [torch.arange(7), torch.arange(4)], "scale": 2.0, "pair": (torch.arange(1), None)}
    first, second = (cut(streams, 0, rank, 2) for rank in range(2))
    assert [len(t) for t in first["image"]] == [4, 2] and [len(t) for t in second["image"]] == [3, 2]
    assert second["scale"] == 2.0 and second["pair"][1] is None and second["pair"][0].numel() == 0


@pytest.mark.fast
def test_what_cannot_be_cut() -> None:
    with pytest.raises(InvalidInputError, match=r"rank 1: 8 tokens were required along dim 0, as the splits \(3, 5\)"):
        cut(torch.zeros(7), 0, 1, Splits((3, 5)))
    for order in (torch.tensor([0, 1, 1]), torch.tensor([0, 1]), torch.tensor([[0, 1, 2]]), torch.tensor([1, 2, 3])):
        with pytest.raises(InvalidInputError, match="a permutation of 3 tokens"):
            cut(torch.zeros(3), 0, 0, 2, order)


def there_and_back(rank: int, want: str) -> None:
    exchange = exchange_for(want=want)
    torch.manual_seed(5)
    order = torch.randperm(TOKENS)
    for whole, dim in along_the_tokens().values():
        for given in (None, order):
            piece = cut(whole, dim, rank, SPLITS, given)
            back = gather(piece, dim, exchange, given)
            assert torch.equal(back, whole) and back.dtype == whole.dtype


@pytest.mark.full
@pytest.mark.parametrize("want", ["slots", "collective"])
def test_cut_then_gather_is_the_identity(on_ranks: Run, want: str) -> None:
    on_ranks(4, there_and_back, want)


def attended_in_another_order(rank: int) -> None:
    """Attention does not know of an order: permuted in, permuted out."""
    attn = UlyssesAttention(SdpaBackend())
    q, k, v = qkv(TOKENS, TOKENS, heads=4)
    order = torch.randperm(TOKENS, generator=torch.Generator().manual_seed(1))
    out = attn(*(cut(t, 1, rank, SPLITS, order) for t in (q, k, v)))
    whole = gather(out, 1, attn.exchange, order)
    torch.testing.assert_close(whole, one_rank(q, k, v), rtol=0, atol=1e-5)
    plain = attn(*(mine(t, SPLITS.sizes, rank) for t in (q, k, v)))
    torch.testing.assert_close(gather(plain, 1, attn.exchange), whole, rtol=0, atol=1e-5)


@pytest.mark.full
def test_a_model_may_shard_in_another_order(on_ranks: Run) -> None:
    on_ranks(4, attended_in_another_order)


class Unspeakable(Exception):
    def __str__(self) -> str:
        raise ValueError("no words")


def refused(rank: int, want: str) -> None:
    """What one rank cannot gather, or cannot say why, reaches the others at once; the next gather is right."""
    exchange = exchange_for(want=want)
    good = torch.full((1 + rank, 3), float(rank))
    bad = {
        "a dim too many": (good, 5),
        "no tensor": ([good], 0),
        "no dim": (good, "tokens"),
        "sparse": (good.to_sparse(), 0),
        "conjugate": (torch.complex(good, good).conj(), 0),
        "on meta": (good.to("meta"), 0),
    }
    for what, (piece, dim) in bad.items():
        error = (InvalidInputError, UnsupportedError) if rank == 1 else PeerRefusedError
        with pytest.raises(error) as raised:
            gather(piece, dim, exchange) if rank == 1 else gather(good, 0, exchange)
        assert "rank 1" in str(raised.value), what
        assert gather(good, 0, exchange)[:, 0].tolist() == [0.0, 1.0, 1.0], what

    def unspeakable() -> None:
        with exchange.call(("gather",), Layout.NHD, gathered=True) as call:
            if rank:
                raise Unspeakable
            call.push(gather=good[None, :, None])
            call.wait()

    with pytest.raises(Unspeakable if rank else PeerRefusedError) as told:
        unspeakable()
    assert rank or "Unspeakable, whose text can't be had" in str(told.value)
    assert gather(good, 0, exchange)[:, 0].tolist() == [0.0, 1.0, 1.0]


@pytest.mark.full
@pytest.mark.parametrize("want", ["slots", "collective"])
def test_what_cannot_be_gathered_is_told(on_ranks: Run, want: str) -> None:
    on_ranks(2, refused, want)
