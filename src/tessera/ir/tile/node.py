"""Kernels as nodes of graphs: the ops `kernel`, and `mesh_kernel` for a kernel that puts.

A dim of a reference that is a plain name, such as M, is a letter of the op's index (ops/user.py).
`split` names the letters that devices may split: then each device runs the kernel on its blocks. A
`mesh_kernel` takes values that each device has for itself; `axes` are the axes of the program's
mesh that are those of the kernel's mesh, in their order. It is a collective.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NoReturn

from ...core.errors import DTypeError, GraphError, LayoutError, ShapeError, UsageError
from ...core.layout import TensorType
from ...ops.index_string import common_mesh
from ...ops.op import Array, Attrs, Build, Call, Inferred, Op, define
from ...ops.user import Groups, split_by_letter
from .body import Ref
from .cost import cost
from .index import NAME
from .kernel import Kernel, with_sizes


def _refs(k: Kernel, kind: str) -> list[Ref]:
    return [r for r in k.refs if r.kind == kind]


@lru_cache(maxsize=1024)
def groups_of(k: Kernel) -> tuple[Groups, dict[str, int]]:
    """The letters of each input and output, and their sizes. A dim that is no plain name has a
    letter of its own."""
    sizes: dict[str, int] = {}

    def letters(r: Ref) -> tuple[str, ...]:
        dims = dict(k.dims)
        named = [d.text if d.text in dims else f"{r.name}.{i}" for i, d in enumerate(r.shape)]
        sizes.update(zip(named, k.shape(r), strict=True))
        return tuple(n if named.count(n) == 1 else f"{r.name}.{i}" for i, n in enumerate(named))

    sides = (tuple(letters(r) for r in _refs(k, kind)) for kind in ("in", "out"))
    return Groups(*sides), sizes


def on_block(k: Kernel, blocks: Sequence[tuple[int, ...]]) -> Kernel:
    """The kernel at the sizes of a device's blocks, one for each input. Raises ShapeError if tiles
    do not divide them."""
    groups, sizes = groups_of(k)
    found = {n: s for g, block in zip(groups.args, blocks) for n, s in zip(g, block, strict=True)}
    new = {n: s for n, s in found.items() if NAME.fullmatch(n) and s != sizes[n]}
    return with_sizes(k, **new) if new else k


def _checked(k: Kernel, ins: Sequence[TensorType]) -> None:
    refs = _refs(k, "in")
    rows: list[tuple[str, object]] = [(r.name, f"{r.dtype}{list(k.shape(r))}") for r in refs]
    rows += [(f"arg {i}", t) for i, t in enumerate(ins)]
    if len(refs) != len(ins):
        what = f"{k.name}: {len(ins)} tensors for {len(refs)} inputs"
        raise UsageError(what, rows=rows, fix="give one tensor for each input")
    for r, t in zip(refs, ins, strict=True):
        if t.shape != k.shape(r):
            fix = "give the kernel the sizes of its tensors: with_sizes(kernel, ...)"
            raise ShapeError(f"{k.name}: {r.name} has another shape", rows=rows, fix=fix)
        if t.dtype is not r.dtype:
            fix = f"cast it, or give the reference the dtype {t.dtype}"
            raise DTypeError(f"{k.name}: {r.name} has another dtype", rows=rows, fix=fix)


def _rule(ins: tuple[TensorType, ...], attrs: Attrs) -> Inferred:
    _checked(attrs["kernel"], ins)
    return _split(ins, attrs)


def _split(ins: tuple[TensorType, ...], attrs: Attrs) -> Inferred:
    k: Kernel = attrs["kernel"]
    groups, sizes = groups_of(k)
    whole = sizes.keys() - set(attrs.get("split", ()))
    # A dim of a shape that has no letter, as C//block, would stay whole.
    sides = ((groups.args, _refs(k, "in")), (groups.outs, _refs(k, "out")))
    for g, r in (pair for gs, refs in sides for pair in zip(gs, refs, strict=True)):
        whole |= {n for letter, e in zip(g, r.shape, strict=True) if letter != e.text
                  for n in e.names}  # fmt: skip
    dtypes = tuple(r.dtype for r in _refs(k, "out"))
    got = split_by_letter(k.name, groups, sizes, dtypes, set(whole), ins)
    on_block(k, [t.local_shape for t in got.wants])
    return got


def _mesh_rule(ins: tuple[TensorType, ...], attrs: Attrs) -> Inferred:
    """The rule of a `mesh_kernel`: blocks of each device along `axes`, and results of each device.
    Other axes may split the dims that `split` names.

    Raises LayoutError if `axes` split an operand, or the mesh is folded or has other sizes."""
    k: Kernel = attrs["kernel"]
    _checked(k, ins)
    mesh, axes = common_mesh(k.name, ins), attrs["axes"]
    sizes = None if mesh is None else tuple(mesh.sizes.get(a) for a in axes)
    want = tuple(n for _, n in k.mesh)
    rows = [(f"arg {i}", t) for i, t in enumerate(ins)]
    if mesh is None or sizes != want:
        what = f"{k.name}: it runs on {k.mesh}, not along {', '.join(axes)} of {mesh}"
        raise LayoutError(what, rows=rows, fix="give the kernel the sizes of these axes")
    if any(mesh.folds.get(a, 1) > 1 for a in axes) or any({*axes} & {*t.split_axes} for t in ins):
        fix = "call it in an @op.kernel, on a mesh that is not folded"
        raise LayoutError(f"{k.name}: each device puts its own blocks", rows=rows, fix=fix)
    varying = tuple(dict.fromkeys((*(a for t in ins for a in t.varying), *axes)))
    got = _split(tuple(t.with_varying(()).on(mesh) for t in ins), attrs)
    wants = tuple(w.with_varying(t.varying) for w, t in zip(got.wants, ins, strict=True))
    return Inferred(wants, tuple(t.with_varying(varying) for t in got.outs))


def _local(c: Call, *args: Array) -> Any:
    k = on_block(c.attrs["kernel"], [tuple(x.shape) for x in args])
    outs = c.xp.kernel(k, tuple(c.attrs.get("axes", ())), args)
    return outs if len(outs) > 1 else outs[0]


def _flops(ins: tuple[TensorType, ...], outs: tuple[TensorType, ...], attrs: Attrs) -> int:
    return cost(on_block(attrs["kernel"], [t.shape for t in ins])).flops


def _grad(b: Build, n: Any, g: Any) -> NoReturn:
    name = n.attrs["kernel"].name
    fix = "give the kernel one: @ts.kernel(..., grad=), or write ts.custom_gradient around it"
    raise GraphError(f"{name}: a kernel has no gradient by itself", fix=fix, at=n.loc or None)


define(Op("kernel", _rule, _local, _grad, flops=_flops, attrs="kernel split", invariance="sums"))
mesh_kernel = define(
    Op("mesh_kernel", _mesh_rule, _local, _grad, flops=_flops, attrs="kernel axes split",
       varying=True, invariance="library")
)  # fmt: skip


def put_bytes(k: Kernel, ins: Sequence[TensorType]) -> int:
    """Bytes that one device puts to others."""
    return cost(on_block(k, [t.local_shape for t in ins])).put_bytes
