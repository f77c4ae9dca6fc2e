"""How an error inside a call is told from one that the group has heard of."""

from __future__ import annotations

from ithaca.errors import IthacaError


class Refusal(Exception):
    """Raised inside a call only to tell its reason to the peers."""


def known(error: BaseException) -> None:
    """Note that the other ranks have an error for this one too."""
    if isinstance(error, IthacaError):
        error.group_knows = True
