"""Attention across ranks inside ``torch.compile(fullgraph=True)``: custom operators around one `AttentionCall`.

- Every operator mutates the one *clock* of the process, which gives the calls of all attentions one order, the same on
  all ranks, and keeps them from being dropped. Backward has a clock of its own: the graph saves it in forward, and what
  is saved may not have been mutated by a later forward.
- An attention is known by its *tag*, a tensor that holds its number. It is an input of the graph, so that one graph
  serves every layer and nothing is compiled again for the next.
- `push` and `finish` both mutate the sources. A push borrows its source until the finish has waited for it; without the
  second mutation Inductor would reuse the memory while the copy stream still reads it.
- Where a lane requires a gradient, the results are attached to the sources by an `autograd.Function` around the last
  operator, which gives a *handle* beside the result: a tensor that stands for the backward. It is all that is saved for
  backward; with it goes what it holds.
- A slot never enters the graph. `finish` waits, attends, releases and brings home in one operator, so that no pass can
  move a release before a read, nor reuse the memory of a slot as it reuses that of any other operator's result; and the
  lease's checks are as strict as in eager code.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor
from torch._C import DispatchKey

from ithaca.errors import InvalidInputError
from ithaca.strategies.autocast import autocast
from ithaca.strategies.backward import LocalBackward
from ithaca.strategies.call import AttentionCall
from ithaca.strategies.registry import NUMBER, Registry, backward_of, handle_of
from ithaca.strategies.request import Request

#: What operators mutate, by name. For `push` and `finish` the sources belong to it, see above.
CLOCK = ("clock",)
CLOCK_AND_SOURCE, CLOCK_AND_SOURCES = ("clock", "source"), ("clock", "sources")

Compute = Callable[[], Tensor]


class Owner(Protocol):
    """What a tag stands for."""

    def new_call(self, request: Request | InvalidInputError, device: torch.device) -> AttentionCall: ...


#: Count the operators that have run.
THE_CLOCK, BACKWARD_CLOCK = torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)

_owners: Registry[Owner] = Registry()
#: The calls that have begun and not finished, by the number of their owner.
_open: dict[int, AttentionCall] = {}


def tag_of(owner: Owner) -> Tensor:
    """A new tag for ``owner``."""
    with torch.inference_mode(False):
        return torch.tensor([_owners.add(owner)], dtype=NUMBER)


_AUTOGRAD = (
    DispatchKey.ADInplaceOrView,
    DispatchKey.AutogradFunctionality,
    DispatchKey.AutogradOther,
    DispatchKey.AutogradCPU,
    DispatchKey.AutogradCUDA,
)


@contextmanager
def recording() -> Iterator[None]:
    """Let autograd record inside of a custom operator, which runs below it, and with grad mode off."""
    below = torch._C._dispatch_tls_local_exclude_set()
    for key in _AUTOGRAD:
        below = below.remove(key)
    with torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), below), torch.enable_grad():
        yield


# -- the operators, at run time ------------------------------------------------------------------------------------


def begin(clock: Tensor, tag: Tensor, request: str, mask: Tensor | None, scale: float | None) -> None:
    """Open a call."""
    number = _ticked(clock, tag)
    leave(tag, left_in_the_middle())
    call = _owner(number).new_call(
        Request.decode(request, mask, scale), torch.device("cpu") if mask is None else mask.device
    )
    call.__enter__()
    _open[number] = call


def push(clock: Tensor, source: Tensor, tag: Tensor, role: str, grad: bool) -> None:
    """Send a lane on its way. ``source`` is borrowed until `finish`."""
    call = _under_way(_ticked(clock, tag))
    try:
        call.send({role: source}, (role,) if grad else ())
    except BaseException as error:
        leave(tag, error)
        raise


def finish(clock: Tensor, sources: list[Tensor], tag: Tensor, request: str, mask: Tensor | None) -> Tensor:
    """Wait for all lanes, attend and bring home; ``sources`` are what the request says is given, and free again."""
    number = _ticked(clock, tag)
    call = _under_way(number)
    try:
        call.see(mask)  # that of `begin` was borrowed by it alone
        result = call.finish().contiguous()  # as the tracer was told
    except BaseException as error:
        leave(tag, error)
        raise
    _open.pop(number).__exit__(None, None, None)
    return result


def finish_for_backward(
    clock: Tensor, sources: list[Tensor], tag: Tensor, request: str, mask: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The same, and a handle for its backward."""
    call = _under_way(int(tag))
    with recording():
        result = finish(clock, sources, tag, request, mask)
    assert call.backward is not None
    return result, handle_of(call.backward)


