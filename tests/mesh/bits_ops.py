"""The bits of every op in the table on every fold of one mesh.

test_bits.py runs this file in its own process, since `TESSERA_DETERMINISTIC` is read before the
engine starts. All rows with one kind of split are one program, so that each op has neighbours that
the compiler could fuse with it. With "few", one random row of each op.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from typing import Any

import tessera as ts
from tessera import dist
from tessera.core.context import settings
from tessera.core.dtypes import dtype_of
from tessera.core.layout import Factor, TensorType, plain
from tessera.ir.graph.build import Builder
from tessera.ir.graph.node import Graph
from tessera.lang.value.engine import engine
from tessera.ops.op import OPS
from tests.core.table import ROWS, Row

LOGICAL = dist.Mesh.parse("dp=2 tp=2")
FOLDS = ("dp=2,tp=2", "dp=1,tp=1")


def layout(t: TensorType, split: str) -> TensorType:
    """Returns `t` with its first dim split over dp and, if `split` is "both", its last over tp;
    blocks may be uneven."""
    dims = list(t.dims)
    if t.rank:
        dims[0] = (Factor(t.shape[0], ("dp",)),)
    if t.rank > 1 and split == "both":
        dims[-1] = (Factor(t.shape[-1], ("tp",)),)
    return t.with_dims(dims)


def program(
    rows: list[Row], split: str, mesh: Any
) -> tuple[Graph, list[Any], list[tuple[str, int]]]:
    """Returns a program of all `rows`, with other ops before and after each; the values of its
    inputs; and the name and number of results of each row."""
    b = Builder("ops", settings().program)
    assert b.options.mesh_invariant
    values, outs, counts = [], [], []
    for row in rows:
        args = []
        for i, x in enumerate(row.ins):
            t = layout(plain(dtype_of(x.dtype), x.shape, mesh), split)
            node = b.input(t, f"{row.name}.{i}")
            values.append(engine().place(x, t))
            if t.dtype.is_float and row.op not in ("cholesky", "triangular_solve", "eigh"):
                scale = b("full", dtype=t.dtype, shape=(), value=0.7)
                node = b("mul", node, scale)
            args.append(node)
        n = b(row.op, *args, **row.attrs)
        parts = [n] if len(n.types) == 1 and row.op != "unstack" else [
            b("item", n, index=i) for i in range(len(n.types))
        ]  # fmt: skip
        found = []
        for part in parts:
            found.append(part)
            if part.type.dtype.is_float:
                found.append(b("tanh", b("mul", part, part)))
                if part.type.rank:
                    found.append(b("sum", part, dims=(0,)))
        done = [b.redistribute(f, f.type.replicated(), "") for f in found]
        counts.append((row.name, len(done)))
        outs += done
    return b.graph(outs), values, counts


def results(rows: list[Row], split: str) -> Iterator[tuple[str, list[bytes]]]:
    """Yields each row's name and the bytes of its results on each fold."""
    every = []
    for onto in FOLDS:
        graph, values, counts = program(rows, split, LOGICAL.fold(onto))
        run = engine().compile(graph)
        outs = run(values, tuple(n.type for n in graph.inputs))
        every.append([engine().fetch(o, t).tobytes() for o, t in zip(outs, run.types, strict=True)])
    at = 0
    for name, count in counts:
        yield name, [b"".join(outs[at : at + count]) for outs in every]
        at += count


def one_of_each(rows: list[Row]) -> list[Row]:
    """Returns a random row of each op, drawn with a fixed seed."""
    of_op: dict[str, list[Row]] = {}
    for row in rows:
        of_op.setdefault(row.op, []).append(row)
    draw = random.Random(0)
    return [draw.choice(many) for many in of_op.values()]


def main(split: str, many: str) -> None:
    ts.seed(0)
    rows = [r for r in ROWS if r.ins and OPS[r.op].mesh_invariance]
    if many == "few":
        rows = one_of_each(rows)
    wrong = []
    for name, found in results(rows, split):
        if len(set(found)) > 1:
            wrong.append(f"{name}: {[found.index(f) for f in found]}")
    print(f"{len(rows)} rows split {split}, {len(FOLDS)} folds: {len(wrong)} differ")
    print(*wrong, sep="\n")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main(*sys.argv[1:])
