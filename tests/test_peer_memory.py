"""Memory of one host, between two ends in one process: growth, signals, strangers, and messages that are not ours."""

from __future__ import annotations

import io
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.distributed import HashStore

from ithaca import CorruptHeaderError, IthacaError, PeerDiedError, PeerTimeoutError
from ithaca.exchange.agreement import Header
from ithaca.exchange.peer_memory.handshake import Peer, connect_peers
from ithaca.exchange.peer_memory.host import HostPeerMemory
from ithaca.exchange.peer_memory.interface import Message, Signal, Wait
from ithaca.exchange.peer_memory.segment import Segment, allocate
from ithaca.exchange.rendezvous import Rendezvous

pytestmark = pytest.mark.fast

Pair = tuple[HostPeerMemory, HostPeerMemory]


def connected(timeout: float = 5.0) -> Pair:
    store = HashStore()

    def one(rank: int) -> HostPeerMemory:
        with Rendezvous(store, "key", rank, 2, timeout) as rendezvous:
            return HostPeerMemory.connect(rendezvous)

    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(one, range(2))
    return first, second


@pytest.fixture
def pair() -> Iterator[Pair]:
    before = len(os.listdir("/proc/self/fd"))
    ends = connected()
    yield ends
    for end in ends:
        end.close()
        end.close()
    assert len(os.listdir("/proc/self/fd")) == before


def grow(pair: Pair, role: str, capacities: tuple[int, ...]) -> None:
    def one(memory: HostPeerMemory) -> None:
        for wait in memory.grow(role, capacities):
            memory.wait(wait, block=True)

    with ThreadPoolExecutor(2) as pool:
        for end in [pool.submit(one, memory) for memory in pair]:
            end.result()


def header_of(memory: HostPeerMemory) -> bytes:
    memory.wait(Wait(Message.HEADER, "", {1 - memory.rank}, lambda: "a header"), block=True)
    return memory.announcement(1 - memory.rank)


def test_what_one_writes_the_other_reads(pair: Pair) -> None:
    here, there = pair
    assert here.capacity("v") == ()
    grow(pair, "v", (64, 128))
    assert here.capacity("v") == there.capacity("v") == (64, 128) and here.generation == there.generation == 1
    here.slot(1, "v", 128).copy_(torch.arange(128, dtype=torch.uint8))
    here.signal(Signal.ARRIVED, "v", (1,))
    there.wait(Wait(Signal.ARRIVED, "v", {0}, lambda: "v"), block=True)
    old = there.slot(1, "v", 128)
    assert torch.equal(old, torch.arange(128, dtype=torch.uint8))
    grow(pair, "v", (64, 4096))
    there.slot(1, "v", 4096).zero_()
    assert torch.equal(old, torch.arange(128, dtype=torch.uint8))  # of the old memory, which it keeps


def test_each_slot_view_has_a_storage_of_its_own(pair: Pair) -> None:
    grow(pair, "v", (64, 64))
    one, two = (pair[0].slot(0, "v", 64) for _ in range(2))
    assert one.data_ptr() == two.data_ptr() and one.data_ptr() % 64 == 0
    assert one.untyped_storage()._cdata != two.untyped_storage()._cdata
    assert pair[0].slot(0, "v", 0).numel() == 0


def test_credits_start_at_one_and_are_counted(pair: Pair) -> None:
    grow(pair, "v", (64, 64))
    for _ in range(2):
        pair[0].signal(Signal.CREDIT, "v", (0, 1))
    for memory in pair:
        for expected in (True, memory.rank in (0, 1), True, False):
            got = memory.wait(Wait(Signal.CREDIT, "v", {0}, lambda: "credit"), block=False)
            assert got is expected


