"""A report as tables for a rich console."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ..ir.graph.text import size_text
from .dearest import Share
from .reports import Report

MOST_STAGES = 12


def render_report(r: Report) -> RenderableType:
    """The report as tables."""
    parts = [_summary(r), _memory(r), _stages(r), _traffic(r)]
    parts += [_shares("dearest layers", r.layers, r.step_s)]
    if r.collectives:
        parts += [_shares("dearest collectives", r.collectives, r.step_s)]
    return Group(*(x for part in (*parts, _changes(r)) for x in (part, Text())))


def time_text(seconds: float) -> str:
    """A time as readable text.

    >>> time_text(0.2085), time_text(3.1e-5), time_text(90.0)
    ('208.5 ms', '31 µs', '90.0 s')
    """
    if seconds >= 1:
        return f"{seconds:.1f} s"
    return f"{seconds * 1e3:.1f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.0f} µs"


def _table(title: str, *columns: str) -> Table:
    """A table whose columns are aligned right if their names begin with ">"."""
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD,
                  pad_edge=False, show_edge=False)  # fmt: skip
    for name in columns:
        right = name.startswith(">")
        table.add_column(name.lstrip(">"), justify="right" if right else "left",
                         overflow="fold")  # fmt: skip
    return table


def _summary(r: Report) -> Table:
    table = Table(box=None, show_header=False, pad_edge=False,
                  title=f"{r.name} on {r.mesh}: {r.machine}", title_justify="left",
                  title_style="bold")  # fmt: skip
    line = r.timeline
    rows = [("step", time_text(r.step_s), "simulated")]
    if r.tokens_per_s:
        rows += [("tokens/s", f"{r.tokens_per_s:,.0f}", f"{r.tokens:,} a step")]
    rows += [
        ("MFU", f"{r.mfu:.1%}", f"of {line.peak_flops_per_s / 1e12:,.0f} TFLOP/s a device"),
        ("computes", time_text(line.compute_s), "the busiest stage"),
        ("waits", time_text(line.exposed_s), f"for communication; {time_text(r.hidden_s)} hidden"),
        ("bubble", f"{line.bubble:.1%}", "of the step, mean of the stages"),
    ]
    if r.days is not None:
        price = f", {r.cost:,.0f} at {r.price_per_device_hour:g} an hour" if r.cost else ""
        rows += [("training", f"{r.days:,.1f} days", f"for {r.budget_tokens:,.0f} tokens{price}")]
    for row in rows:
        table.add_row(*row)
    return table


def _memory(r: Report) -> Table:
    worst = max(r.memory, key=lambda m: m.peak)
    some = r.memory if len(r.memory) <= MOST_STAGES else [worst]
    names = [f">stage {m.stage}" for m in some] if len(r.memory) > 1 else [">a device"]
    verdict = "fits" if r.fits else "does not fit"
    table = _table(f"memory {verdict}", "", *names)
    for kind in dict.fromkeys(kind for m in some for kind in m.rows):
        table.add_row(kind, *(size_text(m.rows.get(kind, 0)) for m in some))
    table.add_section()
    table.add_row("together", *(size_text(m.peak) for m in some))
    table.add_row("limit", *(size_text(m.limit) for m in some))
    return table


def _stages(r: Report) -> Table:
    table = _table("stages", "", ">devices", ">computes", ">waits", ">bubble")
    stages = r.timeline.stages
    for s in stages[:MOST_STAGES]:
        times = map(time_text, (s.compute_s, s.exposed_s, s.bubble_s))
        table.add_row(f"stage {s.stage}", f"{s.devices:,}", *times)
    if len(stages) > MOST_STAGES:
        table.add_row(f"… and {len(stages) - MOST_STAGES} more")
    return table


def _traffic(r: Report) -> RenderableType:
    per_link = ", ".join(f"{k} {size_text(v)}" for k, v in r.timeline.link_bytes.items())
    rows = sorted(r.timeline.traffic, key=lambda t: -t.exposed_s)[:MOST_STAGES]
    if not rows:
        return Text("no communication", style="bold")
    table = _table(f"communication; bytes by link: {per_link}", "", "axes", "links", ">stage",
                   ">times", ">receives", ">takes", ">exposed", ">hidden")  # fmt: skip
    for t in rows:
        times = map(time_text, (t.time_s, t.exposed_s, t.hidden_s))
        table.add_row(t.what, ", ".join(t.axes), ", ".join(t.links), str(t.stage), str(t.count),
                      size_text(t.bytes), *times)  # fmt: skip
    return table


def _shares(title: str, rows: Sequence[Share], step_s: float) -> Table:
    table = _table(title, "", "in", "at", ">stage", ">times", ">takes", ">of the step")
    for s in rows:
        where = "" if s.where == s.what else s.where
        table.add_row(s.what, where, s.at, str(s.stage), f"{s.count:,}", time_text(s.time_s),
                      f"{s.time_s / step_s:.1%}")  # fmt: skip
    return table


def _changes(r: Report) -> RenderableType:
    if not r.changes:
        return Text("no change of the list makes the step faster", style="bold")
    table = _table("what to change", "change", ">saves", ">step", "by")
    for c in r.changes:
        table.add_row(c.what, f"{c.gain:.1%}", time_text(c.step_s), c.how)
    return table
