"""What can be asked for in eager code can be in compiled code, with the same result."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch._dynamo
from conftest import Run
from test_shapes import Shape, call, held
from torch import Tensor

from ithaca import SdpaBackend, UlyssesAttention
from ithaca.backends.reference import dense_attention

pytestmark = [pytest.mark.full, pytest.mark.timeout(300)]

SHAPES = [
    Shape((3, 5), heads=6, kv_heads=2),
    Shape((3, 5), heads=9, kv_heads=3, options={"head_splits": (2, 7)}),
    Shape((3, 5), (6,), heads=6, kv_heads=2, whole_kv=True),
    Shape((3, 5), (4, 2), v_dim=4, options={"seq_splits": (3, 5), "kv_seq_splits": (4, 2)}),
    Shape((3, 5), options={"causal": True}),
    Shape((5, 7), heads=6, kv_heads=2, options={"text_tokens": 2}),
    Shape((5, 7), options={"text_tokens": 3, "text_first": False}),
    Shape((3, 5), options={"compress": "int8"}),
    Shape((3, 5), options={"compress": {"k": "float8", "out": "int8"}}),
]


def compiled(rank: int, exchange: str) -> None:
    attn = UlyssesAttention(SdpaBackend(), exchange=exchange)
    for shape in SHAPES:
        for mode in ("sync", "vqk"):
            torch._dynamo.reset()
            case = replace(shape, mode=mode)

            def run(q: Tensor, k: Tensor, v: Tensor, case: Shape = case) -> Tensor:
                return call(attn, case, q + 1, k + 1, v + 1)

            pieces = held(rank, case)
            with torch.no_grad():
                fast = torch.compile(run, fullgraph=True)(*pieces)
                torch.testing.assert_close(fast, run(*pieces), rtol=0, atol=1e-5)


def masked(rank: int, exchange: str) -> None:
    """A mask in shards: over the keys, over the queries, and with rows for text."""
    attn, sizes = UlyssesAttention(SdpaBackend(), exchange=exchange), (3, 5)
    generator = torch.Generator().manual_seed(3)
    for shape, dim, text in (((2, 8), 1, 0), ((1, 6, 8, 8), 2, 0), ((1, 1, 10, 10), 2, 2), ((2, 10), 1, 2)):
        q, k, v = (torch.randn(2, 8 + text, 6, 8, generator=generator) for _ in range(3))
        mask = torch.rand(shape, generator=generator) > 0.4

        def held(t: Tensor, dim: int = 1, text: int = text) -> Tensor:
            of_text, *rest = t.split((text, *sizes), dim)
            return torch.cat((of_text, rest[rank]), dim)

        expected = held(dense_attention(q, k, v, mask=mask[:, None, None] if mask.dim() == 2 else mask))
        given = held(q), held(k), held(v), held(mask, dim)
        for asynchronous in (False, True):
            torch._dynamo.reset()

            def run(
                q: Tensor, k: Tensor, v: Tensor, m: Tensor, at: bool = not asynchronous, text: int = text
            ) -> Tensor:
                q = q + 1 - 1
                if at:
                    return attn(q, k, v, mask=m, mask_sharded=True, text_tokens=text)
                return attn.forward_async(lambda: q, lambda: k, lambda: v, mask=m, mask_sharded=True, text_tokens=text)

            with torch.no_grad():
                out = torch.compile(run, fullgraph=True)(*given)
            torch.testing.assert_close(out, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("exchange", ["slots", "collective"])
def test_compiled_masks_in_shards(on_ranks: Run, exchange: str) -> None:
    on_ranks(2, masked, exchange, timeout=240)


@pytest.mark.parametrize("exchange", ["slots", "collective"])
def test_compiled_shapes(on_ranks: Run, exchange: str) -> None:
    on_ranks(2, compiled, exchange, timeout=240)
