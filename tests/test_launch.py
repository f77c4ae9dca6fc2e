"""Ranks on this machine: results, failures, time, and torchrun."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from left_over import nothing_is_left  # noqa: F401

from ithaca import InvalidInputError, RankFailedError, run_ranks

pytestmark = [pytest.mark.full, pytest.mark.alone]


def about(rank: int, word: str) -> tuple[int, int, str, int, str, int]:
    total = torch.tensor([rank])
    dist.all_reduce(total)
    return rank, dist.get_world_size(), dist.get_backend(), torch.get_num_threads(), word, int(total)


def test_results_come_in_the_order_of_the_ranks() -> None:
    threads = max(1, len(os.sched_getaffinity(0)) // 3)
    assert run_ranks(about, 3, "hello") == [(rank, 3, "gloo", threads, "hello", 3) for rank in range(3)]


def tensors(rank: int) -> torch.Tensor:
    return torch.full((3,), float(rank))


def test_tensors_are_results_that_outlive_their_rank() -> None:
    assert [t.tolist() for t in run_ranks(tensors, 2)] == [[0.0] * 3, [1.0] * 3]


def one_fails(rank: int) -> None:
    if rank == 1:
        raise KeyError("on purpose")
    dist.barrier()  # never met


def test_the_first_failure_is_raised_with_its_traceback_and_ends_the_others() -> None:
    started = time.monotonic()
    with pytest.raises(RankFailedError, match=r"rank 1 failed:(?s:.*)in one_fails(?s:.*)KeyError: 'on purpose'"):
        run_ranks(one_fails, 3)
    assert time.monotonic() - started < 60  # not the barrier's own timeout


def one_dies(rank: int) -> None:
    if rank == 0:
        os._exit(7)
    dist.barrier()


def test_a_rank_that_dies_without_a_word() -> None:
    with pytest.raises(RankFailedError, match="rank 0 ended with exit code 7"):
        run_ranks(one_dies, 2)


def sleeps(rank: int) -> None:
    time.sleep(600 if rank else 0)


def test_time_runs_out() -> None:
    with pytest.raises(RankFailedError, match=r"rank\(s\) \[1\] did not finish within 3 s"):
        run_ranks(sleeps, 2, timeout=3)


@pytest.mark.parametrize("ranks", [0, -1, 1.5, True, "2", None])
def test_what_is_no_count_of_ranks(ranks: Any) -> None:
    with pytest.raises(InvalidInputError, match=r"at least one rank was required, as an integer; received"):
        run_ranks(sleeps, ranks)


SCRIPT = """
import sys
sys.path.insert(0, {tests!r})
import torch, torch.distributed as dist
from cases import mine, one_rank, qkv
from ithaca import SdpaBackend, UlyssesAttention
torch.set_num_threads(1)
dist.init_process_group("gloo")
rank, sizes, whole = dist.get_rank(), (3, 5), qkv(8, 8, heads=4)
attn = UlyssesAttention(SdpaBackend())
out = attn(*(mine(t, sizes, rank) for t in whole))
assert (out - mine(one_rank(*whole), sizes, rank)).abs().max() < 1e-5
sys.stdout.write(f"rank {{rank}} has {{attn.exchange.kind}}\\n")
sys.stdout.flush()
dist.destroy_process_group()
"""


def test_everything_runs_under_torchrun(tmp_path: Path) -> None:
    script = tmp_path / "job.py"
    script.write_text(SCRIPT.format(tests=str(Path(__file__).parent)))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(script)]
    environ = {**os.environ, "TMPDIR": str(tmp_path)}  # its agent leaves a folder of logs
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert sorted(line for line in done.stdout.splitlines() if line.startswith("rank")) == [
        "rank 0 has slots",
        "rank 1 has slots",
    ]
