"""Run a backend through everything that it says it supports, on memory that is taken away from it afterwards.

Each case lies in slots as an exchange would lend them: memory of its own, under a lease. The backend attends; then its
output must not lie in a slot, its inputs must be unchanged and no stream recorded on them; the lease ends, which finds
whoever keeps a view; the slots are poisoned, threads that the backend started are waited for, and only then is the
output compared with a float64 reference. So a late reader, through whatever pointer, shows as a wrong result.
"""

from __future__ import annotations

import json
import mmap
import threading
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from itertools import product
from typing import Any

import torch
from torch import Tensor

from ithaca.backends.interface import AttentionBackend, Capabilities
from ithaca.errors import CertificateError, IthacaError
from ithaca.exchange.lease import Lease
from ithaca.exchange.sanitizer import poison, sanitized
from ithaca.plan import GATE, ROLES, aligned, as_nhd

#: Largest absolute difference from the float64 reference that passes, for inputs of unit variance.
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 3e-2}
_MASKS = ("none", "keys", "full", "additive")
_HEADS, _HEAD_DIM = 4, 32
#: How long a thread that a backend has started may take to end, in seconds.
_PATIENCE = 5.0


@dataclass(frozen=True)
class Case:
    """One configuration: what is varied, and what a backend must support for it."""

    dtype: str
    batch: int
    q_len: int
    kv_len: int
    kv_heads: int
    mask: str
    layout: str
    #: Last dim of the gates; 0 for a call without any.
    gate_dim: int = 0

    def __str__(self) -> str:
        gqa = f" kv heads {self.kv_heads}" if self.kv_heads != _HEADS else ""
        gates = f" gates of {self.gate_dim}" if self.gate_dim else ""
        return f"{self.dtype} {self.layout} B{self.batch} Sq{self.q_len} Skv{self.kv_len}{gqa} mask {self.mask}{gates}"


@dataclass(frozen=True)
class Result:
    """``error`` is empty where a case passed; ``difference`` is the largest from the reference, where there is one."""

    case: Case
    error: str
    difference: float | None


@dataclass(frozen=True)
class Certificate:
    """What a backend was put through."""

    backend: str
    accepts_unowned_inputs: bool
    results: tuple[Result, ...]

    @property
    def passed(self) -> bool:
        return bool(self.results) and not any(result.error for result in self.results)

    def to_json(self) -> str:
        return json.dumps({**asdict(self), "passed": self.passed, "torch": torch.__version__}, indent=2)


def certify(backend: AttentionBackend, *, after_poison: Callable[[], None] = lambda: None) -> Certificate:
    """Put ``backend`` through every configuration that it says it supports.

    Whether or not it accepts unowned inputs, it is treated as if: the certificate says what it could promise.
    ``after_poison`` runs when slots have been poisoned and before threads are waited for (for tests of late readers).
    """
    capabilities = backend.capabilities
    return Certificate(
        backend=type(backend).__name__,
        accepts_unowned_inputs=capabilities.accepts_unowned_inputs,
        results=tuple(_tried(backend, case, after_poison) for case in cases(capabilities)),
    )


def cases(capabilities: Capabilities) -> Iterator[Case]:
    """Every configuration that follows from what a backend says of itself."""
    dtypes = [dtype for dtype in TOLERANCE if dtype in capabilities.dtypes]
    masks = (*(_MASKS if capabilities.masks else _MASKS[:1]), *(("causal",) if capabilities.causal else ()))
    kv_heads = (_HEADS, 2, 1) if capabilities.gqa else (_HEADS,)
    gate_dims = (0, 1, _HEAD_DIM) if capabilities.gates else (0,)
    for dtype, batch, (q_len, kv_len), heads, mask, gate_dim in product(
        dtypes, (1, 3), ((17, 17), (5, 33), (64, 1)), kv_heads, masks, gate_dims
    ):
        if mask == "causal" and q_len != kv_len:
            continue
        name = str(dtype).removeprefix("torch.")
        yield Case(name, batch, q_len, kv_len, heads, mask, capabilities.layout.value, gate_dim)


