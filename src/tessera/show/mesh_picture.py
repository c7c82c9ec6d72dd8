"""Picture of a mesh: a grid of device ids, with rows and columns named by axis and index.

One axis is a row of boxes, two are a grid; with more there is a grid for each place on the axes
before the last two.

>>> print(mesh_text(Mesh(["dp", "tp"], devices=range(4))))
dp × tp mesh, 2 × 2 · 4 devices
┌──────┬──────┬──────┐
│      │ tp 0 │ tp 1 │
├──────┼──────┼──────┤
│ dp 0 │  0   │  1   │
├──────┼──────┼──────┤
│ dp 1 │  2   │  3   │
└──────┴──────┴──────┘
"""

from __future__ import annotations

import io
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass

from rich import box
from rich.columns import Columns
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.measure import Measurement
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from ..core.mesh import Mesh

CellText = Callable[[int], Text]
"""A function that gives the text in the box of a device id."""

MAX_ROWS = 16
MAX_PANELS, MAX_PANEL_ROWS = 8, 6


def render_mesh(mesh: Mesh) -> RenderableType:
    """The picture of `mesh`, for a rich console. Parts that do not fit are counted instead of
    drawn."""
    count = "1 device" if mesh.size == 1 else f"{mesh.size} devices"
    head = Text(f"{mesh.topology} · {count}", style="bold")
    links = [Text(f"on {mesh.links}", style="dim")] if mesh.links is not None else []
    return Group(head, *links, render_grid(mesh, lambda device: Text(str(device))))


def render_grid(mesh: Mesh, cell: CellText) -> RenderableType:
    """The boxes of `mesh` with `cell(device_id)` in each, for all mesh pictures."""
    if len(mesh.axes) <= 2:
        return _Grid(mesh, cell, MAX_ROWS)
    outer = mesh.axes[:-2]
    places = itertools.product(*(range(mesh.sizes[axis]) for axis in outer))
    panels: list[RenderableType] = []
    for place in itertools.islice(places, MAX_PANELS):
        where = dict(zip(outer, place))
        title = ", ".join(f"{axis} {i}" for axis, i in where.items())
        grid = _Grid(mesh.slice(**where), cell, MAX_PANEL_ROWS)
        panels.append(Panel(grid, title=title, title_align="left", expand=False))
    rest = math.prod(mesh.sizes[axis] for axis in outer) - len(panels)
    more = [Text(f"… and {rest} more like these", style="dim")] if rest else []
    return Group(Columns(panels), *more)


def mesh_text(mesh: Mesh, width: int = 80) -> str:
    """The picture as plain text, without colour or trailing blanks."""
    return plain_text(render_mesh(mesh), width)


def show(mesh: Mesh) -> None:
    """Prints the picture of `mesh` to the terminal."""
    Console().print(render_mesh(mesh))


def plain_text(picture: RenderableType, width: int = 80) -> str:
    """Any rich picture as plain text of at most `width` columns."""
    console = Console(
        file=io.StringIO(), width=width, color_system=None, legacy_windows=False,
        force_jupyter=False,  # a notebook's console would display captured text too
    )  # fmt: skip
    with console.capture() as capture:
        console.print(picture)
    return "\n".join(line.rstrip() for line in capture.get().splitlines())


@dataclass(frozen=True, slots=True)
class _Grid:
    """A mesh of one or two axes, with as many columns as fit the console."""

    mesh: Mesh
    cell: CellText
    max_rows: int

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield self._table(options.max_width)

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return self._table(options.max_width).__rich_measure__(console, options)

    def _table(self, width: int) -> Table:
        """The last two axes as rows and columns, as many as fit `width`; the rest is counted."""
        mesh, column_axis = self.mesh, self.mesh.axes[-1]
        rows, columns = (1, *mesh.shape)[-2:]
        row_label = "" if len(mesh.axes) == 1 else f"{mesh.axes[0]} {rows - 1}"
        shown_rows = min(rows, self.max_rows)
        cells = [
            [self.cell(device) for device in mesh.ids[r * columns : (r + 1) * columns]]
            for r in range(shown_rows)
        ]
        # A column takes two blanks and a border; the last one may show the number of missing
        # columns.
        widest = max(
            len(f"{column_axis} {columns - 1}"), *(c.cell_len for line in cells for c in line)
        )
        room = width - 1 - (len(row_label) + 3 if row_label else 0)
        fitting = max(1, room // (widest + 3))
        if fitting < columns:
            fitting = max(1, (room - len(f"+{columns}") - 3) // (widest + 3))
        shown = min(columns, fitting)
        table = Table(box=box.SQUARE, show_lines=True, show_header=True, header_style="cyan")
        if row_label:
            table.add_column("", style="cyan", no_wrap=True)
        for c in range(shown):
            table.add_column(f"{column_axis} {c}", justify="center", no_wrap=True)
        hidden = columns - shown
        if hidden:
            table.add_column("…", style="dim", no_wrap=True)
        for r, line in enumerate(cells):
            label = [f"{mesh.axes[0]} {r}"] if row_label else []
            table.add_row(*label, *line[:shown], *([f"+{hidden}"] if hidden else []))
        if rows > shown_rows:
            table.caption = f"… and {rows - shown_rows} more rows"
            table.caption_justify = "left"
        return table
