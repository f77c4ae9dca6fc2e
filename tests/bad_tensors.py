"""Things that are no tensor which an exchange could carry, made from one that is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import MagicMock

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.masked import masked_tensor


class Wrapper(Tensor):
    """A tensor without memory, all of whose operations raise."""

    @staticmethod
    def __new__(cls, like: Tensor) -> Wrapper:
        return Tensor._make_wrapper_subclass(cls, like.shape, dtype=like.dtype)  # type: ignore[attr-defined, no-any-return]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise RuntimeError("no operation")


class Scaled(Tensor):
    """Memory that is not what the tensor means."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {})) * 2


class Raising(Tensor):
    """A subclass that can't be asked for anything."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise RuntimeError(f"no {func}")


class NoTensor:
    """Says that it is one."""

    __class__ = Tensor  # type: ignore[assignment]


def fake(t: Tensor) -> Tensor:
    with FakeTensorMode():
        return torch.empty(t.shape)


def over(t: Tensor, nbytes: int) -> Tensor:
    clone = t.clone()
    clone.untyped_storage().resize_(nbytes)
    return clone


def leaked(transform: Callable[..., Any], t: Tensor) -> Tensor:
    """What a function sees inside of a transform of `torch.func`."""
    seen: list[Tensor] = []

    def fn(x: Tensor) -> Tensor:
        seen.append(x)
        return x.sum()

    transform(fn)(t)
    return seen[0]


#: By name, from a good tensor ``[B, S, H, D]``; all are wrong for any lane, whatever the others are.
NO_LANE: dict[str, Callable[[Tensor], Any]] = {
    "None": lambda t: None,
    "a list": lambda t: [t],
    "text": lambda t: "tensor",
    "an array": lambda t: t.numpy(),
    "a mock": lambda t: MagicMock(spec=Tensor),
    "a claim": lambda t: NoTensor(),
    "0-d": lambda t: torch.tensor(1.0),
    "3-D": lambda t: t[0],
    "5-D": lambda t: t[None],
    "another batch": lambda t: torch.cat((t, t)),
    "one head more": lambda t: torch.cat((t, t[:, :, :1]), dim=2),
    "doubles": lambda t: t.double(),
    "integers": lambda t: t.int(),
    "complex": lambda t: t.to(torch.complex64),
    "conjugate": lambda t: t.to(torch.complex64).conj(),
    "sparse": lambda t: t.to_sparse(),
    "sparse rows": lambda t: torch.eye(4).to_sparse_csr(),
    "mkldnn": lambda t: t.to_mkldnn(),
    "quantized": lambda t: torch.quantize_per_tensor(t, 0.1, 0, torch.qint8),
    "nested": lambda t: torch.nested.nested_tensor(list(t)),
    "jagged": lambda t: torch.nested.nested_tensor(list(t), layout=torch.jagged),
    "masked": lambda t: masked_tensor(t.clone(), t > 0),
    "on meta": lambda t: t.to("meta"),
    "fake": fake,
    "freed": lambda t: over(t, 0),
    "cut short": lambda t: over(t, 8),
    "a wrapper": Wrapper,
    "scaled": lambda t: t.as_subclass(Scaled),
    "a raising one": lambda t: t.as_subclass(Raising),
    "batched": lambda t: leaked(torch.vmap, t),
    "differentiated": lambda t: leaked(torch.func.grad, t),
    "functional": lambda t: leaked(torch.func.functionalize, t),
    "a parameter to be": lambda t: nn.UninitializedParameter(),
    "a buffer to be": lambda t: nn.UninitializedBuffer(),
    "of no zeros": lambda t: torch._efficientzerotensor(t.shape),
    "too long": lambda t: t[:1, :1, :, :1].expand(t.shape[0], 2**41, t.shape[2], t.shape[3]),
    "too many bytes": lambda t: t[:1, :1, :, :1].expand(t.shape[0], 2**39, t.shape[2], 2**11),
}

#: The same for a mask over keys ``[B, S_kv]``.
NO_MASK: dict[str, Callable[[Tensor], Any]] = {
    **{
        name: make
        for name, make in NO_LANE.items()
        if name not in ("None", "5-D", "another batch", "doubles", "one head more", "3-D", "mkldnn", "too many bytes")
    },
    "0-d": lambda t: t[0, 0],
    "1-D": lambda t: t[0],
    "3-D": lambda t: t[None],
    "another batch": lambda t: torch.cat((t, t)),
    "one key more": lambda t: torch.cat((t, t[:, :1]), dim=1),
    "too long": lambda t: t[:, :1].expand(t.shape[0], 2**41),
    "that wants a gradient": lambda t: torch.zeros(t.shape, requires_grad=True),
    "scaled": lambda t: t.float().as_subclass(Scaled),
    "quantized": lambda t: torch.quantize_per_tensor(t.float(), 0.1, 0, torch.qint8),
    "batched": lambda t: leaked(torch.vmap, t.float()),
    "differentiated": lambda t: leaked(torch.func.grad, t.float()),
    "5-D": lambda t: t[None, None, None],
    "cut short": lambda t: over(t, 1),
}
