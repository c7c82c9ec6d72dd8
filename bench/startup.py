"""Start-up time: import against NumPy's; tracing and compilation of some layers.

`python bench/startup.py imports` (or loop, or a number of layers) prints one line of JSON. Imports
are timed in their own processes, in turn, with compiled bytecode of both, as after an installation;
compilation in a process per side, since both keep caches.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent


LIMIT_S = 120.0  # for one process
MOST_BYTES = 16 << 30  # of one process: the compiler may take all memory for a long program


def run(code: str, env: dict[str, str] | None = None) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=LIMIT_S, check=True,
        env=env, preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (MOST_BYTES,) * 2),
    )  # fmt: skip
    return done.stdout.strip().splitlines()[-1] if done.stdout.strip() else ""


def imports(rounds: int = 7) -> dict[str, float]:
    times: dict[str, list[float]] = {"numpy": [], "tessera": []}
    env = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    with tempfile.TemporaryDirectory() as cache:
        for _ in range(rounds + 1):
            for name, kept in times.items():
                begin = time.perf_counter()
                code = f"import {name}, sys; assert 'jax' not in sys.modules"
                run(code, {**env, "PYTHONPYCACHEPREFIX": cache})
                kept.append(time.perf_counter() - begin)
    # The first import of each wrote the bytecode.
    return {f"import_{k}_s": round(statistics.median(v[1:]), 3) for k, v in times.items()}


FIRST_CALL = """
import sys, time; sys.path.insert(0, {here!r})
import gpt_step
from peers import jax_gpt
gpt_step.start(8)
run, _ = gpt_step.{side}(jax_gpt.GPTConfig(layers={layers}, batch={batch}, seq=64), {{}})
begin = time.perf_counter(); run(); first = time.perf_counter() - begin
begin = time.perf_counter(); run(); print(first - (time.perf_counter() - begin))
"""


def first_call(layers: int, rounds: int, batch: int = 4) -> dict[str, float]:
    """Returns the seconds of tracing and compilation, as the first call less a second one: of
    Tessera, of Tessera with the program cache of the first process, and of the peer (infinity if it
    runs out of memory)."""
    times: dict[str, list[float]] = {"ours": [], "again": [], "peer": []}
    for _ in range(rounds):
        with tempfile.TemporaryDirectory() as kept:
            for name, found in times.items():
                side = "peer" if name == "peer" else "ours"
                code = FIRST_CALL.format(here=str(HERE), side=side, layers=layers, batch=batch)
                cache = "off" if name == "peer" else kept
                try:
                    found.append(float(run(code, {**os.environ, "TESSERA_PROGRAM_CACHE": cache})))
                except subprocess.SubprocessError:
                    if side == "ours":
                        raise
                    found.append(math.inf)
    return {"layers": layers} | {k: round(statistics.median(v), 2) for k, v in times.items()}


COLD = {**os.environ, "TESSERA_PROGRAM_CACHE": "off"}
LAYERS = """
import sys, time; sys.path.insert(0, {here!r})
import gpt_step
from peers import jax_gpt
gpt_step.start(8)
run, _ = gpt_step.ours(jax_gpt.GPTConfig(layers=24, batch=4, seq=64), {{}}, loop={loop})
times = []
for _ in range(8):
    begin = time.perf_counter(); run(); times.append(time.perf_counter() - begin)
step = sorted(times[1:])[3]
print(times[0] - step, step)
"""


def layers() -> dict[str, list[float]]:
    """Returns (trace and compile s, step s) of 24 layers, unrolled and as a loop."""
    found = {}
    for name, loop in (("written_out", False), ("looped", True)):
        numbers = run(LAYERS.format(here=str(HERE), loop=loop), COLD).split()
        found[name] = [round(float(x), 3) for x in numbers]
    return found


def main() -> None:
    ap = argparse.ArgumentParser(description=__doc__)
    ap.add_argument("what", help="imports, loop, or a number of layers")
    what = ap.parse_args().what
    if what.isdigit():
        print(json.dumps(first_call(int(what), rounds=3 if int(what) < 10 else 1)))
    else:
        print(json.dumps(imports() if what == "imports" else layers()))


if __name__ == "__main__":
    main()
