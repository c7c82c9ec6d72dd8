"""Partial arguments of ops: the same results as with complete arguments.

For every row of the table, each argument comes as partial sums, maxima or minima on different
devices, none equal to the whole. So an op that passes a partial argument on without being linear in
it gives a wrong result.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from tessera.core.dtypes import dtype_of, f32
from tessera.core.layout import Factor, TensorType
from tessera.ir.graph.build import Builder
from tessera.ir.graph.node import Graph, Node
from tessera.ir.graph.oracle import evaluate, evaluate_blocks
from tessera.ir.graph.verify import verify
from tessera.ops.op import OPS, Attrs, Inferred
from tessera.passes.differentiate import differentiate
from tests.core.table import ROWS, Row
from tests.core.test_ops import MESH, close, every_row, outputs, types_of

Array = np.ndarray[Any, Any]
KINDS = ("sum", "max", "min")


def parts_of(x: Array, kind: str, n: int) -> Array:
    """Returns [n, ...] parts that reduce to exactly `x`, all different from `x` and from the
    identity element."""
    scattered = np.random.default_rng(x.size).integers(0, n, x.shape)
    turn = (scattered + np.arange(n).reshape(n, *(1,) * x.ndim)) % n
    if kind == "sum":
        # Multiples of a power of two, so that sums of floats are exact.
        step = 1 if x.dtype.kind in "iu" else 0.5
        apart = np.asarray([step * (i + 1) for i in range(n - 1)] + [-step * n * (n - 1) / 2])
        parts = np.where(turn == 0, x, 0) + apart[turn]
    else:
        away = np.asarray(turn * (1 if kind == "min" else -1))
        parts = x + away
        if x.dtype.kind in "iu":
            info = np.iinfo(x.dtype)
            parts = np.clip(x.astype(np.int64) + away, info.min, info.max)
    return parts.astype(x.dtype)


def folding(b: Builder, x: Array, kind: str, axis: str, split: int | None) -> tuple[Node, Array]:
    """Returns a node of the value `x`, partial over `axis`, with dim `split` over the other axis,
    and its input."""
    n = MESH.sizes[axis]
    (other,) = (a for a in MESH.axes if a != axis)
    dims = [(Factor(m, (other,) if i == split else ()),) for i, m in enumerate(x.shape)]
    t = TensorType(dtype_of(x.dtype), ((Factor(n, (axis,)),), *dims), (), MESH)
    node = b(kind, b.input(t), dims=(0,))
    assert node.type.partial == ((axis, kind),)
    return node, parts_of(x, kind, n)


def exact(row: Row) -> list[Array]:
    """The row's arguments with floats rounded to sixteenths, so that sums of their parts are
    exact."""
    return [np.round(x * 16) / 16 if x.dtype == np.float32 else x for x in row.ins]


def one_partial(
    row: Row, at: int, kind: str, axis: str, split: int | None, gradient: bool = False
) -> tuple[Graph, list[Array]]:
    """Returns the graph of `row` with argument `at` partial, and its inputs."""
    b = Builder(row.op)
    args, values = [], []
    for i, (t, x) in enumerate(zip(types_of(row, MESH), exact(row), strict=True)):
        if i == at:
            node, x = folding(b, x, kind, axis, split)
        else:
            node = b.input(t)
        args.append(node)
        values.append(x)
    return b.graph(wanted(b, row, args, gradient)), values


def wanted(b: Builder, row: Row, args: Sequence[Node], gradient: bool) -> list[Node]:
    """The results, or the gradients of the first result with respect to every float argument."""
    outs = outputs(b, row, list(args))
    if not gradient:
        return outs
    by = [a for a in args if a.type.dtype.is_float]
    out = outs[0]
    one = b("full", dtype=out.type.dtype, shape=out.type.shape, value=1.0)
    zero = [b("full", dtype=f32, shape=a.type.shape, value=0.0) for a in by]
    found = differentiate(b, [(out, one)], by)
    return [z if g is None else g for g, z in zip(found, zero, strict=True)]


def whole(row: Row, gradient: bool) -> list[Array]:
    b = Builder(row.op)
    return evaluate(
        b.graph(wanted(b, row, [b.input(t) for t in types_of(row)], gradient)), exact(row)
    )


def cases(row: Row) -> list[tuple[int, str, str, int | None]]:
    """Returns (argument, kind, axis, the dim that the other axis splits) for each case."""
    return [
        (i, kind, axis, split)
        for i, x in enumerate(row.ins)
        if x.dtype != np.bool_
        for kind in KINDS
        if kind == "sum" or x.dtype.kind != "c"
        for axis, split in (("tp", None), ("dp", 0))
        if split is None or (x.ndim and kind == "sum")
    ]


@every_row
def test_a_partial_argument_gives_what_the_complete_one_gives(row: Row) -> None:
    want = whole(row, False)
    for case in cases(row):
        graph, values = one_partial(row, *case)
        verify(graph)
        for got, value in zip(evaluate_blocks(graph, values, padding=np.nan), want, strict=True):
            if got.dtype.itemsize < 4 and got.dtype.kind not in "biu":
                # Parts are larger than their sum, and narrow floats round each part.
                got, value = (np.asarray(x, np.float32) / 4096 for x in (got, value))
            close(got, value, 1e-4)


smooth = [r for r in ROWS if r.smooth and any(x.dtype == np.float32 for x in r.ins)]


@pytest.mark.parametrize("row", smooth, ids=lambda r: r.name)
def test_gradients_with_a_partial_argument(row: Row) -> None:
    want = whole(row, True)
    for at, kind, axis, split in cases(row):
        if axis == "dp" or split is not None:
            continue
        graph, values = one_partial(row, at, kind, axis, split, gradient=True)
        for got, value in zip(evaluate_blocks(graph, values, padding=np.nan), want, strict=True):
            close(got, value, 1e-3)


# These are linear, but complete their argument first, since no program needs more.
LINEAR = {
    ("bitcast", 0), ("straight_through", 0), ("shift_left", 0), ("solve", 1),
    ("triangular_solve", 1), ("attention", 2), ("attention_grad", 3),
    ("contract_fp8", 2),  # a scale that is divided out again
}  # fmt: skip


def forged(op: str, at: int) -> Any:
    """The rule of `op`, except that a partial argument `at` passes through without completion."""
    honest = OPS[op].rule

    def rule(ins: tuple[TensorType, ...], attrs: Attrs) -> Inferred:
        got = honest(ins, attrs)
        free = {a for t in got.outs for a in (*t.split_axes, *t.partial_axes)}
        more = tuple(p for p in ins[at].partial if p[0] not in free)
        wants = list(got.wants)
        wants[at] = wants[at].with_partial((*wants[at].partial, *more))
        outs = tuple(t.with_partial((*t.partial, *more)) for t in got.outs)
        return Inferred(tuple(wants), outs, got.reduces)

    return rule


def test_every_wrong_declaration_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each op is declared to pass on the partial argument that it completes. The test above must
    fail then, except for the arguments in LINEAR."""
    unseen: set[tuple[str, int]] = set()
    seen: set[tuple[str, int]] = set()
    for row in ROWS:
        want = whole(row, False)
        for at, kind, axis, split in cases(row):
            if (kind, axis, split) != ("sum", "tp", None):
                continue
            graph, _ = one_partial(row, at, kind, axis, None)
            node = [n for n in graph.nodes if n.op == row.op][-1]
            if node.args[at].type.partial:
                continue  # the op already passes it on
            with monkeypatch.context() as patch:
                patch.setitem(
                    OPS, row.op, dataclasses.replace(OPS[row.op], rule=forged(row.op, at))
                )
                graph, values = one_partial(row, at, kind, axis, None)
                try:
                    for got, w in zip(evaluate_blocks(graph, values), want, strict=True):
                        close(got, w, 1e-4)
                except Exception:  # a wrong result, or an error of any kind
                    seen.add((row.op, at))
                else:
                    unseen.add((row.op, at))
    assert unseen - seen == LINEAR
    assert len(seen) > 50
