"""What is a row of the table of peers? An op of PyTorch, and how to say the same to us.

`row("sum", lambda x, dim=None, keepdim=False: ts.sum(x, dim, keepdim))` in `table.py` is all that
an op needs: the harness (`cases.py`) hands the function each of PyTorch's own samples of that op,
tensors as ours, and holds what it returns, and its gradient, against what PyTorch gives. What still
differs or is refused goes to `exceptions.py`, with the reason.
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
    """Raised by a row's call: what the sample asks for, we offer under no name."""


@dataclass(frozen=True)
class Row:
    """`op` is the OpInfo's name, with `.variant` where it has one.

    `call` takes what a sample holds: tensors as ours, the rest as it is, and returns a Tensor or
    several, in PyTorch's order. A sample is left out that names an argument of `lacks` other than
    as None (or False), and one for which `call` raises NotOffered: we have no such thing. `dtypes`
    are those that are tried where PyTorch has samples of them. `loose` multiplies the tolerance,
    for results of many roundings. `grad` says whether gradients are compared, `same` which of the
    results, by place, are compared at all.
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
    """Samples of `op` that we refuse. `says` stands in the error's text, `why` for the reader.

    Every entry must be met by a sample: one that is met by none is stale, and fails the test.
    """

    op: str
    says: str
    why: str


@dataclass(frozen=True)
class Differs:
    """Samples of `op` for which our result differs on purpose: those that `when` picks.

    `when(sample)` sees PyTorch's sample. At least one of them must differ, unless `always` is
    False: what PyTorch gives depends on the processor then. `part` is "value", "dtype" or
    "gradient".
    """

    op: str
    part: str
    why: str
    when: Callable[[Any], bool] = lambda sample: True
    always: bool = True
