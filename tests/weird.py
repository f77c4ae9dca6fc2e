"""Things that raise when they are looked at."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ithaca import IthacaError


class Unreadable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


class UnreadableOfOurs(IthacaError):
    def __str__(self) -> str:
        raise RuntimeError("no text")


class Weird:
    """Raises at every question that Python asks."""

    def _raise(self, *args: Any) -> Any:
        raise RuntimeError("do not look at me")

    __eq__ = __bool__ = __len__ = __iter__ = __repr__ = __str__ = __float__ = __index__ = __getitem__ = _raise
    __hash__ = object.__hash__


class Evil(Mapping[str, Any]):
    """A mapping that raises."""

    def __getitem__(self, key: str) -> Any:
        raise KeyError(key)

    def __iter__(self) -> Iterator[str]:
        return iter(("fine",))

    def __len__(self) -> int:
        return 1


class WeirdText(str):
    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        raise RuntimeError("no comparison")

    __hash__ = str.__hash__


class WeirdNumber(float):
    def __float__(self) -> float:
        raise RuntimeError("no number")

    def __le__(self, other: object) -> bool:
        raise RuntimeError("no number")

    __ge__ = __lt__ = __gt__ = __le__


class WeirdList(list[int]):
    def __iter__(self) -> Iterator[int]:
        raise RuntimeError("no elements")
