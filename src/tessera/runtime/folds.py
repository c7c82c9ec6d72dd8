"""Folds: the mesh places that one device takes, and the device's blocks of a value.

On a mesh that is not folded each device takes one place. A device holds, and computes, one block of
a value for each fold in which the value differs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..core.layout import TensorType
from ..core.mesh import Mesh
from . import xp_jax
from .arrays import block_shape

Array = Any


class Blocks(tuple[Array, ...]):
    """The blocks of a value on one device: one for each fold in which the value differs, in the
    order of the mesh's axes, the last one fastest."""

    __slots__ = ()

    @property
    def shape(self) -> tuple[int, ...]:
        shape: tuple[int, ...] = self[0].shape
        return shape


jax.tree_util.register_pytree_node(Blocks, lambda x: (tuple(x), None), lambda _, xs: Blocks(xs))


@dataclass(frozen=True, slots=True)
class Place:
    """The mesh place at which local code runs: this device's place in fold `at`."""

    counts: Mapping[str, int]  # places of a device along each folded axis
    at: Mapping[str, int]

    def shape(self, t: TensorType) -> tuple[int, ...]:
        return t.local_shape

    def rank(self, axes: Sequence[str], sizes: Mapping[str, int]) -> Array:
        rank: Array = None
        for a in axes:
            above = None if rank is None else rank * sizes[a]
            rank = lax.axis_index(a)
            if a in self.counts:
                rank = rank * self.counts[a] + self.at[a]
            rank = rank if above is None else above + rank
        return rank

    def start(self, t: TensorType, dim: int, digit: int) -> Array:
        return self.index(t, dim)[0]

    def index(self, t: TensorType, dim: int) -> Array:
        return self._lines(t, dim)[0]

    def valid(self, t: TensorType, dim: int) -> Array:
        """Returns which local elements along `dim` are real, not padding."""
        return self._lines(t, dim)[1]

    def _lines(self, t: TensorType, dim: int) -> tuple[Array, Array]:
        """Returns (global index, whether it is real) of each local element along `dim`."""
        total, ok = np.zeros(1, np.int32), np.ones(1, np.bool_)
        for d in t.digits(dim):
            at = self.rank(d.axes, t.sizes) if d.axes else np.int32(0)
            line = np.arange(d.local, dtype=np.int32) + at * np.int32(d.local)
            total = (total[:, None] * np.int32(d.size) + line[None, :]).reshape(-1)
            if d.uneven:
                ok = (ok[:, None] & (line < d.size)[None, :]).reshape(-1)
            else:
                ok = np.repeat(ok, d.local) if isinstance(ok, np.ndarray) else ok.repeat(d.local)
        return jnp.asarray(total), ok


@dataclass(frozen=True, slots=True)
class Along:
    """The places along `axes`, major first: for each axis the number of devices and of folds per
    device."""

    axes: tuple[str, ...]
    sizes: tuple[tuple[int, int], ...]  # per axis: (devices, folds)

    @property
    def devices(self) -> int:
        return prod(devices for devices, _ in self.sizes)

    @property
    def folds(self) -> int:
        return prod(folds for _, folds in self.sizes)

    def device_and_fold(self, place: int) -> tuple[int, int]:
        device, fold, stride = 0, 0, (1, 1)
        for devices, folds in reversed(self.sizes):
            place, here = divmod(place, devices * folds)
            device += here // folds * stride[0]
            fold += here % folds * stride[1]
            stride = stride[0] * devices, stride[1] * folds
        return device, fold

    def devices_first(self, x: Array) -> Array:
        """Returns [places, ...] as [devices, folds, ...]."""
        rest, n = x.shape[1:], 2 * len(self.sizes)
        x = x.reshape(*(k for size in self.sizes for k in size), *rest)
        x = xp_jax.transpose(x, (*range(0, n, 2), *range(1, n, 2), *range(n, x.ndim)))
        return x.reshape(self.devices, self.folds, *rest)

    def places(self, x: Array) -> Array:
        """Returns [devices, folds, ...] as [places, ...]."""
        rest, n = x.shape[2:], len(self.sizes)
        x = x.reshape(*(d for d, _ in self.sizes), *(f for _, f in self.sizes), *rest)
        mixed = (d for k in range(n) for d in (k, n + k))
        x = xp_jax.transpose(x, (*mixed, *range(2 * n, x.ndim)))
        return x.reshape(self.devices * self.folds, *rest)


