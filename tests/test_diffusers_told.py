"""What can't work on a parallelized model is refused, in words, at the call or in the first forward, on every rank."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import Run
from diffusers import WanTransformer3DModel
from diffusers.models.attention_dispatch import AttentionBackendName, _AttentionBackendRegistry, attention_backend
from diffusers.models.transformers.transformer_wan import WanAttention, WanAttnProcessor
from tiny_wan import GRIDS, inputs, wan

from ithaca import IthacaError, PeerRefusedError, SdpaBackend, UlyssesAttention, UnsupportedError, parallelize
from ithaca.diffusers.wan import UlyssesWanProcessor

pytestmark = pytest.mark.full


def everywhere(model: WanTransformer3DModel) -> None:
    model.set_attn_processor(WanAttnProcessor())


def in_a_block(model: WanTransformer3DModel) -> None:
    model.blocks[1].attn1.set_processor(WanAttnProcessor())


def another_module(model: WanTransformer3DModel) -> None:
    attn = model.blocks[1].attn1
    model.blocks[1].attn1 = WanAttention(
        attn.inner_dim, attn.heads, attn.inner_dim // attn.heads, is_cross_attention=False
    )


def of_another_attention(model: WanTransformer3DModel) -> None:
    model.blocks[1].attn1.set_processor(UlyssesWanProcessor(UlyssesAttention(SdpaBackend()), True, None))


def diffusers_own(model: WanTransformer3DModel) -> None:
    model._parallel_config = SimpleNamespace(context_parallel_config="any")


KEEP = "attn1 was required to keep the processor that parallelize gave it"
CHANGES: dict[str, tuple[Callable[[WanTransformer3DModel], None], str]] = {
    "everywhere": (everywhere, rf"blocks\.0\.{KEEP}.*it has WanAttnProcessor"),
    "in a block": (in_a_block, rf"blocks\.1\.{KEEP}.*it has WanAttnProcessor"),
    "another module": (another_module, rf"blocks\.1\.{KEEP}"),
    "of another attention": (of_another_attention, rf"blocks\.1\.{KEEP}"),
    "diffusers' own": (diffusers_own, "was required to have no parallelism of diffusers' own beside"),
}


def left_out(rank: int, change: str, on: tuple[int, ...], how: str) -> None:
    model, given = wan(), inputs(GRIDS["15 tokens"])
    expected = model(**given)[0]
    parallelize(model, ulysses_degree=2)
    apply, words = CHANGES[change]
    before = [block.attn1 for block in model.blocks], [block.attn1.processor for block in model.blocks]
    if rank in on:
        apply(model)
    if how == "compiled":
        torch._dynamo.reset()
        model.compile_repeated_blocks(fullgraph=True, backend="aot_eager")
    for _ in range(2):
        with pytest.raises(IthacaError, match=words) as raised:
            model(**given)
        assert type(raised.value) is (UnsupportedError if rank in on else PeerRefusedError)
    model._parallel_config = None
    for block, attn, processor in zip(model.blocks, *before, strict=True):
        block.attn1 = attn
        attn.set_processor(processor)
    torch.testing.assert_close(model(**given)[0], expected, rtol=0, atol=0 if how == "eager" else 1e-5)


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("on", [(0, 1), (1,)], ids=["all", "one"])
def test_a_self_attention_that_makes_no_exchange(on_ranks: Run, change: str, on: tuple[int, ...]) -> None:
    on_ranks(2, left_out, change, on, "eager")


def test_a_self_attention_that_makes_no_exchange_compiled(on_ranks: Run) -> None:
    on_ranks(2, left_out, "everywhere", (0, 1), "compiled")


def forward_alone(rank: int) -> None:
    """It leaves out the hooks that would have seen what is wrong."""
    model, given = wan(), inputs(GRIDS["15 tokens"])
    expected = model(**given)[0]
    parallelize(model, ulysses_degree=2)
    with pytest.raises(UnsupportedError, match="required to be called, not its forward"):
        model.forward(**given)
    assert torch.equal(model(**given)[0], expected)


def test_forward_without_the_hooks(on_ranks: Run) -> None:
    on_ranks(2, forward_alone)


def cross_attention(rank: int) -> None:
    """Of a cross-attention, which is local, the processor and its backend are the user's."""
    model, given = wan(), inputs(GRIDS["15 tokens"])
    expected = model(**given)[0]
    parallelize(model, ulysses_degree=2)
    for block in model.blocks:
        block.attn2.set_processor(WanAttnProcessor())
        block.attn2.set_attention_backend("_native_math")
    torch.testing.assert_close(model(**given)[0], expected, rtol=0, atol=1e-5)


