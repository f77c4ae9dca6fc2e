"""Checks that cost too much to be always on: for sanitize mode, and for the certificate of a backend."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ithaca.errors import MutatedInputError, MutatedSourceError, RecordedStreamError
from ithaca.exchange.lease import Lease

#: All bits set is NaN in every floating-point format, and the most telling value of most others.
POISON = 0xFF


def poison(memory: Tensor) -> None:
    """Fill what a lease lent, so that whoever reads it later, through whatever pointer, is seen to."""
    if memory.numel():
        memory.flatten().view(torch.uint8).fill_(POISON)


def same_bytes(one: Tensor, other: Tensor) -> bool:
    """Equality that NaNs do not disturb."""
    if not one.numel():
        return one.shape == other.shape
    return torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))


@contextmanager
def sanitized(lease: Lease) -> Iterator[None]:
    """Watch the reader of ``lease`` while it runs: it must not write a slot, nor record a stream on one."""
    before = {role: lease[role].clone() for role in sorted(lease.unowned)}
    with _StreamRecords(lease):
        yield
    for role, clone in before.items():
        if not same_bytes(lease[role], clone):
            raise MutatedInputError(
                f"{lease.reader} was required to leave its inputs as they are; it wrote into the slot of {role}"
            )


class _StreamRecords(TorchDispatchMode):
    def __init__(self, lease: Lease) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._lease = lease

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.aten.record_stream.default:
            role = self._lease.holds(args[0])
            if role is not None:
                raise RecordedStreamError(
                    f"{self._lease.reader} recorded a stream on the slot of {role}, which PyTorch's allocator does not "
                    f"own: the native allocator ignores that, so nothing would wait for the stream before peers write "
                    f"again; cudaMallocAsync fails on it"
                )
        return func(*args, **(kwargs or {}))


def watch_sources(tensors: Mapping[str, Tensor], rank: int) -> Callable[[], None]:
    """Remember what was pushed; the result raises `MutatedSourceError` if it has changed since."""
    clones = {role: (tensor, tensor.clone()) for role, tensor in tensors.items()}

    def check() -> None:
        for role, (tensor, clone) in clones.items():
            if not same_bytes(tensor, clone):
                raise MutatedSourceError(
                    f"rank {rank}: lane {role} was required to stay as it was pushed until the wait; it was written"
                )

    return check
