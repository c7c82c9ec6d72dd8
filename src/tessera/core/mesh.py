"""`Mesh`: named axes over devices, as an immutable value; folds, axes in time, the current mesh.

>>> mesh = Mesh(["tp", "dp"], devices=range(16))
>>> mesh.topology
'tp × dp mesh, 4 × 4'
>>> Mesh(["tp", "pp", "dp"], devices=range(72)).shape
(6, 4, 3)
>>> mesh.slice(dp=1).device_ids, mesh["dp"].device_ids
([1, 5, 9, 13], [0, 1, 2, 3])
>>> with mesh:
...     current() is mesh
True

A mesh is a value: it names devices and asks no engine, so one that is larger than the machine can
be built, inspected and planned with. Device ids are row-major: the last axis varies fastest.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from types import MappingProxyType, TracebackType
from typing import Self

import numpy as np

from . import context, devices
from .errors import MeshError
from .mesh_input import (
    Devices,
    Shape,
    balanced,
    checked_axes,
    checked_devices,
    checked_shape,
    devices_text,
    names_text,
    shortened_ids,
    times,
)
from .topology import Topology
from .value_checks import is_whole


@dataclass(frozen=True, slots=True, init=False, eq=False, repr=False)
class Mesh:
    """Named axes over device ids. Two meshes are equal if axes, shape and ids are equal.

    `devices` is a number, a flat sequence of ids, or a nested list (or array) whose nesting is the
    shape. Flat devices without `shape` are factored into axes of sizes as equal as possible, larger
    ones first. With `shape` (a dict by axis, or a tuple in the order of `axes`) devices may be
    omitted and are 0, 1, 2, ... Raises MeshError if the arguments do not describe one box of
    distinct devices.
    """

    axes: tuple[str, ...]
    shape: tuple[int, ...]
    ids: tuple[int, ...]
    sizes: Mapping[str, int]
    onto: Mesh | None  # the smaller mesh that runs it, if it is folded
    links: Topology | None  # the wiring of the devices, by their ids, if a machine describes it
    time: tuple[str, ...]  # axes whose places a device runs one after the other: see `in_time`
    space: Mesh | None  # the mesh without those axes; None also if no other axis is left
    _hash: int

    def __init__(self, axes: Sequence[str], devices: Devices = None, shape: Shape = None) -> None:
        names = checked_axes(axes)
        dims = checked_shape(names, shape)
        ids, nested = checked_devices(names, devices, dims)
        if dims is None:
            dims = nested if nested is not None else balanced(len(ids), len(names))
        elif nested is not None and nested != dims:
            raise MeshError(
                f"Mesh: the device list is nested as {times(nested)}, its shape says {times(dims)}",
                axes=names_text(names),
                fix="drop shape=, or pass the devices as a flat list",
            )
        if math.prod(dims) != len(ids):
            raise MeshError(
                f"Mesh: a shape of {times(dims)} holds {devices_text(math.prod(dims))}, "
                f"{len(ids)} given",
                axes=names_text(names),
                fix=f"pass devices=range({math.prod(dims)}), or a shape whose product is "
                f"{len(ids)}",
            )
        put = object.__setattr__
        put(self, "axes", names)
        put(self, "shape", dims)
        put(self, "ids", ids)
        put(self, "sizes", MappingProxyType(dict(zip(names, dims))))
        put(self, "onto", None)
        put(self, "links", None)
        put(self, "time", ())
        put(self, "space", None)
        put(self, "_hash", hash((names, dims, ids, None, None)))

    @staticmethod
    def parse(text: str) -> Mesh:
        """Returns the mesh over devices 0, 1, 2, ... that `text` describes: "dp=2,tp=4" or "dp=2
        tp=4".

        Raises MeshError if a part is not `axis=size` or an axis is named twice.

        >>> Mesh.parse("dp=2,tp=4").text()
        'dp=2 tp=4'
        """
        sizes: dict[str, int] = {}
        time: dict[str, int] = {}
        for part in text.replace(",", " ").split():
            late = part.startswith("time(") and part.endswith(")")
            axis, equals, size = (part[5:-1] if late else part).partition("=")
            if not (axis and equals and size.isdecimal()):
                raise MeshError(
                    f"Mesh: cannot read {part!r} as axis=size",
                    text=repr(text),
                    fix="write each axis as name=size, for instance dp=2,tp=4",
                )
            if axis in sizes or axis in time:
                raise MeshError(
                    f"Mesh: axis {axis!r} is named twice",
                    text=repr(text),
                    fix="give each axis a name of its own",
                )
            (time if late else sizes)[axis] = int(size)
        mesh = Mesh(tuple(sizes), shape=sizes) if sizes or not time else None
        return in_time(mesh, time) if time or mesh is None else mesh

    # ---- facts ---------------------------------------------------------------------------------
    @property
    def size(self) -> int:
        """The number of places of the mesh: devices, unless it is folded."""
        return len(self.ids)

    @property
    def device_ids(self) -> list[int]:
        """All device ids in row-major order, as a new list."""
        return list(self.ids)

    @property
    def topology(self) -> str:
        """The axes and sizes in words: 'tp × dp mesh, 4 × 4'."""
        return f"{' × '.join(self.axes)} mesh, {times(self.shape)}"

    @property
    def rank(self) -> int:
        """Raises MeshError: only the mesh of a local body, whose code runs per device, has a
        rank."""
        raise self._wrong(
            "mesh.rank: there is no rank here, because this code runs once for the whole mesh",
            "read it inside a function decorated with @ts.distribute, from ts.mesh.current()",
        )

    def text(self) -> str:
        """Returns the text that `parse` reads and Graph IR prints: 'dp=2 tp=4'. It has no device
        ids."""
        return " ".join(
            f"time({axis}={size})" if axis in self.time else f"{axis}={size}"
            for axis, size in self.sizes.items()
        )

    def text_beside(self, other: Mesh | None) -> str:
        """Returns `text`; if `other` has the same text, also the fold and the devices, and the
        links where only these differ."""
        if other is None or other.text() != self.text():
            return self.text()
        fold = f" folded onto {self.onto.text()}" if self.onto is not None else ""
        if other.links != self.links and other.wired(None) == self.wired(None):
            return f"{self.text()}{fold}, {self.links or 'no links'}"
        return f"{self.text()}{fold}, devices {str([*self.physical.device_ids])[1:-1]}"

    @property
    def folds(self) -> Mapping[str, int]:
        """The number of places along each axis that one device runs in turn: 1 if the mesh is not
        folded."""
        here = self.onto or self
        return {axis: size // here.sizes[axis] for axis, size in self.sizes.items()}

    @property
    def physical(self) -> Mesh:
        """The mesh of the devices that run it: this mesh, or the one that it is folded onto."""
        return self.onto or self

    @property
    def unfolded(self) -> Mesh:
        """The same logical mesh, run by a device for each of its places."""
        return self._folded(None) if self.onto is not None else self

    def fold(self, onto: object) -> Mesh:
        """Returns the same logical mesh, run by fewer devices that each run several places in turn.

        `onto` gives the devices of an axis: "dp=2,tp=1", {"dp": 2}, a total number of devices (the
        leading axes are folded first), or a Mesh with these axes. Neighbouring places share a
        device, and results are those of the logical mesh. Raises MeshError if a size does not
        divide.

        >>> mesh = Mesh.parse("dp=4 tp=2").fold(onto="dp=2,tp=1")
        >>> mesh.size, mesh.physical.text(), mesh.folds
        (8, 'dp=2 tp=1', {'dp': 2, 'tp': 2})
        """
        if self.time:
            return self._around_time(lambda space: space.fold(onto))
        return self._folded(folded_onto(self, onto))

    def wired(self, links: Topology | None) -> Mesh:
        """Returns the same mesh with `links` between its devices: programs of tensors on it are
        priced on them. It is another mesh than one without links, or with others. Raises
        UsageError if a device of the mesh is not in `links`."""
        if self.time:
            return self._around_time(lambda space: space.wired(links))
        if links is not None:
            links.coords(max(self.ids))
        return self._with_device_order(self.onto, links)

    def in_time(self, **turns: int) -> Mesh:
        """Returns this mesh with one more axis, named in `turns` with its size, which lies in time:
        every device runs the places along it one after the other.

        A batch that is split over the axis, below the axes of devices, is computed in that many
        microbatches. Raises MeshError unless `turns` is one axis with a size above 0, or if the
        mesh already has it, or has another axis in time.

        >>> mesh = Mesh.parse("dp=2").in_time(mb=4)
        >>> mesh.text(), mesh.time, mesh.space.text()
        ('dp=2 time(mb=4)', ('mb',), 'dp=2')
        """
        return in_time(self, turns)

    def _around_time(self, part: Callable[[Mesh], Mesh]) -> Mesh:
        """Returns the `part` of the mesh of the devices, with the same axis in time."""
        if self.space is None:
            raise self._wrong("Mesh: it has an axis in time alone, and no devices to choose from",
                              "name devices first: Mesh(...).in_time(...)")  # fmt: skip
        return in_time(part(self.space), {a: self.sizes[a] for a in self.time})

    def _folded(self, onto: Mesh | None) -> Mesh:
        return self._with_device_order(onto, self.links)

    def _with_device_order(self, onto: Mesh | None, links: Topology | None) -> Mesh:
        made = object.__new__(Mesh)
        put = object.__setattr__
        for name in ("axes", "shape", "ids", "sizes"):
            put(made, name, getattr(self, name))
        put(made, "onto", onto)
        put(made, "links", links)
        put(made, "time", ())
        put(made, "space", None)
        put(made, "_hash", hash((self.axes, self.shape, self.ids, onto, links)))
        return made

    def array(self) -> np.ndarray[tuple[int, ...], np.dtype[np.int64]]:
        """Returns the device ids as an array of the shape of the mesh."""
        return np.array(self.ids, np.int64).reshape(self.shape)

    def axis_size(self, axis: str) -> int:
        """Returns the size of `axis`. Raises MeshError if the mesh has no such axis."""
        self._index(axis)
        return self.sizes[axis]

    def coords(self, device_id: int) -> dict[str, int]:
        """Returns the coordinate of a device along each axis. Raises MeshError if it is not in the
        mesh.

        >>> Mesh.parse("dp=2 tp=4").coords(6)
        {'dp': 1, 'tp': 2}
        """
        position = _positions(self).get(device_id)
        if position is None:
            raise self._wrong(
                f"mesh.coords: device {device_id!r} is not in the mesh",
                "name one of mesh.device_ids",
                devices=shortened_ids(self.ids),
            )
        found: dict[str, int] = {}
        for axis, size in zip(reversed(self.axes), reversed(self.shape)):
            position, found[axis] = divmod(position, size)
        return {axis: found[axis] for axis in self.axes}

    def device_at(self, coords: Mapping[str, int]) -> int:
        """Returns the device at `coords`, which name every axis; negative coordinates count from
        the end.

        Raises MeshError if an axis is missing or a coordinate is outside of its axis.

        >>> Mesh.parse("dp=2 tp=4").device_at({"dp": 1, "tp": 2})
        6
        """
        missing = [axis for axis in self.axes if axis not in coords]
        if missing:
            raise self._wrong(
                f"mesh.device_at: no coordinate for {names_text(missing)}",
                "give a coordinate for every axis, or use mesh.slice(...) for a part",
                coords=str(dict(coords)),
            )
        place = [0] * len(self.axes)
        for axis, coordinate in coords.items():
            place[self._index(axis)] = self._coordinate("device_at", axis, coordinate)
        position = 0
        for coordinate, size in zip(place, self.shape):
            position = position * size + coordinate
        return self.ids[position]

    def groups(self, axis: str | Sequence[str]) -> list[list[int]]:
        """Returns the device ids that a collective over `axis` joins: one list per group, in axis
        order.

        Several axes are read major to minor. Raises MeshError if an axis is unknown or named twice.

        >>> Mesh.parse("dp=2 tp=3").groups("dp")
        [[0, 3], [1, 4], [2, 5]]
        """
        names = (axis,) if isinstance(axis, str) else tuple(axis)
        over = [self._index(name) for name in names]
        if len(set(over)) != len(over):
            raise self._wrong(
                f"mesh.groups: {names_text(names)} names an axis twice", "name each axis once"
            )
        rest = [i for i in range(len(self.axes)) if i not in over]
        width = math.prod(self.shape[i] for i in over)
        table: list[list[int]] = self.array().transpose(rest + over).reshape(-1, width).tolist()
        return table

    # ---- parts ---------------------------------------------------------------------------------
    def __getitem__(self, axes: str | tuple[str, ...]) -> Mesh:
        """Returns the sub-mesh along `axes`, in that order, at coordinate 0 of the others."""
        names = (axes,) if isinstance(axes, str) else axes
        if not isinstance(names, tuple) or not names:
            raise self._wrong(
                f"mesh[...]: {axes!r} is not an axis or a tuple of axes",
                f"name an axis: mesh[{self.axes[0]!r}]",
            )
        if self.time:
            return self._around_time(lambda space: space[names])
        kept = [self._index(name) for name in names]
        rest = [i for i in range(len(self.axes)) if i not in kept]
        if len(set(kept)) != len(kept):
            raise self._wrong(
                f"mesh[...]: {names_text(names)} names an axis twice", "name each axis once"
            )
        part = Mesh(names, self.array().transpose(rest + kept)[(0,) * len(rest)])
        return part._with_device_order(self.onto and self.onto[names], self.links)

    def slice(self, **where: int | slice | range) -> Mesh:
        """Returns the part of the mesh at `where`: a number drops its axis, a slice or range keeps
        it.

        Raises MeshError if no device or no axis is left, or for a part of a folded axis.

        >>> mesh = Mesh.parse("pp=4 tp=2")
        >>> mesh.slice(pp=1).text(), mesh.slice(pp=slice(1, 3)).text()
        ('tp=2', 'pp=2 tp=2')
        """
        if self.time:
            return self._around_time(lambda space: space.slice(**where))
        part = self.array()
        pick: list[int | slice] = [slice(None)] * len(self.axes)
        for axis, which in where.items():
            i = self._index(axis)
            if isinstance(which, slice | range):
                chosen = range(self.shape[i])[which] if isinstance(which, slice) else which
                if len(chosen) == 0:
                    raise self._wrong(
                        f"mesh.slice: {axis}={which!r} selects nothing",
                        f"select from 0 to {self.shape[i] - 1}",
                    )
                part = part.take([self._coordinate("slice", axis, c) for c in chosen], axis=i)
            else:
                pick[i] = self._coordinate("slice", axis, which)
        dropped = {i for i, which in enumerate(pick) if not isinstance(which, slice)}
        if len(dropped) == len(self.axes):
            raise self._wrong(
                "mesh.slice: every axis is dropped, so no mesh is left",
                "keep one axis, for instance "
                f"{self.axes[0]}=slice(0, 1), or ask mesh.device_at(...)",
                where=str(where),
            )
        names = tuple(axis for i, axis in enumerate(self.axes) if i not in dropped)
        submesh = Mesh(names, part[tuple(pick)])._with_device_order(None, self.links)
        if self.onto is None:
            return submesh
        folds, below = self.folds, {}
        for axis, which in where.items():
            if isinstance(which, slice | range):
                raise self._wrong(
                    f"mesh.slice: a part of axis {axis!r} of a folded mesh has no devices of its"
                    " own",
                    "slice first, and fold the part",
                    onto=self.onto.text(),
                )
            below[axis] = int(which) % self.sizes[axis] // folds[axis]
        return submesh._folded(self.onto.slice(**below))

    # ---- ambient -------------------------------------------------------------------------------
    def __enter__(self) -> Self:
        now = context.settings()
        chosen = now.program.schedule
        # The topology is taken from the outer mesh, or there is none: the user has set no other.
        if chosen.topology is (now.mesh and now.mesh.links):
            chosen = replace(chosen, topology=self.links)
        context.enter(mesh=self, schedule=chosen)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        context.leave()

    # ---- a value -------------------------------------------------------------------------------
    def __contains__(self, axis: object) -> bool:
        return axis in self.sizes

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if not isinstance(other, Mesh):
            return NotImplemented
        mine, theirs = (
            (m._hash, m.axes, m.shape, m.ids, m.onto, m.time, m.space, m.links)
            for m in (self, other)
        )
        return mine == theirs

    def __hash__(self) -> int:
        return self._hash

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        # Hashes of strings differ between processes, so a mesh is pickled as its arguments.
        if self.time:
            return (in_time, (self.space, {a: self.sizes[a] for a in self.time}))
        return (_mesh, (self.axes, self.ids, self.shape, self.onto, self.links))

    def __repr__(self) -> str:
        first = self.ids[0]
        run = range(first, first + len(self.ids))
        if self.time:
            turns = ", ".join(f"{a}={self.sizes[a]}" for a in self.time)
            return f"{self.space!r}.in_time({turns})"
        if self.onto is not None:
            return f"{self.unfolded!r}.fold({self.onto.text()!r})"
        if self.ids != tuple(run):
            return f"Mesh({self.axes}, devices={list(self.ids)}, shape={self.shape})"
        devices = "" if first == 0 else f", devices={run}"
        return f"Mesh({self.axes}{devices}, shape={self.shape})"

    # ---- checks --------------------------------------------------------------------------------
    def _wrong(self, message: str, fix: str, **more: object) -> MeshError:
        return MeshError(message, rows=[("mesh", self.text()), *more.items()], fix=fix)

    def _index(self, axis: object) -> int:
        if isinstance(axis, str) and axis in self.sizes:
            return self.axes.index(axis)
        raise self._wrong(
            f"Mesh: axis {axis!r} is not one of {names_text(self.axes)}",
            f"name one of {', '.join(self.axes)}",
        )

    def _coordinate(self, call: str, axis: str, value: object) -> int:
        size = self.sizes[axis]
        if is_whole(value) and -size <= value < size:
            return int(value) % size
        raise self._wrong(
            f"mesh.{call}: {axis}={value!r} is outside the axis, which has size {size}",
            f"give a number from 0 to {size - 1}",
        )


def in_time(mesh: Mesh | None, turns: Mapping[str, int]) -> Mesh:
    """Returns `mesh` with the axis `turns` in time (`Mesh.in_time`); for None, that of one
    device."""
    sizes = tuple(turns.values())
    if len(sizes) != 1 or not all(is_whole(n) and n > 0 for n in sizes):
        raise MeshError(
            f"mesh.in_time: {dict(turns)} is not one axis with a number of turns",
            fix="give one, of a size above 0: mesh.in_time(mb=8)",
        )
    names = checked_axes(tuple(turns))
    if mesh is not None and (mesh.time or any(a in mesh for a in names)):
        raise mesh._wrong(f"mesh.in_time: it cannot have the axis {names[0]!r} in time besides",
                          "name another axis; one lies in time")  # fmt: skip
    return _in_time(mesh, names, sizes)


@lru_cache(maxsize=1024)
def _in_time(mesh: Mesh | None, names: tuple[str, ...], sizes: tuple[int, ...]) -> Mesh:
    one = Mesh(("device",), 1) if mesh is None else mesh
    count, put, made = math.prod(sizes), object.__setattr__, object.__new__(Mesh)
    axes, shape = (() if mesh is None else mesh.axes), (() if mesh is None else mesh.shape)
    put(made, "axes", (*axes, *names))
    put(made, "shape", (*shape, *sizes))
    put(made, "ids", tuple(i for i in one.ids for _ in range(count)))
    put(made, "sizes", MappingProxyType(dict(zip(made.axes, made.shape))))
    put(made, "onto", None if one.onto is None else _in_time(one.onto, names, sizes))
    put(made, "links", one.links)
    put(made, "time", names)
    put(made, "space", mesh)
    put(made, "_hash", hash((made.axes, made.shape, made.ids, made.onto, names, one.links)))
    return made


@lru_cache(maxsize=1024)
def joined(a: Mesh, b: Mesh) -> Mesh | None:
    """Returns the mesh with the devices and the axes in time of both; None if they contradict."""
    spaces = {m.space if m.time else m for m in (a, b)} - {None}
    times = [{x: m.sizes[x] for x in m.time} for m in (a, b) if m.time]
    if len(spaces) > 1 or any(t != times[0] for t in times):
        return None
    space = spaces.pop() if spaces else None
    return in_time(space, times[0]) if times else space


def _mesh(
    axes: tuple[str, ...],
    ids: tuple[int, ...],
    shape: tuple[int, ...],
    onto: Mesh | None,
    links: Topology | None,
) -> Mesh:
    return Mesh(axes, ids, shape)._with_device_order(onto, links)


def folded_onto(mesh: Mesh, onto: object) -> Mesh:
    """Returns the smaller mesh that `onto` describes for `mesh`. Raises MeshError if it is no
    fold."""
    sizes = dict(mesh.sizes)
    if isinstance(onto, Mesh):
        if set(onto.axes) != set(mesh.axes) or onto.axes != mesh.axes:
            raise _no_fold(mesh, onto.text(), f"axes in this order: {', '.join(mesh.axes)}")
        sizes = dict(onto.sizes)
    elif is_whole(onto):
        left = int(onto)
        for axis in reversed(mesh.axes):  # the last axes, which communicate most, keep theirs
            keep = math.gcd(left, mesh.sizes[axis])
            sizes[axis], left = keep, left // keep
        if left != 1 or onto < 1:
            raise _no_fold(mesh, str(onto), "a number of devices that its axes divide into")
    else:
        sizes_given = Mesh.parse(onto).sizes if isinstance(onto, str) and onto else onto
        if not isinstance(sizes_given, Mapping) or not all(
            a in mesh.sizes and is_whole(n) and n > 0 for a, n in sizes_given.items()
        ):
            raise _no_fold(mesh, repr(onto), 'sizes by axis, e.g. "dp=2,tp=1"')
        sizes.update({a: int(n) for a, n in sizes_given.items()})
    odd = [a for a in mesh.axes if mesh.sizes[a] % sizes[a]]
    if odd:
        raise _no_fold(
            mesh, f"{odd[0]}={sizes[odd[0]]}", f"a size that divides {mesh.sizes[odd[0]]}"
        )
    if isinstance(onto, Mesh):
        return onto
    first = min(mesh.ids)
    count = math.prod(sizes.values())
    return Mesh(mesh.axes, range(first, first + count), sizes)


def _no_fold(mesh: Mesh, fold: str, want: str) -> MeshError:
    return MeshError(
        f"mesh.fold: {fold} is no fold of the mesh", mesh=mesh.text(), fix=f"give {want}"
    )


# ---- the ambient mesh --------------------------------------------------------------------------
def current() -> Mesh:
    """Returns the mesh of the innermost `with mesh:`. Raises MeshError if no mesh is open."""
    mesh = context.settings().mesh
    if mesh is None:
        raise MeshError(
            "mesh.current: no mesh is open here",
            fix="open one: with ts.mesh.auto(): ..., or pass mesh=...",
        )
    return mesh


def auto(axes: Sequence[str] = ("dp",), shape: Shape = None) -> Mesh:
    """Returns a mesh over all devices of this program, with the one axis "dp" unless `axes` are
    given."""
    return Mesh(axes, devices=devices.device_count(), shape=shape)


@lru_cache(maxsize=64)
def _positions(mesh: Mesh) -> dict[int, int]:
    return {device: position for position, device in enumerate(mesh.ids)}
