"""The table of user errors. Its rows are in `errors_*.py` beside this file, the messages in
`tests/golden/errors.txt`."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

import tessera as ts
from tessera import dist

MESH = dist.Mesh(("dp", "tp"), shape={"dp": 2, "tp": 4})
OTHER = dist.Mesh(("dp", "tp"), shape={"dp": 4, "tp": 2})
X = ts.tensor(np.arange(6, dtype=np.float32).reshape(2, 3))
Y = ts.tensor(np.ones((4, 5), np.float32))
IDS = ts.tensor([0, 1])
ONES = np.ones((8, 4), np.float32)
SEQUENCE, MATRIX, MASK = ts.Tensor["B", "S", "D"], ts.Tensor["B", "D"], ts.Tensor["S", ts.int32]


@dataclass(frozen=True)
class Row:
    """A mistake: `call` must raise `error`."""

    name: str
    error: type[ts.TesseraError]
    call: Callable[[], Any]


ROWS: list[Row] = []


def row(name: str, error: type[ts.TesseraError], call: Callable[[], Any]) -> None:
    ROWS.append(Row(name, error, call))


@contextmanager
def environment(**values: str) -> Iterator[None]:
    """Sets environment variables, and restores them at the end."""
    before = {k: os.environ.get(k) for k in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for k, v in before.items():
            if v is None:
                del os.environ[k]
            else:
                os.environ[k] = v


def split(layout: str | None = None, mesh: dist.Mesh = MESH) -> ts.Tensor:
    """Ones [8, 4] on a mesh."""
    return ts.tensor(ONES, mesh=mesh, layout=layout)
