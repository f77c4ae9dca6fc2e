"""A diffusers model across ranks equals the model on one rank, bit for bit in fp32 with SDPA.

But for ranks with a single token: there the *linear layers* of the model, which are not Ithaca's, become products of a
matrix with one vector, for which the BLAS has another kernel that adds up in another order.
"""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch._dynamo
from conftest import Run
from diffusers.models.transformers.transformer_wan import WanAttnProcessor
from gradients import close, summed
from tiny_wan import BATCH, GRIDS, HEAD_DIM, HEADS, LAYERS, inputs, wan
from torch._dynamo.testing import CompileCounterWithBackend

from ithaca import (
    InvalidInputError,
    IthacaError,
    PeerRefusedError,
    PlanMismatchError,
    UnsupportedError,
    exchange_for,
    parallelize,
)
from ithaca.diffusers.wan import UlyssesWanProcessor

pytestmark = pytest.mark.full


def equal(rank: int, ranks: int, grid: str, options: dict[str, Any], fused: bool, per_token: bool) -> None:
    model = wan()
    if fused:
        model.fuse_qkv_projections()  # makes new parameters
        model.requires_grad_(False)
    given = inputs(GRIDS[grid], per_token)
    expected = model(**given)[0]
    assert parallelize(model, ulysses_degree=ranks, **options) is model
    for _ in range(2):
        out = model(**given)[0]
        torch.testing.assert_close(out, expected, rtol=0, atol=1e-5)
        assert torch.equal(out, expected) or grid == "2 tokens"
    assert isinstance(model.blocks[0].attn1.processor, UlyssesWanProcessor)


@pytest.mark.parametrize("asynchronous", [True, False])
@pytest.mark.parametrize("exchange", ["slots", "collective"])
@pytest.mark.parametrize(("ranks", "grid"), [(2, "24 tokens"), (2, "15 tokens"), (3, "15 tokens"), (3, "2 tokens")])
def test_wan_equals_one_rank(on_ranks: Run, ranks: int, grid: str, exchange: str, asynchronous: bool) -> None:
    on_ranks(ranks, equal, ranks, grid, {"exchange": exchange, "asynchronous": asynchronous}, False, False)


@pytest.mark.parametrize(("fused", "per_token"), [(True, False), (False, True)])
def test_wan_with_fused_projections_or_a_timestep_per_token(on_ranks: Run, fused: bool, per_token: bool) -> None:
    on_ranks(2, equal, 2, "15 tokens", {}, fused, per_token)


def bytes_of_a_step(rank: int) -> int:
    model, given = wan(), inputs(GRIDS["24 tokens"])
    counters = exchange_for(want="slots").counters
    parallelize(model, ulysses_degree=2, exchange="slots")
    before = counters.bytes_moved
    model(**given)
    return counters.bytes_moved - before


