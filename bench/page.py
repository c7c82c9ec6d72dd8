"""The page of results in parts: a head, and sections that can be measured separately.

Each section has a part per kind of processor, side by side: a measurement replaces the part of the
same kind alone.
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence

TITLE = "# What was measured"
UNNAMED = "A processor that was not named"


def prose(text: str) -> list[str]:
    """Returns the lines of a paragraph of at most 98 columns, and an empty line."""
    return [*textwrap.wrap(" ".join(text.split()), 98), ""]


def table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> list[str]:
    """Returns the lines of a table, and an empty line."""
    lines = [head, ["---"] * len(head), *rows]
    return [*("| " + " | ".join(map(str, line)) + " |" for line in lines), ""]


def merged(
    old: str,
    head: Sequence[str],
    new: Mapping[str, Sequence[str]],
    order: Sequence[str],
    processor: str,
) -> str:
    """Returns the page `old` with the sections of `new`, by title, in place of those of
    `processor`.

    Sections come in `order`; a section that `order` does not name is dropped.
    """
    sections = {}
    for section in old.split("\n## ")[1:]:
        title, _, text = section.partition("\n")
        sections[title] = _by_processor(text)
    for title, lines in new.items():
        sections.setdefault(title, {})[processor] = "\n".join(lines).strip()
    texts = [
        f"## {title}\n\n" + "\n\n".join(f"### {on}\n\n{text}" for on, text in parts.items())
        for title in order
        if (parts := sections.get(title))
    ]
    return "\n\n".join([TITLE, "\n".join(head).strip(), *texts]) + "\n"


def _by_processor(section: str) -> dict[str, str]:
    first, *parts = f"\n{section}".split("\n### ")
    found = {UNNAMED: first.strip()} if first.strip() else {}
    for part in parts:
        name, _, text = part.partition("\n")
        found[name] = text.strip()
    return found