def _tried(backend: AttentionBackend, case: Case, after_poison: Callable[[], None]) -> Result:
    try:
        difference = _difference(backend, case, after_poison)
    except IthacaError as error:
        return Result(case, f"{type(error).__name__}: {error}", None)
    except Exception as error:
        return Result(case, f"raised {type(error).__name__}: {error}", None)
    limit = TOLERANCE[getattr(torch, case.dtype)]
    if not difference <= limit:
        wrong = CertificateError(
            f"the result was required to be within {limit:g} of the reference; it is {difference:g} off"
        )
        return Result(case, f"{type(wrong).__name__}: {wrong}", difference)
    return Result(case, "", difference)


def _difference(backend: AttentionBackend, case: Case, after_poison: Callable[[], None]) -> float:
    layout, dtype = backend.capabilities.layout, getattr(torch, case.dtype)
    generator = torch.Generator().manual_seed(0)
    shapes = {
        "q": (case.batch, case.q_len, _HEADS, _HEAD_DIM),
        "k": (case.batch, case.kv_len, case.kv_heads, _HEAD_DIM),
        "v": (case.batch, case.kv_len, case.kv_heads, _HEAD_DIM),
    }
    for name in sorted(backend.capabilities.gates) if case.gate_dim else ():
        shapes[GATE + name] = (case.batch, case.q_len, _HEADS, case.gate_dim)
    nhd = {
        role: (torch.randn if role in ROLES else torch.rand)(shape, generator=generator).to(dtype)
        for role, shape in shapes.items()
    }
    mask = _mask(case, generator, dtype)
    causal: dict[str, Any] = {"causal": True} if case.mask == "causal" else {}
    expected = backend.reference(
        *(nhd[role].double() for role in ROLES),
        mask=mask if mask is None or mask.dtype is torch.bool else mask.double(),
        gates={role.removeprefix(GATE): gate.double() for role, gate in nhd.items() if role not in ROLES},
        **causal,
    )

    memory: dict[str, mmap.mmap] = {}
    slots: dict[str, Tensor] = {}
    for role, tensor in nhd.items():
        data = as_nhd(tensor, layout).contiguous()
        memory[role] = mmap.mmap(-1, aligned(data.numel() * data.element_size()))
        slots[role] = torch.frombuffer(memory[role], dtype=dtype, count=data.numel()).view(data.shape).copy_(data)
    lease = Lease(slots, frozenset(slots), lambda: None)
    lease.reader = type(backend).__name__
    slots.clear()
    del data, tensor

    before = set(threading.enumerate())
    out = _attend(backend, lease, mask, case)
    lease.check_output(out)
    if out.shape != as_nhd(expected, layout).shape or out.dtype != dtype:
        raise CertificateError(
            f"{list(as_nhd(expected, layout).shape)} {dtype} was required; it returned {list(out.shape)} {out.dtype}"
        )
    lease.release()
    for buffer in memory.values():
        poison(torch.frombuffer(buffer, dtype=torch.uint8))
    after_poison()
    for thread in set(threading.enumerate()) - before:
        thread.join(_PATIENCE)
        if thread.is_alive():
            raise CertificateError(f"{lease.reader} was required to be done when it returned; {thread.name} still runs")
    return float((as_nhd(out, layout).double() - expected).abs().nan_to_num(nan=float("inf")).max())


def _attend(backend: AttentionBackend, lease: Lease, mask: Tensor | None, case: Case) -> Tensor:
    """A frame of its own: a name for a slot in one that goes on would keep it alive."""
    options: dict[str, Any] = {"mask": mask, "scale": None, "q_len": case.q_len, "kv_len": case.kv_len}
    if case.mask == "causal":
        options["causal"] = True
    if case.gate_dim:
        options["gates"] = {name: lease[GATE + name] for name in backend.capabilities.gates}
    with sanitized(lease):
        return backend.forward(*(lease[role] for role in ROLES), **options)


def _mask(case: Case, generator: torch.Generator, dtype: torch.dtype) -> Tensor | None:
    if case.mask in ("none", "causal"):
        return None
    if case.mask == "additive":
        return torch.randn(case.batch, _HEADS, case.q_len, case.kv_len, generator=generator).to(dtype)
    rows = 1 if case.mask == "keys" else case.q_len
    mask = torch.rand(case.batch, 1, rows, case.kv_len, generator=generator) > 0.3
    mask[..., 0] = True  # no row without any key: what that means is for the backend to say
    return mask