def test_a_cross_attention_may_be_changed(on_ranks: Run) -> None:
    on_ranks(2, cross_attention)


def flex(rank: int) -> None:
    given, required = (
        inputs(GRIDS["15 tokens"]),
        "was required to be what self-attention across ranks runs, SdpaBackend",
    )
    expected = wan()(**given)[0]
    try:
        before = wan()
        before.set_attention_backend("flex")
        with pytest.raises(UnsupportedError, match=rf"backend of blocks\.0\.attn1 {required}.*received 'flex'"):
            parallelize(before, ulysses_degree=2)
        assert all(type(block.attn1.processor) is WanAttnProcessor for block in before.blocks)

        _AttentionBackendRegistry.set_active_backend(AttentionBackendName.NATIVE)
        model = parallelize(wan(), ulysses_degree=2)
        with pytest.raises(UnsupportedError, match=rf"backend of a parallelized model {required}.*received 'flex'"):
            model.set_attention_backend("flex")
        with pytest.raises(UnsupportedError, match="received 'flex'"):
            model.blocks[1].attn1.set_attention_backend("flex")
        assert torch.equal(model(**given)[0], expected)
        model.set_attention_backend("native")
        model.reset_attention_backend()
        assert torch.equal(model(**given)[0], expected)

        with pytest.raises(UnsupportedError, match=r"active attention backend.*'flex'"), attention_backend("flex"):
            model(**given)
        assert torch.equal(model(**given)[0], expected)

        # Whoever chooses a backend for self-attention has said which one runs, whatever diffusers runs elsewhere.
        chosen = parallelize(wan(), ulysses_degree=2, backend=SdpaBackend())
        with attention_backend("_native_math"):
            torch.testing.assert_close(chosen(**given)[0], expected, rtol=0, atol=1e-5)
    finally:
        _AttentionBackendRegistry.set_active_backend(AttentionBackendName.NATIVE)


def test_an_attention_backend_of_diffusers_is_followed_or_refused(on_ranks: Run) -> None:
    on_ranks(2, flex)


def pickled(rank: int, degree: int) -> None:
    group = None if degree == 2 else torch.distributed.new_group([rank], use_local_synchronization=True)
    model, given = wan(), inputs(GRIDS["24 tokens"])
    expected = model(**given)[0]
    parallelize(model, ulysses_degree=degree, group=group)
    model(**given)
    attempts: list[Callable[[Any], Any]] = [
        lambda what: torch.save(what, io.BytesIO()),
        pickle.dumps,
        copy.deepcopy,
        lambda what: pickle._dumps(what),  # the one in Python, which looks things up in another way
    ]
    for attempt in attempts:
        for what in (model, model.blocks[0], model.blocks[1].attn1, {"model": model}):
            with pytest.raises(UnsupportedError, match=r"cannot be copied or pickled.*copy the model first"):
                attempt(what)
    torch.save(model.state_dict(), io.BytesIO())
    pickle.dumps(model.blocks[0].ffn)
    assert torch.equal(model(**given)[0], expected)


@pytest.mark.parametrize("degree", [2, 1])
def test_a_parallelized_model_is_neither_saved_whole_nor_copied(on_ranks: Run, degree: int) -> None:
    on_ranks(2, pickled, degree)
