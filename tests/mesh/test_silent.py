"""The table of silent failures: a right result, an error or one warning for each habit."""

from __future__ import annotations

import importlib
import re
import warnings
from pathlib import Path

import pytest

import tessera as ts
from tests.mesh.silent.rows import ROWS, Row

for file in sorted(Path(__file__).with_name("silent").glob("*.py")):
    importlib.import_module(f"tests.mesh.silent.{file.stem}")


@pytest.mark.parametrize("row", ROWS, ids=lambda r: r.name)
def test_it_is_not_silent(row: Row) -> None:
    if row.error is not None:
        assert issubclass(row.error, ts.TesseraError)
        with pytest.raises(row.error, match=re.escape(row.says)) as caught:
            row.run()
        assert caught.value.__cause__ is None
    elif row.warns is not None:
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            row.run()
        mine = [w for w in seen if issubclass(w.category, row.warns) and row.says in str(w.message)]
        assert len(mine) == 1, [str(w.message) for w in seen]
    else:
        row.run()


def test_the_names_differ() -> None:
    assert len({r.name for r in ROWS}) == len(ROWS)
