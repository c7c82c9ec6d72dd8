"""The page of benchmark results: kept measurements, and the reading of compiled programs."""

from __future__ import annotations

import doctest
import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

BENCH = Path(__file__).parents[2] / "bench"
MODULES = ("page", "processor", "hlo_text")


@pytest.fixture
def bench() -> Iterator[dict[str, Any]]:
    """Yields the modules of bench/ that need no engine."""
    sys.path.insert(0, str(BENCH))
    try:
        yield {name: importlib.import_module(name) for name in MODULES}
    finally:
        sys.path.remove(str(BENCH))
        for name in MODULES:
            sys.modules.pop(name, None)


def test_a_measurement_replaces_that_of_its_own_kind_of_processor(bench: Any) -> None:
    page, order = "", ["B", "A"]
    for on, title, said in (
        ("AMD", "A", "one"), ("Intel", "A", "two"), ("AMD", "B", "three"), ("AMD", "A", "four"),
        ("AMD", "dropped", "five"),
    ):  # fmt: skip
        page = bench["page"].merged(page, ["head"], {title: [said, ""]}, order, on)
    assert page == (
        "# What was measured\n\nhead\n\n## B\n\n### AMD\n\nthree\n\n"
        "## A\n\n### AMD\n\nfour\n\n### Intel\n\ntwo\n"
    )
    old = "# What was measured\n\nhead\n\n## A\n\nby whom?\n"
    page = bench["page"].merged(old, ["head"], {"A": ["one"]}, order, "AMD")
    assert "### A processor that was not named\n\nby whom?\n\n### AMD\n\none\n" in page


def test_the_page_as_it_is_is_read_whole(bench: Any) -> None:
    old = (BENCH / "RESULTS.md").read_text()
    titles = [line.removeprefix("## ") for line in old.splitlines() if line.startswith("## ")]
    head = old.split("\n\n## ")[0].splitlines()[2:]
    assert bench["page"].merged(old, head, {}, titles, "none") == old
    assert bench["page"].UNNAMED not in old
    *questions, machines = titles
    assert machines == "On what it was measured" and all(t.endswith("?") for t in questions)
    assert (BENCH / "summary.md").read_text().strip() in old


FUSED = """\
HloModule step

%body (p0: f32[4,8,16], p1: s32[], p2: f32[1,8,16]) -> f32[4,8,16] {
  %p0 = f32[4,8,16]{2,1,0} parameter(0)
  %p1 = s32[] parameter(1)
  %p2 = f32[1,8,16]{2,1,0} parameter(2)
  %zero = s32[] constant(0)
  ROOT %put = f32[4,8,16]{2,1,0} dynamic-update-slice(%p0, %p2, %p1, %zero, %zero), \
metadata={op_name="jit(step)/put"}
}

%ynn (a: bf16[2,3,5], b: bf16[2,5,7]) -> f32[2,3,7] {
  %a = bf16[2,3,5]{2,1,0} parameter(0)
  %b = bf16[2,5,7]{2,1,0} parameter(1)
  ROOT %dot.2 = f32[2,3,7]{2,1,0} dot(%a, %b), lhs_batch_dims={0}, lhs_contracting_dims={2}, \
rhs_batch_dims={0}, rhs_contracting_dims={1}, metadata={op_name="jit(step)/scores"}
}

ENTRY %main (x: f32[4,8,16], i: s32[], y: f32[1,8,16], a: bf16[2,3,5], b: bf16[2,5,7]) -> \
(f32[4,8,16], f32[2,3,7]) {
  %x = f32[4,8,16]{2,1,0} parameter(0)
  %i = s32[] parameter(1)
  %y = f32[1,8,16]{2,1,0} parameter(2)
  %a = bf16[2,3,5]{2,1,0} parameter(3)
  %b = bf16[2,5,7]{2,1,0} parameter(4)
  %fusion.1 = f32[4,8,16]{2,1,0} fusion(%x, %i, %y), kind=kLoop, calls=%body
  %fusion.2 = f32[2,3,7]{2,1,0} fusion(%a, %b), kind=kCustom, calls=%ynn
  %turned = f32[16,8]{1,0} transpose(%y), dimensions={1,0}
  ROOT %both = (f32[4,8,16]{2,1,0}, /*index=1*/f32[2,3,7]{2,1,0}) tuple(%fusion.1, %fusion.2)
}
"""


def test_what_an_instruction_moves_and_multiplies(bench: Any) -> None:
    found = bench["hlo_text"].read(FUSED)
    assert "put" not in found, "what is in a fusion is the fusion's"
    put, scores = found["fusion.1"], found["fusion.2"]
    # An in-place update writes the changed part, and reads no more.
    assert put.moved_bytes == 2 * 8 * 16 * 4 + 4
    assert put.is_move and not put.products and put.op_names == ["jit(step)/put"]
    assert scores.products == [(2, 3, 5, 7, "bf16", "f32")] and scores.flops == 2 * 2 * 3 * 5 * 7
    assert scores.moved_bytes == 2 * (2 * 3 * 5 + 2 * 5 * 7) + 4 * 2 * 3 * 7
    assert found["turned"].is_move and found["turned"].moved_bytes == 2 * 8 * 16 * 4
    assert not scores.is_move and found["both"].moved_bytes == 0


def test_their_examples_hold(bench: Any) -> None:
    for name, module in bench.items():
        assert doctest.testmod(module).failed == 0, name
