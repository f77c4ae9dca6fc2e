"""What a call can be asked for beside its tensors, its mask and its scale: equal on all ranks, and said in text."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypedDict

from torch import Tensor

from ithaca.errors import InvalidInputError
from ithaca.exchange.agreement import LARGEST_DIM
from ithaca.geometry import Text
from ithaca.heads import KEYS
from ithaca.plan import OUT, ROLES
from ithaca.strategies.compression import FORMATS

_LISTS = ("head_splits", "seq_splits", "kv_seq_splits")
_FLAGS = ("kv_replicated", "mask_sharded", "causal", "text_first")
#: Longer lists than this are told by their sum and a checksum.
_LONGEST = 24
_BOUND = f" (none may be above {LARGEST_DIM})"


#: Which lanes are sent as bytes, and how.
Compress = str | Mapping[str, str] | None


class CallOptions(TypedDict, total=False):
    """The keywords that every attention call takes, at once or lane by lane; equal on all ranks.

    ``mask``: None, or the same tensor on every rank, ``[B, S_kv]`` or ``[B | 1, H | 1, S_q, S_kv]`` over the whole
    lengths, boolean (True takes part) or additive. It gets no gradient. ``mask_sharded``: it is this rank's shard,
    ``[B | 1, S_kv_local]`` of its keys or ``[B | 1, H | 1, S_local, S_kv]`` of its queries, and moves like a lane.
    ``causal``: a key takes part only for queries that do not come before it; there must be as many of one as of the
    other. ``scale`` of the scores, ``head_dim ** -0.5`` if None.

    ``head_splits``: query heads of each rank, where the default will not do. ``seq_splits`` and ``kv_seq_splits``:
    the tokens of Q, and of K and V, on each rank; what a rank holds is held against them. ``kv_replicated``: every
    rank holds K and V whole, and not one byte of them moves.

    ``text_tokens``: so many tokens of Q, K and V (and gates) are the same on every rank, before this rank's own or
    with ``text_first=False`` after them, and in the whole sequence before or after all others: they are attended to
    once, do not move, and come back whole on every rank, where they were. They have rows in a shard of a mask, too;
    with ``kv_replicated``, K and V are whole, whatever they hold.

    ``compress``: "int8" or "float8" sends Q, K and V as bytes with a scale for each token and head; a mapping says
    which of ``q``, ``k``, ``v`` and ``out``, and how. Lanes that are sent as bytes have no gradient.
    """

    mask: Tensor | None
    scale: float | None
    head_splits: Sequence[int] | None
    seq_splits: Sequence[int] | None
    kv_seq_splits: Sequence[int] | None
    kv_replicated: bool
    mask_sharded: bool
    causal: bool
    text_tokens: int
    text_first: bool
    compress: Compress


@dataclass(frozen=True)
class Options:
    """`CallOptions` but for the mask and the scale, which a compiled graph passes on beside them."""

    head_splits: Sequence[int] | None = None
    seq_splits: Sequence[int] | None = None
    kv_seq_splits: Sequence[int] | None = None
    kv_replicated: bool = False
    mask_sharded: bool = False
    causal: bool = False
    text_tokens: int = 0
    text_first: bool = True
    #: Roles and formats, from what the caller said.
    compress: tuple[tuple[str, str], ...] = ()

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> Options:
        """Checked as far as it can be without a tensor of the call."""
        strange = sorted(set(given) - set(CallOptions.__annotations__))
        if strange:
            raise InvalidInputError(
                f"options of a call were required to be among {', '.join(CallOptions.__annotations__)}; "
                f"received {', '.join(strange)}"
            )
        values = {name: value for name, value in given.items() if name not in ("mask", "scale", "compress")}
        for name in _LISTS:
            if isinstance(values.get(name), list | tuple):
                values[name] = tuple(values[name])  # read once
        options = cls(**values, compress=formats_of(given.get("compress")))
        options.check()
        return options

    @property
    def formats(self) -> dict[str, str]:
        return dict(self.compress)

    @property
    def text(self) -> Text:
        return Text(self.text_tokens, self.text_first)

    def check(self) -> None:
        for name in _LISTS:
            sizes = getattr(self, name)
            if sizes is not None and not (isinstance(sizes, tuple) and sizes and all(map(_is_size, sizes))):
                raise InvalidInputError(f"{name} was required to be one number >= 0 a rank; received {sizes!r}{_BOUND}")
        for name in _FLAGS:
            if not isinstance(getattr(self, name), bool):
                raise InvalidInputError(f"{name} was required to be True or False; received {getattr(self, name)!r}")
        if not _is_size(self.text_tokens):
            raise InvalidInputError(
                f"text_tokens was required to be a number >= 0; received {self.text_tokens!r}{_BOUND}"
            )
        if self.kv_replicated and self.kv_seq_splits is not None:
            raise InvalidInputError("kv_seq_splits were received for keys that every rank was said to hold whole")

    def splits_of(self, role: str) -> Sequence[int] | None:
        """The tokens that each rank was said to hold of a lane; None where nothing was said."""
        return self.kv_seq_splits if role in KEYS else self.seq_splits

    @property
    def terms(self) -> str:
        """Text for the agreement of the ranks; nothing where nothing is asked for."""
        said = ""
        for name in _LISTS:
            sizes = getattr(self, name)
            said += "" if sizes is None else f", {name} {_short(sizes)}"
        said += "".join(f", {name}" for name in _FLAGS[:3] if getattr(self, name))
        where = "first" if self.text_first else "last"
        said += f", {self.text_tokens} tokens of text {where}" if self.text_tokens else ""
        return said + "".join(f", {role} as {format}" for role, format in self.compress)

    def encode(self) -> str:
        """As text, for a compiled graph."""
        lists = (self.head_splits, self.seq_splits, self.kv_seq_splits)
        flags = (self.kv_replicated, self.mask_sharded, self.causal, self.text_first)
        formats = ",".join(f"{role}:{format}" for role, format in self.compress)
        sizes = ["" if s is None else ",".join(map(str, s)) for s in lists]
        return "/".join([*sizes, *(str(int(flag)) for flag in flags), str(self.text_tokens), formats])

    @classmethod
    def decode(cls, text: str) -> Options:
        values = text.split("/")
        heads, tokens, keys = (tuple(map(int, s.split(","))) if s else None for s in values[:3])
        whole, sharded, causal, first = (flag == "1" for flag in values[3:7])
        formats = tuple((role, format) for role, _, format in (s.partition(":") for s in values[8].split(",") if s))
        return cls(heads, tokens, keys, whole, sharded, causal, int(values[7]), first, formats)


def formats_of(compress: object) -> tuple[tuple[str, str], ...]:
    """A format for Q, K and V alike, or one for each role that is named, the output among them."""
    named = dict.fromkeys(ROLES, compress) if isinstance(compress, str) else compress
    if named is None:
        return ()
    formats: dict[Any, Any] = dict(named) if isinstance(named, Mapping) else {"": named}  # read once
    if any(
        role not in (*ROLES, OUT) or type(format) is not str or format not in FORMATS
        for role, format in formats.items()
    ):
        raise InvalidInputError(
            f"compress was required to be one of {FORMATS}, or such by role of {(*ROLES, OUT)}; received {compress!r}"
        )
    return tuple((role, formats[role]) for role in (*ROLES, OUT) if role in formats)


def _is_size(number: object) -> bool:
    return type(number) is int and 0 <= number <= LARGEST_DIM


def _short(sizes: Sequence[int]) -> str:
    text = "-".join(map(str, sizes))
    return text if len(text) <= _LONGEST else f"of {sum(sizes)} over {len(sizes)} ({zlib.crc32(text.encode()):08x})"
