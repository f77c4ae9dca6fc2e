"""What a call can be asked for beside its tensors, its mask and its scale: equal on all ranks, and said in text."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass

from ithaca.errors import InvalidInputError
from ithaca.heads import KEYS

Sizes = tuple[int, ...]

#: Longer lists than this are told by their sum and a checksum.
_LONGEST = 24


@dataclass(frozen=True)
class Options:
    """See `UlyssesAttention.__call__` for what each means."""

    head_splits: Sequence[int] | None = None
    seq_splits: Sequence[int] | None = None
    kv_seq_splits: Sequence[int] | None = None
    kv_replicated: bool = False

    def check(self) -> None:
        for name in ("head_splits", "seq_splits", "kv_seq_splits"):
            sizes = getattr(self, name)
            if sizes is not None and not (
                isinstance(sizes, list | tuple) and sizes and all(type(n) is int and n >= 0 for n in sizes)
            ):
                raise InvalidInputError(f"{name} was required to be one number >= 0 a rank; received {sizes!r}")
        if not isinstance(self.kv_replicated, bool):
            raise InvalidInputError(f"kv_replicated was required to be True or False; received {self.kv_replicated!r}")
        if self.kv_replicated and self.kv_seq_splits is not None:
            raise InvalidInputError("kv_seq_splits were received for keys that every rank was said to hold whole")

    def splits_of(self, role: str) -> Sequence[int] | None:
        """The tokens that each rank was said to hold of a lane; None where nothing was said."""
        if role not in KEYS:
            return self.seq_splits
        return None if self.kv_replicated else self.kv_seq_splits

    @property
    def terms(self) -> str:
        """Text for the agreement of the ranks; nothing where nothing is asked for."""
        said = ""
        for name in ("head_splits", "seq_splits", "kv_seq_splits"):
            sizes = getattr(self, name)
            said += "" if sizes is None else f", {name} {_short(sizes)}"
        return said + (", K and V whole" if self.kv_replicated else "")

    def encode(self) -> str:
        """As text, for a compiled graph."""
        lists = (self.head_splits, self.seq_splits, self.kv_seq_splits)
        return "/".join([*("" if s is None else ",".join(map(str, s)) for s in lists), str(int(self.kv_replicated))])

    @classmethod
    def decode(cls, text: str) -> Options:
        *lists, replicated = text.split("/")
        heads, tokens, keys = (tuple(map(int, s.split(","))) if s else None for s in lists)
        return cls(heads, tokens, keys, replicated == "1")


def _short(sizes: Sequence[int]) -> str:
    text = "-".join(map(str, sizes))
    return text if len(text) <= _LONGEST else f"of {sum(sizes)} over {len(sizes)} ({zlib.crc32(text.encode()):08x})"
