"""Training steps of other networks against PyTorch's: two convnets, and a mixture of experts.

The same weights, inputs and optimizer (AdamW), f32, one process each with the whole machine, steps
in turn: Tessera is one device, PyTorch has a thread per core. The convnets have batch norms over
images of 32 x 32: one is residual, the other depthwise, with pooling and exact GELU. Each token
uses two of eight experts, without capacity; in PyTorch as its users write it: a loop over the
experts that selects each one's tokens and adds their results back. Run it: `python bench/nets.py
convnet` (or `depthwise`, `moe`) prints one line of JSON. On a GPU both sides use it, f32 with TF32
products; BENCH_LARGE=1 takes sizes that fill one.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import jax
import numpy as np
from few_devices import start_few
from gpt_step import our_memory
from peers.net_sizes import CONVNET, DEPTHWISE, MOE, RATE
from turns import Workers, apart, in_turn, ratio, timed

import tessera as ts
from tessera import nn, schedule

HERE = Path(__file__).resolve().parent
SAME = 1e-1  # the largest difference of losses: a router may choose differently between near scores


class Block(nn.Module):
    """Two convolutions and a shortcut."""

    def __init__(self, inputs: int, outputs: int, stride: int):
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.norm1 = nn.BatchNorm(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.norm2 = nn.BatchNorm(outputs)
        turned = stride != 1 or inputs != outputs
        self.past = nn.Conv2d(inputs, outputs, 1, stride, bias=False) if turned else None

    def __call__(self, x: ts.Tensor) -> ts.Tensor:
        h = nn.relu(self.norm1(self.conv1(x)))
        return nn.relu(self.norm2(self.conv2(h)) + (self.past(x) if self.past else x))


class ConvNet(nn.Module):
    def __init__(self) -> None:
        widths = CONVNET.widths
        self.stem = nn.Conv2d(3, widths[0], 3, 1, 1, bias=False)
        self.blocks = [Block(*sizes) for sizes in CONVNET.blocks()]
        self.head = nn.Linear(widths[-1], CONVNET.classes)

    def loss(self, x: ts.Tensor, labels: ts.Tensor) -> ts.Tensor:
        h = self.stem(x)
        for block in self.blocks:
            h = block(h)
        return nn.cross_entropy(self.head(h.mean((2, 3))), labels)


class Apart(nn.Module):
    """A depthwise convolution between two pointwise ones."""

    def __init__(self) -> None:
        d, h = DEPTHWISE.width, DEPTHWISE.wide
        self.up = nn.Conv2d(d, h, 1, bias=False)
        self.norm1 = nn.BatchNorm(h)
        self.apart = nn.Conv2d(h, h, 3, 1, 1, groups=h, bias=False)
        self.norm2 = nn.BatchNorm(h)
        self.down = nn.Conv2d(h, d, 1, bias=False)

    def __call__(self, x: ts.Tensor) -> ts.Tensor:
        h = nn.gelu(self.norm1(self.up(x)), "none")
        return x + self.down(nn.gelu(self.norm2(self.apart(h)), "none"))


class Depthwise(nn.Module):
    def __init__(self) -> None:
        self.stem = nn.Conv2d(3, DEPTHWISE.width, 3, 1, 1, bias=False)
        self.blocks = [Apart() for _ in range(DEPTHWISE.blocks)]
        self.head = nn.Linear(DEPTHWISE.width, DEPTHWISE.classes)

    def loss(self, x: ts.Tensor, labels: ts.Tensor) -> ts.Tensor:
        h = nn.max_pool2d(self.stem(x), 3, 2, 1)
        for block in self.blocks:
            h = block(h)
        pooled = nn.adaptive_avg_pool2d(h, 1)
        return nn.cross_entropy(self.head(pooled.reshape(pooled.shape[:2])), labels)


class Layer(nn.Module):
    def __init__(self) -> None:
        self.norm = nn.LayerNorm(MOE.width)
        self.moe = nn.MoE(MOE.width, MOE.hidden, MOE.experts, MOE.k)

    def __call__(self, x: ts.Tensor) -> ts.Tensor:
        return x + self.moe(self.norm(x))


class Mixed(nn.Module):
    def __init__(self) -> None:
        self.embed = nn.Embedding(MOE.vocab, MOE.width)
        self.layers = [Layer() for _ in range(MOE.layers)]
        self.head = nn.Linear(MOE.width, MOE.vocab, bias=False)

    def loss(self, ids: ts.Tensor, labels: ts.Tensor) -> ts.Tensor:
        h = self.embed(ids)
        for layer in self.layers:
            h = layer(h)
        return nn.cross_entropy(self.head(h), labels)


def example(net: str) -> tuple[Any, np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Returns (the model, a batch, its labels) of "convnet", "depthwise" or "moe"."""
    rng = np.random.default_rng(0)
    ts.seed(0)
    if net == "moe":
        shape = MOE.batch, MOE.seq
        return Mixed(), rng.integers(0, MOE.vocab, shape), rng.integers(0, MOE.vocab, shape)
    model: Any = ConvNet() if net == "convnet" else Depthwise()
    sizes: Any = CONVNET if net == "convnet" else DEPTHWISE
    x = rng.normal(size=(sizes.batch, 3, 32, 32)).astype(np.float32)
    return model, x, rng.integers(0, sizes.classes, sizes.batch)


