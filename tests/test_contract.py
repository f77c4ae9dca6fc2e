"""The ownership contract: whose promise counts, and what happens to those that break it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from bad_backends import (
    KeepsView,
    KeepsViewOfView,
    LeavesGarbage,
    RecordsStream,
    ReturnsV,
    SavesForBackward,
    WritesQ,
)
from cases import NhdBackend, mine, one_rank, qkv
from conftest import Run
from torch import Tensor

from ithaca import (
    AliasedOutputError,
    AttentionBackend,
    Capabilities,
    ExchangeClosedError,
    IthacaError,
    Lane,
    MutatedInputError,
    PeerRefusedError,
    PlanMismatchError,
    RecordedStreamError,
    RetainedInputError,
    SdpaBackend,
    StaleSlotError,
    UlyssesAttention,
    exchange_for,
    run_ranks,
)
from ithaca.backends.interface import borrows
from ithaca.exchange import slots
from ithaca.exchange.peer_memory.interface import Signal

CPU = torch.device("cpu")


# -- the promise ---------------------------------------------------------------------------------------------------


class Says(SdpaBackend):
    """A subclass that says it again."""

    @property
    def capabilities(self) -> Capabilities:
        return replace(super().capabilities, accepts_unowned_inputs=True)


class SaysOther(SdpaBackend):
    """A subclass that says something, but not that."""

    @property
    def capabilities(self) -> Capabilities:
        return replace(super().capabilities, masks=False)


class Configured(SdpaBackend):
    """Accepts with one of its kernels only."""

    def __init__(self, kernel: str) -> None:
        super().__init__()
        self.kernel = kernel

    @property
    def capabilities(self) -> Capabilities:
        return replace(super().capabilities, accepts_unowned_inputs=self.kernel == "careful")


class Wrapper(AttentionBackend):
    """Lends its inner backend's promise to a kernel of its own."""

    def __init__(self, inner: AttentionBackend) -> None:
        self.inner = inner

    @property
    def capabilities(self) -> Capabilities:
        return self.inner.capabilities

    def forward(self, *args: Tensor, **options: Any) -> Tensor:
        return self.inner.forward(*args, **options)


class Editor(Wrapper):
    """Lends it through `replace`."""

    @property
    def capabilities(self) -> Capabilities:
        return replace(self.inner.capabilities, masks=False)


def compiled() -> SdpaBackend:
    backend = SdpaBackend()
    backend.forward = torch.compile(backend.forward)  # type: ignore[method-assign]
    return backend


@pytest.mark.fast
@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (SdpaBackend, True),
        (Says, True),
        (lambda: Configured("careful"), True),
        (lambda: Configured("fast"), False),
        (type("Silent", (SdpaBackend,), {}), False),
        (SaysOther, False),
        (NhdBackend, False),
        (lambda: Wrapper(SdpaBackend()), False),
        (lambda: Editor(SdpaBackend()), False),
        (compiled, False),
    ],
    ids=["itself", "again", "config", "other config", "silent", "other", "default", "wrapper", "editor", "compiled"],
)
def test_only_ones_own_explicit_promise_counts(make: Callable[[], AttentionBackend], expected: bool) -> None:
    assert borrows(make(), CPU) is expected


@pytest.mark.fast
def test_a_replaced_forward_takes_the_promise_back(monkeypatch: pytest.MonkeyPatch) -> None:
    assert borrows(SdpaBackend(), CPU)
    monkeypatch.setattr(SdpaBackend, "forward", lambda self, q, k, v, **options: v)
    assert not borrows(SdpaBackend(), CPU)


@pytest.mark.fast
def test_the_cuda_allocator_is_part_of_the_decision(monkeypatch: pytest.MonkeyPatch) -> None:
    for allocator, expected in (("native", True), ("cudaMallocAsync", False)):
        monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda a=allocator: a)
        assert borrows(SdpaBackend(), torch.device("cuda")) is expected


# -- generations ---------------------------------------------------------------------------------------------------


def signals_without_writing(rank: int) -> tuple[str, str]:
    """From its third call on, rank 1 tells rank 0 that V has arrived, and has not written it."""
    attn = UlyssesAttention(SdpaBackend(), exchange="slots", sanitize=True)
    memory: Any = attn.exchange
    memory = memory.memory
    pieces = [mine(t, (3, 5), rank) for t in qkv(8, 8, heads=4)]
    write = slots._SlotCall._write

    def skipping(call: slots._SlotCall, lane: Lane, tensor: Tensor) -> Any:
        if lane.role != "v" or call._header.call < 3:
            yield from write(call, lane, tensor)
        else:
            call.lanes.append(lane)
            call._due.append((lane, (0, 1)))
            yield call._expect(Signal.CREDIT, lane, (0, 1), "a credit")
            memory.signal(Signal.ARRIVED, lane.role, (0, 1))

    if rank == 1:
        slots._SlotCall._write = skipping  # type: ignore[method-assign, assignment]
    try:
        for _ in range(3):
            attn(*pieces)
    except IthacaError as error:
        return type(error).__name__, str(error)
    return "nothing", ""


@pytest.mark.full
def test_a_stamp_tells_a_signal_without_a_write() -> None:
    caught = run_ranks(signals_without_writing, 2)
    assert all(name == StaleSlotError.__name__ for name, _ in caught) or "gave up" in str(caught)
    stale = [text for name, text in caught if name == StaleSlotError.__name__]
    assert stale and "lane v was required to hold what rank 1 wrote in call 3; its stamp says call 2" in stale[0]


def sanitizes_alone(rank: int) -> str:
    attn = UlyssesAttention(SdpaBackend(), exchange="slots", sanitize=rank == 0)
    with pytest.raises(PlanMismatchError, match="sanitized") as raised:
        attn(*(mine(t, (3, 5), rank) for t in qkv(8, 8, heads=4)))
    return str(raised.value)


