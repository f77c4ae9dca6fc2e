"""Who reads the slots themselves, and who gets a copy; and that the test of it can fail."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from cases import mine, one_rank, qkv
from conftest import Run
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ithaca import (
    AttentionBackend,
    Capabilities,
    Layout,
    Lease,
    RankFailedError,
    UlyssesAttention,
    run_ranks,
)
from ithaca.strategies import call
from ithaca.strategies.call import AttentionCall, Request

pytestmark = pytest.mark.full


class Probe(AttentionBackend):
    """SDPA that notes what it was given. ``accepts`` None leaves the promise at its default."""

    def __init__(self, layout: Layout, accepts: bool | None) -> None:
        self.layout, self.accepts = layout, accepts
        self.lengths: list[tuple[int, int]] = []
        self.values: list[list[Tensor]] = []
        self.pointers: list[list[int]] = []

    @property
    def capabilities(self) -> Capabilities:
        plain = Capabilities(self.layout, frozenset({torch.float32}), gates=frozenset({"compress", "fine"}))
        return plain if self.accepts is None else replace(plain, accepts_unowned_inputs=self.accepts)

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        q_len: int,
        kv_len: int,
        gates: Mapping[str, Tensor] | None = None,
        **options: Any,
    ) -> Tensor:
        inputs = [q, k, v, *(gates or {}).values()]
        self.lengths.append((q_len, kv_len))
        self.values.append([t.clone() for t in inputs])
        self.pointers.append([t.untyped_storage().data_ptr() for t in inputs])
        assert all(t.is_contiguous() for t in inputs)
        inputs.clear()
        if self.layout is Layout.HND:
            return torch.nn.functional.scaled_dot_product_attention(q, k, v)
        return one_rank(q, k, v)


class Heir(Probe):
    """A subclass that does not say it again."""


class FusedCopies(TorchDispatchMode):
    """Counts the fused copies that reach PyTorch's dispatcher."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten._foreach_copy_.default
        return func(*args, **(kwargs or {}))


#: id: layout, batch, accepts, cross-attention, class; and whether slots and the collective give a view.
CASES: dict[str, tuple[Layout, int, bool | None, bool, type[Probe], bool, bool]] = {
    "nhd-b1-optin-view": (Layout.NHD, 1, True, False, Probe, True, True),
    "nhd-b2-optin": (Layout.NHD, 2, True, False, Probe, True, False),
    "hnd-b1-optin": (Layout.HND, 1, True, False, Probe, True, False),
    "nhd-b1-cross-optin-view": (Layout.NHD, 1, True, True, Probe, True, True),
    "nhd-b1-default-copy": (Layout.NHD, 1, None, False, Probe, False, False),
    "nhd-b1-denied-copy": (Layout.NHD, 1, False, False, Probe, False, False),
    "nhd-b1-cross-denied-copy": (Layout.NHD, 1, False, True, Probe, False, False),
    "nhd-b1-gates-optin-view": (Layout.NHD, 1, True, False, Probe, True, True),
    "hnd-b2-gates-denied-copy": (Layout.HND, 2, False, True, Probe, False, False),
    "nhd-b1-subclass-copy": (Layout.NHD, 1, True, False, Heir, False, False),
}


