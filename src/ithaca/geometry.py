"""Who holds which tokens and which heads, and where each share lands. Pure arithmetic.

A tensor of an attention call is a grid of tokens by heads. Every rank *holds* one rectangle of it before an
exchange and *wants* another one after it; what rank `s` sends to rank `d` is the intersection of what `s` holds
with what `d` wants. Ulysses' two turns, a gather, replicated heads and uneven splits are all this one rule.
"""

from __future__ import annotations

import builtins
from dataclasses import dataclass
from enum import Enum
from itertools import accumulate

from ithaca.errors import InvalidInputError


class Layout(Enum):
    """Order of the dims of an attention tensor: tokens before heads, or heads before tokens."""

    NHD = "NHD"  #: ``[B, S, H, D]``
    HND = "HND"  #: ``[B, H, S, D]``

    def arrange(self, batch: int, tokens: int, heads: int, head_dim: int) -> tuple[int, int, int, int]:
        """The shape in this layout."""
        if self is Layout.NHD:
            return batch, tokens, heads, head_dim
        return batch, heads, tokens, head_dim


@dataclass(frozen=True)
class Span:
    """Half-open range ``start <= i < stop``; empty when they are equal."""

    start: int
    stop: int

    def __post_init__(self) -> None:
        if not 0 <= self.start <= self.stop:
            raise InvalidInputError(f"a span was required to have 0 <= start <= stop; received {self}")

    def __len__(self) -> int:
        return self.stop - self.start

    def __and__(self, other: Span) -> Span:
        start = max(self.start, other.start)
        return Span(start, max(start, min(self.stop, other.stop)))

    @property
    def slice(self) -> builtins.slice:
        return builtins.slice(self.start, self.stop)

    def within(self, outer: Span) -> builtins.slice:
        """This span in the coordinates of ``outer``, which holds it."""
        return builtins.slice(self.start - outer.start, self.stop - outer.start)


@dataclass(frozen=True)
class Splits:
    """A dim cut into one contiguous piece per rank; pieces may differ and may be empty."""

    sizes: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.sizes or min(self.sizes) < 0:
            raise InvalidInputError(f"splits were required to be one size >= 0 per rank; received {self.sizes}")

    @classmethod
    def even(cls, total: int, ranks: int) -> Splits:
        """``total`` over ``ranks`` as evenly as it goes; the first ``total % ranks`` get one more."""
        each, more = total // ranks, total % ranks  # `divmod` does not trace
        return cls(tuple(each + (rank < more) for rank in range(ranks)))

    @property
    def total(self) -> int:
        return sum(self.sizes)

    @property
    def whole(self) -> Span:
        return Span(0, self.total)

    @property
    def spans(self) -> tuple[Span, ...]:
        ends = tuple(accumulate(self.sizes))
        return tuple(Span(end - size, end) for size, end in zip(self.sizes, ends, strict=True))


@dataclass(frozen=True)
class Text:
    """Tokens that every rank holds whole, before or after the sharded ones: MM-DiT's text (arXiv:2403.03206).

    On a rank they come before its own tokens, or after them, just as in the whole sequence.
    """

    tokens: int = 0
    first: bool = True

    def span(self, others: int) -> Span:
        """Where they are, beside so many other tokens."""
        return Span(0, self.tokens) if self.first else Span(others, others + self.tokens)

    def rest(self, others: int) -> Span:
        """Where the others are."""
        start = self.tokens if self.first else 0
        return Span(start, start + others)


@dataclass(frozen=True)
class Block:
    """A rectangle of tokens by heads, in global coordinates."""

    tokens: Span
    heads: Span

    def __and__(self, other: Block) -> Block:
        return Block(self.tokens & other.tokens, self.heads & other.heads)

    def shape(self, layout: Layout, batch: int, head_dim: int) -> tuple[int, int, int, int]:
        """Shape of a tensor that holds just this block."""
        return layout.arrange(batch, len(self.tokens), len(self.heads), head_dim)

    def index(self, outer: Block, layout: Layout) -> tuple[slice, slice, slice]:
        """Index of this block in a tensor of ``layout`` that holds the block ``outer``."""
        tokens, heads = self.tokens.within(outer.tokens), self.heads.within(outer.heads)
        return (slice(None), tokens, heads) if layout is Layout.NHD else (slice(None), heads, tokens)