@pytest.mark.full
def test_all_ranks_sanitize_or_none_does(on_ranks: Run) -> None:
    on_ranks(2, sanitizes_alone)


# -- those that break it -------------------------------------------------------------------------------------------


def misbehaves(rank: int, kind: type[SdpaBackend], exchange: str, sanitize: bool = False) -> tuple[str, str]:
    """Rank 1 has the bad backend. What each rank gets, and whether the exchange goes on or says that it does not."""
    pieces = [mine(t, (3, 5), rank) for t in qkv(8, 8, heads=4)]
    good = UlyssesAttention(SdpaBackend(), exchange=exchange)
    expected = good(*pieces)
    bad = UlyssesAttention(kind() if rank else SdpaBackend(), exchange=exchange, sanitize=sanitize)
    try:
        bad(*pieces)
        caught = ("nothing", "")
    except Exception as error:
        caught = (type(error).__name__, str(error))
    try:
        assert torch.equal(good(*pieces), expected)
    except ExchangeClosedError as closed:
        return caught[0], caught[1] + " | " + str(closed)
    return caught


@pytest.mark.full
@pytest.mark.parametrize(
    ("kind", "lane"), [(KeepsView, "k"), (KeepsViewOfView, "v"), (SavesForBackward, "q")], ids=lambda x: str(x)
)
def test_keeping_an_input_is_an_error_that_names_the_backend_and_the_lane(kind: type[SdpaBackend], lane: str) -> None:
    other, bad = run_ranks(misbehaves, 2, kind, "slots")
    assert bad[0] == RetainedInputError.__name__
    assert f"{kind.__name__} was required to let go" in bad[1] and f"still holds {lane}," in bad[1]
    assert "closed by an earlier error: RetainedInputError" in bad[1]
    assert other[0] == ExchangeClosedError.__name__ and "rank 1 gave up" in other[1]


@pytest.mark.full
def test_returning_an_input_is_an_error_and_the_exchange_goes_on() -> None:
    other, bad = run_ranks(misbehaves, 2, ReturnsV, "slots")
    assert bad[0] == AliasedOutputError.__name__ and "ReturnsV" in bad[1] and "slot of v" in bad[1]
    assert other[0] == PeerRefusedError.__name__ and "AliasedOutputError" in other[1]
    assert "closed" not in bad[1] + other[1]


def leaves_garbage(rank: int) -> tuple[int, float]:
    attn = UlyssesAttention(LeavesGarbage(), exchange="slots")
    whole = qkv(8, 8, heads=4)
    out = attn(*(mine(t, (3, 5), rank) for t in whole))
    difference = float((out - mine(one_rank(*whole), (3, 5), rank)).abs().max())
    return attn.exchange.counters.leases_collected, difference


@pytest.mark.full
def test_garbage_is_a_counted_warning() -> None:
    for collected, difference in run_ranks(leaves_garbage, 2):
        assert collected == 1 and difference < 1e-5


@pytest.mark.full
@pytest.mark.parametrize(
    ("kind", "error", "words"),
    [
        (
            WritesQ,
            MutatedInputError,
            "WritesQ was required to leave its inputs as they are; it wrote into the slot of q",
        ),
        (RecordsStream, RecordedStreamError, "RecordsStream recorded a stream on the slot of k"),
    ],
)
def test_sanitize_mode_sees_writes_and_stream_records(kind: type[SdpaBackend], error: type, words: str) -> None:
    other, bad = run_ranks(misbehaves, 2, kind, "slots", True)
    assert bad[0] == error.__name__ and words in bad[1] and "closed" not in bad[1]
    assert other[0] == PeerRefusedError.__name__ and words in other[1]


def poisoned(rank: int, exchange: str, accepts: bool) -> None:
    attn = UlyssesAttention(NhdBackend(accepts), exchange=exchange, sanitize=True)
    whole = qkv(8, 8, heads=4)
    for _ in range(3):
        out = attn(*(mine(t, (3, 5), rank) for t in whole))
        torch.testing.assert_close(out, mine(one_rank(*whole), (3, 5), rank), rtol=0, atol=1e-5)
    memory: Any = attn.exchange
    for role in ("q", "k", "v", *(["out"] if exchange == "slots" else [])):
        slot = memory.memory.slot(rank, role, 64) if exchange == "slots" else memory._buffers[f"receive {role}"]
        assert slot[:64].view(torch.float32).isnan().all()


@pytest.mark.full
@pytest.mark.parametrize("accepts", [True, False])
@pytest.mark.parametrize("exchange", ["slots", "collective"])
def test_sanitize_mode_poisons_released_slots(on_ranks: Run, exchange: str, accepts: bool) -> None:
    on_ranks(2, poisoned, exchange, accepts)


def overwritten(rank: int, sanitize: bool) -> str:
    """A caller that uses one buffer for V and then for Q: both pushed, neither waited for."""
    attn = UlyssesAttention(SdpaBackend(), exchange=exchange_for(want="slots", copy="inline"), sanitize=sanitize)
    q, k, v = (mine(t, (3, 5), rank) for t in qkv(8, 8, heads=4))
    buffer = torch.empty_like(v)
    try:
        attn.forward_async(lambda: buffer.copy_(q), lambda: k, lambda: buffer.copy_(v))
    except IthacaError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


@pytest.mark.full
def test_sanitize_mode_sees_a_source_that_is_overwritten() -> None:
    for rank, caught in enumerate(run_ranks(overwritten, 2, True)):
        assert caught.startswith(f"MutatedSourceError: rank {rank}: lane v was required to stay"), caught
