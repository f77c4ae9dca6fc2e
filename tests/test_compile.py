"""Attention across ranks inside ``torch.compile(fullgraph=True)``: order, lifetimes, faults, and few compilations."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._dynamo
from cases import GatedBackend, mine, one_rank, qkv
from conftest import Run
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch._inductor.utils import run_and_get_code
from torch.nn.functional import rms_norm

from ithaca import (
    InvalidInputError,
    IthacaError,
    PeerRefusedError,
    SdpaBackend,
    UlyssesAttention,
    exchange_for,
    run_ranks,
)
from ithaca.exchange.copy_stream import ThreadStream
from ithaca.strategies import compiled
from ithaca.strategies.request import Request

pytestmark = [pytest.mark.full, pytest.mark.timeout(300)]

HEADS, HEAD_DIM, FEATURES = 4, 8, 32


class Block(nn.Module):
    """Attention with norms, an output projection and a residual, as the blocks of a transformer have it."""

    def __init__(self, attn: UlyssesAttention, asynchronous: bool = True) -> None:
        super().__init__()
        self.attn, self.asynchronous = attn, asynchronous
        self.to_q, self.to_k, self.to_v, self.to_out = (nn.Linear(FEATURES, FEATURES) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        def heads(linear: nn.Module) -> Tensor:
            return linear(x).unflatten(-1, (HEADS, HEAD_DIM))

        def normed(linear: nn.Module) -> Tensor:
            return rms_norm(heads(linear), (HEAD_DIM,))

        def project_out(out: Tensor) -> Tensor:
            return self.to_out(out.flatten(2))

        if not self.asynchronous:
            return x + project_out(self.attn(normed(self.to_q), normed(self.to_k), heads(self.to_v)))
        return x + self.attn.forward_async(
            lambda: normed(self.to_q), lambda: normed(self.to_k), lambda: heads(self.to_v), project_out=project_out
        )


def model(attentions: list[UlyssesAttention], asynchronous: bool = True) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(Block(attn, asynchronous) for attn in attentions)).eval()


def four_layers(rank: int, exchange: str, copy: str, asynchronous: bool) -> None:
    torch._dynamo.reset()
    attn = UlyssesAttention(SdpaBackend(), exchange=exchange_for(want=exchange, copy=copy))
    layers = model([attn] * 4, asynchronous)
    counter = CompileCounterWithBackend("inductor")
    fast = torch.compile(layers, fullgraph=True, backend=counter)
    with torch.no_grad():
        for tokens in (6, 9, 13, 5, 8, 21, 34, 4):
            x = torch.randn(2, tokens + rank, FEATURES, generator=torch.Generator().manual_seed(tokens))
            torch.testing.assert_close(fast(x), layers(x), rtol=1e-5, atol=1e-5)
    assert counter.frame_count <= 2  # the first length, and all others
    ticks = int(compiled.THE_CLOCK)
    with torch.no_grad():
        fast(x)
    assert int(compiled.THE_CLOCK) - ticks == 4 * (5 if asynchronous else 1)  # none dropped, none twice


@pytest.mark.parametrize("asynchronous", [True, False], ids=["async", "sync"])
@pytest.mark.parametrize(("exchange", "copy"), [("slots", "thread"), ("slots", "inline"), ("collective", "auto")])
def test_four_layers_equal_eager_ones_in_two_compilations(
    on_ranks: Run, exchange: str, copy: str, asynchronous: bool
) -> None:
    on_ranks(2, four_layers, exchange, copy, asynchronous, timeout=240)


def one_block_for_all(rank: int) -> None:
    """Each block compiled for itself, as diffusers compiles repeated blocks, each with an attention of its own."""
    torch._dynamo.reset()
    exchange = exchange_for(want="slots")
    layers = model([UlyssesAttention(SdpaBackend(), exchange=exchange) for _ in range(12)])
    counter = CompileCounterWithBackend("inductor")
    x = torch.randn(1, 3 + rank, FEATURES)
    with torch.no_grad():
        expected = layers(x)
        for block in layers:
            block.compile(fullgraph=True, backend=counter)
        torch.testing.assert_close(layers(x), expected, rtol=1e-5, atol=1e-5)
    assert counter.frame_count == 1


def test_layers_share_one_graph_though_each_has_its_own_attention(on_ranks: Run) -> None:
    on_ranks(2, one_block_for_all, timeout=240)


def generated(rank: int) -> str:
    torch._dynamo.reset()
    attentions = [UlyssesAttention(SdpaBackend(), exchange="slots") for _ in range(2)]
    x = torch.randn(2, 5, FEATURES)
    with torch.no_grad():
        _, code = run_and_get_code(torch.compile(model(attentions), fullgraph=True), x)
    return code[0][code[0].index("def call(") :]


def test_the_generated_code_pushes_each_lane_before_the_next_projection(on_ranks: Run) -> None:
    code = on_ranks(2, generated, timeout=240)[0]
    steps = re.findall(r"addmm(?=\()|ithaca\.(?:begin|push|finish)(?=\.default\()|, '[qkv]'(?=, False\))", code)
    said = " ".join(step.strip(",') ").removeprefix("ithaca.") for step in steps)
    layer = "addmm push v addmm push q addmm push k finish"
    # The projection of one layer may run after the next call has begun: that says nothing to anybody.
    assert said.replace("begin ", "") == f"{layer} addmm {layer} addmm", said
    assert "clone" not in code  # a source goes as it is, the heads of a projection being a view of it


# -- the source side ---------------------------------------------------------------------------------------------------


def hold_copies_back() -> None:
    """Let the copy thread begin only when it is waited for: the latest that it can be."""
    go = threading.Event()
    submit, flush = ThreadStream.submit, ThreadStream.flush

    def held(task: Any) -> Any:
        go.wait(60)
        yield from task

    def flush_now(self: ThreadStream) -> None:
        go.set()
        try:
            flush(self)
        finally:
            go.clear()

    ThreadStream.submit = lambda self, task: submit(self, held(task))  # type: ignore[method-assign]
    ThreadStream.flush = flush_now  # type: ignore[method-assign]


def mutate_the_clock_only() -> None:
    """The same operators, declared to mutate nothing but the clock; the finish does not see the sources."""
    push = torch.library.custom_op("control::push", compiled.push, mutates_args=("clock",))
    push.register_fake(lambda *args: None)

    def finish(clock: Tensor, tag: Tensor, order: str, shape: list[int]) -> Tensor:
        return compiled.finish(clock, [], tag, order, None)

    blind = torch.library.custom_op("control::finish", finish, mutates_args=("clock",))
    blind.register_fake(lambda clock, tag, order, shape: clock.new_empty(shape, dtype=torch.float32))
    compiled.PUSH = push
    compiled.FINISH = lambda clock, sources, tag, order, mask: blind(clock, tag, order, list(sources[0].shape))


def held_back(rank: int, control: bool) -> float:
    attn = UlyssesAttention(SdpaBackend(), exchange=exchange_for(want="slots", copy="thread"))
    layers = model([attn] * 4)
    x = torch.randn(2, 6, FEATURES)
    with torch.no_grad():
        expected = layers(x)
        hold_copies_back()
        if control:
            mutate_the_clock_only()
        out = torch.compile(layers, fullgraph=True)(x)
    return float((out - expected).abs().max())


def test_sources_live_until_they_were_read_however_late_the_copy_is() -> None:
    assert max(run_ranks(held_back, 2, False)) < 1e-5


@pytest.mark.parametrize("repeat", range(2))
def test_without_the_mutation_of_sources_the_data_is_wrong(repeat: int) -> None:
    assert min(run_ranks(held_back, 2, True)) > 1e-2


# -- all that a call can have ------------------------------------------------------------------------------------------


def everything(rank: int, exchange: str) -> None:
    torch._dynamo.reset()
    q_sizes, kv_sizes = (3, 4), (5, 1)
    q, k, v = qkv(7, 6, heads=4, batch=2)
    gate = torch.rand(2, 7, 4, 1, generator=torch.Generator().manual_seed(5))
    mask = torch.rand(2, 6, generator=torch.Generator().manual_seed(6)) > 0.3
    mask[:, 0] = True
    pieces = [mine(t, s, rank) for t, s in zip((q, k, v, gate), (q_sizes, kv_sizes, kv_sizes, q_sizes), strict=True)]
    attn = UlyssesAttention(GatedBackend(), exchange=exchange)

    @torch.compile(fullgraph=True)
    def asynchronous(q: Tensor, k: Tensor, v: Tensor, gate: Tensor, mask: Tensor) -> Tensor:
        return attn.forward_async(
            lambda: q * 1,
            lambda: k * 1,
            lambda: v * 1,
            gates={"fine": lambda: gate * 1},
            issue_order=("q", "gate.fine", "k", "v"),
            mask=mask,
            scale=0.5,
        )

    @torch.compile(fullgraph=True)
    def synchronous(q: Tensor, k: Tensor, v: Tensor, gate: Tensor, mask: Tensor) -> Tensor:
        return attn(q, k, v, gates={"fine": gate}, mask=mask, scale=0.5)

    expected = mine(one_rank(q, k, v, mask[:, None, None], 0.5) * gate, q_sizes, rank)
    for fn in (asynchronous, synchronous):
        torch.testing.assert_close(fn(*pieces, mask), expected, rtol=0, atol=1e-5)
    same = torch.compile(lambda x: attn(x, x, x), fullgraph=True)  # one tensor in three lanes
    torch.testing.assert_close(same(pieces[0]), mine(one_rank(q, q, q), q_sizes, rank), rtol=0, atol=1e-5)
    same = torch.compile(lambda x: attn.forward_async(lambda: x, lambda: x, lambda: x), fullgraph=True)
    torch.testing.assert_close(same(pieces[0]), mine(one_rank(q, q, q), q_sizes, rank), rtol=0, atol=1e-5)


@pytest.mark.parametrize("exchange", ["slots", "collective"])
def test_gates_masks_scales_and_unequal_lengths(on_ranks: Run, exchange: str) -> None:
    on_ranks(2, everything, exchange, timeout=240)


def test_one_rank_needs_no_group() -> None:
    q, k, v = qkv(7, 6, heads=4, batch=2)
    attn = UlyssesAttention(SdpaBackend())
    fn = torch.compile(lambda q, k, v: attn.forward_async(lambda: q + 1, lambda: k + 1, lambda: v + 1), fullgraph=True)
    torch.testing.assert_close(fn(q, k, v), one_rank(q + 1, k + 1, v + 1))


# -- faults ------------------------------------------------------------------------------------------------------------


def caught(fn: Callable[[], object]) -> tuple[str, str]:
    try:
        fn()
    except Exception as error:
        return type(error).__name__, str(error)
    return "nothing", ""


def faulty(rank: int, exchange: str) -> list[tuple[str, str]]:
    torch._dynamo.reset()
    attn = UlyssesAttention(SdpaBackend(), exchange=exchange)
    whole = qkv(8, 8, heads=4)
    q, k, v = (mine(t, (3, 5), rank) for t in whole)
    fn = torch.compile(lambda q, k, v: attn.forward_async(lambda: q * 1, lambda: k * 1, lambda: v * 1), fullgraph=True)
    expected = mine(one_rank(*whole), (3, 5), rank)
    torch.testing.assert_close(fn(q, k, v), expected, rtol=0, atol=1e-5)
    results = [caught(lambda: fn(q, torch.cat([k, k]) if rank else k, v))]
    torch.testing.assert_close(fn(q, k, v), expected, rtol=0, atol=1e-5)
    # A graph that is left in the middle: rank 1 pushes one lane and goes another way.
    if rank:
        compiled.begin(compiled.THE_CLOCK, attn._tag, Request(("v", "q", "k")).encode(), None, None)
        compiled.push(compiled.THE_CLOCK, v, attn._tag, "v", False)
        attn.refuse(InvalidInputError("rank 1 left"))
    else:
        results.append(caught(lambda: fn(q, k, v)))
    torch.testing.assert_close(fn(q, k, v), expected, rtol=0, atol=1e-5)
    if rank:
        compiled.begin(compiled.THE_CLOCK, attn._tag, Request(("v", "q", "k")).encode(), None, None)
    else:
        results.append(caught(lambda: fn(q, k, v)))
    torch.testing.assert_close(attn(q, k, v), expected, rtol=0, atol=1e-5)  # finds it open, and tells
    return results


@pytest.mark.parametrize("exchange", ["slots", "collective"])
def test_a_fault_in_compiled_code_reaches_every_rank(on_ranks: Run, exchange: str) -> None:
    here, there = on_ranks(2, faulty, exchange, timeout=240)
    assert there[0][0] == InvalidInputError.__name__ and "k was required to be [1, 5, 4, 16]" in there[0][1]
    refused, left, lost = here
    assert {refused[0], left[0], lost[0]} == {PeerRefusedError.__name__}
    assert "k was required" in refused[1] and "rank 1 left" in left[1] and "left in the middle" in lost[1]
    assert issubclass(PeerRefusedError, IthacaError)
