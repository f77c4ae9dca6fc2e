"""Ithaca: attention across many devices, asynchronous, zero-copy, owned by contract. The public API, whole."""

from ithaca.backends.interface import AttentionBackend, Capabilities
from ithaca.backends.sdpa import SdpaBackend
from ithaca.diffusers import parallelize
from ithaca.errors import (
    AliasedOutputError,
    CertificateError,
    ClosureError,
    CorruptHeaderError,
    DeadlockError,
    ExchangeClosedError,
    ExchangeUnavailableError,
    GrowthError,
    InvalidInputError,
    IthacaError,
    LeaseError,
    MutatedInputError,
    MutatedSourceError,
    PeerDiedError,
    PeerRefusedError,
    PeerTimeoutError,
    PlanMismatchError,
    RankFailedError,
    RecordedStreamError,
    RetainedInputError,
    SlotRaceError,
    StaleSlotError,
    UnsupportedError,
)
from ithaca.exchange.choice import exchange_for
from ithaca.exchange.interface import Exchange
from ithaca.exchange.lease import Lease
from ithaca.geometry import Layout, Splits
from ithaca.launch import RankPool, run_ranks
from ithaca.plan import CallPlan, Lane
from ithaca.strategies.options import CallOptions
from ithaca.strategies.ulysses import UlyssesAttention
from ithaca.version import __version__

__all__ = [
    # one attention layer across ranks
    "UlyssesAttention",
    "CallOptions",
    "parallelize",
    "run_ranks",
    "RankPool",
    # attention on one rank
    "AttentionBackend",
    "Capabilities",
    "SdpaBackend",
    # between ranks
    "exchange_for",
    "Exchange",
    "Lease",
    # who holds what
    "CallPlan",
    "Lane",
    "Layout",
    "Splits",
    # what can go wrong
    "IthacaError",
    "AliasedOutputError",
    "CertificateError",
    "ClosureError",
    "CorruptHeaderError",
    "DeadlockError",
    "ExchangeClosedError",
    "ExchangeUnavailableError",
    "GrowthError",
    "InvalidInputError",
    "LeaseError",
    "MutatedInputError",
    "MutatedSourceError",
    "PeerDiedError",
    "PeerRefusedError",
    "PeerTimeoutError",
    "PlanMismatchError",
    "RankFailedError",
    "RecordedStreamError",
    "RetainedInputError",
    "SlotRaceError",
    "StaleSlotError",
    "UnsupportedError",
    "__version__",
]
