"""The accesses of a kernel in the order in which a device makes them, by enumeration of indices.

Indices do not depend on data, so this needs no arrays. Large kernels are enumerated at sizes of a
few tiles.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import product
from typing import NamedTuple, assert_never

from ...core.errors import GraphError, ShapeError
from .body import Enter, Load, Loop, Op, Put, Quiet, Statement, Store, Wait, When, naming, where
from .index import sizes_of
from .kernel import Kernel, with_sizes

MOST = 200_000  # accesses and turns of loops that are enumerated
Place = tuple[int, ...]


class Access(NamedTuple):
    """A statement that runs, with its indices: of the tile, of a put's target, of the device that
    is put to, and of the slot."""

    s: Load | Store | Put | Wait | Enter | Quiet
    at: Place = ()
    to: Place = ()
    rank: Place = ()
    slot: Place = ()


class Step(NamedTuple):
    """A step of the grid on a device, with its accesses in order."""

    rank: Place
    point: Place
    accesses: tuple[Access, ...]


def steps(kernel: Kernel) -> list[Step] | None:
    """All steps of the grid on all devices; None if there are more than MOST accesses and turns."""
    left, made = [MOST], []
    if math.prod([*(n for _, n in kernel.mesh), *kernel.extents.values()]) > MOST:
        return None
    for rank in kernel.ranks:
        names = kernel.at(rank)
        for point in product(*map(range, kernel.extents.values())):
            inner = names | dict(zip(kernel.extents, point, strict=True))
            accesses = tuple(_walk(kernel.body, inner, left))
            left[0] -= 1
            if left[0] < 0:
                return None
            made.append(Step(rank, point, accesses))
    return made


def _walk(body: tuple[Statement, ...], names: dict[str, int], left: list[int]) -> Iterator[Access]:
    """The accesses of statements. Ends early when none of `left` are left."""
    for s in body:
        try:
            left[0] -= not isinstance(s, Op)
            match s:
                case Op():
                    pass
                case Load() | Store():
                    yield Access(s, sizes_of(s.at, names))
                case Loop():
                    for i in range(s.low.value(names), s.high.value(names)):
                        if left[0] < 0:
                            return
                        left[0] -= 1
                        yield from _walk(s.body, names | {s.index: i}, left)
                case When():
                    if s.test.value(names):
                        yield from _walk(s.body, names, left)
                case Put():
                    places = (s.src_at, s.dst_at, s.rank, s.slot)
                    yield Access(s, *(sizes_of(p, names) for p in places))
                case Wait():
                    yield Access(s, slot=sizes_of(s.slot, names))
                case Enter() | Quiet():
                    yield Access(s)
                case _:
                    assert_never(s)
        except GraphError:
            with naming(where(s)):
                raise


def enumerated(kernel: Kernel) -> tuple[Kernel, list[Step]]:
    """The kernel, at smaller sizes if it is large, with its steps. Raises GraphError if it is large
    at all sizes."""
    found = steps(kernel)
    for most in (4, 2):
        if found is None:
            kernel = reduced(kernel, most)
            found = steps(kernel)
    if found is None:
        fix = "verify it at smaller sizes: with_sizes(kernel, ...)"
        raise GraphError(f"verify: {kernel.name} has more than {MOST} accesses", fix=fix)
    return kernel, found


def reduced(kernel: Kernel, most: int) -> Kernel:
    """The kernel with each dim of references, and then each axis, reduced to `most` tiles or
    devices, as far as tiles still divide."""
    for name, size in (*kernel.dims, *kernel.mesh):
        cuts = [
            tile.value(kernel.sizes)
            for r in kernel.refs
            for dim, tile in zip(r.shape, r.tiles, strict=True)
            if name in dim.names
        ]
        is_axis = name in dict(kernel.mesh)
        unit = 1 if is_axis else math.lcm(*cuts)
        if size <= unit * most or not (cuts or is_axis):
            continue
        try:
            kernel = with_sizes(kernel, **{name: unit * most})
        except ShapeError:
            continue
    return kernel
