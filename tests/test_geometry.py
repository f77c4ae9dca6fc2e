"""Who holds what, and where it lands: pure arithmetic, over any splits."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from ithaca import CallPlan, InvalidInputError, Lane, Layout, Splits
from ithaca.geometry import Block, Span
from ithaca.plan import OUT, as_nhd

pytestmark = pytest.mark.fast


@st.composite
def splits(draw: st.DrawFn, ranks: int) -> Splits:
    return Splits(tuple(draw(st.lists(st.integers(0, 5), min_size=ranks, max_size=ranks))))


@st.composite
def turns(draw: st.DrawFn) -> tuple[Lane, Tensor]:
    ranks = draw(st.integers(1, 5))
    tokens, heads = draw(splits(ranks)), draw(splits(ranks))
    batch, head_dim = draw(st.integers(1, 3)), draw(st.integers(1, 4))
    lane = Lane.inward(
        "q", torch.int64, draw(st.sampled_from(Layout)), batch, head_dim, tokens, heads.total, heads.spans
    )
    whole = torch.arange(batch * tokens.total * heads.total * head_dim)
    return lane, whole.view(batch, tokens.total, heads.total, head_dim)


def pieces(lane: Lane, whole: Tensor) -> list[Tensor]:
    return [whole[:, held.tokens.start : held.tokens.stop] for held in lane.holds]


def exchanged(lane: Lane, sources: list[Tensor]) -> list[Tensor]:
    """What the ranks would have after the exchange; every element is written, and by one share only."""
    slots = [torch.full(lane.slot_shape(rank), -1, dtype=lane.dtype) for rank in range(lane.ranks)]
    for source, tensor in enumerate(sources):
        for dest, slot in enumerate(slots):
            place, share = lane.place(slot, source, dest), lane.take(tensor, source, dest)
            assert (place == -1).all()
            assert share.numel() * share.element_size() == lane.share_nbytes(source, dest)
            place.copy_(share)
    assert all((slot != -1).all() for slot in slots)
    return slots


@given(turns())
def test_a_rank_gets_all_tokens_of_its_heads(case: tuple[Lane, Tensor]) -> None:
    lane, whole = case
    for wanted, slot in zip(lane.wants, exchanged(lane, pieces(lane, whole)), strict=True):
        assert torch.equal(as_nhd(slot, lane.layout), whole[:, :, wanted.heads.start : wanted.heads.stop])


@given(turns())
def test_scatter_then_gather_is_the_identity(case: tuple[Lane, Tensor]) -> None:
    lane, whole = case
    arrived = [as_nhd(slot, lane.layout) for slot in exchanged(lane, pieces(lane, whole))]
    home = exchanged(lane.homeward(lane.dtype, lane.head_dim)[0], arrived)
    for piece, returned in zip(pieces(lane, whole), home, strict=True):
        assert torch.equal(piece, returned)


@given(turns())
def test_a_gather_brings_everything_to_everyone(case: tuple[Lane, Tensor]) -> None:
    inward, whole = case
    tokens = Splits(tuple(len(held.tokens) for held in inward.holds))
    everything = (Span(0, whole.shape[2]),) * inward.ranks
    lane = Lane.inward("x", inward.dtype, Layout.NHD, inward.batch, inward.head_dim, tokens, whole.shape[2], everything)
    assert all(torch.equal(slot, whole) for slot in exchanged(lane, pieces(inward, whole)))


@given(turns())
def test_bytes_moved_are_all_but_ones_own_share(case: tuple[Lane, Tensor]) -> None:
    lane, whole = case
    total = sum(lane.moved_nbytes) + sum(lane.share_nbytes(rank, rank) for rank in range(lane.ranks))
    assert total == whole.numel() * whole.element_size()


@given(st.integers(0, 100), st.integers(1, 9))
def test_even_splits_differ_by_one_at_most(total: int, ranks: int) -> None:
    sizes = Splits.even(total, ranks).sizes
    assert sum(sizes) == total and max(sizes) - min(sizes) <= 1 and list(sizes) == sorted(sizes, reverse=True)


def test_a_plan_has_a_digest_of_its_own() -> None:
    def plan(heads: tuple[int, ...], dtype: torch.dtype = torch.float32) -> CallPlan:
        tokens = Splits((3, 5))
        lanes = [
            Lane.inward(r, dtype, Layout.HND, 2, 8, tokens, sum(heads), Splits(heads).spans) for r in ("v", "q", "k")
        ]
        return CallPlan.attention(tuple(lanes))

    assert plan((1, 3)) == plan((1, 3)) and plan((1, 3)).digest == plan((1, 3)).digest
    assert len({plan((1, 3)).digest, plan((2, 2)).digest, plan((1, 3), torch.float64).digest}) == 3
    (home,) = plan((1, 3)).out
    assert home.role == OUT and home.layout is Layout.NHD
    # 3 of 8 tokens leave rank 0 with 3 of 4 heads, three times; 1 of 4 heads goes home to the 5 tokens of rank 1.
    assert plan((1, 3)).moved_nbytes(0) == (3 * 3 * 3 + 5 * 1) * 2 * 8 * 4


def test_keys_and_values_must_match() -> None:
    def lane(role: str, tokens: tuple[int, ...]) -> Lane:
        return Lane.inward(role, torch.float32, Layout.HND, 1, 8, Splits(tokens), 2, Splits((1, 1)).spans)

    CallPlan.attention((lane("q", (1, 1)), lane("k", (4, 5)), lane("v", (4, 5))))
    with pytest.raises(InvalidInputError, match="keys and values"):
        CallPlan.attention((lane("q", (1, 1)), lane("k", (4, 5)), lane("v", (5, 4))))


def test_nonsense_is_refused() -> None:
    for make in (lambda: Span(3, 2), lambda: Span(-1, 2), lambda: Splits(()), lambda: Splits((2, -1))):
        with pytest.raises(InvalidInputError, match="required"):
            make()
    assert (Block(Span(0, 4), Span(0, 1)) & Block(Span(6, 9), Span(0, 1))).shape(Layout.NHD, 1, 1) == (1, 0, 1, 1)
