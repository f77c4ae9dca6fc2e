"""What surrounds each forward of a parallelized model, and keeps its ranks together.

Hooks of the module, and not a new ``model.forward``: others replace that, or put an older one back.
"""

from __future__ import annotations

import contextlib
import hashlib
import sys
from types import ModuleType
from typing import Any

import torch._dynamo
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from ithaca.diffusers import caches, setting
from ithaca.errors import ClosureError, IthacaError, UnsupportedError
from ithaca.exchange.refusal import told
from ithaca.geometry import Splits
from ithaca.strategies.ulysses import UlyssesAttention

#: Elements up to which a tensor counts as a setting, such as a timestep.
_SMALL = 16


class Forward:
    """The hooks of one model: `before` and `after` each forward, which is one that raised, too.

    Ranks that were given inputs of other shapes or dtypes, another timestep or another cache, find out in the first
    attention. A model that raises between two calls would leave its peers waiting in the next one: it is entered, and
    refused. A self-attention that would not go across the ranks is an error, and tokens that reach one without having
    been cut, which would be attended to once a rank, are told there.

    ``torch.compile`` leaves out both hooks and what calls them, and begins with the model's own forward: of a module
    that is compiled with its hooks and raises, none is called.
    """

    def __init__(self, attention: UlyssesAttention, family: ModuleType, *, backend_chosen: bool) -> None:
        self.attention, self.family, self.backend_chosen = attention, family, backend_chosen
        #: An exception that is not this forward's to tell: one that the caller was handling already, or that of a
        #: set-up that failed, for which no peer can be reached.
        self._handled: BaseException | None = None

    def install(self, model: nn.Module) -> None:
        # Before the hook that cuts some of the inputs: what each rank gets then is its own.
        model.register_forward_pre_hook(self.before, prepend=True, with_kwargs=True)
        model.register_forward_hook(self.after, with_kwargs=True, always_call=True)

    def before(self, model: nn.Module, args: Any, kwargs: Any) -> None:
        torch._dynamo.skip_frame("the exchange is set up, and peers are told of errors, outside of compiled code")
        self._begin(model, args, kwargs)

    def after(self, model: nn.Module, args: Any, kwargs: Any, result: Any) -> None:
        torch._dynamo.skip_frame("as before")
        self._end(model)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _begin(self, model: nn.Module, args: Any, kwargs: Any) -> None:
        attention, self._handled = self.attention, sys.exc_info()[1]
        try:
            attention.exchange  # noqa: B018 - set up here, if nothing has
        except Exception as error:
            self._handled = error
            raise
        self._check(model)
        cache = caches.named(getattr(model, "_cache_config", None))
        attention.context = f", given {described((cache, args, kwargs) if cache else (args, kwargs))}"
        attention.tokens = Splits.even(self.family.tokens(model, *args, **kwargs), attention.ulysses_degree)
        caches.decide_together(self.family.blocks(model), attention)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _end(self, model: nn.Module) -> None:
        handled, self._handled = self._handled, None
        self.attention.tokens = None
        error = sys.exc_info()[1]
        if error is None or error is handled or (isinstance(error, IthacaError) and error.group_knows):
            return
        said = ClosureError(f"{type(model).__name__}.forward raised {told(error)}")
        with contextlib.suppress(IthacaError):  # peers that are gone need not be told
            self.attention.refuse(said)

    def _check(self, model: nn.Module) -> None:
        for name, attn in self.family.self_attentions(model):
            processor = getattr(attn, "processor", None)
            if getattr(processor, "attention", None) is not self.attention:
                raise UnsupportedError(
                    f"{name} was required to keep the processor that parallelize gave it, else each rank attends to "
                    f"its own tokens alone; it has {type(processor).__name__}"
                )
            if caches.blurs(attn):
                raise UnsupportedError(f"{name} was required not to blur its queries: each rank has some of them")
        if getattr(model, "_parallel_config", None) is not None:
            raise UnsupportedError("a parallelized model was required to have no parallelism of diffusers' own beside")
        if not self.backend_chosen:
            setting.check_active(self.attention)


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