def ours(
    model: Any, x: ts.Tensor, labels: ts.Tensor, tune: bool = False, dtype: str = "f32"
) -> tuple[Callable[[], float], Any]:
    """Returns (a function that runs one step and returns its loss, the compiled step); products are
    of `dtype`."""
    opt = ts.optim.AdamW(lr=RATE, weight_decay=0.0)

    @ts.jit(donate=("model", "state"))
    def step(model: Any, state: Any, x: ts.Tensor, labels: ts.Tensor) -> Any:
        with ts.autocast(dtype):
            loss = model.loss(x, labels)
        weights = model.parameters()
        new, state = opt.update(weights, ts.grad(loss, weights), state)
        model.load_parameters(new)
        return loss, state

    if tune:
        step = step.under(schedule.ScheduleOptions(tune=True))
    box = {"state": opt.init(model.parameters())}

    def run() -> float:
        loss, box["state"] = step(model, box["state"], x, labels)
        jax.block_until_ready([w.stored for w in model.parameters().values()])
        return float(loss)

    return run, step


def peak() -> Callable[[], float] | None:
    """Returns a function for the peak memory of a GPU's allocator in MB; None on a CPU."""
    device = jax.local_devices()[0]
    if device.platform == "cpu":
        return None
    return lambda: (device.memory_stats() or {}).get("peak_bytes_in_use", 0) / 1e6


def main() -> None:
    ap = argparse.ArgumentParser(description=__doc__)
    ap.add_argument("net", choices=("convnet", "depthwise", "moe"))
    ap.add_argument("--rounds", type=int, default=8)
    ap.add_argument("--tune", action="store_true", help="our step, tuned")
    ap.add_argument("--dtype", choices=("f32", "bf16"), default="f32", help="of products")
    ap.add_argument("--compiled", action="store_true", help="PyTorch's step by torch.compile")
    ap.add_argument("--limit", type=float, default=240.0, help="seconds until it is given up")
    a = ap.parse_args()
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    start_few(1)
    model, x, labels = example(a.net)
    with tempfile.TemporaryDirectory() as folder:
        given: dict[str, Any] = {n: w.numpy() for n, w in model.parameters().items()}
        np.savez(Path(folder) / "given.npz", __x=x, __labels=labels, **given)
        how = "compiled" if a.compiled else "eager"
        torch_nets = [str(HERE / "peers/torch_nets.py"), a.net, folder, a.dtype, how]
        with Workers([torch_nets], a.limit) as peer:
            given_x, given_labels = ts.tensor(x), ts.tensor(labels.astype(np.int32))
            run, step = ours(model, given_x, given_labels, a.tune, a.dtype)
            found = in_turn({"ours": timed(run, peak()), "peer": peer.step}, a.rounds, warm=3)
    our, theirs = found["ours"], found["peer"]
    print(json.dumps({
        "net": a.net + " tuned" * a.tune + " compiled" * a.compiled, "dtype": a.dtype,
        "torch": peer.about["torch"],
        "ours_s": our.median_s, "ours_min_s": min(our.wall_s),
        "peer_s": theirs.median_s, "peer_min_s": min(theirs.wall_s),
        "speed_ratio": ratio(theirs.wall_s, our.wall_s),
        "cpu_ratio": ratio(theirs.cpu_s, our.cpu_s),
        "ours_peak_mb": our.peak_mb, "peer_peak_mb": theirs.peak_mb,
        "first_loss_difference": abs(our.values[0] - theirs.values[0]),
        "largest_loss_difference": apart(our, theirs, at_most=SAME),
        "losses": our.values[:3], "memory": our_memory(step),
        "timings": [str(t) for t in step.timings],
    }))  # fmt: skip


if __name__ == "__main__":
    main()
