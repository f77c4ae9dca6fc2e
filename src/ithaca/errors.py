"""Every error that the library raises. Each says what was required, what was received, and on which rank."""

from __future__ import annotations


class IthacaError(Exception):
    """Base of all errors of this library."""

    #: Whether the other ranks of the group have an error for it too, or will at their next call.
    group_knows = False


class InvalidInputError(IthacaError, ValueError):
    """This rank was given something that the call cannot take."""


class UnsupportedError(IthacaError):
    """The call is well-formed, but nothing here can carry it out (a dtype, a device, autograd)."""


class PlanMismatchError(IthacaError):
    """The ranks of a group entered the same call with different ideas of it. Raised alike on every rank."""


class CorruptHeaderError(IthacaError):
    """A peer sent something that is not a header of this library. The exchange is closed by it."""


class PeerRefusedError(IthacaError):
    """Another rank could not go through with the call, and said why. This rank's own input was fine."""


class ClosureError(IthacaError):
    """A closure or backend of the caller raised or returned the wrong thing; its own exception is the cause."""


class PeerDiedError(IthacaError):
    """A peer's process ended, or its connection closed, while something was expected of it."""


class PeerTimeoutError(IthacaError):
    """A peer did not do what was expected of it within the deadline."""


class GrowthError(IthacaError):
    """Receive memory could not be grown on some rank; every rank keeps what it had."""


class ExchangeClosedError(IthacaError):
    """The exchange ended earlier, because of the error that is named (or `destroy()`)."""


class ExchangeUnavailableError(IthacaError):
    """The exchange that was asked for does not work between these ranks."""


class LeaseError(IthacaError):
    """A lease was used after its release, or a slot asked for while its lease is out."""


class RetainedInputError(IthacaError):
    """A reader of leased slots still holds one of them after its lease has ended. The exchange is closed by it."""


class AliasedOutputError(IthacaError):
    """A reader of leased slots returned memory of a slot, which peers are about to write again."""


class StaleSlotError(IthacaError):
    """A slot did not hold what its signal said: another call's data. Looked for in sanitize mode."""


class MutatedInputError(IthacaError):
    """A reader of leased slots wrote into one. Looked for in sanitize mode and by the certificate."""


class RecordedStreamError(IthacaError):
    """A reader recorded a stream on a leased slot. Looked for in sanitize mode and by the certificate."""


class MutatedSourceError(IthacaError):
    """A pushed tensor was written before the call had waited for its push. Looked for in sanitize mode."""


class CertificateError(IthacaError):
    """A backend broke its promise, or its result is wrong, in a way that no other error names."""


class SlotRaceError(IthacaError):
    """Two accesses of a slot, one of them a write, that nothing orders. Found by `ithaca.verify.explore`."""


class DeadlockError(IthacaError):
    """Simulated ranks that all wait for one another. Found by `ithaca.verify.explore`."""


class RankFailedError(IthacaError):
    """A rank started by `run_ranks` raised, died or ran out of time."""
