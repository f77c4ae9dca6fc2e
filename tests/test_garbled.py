"""Ten thousand headers that a peer got wrong: never a wrong result, nor a touch of memory that is not the lane's."""

from __future__ import annotations

import re
from collections import Counter

import pytest
from faulty import Garbles

from ithaca.verify import explore

pytestmark = pytest.mark.full

#: What ranks may say then. A deadlock is one in a world without time: real ranks have a deadline.
FINE = {"CorruptHeaderError", "PlanMismatchError", "PeerRefusedError", "GrowthError", "InvalidInputError"}
FINE |= {"ExchangeClosedError", "PeerDiedError", "DeadlockError"}


def test_ten_thousand_garbled_headers() -> None:
    seen: Counter[str] = Counter()
    before, seed = Garbles.garbled, 0
    while Garbles.garbled - before < 10_000:
        for scenario in ("self", "owned"):
            for finding in explore(scenario, layers=1, schedules=100, seed=seed, memory=Garbles).findings:
                # "differs from one rank" would be a wrong result, "could not go on" a view outside of a slot.
                assert not re.search("differs from|could not go on|nothing orders", finding.error), finding
                seen.update(errors := set(re.findall(r"(\w+Error):", finding.error)))
                assert errors and errors <= FINE, finding
        seed += 100
    print(dict(seen))
    assert {"CorruptHeaderError", "PlanMismatchError", "GrowthError", "DeadlockError"} <= set(seen)
