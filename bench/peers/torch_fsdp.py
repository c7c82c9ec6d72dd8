"""A PyTorch worker of `bench/fsdp.py`: the GPT of `torch_gpt.py` under FSDP2 or DDP.

It has one thread, reads its weights and tokens from a file of `bench/fsdp.py`, and takes one step
per line that it reads.
"""

from __future__ import annotations

import argparse
import os
import sys
from datetime import timedelta
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = "1"
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import torch
import torch.distributed as dist
from peers.torch_gpt import GPT, load
from torch import nn
from torch.distributed.fsdp import fully_shard
from turns import serve

WAIT_S = 60.0


def main() -> None:
    ap = argparse.ArgumentParser(description=__doc__)
    ap.add_argument("kind", choices=("fsdp", "ddp"))
    ap.add_argument("folder", type=Path)
    ap.add_argument("rank", type=int)
    ap.add_argument("procs", type=int)
    ap.add_argument("--heads", type=int, required=True)
    a = ap.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{a.folder / 'store'}", rank=a.rank, world_size=a.procs,
        timeout=timedelta(seconds=WAIT_S),
    )  # fmt: skip
    with np.load(a.folder / "given.npz") as file:
        given = dict(file)
    tokens_BS, labels_BS = given.pop("tokens"), given.pop("labels")
    vocab, width = given["wte"].shape
    sizes = argparse.Namespace(
        vocab=vocab, width=width, seq=len(given["wpe"]), heads=a.heads, bias=False, tied=False,
        layers=sum(name.endswith("qkv.w") for name in given),
    )  # fmt: skip
    model: nn.Module = GPT(sizes)
    load(model, given)
    if a.kind == "ddp":
        model = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    else:
        mesh = dist.device_mesh.init_device_mesh("cpu", (a.procs,))
        for layer in model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    weights = list(model.parameters())
    groups = [
        {"params": [p for p in weights if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in weights if p.ndim == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=3e-4, betas=(0.9, 0.95), eps=1e-8, fused=True)
    share = slice(a.rank * len(tokens_BS) // a.procs, (a.rank + 1) * len(tokens_BS) // a.procs)
    tokens, labels = (torch.from_numpy(x[share].astype(np.int64)) for x in (tokens_BS, labels_BS))

    def step() -> float:
        optimizer.zero_grad(set_to_none=True)
        loss = model(tokens, labels)
        loss.backward()
        optimizer.step()
        return loss.item()

    dist.barrier()
    serve(step, torch=torch.__version__)
    # gloo's threads may outlive the interpreter's teardown, which then ends in std::terminate.
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
