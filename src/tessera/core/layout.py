"""Layouts of tensors on a mesh. A dim is a list of digits, some of which are mesh axes.

A dim is read as a mixed-radix number, major digit first. `8@dp` with dp=2 has the digits
`(2@dp·4)`: device dp=0 holds the first 4 of 8. Reshape regroups digits; a collective adds, removes
or moves one. A `Factor` is a run of axis digits with the local digit below them. A factor that its
axes do not divide is one uneven digit, split into ceil blocks with a short last one. A dim of size
0 is not split: each device has all of it, and `0@dp` is `0`.

>>> from tessera.core.mesh import Mesh
>>> mesh = Mesh(("dp", "tp"), shape={"dp": 2, "tp": 4})
>>> t = parse_type("f32[(8@dp·512@tp), 1024]", mesh)
>>> t.shape, t.local_shape, str(t.reshape((8, 512, 1024)))
((4096, 1024), (512, 1024), 'f32[8@dp, 512@tp, 1024]')
"""

from __future__ import annotations

import math
import re
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NoReturn

from .dtypes import DType, dtype_of
from .errors import LayoutError, UsageError
from .mesh import Mesh


@dataclass(frozen=True, slots=True)
class Factor:
    """A part of a dim: `size` elements in ceil blocks over `axes`, major axis first."""

    size: int
    axes: tuple[str, ...] = ()


Dim = tuple[Factor, ...]
Partial = tuple[tuple[str, str], ...]
PARTIAL_KINDS = ("sum", "max", "min")
_NO_AXES: Mapping[str, int] = {}


@dataclass(frozen=True, slots=True)
class Digit:
    """One digit of a dim: an axis digit (one axis, local size 1), a local digit (no axes), or a
    whole uneven factor (`uneven`), which cannot be split into digits."""

    size: int
    axes: tuple[str, ...] = ()
    local: int = 1
    uneven: bool = False


def shard_count(axes: Iterable[str], sizes: Mapping[str, int]) -> int:
    """Returns the number of shards over `axes`: the product of their sizes."""
    return math.prod(sizes[a] for a in axes)


