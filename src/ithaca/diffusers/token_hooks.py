"""Hooks that cut a model's tokens where its blocks begin and gather them where they end.

A diffusers transformer says where in its ``_cp_plan``: which inputs and outputs of which modules run along the tokens.
The cutting and gathering are Ithaca's own, so lengths need not divide and a CPU-only host will do.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from diffusers.models._modeling_parallel import ContextParallelInput, ContextParallelOutput
from torch import Tensor, nn

from ithaca.errors import UnsupportedError
from ithaca.exchange.interface import Exchange
from ithaca.sharding import cut, gather


def install_token_hooks(model: nn.Module, exchange: Callable[[], Exchange]) -> None:
    """Follow ``model._cp_plan``. ``exchange()`` is that of the model's group."""
    plan: dict[str, Any] = model._cp_plan  # type: ignore[assignment]
    for name, spec in plan.items():
        modules = [model.get_submodule(name)] if "*" not in name else _matching(model, name)
        for module in modules:
            if isinstance(spec, ContextParallelOutput):
                _gather_output(module, spec, exchange)
            elif isinstance(spec, dict):
                _cut_values(module, name, spec, exchange)
            else:
                raise UnsupportedError(
                    f"the model's plan for {name!r} was required to be of a known kind; got {spec!r}"
                )


def _matching(model: nn.Module, pattern: str) -> list[nn.Module]:
    container = model.get_submodule(pattern.removesuffix(".*"))
    return list(container.children())


def _cut_values(module: nn.Module, name: str, spec: dict[str | int, Any], exchange: Callable[[], Exchange]) -> None:
    inputs = {key: how for key, how in spec.items() if not how.split_output}
    outputs = {key: how for key, how in spec.items() if how.split_output}
    if any(not isinstance(how, ContextParallelInput) for how in spec.values()):
        raise UnsupportedError(f"the model's plan for {name!r} was required to cut tensors; received {spec!r}")

    def piece(value: Any, how: ContextParallelInput) -> Any:
        if not isinstance(value, Tensor) or (how.expected_dims is not None and value.dim() != how.expected_dims):
            return value
        ex = exchange()
        return cut(value, how.split_dim, ex.rank, ex.world_size)

    if inputs:
        parameters = tuple(inspect.signature(module.forward).parameters)

        def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
            positional, named = list(args), dict(kwargs)
            for key, how in inputs.items():
                place = key if isinstance(key, int) else parameters.index(key)
                if place < len(positional):
                    positional[place] = piece(positional[place], how)
                elif parameters[place] in named:
                    named[parameters[place]] = piece(named[parameters[place]], how)
            return tuple(positional), named

        module.register_forward_pre_hook(before, with_kwargs=True)
    if outputs:

        def after(module: nn.Module, args: Any, result: Any) -> Any:
            if isinstance(result, Tensor):
                return piece(result, outputs[0])
            return tuple(piece(value, outputs[i]) if i in outputs else value for i, value in enumerate(result))

        module.register_forward_hook(after)


def _gather_output(module: nn.Module, how: ContextParallelOutput, exchange: Callable[[], Exchange]) -> None:
    def after(module: nn.Module, args: Any, result: Tensor) -> Tensor:
        return gather(result, how.gather_dim, exchange())

    module.register_forward_hook(after)
