"""`make soak`: long runs, each in its own process, with one line per check.

`python bench/soak` runs all of them, half an hour at most; `python bench/soak queued shapes` these.
A run is a file beside this one that prints its lines and exits with 0 if all of its checks pass; a
run over its time limit fails too.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
LIMITS_S = {
    "queued": 480,  # steps without reads
    "interrupts": 700,  # signals at random times
    "shapes": 300,  # one function, hundreds of shapes
    "growth": 120,  # layers, axes
    "eager": 200,  # eager steps
}
"""The runs, each with the seconds that it may take."""
assert sum(LIMITS_S.values()) <= 1800


def processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return "an unknown processor"


def run(name: str) -> str:
    """Runs one file. Returns its failure, or ""."""
    try:
        done = subprocess.run([sys.executable, HERE / f"{name}.py"], timeout=LIMITS_S[name])
    except subprocess.TimeoutExpired:
        return f"took longer than {LIMITS_S[name]} s"
    return f"ended with {done.returncode}" if done.returncode else ""


def main(names: list[str]) -> int:
    print(f"{processor()}, {os.cpu_count()} cores", flush=True)
    wrong = 0
    for name in names or LIMITS_S:
        begin = time.perf_counter()
        found = run(name)
        wrong += bool(found)
        print(f"{name}: {found or 'holds'} ({time.perf_counter() - begin:.0f} s)", flush=True)
    return wrong


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
