"""The cost of unfused reductions on a CPU: with the guard of core/flags.py and without.

Programs dominated by reductions, and a GPT's training step. The engine reads its flags at the
start, so each side is its own process; steps are taken in turn. Without the guard some sums are
wrong, so values are not compared. Run it: `python bench/guard.py attention` (or norms, loss, step)
prints one line of JSON.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from turns import Workers, in_turn, ratio, serve

# The engine's default, set explicitly so that core/flags.py keeps it.
FUSED = {
    "XLA_FLAGS": "--xla_cpu_experimental_ynn_fusion_type=+reduce",
    "PYTHONWARNINGS": "ignore",
}
SIDES = {"guarded": {}, "fused": FUSED}


def main() -> None:
    ap = argparse.ArgumentParser(description=__doc__)
    ap.add_argument("what", choices=["step", *PROGRAMS])
    ap.add_argument("--rounds", type=int, default=20)
    ap.add_argument("--limit", type=float, default=300.0, help="seconds until it is given up")
    ap.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    a = ap.parse_args()
    if a.serve:
        serve(step() if a.what == "step" else program(a.what))
        return
    with ExitStack() as stack:
        command = [str(Path(__file__).resolve()), a.what, "--serve"]
        running = {
            name: stack.enter_context(Workers([command], a.limit, env))
            for name, env in SIDES.items()
        }
        found = in_turn({name: w.step for name, w in running.items()}, a.rounds, warm=2)
    ours, free = found["guarded"], found["fused"]
    print(
        json.dumps({
            "what": a.what,
            "median_s": {k: s.median_s for k, s in found.items()},
            "min_s": {k: min(s.wall_s) for k, s in found.items()},
            "price": ratio(ours.wall_s, free.wall_s),
            "cpu_price": ratio(ours.cpu_s, free.cpu_s),
        })
    )  # fmt: skip


def attention(x: Any, y: Any, z: Any) -> Any:
    from tessera import nn

    return nn.attention(x, y, z, causal=True)


def norms(x: Any, y: Any, z: Any) -> Any:
    from tessera import nn

    return nn.layer_norm(x) * nn.softmax(y) + nn.rms_norm(z)


def loss(x: Any, y: Any, z: Any) -> Any:
    import tessera as ts

    return ts.logsumexp(x, -1) - ts.max(y, -1) + ts.mean(z * z, -1)


PROGRAMS: dict[str, Callable[..., Any]] = {"attention": attention, "norms": norms, "loss": loss}


def program(what: str) -> Callable[[], float]:
    """Returns a function that computes the value and the gradients of one of PROGRAMS on f32 [4, 8,
    512, 64]."""
    import numpy as np

    import tessera as ts

    rng = np.random.default_rng(0)
    args = [ts.tensor(rng.normal(size=(4, 8, 512, 64)).astype(np.float32)) for _ in range(3)]

    @ts.jit
    def both(*xs: Any) -> Any:
        value = ts.mean(PROGRAMS[what](*xs) ** 2)
        return value, ts.grad(value, list(xs))

    def run() -> float:
        value, grads = both(*args)
        for g in grads:
            g.stored.block_until_ready()
        return float(value.item())

    return run


def step() -> Callable[[], float]:
    """Returns a function that runs a training step of a two-layer GPT on one device and returns its
    loss."""
    from gpt_step import ours
    from peers import jax_gpt

    return ours(jax_gpt.GPTConfig(layers=2), {})[0]


if __name__ == "__main__":
    main()
