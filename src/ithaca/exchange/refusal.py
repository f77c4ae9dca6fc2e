"""How an error inside a call is told from one that the group has heard of."""

from __future__ import annotations

from ithaca.errors import IthacaError, UnsupportedError

#: What is told of an error is no longer than this, in characters.
_LONGEST = 2000


def told(error: BaseException) -> str:
    """An error in words, whatever its class makes of being asked for them."""
    text = _text_of(error)
    return (type(error).__name__ + (f": {text}" if text is not None else ", whose text can't be had"))[:_LONGEST]


def _text_of(error: BaseException) -> str | None:
    try:
        return str(error)
    except Exception:
        return None


class Refusal(Exception):
    """Raised inside a call only to tell its reason to the peers."""


def known(error: BaseException) -> None:
    """Note that the other ranks have an error for this one too."""
    if isinstance(error, IthacaError):
        error.group_knows = True


def in_words(error: BaseException, here: str) -> BaseException:
    """The error that the other ranks are told: one of this library, and one that can be put in words."""
    if _text_of(error) is not None and (isinstance(error, IthacaError) or not isinstance(error, Exception)):
        return error
    if not isinstance(error, Exception):  # an interrupt stays one
        return BaseException(told(error))
    return UnsupportedError(f"{here}the call was required to be gone through to its end; it raised {told(error)}")
