"""The exchange itself: its ordering rule, growth, dtypes, several groups at once, and what is left when it ends."""

from __future__ import annotations

import gc
import os
import threading
import time

import pytest
import torch
import torch.distributed as dist
from cases import RaisingBackend, mine, one_rank, qkv
from conftest import Run

from ithaca import (
    ExchangeClosedError,
    GrowthError,
    InvalidInputError,
    IthacaError,
    Layout,
    LeaseError,
    SdpaBackend,
    UlyssesAttention,
    exchange_for,
    run_ranks,
)
from ithaca.exchange.peer_memory.interface import Signal, Wait
from ithaca.geometry import Splits
from ithaca.sharding import gather

pytestmark = pytest.mark.full

EXCHANGES = ["slots", "collective"]


def carried(rank: int, want: str, dtype: torch.dtype, layout: Layout) -> None:
    whole = torch.randn(2, 9, 5, 8, generator=torch.Generator().manual_seed(1)).to(dtype)
    exchange = exchange_for(want=want)
    tokens, heads = (Splits.even(n, exchange.world_size).sizes for n in (9, 5))
    piece = mine(whole, tokens, rank)
    with exchange.call(("v", "q", "k"), layout) as call:
        call.push(v=piece, q=piece, k=piece)
        with call.wait() as lease:
            got = lease["q"].clone()
        call.push_out(got, layout)
        with call.wait_out() as home:
            assert torch.equal(home["out"].view(torch.uint8), piece.contiguous().view(torch.uint8))
    expected = mine(whole, heads, rank, dim=2)
    expected = expected if layout is Layout.NHD else expected.transpose(1, 2)
    assert got.dtype == dtype and torch.equal(got.view(torch.uint8), expected.contiguous().view(torch.uint8))


@pytest.mark.parametrize("layout", Layout)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float64, torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize("want", EXCHANGES)
def test_dtypes_go_as_they_are(on_ranks: Run, want: str, dtype: torch.dtype, layout: Layout) -> None:
    on_ranks(2, carried, want, dtype, layout)


def alone(rank: int, want: str) -> None:
    groups = [dist.new_group([member]) for member in range(2)]
    exchange, (q, k, v) = exchange_for(groups[rank], want), qkv(4, 4, heads=2)
    with exchange.call(("v", "q", "k"), Layout.NHD) as call:
        call.push(v=v, q=q, k=k)
        with call.wait() as inputs:
            assert all(torch.equal(inputs[role], t) for role, t in (("q", q), ("k", k), ("v", v)))
        call.push_out(q, Layout.NHD)
        with call.wait_out() as home:
            assert torch.equal(home["out"], q)
    assert torch.equal(gather(q, 1, exchange), q)


@pytest.mark.parametrize("want", EXCHANGES)
def test_a_group_of_one_has_an_exchange_too(on_ranks: Run, want: str) -> None:
    on_ranks(2, alone, want)


def held_lease(rank: int) -> None:
    """The ordering rule: while rank 1 holds a lease, rank 0's next push stays out of its slot."""
    exchange = exchange_for(want="slots", copy="thread")
    first, second = (torch.full((1, 3, 2, 4), float(n)) for n in (1, 2))

    def push(value: torch.Tensor) -> object:
        with exchange.call(("gather",), Layout.NHD, gathered=True) as call:
            call.push(gather=value)
            return call.wait().own() if rank == 0 else call.wait()

    with exchange.call(("gather",), Layout.NHD, gathered=True) as call:
        call.push(gather=first)
        lease = call.wait()
        if rank == 1:
            call._leases.clear()  # the lease outlives its call, as that of an outer strategy does
    if rank == 0:
        push(second)
        return
    seen = lease["gather"]
    with exchange.call(("gather",), Layout.NHD, gathered=True) as call:
        call.push(gather=second)
        time.sleep(0.3)  # rank 0 has announced, agreed, and waits for its credit: nothing may change meanwhile
        assert (seen == 1).all()
        del seen
        lease.release()
        with call.wait() as after:
            assert (after["gather"] == 2).all()
    with pytest.raises(LeaseError, match="before its release; received a request for gather"):
        lease["gather"]


def test_a_slot_is_not_written_while_its_lease_is_out(on_ranks: Run) -> None:
    on_ranks(2, held_lease)


