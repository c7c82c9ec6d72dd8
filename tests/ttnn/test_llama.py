"""The example's Llama: the tokens of transformers."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

from tests.cases import LONG

EXAMPLE = Path(__file__).parents[2] / "examples" / "llama_ttnn.py"


@pytest.mark.parametrize(
    ("rows", "columns", "users"),
    [(1, 4, 3), *(pytest.param(*p, marks=LONG) for p in ((1, 1, 1), (2, 2, 2), (2, 4, 2)))],
)
def test_tokens_are_those_of_transformers(
    rows: int, columns: int, users: int, capsys: pytest.CaptureFixture[str]
) -> None:
    run = runpy.run_path(str(EXAMPLE))["main"]
    run(rows=rows, columns=columns, users=users, tokens=6, seed=1)
    count = rows * users
    assert f"{count} of {count} users have the tokens of transformers" in capsys.readouterr().out
