"""What an attention backend is: attention on one rank, and a plain statement of what it can do.

**Accepting unowned inputs is never inherited.** Receive slots are memory that PyTorch does not own and that peers write
again; a backend that keeps, saves or reads such a tensor later corrupts another layer in silence. So the promise counts
only from the class that wrote both it and the code it is about: a subclass that does not say it again has it off, a
wrapper cannot pass on its inner backend's, and replacing `forward`, on the instance or on the class, takes it back.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from ithaca.backends.reference import dense_attention
from ithaca.errors import InvalidInputError, UnsupportedError
from ithaca.geometry import Layout


@dataclass(frozen=True)
class Capabilities:
    """What one *instance* of a backend can do, from its resolved configuration.

    ``gates`` names those that it takes: it is given the keyword ``gates`` only where the caller has some, and
    ``causal=True`` only where that was asked for.
    ``accepts_unowned_inputs``: the backend may be handed memory that PyTorch does not own and that peers write again
    as soon as `forward` has returned. It then must not keep, save, return or write an input, nor read one later. Only
    True itself counts.
    """

    layout: Layout
    dtypes: frozenset[torch.dtype]
    lse: bool = False
    fused_qkv: bool = False
    gqa: bool = False
    masks: bool = False
    causal: bool = False
    gates: frozenset[str] = frozenset()
    accepts_unowned_inputs: bool = False
    #: CUDA allocators under which the promise was shown to hold: what a stream record does to memory depends on them.
    certified_allocators: frozenset[str] = frozenset({"native"})
    #: Who made the promise: kept through `dataclasses.replace`, so that another backend cannot pass it on as its own.
    _promised_by: int | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not self.dtypes:
            raise InvalidInputError("a backend was required to support at least one dtype; received none")
        if self.accepts_unowned_inputs not in (True, False):
            raise InvalidInputError(
                f"accepts_unowned_inputs was required to be True or False; received {self.accepts_unowned_inputs!r}"
            )


class AttentionBackend(ABC):
    """Attention on one rank. A subclass has `capabilities` as a property and `forward`."""

    #: The `forward` that the class was made with; the promise is about that one.
    _forward_as_made: Callable[..., Any]

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls._forward_as_made = cls.forward
        own = cls.__dict__.get("capabilities")
        getter = own.fget if isinstance(own, property) else None
        if own is not None and getter is None:
            raise InvalidInputError(f"{cls.__name__}.capabilities was required to be a property; received {own!r}")
        cls.capabilities = property(_own_promise_only(cls, getter))  # type: ignore[assignment]

    @property
    @abstractmethod
    def capabilities(self) -> Capabilities:
        """What this instance can do."""

    @abstractmethod
    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        mask: Tensor | None = None,
        scale: float | None = None,
        q_len: int,
        kv_len: int,
    ) -> Tensor:
        """Attend.

        ``q``, ``k`` and ``v`` lie in ``capabilities.layout`` and hold the *whole* sequences of ``q_len`` and
        ``kv_len`` tokens for this rank's heads. ``mask`` is ``None`` or broadcasts to ``[B, H, q_len, kv_len]``:
        boolean (True takes part) or additive. ``scale`` defaults to ``head_dim ** -0.5``. Returns the layout, batch,
        heads and tokens of ``q`` with the head dim of ``v``, in memory that is not an input's.

        A backend that can be ``causal`` also takes that keyword: with True, key ``j`` takes part for query ``i`` only
        if ``j <= i``, beside what the mask says; there are as many of one as of the other.

        A backend whose capabilities name gates also takes ``gates``, a mapping of tensors with the layout, batch, heads
        and tokens of ``q``, each with a last dim of its own.
        """

    def reference(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        mask: Tensor | None = None,
        scale: float | None = None,
        gates: Mapping[str, Tensor] | None = None,
        causal: bool = False,
    ) -> Tensor:
        """What `forward` computes, written plainly over NHD: the certificate holds `forward` against it in float64.

        Dense attention; a backend that computes something else says what.
        """
        if gates:
            raise UnsupportedError(
                f"{type(self).__name__} was required to say what its gates do, in `reference`, to be certified"
            )
        return dense_attention(q, k, v, mask=mask, scale=scale, causal=causal)


def borrows(backend: AttentionBackend, device: torch.device) -> bool:
    """Whether ``backend`` is handed receive slots on ``device``, or copies of them."""
    capabilities = backend.capabilities
    if capabilities.accepts_unowned_inputs is not True:
        return False
    return device.type != "cuda" or torch.cuda.get_allocator_backend() in capabilities.certified_allocators


def _own_promise_only(
    cls: type[AttentionBackend], getter: Callable[[Any], Capabilities] | None
) -> Callable[[AttentionBackend], Capabilities]:
    """The capabilities of an instance, with the promise only where ``cls`` makes it for its own instances."""

    def capabilities(self: AttentionBackend) -> Capabilities:
        said = getter(self) if getter is not None else super(cls, self).capabilities  # type: ignore[misc]
        if said.accepts_unowned_inputs is not True:
            return said
        mine = (
            getter is not None
            and type(self) is cls
            and said._promised_by in (None, id(self))
            and "forward" not in vars(self)
            and type(self).forward is cls._forward_as_made
        )
        return replace(said, accepts_unowned_inputs=mine, _promised_by=id(self) if mine else None)

    return functools.wraps(getter)(capabilities) if getter is not None else capabilities