def digits(dim: Dim, sizes: Mapping[str, int]) -> list[Digit]:
    """Returns the digits of `dim`, major first, without digits of size one."""
    if not dim_size(dim):
        return [Digit(0, (), 0)]
    out: list[Digit] = []
    for f in dim:
        axes = tuple(a for a in f.axes if sizes[a] > 1)
        n = shard_count(axes, sizes)
        if f.size % n:
            out.append(Digit(f.size, axes, -(-f.size // n), True))
            continue
        out.extend(Digit(sizes[a], (a,)) for a in axes)
        if f.size > n:
            out.append(Digit(f.size // n, (), f.size // n))
    return out


def grouped(run: Iterable[Digit]) -> Dim:
    """Returns the canonical dim of a run of digits; the inverse of `digits`."""
    run = list(run)
    if any(d.size == 0 for d in run):
        return (Factor(0),)
    out: list[Factor] = []
    # The factor being built; it is open while it has no local digit.
    size, open_ = 1, False
    axes: tuple[str, ...] = ()
    for d in run:
        if d.uneven:
            if size > 1:
                out.append(Factor(size, axes))
            at = len(out)
            while d.size == 1 and at and out[at - 1].size == 1 and out[at - 1].axes > d.axes:
                at -= 1  # factors of one element have no order: a canonical one is by their axes
            out.insert(at, Factor(d.size, d.axes))
            size, axes, open_ = 1, (), False
        elif d.axes:
            if size > 1 and not open_:
                out.append(Factor(size, axes))
                size, axes = 1, ()
            size, axes, open_ = size * d.size, axes + d.axes, True
        else:
            size, open_ = size * d.size, False
    if size > 1 or not out:
        out.append(Factor(size, axes))
    return tuple(out)


def canonical(dim: Dim, sizes: Mapping[str, int]) -> Dim:
    """Returns the canonical form of a dim: equal for dims with the same placement of elements."""
    if len(dim) == 1 and not dim[0].axes:
        return dim
    return grouped(digits(dim, sizes))


def dim_axes(dim: Dim) -> tuple[str, ...]:
    return tuple(a for f in dim for a in f.axes)


def dim_size(dim: Dim) -> int:
    return math.prod(f.size for f in dim)


def without(dim: Dim, axes: Iterable[str], sizes: Mapping[str, int]) -> Dim:
    """Returns `dim` with no split over `axes`; its other axes split the same digits as before."""
    gone = set(axes)
    if not gone & set(dim_axes(dim)):
        return dim
    run: list[Digit] = []
    for d in digits(dim, sizes):
        left = tuple(a for a in d.axes if a not in gone)
        run += [d] if left == d.axes else digits((Factor(d.size, left),), sizes)
    return grouped(run)


def regroup(
    dims: Sequence[Dim], shape: Sequence[int], sizes: Mapping[str, int]
) -> tuple[Dim, ...] | frozenset[str]:
    """Returns the dims after a reshape to `shape`, or the axes that must be gathered before it."""
    if 0 in shape:
        return _regroup_empty(dims, tuple(shape), sizes)
    queue: deque[Digit] = deque()
    for d in (d for dim in dims for d in digits(dim, sizes)):
        if queue and not d.axes and not queue[-1].axes:
            last = queue.pop()
            d = Digit(last.size * d.size, (), last.size * d.size)
        queue.append(d)
    out: list[Dim] = []
    for size in shape:
        got: list[Digit] = []
        rest = size
        while rest > 1:
            head = queue.popleft()
            if rest % head.size == 0:
                got.append(head)
                rest //= head.size
            elif not head.axes and head.size % rest == 0:
                got.append(Digit(rest, (), rest))
                queue.appendleft(Digit(head.size // rest, (), head.size // rest))
                rest = 1
            elif head.axes:
                return frozenset(head.axes)
            else:
                return frozenset(next(d.axes for d in queue if d.axes))
        out.append(grouped(got))
    if queue:  # an uneven factor of one element (1@dp) that no dim of the new shape can hold
        return frozenset(a for d in queue for a in d.axes)
    return tuple(out)


def _regroup_empty(
    dims: Sequence[Dim], shape: tuple[int, ...], sizes: Mapping[str, int]
) -> tuple[Dim, ...] | frozenset[str]:
    """Returns `regroup` of tensors without elements. The dims before the first dim of size 0 and
    those after it are regrouped separately, if each side keeps its number of elements; otherwise
    all axes are gathered."""
    old = tuple(map(dim_size, dims))
    i, j = old.index(0), shape.index(0)
    if math.prod(old[:i]) != math.prod(shape[:j]) or (
        math.prod(old[i + 1 :]) != math.prod(shape[j + 1 :])
    ):
        axes = frozenset(a for d in dims for a in dim_axes(d))
        return axes or tuple((Factor(n),) for n in shape)
    head = regroup(dims[:i], shape[:j], sizes)
    tail = regroup(dims[i + 1 :], shape[j + 1 :], sizes)
    if isinstance(head, frozenset):
        return head
    return tail if isinstance(tail, frozenset) else (*head, (Factor(0),), *tail)


class TensorType:
    """dtype, layout and mesh of a tensor. Interned: equal types are the same object.

    `dims` hold the sizes and the splits, `partial` the axes over which the value is still to be
    reduced, as (axis, "sum" | "max" | "min"). `varying` are the axes along which each device has a
    value of its own, as in the body of a `@ts.distribute`: a global value with one leading dim per
    axis, which the shape leaves out. `rest_axes` are the axes that split the tensor only between
    programs (ZeRO): a mesh-invariant program sees it whole along them. The text does not show
    `rest_axes`.
    """

    dtype: DType
    dims: tuple[Dim, ...]
    partial: Partial
    mesh: Mesh | None
    varying: tuple[str, ...]
    rest_axes: tuple[str, ...]
    shape: tuple[int, ...]

    def __new__(
        cls,
        dtype: DType,
        dims: Iterable[Dim],
        partial: Partial = (),
        mesh: Mesh | None = None,
        varying: Iterable[str] = (),
        rest_axes: Iterable[str] = (),
    ) -> TensorType:
        sizes = mesh.sizes if mesh is not None else _NO_AXES
        try:
            dims = tuple(canonical(d, sizes) for d in dims)
        except KeyError as unknown:
            raise unknown_axis(str(unknown.args[0]), mesh) from None
        if partial:
            # An unknown axis counts as of size 2: it stays, for the error of `_check`.
            partial = tuple(
                sorted((p for p in partial if sizes.get(p[0], 2) > 1), key=lambda p: p[0])
            )
        if varying:
            here = set(varying)
            lost = here.difference(sizes)
            if lost:
                raise unknown_axis(min(lost), mesh)
            varying = tuple(a for a in sizes if a in here and sizes[a] > 1)
        else:
            varying = ()
        if rest_axes:
            split = {a for d in dims for a in dim_axes(d)}.intersection(rest_axes)
            rest_axes = tuple(a for a in sizes if a in split)
        else:
            rest_axes = ()
        key = (dtype, dims, partial, mesh, varying, rest_axes)
        interned = _INTERNED.get(key)
        if interned is None:
            interned = super().__new__(cls)
            (
                interned.dtype,
                interned.dims,
                interned.partial,
                interned.mesh,
                interned.varying,
                interned.rest_axes,
            ) = key
            interned.shape = tuple(dim_size(d) for d in dims)
            _check(interned)
            _INTERNED[key] = interned
        return interned

    def __reduce__(self) -> tuple[object, ...]:
        key = (self.dtype, self.dims, self.partial, self.mesh, self.varying, self.rest_axes)
        return (TensorType, key)

    def __call__(self, *args: object) -> NoReturn:
        fix = "the dtype is x.dtype; convert by x.to(dtype)"
        raise UsageError("type: it is not a function", type=self, fix=fix)

    @property
    def sizes(self) -> Mapping[str, int]:
        return self.mesh.sizes if self.mesh is not None else _NO_AXES

    @property
    def rank(self) -> int:
        return len(self.dims)

    @cached_property
    def size(self) -> int:
        return math.prod(self.shape)

    @cached_property
    def nbytes(self) -> int:
        return self.size * self.dtype.bytes

    @cached_property
    def local_shape(self) -> tuple[int, ...]:
        """The shape of one device's block, padding included."""
        return tuple(
            math.prod(-(-f.size // shard_count(f.axes, self.sizes)) for f in dim)
            for dim in self.dims
        )

    @cached_property
    def local_bytes(self) -> int:
        return math.prod(self.local_shape) * self.dtype.bytes

    @cached_property
    def device_bytes(self) -> int:
        """The bytes on one device; on a folded mesh those of all its places, equal blocks counted
        once."""
        return self.local_bytes * self.places_held()

    def places_held(self, without: Iterable[str] = ()) -> int:
        """Returns the number of different blocks on one device: 1 unless the mesh is folded. Blocks
        that differ only along axes of `without` count as one."""
        if self.mesh is None or self.mesh.onto is None:
            return 1
        own = {*self.split_axes, *self.partial_axes, *self.varying} - {*without}
        return math.prod(self.mesh.folds[a] for a in own)

    @cached_property
    def held_bytes(self) -> int:
        """The bytes on all devices together."""
        return self.device_bytes * (1 if self.mesh is None else self.mesh.physical.size)

    @cached_property
    def split_axes(self) -> tuple[str, ...]:
        """The axes over which some dim is split, in dim order."""
        return tuple(a for d in self.dims for a in dim_axes(d))

    @cached_property
    def partial_axes(self) -> tuple[str, ...]:
        return tuple(a for a, _ in self.partial)

    @cached_property
    def padded_dims(self) -> tuple[int, ...]:
        """The dims whose last block is short on some device."""
        return tuple(i for i, d in enumerate(self.dims) if any(g.uneven for g in self.digits(i)))

    def digits(self, dim: int) -> list[Digit]:
        return digits(self.dims[dim], self.sizes)

    def with_dims(self, dims: Iterable[Dim]) -> TensorType:
        return TensorType(self.dtype, dims, self.partial, self.mesh, self.varying, self.rest_axes)

    def with_partial(self, partial: Partial) -> TensorType:
        return TensorType(self.dtype, self.dims, partial, self.mesh, self.varying, self.rest_axes)

    def with_dtype(self, dtype: DType) -> TensorType:
        return TensorType(dtype, self.dims, self.partial, self.mesh, self.varying, self.rest_axes)

    def on(self, mesh: Mesh | None) -> TensorType:
        """Returns the same type on `mesh`; a type without a mesh is replicated there."""
        return TensorType(self.dtype, self.dims, self.partial, mesh, self.varying, self.rest_axes)

    def with_varying(self, varying: Iterable[str]) -> TensorType:
        """Returns the same block on each device, of a value of its own along the axes `varying`."""
        return TensorType(self.dtype, self.dims, self.partial, self.mesh, varying, self.rest_axes)

    def with_rest_axes(self, rest_axes: Iterable[str]) -> TensorType:
        """Returns the same layout, split over the axes `rest_axes` only between programs."""
        return TensorType(self.dtype, self.dims, self.partial, self.mesh, self.varying, rest_axes)

    @cached_property
    def in_use(self) -> TensorType:
        """The layout that a program sees: whole along the axes of `rest_axes`."""
        if not self.rest_axes:
            return self
        return self.with_dims(without(d, self.rest_axes, self.sizes) for d in self.dims)

    def complete(self) -> TensorType:
        """Returns the type after the reduction of its partial values."""
        return self.with_partial(()) if self.partial else self

    def replicated(self) -> TensorType:
        return plain(self.dtype, self.shape, self.mesh)

    def reshape(self, shape: Sequence[int]) -> TensorType:
        """Returns the type after a reshape, with axes gathered where necessary."""
        return self.before_reshape(shape)[1]

    def before_reshape(self, shape: Sequence[int]) -> tuple[TensorType, TensorType]:
        """Returns (the type needed before the reshape, the type after it)."""
        dims = self.dims
        while isinstance(new := regroup(dims, shape, self.sizes), frozenset):
            dims = tuple(without(d, new, self.sizes) for d in dims)
        return self.with_dims(dims), self.with_dims(new)

    @cached_property
    def text(self) -> str:
        body = ", ".join(dim_text(d) for d in self.dims)
        marks = "".join(
            f" +{axis}" if kind == "sum" else f" {kind} {axis}" for axis, kind in self.partial
        )
        own = f" varying {','.join(self.varying)}" if self.varying else ""
        return f"{self.dtype.name}[{body}]{marks}{own}"

    def __str__(self) -> str:
        return self.text

    __repr__ = __str__


_INTERNED: dict[
    tuple[DType, tuple[Dim, ...], Partial, Mesh | None, tuple[str, ...], tuple[str, ...]],
    TensorType,
] = {}


def _check(t: TensorType) -> None:
    """Raises LayoutError if an axis of `t` is not one of its mesh or is used twice, or a size is
    below 0."""
    seen: set[str] = set()
    for axis in (*t.split_axes, *t.partial_axes, *t.varying):
        if axis not in t.sizes:
            raise unknown_axis(axis, t.mesh)
        if axis in seen:
            raise LayoutError(
                f"layout: axis {axis!r} is used twice in one type",
                type=t.text,
                fix="an axis splits one dim, or is partial, but not both",
            )
        seen.add(axis)
    if any(n < 0 for n in t.shape):
        raise LayoutError(f"layout: shape {t.shape} has a dim below 0", fix="sizes are >= 0")


def unknown_axis(axis: str, mesh: Mesh | None) -> LayoutError:
    if mesh is None:
        return LayoutError(
            f"layout: axis {axis!r} is named but there is no mesh",
            fix="pass mesh=..., or open one: with dist.Mesh(...):",
        )
    return LayoutError(
        f"layout: axis {axis!r} is not an axis of the mesh",
        mesh=mesh.text(),
        fix="name one of " + ", ".join(mesh.axes),
    )


def same_type(a: TensorType, b: TensorType) -> bool:
    """Returns whether two types are equal. A type without a mesh equals the replicated one on any
    mesh; `rest` is not compared."""
    if a is b or ((a.mesh is None or b.mesh is None) and a.text == b.text):
        return True
    return a.rest_axes != b.rest_axes and a.with_rest_axes(()) is b.with_rest_axes(())


def plain(dtype: DType, shape: Sequence[int], mesh: Mesh | None = None) -> TensorType:
    """Returns a type that is not split."""
    return TensorType(dtype, tuple((Factor(int(n)),) for n in shape), (), mesh)


def _factor_text(f: Factor) -> str:
    if not f.axes:
        return str(f.size)
    return f"{f.size}@{f.axes[0]}" if len(f.axes) == 1 else f"{f.size}@({','.join(f.axes)})"


def dim_text(dim: Dim) -> str:
    return _factor_text(dim[0]) if len(dim) == 1 else f"({'·'.join(map(_factor_text, dim))})"


_FACTOR = re.compile(r"(\d+)(?:@(?:(\w+)|\((\w+(?:,\w+)*)\)))?\Z")
_TYPE = re.compile(r"(\w+)\[(.*)\]((?: (?:\+|max |min )\w+)*)(?: varying (\w+(?:,\w+)*))?\Z")


def parse_dim(text: str) -> Dim:
    """Returns the dim that prints as `text`: `8`, `8@dp`, `256@(y,x)`, `(3·16@tp·64)` (also with
    `*`)."""
    body = text.strip().replace("*", "·")
    inner = body[1:-1] if body.startswith("(") else body
    out = []
    for part in inner.split("·"):
        m = _FACTOR.match(part.strip().replace(", ", ","))
        if m is None:
            raise LayoutError(
                f"layout: {text!r} is not a dim", fix="write 8, 8@dp, 256@(y,x) or (3·16@tp·64)"
            )
        out.append(
            Factor(int(m[1]), tuple((m[2] or m[3] or "").split(",")) if m[2] or m[3] else ())
        )
    return tuple(out)


def split_dims(body: str) -> list[str]:
    """Splits `8@(y,x), 4` at the commas outside brackets."""
    parts, depth, start = [], 0, 0
    for i, c in enumerate(body):
        depth += (c == "(") - (c == ")")
        if c == "," and depth == 0:
            parts.append(body[start:i])
            start = i + 1
    return [*parts, body[start:]] if body.strip() else []


def parse_type(text: str, mesh: Mesh | None = None) -> TensorType:
    """Returns the type that prints as `text`; its axes are those of `mesh`.

    Raises LayoutError if `text` is not a type.
    """
    m = _TYPE.match(text.strip())
    if m is None:
        raise LayoutError(f"layout: {text!r} is not a type", fix="write f32[8@dp, 4096] +tp")
    marks = m[3].replace("+", "sum ").split()
    partial = tuple((axis, kind) for kind, axis in zip(marks[::2], marks[1::2], strict=True))
    dims = tuple(parse_dim(p) for p in split_dims(m[2]))
    return TensorType(dtype_of(m[1]), dims, partial, mesh, m[4].split(",") if m[4] else ())
