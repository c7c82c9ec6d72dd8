"""Layouts of single weights: a local search for a faster step, in place of a named strategy."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace

from ..core.errors import TesseraError
from ..lang.parallel.builtin_strategies import Rule
from .candidates import Candidate, Row


def layouts(
    price: Callable[[Candidate], Row],
    start: Row,
    weights: Mapping[str, tuple[int, int | None]],
    stop: Callable[[], bool] = lambda: False,
) -> Row:
    """Returns the best row that a change of one weight's split dim at a time leads to, from `start`
    on. `weights` has the number of dims and the split dim of each. Faster is better; at the same
    time fewer bytes, then less memory."""
    now = {name: dim for name, (_, dim) in weights.items()}
    best_row, changed = start, True
    while changed:
        changed = False
        for name, (rank, _) in weights.items():
            for dim in [None, *range(rank)]:
                if dim == now[name] or stop():
                    continue
                rules = rules_of({**now, name: dim}, weights)
                try:
                    row = price(replace(start.candidate, rules=rules))
                except TesseraError:  # the dim does not divide, or no op takes it
                    continue
                if row.fits and better(row, best_row):
                    best_row, now[name], changed = row, dim, True
    return best_row


def better(a: Row, b: Row) -> bool:
    if abs(a.step_s - b.step_s) > 1e-3 * b.step_s:
        return a.step_s < b.step_s
    return (a.wire_bytes, a.memory_bytes) < (b.wire_bytes, b.memory_bytes)


def rules_of(
    dims: Mapping[str, int | None], weights: Mapping[str, tuple[int, int | None]]
) -> tuple[Rule, ...]:
    """Returns rules of tensor parallelism that split exactly these dims, counted from the end."""
    return tuple(
        (f"^{re.escape(n)}$", dim - weights[n][0]) for n, dim in dims.items() if dim is not None
    )
