"""diffusers' own setting of an attention backend, beside the ``backend`` of `parallelize`: followed, or refused.

A self-attention across ranks runs the backend of its `UlyssesAttention`. Of what diffusers offers, "native" asks for
the very kernel that `SdpaBackend` runs; any other would be ignored.
"""

from __future__ import annotations

from typing import Any

from ithaca.backends.sdpa import SdpaBackend
from ithaca.errors import UnsupportedError
from ithaca.strategies.ulysses import UlyssesAttention

_NATIVE = "native"


def check(where: str, backend: Any, attention: UlyssesAttention) -> None:
    """Raise `UnsupportedError` unless ``backend``, a name or member of diffusers' (None: not set), is what runs."""
    name = getattr(backend, "value", backend)
    if name is not None and (name != _NATIVE or type(attention.backend) is not SdpaBackend):
        raise UnsupportedError(
            f"{where} was required to be what self-attention across ranks runs, {type(attention.backend).__name__}, "
            f"which is chosen by parallelize(backend=...); received {name!r}"
        )


def check_active(attention: UlyssesAttention) -> None:
    """The same of the backend that diffusers uses where none is set: ``DIFFUSERS_ATTN_BACKEND`` and the like."""
    from diffusers.models.attention_dispatch import _AttentionBackendRegistry

    check("diffusers' active attention backend", _AttentionBackendRegistry.get_active_backend()[0], attention)
