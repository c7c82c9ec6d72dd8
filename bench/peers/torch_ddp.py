"""What does PyTorch take for the same step?  The GPT of `jax_gpt.py` under DDP over gloo.

Two processes of one thread each, the fused attention kernel, the optimizer PyTorch offers for the
CPU.  Run it: `python bench/peers/torch_ddp.py --steps 5` prints one line of JSON with the median
step in seconds (the slower process counts in every step).

It starts its own processes, gives each wait a limit, and leaves none behind.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

WAIT_S = 60.0


class Layer(nn.Module):
    def __init__(self, width: int, heads: int, bias: bool) -> None:
        super().__init__()
        self.heads = heads
        self.ln1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=bias)
        self.out = nn.Linear(width, width, bias=bias)
        self.ln2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width, bias=bias)
        self.down = nn.Linear(4 * width, width, bias=bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, s, d = x.shape
        q, k, v = (
            t.view(b, s, self.heads, d // self.heads).transpose(1, 2)
            for t in self.qkv(self.ln1(x)).split(d, dim=2)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(b, s, d))
        h = F.gelu(self.up(self.ln2(x)), approximate="tanh")
        y: torch.Tensor = x + self.down(h)
        return y


class GPT(nn.Module):
    """Pre-norm GPT; `forward` gives the mean cross entropy of the tokens."""

    def __init__(self, a: argparse.Namespace) -> None:
        super().__init__()
        self.wte = nn.Embedding(a.vocab, a.width)
        self.wpe = nn.Parameter(torch.empty(a.seq, a.width))
        self.layers = nn.ModuleList(Layer(a.width, a.heads, a.bias) for _ in range(a.layers))
        self.lnf = nn.LayerNorm(a.width)
        self.head = nn.Linear(a.width, a.vocab, bias=False)
        if a.tied:
            self.head.weight = self.wte.weight
        for name, p in self.named_parameters():
            if p.ndim > 1:
                residual = name.endswith(("out.weight", "down.weight"))
                scale = 0.02 / math.sqrt(2 * a.layers) if residual else 0.02
                nn.init.normal_(p, std=scale)
            elif name.endswith("bias"):
                nn.init.zeros_(p)

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.wte(tokens) + self.wpe
        for layer in self.layers:
            x = layer(x)
        logits = self.head(self.lnf(x))
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def worker(a: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{a.rendezvous}",
        rank=a.rank,
        world_size=a.procs,
        timeout=timedelta(seconds=WAIT_S),
    )
    gpt = GPT(a)
    model = nn.parallel.DistributedDataParallel(gpt, gradient_as_bucket_view=True)
    groups = [
        {"params": [p for p in gpt.parameters() if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in gpt.parameters() if p.ndim == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=3e-4, betas=(0.9, 0.95), eps=1e-8, fused=True)
    stream = np.random.default_rng(0).integers(0, a.vocab, (a.batch, a.seq + 1), dtype=np.int64)
    share = a.batch // a.procs
    mine = torch.from_numpy(stream[a.rank * share : (a.rank + 1) * share])
    tokens, labels = mine[:, :-1].contiguous(), mine[:, 1:].contiguous()
    losses, step_s = [], []
    for _ in range(a.steps + 2):  # two to warm up: DDP rebuilds its buckets after the first
        dist.barrier()
        start = time.perf_counter()
        optimizer.zero_grad(set_to_none=True)
        loss = model(tokens, labels)
        loss.backward()
        optimizer.step()
        step_s.append(time.perf_counter() - start)
        losses.append(loss.item())
    slowest = torch.tensor(step_s[2:], dtype=torch.float64)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    mean_loss = torch.tensor(losses, dtype=torch.float64)
    dist.all_reduce(mean_loss)
    if a.rank == 0:
        result = {
            "peer": "torch",
            "torch": torch.__version__,
            "procs": a.procs,
            "step_s": statistics.median(slowest.tolist()),
            "all_step_s": slowest.tolist(),
            "losses": (mean_loss / a.procs).tolist(),
        }
        print(json.dumps(result), flush=True)
    dist.barrier()
    dist.destroy_process_group()
    # gloo's threads may outlive the interpreter's teardown, which then ends in std::terminate.
    sys.stdout.flush()
    os._exit(0)


def launch(a: argparse.Namespace) -> int:
    """Start the workers, wait no longer than `--limit` seconds, kill what is left."""
    with tempfile.TemporaryDirectory() as folder:
        env = dict(os.environ, OMP_NUM_THREADS="1", MKL_NUM_THREADS="1")
        line = [sys.executable, str(Path(__file__).resolve()), *sys.argv[1:]]
        line += ["--rendezvous", str(Path(folder) / "store")]
        procs = [subprocess.Popen([*line, "--rank", str(rank)], env=env) for rank in range(a.procs)]
        try:
            deadline = time.monotonic() + a.limit
            return max(abs(p.wait(max(0.1, deadline - time.monotonic()))) for p in procs)
        except subprocess.TimeoutExpired:
            print(f"torch_ddp: not done after {a.limit:g} s", file=sys.stderr)
            return 1
        finally:
            for p in procs:
                if p.poll() is None:
                    p.kill()
                    p.wait()


def main() -> None:
    ap = argparse.ArgumentParser(description=__doc__)
    ap.add_argument("--steps", type=int, default=5)
    ap.add_argument("--procs", type=int, default=2)
    ap.add_argument("--width", type=int, default=256)
    ap.add_argument("--layers", type=int, default=4)
    ap.add_argument("--heads", type=int, default=8)
    ap.add_argument("--vocab", type=int, default=4096)
    ap.add_argument("--seq", type=int, default=256)
    ap.add_argument("--batch", type=int, default=16)
    ap.add_argument("--tied", action="store_true")
    ap.add_argument("--bias", action="store_true")
    ap.add_argument("--limit", type=float, default=300.0, help="seconds until the run is given up")
    ap.add_argument("--rank", type=int, default=-1, help=argparse.SUPPRESS)
    ap.add_argument("--rendezvous", default="", help=argparse.SUPPRESS)
    a = ap.parse_args()
    if a.rank < 0:
        sys.exit(launch(a))
    worker(a)


if __name__ == "__main__":
    main()
