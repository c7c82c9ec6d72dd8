"""Parser and runner of the guides' code, read from their text at the test run.

A guide is Markdown. Its Python blocks are cut into snippets: one per function, and one for the rest
of a block. A snippet's name is `guide/section/function`, or `guide/section/code`; a section is the
number at the start of its heading, or the heading.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
SEEDS = ROOT.parent / "shared" / "seeds"
HEADING = re.compile(r"^(?:#+ +)?(\d+(?:\.\d+)+)[ \t]+\S|^#+ +(\S.*?)\s*$")
STARTS = re.compile(r"^(@|def |class |async def )")
NAME = re.compile(r"^(?:async )?(?:def|class) (\w+)", re.MULTILINE)


@dataclass(frozen=True)
class Substitution:
    """A replacement of `old` by `new` in the code of a guide's section, with the reason `why`."""

    guide: int
    section: str
    old: str
    new: str
    why: str


@dataclass(frozen=True)
class Snippet:
    """Code that starts on `line` of guide number `guide`."""

    name: str
    guide: int
    section: str
    code: str
    line: int


def guide_path(number: int, folder: Path | None = None) -> Path | None:
    """Returns the path of guide `number` in `folder` (default: `SEEDS`), or None."""
    folder = SEEDS if folder is None else folder
    found = sorted(folder.glob(f"{number}-*.md")) if folder.is_dir() else []
    return found[0] if found else None


def snippets(guide: int, text: str) -> list[Snippet]:
    """The snippets of a guide, in order. A block without a closing fence ends with the text."""
    found: list[Snippet] = []
    counts: dict[str, int] = {}
    for section, code, line in _blocks(text):
        for chunk, at in _chunks(code, line):
            name = NAME.search(chunk)
            base = f"{guide}/{section}/{name[1] if name else 'code'}"
            counts[base] = counts.get(base, 0) + 1
            again = f" {counts[base]}" if counts[base] > 1 else ""
            found.append(Snippet(base + again, guide, section, chunk, at))
    return found


def _blocks(text: str) -> Iterator[tuple[str, str, int]]:
    """Yields (section, code, its first line) of each Python block."""
    section, code, start = "", None, 0
    for number, line in enumerate(text.splitlines(keepends=True), 1):
        if code is None:
            heading = HEADING.match(line)
            if heading:
                section = heading[1] or heading[2]
            elif line.startswith(("```python", "```py\n")):
                code, start = [], number + 1
        elif line.startswith("```"):
            yield section, _typed("".join(code)), start
            code = None
        else:
            code.append(line)
    if code:
        yield section, "".join(code), start


def _typed(code: str) -> str:
    """Returns the code of a block without a common indent. In a transcript with `>`, only the typed
    lines are code, not the output."""
    lines = textwrap.dedent(code).splitlines(keepends=True)
    if ">\n" in lines:
        shown = lines.index(">\n")
        return "".join(lines[:shown]) + "\n" * (len(lines) - shown)
    if any(line.startswith("> ") for line in lines):
        said = (line[2:] if line.startswith("> ") and line[2] != "<" else "\n" for line in lines)
        return "".join(said)
    return "".join(lines)


def _chunks(code: str, line: int) -> Iterator[tuple[str, int]]:
    """Cuts a block before and after each function (with its decorators)."""
    lines = code.splitlines(keepends=True)
    cuts, in_function, decorated = [0], False, False
    for i, text in enumerate(lines):
        if not text.strip() or text[0] in " \t)]}#":
            continue
        starts = bool(STARTS.match(text))
        if (starts and not decorated) or (not starts and in_function):
            cuts.append(i)
        decorated = text.startswith("@")
        in_function = starts
    for a, b in zip(cuts, [*cuts[1:], len(lines)], strict=True):
        chunk = "".join(lines[a:b])
        if chunk.strip():
            yield chunk, line + a


def substituted(found: Iterable[Snippet], table: Iterable[Substitution]) -> list[Snippet]:
    """Returns the snippets with the table applied. Raises LookupError if an old text is missing."""
    out = list(found)
    for s in table:
        hits = 0
        for i, snippet in enumerate(out):
            if (snippet.guide, snippet.section) == (s.guide, s.section) and s.old in snippet.code:
                code = snippet.code.replace(s.old, s.new)
                out[i] = Snippet(snippet.name, snippet.guide, snippet.section, code, snippet.line)
                hits += 1
        if not hits:
            raise LookupError(f"guide {s.guide}, {s.section}: {s.old!r} is not in the text")
    return out


def run(snippet: Snippet, space: dict[str, Any], path: Path) -> None:
    """Runs a snippet in `space`; a traceback shows the guide's own lines."""
    code = "\n" * (snippet.line - 1) + snippet.code
    exec(compile(code, str(path), "exec"), space)