def attend(
    clock: Tensor, sources: Sequence[Tensor], tag: Tensor, request: str, mask: Tensor | None, scale: float | None
) -> Tensor:
    """The whole call at once."""
    return _attend(clock, sources, tag, request, mask, scale, ())[0]


def attend_for_backward(
    clock: Tensor,
    sources: Sequence[Tensor],
    tag: Tensor,
    request: str,
    mask: Tensor | None,
    scale: float | None,
    grads: str,
) -> tuple[Tensor, Tensor]:
    """The same, and a handle for its backward. ``grads``: the roles that require a gradient."""
    with recording():
        result, made = _attend(clock, sources, tag, request, mask, scale, grads.split(","))
    assert made is not None
    return result, handle_of(made)


def _attend(
    clock: Tensor,
    sources: Sequence[Tensor],
    tag: Tensor,
    request: str,
    mask: Tensor | None,
    scale: float | None,
    grads: Sequence[str],
) -> tuple[Tensor, LocalBackward | None]:
    number, asked = _ticked(clock, tag), Request.decode(request, mask, scale)
    leave(tag, left_in_the_middle())
    with _owner(number).new_call(asked, sources[0].device) as call:
        call.send(dict(zip(asked.given, sources, strict=True)), grads)
        return call.finish().contiguous(), call.backward


def refuse(clock: Tensor, q: Tensor, tag: Tensor, reason: str) -> Tensor:
    """Enter a call only to raise what is wrong with it, on this rank and the others."""
    number = _ticked(clock, tag)
    leave(tag, left_in_the_middle())
    with _owner(number).new_call(InvalidInputError(reason), q.device):
        raise AssertionError("a call that was refused was entered")


def backward(clock: Tensor, into: list[Tensor], grad_out: Tensor, handle: Tensor, tag: Tensor, grads: str) -> None:
    """Fill ``into`` with the gradients of the roles ``grads``: a mutating operator may not return a list."""
    _ticked(clock, tag)
    with recording():
        found = backward_of(handle).gradients(grad_out, keep_graph=True)  # the handle's life says how long
    for role, grad in zip(grads.split(","), into, strict=True):
        grad.copy_(found[role])


def left_in_the_middle() -> InvalidInputError:
    """What is told to the peers of a call that this rank never came back to."""
    return InvalidInputError("a compiled call was required to run to its end; its graph was left in the middle")


def leave(tag: Tensor, error: BaseException) -> bool:
    """End a call that was left open, telling the other ranks ``error``; whether there was one."""
    call = _open.pop(int(tag), None) if _open else None
    if call is not None:
        call.__exit__(type(error), error, error.__traceback__)
    return call is not None


def _owner(number: int) -> Owner:
    owner = _owners.get(number)
    if owner is None:
        raise InvalidInputError("an attention was required to live as long as the graphs that were compiled with it")
    return owner


def _ticked(clock: Tensor, tag: Tensor) -> int:
    clock += 1
    return int(tag)


def _under_way(number: int) -> AttentionCall:
    if number not in _open:
        raise InvalidInputError("a compiled call was required to begin before its lanes are pushed")
    return _open[number]


# -- the operators, for the tracer ---------------------------------------------------------------------------------


def _nothing(*args: object) -> None:
    return None


def _home(sources: Sequence[Tensor], request: str) -> Tensor:
    """Queries with the head dim of the values. What is wrong with them is said at run time, on all ranks."""
    role = dict(zip(Request.decode(request, None, None).given, sources, strict=True))
    q, v = role["q"], role["v"]
    return q.new_empty((*q.shape[:-1], v.shape[-1]))


def _with_handle(home: Tensor) -> tuple[Tensor, Tensor]:
    return home, torch.empty(1, dtype=NUMBER)


BEGIN = torch.library.custom_op("ithaca::begin", begin, mutates_args=CLOCK)
PUSH = torch.library.custom_op("ithaca::push", push, mutates_args=CLOCK_AND_SOURCE)
FINISH_FOR_BACKWARD = torch.library.custom_op(
    "ithaca::finish_for_backward", finish_for_backward, mutates_args=CLOCK_AND_SOURCES
)
ATTEND_FOR_BACKWARD = torch.library.custom_op("ithaca::attend_for_backward", attend_for_backward, mutates_args=CLOCK)
BACKWARD = torch.library.custom_op("ithaca::backward", backward, mutates_args=("clock", "into"))
FINISH = torch.library.custom_op("ithaca::finish", finish, mutates_args=CLOCK_AND_SOURCES)
ATTEND = torch.library.custom_op("ithaca::attend", attend, mutates_args=CLOCK)
REFUSE = torch.library.custom_op("ithaca::refuse", refuse, mutates_args=CLOCK)
REFUSE.register_fake(lambda clock, q, tag, reason: torch.empty_like(q))
BEGIN.register_fake(_nothing)
PUSH.register_fake(_nothing)
BACKWARD.register_fake(_nothing)
FINISH_FOR_BACKWARD.register_fake(lambda clock, sources, tag, request, mask: _with_handle(_home(sources, request)))
ATTEND_FOR_BACKWARD.register_fake(
    lambda clock, sources, tag, request, mask, scale, grads: _with_handle(_home(sources, request))
)
FINISH.register_fake(lambda clock, sources, tag, request, mask: _home(sources, request))
ATTEND.register_fake(lambda clock, sources, tag, request, mask, scale: _home(sources, request))


