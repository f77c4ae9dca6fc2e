"""Which query heads each rank attends to, and which heads of K and V it needs for them. Pure arithmetic.

Query head ``h`` reads head ``h // group`` of K and V, ``group`` being how many queries share one (GQA,
arXiv:2305.13245); one is plain attention, all of them MQA.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise

from ithaca.errors import InvalidInputError
from ithaca.geometry import Span, Splits

#: The lanes whose heads several queries may share.
KEYS = ("k", "v")
#: The lane of a mask of which each rank holds a shard. It leaves with Q or after it.
MASK = "mask"


@dataclass(frozen=True)
class Heads:
    """The heads of a call as far as they are known: lanes leave one by one, and the first of them decides.

    Where the caller states no ``splits``: if K or V goes first, its heads are split evenly and the queries follow them;
    if Q goes first, its heads are, and K and V follow; if all are known at once, see `shared_out`.
    """

    ranks: int
    splits: Splits | None = None
    q: int | None = None
    kv: int | None = None
    #: Whether K or V has left before Q was known, so that the queries must follow.
    kv_leads: bool = False

    def __post_init__(self) -> None:
        if self.splits is not None and len(self.splits.sizes) != self.ranks:
            raise InvalidInputError(
                f"head_splits were required to be one number of query heads for each of {self.ranks} ranks; "
                f"received {self.splits.sizes}"
            )

    def seen(self, q: int | None, kv: int | None, *, moves: bool = True) -> Heads:
        """What is known after these heads. Nobody follows K and V that do not move, since every rank holds them."""
        q, kv = self.q if q is None else q, self.kv if kv is None else kv
        if q is not None and self.splits is not None and self.splits.total != q:
            raise InvalidInputError(
                f"head_splits were required to add up to {q} query heads; received {self.splits.sizes}"
            )
        if q is not None and kv is not None and (q % kv if kv else q):
            raise InvalidInputError(
                f"the query heads were required to be a multiple of those of K and V; received {q} and {kv}"
            )
        splits = self.splits
        if splits is None and q is not None:
            if kv is None:
                splits = Splits.even(q, self.ranks)
            elif self.kv_leads:
                splits = Splits(tuple(size * (q // max(kv, 1)) for size in Splits.even(kv, self.ranks).sizes))
            else:
                splits = shared_out(q, kv, self.ranks)
        leads = self.kv_leads or (moves and kv is not None and q is None)
        return replace(self, splits=splits, q=q, kv=kv, kv_leads=leads)

    @property
    def group(self) -> int:
        """Query heads to a head of K and V."""
        assert self.q is not None and self.kv is not None
        return self.q // max(self.kv, 1) or 1

    @property
    def q_spans(self) -> tuple[Span, ...]:
        assert self.splits is not None
        return self.splits.spans

    @property
    def kv_spans(self) -> tuple[Span, ...]:
        """Heads of K and V that each rank needs; ranks may share one."""
        assert self.kv is not None
        if self.splits is None:
            return Splits.even(self.kv, self.ranks).spans
        group = self.splits.total // max(self.kv, 1) or 1
        return tuple(Span(s.start // group, -(-s.stop // group) if len(s) else s.start // group) for s in self.q_spans)


def shared_out(q: int, kv: int, ranks: int) -> Splits:
    """The default: whole groups for each rank; where there are fewer groups than ranks, each among some of them."""
    if kv >= ranks or q == kv:
        return Splits(tuple(size * (q // max(kv, 1)) for size in Splits.even(kv, ranks).sizes))
    if not kv:
        return Splits.even(q, ranks)
    sharers = Splits.even(ranks, kv).sizes
    return Splits(tuple(size for among in sharers for size in Splits.even(q // kv, among).sizes))


@lru_cache(maxsize=1024)
def wanted(known: Heads, lanes: tuple[tuple[str, int], ...]) -> tuple[Heads, tuple[tuple[Span, ...], ...]]:
    """For lanes that leave together, as role and heads: what is known then, and the heads that each rank wants."""
    keys = [heads for role, heads in lanes if role in KEYS]
    queries = [heads for role, heads in lanes if role not in (*KEYS, MASK)]
    known = known.seen(queries[0] if queries else None, keys[0] if keys else None)

    def of(role: str, heads: int) -> tuple[Span, ...]:
        if role == MASK and heads != known.q:
            return (Span(0, heads),) * known.ranks  # one for all heads
        return known.kv_spans if role in KEYS else known.q_spans

    return known, tuple(of(role, heads) for role, heads in lanes)


@dataclass(frozen=True)
class Segment:
    """A run of query heads that all share K and V alike: local heads of Q, and local heads of K and V."""

    q: slice
    kv: slice


def segments(q: Span, group: int) -> tuple[Segment, ...]:
    """What a rank with the query heads ``q`` computes one after another: the whole groups, and what is cut off of a
    group at either end. At most three.
    """
    if not len(q):
        return ()
    first = q.start // group
    cuts = sorted({q.start, min(q.stop, -(-q.start // group) * group), max(q.start, q.stop // group * group), q.stop})
    return tuple(
        Segment(slice(a - q.start, b - q.start), slice(a // group - first, -(-b // group) - first))
        for a, b in pairwise(cuts)
    )
