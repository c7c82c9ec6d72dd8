"""Guides in a fresh process, as a reader types them."""

from __future__ import annotations

import importlib
import subprocess
import sys

import pytest

from tests.cases import LONG
from tests.guide.fresh import environment
from tests.guide.given import GIVEN
from tests.guide.reading import guide_text
from tests.guide.runner import ROOT
from tests.guide.substitutions import RUN, WAITING

FOLDER = ROOT / "tests" / "guide" / "blocks"
GUIDES = sorted(int(p.stem.removeprefix("guide_")) for p in FOLDER.glob("guide_*.py"))


@pytest.mark.parametrize("guide", GUIDES)
def test_each_block_that_runs_is_held_to_what_it_is_for(guide: int) -> None:
    blocks = importlib.import_module(f"tests.guide.blocks.guide_{guide}")
    assert list(blocks.CHECKS) == [n for n in RUN if n.startswith(f"{guide}/")]
    assert all(check.__doc__ for check in blocks.CHECKS.values())
    waits = {n for n, what in GIVEN[guide].items() if what == "waits with its block"}
    assert set(blocks.GIVES) | waits == set(GIVEN[guide])


# The blocks of guides 1 to 4 run in test_guides.py too; those of guide 5 only here.
@pytest.mark.parametrize("guide", [pytest.param(g, marks=[LONG] * (g != 5)) for g in GUIDES])
def test_a_guide_runs_as_it_is_typed(guide: int) -> None:
    guide_text(guide)
    done = subprocess.run(
        [sys.executable, "-m", "tests.guide.fresh", str(guide)], cwd=ROOT, env=environment(),
        capture_output=True, text=True, timeout=1800, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
    said = [line.partition("  ")[::2] for line in done.stdout.splitlines() if line[0] != " "]
    assert [n for n, what in said if what.startswith("holds: ")] == [
        n for n in RUN if n.startswith(f"{guide}/")
    ]
    assert [n for n, what in said if what.startswith("not yet: ")] == [
        n for n in WAITING if n.startswith(f"{guide}/")
    ]


def test_a_process_that_was_prepared_is_refused() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.guide.fresh", "3"], cwd=ROOT,
        env=environment() | {"TESSERA_DEVICES": "8"}, capture_output=True, text=True, timeout=300,
        check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert done.stderr == "this process was prepared: ['TESSERA_DEVICES']\n"
