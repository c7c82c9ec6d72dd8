"""Rows of the PyTorch table: an op of PyTorch, with the equal call of Tessera.

`row("sum", lambda x, dim=None, keepdim=False: ts.sum(x, dim, keepdim))` in `table.py` is all that
an op needs: the harness (`cases.py`) calls the function with each of PyTorch's own samples of that
op, with Tessera's tensors, and compares its result and gradient with PyTorch's. Samples that differ
or are refused are in `exceptions.py`, with the reason.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

FLOATS = ("f32", "bf16", "f16")
WHOLE = ("i32", "u8", "i8")
NUMBERS = (*FLOATS, *WHOLE)
ALL = (*NUMBERS, "bool")


class NotOffered(Exception):
    """Raised by a row's call if Tessera has no equivalent of the sample."""


@dataclass(frozen=True)
class Row:
    """`op` is the OpInfo's name, followed by `.variant` if it has one.

    `call` takes a sample's arguments, with Tessera's tensors, and returns a Tensor or several in
    PyTorch's order. A sample is left out if it sets an argument of `lacks` to anything but None (or
    False), or if `call` raises NotOffered. `dtypes` are tested if PyTorch has samples of them.
    `loose` multiplies the tolerance, for results with many roundings. `grad` says whether gradients
    are compared, `same` lists the indices of the results that are compared.
    """

    op: str
    call: Callable[..., Any]
    dtypes: tuple[str, ...] = ALL
    lacks: tuple[str, ...] = ()
    loose: float = 1.0
    grad: bool = True
    same: tuple[int, ...] | None = None


ROWS: list[Row] = []


def row(op: str, call: Callable[..., Any], **rest: Any) -> None:
    """Adds an op to the table."""
    ROWS.append(Row(op, call, **rest))


@dataclass(frozen=True)
class Refused:
    """Samples of `op` that are refused. `says` is in the error's text, `why` is for the reader.

    A sample must meet each entry: a stale entry fails the test.
    """

    op: str
    says: str
    why: str


@dataclass(frozen=True)
class Differs:
    """Samples of `op` with an intended difference: those for which `when` is true.

    `when(sample)` gets PyTorch's sample. At least one of them must differ, unless `always` is
    False, for results of PyTorch that depend on the processor. `part` is "value", "dtype" or
    "gradient".
    """

    op: str
    part: str
    why: str
    when: Callable[[Any], bool] = lambda sample: True
    always: bool = True
