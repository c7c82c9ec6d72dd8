"""Does an op keep the blocks of a batch's rows apart? Where it could run on blocks that lie on
devices, each by itself, so its own rule of layouts says (ops/op.py)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache

from ...core.errors import TesseraError
from ...core.layout import Factor, TensorType, plain, ways
from ...core.mesh import Mesh
from ...ir.graph.node import Node
from ...ops.redistribute import NAMES

AXIS = "blocks"


def rows_of(a: TensorType, b: TensorType) -> int | None:
    """The first dim in which `b`, which is of more rows, is larger than `a`."""
    pairs = enumerate(zip(a.shape, b.shape, strict=True))
    return next((d for d, (x, y) in pairs if x != y), None)


def ways_cut(rows: Iterable[TensorType]) -> int:
    """Over how many devices these lie along their first dims."""
    cut = [(t.mesh, [a for f in t.dims[0] for a in f.axes]) for t in rows if t.rank]
    return max((ways(axes, mesh.sizes) for mesh, axes in cut if mesh is not None), default=1)


def in_blocks(a: TensorType, b: TensorType, devices: int, count: int) -> TensorType | None:
    """`b` with the rows in which it is larger than `a` in `count` blocks, which have rows of each
    of the `devices`; None where they do not divide."""
    t, dim = plain(b.dtype, b.shape, _mesh(count)), rows_of(a, b)
    if dim is None:
        return t
    if b.shape[dim] % (devices * count):
        return None
    cut: tuple[Factor, ...] = (Factor(b.shape[dim] // devices, (AXIS,)),)
    if devices > 1:
        cut = (Factor(devices), *cut)
    return t.with_dims((*t.dims[:dim], cut, *t.dims[dim + 1 :]))


def one_after_other(parts: Sequence[TensorType | None], dim: int) -> TensorType | None:
    """How the blocks lie in what joins `parts` along `dim`, which they have their rows in; None
    where they differ."""
    t = parts[0]
    if t is None or any(p is None or p.dims[dim] != t.dims[dim] for p in parts):
        return None
    joined = (Factor(len(parts)), *t.dims[dim]) if len(parts) > 1 else t.dims[dim]
    return t.with_dims((*t.dims[:dim], joined, *t.dims[dim + 1 :]))


def changes_layout(n: Node) -> bool:
    """Whether `n` is another layout of its argument, or takes one as an attribute."""
    return n.op in NAMES or any(isinstance(v, TensorType) for v in n.attrs.values())


def kept_apart(n: Node, m: Node, ins: Sequence[TensorType]) -> tuple[TensorType, ...] | None:
    """How the results of `m` lie where its arguments lie as `ins`, each block by itself; None where
    it is not so. `n` is the same for fewer rows."""
    try:
        found = m.kind.rule(tuple(ins), m.attrs)
    except TesseraError:
        return None
    if any(AXIS in t.split_axes and t != want for t, want in zip(ins, found.wants, strict=True)):
        return None
    for a, b, out in zip(n.types, m.types, found.outs, strict=True):
        at = [d for d, dim in enumerate(out.dims) if any(AXIS in f.axes for f in dim)]
        if a.shape != b.shape and (not at or a.shape[at[0]] == b.shape[at[0]]):
            return None
    return tuple(found.outs)


@lru_cache
def _mesh(count: int) -> Mesh:
    return Mesh((AXIS,), devices=count)
