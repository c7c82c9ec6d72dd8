"""Equations of a JAX function from its jaxpr, with calls and short scans inlined."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend import core as jex

from ..lang.autodiff.jax_functions import Equation, Equations, Operand
from .jax_private import scan_counts

MAX_UNROLLED_STEPS = 64  # longest loop that is unrolled
# Params that hold the jaxpr of a called function.
_CALLS = ("jaxpr", "call_jaxpr", "fun_jaxpr")


def equations_of(
    fn: Callable[..., list[Any]], types: Sequence[tuple[tuple[int, ...], Any]]
) -> Equations:
    """Returns the equations of `fn` for arguments of these (shape, NumPy dtype). `fn` returns a
    list."""
    closed = jax.make_jaxpr(fn)(*(jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in types))
    rows: list[Equation] = []
    outs = _Writer(rows, len(types)).call(closed, list(range(len(types))))
    return Equations(rows, outs)


class _Writer:
    """Appends equations to `rows`. Values are numbers; the next free one is `free`."""

    def __init__(self, rows: list[Equation], free: int) -> None:
        self.rows, self.free = rows, free

    def add(self, name: str, args: list[Operand], params: dict[str, Any], count: int) -> list[int]:
        outs = list(range(self.free, self.free + count))
        self.free += count
        self.rows.append(Equation(name, args, params, outs))
        return outs

    def call(self, closed: Any, args: Sequence[Operand]) -> list[Operand]:
        """Returns the results of a traced function of these operands."""
        jaxpr = closed.jaxpr
        of: dict[Any, Operand] = dict(zip(jaxpr.invars, args, strict=True))
        of |= {v: np.asarray(c) for v, c in zip(jaxpr.constvars, closed.consts, strict=True)}

        def read(v: Any) -> Operand:
            if not isinstance(v, jex.Literal):
                return of[v]
            kind: Any = v.aval
            return np.asarray(v.val, kind.dtype)

        for e in jaxpr.eqns:
            ins = [read(v) for v in e.invars]
            inner = next((e.params[k] for k in _CALLS if k in e.params), None)
            if e.primitive.name == "cond":
                # All branches are computed, and one is selected: equations have no control flow.
                every = [self.call(b, ins[1:]) for b in e.params["branches"]]
                outs = [self.add("select_n", [ins[0], *row], {}, 1)[0] for row in zip(*every)]
            elif e.primitive.name == "scan" and e.params["length"] <= MAX_UNROLLED_STEPS:
                outs = self.unrolled_scan(ins, [v.aval.shape for v in e.invars], **e.params)
            elif inner is not None and e.primitive.name not in ("scan", "while", "pallas_call"):
                closed_inner = inner if hasattr(inner, "consts") else jex.ClosedJaxpr(inner, ())
                outs = self.call(closed_inner, ins)
            else:
                outs = self.add(e.primitive.name, ins, dict(e.params), len(e.outvars))
            of |= dict(zip(e.outvars, outs, strict=True))
        return [read(v) for v in jaxpr.outvars]

    def unrolled_scan(
        self, args: Sequence[Operand], shapes: Sequence[tuple[int, ...]], *, jaxpr: Any,
        length: int, reverse: bool, **params: Any,
    ) -> list[Operand]:  # fmt: skip
        """Returns the results of a `scan`, unrolled."""
        num_consts, num_carry = scan_counts(params)
        start = num_consts + num_carry
        carry = list(args[num_consts:start])
        rows: list[list[Operand]] = [[] for _ in jaxpr.jaxpr.outvars[num_carry:]]
        for i in reversed(range(length)) if reverse else range(length):
            own = [self._row(x, s, i) for x, s in zip(args[start:], shapes[start:], strict=True)]
            outs = self.call(jaxpr, [*args[:num_consts], *carry, *own])
            carry = outs[:num_carry]
            for of, row in zip(rows, outs[num_carry:], strict=True):
                of.append(row)
        stacks = [self.add("stack", of[::-1] if reverse else of, {"axis": 0}, 1)[0] for of in rows]
        return [*carry, *stacks]

    def _row(self, x: Operand, shape: tuple[int, ...], i: int) -> Operand:
        if not isinstance(x, int):
            return x[i]
        bounds = {"start_indices": (i, *(0 for _ in shape[1:])),
                  "limit_indices": (i + 1, *shape[1:]), "strides": None}  # fmt: skip
        (row,) = self.add("slice", [x], bounds, 1)
        return self.add("squeeze", [row], {"dimensions": (0,)}, 1)[0]
