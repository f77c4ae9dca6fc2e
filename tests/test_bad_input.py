"""A fault on any rank is an error on every rank, in time, that says what and where; and the next good call is right."""

from __future__ import annotations

import re
import time
from collections.abc import Callable

import pytest
import torch
from cases import RaisingBackend, mine, one_rank, qkv
from conftest import Run
from torch import Tensor

from ithaca import (
    AttentionBackend,
    ClosureError,
    InvalidInputError,
    IthacaError,
    PeerDiedError,
    PeerRefusedError,
    PlanMismatchError,
    SdpaBackend,
    UlyssesAttention,
    UnsupportedError,
)

pytestmark = pytest.mark.full

SIZES = (3, 5)
Tensors = list[Tensor]
Fault = Callable[[int, Tensors], object]


def boom() -> Tensor:
    raise ValueError("boom")


def raises(error: Exception) -> Callable[[], Tensor]:
    def compute() -> Tensor:
        raise error

    return compute


class Elsewhere(SdpaBackend):
    """Returns its output on another device."""

    def forward(self, *args: Tensor, **options: object) -> Tensor:
        return super().forward(*args, **options).to("meta")  # type: ignore[arg-type]


def shaped(*change: int) -> Fault:
    """The fault of rank 1 passing ``[B, S, H, D]`` with sizes added to by ``change`` in q, k and v alike."""

    def fault(rank: int, t: Tensors) -> object:
        if rank == 0:
            return attend(t)
        return attend([torch.zeros([size + more for size, more in zip(x.shape, change, strict=True)]) for x in t])

    return fault


def attend(t: Tensors, **options: object) -> Tensor:
    return ATTN[0](*t, **options)  # type: ignore[arg-type]


def attend_async(t: Tensors, **options: object) -> Tensor:
    closures = [x if callable(x) else (lambda x=x: x) for x in t]
    return ATTN[0].forward_async(*closures, **options)  # type: ignore[arg-type]


def on_one(fault: Callable[[Tensors], object]) -> Fault:
    """Rank 1 has the fault; rank 0 makes a good call."""
    return lambda rank, t: fault(t) if rank == 1 else attend_async(t)


def nested(t: Tensors) -> object:
    return attend_async([lambda: ATTN[0](*t), t[1], t[2]])  # type: ignore[list-item]


def with_backend(backend: AttentionBackend, t: Tensors, **options: object) -> Tensor:
    return UlyssesAttention(backend, exchange=ATTN[0].exchange)(*t, **options)  # type: ignore[arg-type]


class NoMasks(SdpaBackend):
    @property
    def capabilities(self):  # type: ignore[no-untyped-def]
        from dataclasses import replace

        return replace(super().capabilities, masks=False)


