"""`make bench`: all measurements, each in its own processes, and bench/RESULTS.md from them.

`python bench/run.py` measures everything; `--only price,stepped` measures these sections and keeps
the page's others, and all measurements of other kinds of processors. PyTorch is compared if it is
installed (`pip install torch==2.13.0`). Use an idle machine.
"""

from __future__ import annotations

import argparse
import datetime
import os
import platform
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from page import merged, prose
from processor import kind
from scripts import Failed
from sections import SECTIONS

HERE = Path(__file__).resolve().parent
PROCESSORS = "On what it was measured"
HEAD = [
    *prose(
        """`make bench` writes this page (`ARGS='--only price'` one section of it), but for the
        summary, which is `bench/summary.md`. Figures are medians of steps taken in turn (minima in
        brackets); only the ratios mean anything on another machine, and they differ between kinds
        of processor, as products do: each question has a part for each kind, and the last section
        describes them. Nothing overlaps inside one program on a CPU, so what the schedules say of
        overlap is shown here as structure only, never as time."""
    ),
    *(HERE / "summary.md").read_text().splitlines(),
]


def gemm(dtype: str) -> float:
    """GFLOP/s of 2048 x 2048 x 2048 under XLA, with a result in f32."""
    code = (
        "import jax, time, jax.numpy as jnp\n"
        f"a = jnp.ones((2048, 2048), '{dtype}')\n"
        "f = jax.jit(lambda a: jnp.matmul(a, a, preferred_element_type='float32'))\n"
        "f(a).block_until_ready()\n"
        "t = []\n"
        "for _ in range(15):\n"
        "    b = time.perf_counter(); f(a).block_until_ready(); t.append(time.perf_counter() - b)\n"
        "print(2 * 2048**3 / min(t) / 1e9)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120
    )
    return float(done.stdout)


def machine() -> list[str]:
    """The page's description of this machine."""
    versions = ", ".join(f"{k} {metadata.version(k)}" for k in ("jax", "numpy"))
    return prose(
        f"""{os.cpu_count()} cores, Python {platform.python_version()}, {versions}; matrix products
        of 2048 reach {gemm("float32"):.0f} GFLOP/s in f32 and {gemm("bfloat16"):.0f} of bf16 under
        XLA."""
    )


def measured(name: str, rounds: int) -> list[str]:
    """The lines of one section, with its duration and the machine's load."""
    begin, load = time.perf_counter(), os.getloadavg()[0]
    lines = SECTIONS[name].measure(rounds)
    took_s = time.perf_counter() - begin
    print(f"{name}: {took_s:.0f} s", flush=True)
    when = datetime.date.today().isoformat()
    cores = os.cpu_count() or 1
    busy = "" if load < 1.5 * cores else " **The machine was busy: do not trust the times.**"
    return [*lines, *prose(f"({when}, {took_s:.0f} s, load {load:.1f} at the start.{busy})")]


def main() -> None:
    ap = argparse.ArgumentParser(description=__doc__)
    ap.add_argument("--only", default="", help=f"of {', '.join(SECTIONS)}")
    ap.add_argument("--rounds", type=int, default=5)
    ap.add_argument("--out", type=Path, default=HERE / "RESULTS.md")
    a = ap.parse_args()
    chosen = a.only.split(",") if a.only else [n for n, s in SECTIONS.items() if s.on()]
    if unknown := set(chosen) - set(SECTIONS):
        ap.error(f"no section {', '.join(unknown)}; there are {', '.join(SECTIONS)}")
    order = [*(s.title for s in SECTIONS.values()), PROCESSORS]
    failed: list[str] = []

    def keep(title: str, lines: list[str], on: str) -> None:
        old = a.out.read_text() if a.out.exists() else ""
        a.out.write_text(merged(old, HEAD, {title: lines}, order, on))

    keep(PROCESSORS, machine(), kind())
    for name in chosen:
        section = SECTIONS[name]
        try:
            keep(section.title, measured(name, a.rounds), section.on())
        except Failed as why:
            print(f"{name}: {why}", file=sys.stderr, flush=True)
            failed.append(name)
    print(a.out.read_text())
    if failed:
        sys.exit(f"not measured: {', '.join(failed)}")


if __name__ == "__main__":
    main()