# -- what is traced ------------------------------------------------------------------------------------------------


def traced_async(
    tag: Tensor,
    request: Request,
    computes: Mapping[str, Compute | Tensor],
    project_out: Callable[[Tensor], Tensor] | None,
) -> Tensor:
    """`UlyssesAttention.forward_async`, for the tracer."""
    text = request.encode()
    BEGIN(THE_CLOCK, tag, text, request.mask, request.scale)
    sources = []
    for role in request.given:
        given = computes[role]
        source = autocast(role, given if isinstance(given, Tensor) else given())
        PUSH(THE_CLOCK, source.data, tag, role, _requires_grad(source))
        sources.append(source)
    grads = _grads(request.given, sources)
    out: Tensor
    if grads:
        mask, *sources = _distinct(request.mask, *sources)
        out = _ForBackward.apply(False, request.given, grads, text, tag, mask, None, *sources)  # type: ignore[no-untyped-call]
    else:
        out = FINISH(THE_CLOCK, sources, tag, text, request.mask)
    return out if project_out is None else project_out(out)


def traced(tag: Tensor, request: Request, tensors: Mapping[str, Tensor]) -> Tensor:
    """`UlyssesAttention.__call__`, for the tracer."""
    sources, text = [autocast(role, tensors[role]) for role in request.given], request.encode()
    grads = _grads(request.given, sources)
    out: Tensor
    if grads:
        mask, *sources = _distinct(request.mask, *sources)
        out = _ForBackward.apply(True, request.given, grads, text, tag, mask, request.scale, *sources)  # type: ignore[no-untyped-call]
    else:
        out = ATTEND(THE_CLOCK, sources, tag, text, request.mask, request.scale)
    return out


class _ForBackward(torch.autograd.Function):
    """The last operator of a call, and the backward of all of it.

    The operators get ``.data``: they say that they mutate their sources, and do not, and autograd would believe that
    what it has saved is no longer what it was.
    """

    @staticmethod
    def forward(
        ctx: Any,
        at_once: bool,
        roles: tuple[str, ...],
        grads: tuple[str, ...],
        request: str,
        tag: Tensor,
        mask: Tensor | None,
        scale: float | None,
        *sources: Tensor,
    ) -> Tensor:
        given = [source.data for source in sources]
        if at_once:
            out, handle = ATTEND_FOR_BACKWARD(THE_CLOCK, given, tag, request, mask, scale, ",".join(grads))
        else:
            out, handle = FINISH_FOR_BACKWARD(THE_CLOCK, given, tag, request, mask)
        ctx.save_for_backward(handle, tag)
        ctx.grads = grads
        ctx.shapes = [source.shape if role in grads else None for role, source in zip(roles, sources, strict=True)]
        home: Tensor = out
        return home

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        handle, tag = ctx.saved_tensors
        found = [None if shape is None else grad.new_empty(shape) for shape in ctx.shapes]
        into = [tensor for tensor in found if tensor is not None]
        BACKWARD(BACKWARD_CLOCK, into, grad.contiguous(), handle, tag, ",".join(ctx.grads))
        return (*(None,) * 7, *found)


def traced_refusal(tag: Tensor, error: InvalidInputError, q: Tensor) -> Tensor:
    """A call whose request is wrong, for the tracer: raising here would tell no other rank."""
    out: Tensor = REFUSE(THE_CLOCK, q, tag, str(error))
    return out


def _distinct(*given: Any) -> tuple[Any, ...]:
    """The same, with an alias for a tensor that comes again: the tracer lets a `Function` take none twice."""
    seen: list[Any] = []
    for tensor in given:
        again = tensor is not None and any(tensor is other for other in seen)
        seen.append(tensor.view_as(tensor) if again else tensor)
    return tuple(seen)


def _requires_grad(tensor: Tensor) -> bool:
    return tensor.requires_grad and torch.is_grad_enabled()


def _grads(roles: Sequence[str], sources: Sequence[Tensor]) -> tuple[str, ...]:
    return tuple(role for role, source in zip(roles, sources, strict=True) if _requires_grad(source))
