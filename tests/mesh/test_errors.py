"""Every mistake of the table is answered with its error, word for word, at the user's line.

`pytest tests/mesh/test_errors.py --refresh-golden` writes `tests/golden/errors.txt` anew; `git diff
tests/golden` shows which messages have changed. `AT` stands for the line of the mistake.
"""

from __future__ import annotations

import re
import traceback
from pathlib import Path

import pytest

import tessera as ts
from tests.mesh import (
    errors_calls,
    errors_layers,
    errors_layouts,
    errors_local,
    errors_loops,
    errors_models,
    errors_names,
    errors_optim,
    errors_programs,
    errors_saving,
    errors_values,
)
from tests.mesh.errors import ROWS, Row
from tests.messages import GOLDEN, messages, refresh

MODULES = (
    errors_calls, errors_layers, errors_layouts, errors_local, errors_loops, errors_models,
    errors_names, errors_optim, errors_programs, errors_saving, errors_values,
)  # fmt: skip
FILES = {Path(m.__file__).name for m in MODULES}
FILE = GOLDEN / "errors.txt"
LINE = re.compile(r"(\w+\.py):(\d+)")
MESSAGES = messages(FILE)


def own_line(row: Row, found: re.Match[str]) -> str:
    """`AT` for a line of the mistake itself; any other place stays and so fails the test."""
    code = row.call.__code__
    inner = [c for c in code.co_consts if hasattr(c, "co_lines")]  # lambdas in a lambda
    inner += [c for i in inner for c in i.co_consts if hasattr(c, "co_lines")]
    lines = {n for c in (code, *inner) for _, _, n in c.co_lines() if n}
    mine = found[1] == Path(code.co_filename).name and int(found[2]) in range(
        min(lines), max(lines) + 1
    )
    return "AT" if mine else found[0]


@pytest.mark.parametrize("row", ROWS, ids=lambda r: r.name)
def test_the_message(row: Row, request: pytest.FixtureRequest) -> None:
    with pytest.raises(ts.TesseraError) as caught:
        row.call()
    error = caught.value
    kind = type(error)
    assert issubclass(kind, row.error) and kind.__name__ == row.error.__name__
    text = LINE.sub(lambda found: own_line(row, found), str(error))
    text = re.sub(r" at 0x\w+>", ">", text)
    if request.config.getoption("--refresh-golden"):
        refresh(FILE, row.name, text, (r.name for r in ROWS))
    else:
        assert text == MESSAGES[row.name]
    # What the user sees above the message is our own code and nobody else's error.
    if error.__cause__ is not None:  # but of a function that the user gave
        *_, (last, _) = traceback.walk_tb(error.__cause__.__traceback__)
        assert Path(last.f_code.co_filename).name in FILES
    foreign = not isinstance(error.__context__, ts.TesseraError | None)
    assert error.__suppress_context__ or not foreign


def test_the_table_is_whole() -> None:
    assert len(ROWS) >= 100
    assert len({r.name for r in ROWS}) == len(ROWS)
    assert {r.error for r in ROWS} == {
        ts.BackendError, ts.CheckpointError, ts.DTypeError, ts.DonatedError, ts.GraphError,
        ts.LayoutError, ts.MeshError, ts.ShapeError, ts.StrategyError, ts.UnknownNameError,
        ts.UsageError,
    }  # fmt: skip
    assert [r.name for r in ROWS] == [*MESSAGES]
    for name, text in MESSAGES.items():
        rows = [line.split(" : ")[0].strip() for line in text.splitlines()[1:]]
        assert rows[-2:] == ["at", "fix"], name
