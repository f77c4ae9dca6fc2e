"""One attention call of this rank, from its first lane to its result: what eager and compiled code both go through."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from contextlib import nullcontext
from dataclasses import replace
from types import TracebackType

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily

from ithaca.backends.interface import AttentionBackend, Capabilities, borrows
from ithaca.errors import ClosureError, InvalidInputError, IthacaError, UnsupportedError
from ithaca.exchange.interface import Call, Exchange
from ithaca.exchange.lease import Lease
from ithaca.exchange.plain import is_tensor, memory_of, plain, pretence
from ithaca.exchange.refusal import in_words, told
from ithaca.exchange.sanitizer import sanitized
from ithaca.geometry import Layout, Span, Splits
from ithaca.heads import KEYS, MASK, Heads
from ithaca.plan import OUT, TEXT_OUT, as_nhd
from ithaca.strategies import compression, masks
from ithaca.strategies.autocast import autocast
from ithaca.strategies.backward import GroupBackward, LocalBackward, attach
from ithaca.strategies.checks import LaneChecks
from ithaca.strategies.local import Work, idle
from ithaca.strategies.request import Request

Compute = Callable[[], Tensor]


class AttentionCall:
    """A context: `send` each lane of the request, then `finish`. What goes wrong inside is told to the other ranks.

    ``exchange`` is None on a single rank. ``request`` may be the error that making it raised: it is raised inside the
    call, where the other ranks learn of it.
    """

    def __init__(
        self,
        backend: AttentionBackend,
        exchange: Exchange | None,
        request: Request | InvalidInputError,
        *,
        context: str = "",
        tokens: Splits | None = None,
        sanitize: bool = False,
    ) -> None:
        self._backend, self._exchange, self._sanitize = backend, exchange, sanitize
        rank, ranks = (0, 1) if exchange is None else (exchange.rank, exchange.world_size)
        self._here = "" if exchange is None else f"rank {rank}: "
        self._request, capabilities, splits, self._fault = _examined(request, backend, ranks, self._here)
        self._layout = capabilities.layout
        self._formats = self._request.options.formats
        self._checks = LaneChecks(type(backend).__name__, capabilities, self._request, tokens, rank, ranks, self._here)
        #: What was given or computed, by role.
        self._tensors: dict[str, Tensor] = {}
        #: Roles that require a gradient.
        self._grads: list[str] = []
        #: The backward of this call, where anything requires a gradient; known once it is finished.
        self.backward: LocalBackward | None = None
        #: Whether the result is there: what is raised from then on is no fault of the call.
        self._finished = False
        #: The same call, as the exchange has it.
        self._call: Call | None = None
        if exchange is not None:
            self._call = exchange.call(
                self._request.moving,
                self._layout,
                terms=self._request.terms + (", sanitized" if sanitize else "") + context,
                sanitize=sanitize,
                head_splits=splits,
                text=self._request.options.text,
            )

    def __enter__(self) -> AttentionCall:
        if self._call is not None:
            self._call.__enter__()
        if self._fault is not None:
            fault = self._fault
            self.__exit__(type(fault), fault, fault.__traceback__)
            raise fault
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        """End the call. What is no error of this library becomes one, from what it was."""
        self._tensors.clear()
        said = error if error is None or self._finished else in_words(error, self._here)
        if self._call is not None:
            with unset_fake_temporarily():  # the exchange may have headers to send
                self._call.__exit__(None if said is None else type(said), said, tb)
        if said is not error and isinstance(said, Exception):
            raise said from error

    @property
    def order(self) -> tuple[str, ...]:
        """What is to be pushed, in this order."""
        return self._request.given

    def see(self, mask: Tensor | None) -> None:
        """Attend with this mask, which is equal to that of the request."""
        self._request = replace(self._request, mask=mask)

    # -- lanes -----------------------------------------------------------------------------------------------------

    def send(self, given: dict[str, Tensor | Compute], grads: Collection[str] | None = None) -> None:
        """Send lanes on their way, under one agreement: tensors ``[B, S_local, H, D]``, or closures that make them.

        ``grads``: which of them require a gradient, where the tensors themselves do not say.
        """
        lanes = {}
        for role, what in given.items():
            if role == MASK:
                if self._call is not None:
                    assert isinstance(what, Tensor)
                    lanes[role] = masks.shard(
                        what,
                        self._tensors["q"],
                        self._tensors["k"],
                        self._here,
                        whole_keys=self._request.options.kv_replicated,
                    )
                continue
            tensor = self._computed(role, what)
            if self._exchange is not None:
                tensor = plain(tensor, self._here + role)
            self._checks.dims(role, tensor)
            if self._exchange is not None:
                self._exchange.check(role, tensor)
            tensor = autocast(role, tensor)
            self._checks.check(role, tensor, self._tensors)
            self._tensors[role] = tensor
            if self._requires_grad(role, tensor, grads):
                self._grads.append(role)
            if role == "v" and OUT in self._formats and self._call is not None:
                self._call.builder.packed.append((OUT, torch.uint8, tensor.shape[3] + compression.SCALE_NBYTES))
            if role in self._request.moving:
                lanes[role] = self._packed(role, tensor)
            elif self._call is not None:
                self._call.builder.add_whole(role, tensor)
        if self._call is not None and lanes:
            self._call.push(**lanes)

    def _requires_grad(self, role: str, tensor: Tensor, grads: Collection[str] | None) -> bool:
        """Whether a backward has to be noted for this role; without a call, autograd does that by itself."""
        if grads is not None:
            required = role in grads
        else:
            required = self._call is not None and tensor.requires_grad and torch.is_grad_enabled()
        if required and self._call is not None:
            if self._formats:
                raise UnsupportedError(
                    f"{self._here}{role} requires grad, and lanes that are sent as bytes have no backward"
                )
            self._call.builder.grads.append(role)
        return required

    def _packed(self, role: str, tensor: Tensor) -> Tensor:
        """What is sent of a lane."""
        format = self._formats.get(role)
        if format is None or self._call is None:
            return tensor
        self._call.builder.packed.append((role, tensor.dtype, tensor.shape[3]))
        return compression.pack(tensor, format)

    def _computed(self, role: str, given: Tensor | Compute) -> Tensor:
        if is_tensor(given):
            return given
        if not callable(given):
            raise InvalidInputError(f"{self._here}{role} was required to be a tensor; received {type(given).__name__}")
        try:
            tensor = given()
        except IthacaError:
            raise
        except Exception as error:
            raise ClosureError(f"{self._here}compute_{role} raised {told(error)}") from error
        if not is_tensor(tensor):
            raise ClosureError(
                f"{self._here}compute_{role} was required to return a tensor; received {type(tensor).__name__}"
            )
        return tensor

    # -- the result ------------------------------------------------------------------------------------------------

    def attached(self, result: Tensor) -> Tensor:
        """The result of `finish`, with a gradient towards the lanes that require one."""
        self._finished = True  # a checkpoint's hook ends its recomputation here, by an exception of its own
        return result if self.backward is None else attach(self.backward, result, self._tensors)

    def finish(self, project_out: Callable[[Tensor], Tensor] | None = None) -> Tensor:
        """Wait for all lanes, attend, and bring this rank's tokens home: ``[B, S_local, H, D]``, or the projection."""
        call = self._call
        if call is None:
            return self._bring_home(self._attend_alone(), False, project_out)
        format, text, dtype = self._formats.get(OUT), self._request.options.text, self._tensors["q"].dtype
        if format is None:
            call.push_out(self._attend(call), self._layout)
        else:
            heads = as_nhd(self._attend(call), self._layout)
            assert self._exchange is not None
            self._exchange.check(OUT, heads)
            call.push_out(compression.pack(heads, format), Layout.NHD)
        roles = (OUT,) if not text.tokens else (TEXT_OUT, OUT) if text.first else (OUT, TEXT_OUT)
        with call.wait_out() as home:
            home.reader = "project_out"
            if format is None and roles == (OUT,):
                return self._bring_home(home[OUT], OUT in home.unowned, project_out)
            heads = torch.cat([home[role] for role in roles], dim=1)
            if format is not None:
                heads = compression.unpack(heads, format, dtype)
            return self._bring_home(heads, False, project_out)

    def _attend(self, call: Call) -> Tensor:
        """Run the backend on what has arrived: on the slots themselves if it accepts that, else on copies."""
        with call.wait() as inputs:
            assert call.plan is not None and self._exchange is not None
            lanes = {lane.role: lane for lane in call.plan.lanes}
            rank, device = self._exchange.rank, self._tensors["q"].device
            q_len = len(lanes["q"].wants[rank].tokens)
            kv_len = len(lanes["k"].wants[rank].tokens) if "k" in lanes else self._tensors["k"].shape[1]
            work = Work(
                self._request,
                self._mask(inputs, q_len, kv_len, call.builder.heads.q_spans[rank]),
                q_len,
                kv_len,
                call.builder.heads.q_spans[rank],
                call.builder.heads.kv_spans[rank],
                call.builder.heads.group,
            )
            if call.plan.grads:
                self.backward = self._group_backward(call, work)
            queries = lanes["q"].wants[rank]
            if not len(work.q_heads):
                idle(rank, self._tensors["q"].shape[2], call.builder.heads.q_spans)
            shape = queries.shape(self._layout, lanes["q"].batch, self._tensors["v"].shape[3])
            if kv_len == 0 or not math.prod(shape):
                # Fewer heads than ranks, or no tokens: nothing to attend to.
                return torch.zeros(shape, dtype=self._tensors["q"].dtype, device=device)
            inputs.reader = type(self._backend).__name__
            unpacked = {
                role: compression.unpack(inputs[role], format, self._tensors[role].dtype)
                for role, format in self._formats.items()
                if role in lanes
            }
            if self.backward is not None:
                return self._attend_for_backward(self.backward, work, inputs)
            if borrows(self._backend, device) and set(lanes) - set(unpacked):
                with sanitized(inputs) if self._sanitize else nullcontext():
                    result = self._run(work, inputs, unpacked)
                inputs.check_output(result)
                return result
            owned = inputs.own(without=frozenset(unpacked))
            inputs.release()
            return self._run(work, owned, unpacked)

    def _group_backward(self, call: Call, work: Work) -> GroupBackward:
        assert call.plan is not None and self._exchange is not None
        rank = self._exchange.rank
        shapes: dict[str, tuple[int, ...]] = {lane.role: lane.slot_shape(rank) for lane in call.plan.lanes}
        shapes |= {role: tuple(self._whole(work, role).shape) for role in KEYS if role not in shapes}
        return GroupBackward(
            exchange=self._exchange,
            layout=self._layout,
            plan=call.plan,
            heads=call.builder.heads.q_spans,
            kv_heads=work.kv_heads,
            number=call.number,
            sanitize=self._sanitize,
            shapes={role: shapes[role] for role in call.plan.grads},
        )

    def _attend_for_backward(self, backward: LocalBackward, work: Work, inputs: Lease) -> Tensor:
        """Run the backend on copies, which it may keep, and note its graph."""
        owned = inputs.own()
        inputs.release()
        owned |= {role: self._whole(work, role) for role in KEYS if role not in owned}
        return backward.attend(owned, lambda rooted: self._run(work, rooted, {}), type(self._backend).__name__)

    def _attend_alone(self) -> Tensor:
        (_, q_len, heads, _), (_, kv_len, kv_heads, _) = self._tensors["q"].shape, self._tensors["k"].shape
        splits = self._request.options.head_splits
        if splits is not None:
            Heads(1, Splits(tuple(splits))).seen(heads, kv_heads)
        mask = self._mask(None, q_len, kv_len, Span(0, heads))
        work = Work(
            self._request,
            mask,
            q_len,
            kv_len,
            Span(0, heads),
            Span(0, kv_heads),
            heads // max(kv_heads, 1) or 1,
            shared=False,
        )
        inputs = {role: as_nhd(tensor, self._layout) for role, tensor in self._tensors.items()}
        if self._grads:
            self.backward = LocalBackward(
                layout=self._layout, shapes={role: tuple(inputs[role].shape) for role in self._grads}
            )
            name = type(self._backend).__name__
            return as_nhd(self.backward.attend(inputs, lambda rooted: self._run(work, rooted, {}), name), self._layout)
        return as_nhd(self._run(work, inputs, {}), self._layout)

    def _run(self, work: Work, inputs: Lease | dict[str, Tensor], unpacked: dict[str, Tensor]) -> Tensor:
        """Attend. K and V that did not move are taken from what the caller gave."""

        def lane(role: str) -> Tensor:
            if role in unpacked:
                return unpacked[role]
            if (isinstance(inputs, dict) and role in inputs) or role in self._request.moving:
                return inputs[role]
            return self._whole(work, role)

        return work.run(self._backend, lane, self._here)

    def _whole(self, work: Work, role: str) -> Tensor:
        """This rank's heads of K or V that every rank holds whole, in the backend's layout."""
        return as_nhd(self._tensors[role][:, :, work.kv_heads.slice], self._layout)

    def _bring_home(self, out: Tensor, unowned: bool, project_out: Callable[[Tensor], Tensor] | None) -> Tensor:
        if project_out is None:
            return out.clone() if unowned else out
        try:
            result = project_out(out)
        except IthacaError:
            raise
        except Exception as error:
            raise ClosureError(f"{self._here}project_out raised {told(error)}") from error
        if not is_tensor(result):
            raise ClosureError(
                f"{self._here}project_out was required to return a tensor; received {type(result).__name__}"
            )
        if memory_of(result) == memory_of(out) is not None:
            raise ClosureError(
                f"{self._here}project_out was required to return memory of its own; received a view of its argument"
            )
        return result

    def _mask(self, inputs: Lease | None, q_len: int, kv_len: int, heads: Span) -> Tensor | None:
        """The mask of this rank's heads, in four dims."""
        given, q = self._request.mask, self._tensors["q"]
        if self._request.options.causal and q_len != kv_len:
            raise InvalidInputError(
                f"{self._here}causal attention was required to have as many keys as queries; "
                f"received {q_len} queries and {kv_len} keys"
            )
        if given is None:
            return None
        if inputs is not None and self._request.options.mask_sharded:
            return masks.arrived(inputs[MASK].clone(), self._layout, given.dim() == 2)
        return masks.whole(given, q.shape[0], q.shape[2], q_len, kv_len, self._here, heads)


