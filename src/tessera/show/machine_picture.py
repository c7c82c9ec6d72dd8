"""Picture of a machine: its levels of links as a table, its devices with their wires.

>>> from tessera.core.machine.presets import preset
>>> print(machine_text(preset("t3000")))
t3000 · 8 × wormhole_b0 · 1 host
level  size  wired as  link                     GB/s each way    µs
y         2  line      2 x chip ethernet 100G              25   1.0
x         4  line      2 x chip ethernet 100G              25   1.0
<BLANKLINE>
 0 ═══ 1 ═══ 2 ═══ 3
 ║     ║     ║     ║
 4 ═══ 5 ═══ 6 ═══ 7
<BLANKLINE>
cards: 0 has 0, 1 · 1 has 4, 5 · 2 has 6, 7 · 3 has 2, 3
source: Programming Mesh of Devices with TT-NN, 2.1: 200 Gb/s a link, both
directions together; two links between neighbours
source: latency of 1 µs: an estimate
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from ..core.machine.machine import Machine
from ..core.topology import Level
from .mesh_picture import MAX_PANELS, MAX_ROWS, plain_text

# The sign between two neighbours of a level, along a row and down a column.
ALONG = {"line": "═══", "ring": "═══", "all": " · ", "pairs": " ╳ "}
DOWN = {"line": "║", "ring": "║", "all": " ", "pairs": "╳"}
WIRED = {"line": "line", "ring": "ring", "all": "switch", "pairs": "each pair"}
HOST, HOSTS = "┊", ("cyan", "magenta", "green", "yellow")


def render_machine(machine: Machine) -> RenderableType:
    """The picture of `machine`, for a rich console. Parts that do not fit are counted instead of
    drawn."""
    hosts = "1 host" if machine.host_count == 1 else f"{machine.host_count} hosts"
    parts: list[RenderableType] = [
        Text(f"{machine.name} · {machine.size} × {machine.device} · {hosts}", style="bold"),
        _levels(machine),
        Text(),
        *_grids(machine),
    ]
    said = [*_legend(machine), *(f"note: {n}" for n in machine.notes)]
    said += [f"source: {s}" for s in machine.sources]
    parts += [Text(), *(Text(line, style="dim") for line in said)] if said else []
    return Group(*parts)


def machine_text(machine: Machine, width: int = 80) -> str:
    """The picture as plain text, without colour or trailing blanks."""
    return plain_text(render_machine(machine), width)


def _levels(machine: Machine) -> Table:
    table = Table(box=None, header_style="cyan", pad_edge=False, padding=(0, 2, 0, 0))
    for name in ("level", "size", "wired as", "link", "GB/s each way", "µs"):
        table.add_column(
            name, justify="right" if name in ("size", "GB/s each way", "µs") else "left"
        )
    for axis, level in zip(machine.axes, machine.topology.levels):
        link = level.link
        table.add_row(
            axis,
            str(level.size),
            WIRED[level.wiring] + (", one a unit" if level.shared else ""),
            link.name,
            f"{link.bytes_per_s / 1e9:g}",
            f"{link.latency_s * 1e6:.1f}",
        )
    return table


def _legend(machine: Machine) -> list[str]:
    """The legend: meanings of the signs in use, cards, and express connections."""
    lines = []
    inner = machine.topology.levels[-2:]
    if any(v.wiring == "ring" and v.size > 1 for v in inner):
        lines.append("a wire that leaves on one side comes back on the other")
    if any(h > 1 for h in machine.hosts[-2:]):
        lines.append(f"{HOST} another host begins")
    if machine.cards:
        each = (f"{i} has {', '.join(map(str, c))}" for i, c in enumerate(machine.cards[:16]))
        lines.append(f"cards: {' · '.join(each)}")
    if machine.express:
        shown = ", ".join(f"{a}–{b}" for a, b in machine.express[:16])
        more = f" and {len(machine.express) - 16} more" if len(machine.express) > 16 else ""
        lines.append(f"express connections, which are not priced: {shown}{more}")
    return lines


def _grids(machine: Machine) -> list[RenderableType]:
    """The devices of the last two levels, for each place on the levels before."""
    outer = machine.shape[:-2]
    each = math.prod(machine.shape[-2:])
    parts: list[RenderableType] = []
    for place in itertools.islice(itertools.product(*map(range, outer)), MAX_PANELS):
        first = sum(p * math.prod(machine.shape[i + 1 :]) for i, p in enumerate(place))
        if outer:
            where = ", ".join(f"{axis} {p}" for axis, p in zip(machine.axes, place))
            parts.append(Text(where, style="cyan"))
        parts.append(Padding(_Grid(machine, first), (0, 0, 0, 2 if outer else 0)))
    rest = machine.size // each - min(math.prod(outer), MAX_PANELS)
    if rest:
        parts.append(Text(f"… and {rest} more like these", style="dim"))
    return parts


@dataclass(frozen=True, slots=True)
class _Grid:
    """The devices from `first` on, of the last two levels; as many columns as fit."""

    machine: Machine
    first: int

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield from self.lines(options.max_width)

    def lines(self, width: int) -> list[Text]:
        m = self.machine
        columns = m.topology.levels[-1]
        rows = m.topology.levels[-2] if len(m.shape) > 1 else Level(1, columns.link)
        wide = len(str(m.size - 1))
        step = wide + 2 + 3  # a device with blanks, and the sign after it
        fits = max(1, (width - 2 - len(f" +{columns.size}")) // step)
        shown = columns.size if columns.size <= max(fits, (width - 2) // step) else fits
        hidden = columns.size - shown
        down, made = DOWN[rows.wiring], []
        ring_x = columns.wiring == "ring" and columns.size > 1
        ring_y = rows.wiring == "ring" and rows.size > 1
        upright = _between(shown, wide, down, ring_x)
        if ring_y:
            made.append(Text(upright))
        shown_rows = min(rows.size, MAX_ROWS)
        for r in range(shown_rows):
            line = Text("═" if ring_x else "")
            for c in range(shown):
                device = self.first + r * columns.size + c
                host = m.host_of(device)
                if c:
                    other = m.host_of(device - 1) != host
                    sign = ALONG[columns.wiring]
                    line.append(f"{sign[0]}{HOST}{sign[2]}" if other else sign)
                line.append(f" {device:>{wide}} ", style=HOSTS[host % len(HOSTS)])
            line.append("═" if ring_x and not hidden else f" +{hidden}" if hidden else "")
            line.rstrip()
            made.append(line)
            if r + 1 < shown_rows:
                device_id = self.first + r * columns.size
                if m.host_of(device_id) != m.host_of(device_id + columns.size):
                    made.append(Text("┄" * (shown * step - 3), style="dim"))
                elif down.strip():
                    made.append(Text(upright))
        if rows.size > shown_rows:
            made.append(Text(f"… and {rows.size - shown_rows} more rows", style="dim"))
        elif ring_y:
            made.append(Text(upright))
        return made


def _between(count: int, wide: int, sign: str, ring_x: bool) -> str:
    """The wires between two rows."""
    one = f" {sign:>{wide}} "
    return (" " * ring_x + "   ".join([one] * count)).rstrip()
