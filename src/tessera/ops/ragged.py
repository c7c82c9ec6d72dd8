"""Grouped matrix products (ragged dot): each run of rows times a matrix of its own, and its
gradient.

Rows [a, j, r, ...] are sorted by run; `counts` [a, j, e] is the number of rows of each run; rows
after the last run count as zeros. `j` indexes the devices of the matrices [j, e, d, h], `a` the
devices of the rows. The dims of rows and runs are whole, all others may be split.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..core.errors import ShapeError
from ..core.layout import TensorType
from ..core.tensor_checks import integers, one_dtype
from .elementwise import need
from .index_string import Index, propagate
from .op import Array, Attrs, Build, Call, Inferred, Op, define

WHOLE = frozenset("re")
INDEX = {
    False: Index((tuple("ajrd"), tuple("jedh"), tuple("aje")), tuple("ajrh")),
    True: Index((tuple("ajrh"), tuple("jedh"), tuple("aje")), tuple("ajrd")),
}
BY_RUN = Index((tuple("ajrd"), tuple("ajrh"), tuple("aje")), tuple("jedh"))


def _inferred(name: str, index: Index, ins: tuple[TensorType, ...]) -> Inferred:
    need(name, ins[:2], ("float",))
    one_dtype(name, ins[:2])
    integers(name, "counts", ins[2])
    ranks = tuple(len(letters) for letters in index.args)
    sizes: dict[str, int] = {}
    fits = tuple(t.rank for t in ins) == ranks and all(
        sizes.setdefault(k, n) == n
        for letters, t in zip(index.args, ins, strict=True)
        for k, n in zip(letters, t.shape, strict=True)
    )
    if not fits:
        raise ShapeError(
            f"{name}: the shapes do not fit",
            rows=[(f"arg {i}", t) for i, t in enumerate(ins)],
            fix=f"give {index.text()}",
        )
    given = (*ins[:2], ins[2].complete())
    return propagate(name, index, given, ins[0].dtype, linear="each", whole=WHOLE)


def _flops(ins: tuple[TensorType, ...], outs: tuple[TensorType, ...], attrs: Attrs) -> int:
    return 2 * ins[0].size * outs[0].shape[-1]


def _dot_rule(ins: tuple[TensorType, ...], attrs: Attrs) -> Inferred:
    return _inferred("ragged_dot", INDEX[attrs["turned"]], ins)


def _dot_local(c: Call, x: Array, w: Array, counts: Array) -> Array:
    return c.xp.ragged_dot(x, w, counts, c.attrs["turned"], c.out.dtype)


def _dot_grad(b: Build, n: Any, g: Any) -> Sequence[Any]:
    (x, w, counts), turned = n.args, n.attrs["turned"]
    sides = (g, x) if turned else (x, g)
    return [
        b("ragged_dot", g, w, counts, turned=not turned),
        b("ragged_contract", *sides, counts),
        None,
    ]


# Each row of run e times w[e], or its transpose (`turned`).
ragged_dot = define(
    Op("ragged_dot", _dot_rule, _dot_local, _dot_grad, flops=_flops, attrs="turned",
       memory="product", invariance="sums", linear="alone")
)  # fmt: skip


def _contract_rule(ins: tuple[TensorType, ...], attrs: Attrs) -> Inferred:
    return _inferred("ragged_contract", BY_RUN, ins)


def _contract_local(c: Call, x: Array, y: Array, counts: Array) -> Array:
    return c.xp.ragged_contract(x, y, counts, c.out.dtype)


def _contract_grad(b: Build, n: Any, g: Any) -> Sequence[Any]:
    x, y, counts = n.args
    return [
        b("ragged_dot", y, g, counts, turned=True),
        b("ragged_dot", x, g, counts, turned=False),
        None,
    ]


# For each run the product of its rows in x, transposed, with its rows in y: a sum over rows.
ragged_contract = define(
    Op("ragged_contract", _contract_rule, _contract_local, _contract_grad, flops=_flops,
       memory="product", invariance="sums", linear="alone")
)  # fmt: skip
