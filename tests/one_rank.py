"""One rank as a program of its own: ``one_rank.py RANK STORE COPY HOW`` computes, then ends as ``HOW`` says."""

from __future__ import annotations

import os
import sys
import time

import torch
import torch.distributed as dist

from ithaca import ExchangeClosedError, PeerDiedError, SdpaBackend, UlyssesAttention, exchange_for


def main(rank: int, store: str, copy: str, how: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, 2), rank=rank, world_size=2)
    attn = UlyssesAttention(SdpaBackend(), exchange=exchange_for(want="slots", copy=copy))
    one = torch.ones(1, 2, 2, 4)

    def q() -> torch.Tensor:
        if how == "leaves inside a closure" and rank == 0:
            sys.exit(3)
        return one

    torch.testing.assert_close(attn(one, one, one), one)
    print("ready", flush=True)
    if how == "ends":
        return
    if how == "ends with a lease":
        call = exchange_for(want="slots", copy=copy).call(("gather",), attn.backend.layout, gathered=True)
        call.__enter__()
        call.push(gather=one)
        globals()["kept"] = call.wait()
        return
    if how == "interrupted" and rank == 1:
        while not os.path.exists(f"{store}.go"):
            time.sleep(0.01)
    try:
        attn.forward_async(q, lambda: one, lambda: one)
        print("done", flush=True)
    except (ExchangeClosedError, PeerDiedError) as error:
        print(type(error).__name__, error, flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:])
