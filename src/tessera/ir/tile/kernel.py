"""Tile IR: a kernel as a value, with named sizes, a grid, memory cut into tiles, and a short body.

Every access is by tile index, so bounds, holes and races are checks of integers (`verify.py`), and
the costs are counts (`cost.py`). Steps of the grid run in any order, also at once. A kernel on a
mesh runs on all its devices; they exchange tiles by puts to symmetric memory.
"""

from __future__ import annotations

import hashlib
import keyword
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import product
from typing import Any

from ...core.checks import MOST, taken, whole
from ...core.errors import ShapeError, UsageError
from ...core.wording import nearest
from .body import Ref, Signal, Statement, naming, where
from .index import NAME, Index, sizes_of, wrong
from .op import Type
from .scope import Scope

VERSION = 1
Sizes = tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class Kernel:
    """A kernel at given sizes. Two kernels with the same content are equal.

    `mesh` has the axes of the devices with their sizes; a body reads its own coordinate along x as
    `rank_x`. `dims` are sizes of the problem. `tune` are sizes that may change bits, `speed` those
    that never do; only the lowering reads those. `grid` has named indices with their extents.

    Raises GraphError, ShapeError or DTypeError, with the line, if names, types or scopes are wrong.
    """

    name: str
    mesh: Sizes = ()
    dims: Sizes = ()
    tune: Sizes = ()
    speed: Sizes = ()
    grid: tuple[tuple[str, Index], ...] = ()
    refs: tuple[Ref, ...] = ()
    signals: tuple[Signal, ...] = ()
    body: tuple[Statement, ...] = ()
    types: Mapping[str, Type] = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        self._names()
        for r in self.refs:
            with naming(where(r)):
                self._cut(r)
        for s in self.signals:
            with naming(where(s)):
                self._at_least_one(s.slots)
                if not s.slots:
                    raise wrong("a signal has no dims", "give it at least one: [1]", ShapeError)
        with naming("grid"):
            self._at_least_one(tuple(extent for _, extent in self.grid))
        reason = "is a speed: it does not change what is computed"
        scope = Scope(
            self.sizes,
            [*(n for n, _ in self.grid), *(f"rank_{axis}" for axis, _ in self.mesh)],
            {n: reason for n, _ in self.speed},
            {r.name: r for r in self.refs},
            {s.name: s for s in self.signals},
            tuple(axis for axis, _ in self.mesh),
            bool(self.grid),
        )
        scope.body(self.body)
        object.__setattr__(self, "types", scope.types)

    def _names(self) -> None:
        sizes = [*self.mesh, *self.dims, *self.tune, *self.speed]
        indices = [*(n for n, _ in self.grid), *(f"rank_{a}" for a, _ in self.mesh)]
        groups = [
            [*(n for n, _ in sizes), *indices],
            [*(r.name for r in self.refs), *(s.name for s in self.signals)],
            [self.name],
        ]
        for names in groups:
            for i, name in enumerate(names):
                if not NAME.fullmatch(name) or (names is groups[0] and keyword.iskeyword(name)):
                    fix = "use letters, digits and _, and no keyword of Python"
                    raise wrong(f"{name!r} is not a name", fix)
                if name in names[:i]:
                    fix = "give each size, index, reference and signal a name of its own"
                    raise wrong(f"the name {name!r} is given twice", fix)
        for name, size in sizes:
            whole("tile", name, size, 1, MOST)

    def _cut(self, r: Ref) -> None:
        if r.kind == "sym" and not self.mesh:
            fix = "name its axes in the first line: mesh x=4"
            raise wrong("the kernel has no mesh for symmetric memory", fix)
        if len(r.tiles) != len(r.shape):
            fix = "give one tile size for each dim"
            raise wrong(f"{len(r.shape)} dims and {len(r.tiles)} tile sizes", fix, ShapeError)
        if not r.shape:
            raise wrong("a reference has no dims", "give it at least one: [1]", ShapeError)
        self._at_least_one((*r.shape, *r.tiles))
        for dim, tile in zip(r.shape, r.tiles, strict=True):
            n, size = dim.value(self.sizes), tile.value(self.sizes)
            if n % size:
                good = [d for d in range(1, min(n, 4096) + 1) if n % d == 0]
                near = sorted(sorted(good, key=lambda d: abs(d - size))[:3])
                fix = f"make {tile} a size that divides {n}, such as {', '.join(map(str, near))}"
                rows = [("dim", f"{dim} = {n}"), ("tile", f"{tile} = {size}")]
                raise wrong(f"tiles of {size} do not divide {n}", fix, ShapeError, rows)

    def _at_least_one(self, texts: tuple[Index, ...]) -> None:
        """Raises ShapeError unless all sizes are at least 1."""
        for text in texts:
            if (n := text.value(self.sizes)) < 1:
                fix = "make it at least 1"
                raise wrong(f"the size {text} is {n}", fix, ShapeError)

    # ---- sizes ---------------------------------------------------------------------------------
    @cached_property
    def sizes(self) -> dict[str, int]:
        """The sizes that expressions read: axes, dims and tune."""
        return dict([*self.mesh, *self.dims, *self.tune])

    @cached_property
    def extents(self) -> dict[str, int]:
        """The extents of the grid's indices."""
        return {name: extent.value(self.sizes) for name, extent in self.grid}

    @cached_property
    def ranks(self) -> tuple[tuple[int, ...], ...]:
        """The coordinates of all devices; one without coordinates if there is no mesh."""
        return tuple(product(*(range(n) for _, n in self.mesh)))

    def at(self, rank: tuple[int, ...]) -> dict[str, int]:
        """The values of all names on the device at `rank`, without those of the grid."""
        return self.sizes | {f"rank_{a}": c for (a, _), c in zip(self.mesh, rank, strict=True)}

    def ref(self, name: str) -> Ref:
        """The reference of this name."""
        return next(r for r in self.refs if r.name == name)

    def shape(self, r: Ref) -> tuple[int, ...]:
        """The shape of a reference."""
        return sizes_of(r.shape, self.sizes)

    def tile(self, r: Ref) -> tuple[int, ...]:
        """The tile sizes of a reference, with the dims that values lack."""
        return sizes_of(r.tiles, self.sizes)

    def counts(self, r: Ref | Signal) -> tuple[int, ...]:
        """The numbers of tiles of a reference along its dims, or of slots of a signal."""
        if isinstance(r, Signal):
            return sizes_of(r.slots, self.sizes)
        return tuple(n // t for n, t in zip(self.shape(r), self.tile(r), strict=True))

    # ---- text ----------------------------------------------------------------------------------
    @cached_property
    def text(self) -> str:
        """The kernel as text, which `parse` reads back."""
        from .text import to_text

        return to_text(self)

    @property
    def title(self) -> str:
        """Its name with the sizes that may be tuned: "kernel mlp_up bm=64 bn=64 warps=4"."""
        sizes = "".join(f" {name}={n}" for name, n in (*self.tune, *self.speed))
        return f"kernel {self.name}{sizes}"

    @property
    def hash(self) -> str:
        """The hash of the text without its speeds: kernels with the same hash give the same
        bits."""
        from .text import to_text

        return hashlib.sha256(to_text(replace(self, speed=())).encode()).hexdigest()[:16]

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return self  # it never changes

    def __reduce__(self) -> tuple[Any, ...]:
        from .text import parse

        return parse, (self.text,)

    def __str__(self) -> str:
        return self.text


def need_kernel(name: str, value: object) -> Kernel:
    """`value` as a Kernel. Raises UsageError if it is anything else."""
    return taken(name, value, Kernel, "read a kernel's text: parse(text)")


def with_sizes(kernel: Kernel, **sizes: int) -> Kernel:
    """The kernel with other values of some dims, tune, speeds or axes of the mesh.

    Raises UsageError for a name that the kernel lacks, ShapeError if tiles no longer divide.
    """
    need_kernel("with_sizes", kernel)
    groups = ("mesh", "dims", "tune", "speed")
    known = {name: group for group in groups for name, _ in getattr(kernel, group)}
    for name, size in sizes.items():
        if name not in known:
            same = [n for n in known if n.lower() == name.lower()]
            raise UsageError(
                f"with_sizes: {kernel.name} has no size {name!r}",
                rows=[(g, " ".join(f"{n}={v}" for n, v in getattr(kernel, g))) for g in groups],
                fix=f"use {same[0]}" if same else f"use one of {nearest(name, known)}",
            )
        whole("with_sizes", name, size, 1, MOST)
    new: dict[str, Any] = {
        group: tuple((n, int(sizes.get(n, v))) for n, v in getattr(kernel, group))
        for group in groups
    }
    return replace(kernel, **new)
