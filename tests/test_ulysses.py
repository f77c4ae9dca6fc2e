"""One attention layer across ranks equals one rank: for any splits, order, exchange, layout, batch and dtype."""

from __future__ import annotations

import logging
from itertools import permutations

import pytest
import torch
import torch.distributed as dist
from cases import BACKENDS, NhdBackend, mine, one_rank, one_rank_by_slices, qkv
from conftest import Run

from ithaca import (
    ExchangeUnavailableError,
    InvalidInputError,
    PlanMismatchError,
    SdpaBackend,
    UlyssesAttention,
    UnsupportedError,
    exchange_for,
)
from ithaca.exchange.choice import choose
from ithaca.geometry import Layout

pytestmark = pytest.mark.full

SPLITS = {2: [(4, 4), (7, 2), (0, 5)], 3: [(3, 3, 3), (1, 6, 4)], 4: [(2, 2, 2, 2), (5, 0, 1, 3)]}
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


def identities(rank: int, ranks: int, sizes: tuple[int, ...], heads: int, batch: int, dtype: torch.dtype) -> None:
    whole = qkv(sum(sizes), sum(sizes), heads, batch=batch, dtype=dtype)
    q, k, v = (mine(t, sizes, rank) for t in whole)
    slots = UlyssesAttention(SdpaBackend(), exchange="slots")
    out = slots(q, k, v)
    assert out.shape == q.shape and out.dtype == dtype
    for order in permutations("qkv"):
        again = slots.forward_async(lambda: q, lambda: k, lambda: v, issue_order=order)
        assert torch.equal(out, again), order
    collective = UlyssesAttention(SdpaBackend(), exchange="collective")
    assert torch.equal(out, collective(q, k, v))
    assert torch.equal(out, collective.forward_async(lambda: q, lambda: k, lambda: v))
    assert torch.equal(out, mine(one_rank_by_slices(*whole, ranks), sizes, rank))
    torch.testing.assert_close(out, mine(one_rank(*whole), sizes, rank), rtol=0, atol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("heads", [8, 5, 1])
@pytest.mark.parametrize(("ranks", "sizes"), [(n, s) for n, cases in SPLITS.items() for s in cases])
def test_all_ways_give_the_same_bits(
    on_ranks: Run, ranks: int, sizes: tuple[int, ...], heads: int, batch: int, dtype: torch.dtype
) -> None:
    on_ranks(ranks, identities, ranks, sizes, heads, batch, dtype)


def cross(rank: int, exchange: str, backend: str) -> None:
    q_sizes, kv_sizes = (3, 1), (5, 8)
    whole = qkv(4, 13, heads=6, batch=2)
    q, k, v = (mine(t, s, rank) for t, s in zip(whole, (q_sizes, kv_sizes, kv_sizes), strict=True))
    attn = UlyssesAttention(BACKENDS[backend](), exchange=exchange)
    expected = mine(one_rank(*whole), q_sizes, rank)
    results = [attn(q, k, v)]
    results += [attn.forward_async(lambda: q, lambda: k, lambda: v, issue_order=o) for o in ("qkv", "vqk", "kvq")]
    for out in results:
        torch.testing.assert_close(out, expected, rtol=0, atol=1e-5)
        assert torch.equal(out, results[0])
    if isinstance(attn.backend, NhdBackend):
        assert attn.backend.seen == [(4, 13)] * 4  # told both full lengths, not the local ones


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("exchange", ["slots", "collective"])
def test_cross_attention(on_ranks: Run, exchange: str, backend: str) -> None:
    on_ranks(2, cross, exchange, backend)


def owned_result(rank: int, exchange: str, accepts: bool) -> None:
    """A result must not change when the slots are written again, whether the backend borrowed or not."""
    attn = UlyssesAttention(NhdBackend(accepts), exchange=exchange)
    first = [mine(t, (3, 5), rank) for t in qkv(8, 8, heads=4)]
    out = attn(*first)
    kept = out.clone()
    attn(*(torch.full_like(t, 9.0) for t in first))
    assert torch.equal(out, kept)
    torch.testing.assert_close(out, mine(one_rank(*qkv(8, 8, heads=4)), (3, 5), rank), rtol=0, atol=1e-5)


@pytest.mark.parametrize("accepts", [True, False])
@pytest.mark.parametrize("exchange", ["slots", "collective"])
def test_the_caller_owns_what_it_gets(on_ranks: Run, exchange: str, accepts: bool) -> None:
    on_ranks(2, owned_result, exchange, accepts)


def projected(rank: int, exchange: str) -> None:
    whole = qkv(9, 9, heads=4, batch=2)
    q, k, v = (mine(t, (4, 5), rank) for t in whole)
    weight = torch.randn(7, 64, generator=torch.Generator().manual_seed(1))
    attn = UlyssesAttention(SdpaBackend(), exchange=exchange)
    out = attn.forward_async(lambda: q, lambda: k, lambda: v, project_out=lambda heads: heads.flatten(2) @ weight.T)
    assert torch.equal(out, attn(q, k, v).flatten(2) @ weight.T)


@pytest.mark.parametrize("exchange", ["slots", "collective"])
def test_the_output_projection_reads_the_slot(on_ranks: Run, exchange: str) -> None:
    on_ranks(2, projected, exchange)


def masked(rank: int, exchange: str) -> None:
    sizes, (q, k, v) = (6, 3), qkv(9, 9, heads=4, batch=2)
    generator = torch.Generator().manual_seed(3)
    keys = torch.rand(2, 9, generator=generator) > 0.4
    masks = {
        "keys": (keys, keys[:, None, None, :]),
        "full": (m := torch.rand(2, 1, 9, 9, generator=generator) > 0.4, m),
        "per head": (m := torch.rand(1, 4, 9, 9, generator=generator) > 0.4, m),
        "additive": (m := torch.randn(2, 4, 9, 9, generator=generator), m),
    }
    attn = UlyssesAttention(SdpaBackend(), exchange=exchange)
    pieces = [mine(t, sizes, rank) for t in (q, k, v)]
    for name, (mask, full) in masks.items():
        out = attn(*pieces, mask=mask, scale=0.3)
        expected = mine(one_rank(q, k, v, full, 0.3), sizes, rank)
        torch.testing.assert_close(out, expected, rtol=0, atol=1e-5, msg=name)


@pytest.mark.parametrize("exchange", ["slots", "collective"])
def test_masks_over_the_whole_lengths(on_ranks: Run, exchange: str) -> None:
    on_ranks(2, masked, exchange)


def alone(rank: int) -> None:
    q, k, v = qkv(9, 9, heads=4)
    attn = UlyssesAttention(SdpaBackend())
    assert torch.equal(attn(q, k, v), one_rank(q, k, v))
    assert torch.equal(attn.forward_async(lambda: q, lambda: k, lambda: v), one_rank(q, k, v))


def test_a_group_of_one_is_a_plain_call(on_ranks: Run) -> None:
    on_ranks(1, alone)
    alone(0)  # and so is a process without torch.distributed


def bytes_and_rounds(rank: int) -> None:
    q, k, v = (mine(t, (3, 5), rank) for t in qkv(8, 8, heads=4))
    # 3 lanes and the output: 3 tokens x 2 heads out and 5 tokens x 2 heads home from rank 0, and the reverse.
    expected = ((3 if rank == 0 else 5) * 3 + (5 if rank == 0 else 3)) * 2 * 16 * 4
    for kind, rounds_sync, rounds_async in (("slots", 0, 0), ("collective", 1, 3)):
        attn = UlyssesAttention(SdpaBackend(), exchange=kind)
        counters = attn.exchange.counters
        for call, rounds in (
            (lambda attn=attn: attn(q, k, v), rounds_sync),
            (lambda attn=attn: attn.forward_async(lambda: q, lambda: k, lambda: v), rounds_async),
        ):
            moved, before = counters.bytes_moved, counters.header_rounds
            call()
            assert (counters.bytes_moved - moved, counters.header_rounds - before) == (expected, rounds)


def test_bytes_and_header_rounds_are_counted(on_ranks: Run) -> None:
    on_ranks(2, bytes_and_rounds)


def told(rank: int) -> list[list[str]]:
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("ithaca").addHandler(handler)
    logging.getLogger("ithaca").setLevel(logging.INFO)
    group = dist.new_group([0, 1])
    layers = [UlyssesAttention(SdpaBackend(), group) for _ in range(3)]
    said = [[attn.exchange.kind, attn.exchange.reason] for attn in layers]
    logging.getLogger("ithaca").removeHandler(handler)
    return [said[2], lines]


def test_auto_takes_slots_on_one_host_and_says_why_once(on_ranks: Run) -> None:
    why = "all ranks are on one Linux host and the tensors on CPU"
    line = f"exchange of 2 ranks: slots ({why})"
    assert on_ranks(2, told) == [[["slots", why], [line]], [["slots", why], []]]


def facts(**differences: object) -> dict[str, object]:
    here = {"version": "1", "want": "auto", "copy": "auto", "device": "cpu", "backend": "cpu:gloo,cuda:nccl"}
    return {**here, "missing": [], "host": "h", "spaces": [1, 2], "user": 0, **differences}


@pytest.mark.parametrize(
    ("differences", "kind", "reason"),
    [
        ({}, "slots", "one Linux host"),
        ({"want": "collective"}, "collective", "asked for"),
        ({"device": "cuda"}, "collective", "rank 0 has its tensors on cuda"),
        ({"missing": ["eventfd"]}, "collective", "rank 0 runs without eventfd"),
    ],
)
def test_the_choice_and_its_reason(differences: dict[str, object], kind: str, reason: str) -> None:
    chosen, why = choose([facts(**differences)] * 2)
    assert chosen == kind and reason in why


@pytest.mark.parametrize(
    ("key", "reason"), [("host", "another host"), ("spaces", "another network or process"), ("user", "another user")]
)
def test_ranks_that_cannot_share_memory_take_the_collective(key: str, reason: str) -> None:
    ranks = [facts(), facts(**{key: "elsewhere"})]
    assert choose(ranks)[0] == "collective" and f"rank 1 is of {reason}" in choose(ranks)[1]
    with pytest.raises(ExchangeUnavailableError, match=reason):
        choose([{**each, "want": "slots"} for each in ranks])


def test_ranks_that_ask_for_different_exchanges_are_told() -> None:
    for key in ("version", "want", "copy", "device"):
        with pytest.raises(PlanMismatchError, match=f"same {key} .* rank 1: 'other'"):
            choose([facts(), facts(**{key: "other"})])
    with pytest.raises(UnsupportedError, match="received some on meta"):
        choose([facts(device="meta")] * 2)


def forced_copies(rank: int, copy: str) -> str:
    attn = UlyssesAttention(SdpaBackend(), exchange=exchange_for(want="slots", copy=copy))
    whole = qkv(20, 20, heads=4, batch=2)
    pieces = [mine(t, (12, 8), rank) for t in whole]
    for _ in range(20):
        out = attn.forward_async(*(lambda t=t: t * 1.0 for t in pieces))
        torch.testing.assert_close(out, mine(one_rank(*whole), (12, 8), rank), rtol=0, atol=1e-5)
    return type(attn.exchange.stream).__name__  # type: ignore[attr-defined]


@pytest.mark.parametrize(("copy", "stream"), [("thread", "ThreadStream"), ("inline", "InlineStream")])
def test_copies_on_a_thread_or_inline(on_ranks: Run, copy: str, stream: str) -> None:
    assert on_ranks(2, forced_copies, copy) == [stream] * 2


def test_the_layouts_differ() -> None:
    assert SdpaBackend().capabilities.layout is Layout.HND and NhdBackend().capabilities.layout is Layout.NHD


def modes(rank: int, exchange: str, copy: str, first: bool) -> None:
    """Calls in inference mode and out of it, in turn, on one exchange."""
    group = dist.new_group([0, 1])
    made = exchange_for(group, exchange, copy=copy)
    attn = UlyssesAttention(SdpaBackend(), group, made)
    whole = qkv(9, 9, heads=4)
    for inference in (first, not first, first):
        with torch.inference_mode(inference), torch.no_grad():
            pieces = [mine(t, (4, 5), rank).clone() for t in whole]
            for out in (attn(*pieces), attn.forward_async(*(lambda t=t: t for t in pieces))):
                torch.testing.assert_close(out, mine(one_rank(*whole), (4, 5), rank), rtol=0, atol=1e-5)
                out += 1  # the caller's own


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize(("exchange", "copy"), [("slots", "thread"), ("slots", "inline"), ("collective", "auto")])
def test_inference_mode_may_come_and_go(on_ranks: Run, exchange: str, copy: str, first: bool) -> None:
    on_ranks(2, modes, exchange, copy, first)


def weight_gradient(rank: int, exchange: str) -> None:
    """Grad mode is on, and the output projection has weights to train: they get their gradient, from a copy."""
    q, k, v = (mine(t, (4, 5), rank) for t in qkv(9, 9, heads=4))
    linear = torch.nn.Linear(64, 8)
    attn = UlyssesAttention(SdpaBackend(), exchange=exchange)
    out = attn.forward_async(lambda: q, lambda: k, lambda: v, project_out=lambda heads: linear(heads.flatten(2)))
    out.sum().backward()
    expected = attn(q, k, v).flatten(2).sum(dim=(0, 1)).expand(8, 64)
    torch.testing.assert_close(linear.weight.grad, expected)


@pytest.mark.parametrize("exchange", ["slots", "collective"])
def test_an_output_projection_may_be_trained(on_ranks: Run, exchange: str) -> None:
    on_ranks(2, weight_gradient, exchange)


def not_in_it(rank: int) -> None:
    group = dist.new_group([0])
    if rank == 1:
        attn = UlyssesAttention(SdpaBackend(), group)
        for use in (lambda: attn(*qkv(3, 3, heads=2)), lambda: attn.exchange, lambda: exchange_for(group)):
            with pytest.raises(InvalidInputError, match="this process"):
                use()


def test_a_process_outside_of_the_group_is_told(on_ranks: Run) -> None:
    on_ranks(2, not_in_it)