def grown(rank: int, want: str) -> None:
    """Small, large, small again; and a view of the old memory stays what it was."""
    attn = UlyssesAttention(SdpaBackend(), exchange=want)
    for tokens in (4, 400, 40, 4000, 4):
        whole = qkv(tokens, tokens, heads=3, batch=1 + tokens % 3)
        sizes = (tokens - tokens // 4, tokens // 4)
        out = attn(*(mine(t, sizes, rank) for t in whole))
        torch.testing.assert_close(out, mine(one_rank(*whole), sizes, rank), rtol=0, atol=1e-5)


@pytest.mark.parametrize("want", EXCHANGES)
def test_memory_grows_with_the_call(on_ranks: Run, want: str) -> None:
    on_ranks(2, grown, want)


def grown_under_a_lease(rank: int) -> None:
    exchange = exchange_for(want="slots", copy="inline")
    with exchange.call(("gather",), Layout.NHD, gathered=True) as call:
        call.push(gather=torch.full((1, 2, 1, 8), 1.0))
        call.wait()
    old = exchange.memory.slot(rank, "gather", 4 * 8 * 4).view(torch.float32)  # type: ignore[attr-defined]
    with exchange.call(("gather",), Layout.NHD, gathered=True) as call:
        call.push(gather=torch.full((1, 200, 1, 8), 2.0))
        with call.wait() as new:
            assert (new["gather"] == 2).all()
    assert (old == 1).all()  # the memory of the first call lives as long as a tensor over it


def test_old_memory_lives_as_long_as_a_view(on_ranks: Run) -> None:
    on_ranks(2, grown_under_a_lease)


def growth_fails(rank: int) -> str:
    """Rank 1 cannot make the memory: an error on both ranks, and the next call, which needs none, works."""
    from ithaca.exchange.peer_memory import host

    attn = UlyssesAttention(SdpaBackend(), exchange="slots")
    small, large = ([mine(t, (3, 5), rank) for t in qkv(8, 8, heads=4, head_dim=n)] for n in (16, 4096))
    attn(*small)
    allocate = host.allocate
    if rank == 1:

        def full(nbytes: int) -> int:
            raise OSError(28, "No space left on device")

        host.allocate = full
    try:
        with pytest.raises(GrowthError, match="rank 1 could not make") as raised:
            attn(*large)
    finally:
        host.allocate = allocate
    expected = mine(one_rank(*qkv(8, 8, heads=4)), (3, 5), rank)
    torch.testing.assert_close(attn(*small), expected, rtol=0, atol=1e-5)
    assert torch.isfinite(attn(*large)).all()
    return str(raised.value)


def test_growth_happens_on_all_ranks_or_on_none() -> None:
    for rank, message in enumerate(run_ranks(growth_fails, 2)):  # fresh ranks: warm ones have grown already
        assert f"seen from rank {rank}" in message and "No space left" in message


def many_groups(rank: int, want: str) -> None:
    """Strided groups, overlapping ones and the whole, interleaved, with two models of other head counts."""
    groups = {members: dist.new_group(list(members)) for members in ((0, 2), (1, 3), (0, 1), (1, 2), (0, 1, 2, 3))}
    attns = {
        (members, heads): UlyssesAttention(SdpaBackend(), group=groups[members], exchange=want)
        for members in groups
        if rank in members
        for heads in (4, 3)
    }
    for repeat in range(3):
        for (members, heads), attn in attns.items():
            place, tokens = members.index(rank), 3 + 2 * repeat + heads
            sizes = [tokens + i for i in range(len(members))]
            whole = qkv(sum(sizes), sum(sizes), heads, batch=1 + repeat)
            pieces = [mine(t, sizes, place) for t in whole]
            out = attn.forward_async(*(lambda t=t: t for t in pieces))
            torch.testing.assert_close(out, mine(one_rank(*whole), sizes, place), rtol=0, atol=1e-5)
    shared = {id(attn.exchange) for attn in attns.values()}
    assert len(shared) == sum(rank in members for members in groups)  # one exchange a group, whatever the models
    dist.barrier()
    for group in groups.values():
        if group is not dist.GroupMember.NON_GROUP_MEMBER:
            dist.destroy_process_group(group)


@pytest.mark.parametrize("want", EXCHANGES)
def test_groups_do_not_disturb_each_other(on_ranks: Run, want: str) -> None:
    on_ranks(4, many_groups, want)


def left_over(rank: int) -> tuple[list[int], list[int]]:
    """Descriptors and threads, before a first exchange and after each of many that were made, used and destroyed."""
    counts = []
    for _ in range(6):
        group = dist.new_group([0, 1])
        for copy in ("thread", "inline"):
            exchange = exchange_for(group, "slots", copy=copy)
            pieces = [mine(t, (3, 5), rank) for t in qkv(8, 8, heads=4)]
            UlyssesAttention(SdpaBackend(), group, exchange)(*pieces)
            exchange.destroy()
            exchange.destroy()  # once is enough, twice is harmless
        dist.destroy_process_group(group)
        del group
        gc.collect()
        dist.barrier()
        counts.append((len(os.listdir("/proc/self/fd")), threading.active_count()))
    return [fds for fds, _ in counts], [threads for _, threads in counts]


def test_nothing_is_left_over() -> None:
    for fds, threads in run_ranks(left_over, 2):
        assert len(set(fds[2:])) == 1, fds
        assert len(set(threads)) == 1, threads


def raises_before_growth(rank: int) -> None:
    """The first output of all: its memory is not there yet when rank 1's backend raises."""
    expected = mine(one_rank(*qkv(8, 8, heads=4)), (3, 5), rank)
    pieces = [mine(t, (3, 5), rank) for t in qkv(8, 8, heads=4)]
    with pytest.raises(IthacaError, match="kernel on fire"):
        UlyssesAttention(RaisingBackend(here=rank == 1), exchange="slots")(*pieces)
    torch.testing.assert_close(UlyssesAttention(SdpaBackend())(*pieces), expected, rtol=0, atol=1e-5)


def test_an_error_before_the_output_has_memory() -> None:
    run_ranks(raises_before_growth, 2)


def meets_while_it_grows(rank: int, copy: str) -> None:
    """A closure that needs its peers, in a call that needs memory: growth must not be waited for in `push`."""
    attn = UlyssesAttention(SdpaBackend(), exchange=exchange_for(want="slots", copy=copy))
    whole = qkv(8, 8, heads=4)
    q, k, v = (mine(t, (3, 5), rank) for t in whole)

    def meet() -> torch.Tensor:
        dist.barrier()
        return q

    out = attn.forward_async(meet, lambda: k, lambda: v)
    torch.testing.assert_close(out, mine(one_rank(*whole), (3, 5), rank), rtol=0, atol=1e-5)


@pytest.mark.parametrize("copy", ["inline", "thread"])
def test_a_closure_may_meet_its_peers_elsewhere(copy: str) -> None:
    run_ranks(meets_while_it_grows, 2, copy, timeout=30)


def left_early(rank: int, want: str) -> None:
    exchange = exchange_for(want=want)
    with (
        pytest.raises(InvalidInputError, match="required to be gone through to its end"),
        exchange.call(("v", "q", "k"), Layout.NHD) as call,
    ):
        call.push(v=torch.zeros(1, 2, 2, 4))
    carried(rank, want, torch.float64, Layout.HND)


@pytest.mark.parametrize("want", EXCHANGES)
def test_leaving_a_call_early_is_an_error_and_the_next_one_works(on_ranks: Run, want: str) -> None:
    on_ranks(2, left_early, want)


def forked(rank: int) -> None:
    """A child forked meanwhile has no part in the exchange, and its end is not that of its parent's."""
    attn = UlyssesAttention(SdpaBackend(), exchange="slots")
    whole = qkv(8, 8, heads=4)
    pieces = [mine(t, (3, 5), rank) for t in whole]
    attn(*pieces)
    child = os.fork()
    if child == 0:
        attn.exchange.destroy()
        try:
            attn(*pieces)
        except ExchangeClosedError:
            os._exit(0)
        os._exit(1)
    assert os.waitpid(child, 0)[1] == 0
    torch.testing.assert_close(attn(*pieces), mine(one_rank(*whole), (3, 5), rank), rtol=0, atol=1e-5)


def test_a_forked_child_has_no_part_in_it() -> None:
    run_ranks(forked, 2)


def too_large(rank: int) -> None:
    exchange = exchange_for(want="slots")
    vast = torch.zeros(1, 1, 1, 1).expand(1, 2**40, 1, 1)  # four terabytes that cost nothing here
    with (
        pytest.raises(GrowthError, match="are available"),
        exchange.call(("gather",), Layout.NHD, gathered=True) as call,
    ):
        call.push(gather=vast)
        call.wait()
    carried(rank, "slots", torch.float64, Layout.HND)


def test_more_than_the_machine_has_is_an_error(on_ranks: Run) -> None:
    on_ranks(2, too_large)


def credits_at_rest(rank: int) -> None:
    """Between calls every rank has just one credit for each slot of each rank."""
    exchange = exchange_for(want="slots")
    for _ in range(3):
        carried(rank, "slots", torch.float64, Layout.NHD)
        assert torch.equal(gather(torch.full((2, 3), float(rank)), 0, exchange)[::2, 0], torch.arange(3.0))
    dist.barrier()
    memory = exchange.memory  # type: ignore[attr-defined]
    for role in ("q", "k", "v", "out", "gather"):
        for peer in range(3):
            taken = [memory.wait(Wait(Signal.CREDIT, role, {peer}, str), block=False) for _ in range(2)]
            assert taken == [True, False], (role, peer)
            os.eventfd_write(memory._channels[role].mine[Signal.CREDIT][peer], 1)  # put it back


def test_a_credit_is_given_once(on_ranks: Run) -> None:
    on_ranks(3, credits_at_rest)
