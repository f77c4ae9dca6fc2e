"""Which heads go where: every query has its head of K and V on its rank, and no rank is sent more."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ithaca import InvalidInputError, Splits
from ithaca.geometry import Span
from ithaca.heads import Heads, segments, shared_out

pytestmark = pytest.mark.fast

RANKS, GROUPS, KEYS = st.integers(1, 7), st.integers(1, 6), st.integers(1, 9)


@given(RANKS, GROUPS, KEYS, st.sampled_from(["q", "kv", "both"]), st.data())
def test_a_rank_has_what_its_queries_read_and_no_more(
    ranks: int, group: int, kv: int, first: str, data: st.DataObject
) -> None:
    stated = None
    if data.draw(st.booleans()):
        cuts = sorted(data.draw(st.lists(st.integers(0, kv * group), min_size=ranks - 1, max_size=ranks - 1)))
        stated = Splits(tuple(b - a for a, b in zip([0, *cuts], [*cuts, kv * group], strict=True)))
    heads = Heads(ranks, stated)
    early = None
    if first == "both":
        heads = heads.seen(kv * group, kv)
    elif first == "q":
        early = heads.seen(kv * group, None)
        heads = early.seen(None, kv)
        assert heads.q_spans == early.q_spans  # what has left stays where it went
    else:
        early = heads.seen(None, kv)
        heads = early.seen(kv * group, None)
        assert heads.kv_spans == early.kv_spans
    assert sum(map(len, heads.q_spans)) == kv * group
    for queries, keys in zip(heads.q_spans, heads.kv_spans, strict=True):
        assert set(range(keys.start, keys.stop)) == {h // group for h in range(queries.start, queries.stop)}


@given(st.integers(0, 40), st.integers(0, 20), GROUPS)
def test_segments_are_uniform_and_at_most_three(start: int, length: int, group: int) -> None:
    queries = Span(start, start + length)
    parts = segments(queries, group)
    assert len(parts) <= 3
    covered = []
    first = start // group
    for part in parts:
        q, kv = range(part.q.start + start, part.q.stop + start), range(part.kv.start + first, part.kv.stop + first)
        assert len(q) % len(kv) == 0
        assert [h // group for h in q] == [kv[i // (len(q) // len(kv))] for i in range(len(q))]
        covered += list(q)
    assert covered == list(range(queries.start, queries.stop))


@pytest.mark.parametrize(
    ("q", "kv", "ranks", "sizes"),
    [
        (12, 12, 4, (3, 3, 3, 3)),
        (12, 12, 5, (3, 3, 2, 2, 2)),
        (2, 2, 4, (1, 1, 0, 0)),
        (32, 8, 4, (8, 8, 8, 8)),
        (12, 3, 2, (8, 4)),
        (32, 2, 4, (8, 8, 8, 8)),
        (8, 1, 3, (3, 3, 2)),
        (6, 2, 3, (2, 1, 3)),
        (0, 0, 2, (0, 0)),
    ],
)
def test_the_default_follows_the_groups(q: int, kv: int, ranks: int, sizes: tuple[int, ...]) -> None:
    assert shared_out(q, kv, ranks).sizes == sizes


def test_what_is_no_sharing_of_heads() -> None:
    with pytest.raises(InvalidInputError, match="multiple of those of K and V; received 5 and 2"):
        Heads(2).seen(5, 2)
    with pytest.raises(InvalidInputError, match=r"add up to 5 query heads; received \(2, 2\)"):
        Heads(2, Splits((2, 2))).seen(5, 5)
    with pytest.raises(InvalidInputError, match="one number of query heads for each of 3 ranks"):
        Heads(3, Splits((2, 2)))
