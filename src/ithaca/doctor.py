"""What this machine offers, and why not more: for `ithaca doctor`."""

from __future__ import annotations

import os
import platform
import shutil
from pathlib import Path

import torch
import torch.distributed as dist
from rich.markup import escape
from rich.table import Table

from ithaca.backends.sdpa import SdpaBackend
from ithaca.errors import IthacaError
from ithaca.exchange.choice import deadline_seconds, host_facts
from ithaca.extras import EXTRAS, install, missing
from ithaca.launch import run_ranks, threads_for
from ithaca.strategies.ulysses import UlyssesAttention
from ithaca.version import __version__


def examine() -> Table:
    """A table of facts; the exchanges are not looked up but tried, with two ranks and a tiny attention."""
    table = Table(title=f"Ithaca {__version__}", show_header=False)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    rows = {
        "python": f"{platform.python_version()} on {platform.platform()}",
        "torch": f"{torch.__version__}, gloo {_yes(dist.is_available() and dist.is_gloo_available())}",
        "ranks that fit": f"{cores}: one a core",
        "threads": ", ".join(f"{threads_for(n)} each for {n} rank(s)" for n in (1, 2, 4)),
        "copies of slots": _copies(cores),
        "memory": _memory(),
        "open files": _open_files(),
        "deadline": f"{deadline_seconds():g} s (ITHACA_TIMEOUT)",
        "slots": _missing() or try_exchange("slots"),
        "collective": try_exchange("collective"),
        "CUDA peers": "not in this version; CUDA tensors go over the collective"
        + ("" if torch.cuda.is_available() else " (no CUDA device here)"),
        "extras": "\n".join(_extra(name) for name in EXTRAS),
    }
    for what, value in rows.items():
        table.add_row(what, escape(value))
    return table


def try_exchange(want: str) -> str:
    """ "works", or why not, from an attention between two ranks that are started for it."""
    try:
        return "; ".join(sorted(set(run_ranks(_tiny_attention, 2, want, timeout=60))))
    except IthacaError as error:
        return f"does not work: {str(error).strip().splitlines()[-1]}"


def _tiny_attention(rank: int, want: str) -> str:
    attention = UlyssesAttention(SdpaBackend(), exchange=want)
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, 8, 2, 16)
    mine = slice(4 * rank, 4 * rank + 4)
    out = attention(q[:, mine], k[:, mine], v[:, mine])
    whole = torch.nn.functional.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, k, v))).transpose(1, 2)
    return "works" if torch.allclose(out, whole[:, mine], atol=1e-5) else "runs, but its result is WRONG"


def _extra(name: str) -> str:
    lacking = missing(name)
    return f"{name}: lacks {', '.join(lacking)}; {install(name)}" if lacking else f"{name}: yes"


def _missing() -> str:
    lacking = host_facts()["missing"]
    return f"does not work: this system lacks {', '.join(lacking)}" if lacking else ""


def _copies(cores: int) -> str:
    most = cores // 2
    return f"on a thread of their own up to {most} rank(s), inline beyond" if most else "inline: no core to spare"


def _memory() -> str:
    try:
        facts = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
        parts = [f"{int(facts[key].split()[0]) / 2**20:.1f} GiB {name}" for key, name in _MEMINFO.items()]
    except (OSError, KeyError):
        parts = ["unknown"]
    if Path("/dev/shm").is_dir():
        parts.append(f"/dev/shm {shutil.disk_usage('/dev/shm').free / 2**30:.1f} GiB free (slots do not use it)")
    return ", ".join(parts)


_MEMINFO = {"MemTotal": "in all", "MemAvailable": "available", "Shmem": "shared now"}


def _open_files() -> str:
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return f"{soft} (up to {hard}); slots take about 8 a peer and lane"


def _yes(value: bool) -> str:
    return "yes" if value else "no"
