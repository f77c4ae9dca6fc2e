"""Attention across ranks inside ``torch.compile(fullgraph=True)``: custom operators around one `Passage`.

- Every operator mutates the one *clock* of the process, which gives the calls of all attentions one order, the same on
  all ranks, and keeps them from being dropped.
- An attention is known by its *tag*, a tensor that holds its number. It is an input of the graph, so that one graph
  serves every layer and nothing is compiled again for the next.
- `push` and `finish` both mutate the sources. A push borrows its source until the finish has waited for it; without the
  second mutation Inductor would reuse the memory while the copy stream still reads it.
- A slot never enters the graph. `finish` waits, attends, releases and brings home in one operator, so that no pass can
  move a release before a read, nor reuse the memory of a slot as it reuses that of any other operator's result; and the
  lease's checks are as strict as in eager code.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from ithaca.errors import InvalidInputError, UnsupportedError
from ithaca.strategies.passage import Passage
from ithaca.strategies.request import Request

#: What operators mutate, by name. For `push` and `finish` the sources belong to it, see above.
CLOCK = ("clock",)
CLOCK_AND_SOURCE, CLOCK_AND_SOURCES = ("clock", "source"), ("clock", "sources")

Compute = Callable[[], Tensor]


class Owner(Protocol):
    """What a tag stands for."""

    def passage(self, request: Request | InvalidInputError, device: torch.device) -> Passage: ...


#: Counts the operators that have run.
THE_CLOCK = torch.zeros(1, dtype=torch.int64)

_owners: weakref.WeakValueDictionary[int, Owner] = weakref.WeakValueDictionary()
_numbers = itertools.count(1)
#: The passages that have begun and not finished, by the number of their owner.
_open: dict[int, Passage] = {}


def tag_of(owner: Owner) -> Tensor:
    """A new tag for ``owner``."""
    number = next(_numbers)
    _owners[number] = owner
    with torch.inference_mode(False):
        return torch.tensor([number])


# -- the operators, at run time ------------------------------------------------------------------------------------


def begin(clock: Tensor, tag: Tensor, request: str, mask: Tensor | None, scale: float | None) -> None:
    """Open a call."""
    number = _ticked(clock, tag)
    leave(tag, left_in_the_middle())
    passage = _owners[number].passage(
        Request.decode(request, mask, scale), torch.device("cpu") if mask is None else mask.device
    )
    passage.__enter__()
    _open[number] = passage


def push(clock: Tensor, source: Tensor, tag: Tensor, role: str) -> None:
    """Send a lane on its way. ``source`` is borrowed until `finish`."""
    passage = _under_way(_ticked(clock, tag))
    try:
        passage.push({role: source})
    except BaseException as error:
        leave(tag, error)
        raise


def finish(clock: Tensor, sources: list[Tensor], tag: Tensor, request: str, mask: Tensor | None) -> Tensor:
    """Wait for all lanes, attend and bring home; ``sources`` are what the request says is given, and free again."""
    number = _ticked(clock, tag)
    passage = _under_way(number)
    try:
        passage.see(mask)  # that of `begin` was borrowed by it alone
        result = passage.finish().contiguous()  # as the tracer was told
    except BaseException as error:
        leave(tag, error)
        raise
    _open.pop(number).__exit__(None, None, None)
    return result


def attend(
    clock: Tensor, sources: Sequence[Tensor], tag: Tensor, request: str, mask: Tensor | None, scale: float | None
) -> Tensor:
    """The whole call at once."""
    number, asked = _ticked(clock, tag), Request.decode(request, mask, scale)
    leave(tag, left_in_the_middle())
    with _owners[number].passage(asked, sources[0].device) as passage:
        passage.push(dict(zip(asked.given, sources, strict=True)))
        return passage.finish().contiguous()


def left_in_the_middle() -> InvalidInputError:
    """What is told to the peers of a call that this rank never came back to."""
    return InvalidInputError("a compiled call was required to run to its end; its graph was left in the middle")


def leave(tag: Tensor, error: BaseException) -> bool:
    """End a call that was left open, telling the other ranks ``error``; whether there was one."""
    passage = _open.pop(int(tag), None)
    if passage is not None:
        passage.__exit__(type(error), error, error.__traceback__)
    return passage is not None


def _ticked(clock: Tensor, tag: Tensor) -> int:
    clock += 1
    return int(tag)


def _under_way(number: int) -> Passage:
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


BEGIN = torch.library.custom_op("ithaca::begin", begin, mutates_args=CLOCK)
PUSH = torch.library.custom_op("ithaca::push", push, mutates_args=CLOCK_AND_SOURCE)
FINISH = torch.library.custom_op("ithaca::finish", finish, mutates_args=CLOCK_AND_SOURCES)
ATTEND = torch.library.custom_op("ithaca::attend", attend, mutates_args=CLOCK)
BEGIN.register_fake(_nothing)
PUSH.register_fake(_nothing)
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
        source = _without_grad(role, given if isinstance(given, Tensor) else given())
        PUSH(THE_CLOCK, source, tag, role)
        sources.append(source)
    out = FINISH(THE_CLOCK, sources, tag, text, request.mask)
    return out if project_out is None else project_out(out)


def traced(tag: Tensor, request: Request, tensors: Mapping[str, Tensor]) -> Tensor:
    """`UlyssesAttention.__call__`, for the tracer."""
    sources = [_without_grad(role, tensors[role]) for role in request.given]
    out: Tensor = ATTEND(THE_CLOCK, sources, tag, request.encode(), request.mask, request.scale)
    return out


def valid(request: Request | InvalidInputError) -> Request:
    """The request, if it is one."""
    if isinstance(request, InvalidInputError):
        raise request
    return request


def _without_grad(role: str, tensor: Tensor) -> Tensor:
    if tensor.requires_grad and torch.is_grad_enabled():
        raise UnsupportedError(f"{role} requires grad, and this version has no backward: use torch.no_grad()")
    return tensor
