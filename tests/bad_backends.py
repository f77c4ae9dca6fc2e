"""Backends that say that they accept unowned inputs, and break the promise: each in a way of its own."""

from __future__ import annotations

import ctypes
import threading
from typing import Any

import torch
from torch import Tensor

from ithaca import Capabilities, Layout, SdpaBackend


class Promising(SdpaBackend):
    """SDPA that does something with its inputs, before it attends."""

    kept: Any = None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        cls.capabilities = property(  # type: ignore[assignment]
            lambda self: Capabilities(Layout.HND, frozenset({torch.float32}), accepts_unowned_inputs=True)
        )
        super().__init_subclass__(**kwargs)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        self.abuse(q, k, v)
        return super().forward(q, k, v, **options)

    def abuse(self, q: Tensor, k: Tensor, v: Tensor) -> None:
        raise NotImplementedError


class KeepsView(Promising):
    def abuse(self, q: Tensor, k: Tensor, v: Tensor) -> None:
        self.kept = k


class KeepsViewOfView(Promising):
    def abuse(self, q: Tensor, k: Tensor, v: Tensor) -> None:
        self.kept = [v.flatten()[1:3].view(2)]


class SavesForBackward(Promising):
    def abuse(self, q: Tensor, k: Tensor, v: Tensor) -> None:
        with torch.enable_grad():
            self.kept = q * torch.ones(1, dtype=q.dtype, requires_grad=True)


class LeavesGarbage(Promising):
    def abuse(self, q: Tensor, k: Tensor, v: Tensor) -> None:
        cycle: list[Any] = [q]
        cycle.append(cycle)


class WritesQ(Promising):
    def abuse(self, q: Tensor, k: Tensor, v: Tensor) -> None:
        q[..., -1] += 1


class RecordsStream(Promising):
    def abuse(self, q: Tensor, k: Tensor, v: Tensor) -> None:
        k.record_stream(torch.Stream(stream_id=0, device_index=0, device_type=1))


class ReturnsV(Promising):
    def forward(self, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        return v


class ReadsLater(Promising):
    """Reads V through a raw pointer, which no weak reference sees, when it is told to: after it has returned."""

    def __init__(self) -> None:
        super().__init__()
        self.go = threading.Event()

    def forward(self, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        out = SdpaBackend().forward(q, k, v, **options)
        pointer, nbytes = v.data_ptr(), min(v.numel() * v.element_size(), out.numel() * out.element_size())

        def late() -> None:
            self.go.wait(10)
            self.go.clear()
            ctypes.memmove(out.data_ptr(), pointer, nbytes)

        threading.Thread(target=late, daemon=True).start()
        return out
