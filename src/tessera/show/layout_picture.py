"""Who holds what? For each device of a mesh, the slice of a tensor that lies on it.

Devices that hold the same slice have the same colour, so replication is seen at a glance.

>>> mesh = Mesh(["dp", "tp"], devices=range(4))
>>> rows = {0: (0, 4), 1: (4, 8)}
>>> halves = {d: (rows[mesh.coords(d)["dp"]], (0, 6)) for d in mesh.device_ids}
>>> print(plain_text(who_holds_what((8, 6), halves, mesh)))
8 × 6 on dp × tp mesh, 2 × 2 · 2 different slices, each on 2 devices
┌──────┬────────────┬────────────┐
│      │    tp 0    │    tp 1    │
├──────┼────────────┼────────────┤
│ dp 0 │ 0: [:4, :] │ 1: [:4, :] │
├──────┼────────────┼────────────┤
│ dp 1 │ 2: [4:, :] │ 3: [4:, :] │
└──────┴────────────┴────────────┘
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from ..core.mesh import Mesh
from .mesh_picture import plain_text, render_grid

__all__ = ["plain_text", "slice_text", "who_holds_what"]

Slice = tuple[tuple[int, int], ...]
"""A (start, stop) for each dim."""

COLOURS = ("green", "yellow", "magenta", "blue", "red", "cyan", "bright_green", "bright_yellow")


def who_holds_what(
    shape: Sequence[int], per_device: Mapping[int, Slice], mesh: Mesh
) -> RenderableType:
    """The picture of a tensor of `shape` on `mesh`; devices without a slice hold nothing."""
    copies = Counter(per_device.values())
    colour = {part: COLOURS[i % len(COLOURS)] for i, part in enumerate(copies)}

    def cell(device: int) -> Text:
        part = per_device.get(device)
        if part is None:
            return Text(f"{device}: –", style="dim")
        return Text(f"{device}: {slice_text(shape, part)}", style=colour[part])

    size = " × ".join(map(str, shape)) or "a scalar"
    return Group(
        Text(f"{size} on {mesh.topology} · {_summary(copies)}", style="bold"),
        render_grid(mesh, cell),
    )


def slice_text(shape: Sequence[int], part: Slice) -> str:
    """A slice as NumPy would index it, with what reaches an edge left out.

    >>> slice_text((8, 6, 4), ((0, 8), (2, 4), (3, 4)))
    '[:, 2:4, 3:]'
    >>> slice_text((5,), ((5, 5),)), slice_text((), ())
    ('nothing', 'all')
    """
    if any(start >= stop for start, stop in part):
        return "nothing"
    dims = [
        f"{start or ''}:{stop if stop != size else ''}" for size, (start, stop) in zip(shape, part)
    ]
    return f"[{', '.join(dims)}]" if dims else "all"


def _summary(copies: Counter[Slice]) -> str:
    """How many slices there are, and on how many devices each is."""
    if not copies:
        return "no device holds any of it"
    counts = sorted(set(copies.values()))
    each = str(counts[0]) if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
    devices = "1 device" if each == "1" else f"{each} devices"
    if len(copies) == 1:
        return "one copy" if each == "1" else f"the same on {devices}"
    return f"{len(copies)} different slices, each on {devices}"
