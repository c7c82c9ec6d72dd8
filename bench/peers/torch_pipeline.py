"""PyTorch's pipeline on the step of `bench/pipeline.py`.

Two processes of one thread each over gloo, `PipelineStage` and `Schedule1F1B`, plain gradient
descent. Run it: `python bench/peers/torch_pipeline.py` prints one line of JSON with the median step
in seconds (of the slower process in every step).

It starts its own processes, limits each wait, and ends them all.
"""

from __future__ import annotations

import argparse
import json
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
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

WAIT_S = 60.0
RANKS = 2


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(width, 4 * width) / width**0.5)
        self.down = nn.Parameter(torch.randn(4 * width, width) / (4 * width) ** 0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = x + torch.tanh(x @ self.up) @ self.down
        return y


def worker(a: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(a.rank)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{a.rendezvous}",
        rank=a.rank,
        world_size=RANKS,
        timeout=timedelta(seconds=WAIT_S),
    )
    part = nn.Sequential(*(Block(a.width) for _ in range(a.layers // RANKS)))
    stage = PipelineStage(part, a.rank, RANKS, torch.device("cpu"))
    schedule = Schedule1F1B(stage, a.microbatches, loss_fn=nn.functional.mse_loss)
    optimizer = torch.optim.SGD(part.parameters(), lr=0.01)
    rng = np.random.default_rng(0)
    x, y = (
        torch.from_numpy(rng.normal(size=(a.rows, a.width)).astype(np.float32)) for _ in range(2)
    )
    step_s = []
    for _ in range(a.steps + 3):
        dist.barrier()
        start = time.perf_counter()
        optimizer.zero_grad(set_to_none=True)
        if a.rank == 0:
            schedule.step(x)
        else:
            schedule.step(target=y, losses=[])
        optimizer.step()
        step_s.append(time.perf_counter() - start)
    slowest = torch.tensor(step_s[3:], dtype=torch.float64)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    if a.rank == 0:
        result = {
            "peer": "torch", "torch": torch.__version__,
            "step_s": statistics.median(slowest.tolist()), "min_s": min(slowest.tolist()),
        }  # fmt: skip
        print(json.dumps(result), flush=True)
    dist.barrier()
    dist.destroy_process_group()
    # gloo's threads may outlive the interpreter's teardown, which then ends in std::terminate.
    sys.stdout.flush()
    os._exit(0)


def launch(a: argparse.Namespace) -> int:
    """Starts the workers, waits for at most `--limit` seconds, and kills the remaining ones."""
    with tempfile.TemporaryDirectory() as folder:
        env = dict(os.environ, OMP_NUM_THREADS="1", MKL_NUM_THREADS="1")
        line = [sys.executable, str(Path(__file__).resolve()), *sys.argv[1:]]
        line += ["--rendezvous", str(Path(folder) / "store")]
        procs = [subprocess.Popen([*line, "--rank", str(r)], env=env) for r in range(RANKS)]
        try:
            deadline = time.monotonic() + a.limit
            return max(abs(p.wait(max(0.1, deadline - time.monotonic()))) for p in procs)
        except subprocess.TimeoutExpired:
            print(f"torch_pipeline: not done after {a.limit:g} s", file=sys.stderr)
            return 1
        finally:
            for p in procs:
                if p.poll() is None:
                    p.kill()
                    p.wait()


def main() -> None:
    ap = argparse.ArgumentParser(description=__doc__)
    ap.add_argument("--steps", type=int, default=12)
    ap.add_argument("--layers", type=int, default=8)
    ap.add_argument("--width", type=int, default=512)
    ap.add_argument("--rows", type=int, default=2048)
    ap.add_argument("--microbatches", type=int, default=8)
    ap.add_argument("--limit", type=float, default=240.0)
    ap.add_argument("--rank", type=int, default=-1)
    ap.add_argument("--rendezvous", default="")
    a = ap.parse_args()
    if a.rank < 0:
        sys.exit(launch(a))
    worker(a)


if __name__ == "__main__":
    main()
