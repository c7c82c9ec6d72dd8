"""Redistribution: the collectives from one layout to another, and the bytes that each sends.

`steps_between(src, dst)` is a list of steps, each one collective with the type of its result. It is
the whole of Tessera's communication: nothing else moves data (a collective is a change of layout).

>>> from tessera.core.mesh import Mesh
>>> from tessera.core.layout import parse_type
>>> mesh = Mesh(("dp", "tp"), shape={"dp": 2, "tp": 4})
>>> a, b = (parse_type(s, mesh) for s in ("f32[8@dp, 16384@tp]", "f32[8@dp, 16384]"))
>>> [(s.kind, s.axes, s.wire_bytes // 1024) for s in steps_between(a, b)]
[('all_gather', ('tp',), 192)]
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import lru_cache

from .errors import LayoutError, MeshError, ShapeError
from .layout import Factor, TensorType, same_type, shard_count, unknown_axis, without
from .layout_search import cheapest
from .topology import Topology

# The collectives, by their change of one axis.
KINDS = ("all_gather", "all_reduce", "reduce_scatter", "all_to_all", "shard", "to_partial")


@dataclass(frozen=True, slots=True)
class Step:
    """One collective: `kind` over `axes`, from dim `dim` to dim `to_dim` (-1: none)."""

    kind: str
    axes: tuple[str, ...]
    dim: int
    to_dim: int
    type: TensorType
    wire_bytes: int


def wire_bytes(kind: str, axes: Iterable[str], src: TensorType, dst: TensorType) -> int:
    """Returns the bytes that one place of the mesh receives in a bandwidth-optimal form of the
    collective; 0 along an axis in time, whose places are one device."""
    space = in_space(axes, src)
    return _received(kind, shard_count(space, src.sizes), src.local_bytes, dst.local_bytes,
                     travelling(src, axes))  # fmt: skip


def in_space(axes: Iterable[str], t: TensorType) -> tuple[str, ...]:
    """Returns those of `axes` along which the mesh of `t` has devices."""
    time = t.mesh.time if t.mesh is not None else ()
    return tuple(a for a in axes if a not in time)


def device_wire_bytes(kind: str, axes: Iterable[str], src: TensorType, dst: TensorType) -> int:
    """Returns the bytes that one device receives. On a folded mesh it combines its own places
    first, and sends the result between devices.

    >>> from tessera.core.mesh import Mesh
    >>> from tessera.core.layout import parse_type
    >>> mesh = Mesh.parse("dp=2 tp=4").fold(onto="dp=1,tp=2")
    >>> src, dst = (parse_type(text, mesh) for text in ("f32[16@dp] +tp", "f32[16@dp]"))
    >>> wire_bytes("all_reduce", ("tp",), src, dst)
    48
    >>> device_wire_bytes("all_reduce", ("tp",), src, dst)
    64
    """
    if src.mesh is None or src.mesh.onto is None:
        return wire_bytes(kind, axes, src, dst)
    n = shard_count(in_space(axes, src), src.mesh.physical.sizes)
    return _received(kind, n, src.device_bytes, dst.device_bytes, travelling_of_device(src, axes))


def _received(kind: str, n: int, held: int, result: int, summed: int) -> int:
    """Returns the bytes that one of `n` devices receives; it holds `held` bytes before, `result`
    after, and `summed` of a sum."""
    match kind:
        case "all_gather":
            return (n - 1) * held
        case "reduce_scatter":
            return (n - 1) * result
        case "all_reduce":
            return 2 * (n - 1) * summed // n
        case "all_to_all":
            return (n - 1) * held // n
        case "permute" | "broadcast":
            return held if n > 1 else 0
        case _:
            return 0


def travelling(t: TensorType, axes: Iterable[str]) -> int:
    """Returns the bytes of a block in an all_reduce. A maximum or minimum of floats is sent as
    32-bit integers in the order of the floats, as transports do not handle NaN."""
    wide = t.dtype.is_float and any(k != "sum" for a, k in t.partial if a in set(axes))
    return t.local_bytes // t.dtype.bytes * max(4, t.dtype.bytes) if wide else t.local_bytes


def travelling_of_device(t: TensorType, axes: Iterable[str]) -> int:
    """Returns the same for a device, which has combined its places along `axes`."""
    return travelling(t, axes) * t.places_held(without=axes)


def steps_between(
    src: TensorType, dst: TensorType, in_order: bool = False, topology: Topology | None = None
) -> list[Step]:
    """Returns the steps from `src` to `dst`: same shape and dtype, any two layouts of one mesh.

    They are the way with the fewest bytes received by a device, or with the least time on
    `topology` (core/layout_search.py). With `in_order` partial sums are completed axis by axis in
    one order (the last name first), whatever the target: this fixes the order of additions, and may
    send more. Raises ShapeError, MeshError or LayoutError if there is no such change of layout.
    """
    if src is dst:
        return []
    if src.shape != dst.shape or src.dtype is not dst.dtype:
        raise ShapeError(
            "redistribute: shape and dtype must stay",
            rows=[("from", src), ("to", dst)],
            fix="reshape or cast first",
        )
    if src.mesh is None and dst.mesh is not None:
        src = src.on(dst.mesh)
    if src.mesh != dst.mesh:
        raise MeshError(
            "redistribute: the two layouts are on different meshes",
            rows=[
                ("from", f"{src} on {src.mesh and src.mesh.text_beside(dst.mesh)}"),
                ("to", f"{dst} on {dst.mesh and dst.mesh.text_beside(src.mesh)}"),
            ],
            fix="build both on one mesh, or outside of a function: dist.place(x, mesh=...)",
        )
    return list(_steps(src, dst, in_order, topology))


@lru_cache(maxsize=1 << 14)
def _steps(
    src: TensorType, dst: TensorType, in_order: bool, topology: Topology | None
) -> tuple[Step, ...]:
    """Returns the steps from `src` to `dst` with the received bytes: the cheapest way to `dst`
    without its newly opened sums, then the opening of these."""
    if not src.size:  # dims of size 0 are never split, so they are planned as dims of size 1
        ones = [_with_none(t, src.shape, 1) for t in (src, dst)]
        return tuple(
            replace(s, type=_with_none(s.type, src.shape, 0), wire_bytes=0)
            for s in _steps(*ones, in_order, topology)
        )
    opened = [p for p in dst.partial if p not in src.partial]
    steps, now = [], src
    time = {*src.mesh.time} if src.mesh is not None else set()
    gone = (p for p in src.partial if p not in dst.partial)
    late = tuple(a for a, kind in gone if a in time and kind == "sum")
    if late and src.split_axes == dst.split_axes:  # free: a device sums its own turns first
        now = completed(src, late)
        steps.append(Step("all_reduce", late, -1, -1, now, 0))
    shut = dst.with_partial(tuple(p for p in dst.partial if p in src.partial))
    for m in cheapest(now, shut, in_order, topology):
        received = wire_bytes(m.kind, m.axes, now, m.type)
        now = m.type
        steps.append(Step(*m, received))
    for axis, kind in opened:
        if kind != "sum":
            raise LayoutError(
                f"redistribute: a value cannot be made partial under {kind!r}",
                rows=[("from", src), ("to", dst)],
                fix="only a sum can be opened",
            )
        now = now.with_partial((*now.partial, (axis, kind)))
        steps.append(Step("to_partial", (axis,), -1, -1, now, 0))
    if steps and same_type(steps[-1].type, dst):  # `rest` is taken from the target
        steps[-1] = replace(steps[-1], type=dst)
    return tuple(steps)


def _with_none(t: TensorType, shape: Iterable[int], size: int) -> TensorType:
    """Returns `t` with dims of `size` where `shape` is 0."""
    return t.with_dims(d if n else (Factor(size),) for d, n in zip(t.dims, shape, strict=True))


def completed(t: TensorType, axes: Iterable[str]) -> TensorType:
    """Returns `t` with its partial values over `axes` reduced. Raises LayoutError for an unknown
    axis."""
    gone = tuple(axes)
    for axis in gone:
        if axis not in t.sizes:
            raise unknown_axis(axis, t.mesh)
    return t.with_partial(tuple(p for p in t.partial if p[0] not in gone))


def gathered(t: TensorType, axes: Iterable[str]) -> TensorType:
    """Returns `t` with no dim split over `axes`. Raises LayoutError for an unknown axis."""
    gone = tuple(axes)
    for axis in gone:
        if axis not in t.sizes:
            raise unknown_axis(axis, t.mesh)
    return t.with_dims(without(d, gone, t.sizes) for d in t.dims)
