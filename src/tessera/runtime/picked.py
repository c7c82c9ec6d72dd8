"""Elements of a tensor on the host: each device that holds some sends these, and nothing else."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from ..core.layout import TensorType
from ..core.locks import LAUNCH
from ..ir.graph.oracle import FOLD
from ..ir.graph.time_axis import without_time_axis
from .arrays import alive, folds_of

Array = Any
Indices = np.ndarray[Any, Any]
Place = tuple[Any, tuple[int, ...]]
"""A part of the result: its index, and its shape."""


def picked(data: Array, t: TensorType, at: Sequence[Indices]) -> np.ndarray[Any, Any] | None:
    """Returns the elements of a tensor at all combinations of the indices `at`, an ascending array
    for each dim; None if other processes hold one of them. Of a pending sum all terms are read, and
    added here.

    Raises DonatedError if the tensor was donated. Each process may call this by itself.
    """
    t = without_time_axis(t)
    terms = [t.sizes[a] for a in t.partial_axes]
    found = np.empty([*terms, *(len(i) for i in at)], t.dtype.numpy)
    missing = np.ones(found.shape, bool)
    parts: list[tuple[list[Place], Array]] = []
    with LAUNCH:
        alive([data], [t])
        for shard in data.addressable_shards if missing.any() else ():
            begins = [i.start or 0 for i in shard.index]
            places, linear = _places(t, begins, shard.data.shape, at, missing)
            if places:
                shape = shard.data.shape
                index = np.unravel_index(np.concatenate(linear), shape) if shape else ()
                parts.append((places, _at(shard.data, tuple(i.astype(np.int32) for i in index))))
    if missing.any():
        return None
    for places, values in parts:
        begin, host = 0, np.asarray(values)
        for where, shape in places:
            size = math.prod(shape)
            found[where] = host[begin : begin + size].reshape(shape)
            begin += size
    for _, kind in t.partial:
        found = FOLD[kind].reduce(found, axis=0, dtype=found.dtype)
    return found


def _places(
    t: TensorType,
    begins: Sequence[int],
    shape: tuple[int, ...],
    at: Sequence[Indices],
    missing: np.ndarray[Any, Any],
) -> tuple[list[Place], list[Indices]]:
    """Returns the parts of the result that are missing and on a device, whose array of `shape`
    begins at `begins`; and the linear indices of each in the array. They are not missing any
    more."""
    places: list[Place] = []
    linear: list[Indices] = []
    # The blocks inside a device's array are views: of an array without memory, that is never read,
    # their addresses are indices.
    addresses = np.lib.stride_tricks.as_strided(np.zeros(1, np.uint8), shape, _strides(shape))
    zero = addresses.__array_interface__["data"][0]
    folded = t.mesh is not None and t.mesh.onto is not None
    lead = len(t.partial) * (1 + folded)  # array dims of the terms
    for inner in np.ndindex(*shape[:lead]):
        term = tuple(a + i for a, i in zip(begins, inner))
        if folded:  # (devices, folds of a device) of each axis
            sizes = [t.mesh.folds[a] if t.mesh else 1 for a in t.partial_axes]
            term = tuple(d * n + f for d, f, n in zip(term[::2], term[1::2], sizes))
        for first, block in folds_of(t, begins[lead:], addresses[(*inner, ...)]):
            inside = [
                np.flatnonzero((i >= a) & (i < a + n))
                for i, a, n in zip(at, first, block.shape, strict=True)
            ]
            where = np.ix_(*([k] for k in term), *inside)
            if not missing[where].any():
                continue
            missing[where] = False
            index = np.array(block.__array_interface__["data"][0] - zero)
            for i, k, a, stride in zip(at, inside, first, block.strides, strict=True):
                index = index[..., None] + (i[k] - a) * stride
            places.append((where, missing[where].shape))
            linear.append(index.reshape(-1))
    return places, linear


def _strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The strides of a contiguous array of bytes."""
    return tuple(math.prod(shape[d + 1 :]) for d in range(len(shape)))


@jax.jit
def _at(x: Array, index: tuple[Array, ...]) -> Array:
    return x[index].reshape(-1)
