"""Loss curves as PNG, with baselines as horizontal lines."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..core.checks import library
from ..core.errors import UsageError
from ..core.files import write_whole

WIDTH_IN, HEIGHT_IN, DPI = 8.0, 4.8, 120


@dataclass(frozen=True, slots=True)
class Series:
    """One curve: its name in the legend, steps and values; `marked` draws a dot at each point."""

    label: str
    steps: Sequence[float]
    values: Sequence[float]
    marked: bool = False


def save_loss_curve(
    path: str | Path,
    series: Sequence[Series],
    *,
    baselines: Mapping[str, float] | None = None,
    title: str = "",
    unit: str = "nats per token",
) -> Path:
    """Writes the PNG of `draw_loss_curve` atomically. Raises UsageError as that does, OSError if it
    cannot be written."""
    target = Path(path)
    write_whole(target, draw_loss_curve(series, baselines=baselines, title=title, unit=unit))
    return target


def draw_loss_curve(
    series: Sequence[Series],
    *,
    baselines: Mapping[str, float] | None = None,
    title: str = "",
    unit: str = "nats per token",
) -> bytes:
    """A PNG of `series` over steps, with each baseline as a horizontal line.

    Raises `UsageError` if there is nothing to draw or matplotlib is not installed.
    """
    if not any(len(one.steps) for one in series):
        raise UsageError(
            "save_loss_curve: no series has a point", fix="pass at least one step and its loss"
        )
    # The object API: no backend is chosen for the process, and no window can open.
    canvas = library("save_loss_curve", "matplotlib.backends.backend_agg", "demo").FigureCanvasAgg
    figure = library("save_loss_curve", "matplotlib.figure", "demo").Figure(
        figsize=(WIDTH_IN, HEIGHT_IN), dpi=DPI, layout="constrained"
    )
    canvas(figure)  # attaches itself; savefig then needs no backend
    axes = figure.add_subplot()
    for one in series:
        axes.plot(one.steps, one.values, "o-" if one.marked else "-", label=one.label, markersize=4)
    for i, (label, value) in enumerate((baselines or {}).items()):
        style = ("--", ":", "-.")[i % 3]
        axes.axhline(value, color="0.35", linestyle=style, label=f"{label} ({value:.3f})")
    axes.set_xlabel("step")
    axes.set_ylabel(f"loss, {unit}")
    axes.set_title(title)
    axes.grid(alpha=0.25)
    axes.legend()
    png = io.BytesIO()
    figure.savefig(png, format="png")
    return png.getvalue()
