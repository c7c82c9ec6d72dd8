"""The profile of PyTorch's training step: the GPT of `torch_gpt.py` on one thread.

The times of `torch.profiler` for each op, by pass and by part of the model. Run it: `python
bench/peers/torch_step.py f32` (or bf16, by autocast) prints one line of JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = "1"
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import torch
from peers import jax_gpt
from peers.torch_gpt import GPT, load

PARTS = {
    "scaled_dot_product": "attention products", "log_softmax": "head and loss",
    "cross_entropy": "head and loss", "nll_loss": "head and loss", "layer_norm": "norms",
    "gelu": "activation", "embedding": "embedding", "adam": "optimizer",
    "copy_": "copies and transposes", "_to_copy": "copies and transposes",
    "clone": "copies and transposes", "cat": "copies and transposes",
    "contiguous": "copies and transposes", "transpose": "copies and transposes",
}  # fmt: skip
PRODUCTS = ("aten::mm", "aten::addmm", "aten::bmm")


def part(event: Any, products: dict[tuple[int, ...], str]) -> tuple[str, str]:
    """Returns (the pass, the part of the model) of an op in the profile; `products` maps a
    product's three sizes, in order, to its part."""
    names, at = [], event
    while at is not None:
        names.append(at.name)
        at = at.cpu_parent
    if any("Optimizer" in n for n in names):
        return "optimizer", "optimizer"
    back = any("autograd" in n or "Backward" in n for n in names)
    where = "backward" if back else "forward"
    if event.name in PRODUCTS:
        left, right = [s for s in event.input_shapes if len(s) > 1][-2:]
        return where, products.get(tuple(sorted((*left, right[-1]))), "rest")
    for name in names:  # from the innermost call
        for word, found in PARTS.items():
            if word in name.lower():
                return where, found
    return where, "rest"


def main() -> None:
    ap = argparse.ArgumentParser(description=__doc__)
    ap.add_argument("dtype", choices=("f32", "bf16"))
    ap.add_argument("--rounds", type=int, default=5)
    ap.add_argument("--layers", type=int, default=4)
    a = ap.parse_args()
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    torch.set_num_threads(1)
    config = jax_gpt.GPTConfig(layers=a.layers)
    model = GPT(argparse.Namespace(
        vocab=config.vocab, width=config.width, seq=config.seq, heads=config.heads, bias=False,
        tied=False, layers=config.layers,
    ))  # fmt: skip
    load(model, jax_gpt.init(config))
    weights = list(model.parameters())
    groups = [
        {"params": [p for p in weights if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in weights if p.ndim == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=3e-4, betas=(0.9, 0.95), eps=1e-8, fused=True)
    tokens, labels = (torch.from_numpy(x.astype(np.int64)) for x in jax_gpt.batch(config))

    def step() -> float:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cpu", torch.bfloat16, enabled=a.dtype == "bf16"):
            loss = model(tokens, labels)
        loss.backward()
        optimizer.step()
        return float(loss.item())

    losses, took = [step(), step()], []
    for _ in range(2 * a.rounds):
        begin = time.perf_counter()
        losses.append(step())
        took.append(time.perf_counter() - begin)
    kinds = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=kinds, record_shapes=True) as profile:
        for _ in range(a.rounds):
            step()
    width, count = config.width, config.batch * config.seq
    products = {
        tuple(sorted((count, width, n))): name
        for n, name in (
            (config.vocab, "head and loss"), (4 * width, "MLP products"),
            (3 * width, "qkv and out products"), (width, "qkv and out products"),
        )
    }  # fmt: skip
    rows: dict[tuple[str, str], float] = defaultdict(float)
    for event in profile.events():
        key = part(event, products)
        rows[key] += event.self_cpu_time_total / 1e6 / a.rounds
    print(json.dumps({
        "dtype": a.dtype, "torch": torch.__version__, "losses": losses[:3],
        "step_s": statistics.median(took), "step_min_s": min(took),
        "rows": [[*key, took_s] for key, took_s in rows.items()],
    }))  # fmt: skip


if __name__ == "__main__":
    main()
