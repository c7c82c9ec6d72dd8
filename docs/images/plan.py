"""Draws the README's pictures of a plan, from reports of training steps: nothing is compiled.

.venv/bin/python docs/images/plan.py    # writes timeline.svg and memory.svg beside this file
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

import tessera as ts
from tessera import dist, nn, optim
from tessera.plan import Report

HERE = Path(__file__).resolve().parent
GB = 1e9
LEAST = 0.003  # of the largest peak: smaller categories are left out
LANES = {"compute": "computation", "gpu": "NVLink (tp)", "node": "InfiniBand (dp)"}
COLOURS = ("#4a5aa8", "#d98032", "#3f9c78", "#8c6bb1", "#b8bfd9", "#c75b6d", "#8a8f98")
STRATEGIES = {  # the stage of ZeRO, and whether layers are recomputed
    "data parallel": (0, False),
    "ZeRO-1": (1, False),
    "ZeRO-3": (3, False),
    "ZeRO-3, recomputed": (3, True),
}


def zero(stage: int) -> Any:
    """Returns the strategy of a stage of ZeRO; stage 0 is data parallelism."""
    if stage == 0:
        return dist.strategy("data_parallel")
    return dist.strategy("zero_redundancy_optimizer", stage=stage)


def step_report(
    axes: Mapping[str, int], strategy: Any, *, rows: int, cluster: str, **config: Any
) -> Report:
    """Returns the report of a training step of a GPT in bf16 with AdamW, `rows` sequences of 4,096
    tokens."""
    mesh = dist.Mesh(tuple(axes), shape=dict(axes))
    sizes = nn.GPTConfig(
        **{"vocab": 32000, "seq": 4096, "d": 4096, "heads": 32, "norm": "rms",
           "positions": "rotary", **config}
    )  # fmt: skip
    model = dist.place(nn.GPT(sizes).to(ts.bf16), strategy, mesh)
    optimizer = optim.AdamW(3e-4)
    state = optimizer.init(model.parameters(), strategy)

    @ts.jit(donate=("model", "state"))
    def step(model: Any, state: Any, ids: Any) -> Any:
        loss, weights = model.loss(ids, ids), model.parameters()
        grads = ts.grad(loss, weights, layout=strategy)
        weights, new = optimizer.update(weights, grads, state)
        model.load_parameters(weights)
        state.update(new)
        return loss

    layout = f"[{rows}@dp, {sizes.seq}]"
    ids = dist.tensor((rows, sizes.seq), dtype=ts.int32, mesh=mesh, layout=layout)
    return ts.plan.report(step, model, state, ids, cluster=cluster)


def draw_timeline(report: Report) -> Figure:
    """Draws the simulated events of one device: a lane for its computation, and one for each level
    of links."""
    figure = Figure(figsize=(9, 2.6), layout="constrained")
    axes = figure.add_subplot()
    names = [n for n in LANES if any(n in e.streams for e in report.timeline.events)]
    for lane, name in enumerate(names):
        bars = [
            (1e3 * e.start_s, 1e3 * e.time_s) for e in report.timeline.events if name in e.streams
        ]
        axes.broken_barh(
            bars, (lane - 0.38, 0.76), facecolor=COLOURS[lane], edgecolor="white", linewidth=0.3
        )
    axes.set_yticks(range(len(names)), [LANES[n] for n in names])
    axes.invert_yaxis()
    axes.set_xlim(0, 1e3 * report.step_s)
    axes.set_xlabel("simulated ms of one step, on one device")
    axes.set_title(
        f"{report.machine}, mesh {report.mesh}: {1e3 * report.step_s:.0f} ms a step, "
        f"MFU {report.mfu:.0%}",
        fontsize=10,
    )
    return figure


def draw_memory(reports: Mapping[str, Report]) -> Figure:
    """Draws the planned peak of a device by category, a bar for each report, and the chip's
    memory."""
    figure = Figure(figsize=(9, 3), layout="constrained")
    axes = figure.add_subplot()
    plans = [r.memory[0] for r in reports.values()]
    largest = max(p.peak for p in plans)
    kinds = [k for k in plans[0].rows if max(p.rows[k] for p in plans) > LEAST * largest]
    left = [0.0] * len(plans)
    for kind, colour in zip(kinds, COLOURS, strict=False):
        sizes = [p.rows[kind] / GB for p in plans]
        axes.barh(range(len(plans)), sizes, left=left, label=kind, color=colour)
        left = [a + b for a, b in zip(left, sizes, strict=True)]
    for i, (end, p) in enumerate(zip(left, plans, strict=True)):
        axes.text(end, i, f" {p.peak / GB:.0f}", va="center")
    axes.axvline(plans[0].limit / GB, color="0.25", linestyle="--", label="limit of the chip")
    axes.set_yticks(range(len(plans)), list(reports))
    axes.invert_yaxis()
    axes.set_xlim(0, 1.08 * max(left))
    axes.set_xlabel("planned GB at the peak of a step, on one device")
    axes.legend(fontsize=8)
    return figure


def save(figure: Figure, path: Path) -> None:
    """Writes an SVG whose bytes depend on the figure alone."""
    with matplotlib.rc_context({"svg.hashsalt": path.name, "svg.fonttype": "none"}):
        FigureCanvasSVG(figure).print_svg(path, metadata={"Date": None})


def main(folder: Path) -> None:
    tensor_parallel = zero(3) + dist.strategy("tensor_parallel")
    save(
        draw_timeline(
            step_report(
                {"dp": 128, "tp": 8}, tensor_parallel, rows=512, cluster="h100x1024", layers=4,
                remat=True, stacked=False,
            )
        ),
        folder / "timeline.svg",
    )  # fmt: skip
    reports = {
        label: step_report(
            {"dp": 64}, zero(stage), rows=64, cluster="h100x64", layers=32, remat=remat
        )
        for label, (stage, remat) in STRATEGIES.items()
    }
    figure = draw_memory(reports)
    figure.axes[0].set_title("a GPT of 7 billion weights on 64 H100, mesh dp=64", fontsize=10)
    save(figure, folder / "memory.svg")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else HERE)
