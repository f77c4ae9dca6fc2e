"""What is counted."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Counters:
    """What an exchange has done on this rank since it was made."""

    calls: int = 0
    header_rounds: int = 0  #: agreements that cost a collective; zero on slots
    bytes_moved: int = 0  #: payload sent to other ranks
    leases_collected: int = 0  #: leases whose reader left its inputs to the garbage collector
