"""What is left of an attention call for one rank: its own heads of the whole sequence, with its backend."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from ithaca.backends.interface import AttentionBackend
from ithaca.errors import ClosureError, IthacaError
from ithaca.exchange.plain import is_tensor, plain
from ithaca.exchange.refusal import told
from ithaca.geometry import Layout, Span
from ithaca.heads import KEYS, Segment, segments
from ithaca.plan import GATE, ROLES
from ithaca.strategies.request import Request

log = logging.getLogger("ithaca")


@dataclass(frozen=True)
class Work:
    """What to attend to: whole lengths, and this rank's heads of Q and of K and V.

    ``shared``: other ranks attend to other heads of it. ``mask`` has four dims, and as many heads as this rank, or one.
    """

    request: Request
    mask: Tensor | None
    q_len: int
    kv_len: int
    q_heads: Span
    kv_heads: Span
    group: int
    shared: bool = True

    def run(self, backend: AttentionBackend, lane: Callable[[str], Tensor], here: str) -> Tensor:
        """The output in the backend's layout. ``lane`` gives this rank's heads of a role.

        Heads that do not begin or end with a group run as up to three calls over views, none of which expands K or V.
        """
        layout = backend.capabilities.layout
        parts = segments(self.q_heads, self.group)
        if len(parts) == 1:
            return self._forward(backend, lane, None, layout, here)
        outs = [self._forward(backend, lane, part, layout, here) for part in parts]
        return torch.cat(outs, dim=2 if layout is Layout.NHD else 1)

    def _forward(
        self,
        backend: AttentionBackend,
        lane: Callable[[str], Tensor],
        part: Segment | None,
        layout: Layout,
        here: str,
    ) -> Tensor:
        def cut(role: str) -> Tensor:
            tensor = lane(role)
            if part is None:
                return tensor
            heads = part.kv if role in KEYS else part.q
            return tensor[:, :, heads] if layout is Layout.NHD else tensor[:, heads]

        # Slots are named nowhere but in the call of the backend: a name here would keep them alive past the release.
        options: dict[str, Any] = {
            "mask": self._mask(part),
            "scale": self.request.scale,
            "q_len": self.q_len,
            "kv_len": self.kv_len,
        }
        if self.request.options.causal:
            options["causal"] = True
        gates = [role for role in self.request.order if role.startswith(GATE)]
        if gates:
            options["gates"] = {role.removeprefix(GATE): cut(role) for role in gates}
        name = type(backend).__name__
        try:
            out = backend.forward(*(cut(role) for role in ROLES), **options)
        except IthacaError:
            raise
        except Exception as error:
            raise ClosureError(f"{here}{name} raised {told(error)}") from error
        if not is_tensor(out):
            raise ClosureError(f"{here}{name} was required to return a tensor; received {type(out).__name__}")
        return plain(out, f"{here}what {name} returns") if self.shared else out

    def _mask(self, part: Segment | None) -> Tensor | None:
        if self.mask is None or self.mask.shape[1] == 1:
            return self.mask
        return self.mask if part is None else self.mask[:, part.q]


@lru_cache(maxsize=256)
def idle(rank: int, heads: int, spans: tuple[Span, ...]) -> None:
    """Say once that this rank has nothing to attend to."""
    log.warning(
        "rank %d of %d computes nothing: %d heads are shared out as %s", rank, len(spans), heads, [*map(len, spans)]
    )
