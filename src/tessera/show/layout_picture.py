"""Picture of a layout: for each device of a mesh, its slice of a tensor.

Devices with the same slice have the same colour, so replication is visible at a glance.

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

import re
from collections import Counter
from collections.abc import Mapping, Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from ..core.mesh import Mesh
from .mesh_picture import plain_text, render_grid

__all__ = ["plain_text", "slice_text", "who_holds_what", "whole_picture"]

Run = tuple[int, int]
Slice = tuple[Run | tuple[Run, ...], ...]
"""For each dim a (start, stop), or several of them."""

PIECES = 3  # of a dim that a picture names

_DEVICE = re.compile(r"│ +(\d+): ")
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
    """A slice as a NumPy index, without bounds at the edges.

    >>> slice_text((8, 6, 4), ((0, 8), (2, 4), (3, 4)))
    '[:, 2:4, 3:]'
    >>> slice_text((5,), ((5, 5),)), slice_text((), ())
    ('nothing', 'all')
    >>> slice_text((12, 2), (((0, 2), (4, 6)), (0, 2)))
    '[:2+4:6, :]'
    """
    dims = []
    for size, given in zip(shape, part):
        spans = [(start, stop) for start, stop in _runs(given) if start < stop]
        if not spans:
            return "nothing"
        texts = [f"{start or ''}:{stop if stop != size else ''}" for start, stop in spans]
        if len(texts) > PIECES:
            texts[PIECES - 1 :] = [f"… {len(texts)} pieces"]
        dims.append("+".join(texts))
    return f"[{', '.join(dims)}]" if dims else "all"


def _runs(runs: Run | tuple[Run, ...]) -> list[Run]:
    return [(r, runs[1]) for r in runs[:1] if isinstance(r, int) and isinstance(runs[1], int)] or [
        r for r in runs if isinstance(r, tuple)
    ]


def whole_picture(
    shape: Sequence[int], per_device: Mapping[int, Slice], mesh: Mesh, width: int
) -> str:
    """The picture as text, or "" if `width` columns do not fit every device."""
    text = plain_text(who_holds_what(shape, per_device, mesh), width)
    shown = {int(found) for found in _DEVICE.findall(text)}
    return text if shown >= set(mesh.device_ids) else ""


def _summary(copies: Counter[Slice]) -> str:
    """The number of different slices, and of devices per slice, as text."""
    if not copies:
        return "no device holds any of it"
    counts = sorted(set(copies.values()))
    each = str(counts[0]) if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
    devices = "1 device" if each == "1" else f"{each} devices"
    if len(copies) == 1:
        return "one copy" if each == "1" else f"the same on {devices}"
    return f"{len(copies)} different slices, each on {devices}"
