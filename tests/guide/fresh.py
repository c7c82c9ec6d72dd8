"""Guides as a reader types them: `python -m tests.guide.fresh 3` runs the blocks one after the
other in a new process, and checks each.

A line for each block states the checked facts, or the missing feature; below it one for each given
name and each substitution.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import sys
import tempfile
from typing import Any

from tests.guide.given import GIVEN, free_names
from tests.guide.runner import guide_path, run, snippets, substituted
from tests.guide.substitutions import SUBSTITUTIONS, WAITING

PREPARED = ("TESSERA_", "JAX_", "XLA_", "PYTHONHASHSEED", "PYTHONWARNINGS")


def environment() -> dict[str, str]:
    """This process's environment without settings of Tessera and the engine."""
    return {k: v for k, v in os.environ.items() if not k.startswith(PREPARED)}


def typed(guide: int) -> None:
    """Runs the guide. Raises a block's error, and AssertionError if a check fails."""
    prepared = sorted({*os.environ} - {*environment()})
    if prepared:
        raise SystemExit(f"this process was prepared: {prepared}")
    path = guide_path(guide)
    if path is None:
        raise SystemExit(f"guide {guide} is not there")
    blocks = importlib.import_module(f"tests.guide.blocks.guide_{guide}")
    before = snippets(guide, path.read_text(encoding="utf-8"))
    table = [s for s in SUBSTITUTIONS if s.guide == guide]
    space: dict[str, Any] = {"__name__": "__main__"}
    for old, (snippet, names) in zip(before, free_names(substituted(before, table)), strict=True):
        if snippet.name in WAITING:
            print(f"{snippet.name}  not yet: {WAITING[snippet.name]}", flush=True)
            continue
        for s in table:
            if s.section == snippet.section and s.old in old.code:
                print(f"    {s.old!r} is {s.new!r}: {s.why}")
        for name in names:
            if name not in space:
                space[name] = blocks.GIVES[name](space)
                print(f"    {name} is given: {GIVEN[guide][name]}")
        shown = io.StringIO()
        with contextlib.redirect_stdout(shown):
            run(snippet, space, path)
        check = blocks.CHECKS[snippet.name]
        check(space, shown.getvalue())
        print(f"{snippet.name}  holds: {' '.join(check.__doc__.split())}", flush=True)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        typed(int(sys.argv[1]))
