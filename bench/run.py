"""`make bench`: all measurements, each in processes of its own, and bench/RESULTS.md from them.

`python bench/run.py --rounds 6` measures; `--out FILE` says where the tables go. PyTorch is
compared where it is installed (`pip install torch==2.13.0`). Give it a quiet machine.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import subprocess
import sys
from importlib import metadata, util
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent


def measure(script: str, *args: str, env: dict[str, str] | None = None) -> Any:
    """The JSON that a script of this folder prints."""
    command = [sys.executable, str(HERE / script), *args]
    print("measuring:", script, *args, env or "", flush=True)
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=1200, env={**os.environ, **(env or {})}
    )
    if done.returncode:
        sys.exit(f"{script} failed:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.strip().splitlines()[-1])


def processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()


def gemm() -> float:
    """GFLOP/s of f32 2048 x 2048 x 2048 under XLA."""
    code = (
        "import jax, time, jax.numpy as jnp\n"
        "a = jnp.ones((2048, 2048)); f = jax.jit(lambda a: a @ a); f(a).block_until_ready()\n"
        "t = []\n"
        "for _ in range(15):\n"
        "    b = time.perf_counter(); f(a).block_until_ready(); t.append(time.perf_counter() - b)\n"
        "print(2 * 2048**3 / min(t) / 1e9)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return float(done.stdout)


def step_rows(results: list[dict[str, Any]]) -> list[str]:
    rows = [
        "| mesh | heap kept | ours s | shard_map s | speed ratio | ours, peer temporaries MB |",
        "|---|---|---|---|---|---|",
    ]
    for r in results:
        memory = (
            f"{r['ours_memory']['temporaries_mb']:.0f}, {r['peer_memory']['temporaries_mb']:.0f}"
        )
        rows.append(
            f"| {r['mesh']} | {'yes' if r['heap'] == '1' else 'no'} | {r['ours_s']:.3f} "
            f"(min {r['ours_min_s']:.3f}) | {r['peer_s']:.3f} (min {r['peer_min_s']:.3f}) "
            f"| **{r['speed_ratio']:.2f}** | {memory} |"
        )
    return rows


def dispatch_rows(results: list[dict[str, Any]]) -> list[str]:
    rows = [
        "| leaves | devices | ours µs | jax.jit µs | more, µs | by minima |",
        "|---|---|---|---|---|---|",
    ]
    rows += [
        f"| {r['leaves']} | {r['devices']} | {r['ours_us']} | {r['jax_us']} | {r['more_us']} "
        f"| {r['more_by_minima_percent']:+.1f} % |"
        for r in results
    ]
    return rows


def main() -> None:
    ap = argparse.ArgumentParser(description=__doc__)
    ap.add_argument("--rounds", type=int, default=8)
    ap.add_argument("--out", default=str(HERE / "results.json"))
    a = ap.parse_args()
    rounds = ["--rounds", str(a.rounds)]
    steps = [measure("gpt_step.py", mesh, *rounds) for mesh in ("one", "dp=2", "tp=2")]
    steps.append(measure("gpt_step.py", "dp=2", *rounds, env={"TESSERA_HEAP": "0"}))
    found: dict[str, Any] = {
        "date": datetime.date.today().isoformat(),
        "processor": processor(),
        "cores": os.cpu_count(),
        "versions": {k: metadata.version(k) for k in ("jax", "numpy")},
        "python": platform.python_version(),
        "gemm_gflops": round(gemm(), 1),
        "steps": steps,
        "dispatch": measure("dispatch.py"),
        "startup": measure("startup.py"),
    }
    if util.find_spec("torch") is not None:
        found["torch"] = [measure("peers/torch_ddp.py", "--steps", "6") for _ in range(2)]
    Path(a.out).write_text(json.dumps(found, indent=1))
    print(*step_rows(steps), "", *dispatch_rows(found["dispatch"]), sep="\n")
    print(json.dumps(found["startup"]))
    for row in found.get("torch", []):
        best = min(s["ours_s"] for s in steps if s["mesh"] == "dp=2")
        print(
            f"torch DDP {row['step_s']:.3f} s a step; ours {best:.3f}: {row['step_s'] / best:.2f}"
        )


if __name__ == "__main__":
    main()
