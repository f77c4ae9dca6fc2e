"""The registry of attention objects and their backwards: numbers by which a compiled graph, of tensors alone, has them.

A *tag* is a number in a tensor and stands for an attention as long as that lives. A *handle* stands for the backward of
one call, and its memory owns it: so the backward lives as long as the graph saves its handle, and autograd frees it
when nobody can run it any more.
"""

from __future__ import annotations

import itertools
import weakref
from typing import Generic, TypeVar

import torch
from torch import Tensor

from ithaca.errors import InvalidInputError
from ithaca.strategies.backward import LocalBackward

NUMBER = torch.int64

T = TypeVar("T")


class Registry(Generic[T]):
    """Weakly held objects by number."""

    def __init__(self) -> None:
        self._objects: weakref.WeakValueDictionary[int, T] = weakref.WeakValueDictionary()
        self._numbers = itertools.count(1)

    def add(self, entry: T) -> int:
        number = next(self._numbers)
        self._objects[number] = entry
        return number

    def get(self, number: int) -> T | None:
        return self._objects.get(number)


class _Memory(bytearray):
    backward: LocalBackward


_backwards: Registry[_Memory] = Registry()


def handle_of(backward: LocalBackward) -> Tensor:
    """A new handle, which owns ``backward``."""
    memory = _Memory(NUMBER.itemsize)
    memory.backward = backward
    memory[:] = _backwards.add(memory).to_bytes(NUMBER.itemsize, "little")
    return torch.frombuffer(memory, dtype=NUMBER)


def backward_of(handle: Tensor) -> LocalBackward:
    """What ``handle`` stands for; `InvalidInputError` if that is gone."""
    memory = _backwards.get(int(handle))
    if memory is None:
        raise InvalidInputError(
            "the backward of a call was required to be kept until it has run; it is gone: a hook on saved tensors must "
            "give back the very tensor that it was given"
        )
    return memory.backward
