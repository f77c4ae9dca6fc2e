"""The call plan: what one call does on *all* ranks, frozen and hashed.

Receive memory, its growth, byte counts, the copies that a rank makes and the agreement between ranks all derive
from it. Nothing here knows of torch.distributed.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch

from ithaca.errors import InvalidInputError
from ithaca.geometry import Block, Layout, Span, Splits, Text

#: The lanes of every attention call, beside its gates.
ROLES = ("q", "k", "v")
#: The lane that brings the heads home.
OUT = "out"
#: The lane that brings the heads of the text home, to everybody.
TEXT_OUT = "out.text"
#: What the roles of gates begin with.
GATE = "gate."
#: Pieces of receive memory start on such boundaries: a shift of 12 bytes changes the bits of fp32 SDPA.
ALIGNMENT = 64

_Indices = tuple[tuple[tuple[slice, slice, slice], ...], ...]


@dataclass(frozen=True)
class Lane:
    """One tensor of a call on its way between ranks: what each holds before and wants after.

    ``layout`` is that of the receiver's slot. ``holds[r]`` and ``wants[r]`` are rank ``r``'s rectangles of the
    global grid of tokens by heads. ``text`` is what every rank holds beside its rectangle: each puts what it wants of
    that into its own slot, and none of it moves.
    """

    role: str
    dtype: torch.dtype
    layout: Layout
    batch: int
    head_dim: int
    holds: tuple[Block, ...]
    wants: tuple[Block, ...]
    text: Text = Text()  # noqa: RUF009

    def __post_init__(self) -> None:
        if len(self.holds) != len(self.wants) or self.batch < 0 or self.head_dim < 0:
            raise InvalidInputError(
                f"a lane was required to have a block held and wanted for every rank, and sizes >= 0; received {self}"
            )

    @classmethod
    def inward(
        cls,
        role: str,
        dtype: torch.dtype,
        layout: Layout,
        batch: int,
        head_dim: int,
        tokens: Splits,
        heads: int,
        wanted: tuple[Span, ...],
        text: Text = Text(),  # noqa: B008
    ) -> Lane:
        """Ulysses' first turn: my tokens of all heads become all tokens of my heads (arXiv:2309.14509).

        ``wanted``: the heads of each rank. Several ranks may want one, and where all want all it is a gather.
        """
        before = text.rest(0).start
        whole = Span(0, tokens.total + text.tokens)
        return cls(
            role=role,
            dtype=dtype,
            layout=layout,
            batch=batch,
            head_dim=head_dim,
            holds=tuple(Block(Span(before + s.start, before + s.stop), Span(0, heads)) for s in tokens.spans),
            wants=tuple(Block(whole, mine) for mine in wanted),
            text=text,
        )

    def homeward(self, dtype: torch.dtype, head_dim: int) -> tuple[Lane, ...]:
        """The output lanes of a call whose queries took this one: the same turn, back, into NHD.

        Two where there is text: that one brings all heads of it to every rank.
        """
        others = sum(len(held.tokens) for held in self.holds)
        heads = self.holds[0].heads

        def lane(role: str, tokens: Span, wants: tuple[Block, ...]) -> Lane:
            holds = tuple(Block(tokens, wanted.heads) for wanted in self.wants)
            return Lane(role, dtype, Layout.NHD, self.batch, head_dim, holds, wants)

        home = lane(OUT, self.text.rest(others), self.holds)
        if not self.text.tokens:
            return (home,)
        span = self.text.span(others)
        return home, lane(TEXT_OUT, span, (Block(span, heads),) * self.ranks)

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash((self.role, self.dtype, self.layout, self.batch, self.head_dim, self.holds, self.wants, self.text))

    @property
    def ranks(self) -> int:
        return len(self.holds)

    def local_shape(self, rank: int) -> tuple[int, int, int, int]:
        """NHD shape of what ``rank`` holds before the exchange."""
        held = self.holds[rank]
        return self.batch, len(held.tokens) + self.text.tokens, len(held.heads), self.head_dim

    def slot_shape(self, rank: int) -> tuple[int, int, int, int]:
        """Shape, in the lane's layout, of what ``rank`` has after the exchange."""
        return self.wants[rank].shape(self.layout, self.batch, self.head_dim)

    @cached_property
    def slot_nbytes(self) -> tuple[int, ...]:
        """Bytes of each rank's slot."""
        return tuple(math.prod(self.slot_shape(rank)) * self.dtype.itemsize for rank in range(self.ranks))

    @cached_property
    def shares(self) -> tuple[tuple[Block, ...], ...]:
        """``shares[source][dest]`` is what one rank sends to another."""
        return tuple(tuple(held & wanted for wanted in self.wants) for held in self.holds)

    def share_shape(self, source: int, dest: int) -> tuple[int, int, int, int]:
        """NHD shape of that share."""
        return self.shares[source][dest].shape(Layout.NHD, self.batch, self.head_dim)

    def share_nbytes(self, source: int, dest: int) -> int:
        return math.prod(self.share_shape(source, dest)) * self.dtype.itemsize

    def take(self, tensor: torch.Tensor, source: int, dest: int) -> torch.Tensor:
        """The view of the share for ``dest`` in the NHD ``tensor`` that ``source`` holds; NHD."""
        own = tensor if not self.text.tokens else tensor[:, self.text.rest(len(self.holds[source].tokens)).slice]
        return own[self._takes[source][dest]]

    def own_text(self, slot: torch.Tensor, tensor: torch.Tensor, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The views of ``rank``'s own slot and NHD tensor between which its text is copied; NHD."""
        held, wanted = self.holds[rank], self.wants[rank]
        here = Block(self.text.span(len(wanted.tokens) - self.text.tokens), wanted.heads)
        heads = wanted.heads.within(held.heads)
        return (
            as_nhd(slot[here.index(wanted, self.layout)], self.layout),
            tensor[:, self.text.span(len(held.tokens)).slice, heads],
        )

    def place(self, slot: torch.Tensor, source: int, dest: int) -> torch.Tensor:
        """The view of ``dest``'s ``slot`` where the share of ``source`` lands; NHD."""
        return as_nhd(slot[self._places[source][dest]], self.layout)

    @cached_property
    def _takes(self) -> _Indices:
        return tuple(
            tuple(share.index(held, Layout.NHD) for share in shares)
            for held, shares in zip(self.holds, self.shares, strict=True)
        )

    @cached_property
    def _places(self) -> _Indices:
        return tuple(
            tuple(share.index(wanted, self.layout) for share, wanted in zip(shares, self.wants, strict=True))
            for shares in self.shares
        )

    @cached_property
    def moved_nbytes(self) -> tuple[int, ...]:
        """Bytes that each rank sends to others."""
        return tuple(
            sum(self.share_nbytes(source, dest) for dest in range(self.ranks) if dest != source)
            for source in range(self.ranks)
        )


@dataclass(frozen=True)
class CallPlan:
    """One attention call on all ranks: the lanes in issue order, and the output's way home.

    ``out`` are its lanes. ``whole``: for K and V that every rank holds whole, and that are no lanes, their role, dtype
    and NHD shape. ``packed``: for lanes that are sent as bytes, their role and the dtype and head dim that they stand
    for; of the output, those that it is sent as. ``grads``: the roles that require a gradient.
    """

    lanes: tuple[Lane, ...]
    out: tuple[Lane, ...]
    whole: tuple[tuple[str, torch.dtype, tuple[int, ...]], ...] = ()
    packed: tuple[tuple[str, torch.dtype, int], ...] = ()
    grads: tuple[str, ...] = ()

    @staticmethod
    @lru_cache(maxsize=1024)
    def attention(
        lanes: tuple[Lane, ...],
        whole: tuple[tuple[str, torch.dtype, tuple[int, ...]], ...] = (),
        packed: tuple[tuple[str, torch.dtype, int], ...] = (),
        grads: tuple[str, ...] = (),
    ) -> CallPlan:
        """The plan of a call with the inward lanes ``q``, ``k``, ``v`` and those of gates (in any order)."""
        role = {lane.role: lane for lane in lanes}
        q = role["q"]
        kinds = {name: (dtype, shape[3]) for name, dtype, shape in whole}
        kinds |= {lane.role: (lane.dtype, lane.head_dim) for lane in lanes}
        kinds |= {name: (dtype, head_dim) for name, dtype, head_dim in packed}
        kind = kinds.get(OUT, (kinds["q"][0], kinds["v"][1]))
        if not whole and (role["k"].holds, role["k"].wants) != (role["v"].holds, role["v"].wants):
            raise InvalidInputError(
                f"keys and values were required to have the same tokens and heads on every rank; "
                f"received {role['k']} and {role['v']}"
            )
        for lane in lanes:
            if lane.role.startswith(GATE) and (lane.holds != q.holds or lane.wants != q.wants):
                raise InvalidInputError(
                    f"a gate was required to have the tokens and heads of the queries; received {lane} beside {q}"
                )
        return CallPlan(lanes=lanes, out=q.homeward(*kind), whole=whole, packed=packed, grads=grads)

    @cached_property
    def queries(self) -> Lane:
        return next(lane for lane in self.lanes if lane.role == "q")

    @cached_property
    def digest(self) -> bytes:
        """16 bytes that are equal on two ranks only if their plans are."""
        return hashlib.blake2b(repr(self).encode(), digest_size=16).digest()

    def moved_nbytes(self, source: int) -> int:
        """Bytes that ``source`` sends to other ranks in the whole call."""
        return sum(lane.moved_nbytes[source] for lane in (*self.lanes, *self.out))


def as_nhd(tensor: torch.Tensor, layout: Layout) -> torch.Tensor:
    """``tensor`` of ``layout`` seen as NHD; the same call turns NHD into ``layout``."""
    return tensor if layout is Layout.NHD else tensor.transpose(1, 2)


def aligned(nbytes: int) -> int:
    """``nbytes`` rounded up to the next boundary."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
