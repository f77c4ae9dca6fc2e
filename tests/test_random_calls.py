"""Two thousand made-up calls an exchange: each is right, or an error on every rank, and the next one works."""

from __future__ import annotations

from collections import Counter

import pytest
from conftest import Run
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from random_calls import BAD, BAD_CALLS, BAD_TENSORS, GOOD, RandomCall, judge

pytestmark = pytest.mark.full

#: Calls that ranks go through together, and how often.
BATCH, BATCHES = 20, 100


@pytest.mark.timeout(600)
@pytest.mark.parametrize("exchange", ["slots", "collective"])
def test_two_thousand_calls(on_ranks: Run, exchange: str) -> None:
    seen: Counter[str] = Counter()

    @settings(
        max_examples=BATCHES,
        deadline=None,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
        database=None,
        phases=[Phase.generate],  # the ranks stay: an exchange that was closed would be closed for a smaller batch too
    )
    @given(st.lists(st.one_of(GOOD, GOOD, BAD), min_size=BATCH, max_size=BATCH))
    def many(calls: list[RandomCall]) -> None:
        for call, *verdicts in zip(calls, *on_ranks(2, judge, exchange, calls, timeout=60), strict=True):
            if call.bad == "" or (call.bad == "an order with a stranger" and call.at_once):
                assert verdicts == ["exact", "exact"], call
                seen["exact"] += 1
            else:
                assert all(verdict.endswith("Error") and " " not in verdict for verdict in verdicts), (call, verdicts)
                seen[call.bad] += 1

    many()
    print(exchange, dict(seen))
    assert sum(seen.values()) >= BATCH * BATCHES
    assert seen["exact"] >= sum(seen.values()) / 2
    assert set(seen) == {"exact", *BAD_TENSORS, *BAD_CALLS}
