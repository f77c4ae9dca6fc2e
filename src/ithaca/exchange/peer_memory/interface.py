"""Memory that peers can write, and signals between them: all that `SlotExchange` asks of a machine."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass
from enum import Enum

from torch import Tensor


class Signal(Enum):
    """What one rank can tell another about a lane; each is counted, none is lost."""

    ARRIVED = "arrived"  #: my share of the lane lies in your slot
    CREDIT = "credit"  #: you may write the lane's slot on my side again


class Message(Enum):
    """What one rank can send another beside its signals; each kind is read in the order in which it was sent."""

    HEADER = "header"
    GROWTH = "growth"
    MAPPED = "mapped"


@dataclass
class Wait:
    """Something expected of peers. ``pending`` shrinks as they answer; ``expecting()`` is for the error message."""

    kind: Signal | Message
    role: str
    pending: set[int]
    expecting: Callable[[], str]


class PeerMemory(ABC):
    """The memory of one rank and its view of that of its peers. Used by one thread at a time, but for `signal`.

    A *slot* is the receive memory of one lane on one rank. Ranks here are those of the group. For signals a
    rank is its own peer: it signals itself and waits for itself like for any other, so that there is one path.
    """

    rank: int
    world_size: int
    #: Counts the growths of the group; equal on all ranks between calls.
    generation: int

    @abstractmethod
    def announce(self, header: bytes) -> None:
        """Put one fixed-size header before every other rank. Never waits for a reader."""

    @abstractmethod
    def announcement(self, rank: int) -> bytes:
        """Take the oldest header of ``rank`` that was waited for."""

    @abstractmethod
    def capacity(self, role: str) -> tuple[int, ...]:
        """Bytes of the slot of ``role`` on every rank; empty before its first growth."""

    @abstractmethod
    def put_back(self, rank: int, header: bytes) -> None:
        """Undo `announcement`: the header is of a call that this rank has not reached."""

    @abstractmethod
    def grow(self, role: str, capacities: tuple[int, ...]) -> Generator[Wait, None, None]:
        """Give the slots of ``role`` new memory, on all ranks or (`GrowthError`) on none. Collective.

        The old memory lives as long as a tensor over it does.
        """

    @abstractmethod
    def trim(self) -> None:
        """Drop the memory of all slots: every capacity is empty again. Signals stay. All ranks do, between calls."""

    @abstractmethod
    def slot(self, rank: int, role: str, nbytes: int) -> Tensor:
        """A fresh, non-owning ``uint8`` tensor over the first ``nbytes`` of a slot. Each call makes a new storage."""

    @abstractmethod
    def stamps(self, rank: int, role: str) -> Tensor:
        """A fresh ``int64`` tensor beside a slot: for each rank, the call that it last wrote there (sanitize mode)."""

    @abstractmethod
    def signal(self, signal: Signal, role: str, ranks: Iterable[int]) -> None:
        """Tell ``ranks``. Every write to their memory before this is seen by them after it. From any thread."""

    @abstractmethod
    def wait(self, wait: Wait, *, block: bool) -> bool:
        """Take what has come, and say whether all has. With ``block``, return only then.

        `PeerDiedError` if a pending peer is gone, `PeerTimeoutError` past the deadline, or the error with which a
        peer aborted.
        """

    @abstractmethod
    def abort(self, error: BaseException) -> None:
        """Tell every peer that this rank gives the group up, and why. Never waits."""

    @abstractmethod
    def interrupt(self) -> None:
        """Make every wait under way, and to come, raise `ExchangeClosedError`. From any thread."""

    @abstractmethod
    def close(self) -> None:
        """Give everything back. Tensors over slots stay readable. A peer that still expects something is told."""
