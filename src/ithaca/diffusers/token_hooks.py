"""Hooks that cut a model's tokens where its blocks begin and gather them where they end.

A diffusers transformer says where in its ``_cp_plan``: which inputs and outputs of which modules run along the tokens.
The cutting and gathering are Ithaca's own, so lengths need not divide and a CPU-only host will do.

The hooks are objects, not closures: what pickles a module then comes to the attention, which says why that can't be.
"""

from __future__ import annotations

import contextlib
import inspect
from typing import Any

import torch
from diffusers.models._modeling_parallel import ContextParallelInput, ContextParallelOutput
from torch import Tensor, nn

from ithaca.errors import InvalidInputError, IthacaError, UnsupportedError
from ithaca.sharding import cut, gather
from ithaca.strategies.ulysses import UlyssesAttention


def install_token_hooks(model: nn.Module, attention: UlyssesAttention) -> None:
    """Follow ``model._cp_plan``. ``attention`` has the exchange of the model's group."""
    plan: dict[str, Any] = model._cp_plan  # type: ignore[assignment]
    for name, spec in plan.items():
        modules = [model.get_submodule(name)] if "*" not in name else _matching(model, name)
        for module in modules:
            if isinstance(spec, ContextParallelOutput):
                module.register_forward_hook(GatherOutput(name, spec, attention))
            elif isinstance(spec, dict):
                _cut_values(module, name, spec, attention)
            else:
                raise UnsupportedError(
                    f"the model's plan for {name!r} was required to be of a known kind; got {spec!r}"
                )


def _matching(model: nn.Module, pattern: str) -> list[nn.Module]:
    container = model.get_submodule(pattern.removesuffix(".*"))
    return list(container.children())


def _cut_values(module: nn.Module, name: str, spec: dict[str | int, Any], attention: UlyssesAttention) -> None:
    inputs = {key: how for key, how in spec.items() if not how.split_output}
    outputs = {key: how for key, how in spec.items() if how.split_output}
    if any(not isinstance(how, ContextParallelInput) for how in spec.values()):
        raise UnsupportedError(f"the model's plan for {name!r} was required to cut tensors; received {spec!r}")
    if inputs:
        module.register_forward_pre_hook(CutInputs(module, inputs, attention), with_kwargs=True)
    if outputs:
        module.register_forward_hook(CutOutputs(outputs, attention))


def _piece(value: Any, how: ContextParallelInput, attention: UlyssesAttention) -> Any:
    if not isinstance(value, Tensor) or (how.expected_dims is not None and value.dim() != how.expected_dims):
        return value
    exchange = attention.exchange
    return cut(value, how.split_dim, exchange.rank, exchange.world_size)


class CutInputs:
    """A forward pre-hook: some arguments, by their place or name, are cut."""

    def __init__(self, module: nn.Module, inputs: dict[str | int, Any], attention: UlyssesAttention) -> None:
        self.parameters = tuple(inspect.signature(module.forward).parameters)
        self.inputs, self.attention = inputs, attention

    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        positional, named = list(args), dict(kwargs)
        for key, how in self.inputs.items():
            place = key if isinstance(key, int) else self.parameters.index(key)
            if place < len(positional):
                positional[place] = _piece(positional[place], how, self.attention)
            elif self.parameters[place] in named:
                named[self.parameters[place]] = _piece(named[self.parameters[place]], how, self.attention)
        return tuple(positional), named


class CutOutputs:
    """A forward hook: some results, by their place, are cut."""

    def __init__(self, outputs: dict[str | int, Any], attention: UlyssesAttention) -> None:
        self.outputs, self.attention = outputs, attention

    def __call__(self, module: nn.Module, args: Any, result: Any) -> Any:
        if isinstance(result, Tensor):
            return _piece(result, self.outputs[0], self.attention)
        return tuple(
            _piece(value, self.outputs[i], self.attention) if i in self.outputs else value
            for i, value in enumerate(result)
        )


class GatherOutput:
    """A forward hook: the result is gathered. It is this rank's tokens, whatever hooks did on the way."""

    def __init__(self, name: str, how: ContextParallelOutput, attention: UlyssesAttention) -> None:
        self.name, self.how, self.attention = name, how, attention

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __call__(self, module: nn.Module, args: Any, result: Tensor) -> Tensor:
        exchange, splits = self.attention.exchange, self.attention.tokens
        if splits is None:
            alone = UnsupportedError(
                f"rank {exchange.rank}: a parallelized model was required to be called, not its forward, which leaves "
                f"out the hooks that keep the ranks together"
            )
            with contextlib.suppress(IthacaError):  # peers that are gone need not be told
                self.attention.refuse(alone)
            raise alone
        mine = splits.sizes[exchange.rank]
        if result.shape[self.how.gather_dim] != mine:
            raise InvalidInputError(
                f"rank {exchange.rank}: the result of {self.name} was required to have {mine} tokens, as the splits "
                f"{splits.sizes} say; received {list(result.shape)}"
            )
        return gather(result, self.how.gather_dim, exchange)
