"""HTML for notebooks: escaped text, and pictures without links."""

import re
from html.parser import HTMLParser
from typing import Any

import numpy as np
import pytest

import tessera as ts
from tessera import dist

MESH = dist.Mesh(("dp", "tp"), shape={"dp": 2, "tp": 4})


class Page(HTMLParser):
    """The tags and the text of a fragment; raises if a tag is not closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open, self.tags, self.text = list[str](), set[str](), ""
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.open.append(tag)
        self.tags.add(tag)
        assert {name for name, _ in attrs} <= {"style"}, attrs

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


@ts.jit
def double(x: ts.Tensor) -> ts.Tensor:
    return x @ ts.ones((8, 8)) * 2.0


def test_a_tensor_shows_its_values_and_who_holds_which_block() -> None:
    x = ts.tensor(np.ones((16, 8), np.float32), mesh=MESH, layout="[16@dp, 8@tp]")
    page = Page(x._repr_html_())
    assert "Tensor([[1., 1." in page.text and "f32[16@dp, 8@tp] on dp=2 tp=4" in page.text
    assert "5: [8:, 2:4]" in page.text and "2: [:8, 4:6]" in page.text
    assert page.tags == {"pre", "span"}  # spans have the colours
    assert len(set(re.findall("color: (#[0-9a-f]+)", x._repr_html_()))) >= 6
    assert Page(ts.ones(2)._repr_html_()).text.startswith("Tensor([1., 1.]")


def test_names_are_escaped() -> None:
    x = ts.tensor([1.0], name="<script>alert(1)</script>")
    page = Page(x._repr_html_())
    assert "script" not in page.tags and "<script>" in page.text


@pytest.mark.parametrize("kind", ["mesh", "graph", "plan", "profile", "report"])
def test_other_values(kind: str) -> None:
    x = ts.tensor(np.ones((16, 8), np.float32), mesh=MESH, layout="[16@dp, 8]")
    made: Any = {
        "mesh": lambda: MESH,
        "graph": lambda: ts.graph.trace(double, x),
        "plan": lambda: double.plan(x),
        "profile": lambda: dist.profile(double, x),
        "report": lambda: ts.plan.report(double, x, cluster="h100x8"),
    }[kind]()
    page = Page(made._repr_html_())
    wanted = {
        "mesh": "dp 1", "graph": "contract", "plan": "contract", "profile": "a run:",
        "report": "h100",
    }  # fmt: skip
    assert wanted[kind] in page.text
    if kind != "mesh":
        assert page.text.split() == str(made).split()
