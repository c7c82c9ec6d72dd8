"""The page of results in parts: a head, and sections of which some may be measured anew."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence

TITLE = "# What was measured"


def prose(text: str) -> list[str]:
    """A paragraph of at most 98 columns, and an empty line."""
    return [*textwrap.wrap(" ".join(text.split()), 98), ""]


def table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> list[str]:
    """A table, and an empty line."""
    lines = [head, ["---"] * len(head), *rows]
    return [*("| " + " | ".join(map(str, line)) + " |" for line in lines), ""]


def merged(
    old: str, head: Sequence[str], new: Mapping[str, Sequence[str]], order: Sequence[str]
) -> str:
    """The page `old` with the sections `new` in place of those of the same title.

    Sections come in `order`; one whose title it does not name is dropped.
    """
    parts = {}
    for part in old.split("\n## ")[1:]:
        title, _, text = part.partition("\n")
        parts[title] = text.strip()
    parts |= {title: "\n".join(lines).strip() for title, lines in new.items()}
    texts = [f"## {title}\n\n{parts[title]}" for title in order if title in parts]
    return "\n\n".join([TITLE, "\n".join(head).strip(), *texts]) + "\n"
