"""What people do to a model after `parallelize`: the result keeps the bits of one rank that has done the same."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo
import torch.distributed as dist
from conftest import Run
from diffusers import WanTransformer3DModel
from diffusers.hooks import HookRegistry, ModelHook
from gradients import close, summed
from safetensors.torch import load_file
from tiny_wan import GRIDS, inputs, wan
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from ithaca import InvalidInputError, PeerRefusedError, SdpaBackend, UlyssesAttention, exchange_for, parallelize

pytestmark = pytest.mark.full


def replaced(model: WanTransformer3DModel) -> None:
    """As libraries do that know of no hooks: a forward of their own, around that of the class."""

    def forward(*args: Any, **kwargs: Any) -> Any:
        return tuple(2 * out for out in WanTransformer3DModel.forward(model, *args, **kwargs))

    model.forward = forward


class Doubled(ModelHook):
    def post_forward(self, module: torch.nn.Module, output: Tensor) -> Tensor:
        return 2 * output


def hooked_by_diffusers(model: WanTransformer3DModel) -> None:
    for module in (model, model.blocks[0]):
        HookRegistry.check_if_exists_or_initialize(module).register_hook(Doubled.__new__(Doubled), "doubled")


def hooked_by_torch(model: WanTransformer3DModel) -> None:
    model.blocks[0].register_forward_hook(lambda module, args, out: out * 3)
    model.blocks[-1].register_forward_pre_hook(lambda module, args: (args[0] + 1, *args[1:]))


def fused_and_unfused(model: WanTransformer3DModel) -> None:
    model.fuse_qkv_projections()
    model.unfuse_qkv_projections()


def offloaded(kind: str, model: WanTransformer3DModel) -> None:
    blocks = {"num_blocks_per_group": 1} if kind == "block_level" else {}
    model.enable_group_offload(torch.device("cpu"), torch.device("cpu"), offload_type=kind, **blocks)


def cast_by_layer(model: WanTransformer3DModel) -> None:
    model.enable_layerwise_casting(storage_dtype=torch.float8_e4m3fn, compute_dtype=torch.float32)


def reloaded(model: WanTransformer3DModel) -> None:
    model.load_state_dict({name: weight * 1.01 for name, weight in model.state_dict().items()})


CHANGES: dict[str, Callable[[WanTransformer3DModel], Any]] = {
    "to bfloat16": lambda model: model.to(torch.bfloat16),
    "QKV fused": lambda model: (model.fuse_qkv_projections(), model.requires_grad_(False)),
    "QKV fused and unfused": fused_and_unfused,
    "group offloading, leaves": functools.partial(offloaded, "leaf_level"),
    "group offloading, blocks": functools.partial(offloaded, "block_level"),
    "layerwise casting": cast_by_layer,
    "other weights": reloaded,
    "checkpointing": lambda model: (model.train(), model.enable_gradient_checkpointing()),
    "another forward": replaced,
    "hooks of torch": hooked_by_torch,
    "hooks of diffusers": hooked_by_diffusers,
    "native attention": lambda model: model.set_attention_backend("native"),
}


def changed(rank: int, change: str, exchange: str) -> None:
    alone, model, given = wan(layers=3), wan(layers=3), inputs(GRIDS["15 tokens"])
    parallelize(model, ulysses_degree=2, exchange=exchange)
    assert torch.equal(model(**given)[0], alone(**given)[0])
    for one in (alone, model):
        CHANGES[change](one)
    if change == "to bfloat16":
        given = {k: v.bfloat16() if isinstance(v, Tensor) else v for k, v in given.items()}
    for _ in range(2):
        assert torch.equal(model(**given)[0], alone(**given)[0])


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("exchange", ["slots", "collective"])
def test_what_is_done_to_a_model_afterwards(on_ranks: Run, change: str, exchange: str) -> None:
    if "offloading" in change:
        pytest.importorskip("accelerate")  # which diffusers needs for it
    on_ranks(2, changed, change, exchange)


def raised_in_another_forward(rank: int) -> None:
    """Peers are told by the hooks, whatever became of model.forward."""
    model, given = wan(), inputs(GRIDS["24 tokens"])
    expected = model(**given)[0]
    parallelize(model, ulysses_degree=2)
    own = type(model).forward
    model.forward = lambda *args, **kwargs: 1 // (1 - rank) and own(model, *args, **kwargs)
    with pytest.raises(ZeroDivisionError if rank else PeerRefusedError, match="by zero"):
        model(**given)
    del model.forward
    assert torch.equal(model(**given)[0], expected)


def test_another_forward_that_raises_tells_the_peers(on_ranks: Run) -> None:
    on_ranks(2, raised_in_another_forward)


def tried_again(rank: int) -> None:
    """A forward inside of an ``except`` block: the exception that is being handled is not this forward's."""
    model, given = wan(), inputs(GRIDS["24 tokens"])
    expected = model(**given)[0]
    parallelize(model, ulysses_degree=2)
    for _ in range(2):
        try:
            raise MemoryError("the user's own")
        except MemoryError:
            assert torch.equal(model(**given)[0], expected)


