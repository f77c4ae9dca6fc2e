"""Real ranks that die, stop or are late at every step and at random moments: named in time, survived, nothing left."""

from __future__ import annotations

import random

import pytest
from chaos import FATES, at_random, doomed, steps

EXCHANGES = ("slots", "collective")
#: Random moments for each exchange.
MOMENTS = 200


@pytest.mark.full
@pytest.mark.alone
@pytest.mark.parametrize("exchange", EXCHANGES)
@pytest.mark.parametrize("kind", ["kill", "kill", "kill", "stop", "delay"])
def test_a_few_fates_at_a_step(exchange: str, kind: str, request: pytest.FixtureRequest) -> None:
    chance = random.Random(request.node.name)
    victim, step = chance.randrange(3), chance.randrange(1, 60)
    assert not doomed(3, exchange, victim, kind, step), f"rank {victim}, step {step}"


@pytest.mark.full
@pytest.mark.alone
@pytest.mark.parametrize("exchange", EXCHANGES)
def test_a_few_random_moments(exchange: str) -> None:
    wrong = [what for seed in range(3) if (what := at_random(seed, exchange))]
    assert not wrong


@pytest.mark.chaos
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("exchange", EXCHANGES)
@pytest.mark.parametrize("kind", FATES)
def test_every_step(exchange: str, kind: str) -> None:
    count = steps(3, exchange)
    wrong = {step: what for step in range(1, count + 1) if (what := doomed(3, exchange, step % 3, kind, step))}
    print(f"\n{exchange}: {kind} at each of {count} steps of two layers on 3 ranks, {len(wrong)} wrong")
    assert not wrong


@pytest.mark.chaos
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("exchange", EXCHANGES)
def test_many_random_moments(exchange: str) -> None:
    wrong = [what for seed in range(MOMENTS) if (what := at_random(1000 + seed, exchange))]
    print(f"\n{exchange}: {MOMENTS} random moments, {len(wrong)} wrong")
    assert not wrong
