"""The Python blocks of README.md and docs/*.md, each run.

The blocks of a page run in order, in one namespace. A block with `>>>` prompts is a doctest. Any
other block is run as a file `example.py`; if a `text` block follows, the block must print exactly
that. "..." in an expected output matches anything. In a table, each cell of a column headed
"Tessera" or "TT-NN" is a block too: its code in backticks.
"""

from __future__ import annotations

import contextlib
import doctest
import io
import re
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import tessera as ts
from tests.cases import LONG

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
TABLE = re.compile(r"^(\|.*\|)\n\|[-:| ]+\|\n((?:\|.*\|\n)+)", re.MULTILINE)
RUN_COLUMNS = ("Tessera", "TT-NN")
FLAGS = doctest.ELLIPSIS
LINK = re.compile(r"\]\((?!\w+:)([^)#]+)[^)]*\)")


@dataclass(frozen=True, slots=True)
class Block:
    """Code that starts on `line` of its page, and its expected output (None: not stated)."""

    code: str
    line: int
    printed: str | None


def blocks(text: str) -> list[Block]:
    """The Python blocks of a page, in order."""
    return sorted([*_fenced(text), *_cells(text)], key=lambda block: block.line)


def _fenced(text: str) -> Iterator[Block]:
    fences = list(FENCE.finditer(text))
    for i, fence in enumerate(fences):
        if fence[1] != "python":
            continue
        after = fences[i + 1] if i + 1 < len(fences) else None
        follows = after is not None and after[1] == "text"
        adjacent = follows and after is not None and not text[fence.end() : after.start()].strip()
        line = text.count("\n", 0, fence.start()) + 2
        yield Block(fence[2], line, after[2] if adjacent and after is not None else None)


def _cells(text: str) -> Iterator[Block]:
    """The code in the columns of tables that are run."""
    for table in TABLE.finditer(text):
        heads = [cell.strip() for cell in table[1].split("|")]
        run = [i for i, head in enumerate(heads) if head in RUN_COLUMNS]
        first = text.count("\n", 0, table.start(2)) + 1
        for line, row in enumerate(table[2].splitlines(), first):
            for i in run:
                yield Block(row.split("|")[i].strip().strip("`"), line, None)


def run_block(block: Block, space: dict[str, Any], page: str) -> str:
    """Runs `block` in `space`. Returns a report of the failure, or ""."""
    out = io.StringIO()
    if ">>>" in block.code:
        test = doctest.DocTestParser().get_doctest(block.code, {}, page, page, block.line - 1)
        test.globs = space
        doctest.DocTestRunner(optionflags=FLAGS, verbose=False).run(
            test, out=out.write, clear_globs=False
        )
        return out.getvalue()
    try:
        with contextlib.redirect_stdout(out):
            exec(compile(block.code, "example.py", "exec"), space)
    except Exception as error:
        error.add_note(f"{page}:{block.line}: {block.code}")
        raise
    want, got = block.printed, out.getvalue()
    if want is None or doctest.OutputChecker().check_output(want, got, FLAGS):
        return ""
    return f"{page}:{block.line}: the block printed\n{got}\nand the page says\n{want}"


# Their blocks compile the most; smaller tests cover the same features.
LONG_PAGES = (
    "debugging.md", "experts.md", "functions.md", "graph-functions.md", "local-view.md",
    "long-sequences.md", "memory.md", "models.md", "monitoring.md", "precision.md", "recipes.md",
    "training.md",
)  # fmt: skip


@pytest.mark.parametrize(
    "page", [pytest.param(p, id=p.name, marks=[LONG] * (p.name in LONG_PAGES)) for p in PAGES]
)
def test_every_block_runs_and_prints_what_the_page_says(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    ts.seed(0)
    space: dict[str, Any] = {"__name__": "__main__"}
    wrong = []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for block in blocks(page.read_text(encoding="utf-8")):
            wrong.append(run_block(block, space, page.name))
    if any(wrong):
        pytest.fail("\n".join(filter(None, wrong)), pytrace=False)


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_every_link_leads_somewhere(page: Path) -> None:
    for target in LINK.findall(page.read_text(encoding="utf-8")):
        assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_cells_of_tables_are_blocks() -> None:
    page = "```python\nx = 1\n```\n\n| JAX | Tessera |\n|---|---|\n| `y` | `x = x + 1` |\n"
    space: dict[str, Any] = {}
    for block in blocks(page):
        run_block(block, space, "page.md")
    assert (space["x"], [block.line for block in blocks(page)]) == (2, [2, 7])


def test_a_wrong_output_is_found() -> None:
    page = "```python\n>>> 1 + 1\n3\n```\n\n```python\nprint('a')\n```\n\n```text\nb\n```\n"
    doc, plain = blocks(page)
    assert "Expected:\n    3" in run_block(doc, {}, "page.md")
    said = run_block(plain, {}, "page.md")
    assert said == "page.md:7: the block printed\na\n\nand the page says\nb\n"
    assert run_block(Block("print('b')\n", 1, "b\n"), {}, "page.md") == ""