def test_a_forward_while_an_error_is_handled(on_ranks: Run) -> None:
    on_ranks(2, tried_again)


def another_length(rank: int) -> str:
    """A hook on the last block that returns other tokens than this rank has."""
    model, given = wan(), inputs(GRIDS["15 tokens"])
    expected = model(**given)[0]
    parallelize(model, ulysses_degree=2)
    hook = model.blocks[-1].register_forward_hook(lambda module, args, out: out.repeat(1, 2, 1))
    with pytest.raises(InvalidInputError) as raised:
        model(**given)
    hook.remove()
    assert torch.equal(model(**given)[0], expected)
    return str(raised.value)


def test_a_hook_that_returns_other_tokens_is_told(on_ranks: Run) -> None:
    for rank, said in enumerate(on_ranks(2, another_length)):
        mine = 8 - rank
        required = f"rank {rank}: the result of proj_out was required to have {mine} tokens, as the splits (8, 7) say"
        assert said == f"{required}; received [2, {2 * mine}, 16]"


def saved(rank: int, folder: str) -> None:
    model, given = wan(), inputs(GRIDS["24 tokens"])
    expected = model(**given)[0]
    parallelize(model, ulysses_degree=2)
    model(**given)
    model.save_pretrained(f"{folder}/{rank}")
    again = WanTransformer3DModel.from_config(WanTransformer3DModel.load_config(f"{folder}/{rank}")).eval()
    again.load_state_dict(load_file(f"{folder}/{rank}/diffusion_pytorch_model.safetensors"))
    again.requires_grad_(False)
    assert torch.equal(again(**given)[0], expected)
    assert torch.equal(parallelize(again, ulysses_degree=2)(**given)[0], expected)


def test_save_pretrained(on_ranks: Run, tmp_path: Path) -> None:
    on_ranks(2, saved, str(tmp_path))


def in_autocast(rank: int) -> None:
    alone, model, given = wan(), wan(), inputs(GRIDS["15 tokens"])
    parallelize(model, ulysses_degree=2)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(model(**given)[0], alone(**given)[0])


def test_autocast(on_ranks: Run) -> None:
    on_ranks(2, in_autocast)


