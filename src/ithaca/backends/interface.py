"""What an attention backend is: attention on one rank, and a plain statement of what it can do."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from ithaca.errors import InvalidInputError
from ithaca.geometry import Layout


@dataclass(frozen=True)
class Capabilities:
    """What one *instance* of a backend can do, from its resolved configuration.

    ``accepts_unowned_inputs``: the backend may be handed memory that PyTorch does not own and that peers write again
    as soon as `forward` has returned. It then must not keep, save, return or write an input, nor read one later.
    """

    layout: Layout
    dtypes: frozenset[torch.dtype]
    lse: bool = False
    fused_qkv: bool = False
    gqa: bool = False
    masks: bool = False
    gates: bool = False
    accepts_unowned_inputs: bool = False

    def __post_init__(self) -> None:
        if not self.dtypes:
            raise InvalidInputError("a backend was required to support at least one dtype; received none")


class AttentionBackend(ABC):
    """Attention on one rank."""

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
        """
