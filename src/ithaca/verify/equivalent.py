"""Mutants of the exchange that nothing can tell from the original, and why. One that is not here is a missing check."""

from __future__ import annotations

#: A reason to the mutants that it holds for, each by the beginning of its name: function, operator, step.
EQUIVALENT: dict[str, tuple[str, ...]] = {
    "an object is put together in another order, or a part of it twice": (
        "SlotExchange.__init__: swap",
        "SlotExchange.__init__: do early",
        "SlotExchange.__init__: do twice",
        "_Targets.__init__: swap",
        "_Targets.__init__: do early",
        "_SlotCall.__init__: swap",
        "_SlotCall.__init__: do early",
        "_SlotCall.__init__: do twice",
    ),
    "looking, closing, forgetting, poisoning and waiting for what is done can be done twice": (
        "SlotExchange.check: do twice: super().check",
        "SlotExchange._trim: do twice: self.memory.trim()",
        "SlotExchange._trim: do twice: self.targets.forget()",
        "SlotExchange._shut: do twice",
        "_Targets.of: do twice",
        "_Targets.forget: do twice",
        "_SlotCall._wait: do twice: self._stream.flush()",
        "_SlotCall._headers: do twice: yield Wait",
        "_SlotCall._lease: do twice: self._check_stamps",
        "_SlotCall._poison: do twice",
        "_SlotCall._agree_on_out: do twice: settle",
        "_SlotCall._drain: do twice",
        "_SlotCall._refuse: do twice: self._stream.flush()",
    ),
    "the same bytes are written again before anybody is told of them": (
        "_SlotCall._write: do twice: targets[dest].copy_",
        "_SlotCall._write: do twice: self._memory.stamps",
        "_SlotCall._write: do twice: mine.copy_",
        "_SlotCall._write: swap with the next: targets[dest].copy_",  # with the stamp
    ),
    "what only this rank looks at, and only when the step is over, in another order": (
        "SlotExchange.check: swap",
        "SlotExchange._trim: swap",
        "SlotExchange._shut: swap with the next: if error",  # an abort goes out although waits end already
        "SlotExchange._shut: swap with the next: self.memory.close()",
        "SlotExchange._shut: do early: self.targets.forget()",
        "_Targets.forget: swap",
        "_SlotCall._write: swap with the next: self.lanes.append",
        "_SlotCall._write: swap with the next: self._due.append",
        "_SlotCall._write: swap with the next: yield self._expect(Signal.CREDIT",  # with the look-up of the targets
        "_SlotCall._write: swap with the next: if lane.text.tokens",  # its own text, with the shares of all
        "_SlotCall._write: swap with the next: for step",  # with the count of bytes
        "_SlotCall._write: do early: self.lanes.append",
        "_SlotCall._write: do early: self._due.append",
        "_SlotCall._write: do early: yield self._expect(Signal.CREDIT",
        "_SlotCall._lease: swap with the next: if self.sanitize",
        "_SlotCall._lease: swap with the next: tensors",
        "_SlotCall._lease: do early: def give_back",
    ),
    "a lane is on the list twice, and looked up by its role": ("_SlotCall._write: do twice: self.lanes.append",),
    "each rank is written to, in another order": ("_SlotCall._write: wrong rank: me in dest",),
    "a cache that is emptied more often": (
        "_Targets.of: off by one: len(self._views)",
        "_Targets.forget: drop: self._generation",
    ),
    "a header is sent after its task has begun, which waits for those of the peers": (
        "_SlotCall._push: swap",
        "_SlotCall._push_out: swap",
        "_SlotCall._refuse: swap with the next: self._memory.announce",
        "_SlotCall._refuse: swap with the next: if self.plan",
    ),
    "a header too many of a call that ends with it: read in a later call, and dropped by its number": (
        "_SlotCall._push_out: do twice: self._memory.announce",
        "_SlotCall._refuse: do twice: self._memory.announce",
    ),
    "a refusal's own step number: a refusal is judged before anything is compared": (
        "_SlotCall._refuse: do twice: header = ",
    ),
    "the second task of two is dropped with the verdict of the first": (
        "_SlotCall._refuse: do twice: self._stream.submit",
    ),
    "what is left to wait for is waited for when the call is drained": (
        "_SlotCall._refuse: drop: self._stream.flush()",
        "_SlotCall._refuse: do early: self._stream.flush()",
        "_SlotCall._refuse: swap with the next: self._stream.flush()",
    ),
}


def reason(mutant: str) -> str | None:
    """Why a mutant is equivalent; None if nothing says so."""
    return next((why for why, known in EQUIVALENT.items() if mutant.startswith(known)), None)
