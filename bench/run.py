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
import textwrap
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


def loader_rows(r: dict[str, Any]) -> list[str]:
    rows = ["| loader | million tokens/s | times what the step takes |", "|---|---|---|"]
    rows += [
        f"| {name} | {speed / 1e6:.1f} | **{r['ratio'][name]:.0f}** |"
        for name, speed in r["loader_tokens_per_s"].items()
    ]
    return rows


def moe_rows(r: dict[str, Any]) -> list[str]:
    rows = [
        "| room | payload | MB sent a device | ours ms | plain ms | ratio | whole layer ms |",
        "|---|---|---|---|---|---|---|",
    ]
    rows += [
        f"| {x['room']} | {x['payload']} | {x['sent_mb']:.1f} | {x['ours_ms']:.1f} "
        f"| {x['plain_ms']:.1f} | **{x['ratio']:.2f}** | {x['layer_ms']:.1f} |"
        for x in r["rows"]
    ]
    return rows


def pipeline_text(found: dict[str, Any]) -> str:
    r, peers = found["pipeline"], found.get("torch_pipeline", [])
    text = f"""`bench/pipeline.py`: {r["layers"]} MLP blocks of width {r["width"]},
        {r["rows"]} rows in {r["microbatches"]} microbatches, on {r["ranks"]} stages by
        {r["schedule"]}:
        {r["pipeline_s"]:.3f} s a step (min {r["pipeline_min_s"]:.3f}). One device takes
        {r["one_device_s"]:.3f} s on {r["one_device_cores"]:.1f} cores, so the bubble limit is
        {r["limit_s"]:.3f} s, of whose speed this is **{r["limit_ratio"]:.2f}**. With tensors that
        take no time a step of the schedule costs {found["pipeline_small"]["a_step_us"]:.0f} µs
        ({found["pipeline_small"]["steps"]} steps)."""
    if peers:
        best = min(p["step_s"] for p in peers)
        text += f""" `torch.distributed.pipelining` over gloo, two processes of one thread each
        (`bench/peers/torch_pipeline.py`): {best:.3f} s; ours has **{best / r["pipeline_s"]:.2f}**
        of its speed."""
    return text


def prose(text: str) -> list[str]:
    return [*textwrap.wrap(" ".join(text.split()), 98), ""]


def report(found: dict[str, Any]) -> str:
    """The page: what was measured, on what, and how to do it again."""
    steps, startup, loader = found["steps"], found["startup"], found["loader"]
    moe = found["moe"]
    compile_ours, compile_peer = (startup[f"{k}_trace_and_compile_s"] for k in ("ours", "peer"))
    versions = ", ".join(f"{k} {v}" for k, v in found["versions"].items())
    worst = max(r["largest_loss_difference"] for r in steps)
    lines = [
        "# What was measured",
        "",
        *prose(
            """`make bench` writes this page (`ARGS='--rounds 8'`). Figures are medians of steps
            taken in turn in one process (minima in brackets); only the ratios mean anything on
            another machine."""
        ),
        *prose(
            f"""{found["date"]}, {found["processor"]}, {found["cores"]} cores, Python
            {found["python"]}, {versions}; f32 matrix products of 2048 reach
            {found["gemm_gflops"]} GFLOP/s under XLA."""
        ),
        "## A training step against hand-written JAX",
        "",
        *prose(
            f"""The same GPT (d=256, 4 layers, 8 heads, vocabulary 4096, 16 x 256 tokens, f32,
            AdamW) on the same weights and tokens: `nn.GPT` against `bench/peers/jax_gpt.py`, plain
            `jnp` in `shard_map`. Losses differ by at most {worst:.1e}. Where the heap is kept, both
            have the benefit (`TESSERA_HEAP`, runtime/heap.py)."""
        ),
        *step_rows(steps),
        "",
        *prose(
            """Temporaries are XLA's memory analysis of one device. Ours come out lower because loss
            and head, MLP and attention run in blocks whose insides are not kept."""
        ),
    ]
    if found.get("torch"):
        best = min(r["ours_s"] for r in steps if r["mesh"] == "dp=2" and r["heap"] == "1")
        times = sorted(r["step_s"] for r in found["torch"])
        lines += [
            "## Against PyTorch DDP",
            "",
            *prose(
                f"""Two processes of one thread over gloo, fused attention and AdamW
                (`bench/peers/torch_ddp.py`): {times[0]:.3f} to {times[-1]:.3f} s a step; ours at
                dp=2 {best:.3f} s, which is **{times[0] / best:.2f}** of its speed."""
            ),
        ]
    lines += [
        "## What a call costs",
        "",
        "A compiled function that adds one to each of its leaves, against `jax.jit` of the same.",
        "",
        *dispatch_rows(found["dispatch"]),
        "",
        "## How long until a program runs",
        "",
        *prose(
            f"""`import tessera` takes {startup["import_tessera_s"]:.2f} s, `import numpy`
            {startup["import_numpy_s"]:.2f} s; jax is not imported. Trace and compile of 24 layers
            on one device, 4 x 64 tokens: {compile_ours:.1f} s, the hand-written step
            {compile_peer:.1f} s: **{compile_ours / compile_peer:.2f}** of its time."""
        ),
        *prose(
            f"""Our 24 layers written out take {startup["written_out"][0]:.1f} s to trace and
            compile and {startup["written_out"][1]:.3f} s a step; as a loop
            {startup["looped"][0]:.1f} s and {startup["looped"][1]:.3f} s a step.
            `cost/loops.py` chooses by these."""
        ),
        "## What a loader gives out",
        "",
        *prose(
            f"""`bench/loader.py`: batches of {" x ".join(map(str, loader["batch"]))} tokens,
            shuffled, from a mapped file of {loader["tokens"] // 10**6} million, against one step
            of the demo's GPT on one device: {loader["step_s"]:.3f} s alone,
            {loader["fed_step_s"]:.3f} s when it also takes each batch from the loader."""
        ),
        *loader_rows(loader),
        "",
        "## Experts: dispatch and combine",
        "",
        *prose(
            f"""`bench/moe.py`: {moe["tokens"]} tokens of {moe["d"]} channels to {moe["k"]} of
            {moe["experts"]} experts (hidden {moe["hidden"]}) on {moe["devices"]} devices, forward.
            "Ours" is router, tables, picking rows, both exchanges and the weighted sum, with
            experts that give back what they get; "plain" is an all-to-all of the same bytes there
            and back and nothing else. Dropless rooms are sized for the worst case, so most of what
            it sends and multiplies is empty where the load is even."""
        ),
        *moe_rows(moe),
        "",
        "## A pipelined step",
        "",
        *prose(pipeline_text(found)),
    ]
    return "\n".join(lines).rstrip() + "\n"


def main() -> None:
    ap = argparse.ArgumentParser(description=__doc__)
    ap.add_argument("--rounds", type=int, default=8)
    ap.add_argument("--out", default=str(HERE / "RESULTS.md"))
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
        "loader": measure("loader.py"),
        "moe": measure("moe.py"),
        "pipeline": measure("pipeline.py"),
        "pipeline_small": measure("pipeline.py", "--small"),
    }
    if util.find_spec("torch") is not None:
        found["torch"] = [measure("peers/torch_ddp.py", "--steps", "6") for _ in range(2)]
        found["torch_pipeline"] = [measure("peers/torch_pipeline.py") for _ in range(2)]
    text = report(found)
    Path(a.out).write_text(text)
    print(text)


if __name__ == "__main__":
    main()
