"""How ranks agree on a call before a byte of it moves: one fixed-size header each, judged alike by all.

Every rank reads the headers of all ranks and runs the same pure function over them, so the verdict is the same
everywhere: either all go on with the same lanes, or all raise. A header can also carry a refusal, which is how a
rank whose own input is bad, or whose closure raised, tells the others.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache

import torch

from ithaca.errors import CorruptHeaderError, PeerRefusedError, PlanMismatchError
from ithaca.geometry import Layout, Span, Splits, Text
from ithaca.plan import Lane
from ithaca.version import __version__

HEADER_NBYTES = 1280
#: Q, K, V, five gates and a mask.
MAX_LANES = 9
ROLE_NBYTES = 16
ORDER_NBYTES = MAX_LANES * (ROLE_NBYTES + 1)
TERMS_NBYTES = 224

#: What an exchange can carry; the place in this table is what travels.
DTYPES = (
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float64,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.uint8,
    torch.int8,
    torch.int32,
    torch.int64,
    torch.bool,
)

_MAGIC = b"ITHC"
_FIXED = struct.Struct(
    f"<4s16sqqBB16s{ORDER_NBYTES}s{TERMS_NBYTES}s"
)  # magic, version, call, step, lanes, gathered, digest, order, terms
_CLAIM = struct.Struct(
    f"<{ROLE_NBYTES}sBBBB4q"
)  # role, dtype, layout, what it stands for (one up, zero for itself), grad, shape
_REFUSAL_NBYTES = HEADER_NBYTES - _FIXED.size - MAX_LANES * _CLAIM.size
LARGEST_DIM = 2**40
#: Of one tensor: what an address can tell apart.
LARGEST_NBYTES = 2**47


@dataclass(frozen=True)
class Claim:
    """What one rank says of its own tensor of one lane: the NHD shape ``[B, S_local, H, D]`` and how it wants it.

    ``stands_for``: of bytes, the dtype that they are a packed form of. ``grad``: whether it requires a gradient, which
    takes calls of all ranks.
    """

    role: str
    dtype: torch.dtype
    layout: Layout
    shape: tuple[int, ...]
    stands_for: torch.dtype | None = None
    grad: bool = False

    def __str__(self) -> str:
        kind = str(self.dtype).removeprefix("torch.")
        if self.stands_for is not None:
            kind += f" for {str(self.stands_for).removeprefix('torch.')}"
        kind += " that requires grad" if self.grad else ""
        return f"{self.role} {list(self.shape)} {kind} into {self.layout.value}"


@dataclass(frozen=True)
class Header:
    """What one rank says before one step of a call.

    ``order`` is the issue order of the whole call, ``terms`` whatever else must be equal on all ranks (scale, mask),
    ``gathered`` whether every rank gets all heads, ``digest`` that of the call plan where one is known, and
    ``refusal`` why this rank won't go on ("" if it will). ``wanted`` is not said: it follows from what is.
    """

    call: int
    step: int
    order: tuple[str, ...]
    claims: tuple[Claim, ...] = ()
    gathered: bool = False
    terms: str = ""
    digest: bytes = bytes(16)
    refusal: str = ""
    version: str = __version__
    #: What every rank holds of each lane beside its own.
    text: Text = field(default=Text(), compare=False, repr=False)
    #: For each claim, the heads that each rank wants.
    wanted: tuple[tuple[Span, ...], ...] = field(default=(), compare=False, repr=False)

    def refused(self, reason: str) -> Header:
        return replace(self, claims=(), wanted=(), digest=bytes(16), refusal=reason or "no reason given")

    def __str__(self) -> str:
        lanes = ", ".join(map(str, self.claims)) or (
            f"out of plan {self.digest.hex()}" if any(self.digest) else "no lane"
        )
        return f"{lanes} (call {self.call} step {self.step}, order {'-'.join(self.order)}, {self.terms or 'no terms'})"

    def encode(self) -> bytes:
        """The fixed-size form. Made once: it is sent, and held against what the peers send."""
        return self._encoded

    @cached_property
    def _encoded(self) -> bytes:
        fixed = _FIXED.pack(
            _MAGIC,
            _clip(self.version, 16),
            self.call,
            self.step,
            len(self.claims),
            self.gathered,
            self.digest,
            _clip(",".join(self.order), ORDER_NBYTES),
            _clip(self.terms, TERMS_NBYTES),
        )
        claims = b"".join(
            _CLAIM.pack(
                _clip(c.role, ROLE_NBYTES),
                DTYPES.index(c.dtype),
                c.layout is Layout.HND,
                0 if c.stands_for is None else 1 + DTYPES.index(c.stands_for),
                c.grad,
                *c.shape,
            )
            for c in self.claims
        )
        return (
            fixed
            + claims.ljust(MAX_LANES * _CLAIM.size, b"\0")
            + _clip(self.refusal, _REFUSAL_NBYTES).ljust(_REFUSAL_NBYTES, b"\0")
        )

    @classmethod
    def decode(cls, data: bytes, rank: int) -> Header:
        """Read a header that came from ``rank``; whatever it holds, the result is valid or an error is raised."""

        def broken(what: str) -> CorruptHeaderError:
            return CorruptHeaderError(f"rank {rank} was required to send an Ithaca header; received {what}")

        if len(data) != HEADER_NBYTES:
            raise broken(f"{len(data)} bytes in place of {HEADER_NBYTES}")
        magic, version, call, step, lanes, gathered, digest, order, terms = _FIXED.unpack_from(data)
        if magic != _MAGIC:
            raise broken(f"the magic {magic!r}")
        if lanes > MAX_LANES:
            raise broken(f"{lanes} lanes, more than {MAX_LANES}")
        claims = []
        for i in range(lanes):
            role, dtype, layout, packed, grad, *shape = _CLAIM.unpack_from(data, _FIXED.size + i * _CLAIM.size)
            if (
                max(dtype, packed - 1) >= len(DTYPES)
                or max(layout, grad) > 1
                or not all(0 <= size <= LARGEST_DIM for size in shape)
            ):
                raise broken(f"dtype {dtype}, layout {layout}, shape {shape}")
            stands_for = DTYPES[packed - 1] if packed else None
            into = Layout.HND if layout else Layout.NHD
            claims.append(Claim(_text(role), DTYPES[dtype], into, tuple(shape), stands_for, bool(grad)))
        return cls(
            call=call,
            step=step,
            order=tuple(_text(order).split(",")),
            claims=tuple(claims),
            gathered=bool(gathered),
            terms=_text(terms),
            digest=digest,
            refusal=_text(data[-_REFUSAL_NBYTES:]),
            version=_text(version),
        )


def settle(headers: Sequence[Header], rank: int) -> tuple[Lane, ...]:
    """The lanes that the ranks agree on, or the error that every rank raises.

    ``headers[r]`` is rank ``r``'s; ``rank`` is the one that asks, and only colours the message.
    """
    refusals = [f"rank {r} refused: {header.refusal}" for r, header in enumerate(headers) if header.refusal]
    if refusals:
        raise PeerRefusedError(f"call {headers[rank].call}, seen from rank {rank}: {'; '.join(refusals)}")
    first = headers[0]
    if any(header is not first for header in headers) and len({_common(header) for header in headers}) > 1:
        said = "; ".join(
            f"rank {r} sent {header}" + (f" from Ithaca {header.version}" if header.version != __version__ else "")
            for r, header in enumerate(headers)
        )
        raise PlanMismatchError(
            f"all ranks were required to enter the same call, alike but for their number of tokens; "
            f"received, on rank {rank}: {said}"
        )
    return _lanes(tuple(header.claims for header in headers), headers[rank].wanted, headers[rank].text)


def _common(header: Header) -> tuple[object, ...]:
    """The part of a header that must be equal on all ranks: all but the number of local tokens."""
    claims = tuple((c.role, c.dtype, c.stands_for, c.grad, c.layout, c.shape[0], c.shape[2:]) for c in header.claims)
    return header.version, header.call, header.step, header.order, header.gathered, header.terms, header.digest, claims


@lru_cache(maxsize=1024)
def _lanes(claims: tuple[tuple[Claim, ...], ...], wanted: tuple[tuple[Span, ...], ...], text: Text) -> tuple[Lane, ...]:
    lanes = []
    for of_lane, spans in zip(zip(*claims, strict=True), wanted, strict=True):
        claim = of_lane[0]
        batch, _, heads, head_dim = claim.shape
        # A peer that says less is no peer of this plan: its output's digest will not be this one's.
        tokens = Splits(tuple(max(0, c.shape[1] - text.tokens) for c in of_lane))
        lanes.append(Lane.inward(claim.role, claim.dtype, claim.layout, batch, head_dim, tokens, heads, spans, text))
    return tuple(lanes)


def clipped(terms: str) -> str:
    """``terms`` as a header carries them: a rank's own must read like those of its peers.

    Where they are too long, or would not arrive as they are, a digest of all of them takes the place of the rest.
    """
    if _text(_clip(terms, TERMS_NBYTES)) == terms:
        return terms
    end = f"... {hashlib.blake2b(terms.encode(errors='backslashreplace'), digest_size=8).hexdigest()}"
    return _text(_clip(terms, TERMS_NBYTES - len(end) - 2)) + end  # half a character is replaced by two bytes more


def _clip(text: str, nbytes: int) -> bytes:
    return text.encode(errors="backslashreplace")[:nbytes]


def _text(data: bytes) -> str:
    return data.rstrip(b"\0").decode(errors="replace")
