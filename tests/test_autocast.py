"""Under autocast, lanes leave as they would be attended to on one rank; their gradients come back as they were."""

from __future__ import annotations

import pytest
import torch
from cases import NhdBackend, mine, qkv
from conftest import Run
from torch import Tensor

from ithaca import SdpaBackend, UlyssesAttention
from ithaca.backends.reference import dense_attention

pytestmark = pytest.mark.full

SIZES = (3, 5)


def cast(rank: int, ranks: int, exchange: str, compiled: bool) -> None:
    """Q and K in float32, as normalisation leaves them; V in bfloat16, as a linear layer does."""
    torch._dynamo.reset()
    sizes = SIZES if ranks > 1 else (8,)
    whole = qkv(8, 8, heads=4)
    bias = torch.randn(1, 1, 8, 8, generator=torch.Generator().manual_seed(4))
    rounded = [t.bfloat16().double().requires_grad_() for t in whole]
    wanted = dense_attention(*rounded, mask=bias.double())
    wanted.sum().backward()
    for backend in (SdpaBackend(), NhdBackend()):
        attn = UlyssesAttention(backend, exchange=exchange)
        for at_once in (True, False):

            def run(q: Tensor, k: Tensor, v: Tensor, at_once: bool = at_once, attn: UlyssesAttention = attn) -> Tensor:
                if at_once:
                    return attn(q, k, v.bfloat16(), mask=bias)
                return attn.forward_async(lambda: q, lambda: k, lambda: v.bfloat16(), mask=bias)

            pieces = [mine(t, sizes, rank).clone().requires_grad_() for t in whole]
            with torch.autocast("cpu", torch.bfloat16):
                before = attn.exchange.counters.bytes_moved if ranks > 1 else 0
                out = torch.compile(run, fullgraph=True)(*pieces) if compiled else run(*pieces)
            assert out.dtype is torch.bfloat16
            torch.testing.assert_close(out.double(), mine(wanted, sizes, rank), rtol=0, atol=2e-2)
            if ranks > 1:
                sent_away = (3 * sizes[rank] + sizes[1 - rank]) * 2 * whole[0].shape[3]
                assert attn.exchange.counters.bytes_moved - before == 2 * sent_away
            out.sum().backward()
            for piece, t in zip(pieces, rounded, strict=True):
                assert piece.grad is not None and piece.grad.dtype is torch.float32 and t.grad is not None
                torch.testing.assert_close(piece.grad.double(), mine(t.grad, sizes, rank), rtol=0, atol=4e-2)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("exchange", ["slots", "collective"])
def test_lanes_are_cast_as_they_leave(on_ranks: Run, exchange: str, compiled: bool) -> None:
    on_ranks(2, cast, 2, exchange, compiled, timeout=240)


def test_on_one_rank_too() -> None:
    cast(0, 1, "auto", compiled=False)
