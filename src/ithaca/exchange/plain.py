"""Whether a tensor is what the exchange takes it for: memory, which its dtype, shape and strides describe.

PyTorch's dispatch keys say so, and no subclass can override them: beside dense memory of a device a plain tensor has
only what autograd and autocast add. Wrapper subclasses, fake, quantized, sparse, nested and functorch's tensors each
have a key more.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C import DispatchKey, DispatchKeySet
from torch.autograd import forward_ad

from ithaca.errors import UnsupportedError

if TYPE_CHECKING:
    from typing_extensions import TypeIs


def _bits(*keys: DispatchKey) -> int:
    bits = 0
    for key in keys:
        bits |= DispatchKeySet(key).raw_repr()
    return bits


_NEGATIVE = _bits(DispatchKey.Negative)
_PLAIN = _NEGATIVE | _bits(
    DispatchKey.CPU,
    DispatchKey.CUDA,
    DispatchKey.XPU,
    DispatchKey.MPS,
    DispatchKey.HPU,
    DispatchKey.PrivateUse1,
    DispatchKey.Meta,
    DispatchKey.ADInplaceOrView,
    DispatchKey.AutogradFunctionality,
    DispatchKey.AutogradOther,
    DispatchKey.AutocastCPU,
    DispatchKey.AutocastCUDA,
    DispatchKey.AutocastXPU,
    *(getattr(DispatchKey, f"Autocast{device}") for device in ("MPS", "HPU", "PrivateUse1")),  # stubs lack them
)
#: How a class says that PyTorch's functions do to its tensors what they do to any.
_PLAIN_FUNCTIONS = (Tensor.__torch_function__.__func__, torch._C._disabled_torch_function_impl)  # type: ignore[attr-defined]


def is_tensor(value: object) -> TypeIs[Tensor]:
    """As `isinstance`, which asks the value itself: a mock with a spec says yes."""
    return issubclass(type(value), Tensor)


def plain(tensor: Tensor, what: str) -> Tensor:
    """``tensor`` as one of class `Tensor`, over the same memory and with the same gradient.

    A subclass that changes nothing but its name is seen through, a negative view is resolved, and a functional
    collective is waited for. Raises `UnsupportedError` for all else; ``what`` begins its message.
    """
    kind = type(tensor)
    keys = torch._C._dispatch_keys(tensor)
    bits = keys.raw_repr()
    if bits & ~_PLAIN:
        if _under_way(tensor):
            waited: Tensor = torch.ops._c10d_functional.wait_tensor(tensor)
            return waited
        raise _refused(what, f"a {kind.__name__} with the {keys}")
    if kind not in (Tensor, torch.nn.Parameter):
        function = kind.__torch_function__
        if getattr(function, "__func__", function) not in _PLAIN_FUNCTIONS:
            raise _refused(what, f"a {kind.__name__}, whose class redefines PyTorch's functions")
        with torch._C.DisableTorchFunctionSubclass():
            tensor = Tensor.as_subclass(tensor, Tensor)
    if bits & _NEGATIVE:
        tensor = tensor.resolve_neg()
    if tensor.numel():
        last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        required = (tensor.storage_offset() + last + 1) * tensor.itemsize
        held = tensor.untyped_storage().nbytes()
        if held < required:
            raise _refused(what, f"one that needs {required} bytes over memory of {held}, as if it had been freed")
    if forward_ad._current_level >= 0 and forward_ad.unpack_dual(tensor).tangent is not None:
        raise _refused(what, "one with a tangent, and there is no forward-mode differentiation across ranks")
    return tensor


def pretence() -> str | None:
    """What the caller is inside of that makes tensors other than they seem, and so those of the exchange."""
    if torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None:
        return "a FakeTensorMode"
    if torch._C._functorch.peek_interpreter_stack() is not None:
        return "the transforms of torch.func"
    return None


def memory_of(tensor: Tensor) -> int | None:
    """Where a plain tensor that has memory lies."""
    try:
        return plain(tensor, "").untyped_storage().data_ptr() if tensor.numel() else None
    except UnsupportedError:
        return None


def _under_way(tensor: Tensor) -> bool:
    """Whether it is the result of a functional collective, which nobody has waited for."""
    if not dist.is_available():
        return False
    from torch.distributed import _functional_collectives

    return type(tensor) is _functional_collectives.AsyncCollectiveTensor


def _refused(what: str, received: str) -> UnsupportedError:
    return UnsupportedError(f"{what} was required to be a plain tensor with memory of its own; received {received}")
