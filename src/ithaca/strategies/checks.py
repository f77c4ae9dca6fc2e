"""What a rank's own tensors are held against before they leave."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from ithaca.backends.interface import Capabilities
from ithaca.errors import InvalidInputError, UnsupportedError
from ithaca.geometry import Splits
from ithaca.heads import KEYS
from ithaca.plan import GATE
from ithaca.strategies.request import Request


@dataclass(frozen=True)
class LaneChecks:
    """Of one call on one rank. ``name`` is the backend's; ``here`` begins the message of an error. ``tokens``: those of
    Q on each rank, where the model knows and the caller does not say.
    """

    name: str
    capabilities: Capabilities
    request: Request
    tokens: Splits | None
    rank: int
    ranks: int
    here: str

    def dims(self, role: str, tensor: Tensor) -> None:
        """Raise unless ``tensor`` has four."""
        if tensor.dim() != 4:
            raise InvalidInputError(
                f"{self.here}{role} was required to be [B, S_local, H, D]; received {list(tensor.shape)}"
            )

    def check(self, role: str, tensor: Tensor, earlier: Mapping[str, Tensor]) -> None:
        """Raise unless ``tensor`` goes with the backend, the request, and the lanes that came ``earlier``."""
        capabilities, name = self.capabilities, self.name
        if tensor.dtype not in capabilities.dtypes:
            raise UnsupportedError(
                f"{self.here}{name} was required to attend in {tensor.dtype}; it can in "
                f"{', '.join(sorted(map(str, capabilities.dtypes)))}"
            )
        for other, theirs in earlier.items():
            self._match(role, tensor, other, theirs)
        self._count(role, tensor)
        mask = self.request.mask
        if mask is not None and not capabilities.masks:
            raise UnsupportedError(f"{self.here}{name} takes no mask, and none is ever dropped")
        if mask is not None and mask.device != tensor.device:
            raise InvalidInputError(
                f"{self.here}mask was required to be on {tensor.device}, as {role} is; received one on {mask.device}"
            )
        if self.request.options.causal and not capabilities.causal:
            raise UnsupportedError(f"{self.here}{name} was required to attend causally, and cannot")
        if role.startswith(GATE) and role.removeprefix(GATE) not in capabilities.gates:
            raise UnsupportedError(
                f"{self.here}{name} was required to take the gate {role.removeprefix(GATE)!r}; "
                f"it takes {sorted(capabilities.gates) or 'none'}"
            )

    def _match(self, role: str, tensor: Tensor, other: str, earlier: Tensor) -> None:
        """Batch, dtype and device are shared by all; tokens and heads by k and v, and by q and gates; D by q and k."""
        required = list(earlier.shape)
        if len({role, other} & {*KEYS}) == 1:
            required[1] = tensor.shape[1]
            keys, queries = (tensor, earlier) if role in KEYS else (earlier, tensor)
            if self.capabilities.gqa and keys.shape[2] and queries.shape[2] % keys.shape[2] == 0:
                required[2] = tensor.shape[2]
        if {role, other} != {"q", "k"}:
            required[3] = tensor.shape[3]
        if list(tensor.shape) != required or tensor.dtype != earlier.dtype or tensor.device != earlier.device:
            raise InvalidInputError(
                f"{self.here}{role} was required to be {required} {earlier.dtype} on {earlier.device}, as {other} is; "
                f"received {list(tensor.shape)} {tensor.dtype} on {tensor.device}"
            )

    def _count(self, role: str, tensor: Tensor) -> None:
        """Hold the tokens of a lane against the splits that the caller stated."""
        if role in KEYS and self.request.options.kv_replicated:
            return
        text = self.request.options.text.tokens
        if tensor.shape[1] < text:
            raise InvalidInputError(
                f"{self.here}{role} was required to hold {text} tokens of text; received {tensor.shape[1]}"
            )
        stated = self.request.options.splits_of(role)
        if stated is None and role not in KEYS and self.tokens is not None:
            stated = self.tokens.sizes
        if stated is None:
            return
        tokens = tensor.shape[1] - text
        if len(stated) != self.ranks:
            raise InvalidInputError(
                f"{self.here}splits were required to be one length for each of {self.ranks} ranks; received {stated}"
            )
        if tokens != stated[self.rank]:
            whole = " (the whole sequence: was it not cut?)" if tokens == sum(stated) else ""
            raise InvalidInputError(
                f"{self.here}{role} was required to have {stated[self.rank]} tokens, as the splits {stated} say; "
                f"received {tokens}{whole}"
            )
