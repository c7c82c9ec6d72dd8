"""Which collectives turn one layout into another, and what does each one send?

`plan(src, dst)` is a list of steps, each one collective with the type it produces. This is the
whole of Tessera's communication: nothing else moves data (a collective is a change of layout).

>>> from tessera.core.mesh import Mesh
>>> from tessera.core.layout import parse_type
>>> mesh = Mesh(("dp", "tp"), shape={"dp": 2, "tp": 4})
>>> a, b = (parse_type(s, mesh) for s in ("f32[8@dp, 16384@tp]", "f32[8@dp, 16384]"))
>>> [(s.kind, s.axes, s.wire_bytes // 1024) for s in plan(a, b)]
[('all_gather', ('tp',), 192)]
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import combinations

from .errors import LayoutError, MeshError, ShapeError, fail
from .layout import Dim, TensorType, digits, dim_axes, same_type, unknown_axis, ways, without

# The cells of the table "from \\ to": what each one does to one axis.
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
    """Bytes that one device receives in a bandwidth-optimal form of the collective."""
    n = ways(axes, src.sizes)
    match kind:
        case "all_gather":
            return (n - 1) * src.local_bytes
        case "reduce_scatter":
            return (n - 1) * dst.local_bytes
        case "all_reduce":
            return 2 * (n - 1) * src.local_bytes // n
        case "all_to_all":
            return (n - 1) * src.local_bytes // n
        case "permute" | "broadcast":
            return src.local_bytes
        case _:
            return 0


def plan(src: TensorType, dst: TensorType, in_order: bool = False) -> list[Step]:
    """The steps from `src` to `dst`: same shape and dtype, any two layouts of one mesh.

    With `in_order` partial sums are completed axis by axis in one order (the last name first),
    whatever the target: that fixes the order of additions, and may send more. Raises ShapeError,
    MeshError or LayoutError where there is no such change of layout.
    """
    if src is dst:
        return []
    if src.shape != dst.shape or src.dtype is not dst.dtype:
        raise fail(
            ShapeError,
            "redistribute: shape and dtype must stay",
            [("from", src), ("to", dst)],
            fix="reshape or cast first",
        )
    if src.mesh is None and dst.mesh is not None:
        src = src.on(dst.mesh)
    if src.mesh != dst.mesh:
        raise fail(
            MeshError,
            "redistribute: the two layouts are on different meshes",
            [("from", f"{src} on {src.mesh and src.mesh.text()}"),
             ("to", f"{dst} on {dst.mesh and dst.mesh.text()}")],
            fix="build both on one mesh",
        )  # fmt: skip
    steps = list(_Planner(src, dst, in_order).steps())
    if steps and same_type(steps[-1].type, dst):
        steps[-1] = replace(steps[-1], type=dst)
    return steps


class _Planner:
    def __init__(self, src: TensorType, dst: TensorType, in_order: bool) -> None:
        self.now, self.dst, self.sizes, self.in_order = src, dst, dst.sizes, in_order
        # Per dim, the axes that leave it and the axes that come; the others keep their digits.
        self.leave: list[list[str]] = []
        self.come: list[list[str]] = []
        for s, d in zip(src.dims, dst.dims, strict=True):
            kept = self._kept(s, d)
            self.leave.append([a for a in dim_axes(s) if a not in kept])
            self.come.append([a for a in dim_axes(d) if a not in kept])

    def _kept(self, s: Dim, d: Dim) -> frozenset[str]:
        both = [a for a in dim_axes(s) if a in dim_axes(d)]
        for n in range(len(both), 0, -1):
            for keep in combinations(both, n):
                rest_s = without(s, set(dim_axes(s)) - set(keep), self.sizes)
                rest_d = without(d, set(dim_axes(d)) - set(keep), self.sizes)
                if rest_s == rest_d and set(dim_axes(rest_s)) == set(keep):
                    return frozenset(keep)
        return frozenset()

    def steps(self) -> Iterator[Step]:
        yield from self._finish_partials()
        yield from self._slices()
        yield from self._exchanges()
        yield from self._gathers()
        yield from self._slices()
        yield from self._open_partials()

    def _step(self, kind: str, axes: Iterable[str], to: TensorType, dim: int, to_dim: int) -> Step:
        src, axes = self.now, tuple(axes)
        self.now = to
        return Step(kind, axes, dim, to_dim, to, wire_bytes(kind, axes, src, to))

    def _with(self, dim: int, new: Dim) -> TensorType:
        dims = list(self.now.dims)
        dims[dim] = new
        return self.now.with_dims(dims)

    def _target(self, dim: int, come: Iterable[str]) -> Dim:
        """Dim `dim` of the target, with only those arrivals that are here or in `come`."""
        here = set(dim_axes(self.now.dims[dim])) | set(come)
        goal = self.dst.dims[dim]
        return without(goal, set(dim_axes(goal)) - here, self.sizes)

    def _arrivals(self, dim: int, axis: str) -> list[str]:
        """`axis` with those that must arrive in one step with it (one uneven factor)."""
        for d in digits(self.dst.dims[dim], self.sizes):
            if axis in d.axes:
                return list(d.axes)
        raise AssertionError(axis)

    def _home(self, axis: str) -> int:
        return next((j for j, axes in enumerate(self.come) if axis in axes), -1)

    def _free(self, axis: str) -> bool:
        return axis not in self.now.split_axes and axis not in self.now.partial_axes

    def _finish_partials(self) -> Iterator[Step]:
        goal = dict(self.dst.partial)
        open_ = [(a, k) for a, k in self.now.partial if goal.get(a) != k]
        if self.in_order:
            open_.reverse()
        for axis, kind in list(open_):
            j = self._home(axis)
            if kind != "sum" or j < 0 or self.leave[j] or len(self._arrivals(j, axis)) > 1:
                if self.in_order:
                    open_.remove((axis, kind))
                    left = tuple(p for p in self.now.partial if p[0] != axis)
                    yield self._step("all_reduce", [axis], self.now.with_partial(left), -1, -1)
                continue
            self.come[j].remove(axis)
            open_.remove((axis, kind))
            left = tuple(p for p in self.now.partial if p[0] != axis)
            dims = list(self.now.dims)
            dims[j] = self._target(j, [axis])
            to = self.now.with_partial(left).with_dims(dims)
            yield self._step("reduce_scatter", [axis], to, -1, j)
        for kind in dict.fromkeys(k for _, k in open_):
            axes = [a for a, k in open_ if k == kind]
            left = tuple(p for p in self.now.partial if p[0] not in axes)
            yield self._step("all_reduce", axes, self.now.with_partial(left), -1, -1)

    def _slices(self) -> Iterator[Step]:
        for j in range(len(self.come)):
            for axis in list(self.come[j]):
                if axis not in self.come[j] or self.leave[j]:
                    continue
                together = self._arrivals(j, axis)
                if all(self._free(a) for a in together):
                    for a in together:
                        self.come[j].remove(a)
                    yield self._step(
                        "shard", together, self._with(j, self._target(j, together)), -1, j
                    )

    def _exchanges(self) -> Iterator[Step]:
        for i in range(len(self.leave)):
            for axis in list(self.leave[i]):
                j = self._home(axis)
                alone = any(axis in g.axes and not g.uneven for g in self.now.digits(i))
                if j < 0 or j == i or self.leave[j] or not alone:
                    continue
                if any(axis in g.axes and g.uneven for g in digits(self.dst.dims[j], self.sizes)):
                    continue
                self.leave[i].remove(axis)
                self.come[j].remove(axis)
                dims = list(self.now.dims)
                dims[i] = without(dims[i], [axis], self.sizes)
                dims[j] = self._target(j, [axis])
                yield self._step("all_to_all", [axis], self.now.with_dims(dims), i, j)

    def _gathers(self) -> Iterator[Step]:
        for i in range(len(self.leave)):
            while self.leave[i]:
                run = _run(self.now, i, self.leave[i])
                self.leave[i] = [a for a in self.leave[i] if a not in run]
                new = without(self.now.dims[i], run, self.sizes)
                yield self._step("all_gather", run, self._with(i, new), i, -1)

    def _open_partials(self) -> Iterator[Step]:
        new = [p for p in self.dst.partial if p not in self.now.partial]
        for axis, kind in new:
            if kind != "sum":
                raise fail(
                    LayoutError,
                    f"redistribute: a value cannot be made partial under {kind!r}",
                    [("from", self.now), ("to", self.dst)],
                    fix="only a sum can be opened",
                )
            to = self.now.with_partial((*self.now.partial, (axis, kind)))
            yield self._step("to_partial", [axis], to, -1, -1)


def _run(t: TensorType, dim: int, leave: Iterable[str]) -> tuple[str, ...]:
    """The first neighbouring digits on axes in `leave`: one all_gather takes them together."""
    run: list[str] = []
    gone = set(leave)
    for d in t.digits(dim):
        if d.axes and gone & set(d.axes):
            if d.uneven:
                return tuple(run) if run else d.axes
            run.extend(d.axes)
        elif run:
            break
    return tuple(run)


def completed(t: TensorType, axes: Iterable[str]) -> TensorType:
    """`t` with its partial sums over `axes` finished. Raises LayoutError for an unknown axis."""
    gone = tuple(axes)
    for axis in gone:
        if axis not in t.sizes:
            raise unknown_axis(axis, t.mesh)
    return t.with_partial(tuple(p for p in t.partial if p[0] not in gone))


def gathered(t: TensorType, axes: Iterable[str]) -> TensorType:
    """`t` with no dim split over `axes`. Raises LayoutError for an unknown axis."""
    gone = tuple(axes)
    for axis in gone:
        if axis not in t.sizes:
            raise unknown_axis(axis, t.mesh)
    return t.with_dims(without(d, gone, t.sizes) for d in t.dims)