#: What goes wrong, and the error of rank 0 and of rank 1 with a word that must be in each.
Kind = type[IthacaError] | tuple[type[IthacaError], ...]
FAULTS: dict[str, tuple[Fault, Kind, str, Kind, str]] = {
    "3-D on rank 1": (
        on_one(lambda t: attend_async([t[0], t[1], t[2][0]])),
        PeerRefusedError,
        r"rank 1 refused: InvalidInputError: rank 1: v was required to be \[B, S_local, H, D\]; received \[5, 4, 16\]",
        InvalidInputError,
        r"received \[5, 4, 16\]",
    ),
    "k of another batch": (
        on_one(lambda t: attend_async([t[0], torch.cat([t[1]] * 2), t[2]])),
        PeerRefusedError,
        "rank 1 refused: InvalidInputError: rank 1: k was required to be",
        InvalidInputError,
        r"k was required to be \[1, 5, 4, 16\]",
    ),
    "q of another head dim": (
        on_one(lambda t: attend_async([t[0][..., :8], t[1], t[2]])),
        PlanMismatchError,
        r"rank 1 sent q \[1, 5, 4, 8\]",
        (PlanMismatchError, InvalidInputError),  # of q at once, or of k if that is computed before peers answer
        r"rank 0 sent q \[1, 3, 4, 16\]|k was required to be",
    ),
    "v of another length than k": (
        on_one(lambda t: attend_async([t[0], t[1][:, :2], t[2]])),
        PeerRefusedError,
        "rank 1 refused",
        InvalidInputError,
        "k was required",
    ),
    "mixed dtypes": (
        on_one(lambda t: attend_async([t[0].double(), t[1], t[2]])),
        PeerRefusedError,
        "float64",
        InvalidInputError,
        "float64",
    ),
    "a dtype that the backend can't take": (
        lambda rank, t: attend([x.to(torch.int32) for x in t]),
        UnsupportedError,
        "SdpaBackend was required to attend in torch.int32",
        UnsupportedError,
        "int32",
    ),
    "a device that slots can't carry": (
        on_one(lambda t: attend([x.to("meta") for x in t])),
        PeerRefusedError,
        "meta",
        UnsupportedError,
        "meta",
    ),
    "not a tensor": (
        on_one(lambda t: attend_async([t[0], t[1], lambda: "v"])),  # type: ignore[list-item]
        PeerRefusedError,
        "compute_v was required to return a tensor; received str",
        ClosureError,
        "received str",
    ),
    "first closure raises": (
        on_one(lambda t: attend_async([t[0], t[1], boom])),  # type: ignore[list-item]
        PeerRefusedError,
        "rank 1 refused: ClosureError: rank 1: compute_v raised ValueError: boom",
        ClosureError,
        "compute_v raised ValueError: boom",
    ),
    "last closure raises": (
        on_one(lambda t: attend_async([t[0], boom, t[2]])),  # type: ignore[list-item]
        PeerRefusedError,
        "compute_k raised ValueError: boom",
        ClosureError,
        "compute_k raised ValueError: boom",
    ),
    "closures raise on both": (
        lambda rank, t: attend_async([t[0], boom, t[2]]),  # type: ignore[list-item]
        ClosureError,
        "compute_k",
        ClosureError,
        "compute_k",
    ),
    "backend raises": (
        lambda rank, t: with_backend(RaisingBackend(here=rank == 1), t),
        PeerRefusedError,
        "rank 1 refused: ClosureError: rank 1: RaisingBackend raised RuntimeError: kernel on fire",
        ClosureError,
        "kernel on fire",
    ),
    "other heads": (shaped(0, 0, 1, 0), PlanMismatchError, r"rank 1 sent .*5, 5, 16", PlanMismatchError, "rank 0 sent"),
    "other batch": (shaped(1, 0, 0, 0), PlanMismatchError, r"rank 1 sent .*\[2, 5", PlanMismatchError, "rank 0 sent"),
    "other head dim": (shaped(0, 0, 0, 1), PlanMismatchError, "5, 4, 17", PlanMismatchError, "rank 0 sent"),
    "other dtype": (
        lambda rank, t: attend([x.double() if rank else x for x in t]),
        PlanMismatchError,
        "rank 0 sent .*float32.*rank 1 sent .*float64",
        PlanMismatchError,
        "rank 0 sent .*float32.*rank 1 sent .*float64",
    ),
    "other scale": (
        lambda rank, t: attend(t, scale=0.5 if rank else None),
        PlanMismatchError,
        "scale 0.5",
        PlanMismatchError,
        "scale None",
    ),
    "other order": (
        lambda rank, t: attend_async(t, issue_order=("q", "k", "v") if rank else ("v", "q", "k")),
        PlanMismatchError,
        "order v-q-k.*order q-k-v",
        PlanMismatchError,
        "order v-q-k.*order q-k-v",
    ),
    "two lanes swapped": (
        lambda rank, t: attend_async(t, issue_order=("k", "v", "q") if rank else ("v", "k", "q")),
        PlanMismatchError,
        "rank 0 sent v.*rank 1 sent k",
        PlanMismatchError,
        "rank 0 sent v.*rank 1 sent k",
    ),
    "sync here, async there": (
        lambda rank, t: attend(t) if rank else attend_async(t, issue_order=("q", "k", "v")),
        PlanMismatchError,
        "rank 1 sent v .*, q .*, k ",
        PlanMismatchError,
        "rank 0 sent q",
    ),
    "no such order": (
        on_one(lambda t: attend_async(t, issue_order=("q", "k", "k"))),
        PeerRefusedError,
        "permutation",
        InvalidInputError,
        "permutation",
    ),
    "a mask of another shape": (
        lambda rank, t: attend(t, mask=torch.ones(1, 7 + rank, dtype=torch.bool)),
        PlanMismatchError,
        r"mask bool\[1, 8\]",
        PlanMismatchError,
        r"mask bool\[1, 7\]",
    ),
    "a mask of a wrong length": (
        lambda rank, t: attend(t, mask=torch.ones(1, 7, dtype=torch.bool)),
        InvalidInputError,
        r"a mask was required to be \[1, 8\]",
        InvalidInputError,
        r"received \[1, 7\]",
    ),
    "a backend without masks": (
        lambda rank, t: with_backend(NoMasks(), t, mask=torch.ones(1, 8, dtype=torch.bool)),
        UnsupportedError,
        "NoMasks takes no mask",
        UnsupportedError,
        "NoMasks takes no mask",
    ),
    "a gradient that one rank requires": (
        on_one(lambda t: attend_async([x.requires_grad_() for x in t])),
        PlanMismatchError,
        "rank 1 sent .* that requires grad",
        PlanMismatchError,
        "rank 1 sent .* that requires grad",
    ),
    "a gradient through bytes": (
        on_one(lambda t: attend([x.requires_grad_() for x in t], compress="int8")),
        PeerRefusedError,
        "sent as bytes have no backward",
        UnsupportedError,
        "v requires grad, and lanes that are sent as bytes have no backward",
    ),
    "a call inside a closure": (
        on_one(nested),
        PeerRefusedError,
        "one call at a time was required of a group",
        InvalidInputError,
        "this one began inside another",
    ),
    "project_out raises": (  # the exchange is over by then: no peer waits for anything
        torch.no_grad()(lambda rank, t: attend_async(t, project_out=lambda heads: boom() if rank else heads * 1)),
        (),
        "",
        ClosureError,
        "rank 1: project_out raised ValueError: boom",
    ),
    "a mask that is a list": (
        on_one(lambda t: attend_async(t, mask=[True] * 8)),
        PeerRefusedError,
        "mask was required to be a tensor or None",
        InvalidInputError,
        "received list",
    ),
    "no order at all": (
        on_one(lambda t: attend_async(t, issue_order=7)),
        PeerRefusedError,
        "permutation",
        InvalidInputError,
        "received 7",
    ),
    "an order of numbers": (
        on_one(lambda t: attend_async(t, issue_order=(1, 2, 3))),
        PeerRefusedError,
        "permutation",
        InvalidInputError,
        "rank 1: issue_order",
    ),
    "an error that is no text": (
        on_one(lambda t: attend_async([t[0], raises(ValueError("\udcff")), t[2]])),  # type: ignore[list-item]
        PeerRefusedError,
        "udcff",
        ClosureError,
        "compute_k raised ValueError",
    ),
    "a verdict of somebody else": (
        on_one(lambda t: attend_async([t[0], raises(PlanMismatchError("other group")), t[2]])),  # type: ignore[list-item]
        PeerRefusedError,
        "rank 1 refused: PlanMismatchError: other group",
        PlanMismatchError,
        "other group",
    ),
    "a death in somebody else's group": (
        on_one(lambda t: attend_async([raises(PeerDiedError("other group")), t[1], t[2]])),  # type: ignore[list-item]
        PeerRefusedError,
        "rank 1 refused: PeerDiedError: other group",
        PeerDiedError,
        "other group",
    ),
    "an output elsewhere": (
        lambda rank, t: with_backend(Elsewhere() if rank else SdpaBackend(), t),
        PeerRefusedError,
        "rank 1 refused: UnsupportedError.*meta",
        UnsupportedError,
        "meta",
    ),
    "project_out returns a view, on both": (
        torch.no_grad()(lambda rank, t: attend_async(t, project_out=lambda heads: heads[:, 1:])),
        ClosureError,
        "received a view of its argument",
        ClosureError,
        "received a view of its argument",
    ),
}

