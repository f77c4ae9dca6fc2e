"""`parallelize`: one call that spreads a diffusers model over the ranks of a group."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib
from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from ithaca.backends.interface import AttentionBackend
from ithaca.backends.sdpa import SdpaBackend
from ithaca.errors import ClosureError, InvalidInputError, IthacaError, UnsupportedError
from ithaca.exchange.interface import Exchange
from ithaca.geometry import Splits
from ithaca.strategies.options import Compress
from ithaca.strategies.ulysses import UlyssesAttention

M = TypeVar("M")

#: Elements up to which a tensor counts as a setting, such as a timestep.
_SMALL = 16

#: Class of the transformer to the module that knows it: it can ``install(model, attention, asynchronous, compress)``,
#: and tell the ``tokens(model, *args, **kwargs)`` of a forward, before anything has cut them.
FAMILIES = {"WanTransformer3DModel": "ithaca.diffusers.wan"}


def parallelize(
    model_or_pipeline: M,
    *,
    ulysses_degree: int,
    group: dist.ProcessGroup | None = None,
    backend: AttentionBackend | None = None,
    exchange: str | Exchange = "auto",
    asynchronous: bool = True,
    compress: Compress = None,
) -> M:
    """Spread a diffusers transformer, or every one in a pipeline, over ``ulysses_degree`` ranks. In place; returned.

    Every rank calls this on the same model, and then runs it on the same inputs: each gets the whole output. The
    group (the default one if None) has ``ulysses_degree`` ranks. ``backend`` (SDPA if None) runs the self-attention;
    ``asynchronous`` lets V, Q and K leave one by one, each while the next is computed. ``compress``: "int8" or "float8"
    sends them as bytes, see `UlyssesAttention.__call__`; the result is then close to that of one rank, not equal.

    Raises `UnsupportedError` for a family that is not known and for a model that is parallelized already or has
    attention processors of another kind.
    """
    ranks = dist.get_world_size(group) if dist.is_initialized() else 1
    if ranks != ulysses_degree:
        raise InvalidInputError(
            f"ulysses_degree was required to be the size of its group, {ranks}; received {ulysses_degree}"
        )
    attention = UlyssesAttention(backend or SdpaBackend(), group, exchange)
    for model in _transformers(model_or_pipeline):
        if getattr(model, "_ithaca", None) is not None:
            raise UnsupportedError(f"this {type(model).__name__} is parallelized already")
        family = importlib.import_module(FAMILIES[type(model).__name__])
        family.install(model, attention, asynchronous, compress)
        if ulysses_degree > 1:
            from ithaca.diffusers.token_hooks import install_token_hooks

            install_token_hooks(model, lambda: attention.exchange)
            _keep_together(model, attention, functools.partial(family.tokens, model))
        model._ithaca = attention  # type: ignore[assignment]
    return model_or_pipeline


def described(inputs: Any) -> str:
    """The shapes and dtypes of all that a model was given, small CPU tensors with their values; a digest comes first.

    Values of large tensors are left out: they may differ in their last bits where each rank has computed its own.
    """
    parts = []
    for leaf in tree_leaves(inputs):
        if isinstance(leaf, Tensor):
            text = f"{[*leaf.shape]} {str(leaf.dtype).removeprefix('torch.')}"
            small = leaf.device.type == "cpu" and leaf.numel() <= _SMALL
            parts.append(f"{text} = {[float(f'{x:.6g}') for x in leaf.flatten().tolist()]}" if small else text)
        elif isinstance(leaf, bool | int | float | str | None):
            parts.append(repr(leaf))
    text = "; ".join(parts)
    return f"{hashlib.blake2b(text.encode(), digest_size=6).hexdigest()}: {text}"


def _transformers(model_or_pipeline: Any) -> list[nn.Module]:
    parts = getattr(model_or_pipeline, "components", None)
    candidates = list(parts.values()) if isinstance(parts, dict) else [model_or_pipeline]
    found = [part for part in candidates if type(part).__name__ in FAMILIES]
    if not found:
        names = ", ".join(sorted({type(part).__name__ for part in candidates}))
        raise UnsupportedError(f"a model of {', '.join(FAMILIES)} was required; received {names}")
    return found


def _keep_together(model: nn.Module, attention: UlyssesAttention, tokens: Callable[..., int]) -> None:
    """Keep the ranks together around a forward.

    Ranks that were given inputs of other shapes or dtypes, or another timestep, find out in the first attention. A
    model that raises between two calls would leave its peers waiting in the next one: it is entered, and refused.
    Tokens that reach an attention without having been cut, which would be attended to once a rank, are told there.
    """

    def note(module: nn.Module, args: Any, kwargs: Any) -> None:
        attention.context = f", given {described((args, kwargs))}"

    # Before the hook that cuts some of them: what each rank gets then is its own.
    model.register_forward_pre_hook(note, prepend=True, with_kwargs=True)
    forward = model.forward

    @functools.wraps(forward)
    def told(*args: Any, **kwargs: Any) -> Any:
        try:
            attention.tokens = Splits.even(tokens(*args, **kwargs), attention.ulysses_degree)
            return forward(*args, **kwargs)
        except Exception as error:
            if isinstance(error, IthacaError) and error.group_knows:
                raise
            with contextlib.suppress(IthacaError):  # peers that are gone need not be told
                attention.refuse(ClosureError(f"{type(model).__name__}.forward raised {type(error).__name__}: {error}"))
            raise
        finally:
            attention.tokens = None

    model.forward = told
