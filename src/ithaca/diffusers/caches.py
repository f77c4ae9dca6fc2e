"""diffusers' caches, which skip blocks: every rank must skip the same ones.

Most decide by the step or the timestep, and are left alone. Those that look at tokens, of which each rank has its own,
are given one decision of the whole group: the sums of all ranks, of which one rank's statistic is made. Their hooks may
come and go with the user, so this is seen to before each forward.
"""

from __future__ import annotations

import dataclasses
import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from ithaca.errors import UnsupportedError
from ithaca.sharding import gather
from ithaca.strategies.ulysses import UlyssesAttention

#: Configurations of the caches with which all ranks skip alike.
KNOWN = (
    "FirstBlockCacheConfig",
    "MagCacheConfig",
    "SeaCacheConfig",
    "PyramidAttentionBroadcastConfig",
    "TaylorSeerCacheConfig",
    "FasterCacheConfig",
    "TextKVCacheConfig",
)


def check(config: object) -> None:
    """Raise `UnsupportedError` for a cache with which ranks might skip differently."""
    if not any(cls.__name__ in KNOWN for cls in type(config).__mro__):
        raise UnsupportedError(
            f"a cache was required to decide alike on all ranks, as {', '.join(KNOWN)} do; "
            f"received {type(config).__name__}"
        )


def check_when_enabled(model: Any) -> None:
    """Let ``model.enable_cache`` refuse what `check` does."""
    enable = model.enable_cache

    @functools.wraps(enable)
    def checked(config: object) -> None:
        check(config)
        enable(config)

    model.enable_cache = checked


def named(config: Any) -> str:
    """A configuration in words that are equal on all ranks: callables are left out."""
    if config is None:
        return ""
    values = {f.name: getattr(config, f.name) for f in dataclasses.fields(config)}
    plain = {name: v.tolist() if isinstance(v, Tensor) else v for name, v in values.items() if not callable(v)}
    return f"{type(config).__name__}({', '.join(f'{name}={value}' for name, value in plain.items())})"


def blurs(attn: nn.Module) -> bool:
    """Whether smoothed energy guidance blurs the queries of ``attn`` over its tokens, of which a rank has some."""
    registry: Any = getattr(getattr(attn, "to_q", None), "_diffusers_hook", None)
    return registry is not None and any("SmoothedEnergyGuidance" in type(h).__name__ for h in registry.hooks.values())


def decide_together(blocks: Iterable[nn.Module], attention: UlyssesAttention) -> None:
    """Give the hooks on ``blocks`` that decide by what tokens hold a decision of the group in place of their own."""
    for block in blocks:
        registry: Any = getattr(block, "_diffusers_hook", None)
        for hook in () if registry is None else registry.hooks.values():
            for cls in type(hook).__mro__:
                if cls.__name__ in _DECISIONS:
                    owner_of, name, decision = _DECISIONS[cls.__name__]
                    _replace(owner_of(hook), name, decision, hook, attention)


def _replace(owner: Any, name: str, decision: Any, hook: Any, attention: UlyssesAttention) -> None:
    own = getattr(owner, name, None)
    if own is None:
        raise UnsupportedError(
            f"{type(owner).__name__} was required to have {name}; this version of diffusers does not"
        )
    if not isinstance(own, _Decision):
        setattr(owner, name, decision(own, hook, attention))


class _Decision(ABC):
    """Called in the place of ``own``, a method of a hook."""

    def __init__(self, own: Callable[..., Any], hook: Any, attention: UlyssesAttention) -> None:
        self.own, self.hook, self.attention = own, hook, attention

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __call__(self, *args: Any) -> Any:
        return self.decide(*args)

    @abstractmethod
    def decide(self, *args: Any) -> Any: ...

    def summed(self, *terms: Tensor | float, device: torch.device) -> Tensor:
        """The sums over the group, the same on every rank: each adds the same rows in the same order."""
        row = torch.stack([torch.as_tensor(term, dtype=torch.float64, device=device) for term in terms])
        return gather(row[None], 0, self.attention.exchange).sum(0)


class _FirstBlock(_Decision):
    """FirstBlockCache: how far the first block's residual is from the last one, on average over all tokens."""

    def decide(self, residual: Tensor) -> bool:
        last = self.hook.state_manager.get_state().head_block_residual
        now = residual.detach()
        moved, size = (0.0, 0.0) if last is None else (_total(now - last), _total(last))
        # Said though there may be nothing to compare: ranks that have none and ranks that have one must not part.
        sums = self.summed(moved, size, now.numel(), last is None, device=now.device)
        if sums[3] > 0:
            return True
        # As one rank does: each mean rounds to the dtype of the residual, which in bfloat16 is much.
        mean_moved, mean_size = (sums[:2] / sums[2]).to(now.dtype)
        return bool((mean_moved / mean_size).item() > self.hook.threshold)


class _Calibration(_Decision):
    """MagCache's calibration: how large the residual is beside the last one, on average over all tokens."""

    def decide(self, state: Any, residual: Tensor) -> None:
        ratio = 1.0
        if state.previous_residual is not None:
            norm, last = (torch.linalg.norm(r.detach().float(), dim=-1) for r in (residual, state.previous_residual))
            ratios = norm / (last + 1e-8)
            total, count = self.summed(_total(ratios), ratios.numel(), device=ratios.device)
            ratio = (total / count).float().item()
        state.calibration_ratios.append(ratio)


class _Vote(_Decision):
    """SeaCache looks at the whole latents, which may differ in their last bits: computed if any rank would."""

    def decide(self, state: Any, metadata: Any, indicator: list[Tensor] | None, config: Any) -> bool:
        mine: bool = self.own(state, metadata, indicator, config)
        device = torch.device("cpu") if not indicator else indicator[0].device
        if self.summed(mine, device=device) > 0 and not mine:
            state.accumulated_distance, state.gate_should_compute = 0.0, True
            return True
        return mine


def _total(tensor: Tensor) -> Tensor:
    return tensor.abs().sum(dtype=torch.float64)


def _itself(hook: Any) -> Any:
    return hook


#: Class of the hook: what has the method, its name, and what is called in its place.
_DECISIONS: dict[str, tuple[Callable[[Any], Any], str, type[_Decision]]] = {
    "FBCHeadBlockHook": (_itself, "_should_compute_remaining_blocks", _FirstBlock),
    "MagCacheBlockHook": (_itself, "_perform_calibration_step", _Calibration),
    "SeaCacheLeaderBlockHook": (lambda hook: hook.shared_state, "resolve_gate", _Vote),
}
