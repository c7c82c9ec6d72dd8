"""A training step of a GPT on one GPU: Tessera, `jax_gpt.py` and PyTorch, each in its own process.

`python bench/gpu.py` runs every side in bf16 and f32 and prints one line of JSON. The sides compile
at the same time, and then each is measured while the others wait. A time is that of a window of
steps, none of which waits for its loss. f32 products may round their factors to TF32 on all sides,
as JAX does by default.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory, TemporaryFile
from threading import Timer
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

SIDES = ("ours", "jax", "jax-cudnn", "torch", "torch-compiled")
SIZES = {"width": 768, "layers": 12, "heads": 12, "vocab": 50304, "seq": 1024, "batch": 8}
LIMIT_S = 150.0  # for all sides of one dtype
Side = tuple[Callable[[], Any], Callable[[Any], float], Callable[[], int]]
"""One step, which gives a loss; the number that is its loss, for which it waits; the most bytes."""


def jax_side(side: str, dtype: str, sizes: dict[str, Any]) -> Side:
    import jax
    from gpt_step import ours, peer
    from peers import jax_gpt

    bf16 = dtype == "bf16"
    config = jax_gpt.GPTConfig(**sizes, bf16=bf16, fused=side == "jax-cudnn")
    if side == "ours":
        run, _ = ours(config, {}, autocast="bf16" if bf16 else None, wait=False)
    else:
        run, _ = peer(config, {}, wait=False)

    def peak() -> int:
        return int((jax.local_devices()[0].memory_stats() or {}).get("peak_bytes_in_use", 0))

    return run, float, peak


def torch_side(side: str, dtype: str, sizes: dict[str, Any]) -> Side:
    import numpy as np
    import torch
    from peers import jax_gpt
    from peers.torch_gpt import GPT, load

    torch.set_float32_matmul_precision("high")
    where = "cuda" if torch.cuda.is_available() else "cpu"
    config = jax_gpt.GPTConfig(**sizes)
    model = GPT(argparse.Namespace(**sizes, bias=False, tied=False))
    load(model, jax_gpt.init(config))
    model = model.to(where)
    weights = list(model.parameters())
    groups = [
        {"params": [p for p in weights if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in weights if p.ndim == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=3e-4, betas=(0.9, 0.95), eps=1e-8, fused=True)
    batch = [torch.from_numpy(x.astype(np.int64)).to(where) for x in jax_gpt.batch(config)]
    forward = torch.compile(model) if side == "torch-compiled" else model

    def run() -> Any:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(where, torch.bfloat16, enabled=dtype == "bf16"):
            loss = forward(*batch)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return run, lambda loss: float(loss.item()), torch.cuda.max_memory_allocated


def measured(
    run: Callable[[], Any], value: Callable[[Any], float], steps: int, losses: list[float]
) -> dict[str, Any]:
    losses += [value(run()) for _ in range(2)]
    windows = []
    for _ in range(3):
        begin = time.perf_counter()
        for _ in range(steps):
            loss = run()
        losses.append(value(loss))
        windows.append((time.perf_counter() - begin) / steps)
    return {
        "step_ms": 1e3 * statistics.median(windows),
        "step_min_ms": 1e3 * min(windows),
        "losses": losses,
    }


def kernels(run: Callable[[], Any], value: Callable[[Any], float], steps: int = 3) -> list[Any]:
    """Returns [ms per step, launches per step, name] of each kind of kernel, from a JAX profile."""
    import jax

    took: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    with TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            for _ in range(steps):
                loss = run()
            value(loss)
        (found,) = Path(folder).rglob("*.xplane.pb")
        for plane in jax.profiler.ProfileData.from_file(str(found)).planes:
            if "GPU" not in plane.name:
                continue
            for line in plane.lines:
                if "Stream" in line.name:
                    for event in line.events:
                        name = event.name.split(".")[0].rstrip("_0123456789")
                        took[name][0] += event.duration_ns / 1e6 / steps
                        took[name][1] += 1 / steps
    rows = [[round(ms, 3), round(n, 1), name] for name, (ms, n) in took.items()]
    return sorted(rows, reverse=True)


def serve(a: argparse.Namespace) -> None:
    """Takes the first step, prints "ready", and measures for each line read."""
    sizes = {**SIZES, **json.loads(a.sizes)}
    make = torch_side if a.side.startswith("torch") else jax_side
    begin = time.perf_counter()
    run, value, peak = make(a.side, a.dtype, sizes)
    made_s = time.perf_counter() - begin
    losses = [value(run())]
    result = {"side": a.side, "dtype": a.dtype, "made_s": made_s}
    result["first_s"] = time.perf_counter() - begin - made_s
    print("ready", flush=True)
    sys.stdin.readline()
    result |= measured(run, value, a.steps, losses)
    result["peak_mb"] = peak() / 1e6
    if a.profile and make is jax_side:
        rows = kernels(run, value)
        result["busy_ms"] = sum(ms for ms, _, _ in rows)
        result["launches"] = sum(n for _, n, _ in rows)
        result["kernels"] = rows[: a.profile]
    print(json.dumps(result), flush=True)


def together(sides: list[tuple[str, str]], rest: list[str]) -> list[dict[str, Any]]:
    """Compiles all sides at the same time, and measures them one after the other."""
    end = time.monotonic() + LIMIT_S
    rows: list[dict[str, Any]] = []
    running, errors = {}, {}
    with ExitStack() as stack:
        for side in sides:
            errors[side] = stack.enter_context(TemporaryFile("w+"))
            running[side] = subprocess.Popen(
                [sys.executable, __file__, *side, *rest],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors[side], text=True,
            )  # fmt: skip
            stack.callback(running[side].wait)
            stack.callback(running[side].kill)
        watch = Timer(LIMIT_S, _kill, running.values())
        stack.callback(watch.cancel)
        watch.start()
        lines = {side: _line(p.stdout) for side, p in running.items()}
        for side, p in running.items():
            text = ""
            if lines[side] == "ready":
                assert p.stdin is not None
                p.stdin.write("go\n")
                p.stdin.flush()
                text = _line(p.stdout)
            if text:
                rows.append(json.loads(text))
            else:
                p.kill()
                errors[side].seek(0)
                late = time.monotonic() > end
                why = f"not done in {LIMIT_S:g} s" if late else errors[side].read()[-2000:]
                rows.append({"side": side[0], "dtype": side[1], "failed": why})
            print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    return rows


def _kill(*running: subprocess.Popen[str]) -> None:
    for p in running:
        p.kill()


def _line(stream: Any) -> str:
    """The next line of the protocol; lines printed by libraries are skipped."""
    for line in stream:
        if line.startswith(("ready", "{")):
            return str(line).strip()
    return ""


def main() -> None:
    ap = argparse.ArgumentParser(description=__doc__)
    ap.add_argument("side", nargs="?", choices=SIDES)
    ap.add_argument("dtype", nargs="?", choices=("f32", "bf16"))
    ap.add_argument("--steps", type=int, default=10)
    ap.add_argument("--sizes", default="{}", help='JSON, such as {"batch": 4}')
    ap.add_argument("--profile", type=int, default=0, help="how many kinds of kernels to name")
    ap.add_argument("--sides", default=",".join(SIDES))
    ap.add_argument("--dtypes", default="bf16,f32")
    ap.add_argument("--at-once", action="store_true", help="both dtypes compile at the same time")
    a = ap.parse_args()
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    if a.side:
        serve(a)
        return
    rest = ["--steps", str(a.steps), "--sizes", a.sizes, "--profile", str(a.profile)]
    # The cuDNN kernel supports narrow floats only.
    groups = [
        [(s, dtype) for s in a.sides.split(",") if s != "jax-cudnn" or dtype == "bf16"]
        for dtype in a.dtypes.split(",")
    ]
    if a.at_once:
        groups = [[side for group in groups for side in group]]
    print(json.dumps([row for group in groups for row in together(group, rest)]))


if __name__ == "__main__":
    main()
