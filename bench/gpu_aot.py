"""Training steps compiled for GPUs on a machine without one: the table of docs/gpus.md.

Run it: `PYTHONPATH=.venv-gpu JAX_PLATFORMS=cpu python bench/gpu_aot.py`, after
`make check-gpu-aot` has brought the compiler. Nothing is run: the figures are those of the compiled
text and of the compiler's memory analysis.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.gpu_aot.programs import CASES, made, planned

HEAD = (
    "step", "mesh", "collectives", "in the text", "may overlap", "overlap", "with a product",
    "peak, planned", "peak, XLA", "error", "temporaries, XLA",
)  # fmt: skip


def row(name: str, chip: str) -> tuple[object, ...]:
    case = made(name, chip)
    want = [planned(part.schedule).total() for part, _ in case.parts]
    may = [planned(part.schedule, overlapping=True).total() for part, _ in case.parts]
    found = [x for _, text in case.parts for x in text.collectives]
    does = [x for x in found if x.overlaps]
    mine, theirs = max(case.peaks, key=lambda peak: peak[1])
    worst = max((a / b - 1 for a, b in case.peaks), key=abs)
    return (
        name, f"`{CASES[name].mesh}`", sum(want), sum(x.times for x in found), sum(may),
        sum(x.times for x in does), sum(x.times for x in does if x.products),
        f"{mine / 2**20:,.0f}", f"{theirs / 2**20:,.0f}", f"{100 * worst:+.1f}%",
        f"{case.temporary / 2**20:,.0f}",
    )  # fmt: skip


def line(cells: Iterable[object]) -> str:
    return f"| {' | '.join(map(str, cells))} |"


def main() -> None:
    ap = argparse.ArgumentParser(description=__doc__)
    ap.add_argument("--chip", default="h200", choices=("h100", "h200"))
    a = ap.parse_args()
    print(line(HEAD))
    print(line(["---", "---", *["---:"] * (len(HEAD) - 2)]))
    for name in CASES:
        print(line(row(name, a.chip)), flush=True)


if __name__ == "__main__":
    main()
