"""diffusers' caches on a parallelized model: all ranks skip alike, and the frames have the bits of one rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import diffusers
import pytest
import torch
import torch._dynamo
from conftest import Run
from diffusers import WanTransformer3DModel
from diffusers.hooks import SmoothedEnergyGuidanceConfig
from diffusers.hooks.smoothed_energy_guidance_utils import _apply_smoothed_energy_guidance_hook
from tiny_wan import GRIDS, inputs, wan
from torch import Tensor

from ithaca import IthacaError, UnsupportedError, parallelize

pytestmark = pytest.mark.full

STEPS, GRID = 8, (3, 6, 10)  # 45 tokens: 23 and 22
#: The timestep that is under way, for the caches that ask.
now = {"timestep": 0}


def first_block(threshold: float) -> Any:
    return diffusers.FirstBlockCacheConfig(threshold=threshold)


def mag(calibrate: bool = False) -> Any:
    ratios = None if calibrate else [1.0, 1.02, 0.98, 1.01, 0.97, 1.03, 0.99, 1.0]
    steps = 2 * STEPS if calibrate else STEPS
    return diffusers.MagCacheConfig(mag_ratios=ratios, calibrate=calibrate, threshold=0.05, num_inference_steps=steps)


def broadcast() -> Any:
    return diffusers.PyramidAttentionBroadcastConfig(
        spatial_attention_block_skip_range=2,
        cross_attention_block_skip_range=3,
        current_timestep_callback=lambda: now["timestep"],
    )


def taylor(lite: bool = False) -> Any:
    return diffusers.TaylorSeerCacheConfig(
        cache_interval=2,
        disable_cache_before_step=2,
        taylor_factors_dtype=torch.float32,
        cache_identifiers=[r"blocks\.\d+\.attn[12]"],
        use_lite_mode=lite,
    )


def faster(distilled: bool) -> Any:
    return diffusers.FasterCacheConfig(
        spatial_attention_timestep_skip_range=(-1, 850),
        unconditional_batch_timestep_skip_range=(-1, 901),
        unconditional_batch_skip_range=3,
        is_guidance_distilled=distilled,
        current_timestep_callback=lambda: now["timestep"],
    )


KINDS: dict[str, Callable[[], Any]] = {
    **{
        f"first block, {threshold}": lambda threshold=threshold: first_block(threshold)
        for threshold in (0.071, 0.08, 0.095)
    },
    "mag": mag,
    "mag, calibrating": lambda: mag(calibrate=True),
    "broadcast": broadcast,
    "taylor": taylor,
    "taylor lite": lambda: taylor(lite=True),
    "faster": lambda: faster(False),
    "faster, distilled": lambda: faster(True),
    "sea": lambda: diffusers.SeaCacheConfig(threshold=0.5),
    "text": diffusers.TextKVCacheConfig,
}


def denoised(
    model: WanTransformer3DModel, steps: int = STEPS, dtype: torch.dtype = torch.float32
) -> tuple[list[Tensor], int]:
    """The latents of every step, and how often the last block's feed-forward or self-attention ran.

    The first frames move much more than the last ones do, and so does the residual of the rank that holds them.
    """
    given, ran, frames = inputs(GRID), [0], []
    given = {k: v.to(dtype) if isinstance(v, Tensor) else v for k, v in given.items()}
    latents, noise = given["hidden_states"], torch.Generator().manual_seed(2)
    last = model.blocks[-1]
    hooks = [m.register_forward_hook(lambda *_: ran.__setitem__(0, ran[0] + 1)) for m in (last.ffn, last.attn1.to_q)]
    for step in range(steps):
        now["timestep"] = 900 - 100 * step
        given["timestep"] = torch.tensor([now["timestep"]] * 2)
        where = {"step_index": step, "sigma": now["timestep"] / 1000, "num_inference_steps": steps}
        with torch.no_grad(), model.cache_context("cond", **where):
            out = model(**{**given, "hidden_states": latents})[0]
        moved = torch.randn(latents.shape, generator=noise) * torch.tensor([0.4, 0.05, 0.01])[:, None, None]
        latents = latents - 0.05 * out + moved.to(dtype) * (step % 3 == 1)
        frames.append(latents)
    for hook in hooks:
        hook.remove()
    return frames, ran[0]


def cached(rank: int, kind: str, exchange: str, first: str) -> tuple[int, int]:
    alone, model = wan(layers=3), wan(layers=3)
    alone.enable_cache(KINDS[kind]())
    expected, ran = denoised(alone)
    whole, _ = denoised(wan(layers=3))
    if first == "cache":
        model.enable_cache(KINDS[kind]())
        denoised(model, 1)  # what it keeps of this is of all tokens
    parallelize(model, ulysses_degree=2, exchange=exchange)
    if first == "parallelize":
        model.enable_cache(KINDS[kind]())
    for _ in range(2):
        frames, mine = denoised(model)
        assert mine == ran
        for one, other in zip(frames, expected, strict=True):
            assert torch.equal(one, other)
        model._reset_stateful_cache()
    model.disable_cache()
    frames, _ = denoised(model)
    assert all(torch.equal(one, other) for one, other in zip(frames, whole, strict=True))
    return ran, 2 * STEPS


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("exchange", "first"), [("slots", "parallelize"), ("slots", "cache"), ("collective", "cache")])
def test_a_cache_skips_as_on_one_rank(on_ranks: Run, kind: str, exchange: str, first: str) -> None:
    for ran, calls in on_ranks(2, cached, kind, exchange, first):
        assert 2 < ran < calls or kind in ("mag, calibrating", "text")


def in_bfloat16(rank: int) -> int:
    """Where one rank's means round to eight bits, and so must the group's."""
    alone, model = wan(layers=3).bfloat16(), wan(layers=3).bfloat16()
    parallelize(model, ulysses_degree=2)
    runs = 0
    for threshold in (0.0708, 0.071, 0.0713, 0.0718, 0.0725, 0.075, 0.089):
        both = []
        for one in (alone, model):
            one.enable_cache(first_block(threshold))
            both.append(denoised(one, dtype=torch.bfloat16))
            one.disable_cache()
        (expected, ran), (frames, mine) = both
        assert mine == ran and all(torch.equal(a, b) for a, b in zip(frames, expected, strict=True))
        runs += ran
    return runs


def test_a_decision_rounds_as_on_one_rank(on_ranks: Run) -> None:
    for runs in on_ranks(2, in_bfloat16):
        assert 7 * 2 < runs < 7 * 2 * STEPS


def each_for_itself(rank: int) -> str:
    """The control: ranks whose decisions are their own part, and the inputs above can tell."""
    from ithaca.diffusers import caches

    model = wan(layers=3)
    parallelize(model, ulysses_degree=2)
    model.enable_cache(first_block(0.08))
    decisions, caches._DECISIONS = caches._DECISIONS, {}
    try:
        with pytest.raises(IthacaError) as raised:
            denoised(model)
    finally:
        caches._DECISIONS = decisions
    return str(raised.value)


def test_ranks_that_decide_for_themselves_part(on_ranks: Run) -> None:
    on_ranks(2, each_for_itself)


def calibrated(rank: int) -> list[list[float]]:
    """The ratios that MagCache prints are those of all tokens, on every rank."""
    ratios = []
    for one in (wan(layers=3), parallelize(wan(layers=3), ulysses_degree=2)):
        one.enable_cache(mag(calibrate=True))
        denoised(one)
        hook = one.blocks[-1]._diffusers_hook.get_hook("mag_cache_block_hook")
        ratios.append(hook.state_manager._state_cache["cond"].calibration_ratios)
    return ratios


def test_calibration_is_of_all_tokens(on_ranks: Run) -> None:
    (alone, first), (_, second) = on_ranks(2, calibrated)
    assert first == second and len(first) == STEPS
    torch.testing.assert_close(torch.tensor(first), torch.tensor(alone), rtol=1e-5, atol=0)


def outvoted(rank: int) -> None:
    """SeaCache looks at latents that every rank has; where one would compute all the same, all do."""
    alone, model = wan(layers=3), wan(layers=3)
    expected, _ = denoised(alone)
    parallelize(model, ulysses_degree=2)
    model.enable_cache(diffusers.SeaCacheConfig(threshold=0.5))
    if rank:
        leader = model.blocks[0]._diffusers_hook.get_hook("sea_cache_leader_block")
        leader.shared_state.resolve_gate = lambda *args: True
    frames, ran = denoised(model)
    assert ran == 2 * STEPS and all(torch.equal(one, other) for one, other in zip(frames, expected, strict=True))


def test_a_rank_that_would_compute_has_all_compute(on_ranks: Run) -> None:
    on_ranks(2, outvoted)


def cached_and_compiled(rank: int, kind: str) -> None:
    torch._dynamo.reset()
    alone, model = wan(layers=3), wan(layers=3)
    parallelize(model, ulysses_degree=2)
    for one in (alone, model):
        one.enable_cache(KINDS[kind]())
    model.compile(backend="aot_eager")
    for one, other in zip(denoised(model)[0], denoised(alone)[0], strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-5)


@pytest.mark.parametrize("kind", ["first block, 0.08", "sea"])
def test_a_cache_of_a_compiled_model(on_ranks: Run, kind: str) -> None:
    on_ranks(2, cached_and_compiled, kind)


def different(rank: int) -> str:
    """Ranks with other thresholds are told in the first attention, whose error names the cache."""
    model, given = wan(layers=3), inputs(GRIDS["24 tokens"])
    expected = model(**given)[0]
    parallelize(model, ulysses_degree=2)
    model.enable_cache(first_block(0.1 + rank))
    with pytest.raises(IthacaError) as raised, model.cache_context("cond"):
        model(**given)
    model.disable_cache()
    assert torch.equal(model(**given)[0], expected)
    return str(raised.value)


def test_ranks_with_different_caches_are_told(on_ranks: Run) -> None:
    for message in on_ranks(2, different):
        assert "FirstBlockCacheConfig(threshold=0.1)" in message and "FirstBlockCacheConfig(threshold=1.1)" in message


class Unknown:
    """A kind of cache that nobody here has looked at."""


def refused(rank: int) -> None:
    model, given = wan(layers=3), inputs(GRIDS["24 tokens"])
    model._cache_config = Unknown()
    with pytest.raises(UnsupportedError, match=r"alike on all ranks, as FirstBlockCacheConfig.*received Unknown"):
        parallelize(model, ulysses_degree=2)
    model._cache_config = None
    expected = model(**given)[0]
    parallelize(model, ulysses_degree=2)
    with pytest.raises(UnsupportedError, match="received Unknown"):
        model.enable_cache(Unknown())
    assert torch.equal(model(**given)[0], expected)


def test_a_cache_of_another_kind_is_refused_in_either_order(on_ranks: Run) -> None:
    on_ranks(2, refused)


def blurred(rank: int) -> None:
    """Smoothed energy guidance blurs queries over tokens, of which a rank has some: not a cache, but of their kin."""
    model, given = wan(), inputs(GRIDS["24 tokens"])
    parallelize(model, ulysses_degree=2)
    _apply_smoothed_energy_guidance_hook(model, SmoothedEnergyGuidanceConfig(indices=[1]), 1.0, "blur")
    with pytest.raises(UnsupportedError, match=r"blocks\.1\.attn1 was required not to blur"):
        model(**given)


def test_blurred_queries_are_refused(on_ranks: Run) -> None:
    on_ranks(2, blurred)


def layers_skipped(rank: int) -> None:
    alone, model, given = wan(layers=3), wan(layers=3), inputs(GRIDS["15 tokens"])
    parallelize(model, ulysses_degree=2)
    for one in (alone, model):
        diffusers.hooks.apply_layer_skip(one, diffusers.LayerSkipConfig(indices=[0, 2], fqn="blocks"))
    assert torch.equal(model(**given)[0], alone(**given)[0])


def test_layers_may_be_skipped(on_ranks: Run) -> None:
    on_ranks(2, layers_skipped)
