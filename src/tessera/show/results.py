"""Results of a run as tables: losses beside their baselines, and files.

>>> from tessera.show.mesh_picture import plain_text
>>> nats, bits = {"bigram": 3.5, "model": 2.75}, {"bigram": 2.0, "model": 1.571}
>>> print(plain_text(render_losses(nats, bits)))
validation   nats per token   bits per byte
───────────────────────────────────────────
bigram                3.500           2.000
model                 2.750           1.571
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ..ir.graph.text import size_text


def render_losses(nats: Mapping[str, float], bits: Mapping[str, float]) -> RenderableType:
    """A row per model: its validation loss in nats per token and in bits per byte."""
    table = _table("validation")
    table.add_column("nats per token", justify="right")
    table.add_column("bits per byte", justify="right")
    for name, loss in nats.items():
        table.add_row(name, f"{loss:.3f}", f"{bits[name]:.3f}")
    return table


def render_files(folder: Path, files: Sequence[tuple[str, str, int]]) -> RenderableType:
    """The files of a run's folder: name, description, size."""
    table = _table("file")
    table.add_column("holds")
    table.add_column("size", justify="right")
    for name, what, size in files:
        table.add_row(name, what, size_text(size))
    return Group(Text(f"results in {folder}", style="bold"), table)


def _table(first: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    table.add_column(first, no_wrap=True)
    return table
