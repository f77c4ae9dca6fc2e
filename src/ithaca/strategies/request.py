"""What is asked of a call beside the tensors of its lanes."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ithaca.errors import InvalidInputError
from ithaca.exchange.agreement import MAX_LANES, ROLE_NBYTES
from ithaca.exchange.plain import is_tensor
from ithaca.heads import KEYS, MASK
from ithaca.plan import GATE, ROLES
from ithaca.strategies import masks
from ithaca.strategies.options import Options

#: A header has room for these, and for a mask in shards.
_GATE_NAME_NBYTES, _MOST_GATES = ROLE_NBYTES - len(GATE), MAX_LANES - len(ROLES) - 1
_LARGEST_SCALE = sys.float_info.max


def _names_gate(name: object) -> bool:
    """What keeps the names of lanes apart in a header and in a compiled graph is not in it."""
    return (
        type(name) is str
        and name.isprintable()
        and not set(name) & {",", "/"}
        and 0 < len(name.encode()) <= _GATE_NAME_NBYTES
    )


@dataclass(frozen=True)
class Request:
    """What is asked of a call beside its tensors: the lanes in issue order, and what every rank must say alike."""

    order: tuple[str, ...]
    mask: Tensor | None = None
    scale: float | None = None
    options: Options = Options()  # noqa: RUF009

    @classmethod
    def of(cls, issue_order: Sequence[str] | None, gates: object, given: Mapping[str, Any]) -> Request:
        """Checked as far as it can be without a tensor of the call. Gates leave after V where nothing else is said."""
        if not isinstance(gates, Mapping | None):
            raise InvalidInputError(f"gates were required to be tensors by name; received {type(gates).__name__}")
        names = tuple(gates or ())
        if len(names) > _MOST_GATES or not all(map(_names_gate, names)):
            raise InvalidInputError(
                f"at most {_MOST_GATES} gates were required, with names of 1 to {_GATE_NAME_NBYTES} bytes of printable "
                f"text without comma and slash; received {names}"
            )
        roles = (*ROLES, *(GATE + name for name in names))
        order = ("v", *roles[3:], "q", "k") if issue_order is None else issue_order
        order = tuple(order) if isinstance(order, Sequence) else order
        if (
            not isinstance(order, tuple)
            or not all(type(role) is str for role in order)
            or sorted(order) != sorted(roles)
        ):
            raise InvalidInputError(f"issue_order was required to be a permutation of {roles}; received {order!r}")
        mask, scale = given.get("mask"), given.get("scale")
        if not (mask is None or is_tensor(mask)) or not (scale is None or isinstance(scale, int | float)):
            raise InvalidInputError(
                f"mask was required to be a tensor or None, and scale a number or None; "
                f"received {type(mask).__name__} and {type(scale).__name__}"
            )
        if scale is not None and not -_LARGEST_SCALE <= scale <= _LARGEST_SCALE:
            raise InvalidInputError(f"scale was required to be a finite number; received {scale!r}")
        if mask is not None and not masks.is_mask(mask.dtype):
            raise InvalidInputError(f"mask was required to be boolean or floating-point; received {mask.dtype}")
        if mask is not None and mask.requires_grad and torch.is_grad_enabled():
            raise InvalidInputError("mask was required not to require grad: masks get no gradient")
        options = Options.of(given)
        if options.mask_sharded and mask is None:
            raise InvalidInputError("a mask was required of which this rank holds a shard; received None")
        return cls(order, mask, None if scale is None else float(scale), options)

    def encode(self) -> str:
        """All but the mask and the scale as text, for a compiled graph."""
        return f"{','.join(self.order)}/{self.options.encode()}"

    @classmethod
    def decode(cls, text: str, mask: Tensor | None, scale: float | None) -> Request:
        order, _, options = text.partition("/")
        return cls(tuple(order.split(",")), mask, scale, Options.decode(options))

    @property
    def moving(self) -> tuple[str, ...]:
        """The lanes that go to other ranks."""
        return tuple(role for role in self.given if role not in KEYS or not self.options.kv_replicated)

    @property
    def given(self) -> tuple[str, ...]:
        """What the caller gives, in issue order: a mask's shard is checked against the rest, and comes last."""
        return (*self.order, MASK) if self.options.mask_sharded else self.order

    @property
    def terms(self) -> str:
        """What must be equal on all ranks beside the lanes, as text."""
        mask = self.mask
        masked = "none" if mask is None else f"{str(mask.dtype).removeprefix('torch.')}{[*mask.shape]}"
        if self.options.mask_sharded:
            masked = "in shards"
        return f"scale {self.scale}, mask {masked}{self.options.terms}"
