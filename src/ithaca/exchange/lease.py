"""The right to read filled slots, and the check that nobody keeps one of them when that right ends."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Mapping

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from ithaca.errors import AliasedOutputError, LeaseError, RetainedInputError

log = logging.getLogger("ithaca")


class Lease:
    """The right to read a set of filled slots. Ends with `release()`, or with its ``with`` block.

    ``lease[role]`` is the tensor of a lane, in the lane's layout. Where ``unowned`` names the role, it lies in memory
    that peers write again after the release. Each lease has storages of its own over that memory, and watches them by
    weak reference: a view, a tensor saved for backward and a C++ holder all share the storage, so each keeps it alive,
    and the release finds it. It does not find raw pointers.
    """

    def __init__(self, tensors: Mapping[str, Tensor], unowned: frozenset[str], give_back: Callable[[], None]) -> None:
        self._tensors, self.unowned = dict(tensors), unowned
        self._give_back: Callable[[], None] | None = give_back
        #: Who reads, for the error message.
        self.reader = "the reader"
        #: Storages that were still alive at the release, but only until garbage was collected.
        self.collected = 0
        #: Lanes that somebody still held after the release.
        self.retained: list[str] = []
        #: Runs when the right to read has ended, before the peers are told: sanitize mode poisons the slots there.
        self.before_give_back: Callable[[], None] = lambda: None
        self._watched = {
            role: StorageWeakRef(tensors[role].untyped_storage()) for role in unowned if tensors[role].numel()
        }
        self._spans = {role: _span(tensors[role]) for role in self._watched}

    def __getitem__(self, role: str) -> Tensor:
        if self._give_back is None:
            raise LeaseError(f"a lease was required to be asked before its release; received a request for {role}")
        return self._tensors[role]

    def own(self, without: frozenset[str] = frozenset()) -> dict[str, Tensor]:
        """All lanes, or all ``without`` some, in memory that outlives the lease.

        Unowned ones are copied, in one operation, which on a device is one launch; the others are given as they are.
        """
        owned = {role: self[role] for role in self._tensors if role not in without}
        unowned = sorted(self.unowned - without)
        if unowned:
            copies = [torch.empty_like(owned[role]) for role in unowned]
            torch._foreach_copy_(copies, [owned[role] for role in unowned])
            owned.update(zip(unowned, copies, strict=True))
        return owned

    def holds(self, tensor: Tensor) -> str | None:
        """The lane in whose slot ``tensor`` lies, if it lies in one."""
        if tensor.numel():
            start, stop = _span(tensor)
            for role, (slot_start, slot_stop) in self._spans.items():
                if start < slot_stop and slot_start < stop:
                    return role
        return None

    def check_output(self, out: Tensor) -> None:
        """Raise `AliasedOutputError` if ``out`` lies in a leased slot."""
        role = self.holds(out)
        if role is not None:
            raise AliasedOutputError(
                f"{self.reader} was required to return memory of its own; it returned that of the slot of {role}"
            )

    def release(self) -> None:
        """Let go of the slots and tell the peers. Once; a second call does nothing.

        `RetainedInputError` if somebody still holds one: then the peers are not told, for they would write into it.
        """
        give_back = self._let_go()
        if give_back is None:
            return
        if self._alive():
            gc.collect()
            self.retained = self._alive()
            if self.retained:
                raise RetainedInputError(
                    f"{self.reader} was required to let go of its inputs when it returned; it still holds "
                    f"{', '.join(self.retained)}, which peers are about to write again"
                    + (
                        " (autograd may have saved it: torch.no_grad() prevents that)"
                        if torch.is_grad_enabled()
                        else ""
                    )
                )
            self.collected += 1
            log.warning("%s left its inputs to the garbage collector, which costs a collection each time", self.reader)
        give_back()

    def abandon(self) -> None:
        """Release without a check: an error is under way, and its traceback may hold what the reader was given."""
        give_back = self._let_go()
        if give_back is not None:
            give_back()

    def _let_go(self) -> Callable[[], None] | None:
        """End the right to read; the result tells the peers."""
        give_back, self._give_back = self._give_back, None
        self._tensors.clear()
        if give_back is None:
            return None

        def tell() -> None:
            self.before_give_back()
            give_back()

        return tell

    def _alive(self) -> list[str]:
        return sorted(role for role, storage in self._watched.items() if not storage.expired())

    def __enter__(self) -> Lease:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.release()
        else:
            self.abandon()


def borrowed(tensor: Tensor) -> Tensor:
    """``tensor`` over the same memory with a storage of its own, which owns nothing and can be watched."""
    storage = tensor.untyped_storage()
    # The pointer must outlive the result: the exchange keeps its buffers until their leases have ended.
    fresh = torch._C._construct_storage_from_data_pointer(storage.data_ptr(), tensor.device, storage.nbytes())
    alias = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return alias.set_(fresh, tensor.storage_offset(), tensor.shape, tensor.stride())


def _span(tensor: Tensor) -> tuple[int, int]:
    """Where a tensor's storage lies in memory."""
    storage = tensor.untyped_storage()
    return storage.data_ptr(), storage.data_ptr() + storage.nbytes()
