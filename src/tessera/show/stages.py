"""The stages of a program side by side, with the changes of each pass.

>>> from tessera.ir.graph.text import parse
>>> before = parse('graph f  v1\\n  %0 = input "x" : f32[8]\\n  %1 = neg %0 : f32[8]\\n  return %0')
>>> after = parse('graph f  v1\\n  %0 = input "x" : f32[8]\\n  return %0')
>>> print(stages_text({"recorded": before, "simplified": after}, 60))
    recorded                      simplified
─────────────────────────────────────────────────────────
    graph f v1                    graph f v1
    %0 = input "x" : f32[8]       %0 = input "x" : f32[8]
-   %1 = neg %0 : f32[8]
    return %0                     return %0
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from difflib import SequenceMatcher

from rich import box
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from ..ir.graph.node import Graph
from .mesh_picture import plain_text

_NUMBER = re.compile(r"%\d+")
_SPACES = re.compile(r"\s+")


def render_stages(stages: Mapping[str, Graph]) -> RenderableType:
    """A column per stage; equal lines share a row, ignoring the numbers of nodes."""
    texts = [[_line(s) for s in g.text.splitlines()] for g in stages.values()]
    rows = [[i] for i in range(len(texts[0]))]  # per row, the line of each stage, or -1
    for k in range(1, len(texts)):
        rows = _beside(rows, texts[k - 1], texts[k])
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1), show_edge=False, pad_edge=False)
    for name in stages:
        table.add_column("", no_wrap=True, width=1)
        table.add_column(name, overflow="fold")
    last = len(texts) - 1
    for row in rows:
        cells: list[Text] = []
        for k, i in enumerate(row):
            gone = i >= 0 and k < last and row[k + 1] < 0
            new = i >= 0 and k > 0 and row[k - 1] < 0
            style = "red" if gone else "green" if new else ""
            mark = "-" if gone else "+" if new else ""
            cells += [Text(mark, style=style), Text(texts[k][i] if i >= 0 else "", style=style)]
        table.add_row(*cells)
    return table


def stages_text(stages: Mapping[str, Graph], width: int = 160) -> str:
    """The picture as plain text of at most `width` columns."""
    return plain_text(render_stages(stages), width)


def show(stages: Mapping[str, Graph]) -> None:
    """Prints the picture to the terminal."""
    Console().print(render_stages(stages))


def _line(text: str) -> str:
    """A line of a graph's text without its comment and alignment."""
    indent = len(text) - len(text.lstrip())
    body, _, _ = text.partition("  # ")
    return " " * max(0, indent - 2) + _SPACES.sub(" ", body.strip())


def _beside(rows: list[list[int]], old: list[str], new: list[str]) -> list[list[int]]:
    """`rows` extended by the lines of a further stage."""
    keys = [[_NUMBER.sub("%", s) for s in text] for text in (old, new)]
    found: list[list[int]] = []
    before = len(rows[0]) if rows else 0
    match = SequenceMatcher(None, keys[0], keys[1], autojunk=False)
    at = {row[-1]: j for j, row in enumerate(rows) if row[-1] >= 0}
    done = 0
    for kind, a, a_end, b, b_end in match.get_opcodes():
        upto = at[a_end - 1] + 1 if a_end > a else done
        lines = iter(range(b, b_end))
        for row in rows[done:upto]:
            # Rows that the last stage does not have do not use up a line.
            found.append([*row, next(lines) if kind == "equal" and row[-1] >= 0 else -1])
        done = upto
        found += [[*[-1] * before, i] for i in lines]
    return [*found, *([*row, -1] for row in rows[done:])]
