"""Ulysses attention (arXiv:2309.14509): whole sequences for a slice of the heads, and back.

    attn = UlyssesAttention(SdpaBackend())
    out = attn(q, k, v)                                          # all [B, S_local, H, D]
    out = attn.forward_async(compute_q, compute_k, compute_v)    # V leaves while Q is computed

Asynchronous issue of V, Q and K follows TensorRT-LLM's visual_gen; the lease that ends before the output leaves is
Ithaca's own.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from typing_extensions import Unpack

from ithaca.backends.interface import AttentionBackend
from ithaca.errors import InvalidInputError, UnsupportedError
from ithaca.exchange.choice import EXCHANGES, exchange_for
from ithaca.exchange.interface import Exchange
from ithaca.exchange.mesh import process_group
from ithaca.exchange.refusal import told
from ithaca.geometry import Splits
from ithaca.heads import MASK
from ithaca.plan import GATE
from ithaca.strategies import compiled
from ithaca.strategies.call import AttentionCall, Compute
from ithaca.strategies.options import CallOptions
from ithaca.strategies.request import Request


class UlyssesAttention:
    """One backend across the ranks of a group. Every rank of the group makes the same calls in the same order.

    ``group`` is the default group if None; without torch.distributed, or in a group of one, a call is a plain call of
    the backend. ``exchange`` is "auto", "slots" or "collective" (see `exchange_for`), or an exchange already made. The
    exchange is set up on the first call, collectively. ``sanitize`` turns on the expensive checks of the ownership
    contract (None: as ``ITHACA_SANITIZE=1`` says). A mesh of one dimension will do for a ``group``.
    """

    def __init__(
        self,
        backend: AttentionBackend,
        group: dist.ProcessGroup | DeviceMesh | None = None,
        exchange: str | Exchange = "auto",
        sanitize: bool | None = None,
    ) -> None:
        if isinstance(exchange, str) and exchange not in EXCHANGES:
            raise InvalidInputError(f"exchange was required to be one of {EXCHANGES}; received {exchange!r}")
        if not isinstance(backend, AttentionBackend):
            raise InvalidInputError(
                f"an AttentionBackend was required, for its promises are its own; received {type(backend).__name__}"
            )
        self.backend, self.group = backend, process_group(group)
        self._exchange = exchange
        self._sanitize = sanitize
        self._tag = compiled.tag_of(self)
        #: Text that must be equal on all ranks in every call: what a model was given, say.
        self.context = ""
        #: The tokens of Q on each rank, for calls that state none: what the model that is running has cut.
        self.tokens: Splits | None = None

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
        """Ranks in the group; 1 as long as neither torch.distributed nor an exchange is there."""
        if isinstance(self._exchange, Exchange):
            return self._exchange.world_size
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
    def exchange(self) -> Exchange:
        """The exchange in use; ``.reason`` says why this one. Set up here if no call has done so: collective."""
        if isinstance(self._exchange, Exchange):
            return self._exchange
        if not self._distributed or self.ulysses_degree < 1:
            raise InvalidInputError("an exchange was required to have a process group; torch.distributed has none")
        return self._resolve(self._device({}))

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        gates: Mapping[str, Tensor] | None = None,
        **options: Unpack[CallOptions],
    ) -> Tensor:
        """Attention over the whole sequence.

        ``q``, ``k``, ``v``: ``[B, S_local, H, D]``, this rank's tokens of all heads. Lengths may differ between ranks,
        and those of ``k`` and ``v`` from that of ``q``; ranks are in the order of their tokens. K and V may have fewer
        heads than Q (GQA), for a backend that takes that; each rank is sent those that its queries need. ``gates``: by
        name, ``[B, S_local, H, D_gate]`` with the tokens of ``q``, for a backend that takes them. ``options``: see
        `CallOptions`. Returns ``[B, S_local, H, D_v]``, owned by the caller.

        Where Q, K, V or gates require grad, so does the result, on every rank; backward is collective, in the same
        order on all. The loss of the group is the sum of those of its ranks: gradients of what is sharded are those of
        one rank, and of what every rank holds (weights, text, K and V with ``kv_replicated``) each rank gets its part,
        to be summed over the group.

        Raises an `IthacaError` on every rank of the group, within the deadline, whatever the fault and wherever.
        """
        request, given = _read(None, q, k, v, gates, options)
        if torch.compiler.is_compiling():
            if isinstance(request, InvalidInputError):
                return compiled.traced_refusal(self._tag, request, q)
            return compiled.traced(self._tag, request, given)
        with self._entered(request, given) as call:
            call.send({role: given[role] for role in call.order})
            return call.attached(call.finish())

    def forward_async(
        self,
        compute_q: Compute,
        compute_k: Compute,
        compute_v: Compute,
        *,
        gates: Mapping[str, Compute | Tensor] | None = None,
        issue_order: Sequence[str] | None = None,
        project_out: Callable[[Tensor], Tensor] | None = None,
        **options: Unpack[CallOptions],
    ) -> Tensor:
        """The same, over tensors that are not there yet.

        The closures run in ``issue_order`` (V, the gates as ``"gate.NAME"``, Q and K if None), and each result
        ``[B, S_local, H, D]`` is on its way while the next one runs; it must stay as it is until this returns. The
        order changes no result. ``("q", "k", "v")``, with K and V of another length, is cross-attention.
        ``project_out`` is given the returned heads ``[B, S_local, H, D]`` while they still lie in the slot, and its
        result, which must not share memory with them, is returned: that saves the copy that the caller would get
        otherwise. In grad mode, where autograd may keep what it is given, it is given that copy, and runs after the
        call: what it raises then is raised as it is.
        """
        request, given = _read(issue_order, compute_q, compute_k, compute_v, gates, options)
        if torch.compiler.is_compiling():
            if isinstance(request, InvalidInputError):
                return compiled.traced_refusal(self._tag, request, compute_q())
            return compiled.traced_async(self._tag, request, given, project_out)
        with self._entered(request, given) as call:
            for role in call.order:
                call.send({role: given[role]})
            if not torch.is_grad_enabled():
                return call.finish(project_out)
            out = call.attached(call.finish())
        # Autograd may keep what it is given, and end a checkpoint's recomputation in here by an exception of its own.
        return out if project_out is None else project_out(out)

    def refuse(self, error: Exception) -> None:
        """Tell the peers that this rank left the calls that they are in or will enter next, and why."""
        if not compiled.leave(self._tag, error) and self.ulysses_degree > 1:
            self.exchange.refuse(told(error))

    # -- one call --------------------------------------------------------------------------------------------------

    def new_call(self, request: Request | InvalidInputError, device: torch.device) -> AttentionCall:
        """A call, to be entered."""
        exchange = self._resolve(device) if self.ulysses_degree > 1 else None
        return AttentionCall(
            self.backend, exchange, request, context=self.context, tokens=self.tokens, sanitize=self.sanitize
        )

    def _entered(self, request: Request | InvalidInputError, given: Mapping[str, object]) -> AttentionCall:
        compiled.leave(self._tag, compiled.left_in_the_middle())
        return self.new_call(request, self._device(given))

    def _device(self, given: Mapping[str, object]) -> torch.device:
        """Where the tensors are; of closures that have not run, where the group's backend has its own."""
        for value in given.values():
            if type(value) in (Tensor, torch.nn.Parameter):
                return value.device  # type: ignore[attr-defined, no-any-return]
        if self.ulysses_degree == 1 or isinstance(self._exchange, Exchange):
            return torch.device("cpu")
        return self._home

    @property
    def _home(self) -> torch.device:
        return torch.device("cuda" if "cuda:nccl" in dist.get_backend_config(self.group) else "cpu")

    def _resolve(self, device: torch.device) -> Exchange:
        if isinstance(self._exchange, str):
            if f"{device.type}:" not in dist.get_backend_config(self.group):
                device = self._home  # the call refuses such tensors, where the other ranks learn of it
            self._exchange = exchange_for(self.group, self._exchange, device=device)
        return self._exchange


def _read(
    issue_order: Any, q: Any, k: Any, v: Any, gates: Any, options: CallOptions
) -> tuple[Request | InvalidInputError, dict[str, Any]]:
    """What is asked for, or what is wrong with it, and what was given for each lane, by role.

    Raises nothing: the other ranks must learn of it inside the call, whatever Python makes of what was given.
    """
    try:
        gates = dict(gates) if isinstance(gates, Mapping) else gates  # read once
        request = Request.of(issue_order, gates, options)
        lanes = {"q": q, "k": k, "v": v, MASK: options.get("mask")}
        return request, lanes | {GATE + name: gate for name, gate in (gates or {}).items()}
    except InvalidInputError as error:
        return error, {}
    except Exception as error:
        return InvalidInputError(f"what is asked of a call was required to be readable; it raised {told(error)}"), {}