def test_text_moves_no_bytes(on_ranks: Run) -> None:
    turns = LAYERS * 4 * (BATCH * 12 * (HEADS // 2) * HEAD_DIM)  # Q, K, V and O, half the heads to the other rank
    gathered = BATCH * 12 * 4 * 4  # the projected tokens: 4 channels of a 2 x 2 patch
    for moved in on_ranks(2, bytes_of_a_step):
        assert moved == (turns + gathered) * 4


def controls(rank: int) -> None:
    """What the equality would miss if it could not fail: positions that are off by one token, text that is dropped."""
    model, given = wan(), inputs(GRIDS["24 tokens"])
    expected = model(**given)[0]
    parallelize(model, ulysses_degree=2)
    shifted = copy.deepcopy(given)
    shifted["encoder_hidden_states"] = torch.zeros_like(given["encoder_hidden_states"])
    assert not torch.equal(model(**shifted)[0], expected)
    hook = model.rope.register_forward_hook(lambda module, args, out: tuple(t.roll(1, dims=1) for t in out))
    assert not torch.equal(model(**given)[0], expected)
    hook.remove()
    assert torch.equal(model(**given)[0], expected)


def test_the_equality_can_fail(on_ranks: Run) -> None:
    on_ranks(2, controls)


def in_a_pipeline(rank: int) -> None:
    two = SimpleNamespace(components={"transformer": wan(), "transformer_2": wan(), "vae": torch.nn.Linear(1, 1)})
    given = inputs(GRIDS["24 tokens"])
    expected = wan()(**given)[0]
    assert parallelize(two, ulysses_degree=2) is two
    for name in ("transformer", "transformer_2"):
        assert torch.equal(two.components[name](**given)[0], expected)


def test_every_transformer_of_a_pipeline(on_ranks: Run) -> None:
    on_ranks(2, in_a_pipeline)


def refused(rank: int) -> None:
    with pytest.raises(InvalidInputError, match="required to be the size of its group, 2; received 3"):
        parallelize(wan(), ulysses_degree=3)
    with pytest.raises(UnsupportedError, match="WanTransformer3DModel was required; received Linear"):
        parallelize(torch.nn.Linear(1, 1), ulysses_degree=2)
    with pytest.raises(UnsupportedError, match="parallelized already"):
        parallelize(parallelize(wan(), ulysses_degree=2), ulysses_degree=2)

    class Own(WanAttnProcessor):
        pass

    model = wan()
    model.blocks[1].attn1.set_processor(Own())
    with pytest.raises(UnsupportedError, match=r"blocks.1.attn1 was required .* it has Own"):
        parallelize(model, ulysses_degree=2)
    assert type(model.blocks[0].attn1.processor) is WanAttnProcessor  # nothing was changed


def test_what_cannot_be_parallelized_is_refused(on_ranks: Run) -> None:
    on_ranks(2, refused)


def raises_between_calls(rank: int) -> None:
    """A feed-forward that raises on rank 1 would leave rank 0 waiting in the next attention."""
    model, given = wan(), inputs(GRIDS["24 tokens"])
    expected = model(**given)[0]
    parallelize(model, ulysses_degree=2)
    forward = model.blocks[0].ffn.forward

    def out_of_memory(*args: Any) -> None:
        raise MemoryError("no more")

    if rank == 1:
        model.blocks[0].ffn.forward = out_of_memory
        with pytest.raises(MemoryError, match="no more"):
            model(**given)
        model.blocks[0].ffn.forward = forward
    else:
        with pytest.raises(
            PeerRefusedError, match=r"rank 1 refused: ClosureError: WanTransformer3DModel.*MemoryError: no more"
        ):
            model(**given)
    assert torch.equal(model(**given)[0], expected)
    assert issubclass(PeerRefusedError, IthacaError)


def raises_after_the_exchange(rank: int) -> None:
    """An output projection that raises on rank 1, when rank 0 has all it needs of this call and goes on to the next."""
    model, given = wan(), inputs(GRIDS["24 tokens"])
    expected = model(**given)[0]
    parallelize(model, ulysses_degree=2)
    to_out = model.blocks[0].attn1.to_out[0]
    forward = to_out.forward

    def out_of_memory(*args: Any) -> None:
        raise MemoryError("no more")

    if rank == 1:
        to_out.forward = out_of_memory
    with pytest.raises((IthacaError, MemoryError), match="no more"):
        model(**given)
    to_out.forward = forward
    assert torch.equal(model(**given)[0], expected)


def test_an_output_projection_that_raises_tells_the_peers(on_ranks: Run) -> None:
    on_ranks(2, raises_after_the_exchange)


def test_a_model_that_raises_tells_its_peers(on_ranks: Run) -> None:
    on_ranks(2, raises_between_calls)


def disagreeing(rank: int) -> list[str]:
    """Ranks that were given inputs of another shape with as many tokens, another text length, another timestep."""
    model, given = wan(), inputs(GRIDS["24 tokens"])
    expected = model(**given)[0]
    parallelize(model, ulysses_degree=2)
    others = {
        "hidden_states": torch.randn(BATCH, 4, 2, 8, 6),
        "encoder_hidden_states": torch.randn(BATCH, 3, 10),
        "timestep": torch.tensor([3.0, 699.0]),
    }
    messages = []
    for name, other in others.items():
        with pytest.raises(PlanMismatchError) as raised:
            model(**{**given, name: other} if rank else given)
        messages.append(str(raised.value))
        assert torch.equal(model(**given)[0], expected)
    return messages


def test_ranks_that_were_given_different_inputs_are_told(on_ranks: Run) -> None:
    for messages in on_ranks(2, disagreeing):
        for message, words in zip(messages, ("[2, 4, 2, 8, 6]", "[2, 3, 10]", "[3.0, 699.0]"), strict=True):
            assert words in message and "rank 0 sent" in message and "rank 1 sent" in message


def uncut(rank: int, exchange: str, compiled: bool) -> str:
    """The hooks that cut are gone, so every rank has all tokens, and would attend to each of them twice."""
    model, given = wan(), inputs(GRIDS["15 tokens"])
    expected = model(**given)[0]
    parallelize(model, ulysses_degree=2, exchange=exchange)
    hooks = model.blocks[0]._forward_pre_hooks, model.rope._forward_hooks
    kept = [dict(each) for each in hooks]
    for each in hooks:
        each.clear()
    if compiled:
        model.compile_repeated_blocks(fullgraph=True)
    with pytest.raises(InvalidInputError) as raised:
        model(**given)
    for each, hook in zip(hooks, kept, strict=True):
        each.update(hook)
    torch._dynamo.reset()
    torch.testing.assert_close(model(**given)[0], expected, rtol=0, atol=1e-5)
    return str(raised.value)


@pytest.mark.parametrize("exchange", ["slots", "collective"])
@pytest.mark.parametrize("compiled", [False, True])
def test_tokens_that_nobody_has_cut(on_ranks: Run, exchange: str, compiled: bool) -> None:
    for rank, said in enumerate(on_ranks(2, uncut, exchange, compiled)):
        required = f"rank {rank}: q was required to have {8 - rank} tokens, as the splits (8, 7) say"
        assert said.startswith(f"{required}; received 15 (the whole sequence: was it not cut?)"), said


def copied(rank: int) -> None:
    model, given = wan(), inputs(GRIDS["24 tokens"])
    parallelize(model, ulysses_degree=2)
    for _ in range(2):
        with pytest.raises(UnsupportedError, match="copy the model first, and parallelize the copy"):
            copy.deepcopy(model)
        model(**given)


def test_a_parallelized_model_is_not_copied(on_ranks: Run) -> None:
    on_ranks(2, copied)


def trained(rank: int, exchange: str, asynchronous: bool, how: str) -> None:
    """Every rank has the whole output and so the whole loss: the mean of their gradients is that of one rank."""
    torch._dynamo.reset()
    model, given = wan().train().requires_grad_(True), inputs(GRIDS["15 tokens"])
    alone = copy.deepcopy(model)
    parallelize(model, ulysses_degree=2, exchange=exchange, asynchronous=asynchronous)
    if how == "checkpointed":
        model.enable_gradient_checkpointing()
    elif how == "compiled":
        model.compile_repeated_blocks(fullgraph=True)
    latents = {}
    for one in (alone, model):
        latents[one] = given["hidden_states"].clone().requires_grad_()
        out = one(**{**given, "hidden_states": latents[one]})[0]
        (out * out.detach().roll(1)).mean().backward()
    close(summed(latents[model].grad) / 2, latents[alone].grad, 1e-5)
    required = dict(alone.named_parameters())
    for name, weight in model.named_parameters():
        name = name.removeprefix("_orig_mod.")
        assert (weight.grad is None) == (required[name].grad is None), name
        if weight.grad is not None:
            close(summed(weight.grad) / 2, required[name].grad, 1e-5)
    assert sum(weight.grad is not None for weight in required.values()) > 40


@pytest.mark.parametrize("exchange", ["slots", "collective"])
@pytest.mark.parametrize(("asynchronous", "how"), [(True, ""), (False, ""), (True, "checkpointed"), (True, "compiled")])
def test_training(on_ranks: Run, exchange: str, asynchronous: bool, how: str) -> None:
    on_ranks(2, trained, exchange, asynchronous, how, timeout=240)


def compiled_blocks(rank: int, asynchronous: bool) -> None:
    torch._dynamo.reset()
    model = wan(layers=8)
    whole = model(**inputs(GRIDS["15 tokens"]))[0]
    parallelize(model, ulysses_degree=2, asynchronous=asynchronous)
    counter = CompileCounterWithBackend("inductor")
    model.compile_repeated_blocks(fullgraph=True, backend=counter)
    for name in ("15 tokens", "24 tokens", "15 tokens"):
        out = model(**inputs(GRIDS[name]))[0]
    # For two lengths: the hook that cuts the tokens, the first block, which gets a view, and all others together.
    assert counter.frame_count <= 6
    torch.testing.assert_close(out, whole, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("asynchronous", [True, False], ids=["async", "sync"])
def test_repeated_blocks_compile_without_a_break(on_ranks: Run, asynchronous: bool) -> None:
    on_ranks(2, compiled_blocks, asynchronous)
