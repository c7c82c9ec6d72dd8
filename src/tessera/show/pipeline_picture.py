"""Picture of a pipeline: a row for each rank, a column for each unit of time.

F is a forward, B a whole backward, I and W its two halves; the number is the microbatch. If ranks
have several stages, a letter names the stage: a for the first of the rank. A dot is an idle unit.

>>> from tessera.ir.schedule.pipelines.orders import pipeline_table
>>> print(pipeline_text(simulate(pipeline_table("1F1B", ranks=2, microbatches=3))))
1F1B · 2 ranks, 2 stages, 3 microbatches · 12 units · idle 25 % · holds at most 2
rank 0 │ F0 F1 .  .  B0 ─  F2 B1 ─  .  B2 ─
rank 1 │ .  F0 B0 ─  F1 B1 ─  F2 B2 ─  .  .
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING

from ..ir.schedule.pipelines.simulate import Timeline, simulate
from ..ir.schedule.pipelines.tables import Action, Table

if TYPE_CHECKING:  # slow to import, and rarely needed
    from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
    from rich.text import Text

MAX_ROWS, MAX_BANDS = 32, 6

# Per kind, the colours of a rank's first and second chunk, which then repeat.
COLOURS: dict[str, tuple[str, str]] = {
    "F": ("blue", "bright_blue"),
    "B": ("green", "bright_green"),
    "I": ("cyan", "bright_cyan"),
    "W": ("yellow", "bright_yellow"),
}
FILLS: dict[str, tuple[str, str]] = {
    "F": ("#4c78c8", "#9dbcf0"),
    "B": ("#3f9b5f", "#97d4aa"),
    "I": ("#2f9e9e", "#93d8d8"),
    "W": ("#d9a22e", "#f2d48a"),
}
MEANING = {"F": "forward", "B": "backward", "I": "backward, inputs", "W": "backward, weights"}


@dataclass(frozen=True, slots=True)
class _Block:
    """The actions of a rank from column `start` to `stop`: one action, or a joined pair."""

    actions: tuple[Action, ...]
    start: int
    stop: int


def render_pipeline(line: Timeline | Table, unit_s: float | None = None) -> RenderableType:
    """The picture of `line`, for a rich console. A table is simulated with unit costs.

    `unit_s` is the time of a column; by default the shortest action takes one. A picture wider than
    the console continues below; one longer than a screen is cut, with a count.
    """
    return _Picture(_timeline(line), unit_s)


def pipeline_text(line: Timeline | Table, width: int = 100, unit_s: float | None = None) -> str:
    """The picture of a pipeline as plain text of at most `width` columns."""
    from .mesh_picture import plain_text

    return plain_text(render_pipeline(line, unit_s), width)


def show(line: Timeline | Table) -> None:
    """Prints the picture to the terminal."""
    from rich.console import Console

    Console().print(render_pipeline(line))


def pipeline_svg(line: Timeline | Table, unit_s: float | None = None) -> str:
    """The picture of a pipeline as the text of an SVG file, to scale, with each action named on
    hover.

    `unit_s` is as in `render_pipeline` and sets the width of the picture.
    """
    line = _timeline(line)
    table, unit = line.table, _unit(line, unit_s)
    step, high, left, top = 22, 22, 64, 30
    kinds = [k for k in MEANING if any(a.kind == k for row in table.rows for a in row)]
    width = max(left + line.makespan_s / unit * step + 10, 10 + 7 * len(_head(line, unit)))
    height = top + table.ranks * (high + 4) + 34
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}"'
        f' width="{width:g}" height="{height:g}" font-family="sans-serif" font-size="11">',
        f'<rect width="{width:g}" height="{height:g}" fill="#ffffff"/>',
        f'<text x="10" y="18" font-size="12">{escape(_head(line, unit))}</text>',
    ]
    for rank, row in enumerate(table.rows):
        y = top + rank * (high + 4)
        long = line.makespan_s / unit * step
        out.append(f'<text x="10" y="{y + 15}">rank {rank}</text>')
        out.append(f'<rect x="{left}" y="{y}" width="{long:g}" height="{high}" fill="#eeeeee"/>')
        for slots in table.units[rank]:
            start, end = line.start_s[rank][slots[0]], line.end_s[rank][slots[0]]
            # Members of a pair are drawn one above the other.
            tall = high // len(slots)
            for k, a in enumerate(row[i] for i in slots):
                x, w = left + start / unit * step, (end - start) / unit * step
                fill = FILLS[a.kind][_chunk(table, rank, a) % 2]
                name = f"{MEANING[a.kind]} of stage {a.stage}, microbatch {a.microbatch}"
                out.append(
                    f'<g><title>{name}: {start:g} to {end:g}</title><rect x="{x:g}"'
                    f' y="{y + k * tall}" width="{w:g}" height="{tall}" fill="{fill}"'
                    f' stroke="#ffffff"/><text x="{x + w / 2:g}" y="{y + (k + 0.5) * tall + 4:g}"'
                    f' text-anchor="middle">{a.microbatch}</text></g>'
                )
    x, y = left, top + table.ranks * (high + 4) + 12
    for kind in kinds:
        out.append(f'<rect x="{x}" y="{y}" width="12" height="12" fill="{FILLS[kind][0]}"/>')
        out.append(f'<text x="{x + 16}" y="{y + 10}">{MEANING[kind]}</text>')
        x += 30 + 7 * len(MEANING[kind])
    if table.chunks > 1:
        out.append(f'<text x="{x}" y="{y + 10}">lighter: the rank\'s second stage</text>')
    return "\n".join([*out, "</svg>"]) + "\n"


@dataclass(frozen=True, slots=True)
class _Picture:
    line: Timeline
    unit_s: float | None

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        from rich.text import Text

        line, table = self.line, self.line.table
        unit = _unit(line, self.unit_s)
        rows = [list(_blocks(line, rank, unit)) for rank in range(min(table.ranks, MAX_ROWS))]
        # A column is wide enough for the name of every block.
        wide = max(
            -(-(len(_name(table, rank, b)) + 1) // (b.stop - b.start))
            for rank, row in enumerate(rows)
            for b in row
        )
        columns = max(b.stop for row in rows for b in row)
        drawn = [_row(table, rank, row, columns, wide) for rank, row in enumerate(rows)]
        margin = len(f"rank {len(rows) - 1} │ ")
        fits = max(1, (options.max_width - margin + 1) // wide)
        yield Text(_head(line, unit), style="bold")
        bands = -(-columns // fits)
        fits = -(-columns // bands)  # bands of about one length
        for band in range(min(bands, MAX_BANDS)):
            first, last = band * fits, min((band + 1) * fits, columns)
            if bands > 1:
                yield Text(f"from {first}", style="dim")
            for rank, row in enumerate(drawn):
                label = Text(f"{f'rank {rank}':<{margin - 3}} │ ", style="cyan")
                yield (label + row[first * wide : last * wide])[: options.max_width]
        if columns > fits * MAX_BANDS:
            yield Text(f"… and {columns - fits * MAX_BANDS} more units", style="dim")
        if table.ranks > len(rows):
            yield Text(f"… and {table.ranks - len(rows)} more ranks", style="dim")


def _row(table: Table, rank: int, blocks: list[_Block], columns: int, wide: int) -> Text:
    """The whole row of a rank."""
    from rich.text import Text

    text, at = Text(), 0
    for b in [*blocks, _Block((), columns, columns)]:
        for _ in range(b.start - at):
            text.append(f"{'.':<{wide}}", style="dim")
        at = b.stop
        if b.actions:
            room = (b.stop - b.start) * wide
            shown = _name(table, rank, b)
            # Later units of a block are marked where a unit begins.
            for k in range(len(shown), room):
                shown += "─" if k % wide == 0 else " "
            a = b.actions[-1]
            text.append(shown[:-1], style=f"black on {COLOURS[a.kind][_chunk(table, rank, a) % 2]}")
            text.append(shown[-1])
    return text


def _blocks(line: Timeline, rank: int, unit: float) -> Iterator[_Block]:
    at = 0
    for slots in line.table.units[rank]:
        start = max(at, round(line.start_s[rank][slots[0]] / unit))
        at = max(start + 1, round(line.end_s[rank][slots[0]] / unit))
        yield _Block(tuple(line.table.rows[rank][i] for i in slots), start, at)


def _name(table: Table, rank: int, block: _Block) -> str:
    return "+".join(f"{a.kind}{a.microbatch}{_letter(table, rank, a)}" for a in block.actions)


def _letter(table: Table, rank: int, a: Action) -> str:
    if table.chunks == 1:
        return ""
    chunk = _chunk(table, rank, a)
    return chr(ord("a") + chunk) if chunk < 26 else f"/{chunk}"


def _chunk(table: Table, rank: int, a: Action) -> int:
    return table.stages_of(rank).index(a.stage)


def _head(line: Timeline, unit: float) -> str:
    sizes = repr(line.table).partition(": ")[2]
    idle = sum(line.idle_fraction) / line.table.ranks
    units = line.makespan_s / unit
    long = f"{units:g} units" if unit == 1 else f"{line.makespan_s:.4g} s, {unit:.4g} s a unit"
    most = max(line.peak_activations)
    return (
        f"{line.table.name} · {sizes} · {long} · idle {100 * idle:.0f} % · holds at most {most:g}"
    )


def _unit(line: Timeline, unit_s: float | None) -> float:
    if unit_s is not None and unit_s > 0:
        return unit_s
    spans = (b - a for x, y in zip(line.start_s, line.end_s) for a, b in zip(x, y))
    return min((s for s in spans if s > 0), default=1)


def _timeline(line: Timeline | Table) -> Timeline:
    return simulate(line) if isinstance(line, Table) else line