ATTN: list[UlyssesAttention] = []


def with_fault(rank: int, exchange: str, name: str) -> tuple[str, str, float]:
    ATTN[:] = [UlyssesAttention(SdpaBackend(), exchange=exchange)]
    whole = qkv(8, 8, heads=4)
    good = [mine(t, SIZES, rank) for t in whole]
    expected = mine(one_rank(*whole), SIZES, rank)
    torch.testing.assert_close(attend(good), expected, rtol=0, atol=1e-5)
    started = time.monotonic()
    try:
        FAULTS[name][0](rank, [t.clone() for t in good])
    except IthacaError as error:
        caught = (type(error).__name__, str(error), time.monotonic() - started)
    else:
        caught = ("nothing", "", 0.0)
    for _ in range(2):
        torch.testing.assert_close(attend(good), expected, rtol=0, atol=1e-5)
        torch.testing.assert_close(attend_async(good), expected, rtol=0, atol=1e-5)
    return caught


@pytest.mark.parametrize("name", FAULTS)
@pytest.mark.parametrize("exchange", ["slots", "collective"])
def test_a_fault_reaches_every_rank(on_ranks: Run, exchange: str, name: str) -> None:
    _, kind0, word0, kind1, word1 = FAULTS[name]
    for (caught, message, _), kind, word in zip(
        on_ranks(2, with_fault, exchange, name), (kind0, kind1), (word0, word1), strict=True
    ):
        allowed = kind if isinstance(kind, tuple) else (kind,)
        assert caught in ([each.__name__ for each in allowed] or ["nothing"]), message
        assert not allowed or "rank" in message or name.startswith(("a verdict", "a death")), "it says on which rank"
        assert re.search(word, message), message
