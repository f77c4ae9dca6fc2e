"""Ulysses attention (arXiv:2309.14509): whole sequences for a slice of the heads, and back.

    attn = UlyssesAttention(SdpaBackend())
    out = attn(q, k, v)                                          # all [B, S_local, H, D]
    out = attn.forward_async(compute_q, compute_k, compute_v)    # V leaves while Q is computed

Asynchronous issue of V, Q and K follows TensorRT-LLM's visual_gen; the lease that ends before the output leaves is
Ithaca's own.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from ithaca.backends.interface import AttentionBackend, borrows
from ithaca.errors import ClosureError, InvalidInputError, IthacaError, UnsupportedError
from ithaca.exchange.choice import EXCHANGES, exchange_for
from ithaca.exchange.interface import Call, Exchange
from ithaca.exchange.scrutiny import scrutinized
from ithaca.geometry import Layout
from ithaca.plan import OUT, as_nhd

Compute = Callable[[], Tensor]

ROLES = ("q", "k", "v")


class UlyssesAttention:
    """One backend across the ranks of a group. Every rank of the group makes the same calls in the same order.

    ``group`` is the default group if None; without torch.distributed, or in a group of one, a call is a plain call of
    the backend. ``exchange`` is "auto", "slots" or "collective" (see `exchange_for`), or an exchange already made. The
    exchange is set up on the first call, collectively. ``sanitize`` turns on the expensive checks of the ownership
    contract (None: as ``ITHACA_SANITIZE=1`` says).
    """

    def __init__(
        self,
        backend: AttentionBackend,
        group: dist.ProcessGroup | None = None,
        exchange: str | Exchange = "auto",
        sanitize: bool | None = None,
    ) -> None:
        if isinstance(exchange, str) and exchange not in EXCHANGES:
            raise InvalidInputError(f"exchange was required to be one of {EXCHANGES}; received {exchange!r}")
        if not isinstance(backend, AttentionBackend):
            raise InvalidInputError(
                f"an AttentionBackend was required, for its promises are its own; received {type(backend).__name__}"
            )
        self.backend, self.group = backend, group
        self._exchange = exchange
        self._sanitize = sanitize
        #: Text that must be equal on all ranks in every call: what a model was given, say.
        self.context = ""

    def __reduce__(self) -> NoReturn:
        raise UnsupportedError(
            "an attention across ranks cannot be copied or pickled, nor can a model that was parallelized with it: "
            "copy the model first, and parallelize the copy"
        )

    @property
    def sanitize(self) -> bool:
        """Whether the expensive checks of the ownership contract are on: as given, else by ``ITHACA_SANITIZE=1``."""
        return os.environ.get("ITHACA_SANITIZE", "") == "1" if self._sanitize is None else self._sanitize

    @property
    def ulysses_degree(self) -> int:
        """Ranks in the group; 1 as long as torch.distributed is not there."""
        if not self._distributed:
            return 1
        ranks = dist.get_world_size(self.group)
        if ranks < 1:
            raise InvalidInputError("a rank of the group was required; this process is not in it")
        return ranks

    @property
    def _distributed(self) -> bool:
        return dist.is_available() and dist.is_initialized()

    @property
    def _here(self) -> str:
        return f"rank {dist.get_rank(self.group)}: " if self.ulysses_degree > 1 else ""

    @property
    def exchange(self) -> Exchange:
        """The exchange in use; ``.reason`` says why this one. Set up here if no call has done so: collective."""
        if not self._distributed or self.ulysses_degree < 1:
            raise InvalidInputError("an exchange was required to have a process group; torch.distributed has none")
        return self._resolve(self._device({}))

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, *, mask: Tensor | None = None, scale: float | None = None
    ) -> Tensor:
        """Attention over the whole sequence.

        ``q``, ``k``, ``v``: ``[B, S_local, H, D]``, this rank's tokens of all heads. Lengths may differ between ranks,
        and those of ``k`` and ``v`` from that of ``q``; ranks are in the order of their tokens. ``mask``: None, or the
        same tensor on every rank, ``[B, S_kv]`` or ``[B | 1, H | 1, S_q, S_kv]`` over the whole lengths, boolean (True
        takes part) or additive. Returns ``[B, S_local, H, D]``, owned by the caller.

        Raises an `IthacaError` on every rank of the group, within the deadline, whatever the fault and wherever.
        """
        return self._run({"q": q, "k": k, "v": v}, ROLES, None, mask, scale, at_once=True)

    def forward_async(
        self,
        compute_q: Compute,
        compute_k: Compute,
        compute_v: Compute,
        *,
        issue_order: Sequence[str] = ("v", "q", "k"),
        project_out: Callable[[Tensor], Tensor] | None = None,
        mask: Tensor | None = None,
        scale: float | None = None,
    ) -> Tensor:
        """The same, over tensors that are not there yet.

        The closures run in ``issue_order``, and each result ``[B, S_local, H, D]`` is on its way while the next one
        runs; it must stay as it is until this returns. The order changes no result. ``("q", "k", "v")``, with K and V
        of another length, is cross-attention. ``project_out`` is given the returned heads ``[B, S_local, H, D]`` while
        they still lie in the slot, and its result, which must not share memory with them, is returned: that saves the
        copy that the caller would get otherwise.
        """
        computes = {"q": compute_q, "k": compute_k, "v": compute_v}
        return self._run(computes, issue_order, project_out, mask, scale, at_once=False)

    # -- one call ----------------------------------------------------------------------------------------------------

    def _run(
        self,
        given: dict[str, Tensor] | dict[str, Compute],
        issue_order: Sequence[str],
        project_out: Callable[[Tensor], Tensor] | None,
        mask: Tensor | None,
        scale: float | None,
        *,
        at_once: bool,
    ) -> Tensor:
        made: dict[str, Tensor] = {}

        def compute(role: str) -> Tensor:
            made[role] = self._compute(role, given[role], made, mask, at_once)
            return made[role]

        if self.ulysses_degree == 1:
            for role in self._checked(issue_order, mask, scale):
                compute(role)
            return self._alone(made, project_out, mask, scale)
        # Everything that can be wrong on one rank is raised inside the call: there the other ranks learn of it.
        fault: Exception | None = None
        order: tuple[str, ...] = ()
        layout = Layout.NHD
        try:
            order, layout = self._checked(issue_order, mask, scale), self.backend.capabilities.layout
        except Exception as error:
            fault = error
        with self._resolve(self._device(given)).call(
            order, layout, terms=_terms(mask, scale) + self.context, sanitize=self.sanitize
        ) as call:
            if fault is not None:
                raise fault
            if at_once:
                call.push(**{role: compute(role) for role in order})
            else:
                for role in order:
                    call.push(**{role: compute(role)})
            out = self._attend(call, made, mask, scale)
            call.push_out(out, layout)
            with call.wait_out() as home:
                home.reader = "project_out"
                return self._bring_home(home[OUT], OUT in home.unowned, project_out)

    def _compute(
        self, role: str, given: Tensor | Compute, made: dict[str, Tensor], mask: Tensor | None, at_once: bool
    ) -> Tensor:
        """The tensor of a lane, checked against the backend and the lanes before it."""
        if isinstance(given, Tensor):
            tensor = given
        elif at_once:
            raise InvalidInputError(f"{self._here}{role} was required to be a tensor; received {type(given).__name__}")
        else:
            try:
                tensor = given()
            except IthacaError:
                raise
            except Exception as error:
                raise ClosureError(f"{self._here}compute_{role} raised {type(error).__name__}: {error}") from error
            if not isinstance(tensor, Tensor):
                raise ClosureError(
                    f"{self._here}compute_{role} was required to return a tensor; received {type(tensor).__name__}"
                )
        capabilities = self.backend.capabilities
        if tensor.dim() != 4:
            raise InvalidInputError(
                f"{self._here}{role} was required to be [B, S_local, H, D]; received {list(tensor.shape)}"
            )
        if tensor.dtype not in capabilities.dtypes:
            raise UnsupportedError(
                f"{self._here}{type(self.backend).__name__} was required to attend in {tensor.dtype}; it can in "
                f"{', '.join(sorted(map(str, capabilities.dtypes)))}"
            )
        if tensor.requires_grad and torch.is_grad_enabled() and self.ulysses_degree > 1:
            raise UnsupportedError(
                f"{self._here}{role} requires grad, and this version has no backward: use torch.no_grad()"
            )
        for other, earlier in made.items():
            self._match(role, tensor, other, earlier)
        if mask is not None and not capabilities.masks:
            raise UnsupportedError(f"{self._here}{type(self.backend).__name__} takes no mask, and none is ever dropped")
        return tensor

    def _match(self, role: str, tensor: Tensor, other: str, earlier: Tensor) -> None:
        """Batch, heads, dtype and device are shared by all; tokens by k and v; the head dim by q and k."""
        required = list(earlier.shape)
        if {role, other} != {"k", "v"}:
            required[1] = tensor.shape[1]
        if {role, other} != {"q", "k"}:
            required[3] = tensor.shape[3]
        if list(tensor.shape) != required or tensor.dtype != earlier.dtype or tensor.device != earlier.device:
            raise InvalidInputError(
                f"{self._here}{role} was required to be {required} {earlier.dtype} on {earlier.device}, as {other} is; "
                f"received {list(tensor.shape)} {tensor.dtype} on {tensor.device}"
            )

    def _attend(self, call: Call, made: dict[str, Tensor], mask: Tensor | None, scale: float | None) -> Tensor:
        """Run the backend on what has arrived: on the slots themselves if it accepts that, else on copies."""
        with call.wait() as inputs:
            assert call.plan is not None
            lanes = {lane.role: lane for lane in call.plan.lanes}
            rank = self.exchange.rank
            heads = lanes["q"].wants[rank].heads
            q_len, kv_len = (len(lanes[role].wants[rank].tokens) for role in ("q", "k"))
            mask = self._whole_mask(mask, made["q"].shape[0], made["q"].shape[2], q_len, kv_len)
            if mask is not None and mask.shape[1] > 1:
                mask = mask[:, heads.start : heads.stop]
            layout, out = self.backend.capabilities.layout, call.plan.out
            if kv_len == 0 or not math.prod(out.local_shape(rank)):
                # Fewer heads than ranks, or no tokens: nothing to attend to.
                shape = out.holds[rank].shape(layout, out.batch, out.head_dim)
                return torch.zeros(shape, dtype=out.dtype, device=made["q"].device)
            inputs.reader = type(self.backend).__name__
            rest = (mask, scale, q_len, kv_len)
            if borrows(self.backend, made["q"].device):
                # Slots are named nowhere but in this call: a name here would keep them alive past the release.
                with scrutinized(inputs) if call.sanitize else nullcontext():
                    result = self._backend(inputs["q"], inputs["k"], inputs["v"], *rest)
                inputs.check_output(result)
                return result
            owned = inputs.own()
            inputs.release()
            return self._backend(owned["q"], owned["k"], owned["v"], *rest)

    def _backend(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float | None, q_len: int, kv_len: int
    ) -> Tensor:
        try:
            out = self.backend.forward(q, k, v, mask=mask, scale=scale, q_len=q_len, kv_len=kv_len)
        except IthacaError:
            raise
        except Exception as error:
            raise ClosureError(
                f"{self._here}{type(self.backend).__name__} raised {type(error).__name__}: {error}"
            ) from error
        if not isinstance(out, Tensor):
            raise ClosureError(
                f"{self._here}{type(self.backend).__name__} was required to return a tensor; "
                f"received {type(out).__name__}"
            )
        return out

    def _bring_home(self, out: Tensor, unowned: bool, project_out: Callable[[Tensor], Tensor] | None) -> Tensor:
        if project_out is None:
            return out.clone() if unowned else out
        if unowned and torch.is_grad_enabled():
            out = out.clone()  # autograd may save it for the gradient of a weight
        try:
            result = project_out(out)
        except Exception as error:
            raise ClosureError(f"{self._here}project_out raised {type(error).__name__}: {error}") from error
        if not isinstance(result, Tensor):
            raise ClosureError(
                f"{self._here}project_out was required to return a tensor; received {type(result).__name__}"
            )
        if out.numel() and result.untyped_storage().data_ptr() == out.untyped_storage().data_ptr():
            raise ClosureError(
                f"{self._here}project_out was required to return memory of its own; received a view of its argument"
            )
        return result

    def _checked(self, issue_order: Sequence[str], mask: Tensor | None, scale: float | None) -> tuple[str, ...]:
        """The issue order, if what needs no tensor of the call is right."""
        if not isinstance(issue_order, Sequence) or sorted(map(str, issue_order)) != sorted(ROLES):
            raise InvalidInputError(
                f"{self._here}issue_order was required to be a permutation of {ROLES}; received {issue_order!r}"
            )
        if not (mask is None or isinstance(mask, Tensor)) or not (scale is None or isinstance(scale, int | float)):
            raise InvalidInputError(
                f"{self._here}mask was required to be a tensor or None, and scale a number or None; "
                f"received {type(mask).__name__} and {type(scale).__name__}"
            )
        return tuple(issue_order)

    def _whole_mask(self, mask: Tensor | None, batch: int, heads: int, q_len: int, kv_len: int) -> Tensor | None:
        """``mask`` in four dims, checked against the whole lengths."""
        if mask is None:
            return None
        whole = mask[:, None, None, :] if mask.dim() == 2 else mask
        fits = whole.dim() == 4 and all(
            size == full or (size == 1 and may_be_one)
            for size, full, may_be_one in zip(
                whole.shape, (batch, heads, q_len, kv_len), (True, True, mask.dim() == 2, False), strict=True
            )
        )
        if not fits:
            raise InvalidInputError(
                f"{self._here}a mask was required to be [{batch}, {kv_len}] or "
                f"[{batch}|1, {heads}|1, {q_len}, {kv_len}]; received {list(mask.shape)}"
            )
        return whole

    def _alone(
        self,
        made: dict[str, Tensor],
        project_out: Callable[[Tensor], Tensor] | None,
        mask: Tensor | None,
        scale: float | None,
    ) -> Tensor:
        layout = self.backend.capabilities.layout
        (batch, q_len, heads, _), kv_len = made["q"].shape, made["k"].shape[1]
        mask = self._whole_mask(mask, batch, heads, q_len, kv_len)
        q, k, v = (as_nhd(made[role], layout) for role in ROLES)
        out = as_nhd(self._backend(q, k, v, mask, scale, q_len, kv_len), layout)
        return self._bring_home(out, False, project_out)

    def _device(self, given: dict[str, Tensor] | dict[str, Compute]) -> torch.device:
        """Where the tensors are; of closures that have not run, where the group's backend has its own."""
        for value in given.values():
            if isinstance(value, Tensor):
                return value.device
        return torch.device("cuda" if "cuda:nccl" in dist.get_backend_config(self.group) else "cpu")

    def _resolve(self, device: torch.device) -> Exchange:
        if isinstance(self._exchange, str):
            self._exchange = exchange_for(self.group, self._exchange, device=device)
        return self._exchange


def _terms(mask: Tensor | None, scale: float | None) -> str:
    """What must be equal on all ranks beside the lanes, as text."""
    masked = f"{str(mask.dtype).removeprefix('torch.')}{[*mask.shape]}" if isinstance(mask, Tensor) else "none"
    scaled = float(scale) if isinstance(scale, int | float) else None
    return f"scale {scaled}, mask {masked}"