class Folds:
    """The folds of `mesh`; with `at`, that fold as if it were the only one."""

    def __init__(self, mesh: Mesh | None, at: Mapping[str, int] | None = None) -> None:
        self.mesh, self.at = mesh, at
        folds = {} if mesh is None or mesh.onto is None else mesh.folds
        self.places = {a: n for a, n in folds.items() if n > 1}
        self.counts = self.places if at is None else {}
        (self.somewhere,) = self.every(())

    def axes(self, *types: TensorType) -> tuple[str, ...]:
        """Returns the folded axes along which values of these types differ."""
        if not self.counts:
            return ()
        used = {a for t in types for a in (*t.split_axes, *t.partial_axes, *t.varying)}
        return tuple(a for a in self.counts if a in used)

    def every(self, axes: Sequence[str]) -> Iterator[Place]:
        """Yields the places that differ along `axes`, at index 0 of other axes."""
        for at in product(*(range(n) if a in axes else (0,) for a, n in self.counts.items())):
            here = dict(zip(self.counts, at, strict=True)) if self.at is None else self.at
            yield Place(self.places, here)

    def count(self, axes: Sequence[str]) -> int:
        return prod(self.counts[a] for a in axes if a in self.counts)

    def along(self, axes: tuple[str, ...]) -> Along:
        assert self.mesh is not None
        devices = self.mesh.physical.sizes
        return Along(axes, tuple((devices[a], self.counts.get(a, 1)) for a in axes))

    def to(self, x: Blocks, axes: Sequence[str], want: Sequence[str]) -> Blocks:
        """Returns `x`, which has a block for each fold along `axes`, with one for each fold along
        `want`."""
        if axes == want:
            return x
        at = np.arange(len(x)).reshape([n if a in axes else 1 for a, n in self.counts.items()])
        at = at[tuple(slice(None) if a in want else slice(1) for a in self.counts)]
        at = np.broadcast_to(at, [n if a in want else 1 for a, n in self.counts.items()])
        return Blocks(x[i] for i in at.ravel())

    def groups(self, axes: Sequence[str], along: Sequence[str]) -> list[list[int]]:
        """Returns the indices of blocks (one for each fold along `axes`) in groups that differ only
        along `along`, in the order of these axes, the last one fastest."""
        at = np.arange(self.count(axes)).reshape([self.counts[a] for a in axes])
        inner = [axes.index(a) for a in along if a in self.counts]
        outer = [d for d in range(len(axes)) if d not in inner]
        groups: list[list[int]] = (
            at.transpose(*outer, *inner).reshape(-1, self.count(along)).tolist()
        )
        return groups

    # -- the arrays of a program ------------------------------------------------------------------
    def unpack(self, x: Array, t: TensorType) -> Blocks:
        """Returns the blocks in a device's array of a value of type `t`."""
        if not self.axes(t):
            return Blocks((x if x.shape == t.local_shape else lax.reshape(x, t.local_shape),))
        rows = xp_jax.transpose(x, self._folds_first(t))
        rows = lax.reshape(rows, (self.count(self.axes(t)), *t.local_shape))
        return Blocks(rows)

    def pack(self, x: Blocks, t: TensorType) -> Array:
        shape = block_shape(t)
        if len(x) > 1:
            perm = self._folds_first(t)
            rows = jnp.stack(x).reshape([shape[d] for d in perm])
            return xp_jax.transpose(rows, tuple(map(perm.index, range(len(perm)))))
        return x[0] if x[0].shape == shape else lax.reshape(x[0], shape)

    def _folds_first(self, t: TensorType) -> tuple[int, ...]:
        """Returns the dims of a device's array, with those that count folds first."""
        named: list[str | None] = []  # per dim, the axis whose folds it counts
        for a in (*t.partial_axes, *t.varying):
            named += [None, a]
        for f in (f for dim in t.dims for f in dim):
            for a in f.axes:
                named += [None, a]
            named.append(None)
        first = [named.index(a) for a in self.axes(t)]
        return (*first, *(d for d in range(len(named)) if d not in first))