def test_a_wait_ends_with_the_deadline_the_peer_or_an_interrupt() -> None:
    first, second = connected(timeout=0.3)
    try:
        with pytest.raises(PeerTimeoutError, match=r"rank 0 waited 0.3 s for a word from rank\(s\) \[1\]"):
            first.wait(Wait(Message.HEADER, "", {1}, lambda: "a word"), block=True)
        second.abort(PeerDiedError("rank 7 died"))
        with pytest.raises(PeerDiedError, match="rank 1 gave up: rank 7 died"):
            first.wait(Wait(Message.HEADER, "", {1}, lambda: "a word"), block=True)
        second.announce(b"last words".ljust(1024))
        second.close()
        assert header_of(first).startswith(b"last words")  # what it said before its end still counts
        for _ in range(2):
            with pytest.raises(PeerDiedError, match=r"rank 1 .* was expected to send a word"):
                first.wait(Wait(Message.HEADER, "", {1}, lambda: "a word"), block=True)
        first.interrupt()
        with pytest.raises(IthacaError, match="rank 0 closed the exchange"):
            first.wait(Wait(Message.HEADER, "", {0}, lambda: "a word"), block=True)
    finally:
        first.close()
        second.close()


@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(st.sampled_from([b"H", b"G", b"M", b"A", b"?", b""]), st.binary(max_size=60))
def test_whatever_comes_is_an_error_of_ours_or_a_header(kind: bytes, body: bytes) -> None:
    first, second = connected(timeout=0.05)
    try:
        second._peers[0].socket.send(kind + body)
        with pytest.raises((PeerDiedError, PeerTimeoutError, CorruptHeaderError, IthacaError)):
            for role in ("v", "w"):
                Header.decode(header_of(first), rank=1)
                for wait in first.grow(role, (64, 64)):
                    first.wait(wait, block=True)
    finally:
        first.close()
        second.close()


def test_memory_that_could_shrink_is_not_mapped() -> None:
    sealed, loose = allocate(100), io.FileIO(os.memfd_create("loose"))
    with sealed, loose:
        os.ftruncate(loose.fileno(), 100)
        assert Segment.map(sealed.fileno(), 100).capacity == 100
        with pytest.raises(OSError, match="sealed against resizing"):
            Segment.map(loose.fileno(), 100)
        with pytest.raises(OSError, match="200 bytes were required, the descriptor holds 100"):
            Segment.map(sealed.fileno(), 200)
        with pytest.raises(OSError, match="Operation not permitted"):
            os.ftruncate(sealed.fileno(), 10)


STRANGER = """
import socket, sys
s = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
s.settimeout(20)
s.connect("\\0" + sys.argv[1])
try:
    if len(sys.argv) > 2:
        s.send(bytes.fromhex(sys.argv[2]))
    heard = s.recv(10)
except (BrokenPipeError, ConnectionResetError):
    heard = b""
sys.exit(0 if heard == b"" else 1)   # 0: hung up on
"""


@pytest.mark.parametrize("says", ["nothing", "the right nonce", "from this process, a wrong nonce"])
def test_strangers_are_hung_up_on(says: str) -> None:
    store = HashStore()

    def one(rank: int) -> dict[int, Peer]:
        with Rendezvous(store, "key", rank, 2, 20.0) as rendezvous:
            return connect_peers(rendezvous)

    with ThreadPoolExecutor(2) as pool:
        waiting = pool.submit(one, 0)
        while not store.check(["key/address/0"]):
            time.sleep(0.01)
        facts = json.loads(store.get("key/address/0"))
        store.set("key/address/1", json.dumps({"address": "", "nonce": "", "pid": os.getpid()}))
        hello = (1).to_bytes(4, "little") + facts["nonce"].encode()
        if says.startswith("from this process"):
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as stranger:
                stranger.connect(facts["address"])
                stranger.send(hello[:-1] + b"!")
                stranger.settimeout(20)
                assert stranger.recv(10) == b""
        else:
            extra = [hello.hex()] if says == "the right nonce" else []
            command = [sys.executable, "-c", STRANGER, facts["address"][1:], *extra]
            assert subprocess.run(command, timeout=60).returncode == 0
        assert not waiting.done()
        theirs = pool.submit(one, 1)
        for peers in (waiting.result(), theirs.result()):
            for peer in peers.values():
                peer.close()


def test_last_words_are_heard_though_ours_were_not_read() -> None:
    for _ in range(20):
        first, second = connected(timeout=1.0)
        try:
            first.announce(b"never read".ljust(1024))
            second.abort(PeerDiedError("rank 7 died"))
            second.close()  # with our header unread: the kernel reports a reset before it gives the abort
            with pytest.raises(PeerDiedError, match="rank 1 gave up: rank 7 died"):
                first.wait(Wait(Message.HEADER, "", {1}, lambda: "a word"), block=True)
        finally:
            first.close()
            second.close()