def _examined(
    request: Request | InvalidInputError, backend: AttentionBackend, ranks: int, here: str
) -> tuple[Request, Capabilities, Splits | None, Exception | None]:
    """The request, what the backend can, stated heads of each rank; and what is wrong, to be raised inside the call."""
    nothing = Request(()), Capabilities(Layout.NHD, frozenset({torch.float32})), None
    if isinstance(request, InvalidInputError):
        return *nothing, InvalidInputError(f"{here}{request}")
    if ranks > 1 and (where := pretence()):
        return *nothing, UnsupportedError(f"{here}a call was required to be outside of {where}")
    name = type(backend).__name__
    try:
        capabilities = backend.capabilities
    except IthacaError as error:
        return *nothing, error
    except Exception as error:  # the caller's code
        return *nothing, ClosureError(f"{here}the capabilities of {name} raised {told(error)}")
    if not isinstance(capabilities, Capabilities) or not isinstance(capabilities.layout, Layout):
        return *nothing, ClosureError(f"{here}{name} was required to have `Capabilities`; received {capabilities!r}")
    stated = request.options.head_splits
    try:
        if request.mask is not None and ranks > 1:
            request = replace(request, mask=plain(request.mask, f"{here}mask"))
        splits = None if stated is None else Heads(ranks, Splits(tuple(stated))).splits
    except UnsupportedError as error:
        return *nothing, error
    except InvalidInputError as error:
        return request, capabilities, None, InvalidInputError(f"{here}{error}")
    return request, capabilities, splits, None
