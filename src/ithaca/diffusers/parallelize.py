"""`parallelize`: one call that spreads a diffusers model over the ranks of a group."""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeVar

import torch.distributed as dist
from torch import nn

from ithaca.backends.interface import AttentionBackend
from ithaca.backends.sdpa import SdpaBackend
from ithaca.errors import InvalidInputError, UnsupportedError
from ithaca.exchange.interface import Exchange
from ithaca.strategies.options import Compress
from ithaca.strategies.ulysses import UlyssesAttention

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

M = TypeVar("M")

#: Class of the transformer to the module that knows it: it can ``install(model, attention, asynchronous, compress)``,
#: name the ``self_attentions(model)``, give the ``blocks(model)`` that a cache may skip, and tell the
#: ``tokens(model, *args, **kwargs)`` of a forward, before anything has cut them.
FAMILIES = {"WanTransformer3DModel": "ithaca.diffusers.wan"}


def parallelize(
    model_or_pipeline: M,
    *,
    ulysses_degree: int,
    group: dist.ProcessGroup | DeviceMesh | None = None,
    backend: AttentionBackend | None = None,
    exchange: str | Exchange = "auto",
    asynchronous: bool = True,
    compress: Compress = None,
) -> M:
    """Spread a diffusers transformer, or every one in a pipeline, over ``ulysses_degree`` ranks. In place; returned.

    Every rank calls this on the same model, and then runs it on the same inputs: each gets the whole output. The
    group (the default one if None; a mesh of one dimension will do) has ``ulysses_degree`` ranks. ``backend`` (SDPA if
    None) runs the self-attention; ``asynchronous`` lets V, Q and K leave one by one, each while the next is computed.
    ``compress``: "int8" or "float8" sends them as bytes, see `UlyssesAttention.__call__`; the result is then close to
    that of one rank, not equal.

    Raises `UnsupportedError` for a family that is not known and for a model that is parallelized already, has
    attention processors of another kind, or a cache or an attention backend of diffusers' that can't be followed.
    """
    ranks = UlyssesAttention(SdpaBackend(), group, exchange).ulysses_degree
    if ranks != ulysses_degree:
        raise InvalidInputError(
            f"ulysses_degree was required to be the size of its group, {ranks}; received {ulysses_degree}"
        )
    attention = UlyssesAttention(backend or SdpaBackend(), group, exchange)
    models = [
        (model, importlib.import_module(FAMILIES[type(model).__name__])) for model in _transformers(model_or_pipeline)
    ]
    for model, family in models:
        _check(model, attention, family, backend_chosen=backend is not None)
    for model, family in models:
        family.install(model, attention, asynchronous, compress)
        if ulysses_degree > 1:
            _spread(model, attention, family, backend_chosen=backend is not None)
        model._ithaca = attention  # type: ignore[assignment]
    return model_or_pipeline


def _check(model: Any, attention: UlyssesAttention, family: ModuleType, *, backend_chosen: bool) -> None:
    from ithaca.diffusers import caches, setting

    if getattr(model, "_ithaca", None) is not None:
        raise UnsupportedError(f"this {type(model).__name__} is parallelized already")
    if attention.ulysses_degree > 1 and model.is_cache_enabled:
        caches.check(model._cache_config)
    if not backend_chosen:
        for name, attn in family.self_attentions(model):
            chosen = getattr(attn.processor, "_attention_backend", None)
            setting.check(f"the attention backend of {name}", chosen, attention)


def _spread(model: Any, attention: UlyssesAttention, family: ModuleType, *, backend_chosen: bool) -> None:
    from ithaca.diffusers import caches
    from ithaca.diffusers.forward import Forward
    from ithaca.diffusers.token_hooks import install_token_hooks

    install_token_hooks(model, attention)
    Forward(attention, family, backend_chosen=backend_chosen).install(model)
    caches.check_when_enabled(model)
    if model.is_cache_enabled:
        model._reset_stateful_cache()  # what it has kept is of all tokens


def _transformers(model_or_pipeline: Any) -> list[nn.Module]:
    parts = getattr(model_or_pipeline, "components", None)
    candidates = list(parts.values()) if isinstance(parts, dict) else [model_or_pipeline]
    found = [part for part in candidates if type(part).__name__ in FAMILIES]
    if not found:
        names = ", ".join(sorted({type(part).__name__ for part in candidates}))
        raise UnsupportedError(f"a model of {', '.join(FAMILIES)} was required; received {names}")
    return found