def dispatched(rank: int, exchange: str, case: str) -> None:
    layout, batch, accepts, cross, kind, slots_view, collective_view = CASES[case]
    q_sizes, kv_sizes = ((3, 4), (5, 6)) if cross else ((3, 4), (3, 4))
    whole = qkv(sum(q_sizes), sum(kv_sizes), heads=4, batch=batch)
    roles = ["q", "k", "v"]
    sizes = [q_sizes, kv_sizes, kv_sizes]
    if "gates" in case:
        generator = torch.Generator().manual_seed(8)
        shapes = (batch, sum(q_sizes), 4, 16), (batch, sum(q_sizes), 4, 1)
        whole += tuple(torch.rand(shape, generator=generator) for shape in shapes)
        roles += ["gate.compress", "gate.fine"]
        sizes += [q_sizes, q_sizes]
    pieces = {role: mine(t, s, rank) for role, t, s in zip(roles, whole, sizes, strict=True)}
    order = ("q", "k", "v", *roles[3:]) if cross else ("v", *roles[3:], "q", "k")
    issued: list[str] = []

    def compute(role: str) -> Callable[[], Tensor]:
        return lambda: (issued.append(role), pieces[role])[1]

    backend = kind(layout, accepts)
    attn = UlyssesAttention(backend, exchange=exchange)
    for _ in range(2):  # the second call finds memory that has been used
        with FusedCopies() as fused:
            out = attn.forward_async(
                *(compute(role) for role in "qkv"),
                gates={role.removeprefix("gate."): compute(role) for role in roles[3:]},
                issue_order=order,
            )
        torch.testing.assert_close(out, mine(one_rank(*whole[:3]), q_sizes, rank), rtol=0, atol=1e-5)
    view = slots_view if exchange == "slots" else collective_view
    assert issued == list(order) * 2
    assert backend.lengths == [(sum(q_sizes), sum(kv_sizes))] * 2
    for seen in backend.values:
        for got, full in zip(seen, whole, strict=True):
            want = mine(full, (2, 2), rank, dim=2)
            assert torch.equal(got, want if layout is Layout.NHD else want.transpose(1, 2))
    # A view lies where the lane lies in every call; q, k and v in memory of their own.
    assert (backend.pointers[0] == backend.pointers[1]) >= view and len(set(backend.pointers[0])) == len(roles)
    slots = set(memory_of(attn, exchange, roles))
    assert all((pointer in slots) == view for pointer in backend.pointers[1])
    # Inputs: none for a view, else one for all lanes. The collective assembles its output, of any layout, in one more.
    assert fused.count == (not view) + (exchange == "collective")


def memory_of(attn: UlyssesAttention, exchange: str, roles: list[str]) -> list[int]:
    ex: Any = attn.exchange
    if exchange == "slots":
        return [ex.memory.slot(ex.rank, role, 1).untyped_storage().data_ptr() for role in roles]
    return [ex._buffers[f"receive {role}"].untyped_storage().data_ptr() for role in roles]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("exchange", ["slots", "collective"])
def test_dispatch(on_ranks: Run, exchange: str, case: str) -> None:
    on_ranks(2, dispatched, exchange, case)


# -- the tests of dispatch can fail ------------------------------------------------------------------------------------


def plant(fault: str) -> None:
    """Break the dispatch in this process."""
    attend, requested, own = AttentionCall._run, Request.of, Lease.own

    def reordered(change: Callable[[tuple[str, ...]], tuple[str, ...]]) -> None:
        Request.of = lambda *args: (asked := requested(*args)) and replace(asked, order=change(asked.order))  # type: ignore

    if fault == "default flipped":
        call.borrows = lambda backend, device: True
    elif fault == "lengths swapped":

        def swapped(self: AttentionCall, work: Any, *inputs: Any) -> Tensor:
            return attend(self, replace(work, q_len=work.kv_len, kv_len=work.q_len), *inputs)

        AttentionCall._run = swapped  # type: ignore[method-assign]
    elif fault == "order changed":
        reordered(lambda order: order[::-1])
    elif fault == "tail dropped":
        reordered(lambda order: order[:-1])
    elif fault == "copied twice":
        Lease.own = lambda self, **options: (own(self, **options), own(self, **options))[1]  # type: ignore[method-assign]
    else:
        assert fault == "none"


def planted(rank: int, fault: str, case: str) -> None:
    plant(fault)
    dispatched(rank, "slots", case)


@pytest.mark.parametrize(
    ("fault", "case"),
    [
        ("default flipped", "nhd-b1-default-copy"),
        ("lengths swapped", "nhd-b1-cross-optin-view"),
        ("order changed", "nhd-b1-optin-view"),
        ("tail dropped", "nhd-b1-optin-view"),
        ("copied twice", "nhd-b1-denied-copy"),
    ],
)
def test_a_planted_fault_turns_dispatch_red(fault: str, case: str) -> None:
    with pytest.raises(RankFailedError, match="Error"):
        run_ranks(planted, 2, fault, case)


def test_without_a_fault_it_is_green() -> None:
    run_ranks(planted, 2, "none", "nhd-b1-denied-copy")
