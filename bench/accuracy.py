"""Published training runs against predicted ones: the tables of docs/accuracy.md.

`python bench/accuracy.py` predicts every row of the tables in tests/data/accuracy and writes the
page's tables; `--show` only prints the summary. Each row has its error beside that of the null
model, which knows one MFU: the mean of the table that the A100's constant was fitted on.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import time
import warnings
from dataclasses import dataclass
from pathlib import Path

from scipy.stats import spearmanr

from tessera.plan.predict import Prediction, machine_for, predict
from tessera.plan.rows import Row, read_rows

ROOT = Path(__file__).parents[1]
DATA, PAGE = ROOT / "tests" / "data" / "accuracy", ROOT / "docs" / "accuracy.md"
FITTED = ("sc21_table1", "llama3")
TABLES = {
    "sc21_table1": "Megatron-LM, SC21, table 1 (fitted)",
    "llama3": "Llama 3 405B, 8K tokens, H100 (fitted)",
    "sc21_table2": "Megatron-LM, SC21, table 2",
    "korthikanti": "Megatron-LM, Korthikanti 2022",
    "megascale": "Megatron-LM in MegaScale's table 2",
    "torchtitan": "torchtitan, Llama 2 and 3",
    "llm_foundry_a100": "llm-foundry, MPT on A100",
    "llm_foundry_a100_40gb": "llm-foundry, MPT on A100 40GB",
    "llm_foundry_h100": "llm-foundry, MPT on H100",
}
BEGIN, END = "<!-- table: bench/accuracy.py -->", "<!-- end of table -->"


@dataclass(frozen=True)
class Compared:
    """A row with its measured seconds, its prediction, and the seconds that this took."""

    row: Row
    measured_s: float
    found: Prediction
    took_s: float

    @property
    def error(self) -> float:
        """The relative error of the predicted throughput."""
        return self.measured_s / self.found.step_s - 1

    def mfu(self, step_s: float) -> float:
        """The part of the chips' peak at which a step of `step_s` runs the model's operations."""
        chip = machine_for(self.row).chip
        assert chip is not None
        peak = chip.rate(self.row.dtype).peak_flops_per_s
        return self.row.model_flops / step_s / self.row.chips / peak


def measured_s(r: Row) -> float:
    """The measured seconds of a step, from the column that the table has."""
    g = r.given
    if g.get("measured_step_s"):
        return float(g["measured_step_s"])
    if g.get("measured_tokens_per_s"):
        return r.global_batch * r.seq / r.chips / float(g["measured_tokens_per_s"])
    flops = r.hardware_flops if r.flops == "hardware" else r.model_flops
    return flops / r.chips / (float(g["measured_tflops"]) * 1e12)


def compared(name: str) -> list[Compared]:
    """The rows of a table with their predictions."""
    out = []
    for r in read_rows((DATA / f"{name}.csv").read_text()):
        begin = time.perf_counter()
        found = predict(r)
        out.append(Compared(r, measured_s(r), found, time.perf_counter() - begin))
    return out


def summary(name: str, rows: list[Compared], null_mfu: float) -> str:
    """A line of the summary."""
    sizes = [abs(c.error) for c in rows]
    real = [c.mfu(c.measured_s) for c in rows]
    mean = statistics.geometric_mean(real)
    null = statistics.mean(abs(null_mfu / x - 1) for x in real)
    own = statistics.mean(abs(mean / x - 1) for x in real)
    ranks = spearmanr([c.found.mfu for c in rows], real).statistic
    times = spearmanr([c.found.step_s for c in rows], [c.measured_s for c in rows]).statistic
    inside = sum(x <= 0.1 for x in sizes) / len(sizes)
    bias = math.exp(statistics.mean(math.log1p(c.error) for c in rows)) - 1
    return (
        f"| {name} | {len(rows)} | {statistics.mean(sizes):.1%} |"
        f" {statistics.median(sizes):.1%} | {inside:.0%} | {max(sizes):.1%} |"
        f" {bias:+.1%} | {times:.2f} | {ranks:.2f} | {null:.1%} | {own:.1%} |"
    )


def page(tables: dict[str, list[Compared]]) -> str:
    """The tables of the page."""
    null_mfu = statistics.mean(c.mfu(c.measured_s) for c in tables[FITTED[0]])
    judged = [c for name, rows in tables.items() if name not in FITTED for c in rows]
    lines = [
        "| table | rows | mean error | median | within 10 % | worst | bias | ranks of steps |"
        " ranks of MFU | null model | own mean |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
        *(summary(TABLES[name], rows, null_mfu) for name, rows in tables.items()),
        summary("**all that are not fitted**", judged, null_mfu),
    ]
    for name, rows in tables.items():
        lines += [
            "",
            f"### {TABLES[name]}",
            "",
            "| run | measured, s | predicted, s | error | null model | MFU | memory, GiB |",
            "|---|---:|---:|---:|---:|---:|---:|",
        ]
        for c in rows:
            null = null_mfu / c.mfu(c.measured_s) - 1
            lines.append(
                f"| {c.row.given['source']} | {c.measured_s:.4g} | {c.found.step_s:.4g} |"
                f" {c.error:+.1%} | {null:+.1%} | {c.found.mfu:.1%} | {c.found.memory_gib:.0f} |"
            )
    return "\n".join(lines)


def main() -> None:
    ap = argparse.ArgumentParser(description=__doc__)
    ap.add_argument("--show", action="store_true", help="print the tables; the page stays")
    a = ap.parse_args()
    warnings.simplefilter("ignore")
    os.chdir(ROOT)  # a table names a machine's file
    tables = {name: compared(name) for name in TABLES}
    made = page(tables)
    took = [c.took_s for rows in tables.values() for c in rows]
    if not a.show:
        text = PAGE.read_text()
        head, tail = text.split(BEGIN)[0], text.split(END)[1]
        PAGE.write_text(f"{head}{BEGIN}\n\n{made}\n\n{END}{tail}")
    print(made[: made.index("\n\n")])
    print(f"{statistics.mean(took):.2f} s a row, at most {max(took):.2f}")


if __name__ == "__main__":
    main()
