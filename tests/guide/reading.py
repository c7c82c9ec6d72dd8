"""Snippets of a guide's text for the tests, with the substitutions applied."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.guide import runner
from tests.guide.given import GIVEN, imported
from tests.guide.runner import guide_path, run, snippets, substituted
from tests.guide.substitutions import RUN, SUBSTITUTIONS

Space = dict[str, Any]


def guide_text(number: int) -> tuple[Path, str]:
    """Returns a guide's file and text. Skips the test if it is missing."""
    path = guide_path(number)
    if path is None:
        pytest.skip(f"guide {number} is not in {runner.SEEDS}")
    return path, path.read_text(encoding="utf-8")


def in_order(guide: int, supplied: Space, sections: Sequence[str] = ()) -> Space:
    """Runs the guide's snippets, or those of `sections`, and returns their namespace.

    Raises LookupError if `supplied` has a name that is neither in `GIVEN` nor imported by another
    section of the guide.
    """
    path, text = guide_text(guide)
    table = [s for s in SUBSTITUTIONS if s.guide == guide]
    changed = substituted(snippets(guide, text), table)
    hidden = set(supplied) - set(GIVEN[guide]) - imported(changed)
    if hidden:
        raise LookupError(f"guide {guide}: {sorted(hidden)} are not in the table of given names")
    found = {s.name: s for s in changed}
    space: Space = {"__name__": "guide", **supplied}
    for name in RUN:
        snippet = found.get(name)
        if snippet is not None and (not sections or snippet.section in sections):
            run(snippet, space, path)
    return space