def fully_sharded(rank: int) -> None:
    from torch.distributed.fsdp import fully_shard

    model, given = wan(), inputs(GRIDS["15 tokens"])
    expected = model(**given)[0]
    parallelize(model, ulysses_degree=2)
    mesh = init_device_mesh("cpu", (2,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    for _ in range(2):
        assert torch.equal(model(**given)[0], expected)


def test_fsdp(on_ranks: Run) -> None:
    on_ranks(2, fully_sharded)


def side_by_side(rank: int) -> None:
    first, second, third = inputs(GRIDS["15 tokens"]), inputs(GRIDS["24 tokens"]), wan(layers=1)
    expected = wan()(**first)[0], wan(layers=3)(**second)[0], third(**first)[0]
    models = [parallelize(wan(), ulysses_degree=2), parallelize(wan(layers=3), ulysses_degree=2, exchange="collective")]
    for _ in range(2):
        assert torch.equal(models[0](**first)[0], expected[0])
        assert torch.equal(third(**first)[0], expected[2])
        assert torch.equal(models[1](**second)[0], expected[1])


def test_two_models_side_by_side(on_ranks: Run) -> None:
    on_ranks(2, side_by_side)


def in_a_mesh(rank: int) -> None:
    model, given = wan(), inputs(GRIDS["15 tokens"])
    expected = model(**given)[0]
    two = init_device_mesh("cpu", (1, 2), mesh_dim_names=("replicas", "ulysses"))
    for mesh in (init_device_mesh("cpu", (2,)), two["ulysses"]):
        spread = parallelize(copy.deepcopy(model), ulysses_degree=2, group=mesh)
        assert torch.equal(spread(**given)[0], expected)
        attn = UlyssesAttention(SdpaBackend(), mesh)
        assert attn.ulysses_degree == 2 and attn.exchange.world_size == 2
        assert exchange_for(mesh) is attn.exchange
    assert UlyssesAttention(SdpaBackend(), two["replicas"]).ulysses_degree == 1
    required = r"mesh of one dimension, such as mesh\[NAME\]; received one of 2, \('replicas', 'ulysses'\)"
    with pytest.raises(InvalidInputError, match=required):
        UlyssesAttention(SdpaBackend(), two)
    for use in (lambda: parallelize(model, ulysses_degree=2, group=two), lambda: exchange_for(two)):
        with pytest.raises(InvalidInputError, match=required):
            use()


def test_a_mesh_for_a_group(on_ranks: Run) -> None:
    on_ranks(2, in_a_mesh)


def compiled_whole(rank: int, how: str, exchange: str) -> None:
    """With an exchange that nothing has set up yet, and once more when it is there."""
    torch._dynamo.reset()
    group = dist.new_group([0, 1])  # which has no exchange as yet
    alone, model, given = wan(), wan(), inputs(GRIDS["15 tokens"])
    parallelize(model, ulysses_degree=2, group=group, exchange=exchange)
    run: Any = model
    if how == "torch.compile":
        run = torch.compile(model, backend="aot_eager")
    elif how == "inside of another":
        run = torch.compile(lambda **given: [2 * out / 2 for out in model(**given)], backend="aot_eager")
    else:
        model.compile(backend="aot_eager")
    for _ in range(2):
        close(run(**given)[0], alone(**given)[0], 1e-5)
    model.blocks[0].ffn.forward = raises if rank else model.blocks[0].ffn.forward
    with pytest.raises(MemoryError if rank else PeerRefusedError, match="no more"):
        run(**given)
    dist.destroy_process_group(group)


def raises(*args: Any) -> None:
    raise MemoryError("no more")


@pytest.mark.parametrize(
    ("how", "exchange"),
    [
        ("torch.compile", "slots"),
        ("torch.compile", "collective"),
        ("model.compile", "slots"),
        ("inside of another", "slots"),
    ],
)
def test_the_whole_model_compiles(on_ranks: Run, how: str, exchange: str) -> None:
    on_ranks(2, compiled_whole, how, exchange, timeout=240)


def compiled_whole_and_trained(rank: int) -> None:
    torch._dynamo.reset()
    group = dist.new_group([0, 1])
    alone, model = (wan().train().requires_grad_(True) for _ in range(2))
    parallelize(model, ulysses_degree=2, group=group)
    given = inputs(GRIDS["15 tokens"])
    for run in (alone, torch.compile(model, backend="aot_eager")):
        out = run(**given)[0]
        (out * out.detach().roll(1)).mean().backward()
    required = dict(alone.named_parameters())
    for name, weight in model.named_parameters():
        assert (weight.grad is None) == (required[name].grad is None), name
        if weight.grad is not None:
            close(summed(weight.grad) / 2, required[name].grad, 1e-5)
    dist.destroy_process_group(group)


def test_the_whole_model_compiles_with_gradients(on_ranks: Run) -> None:
    on_ranks(2, compiled_whole_and_trained, timeout=240)


def add_adapters(*models: WanTransformer3DModel) -> None:
    from peft import LoraConfig

    # Of rank 8: for fewer columns the BLAS takes kernels that add up in an order that depends on the tokens.
    config = LoraConfig(r=8, target_modules=["to_q", "to_k", "to_v", "to_out.0"], init_lora_weights=False)
    for model in models:
        for name in ("a", "b"):
            torch.manual_seed(ord(name))
            model.add_adapter(config, name)


def adapted(rank: int) -> None:
    """Loaded after, toggled, two with weights, fused."""
    alone, model, given = wan(), wan(), inputs(GRIDS["15 tokens"])
    parallelize(model, ulysses_degree=2)
    steps: list[Callable[[WanTransformer3DModel], Any]] = [
        lambda one: one.set_adapters(["a"]),
        lambda one: one.disable_adapters(),
        lambda one: one.enable_adapters(),
        lambda one: one.set_adapters(["a", "b"], [0.3, 0.8]),
        lambda one: one.fuse_lora(),
        lambda one: one.unfuse_lora(),
        lambda one: one.delete_adapters(["a"]),
    ]
    plain = alone(**given)[0]
    add_adapters(alone, model)
    different = 0
    for step in steps:
        for one in (alone, model):
            step(one)
        out = model(**given)[0]
        assert torch.equal(out, alone(**given)[0])
        different += not torch.equal(out, plain)
    assert different >= 5


def adapters_trained(rank: int) -> None:
    alone, model, given = wan(), wan(), inputs(GRIDS["15 tokens"])
    parallelize(model, ulysses_degree=2)
    add_adapters(alone, model)
    for one in (alone, model):
        one.set_adapters(["a", "b"])
        out = one(**given)[0]
        (out * out.detach().roll(1)).mean().backward()
    trained = {name: weight.grad for name, weight in alone.named_parameters() if weight.grad is not None}
    assert len(trained) == 2 * 2 * 4 * 2 * 2  # blocks, attentions, projections, adapters, factors
    for name, weight in model.named_parameters():
        assert (weight.grad is not None) == (name in trained), name
        if weight.grad is not None:
            close(summed(weight.grad) / 2, trained[name], 1e-5)


@pytest.mark.parametrize("how", [adapted, adapters_trained])
def test_lora(on_ranks: Run, how: Callable[[int], None]) -> None:
    pytest.importorskip("peft")
    on_ranks(2, how)


def quantized(rank: int, first: str) -> None:
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    alone, model, given = wan(), wan(), inputs(GRIDS["15 tokens"])
    for what in (first, "parallelize" if first == "quantize" else "quantize"):
        if what == "quantize":
            for one in (alone, model):
                quantize_(one, Int8WeightOnlyConfig())
        else:
            parallelize(model, ulysses_degree=2)
    out = model(**given)[0]
    assert torch.equal(out, alone(**given)[0]) and not torch.equal(out, wan()(**given)[0])


@pytest.mark.parametrize("first", ["parallelize", "quantize"])
def test_torchao(on_ranks: Run, first: str) -> None:
    pytest.importorskip("torchao")
    on_ranks(2, quantized, first)
