"""The way back through a call, held by a tensor: what a compiled graph can save for its backward.

A handle is one number, in memory that belongs to a Python object, which holds the way. So the way lives as long as the
memory of the handle does: autograd frees it after backward, or when nobody can run that any more.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch._C import DispatchKey

from ithaca.errors import InvalidInputError
from ithaca.strategies.gradient import Way

NUMBER = torch.int64

_AUTOGRAD = (
    DispatchKey.ADInplaceOrView,
    DispatchKey.AutogradFunctionality,
    DispatchKey.AutogradOther,
    DispatchKey.AutogradCPU,
    DispatchKey.AutogradCUDA,
)


class _Memory(bytearray):
    way: Way


_memories: weakref.WeakValueDictionary[int, _Memory] = weakref.WeakValueDictionary()
_numbers = itertools.count(1)


def handle_of(way: Way) -> Tensor:
    number = next(_numbers)
    memory = _Memory(number.to_bytes(NUMBER.itemsize, "little"))
    memory.way = way
    _memories[number] = memory
    return torch.frombuffer(memory, dtype=NUMBER)


def way_of(handle: Tensor) -> Way:
    memory = _memories.get(int(handle))
    if memory is None:
        raise InvalidInputError(
            "the way back through a call was required to be kept until its backward; it is gone: a hook on saved "
            "tensors must give back the very tensor that it was given"
        )
    return memory.way


@contextmanager
def recording() -> Iterator[None]:
    """Let autograd record inside of a custom operator, which runs below it, and with grad mode off."""
    below = torch._C._dispatch_tls_local_exclude_set()
    for key in _AUTOGRAD:
        below = below.remove(key)
    with torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), below), torch.enable_grad():
        yield
