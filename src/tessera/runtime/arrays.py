"""Layout of a typed tensor in device memory: one JAX array, with one array dim for each factor.

A dim of one factor is one array dim, padded to whole blocks; a dim of several factors is several
array dims. Each partial axis is a leading dim of its size; the axes along which devices hold
different values (`varying`) follow. So every type has a `NamedSharding`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from threading import active_count
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from ..core.devices import need_devices
from ..core.dtypes import dtype_of
from ..core.errors import BackendError, DonatedError, LayoutError, UsageError
from ..core.layout import Factor, TensorType, plain, shard_count
from ..core.locks import LAUNCH
from ..core.mesh import Mesh
from ..ir.graph.oracle import FOLD
from ..ir.graph.time_axis import without_time_axis
from ..lang.value.engine import Parts
from .devices import every, failed, jax_mesh, start, wide_numbers
from .jax_private import ArrayImpl, gone
from .processes.replica_consistency import compare_values

Array = Any


@lru_cache(maxsize=65536)
def array_shape(t: TensorType) -> tuple[int, ...]:
    """Returns the shape of the JAX array that holds a value of type `t`."""
    return tuple(n for n, _, _ in _parts(t))


@lru_cache(maxsize=65536)
def block_shape(t: TensorType) -> tuple[int, ...]:
    """Returns the shape of one device's block of that array."""
    return tuple(here for _, here, _ in _parts(t))


@lru_cache(maxsize=65536)
def spec(t: TensorType) -> PartitionSpec:
    """Returns the partition of that array over the mesh axes."""
    return PartitionSpec(*(axes for _, _, axes in _parts(t)))


def _parts(t: TensorType) -> list[tuple[int, int, Any]]:
    """Returns the dims of that array: (size, size on a device, axes). On a folded mesh an axis is
    two dims: the devices, and the folds of each device."""
    t = without_time_axis(t)
    folded = t.mesh is not None and t.mesh.onto is not None
    rows: list[tuple[int, int, Any]] = []
    for a in (*t.partial_axes, *t.varying):
        rows += _axis(t, a) if folded else [(t.sizes[a], 1, a)]
    for f in (f for dim in t.dims for f in dim):
        local = -(-f.size // shard_count(f.axes, t.sizes))
        if folded and f.axes:
            rows += [row for a in f.axes for row in _axis(t, a)]
            rows.append((local, local, None))
        else:
            axes = f.axes if len(f.axes) > 1 else (f.axes[0] if f.axes else None)
            rows.append((_padded(f, t), local, axes))
    return rows


def _axis(t: TensorType, axis: str) -> list[tuple[int, int, Any]]:
    assert t.mesh is not None
    folds = t.mesh.folds[axis]
    return [(t.sizes[axis] // folds, 1, axis), (folds, folds, None)]


def _padded(f: Factor, t: TensorType) -> int:
    n = shard_count(f.axes, t.sizes)
    return -(-f.size // n) * n


def _flat_shape(t: TensorType) -> tuple[int, ...]:
    """Returns the shape of that array on a mesh without folds."""
    lead = [t.sizes[a] for a in (*t.partial_axes, *t.varying)]
    return (*lead, *(_padded(f, t) for dim in t.dims for f in dim))


@lru_cache(maxsize=65536)
def sharding(t: TensorType) -> Any:
    """Returns the sharding of that array. Raises BackendError if the machine is smaller than the
    mesh."""
    t = without_time_axis(t)
    if t.mesh is None:
        return jax.sharding.SingleDeviceSharding(every()[0])
    return NamedSharding(jax_mesh(t.mesh), spec(t))


def place(value: np.ndarray[Any, Any], t: TensorType) -> Array:
    """Returns a host array placed on the devices in the layout `t`; `fetch` is its inverse."""
    with wide_numbers(t.dtype.is_wide):
        return _placed(value, without_time_axis(t))


def _placed(value: np.ndarray[Any, Any], t: TensorType) -> Array:
    axis_sizes = [t.sizes[a] for a in t.varying]
    x = np.ascontiguousarray(value, t.dtype.numpy)
    x = x.reshape([*axis_sizes, *(f.size for d in t.dims for f in d)])
    rows = [(0, 0)] * len(axis_sizes) + [(0, _padded(f, t) - f.size) for d in t.dims for f in d]
    if any(after for _, after in rows):
        x = np.pad(x, rows)
    for axis, kind in t.partial:
        n = t.sizes[axis]
        others = np.zeros_like(x) if kind == "sum" else x
        x = np.stack([x, *[others] * (n - 1)])
    # Partial dims were stacked last to first.
    k = len(t.partial)
    x = np.transpose(x, (*reversed(range(k)), *range(k, x.ndim)))
    x = x.reshape(array_shape(t))
    if t.mesh is None:
        # Uncommitted, like the results of programs: otherwise a program would be compiled twice,
        # for values from the host and for results of programs.
        start()
        return jax.device_put(x)
    where = sharding(t)
    compare_values([(np.asarray(value), where)], always=True)
    try:
        if where.is_fully_addressable:
            return jax.device_put(x, where)
        # device_put compares values, too: there NaN is unequal to itself, and a different shape in
        # one process ends the process.
        return jax.make_array_from_callback(x.shape, where, x.__getitem__, dtype=x.dtype)
    except RuntimeError as error:
        raise BackendError(
            f"the value cannot be placed: {str(error).splitlines()[0]}",
            tensor=t,
            fix="use a smaller tensor, or split it over more devices",
        ) from None


def place_blocks(fill: Callable[[Parts], None], t: TensorType) -> Array:
    """Returns an array in the layout `t` whose blocks `fill` writes, all blocks of this process in
    one call.

    Each device of this process gets its own block, fold by fold; devices with equal blocks share
    one. So no host holds the whole tensor, unless its devices do, `t` is partial, or there is no
    mesh. For a type with `varying` axes the slices index [*axes, *shape]; processes may then have
    different values.
    """
    t = without_time_axis(t)
    axis_sizes = tuple(t.sizes[a] for a in t.varying)
    plain = not t.split_axes and all(len(d) == 1 for d in t.dims)
    parted = bool(axis_sizes) and (t.mesh is None or t.mesh.onto is not None or not plain)
    if t.mesh is None or t.partial or parted:
        whole = np.empty((*axis_sizes, *t.shape), t.dtype.numpy)
        fill([(tuple(slice(0, n) for n in whole.shape), whole)])
        return place(whole, t)
    sizes, where = array_shape(t), sharding(t)
    blocks_by_index: dict[tuple[tuple[int, int], ...], np.ndarray[Any, Any]] = {}
    parts: list[tuple[tuple[slice, ...], np.ndarray[Any, Any]]] = []

    def bounds(index: Any) -> tuple[tuple[int, int], ...]:
        return tuple(s.indices(n)[:2] for s, n in zip(index, sizes, strict=True))

    for at in map(bounds, where.addressable_devices_indices_map(sizes).values()):
        if at in blocks_by_index:
            continue
        first = [a for a, _ in at]
        x = blocks_by_index[at] = np.zeros([b - a for a, b in at], t.dtype.numpy)
        for begin, part in [(first, x)] if axis_sizes else folds_of(t, first, x):
            parts.append((tuple(slice(a, a + n) for a, n in zip(begin, part.shape)), part))
    fill(parts)
    # JAX calls the callback in a process without devices of `where`, too.
    nothing = np.broadcast_to(np.zeros((), t.dtype.numpy), sizes)
    with wide_numbers(t.dtype.is_wide):
        return jax.make_array_from_callback(
            sizes,
            where,
            lambda index: blocks_by_index.get(bounds(index), nothing),
            dtype=t.dtype.numpy,
        )


def blocks(
    data: Array, t: TensorType, writer: int
) -> list[tuple[tuple[int, ...], np.ndarray[Any, Any]]]:
    """Returns the blocks that this process writes of a complete tensor, copied to the host, each
    with the index of its first element. Of the devices that hold the same block, `writer` selects
    one, so that all processes share the work."""
    t = without_time_axis(t)
    if t.mesh is None:
        mine = writer % jax.process_count() == jax.process_index()
        return [((0,) * t.rank, _copied(data).reshape(t.shape))] if mine else []
    where, shape = data.sharding, data.shape
    parts = math.prod(shape) // max(1, math.prod(where.shard_shape(shape)))
    found: list[tuple[tuple[int, ...], np.ndarray[Any, Any]]] = []
    for s in data.addressable_shards:
        if s.replica_id == writer % max(1, len(where.device_set) // max(1, parts)):
            found += folds_of(t, [i.start or 0 for i in s.index], _copied(s.data))
    return found


def folds_of(
    t: TensorType, first: Sequence[int], x: np.ndarray[Any, Any]
) -> Iterator[tuple[tuple[int, ...], np.ndarray[Any, Any]]]:
    """Yields the blocks inside `x`, a device's part of the array that begins at index `first`: one
    for each mesh place of the device, without padding. They are views of `x`."""
    dims: list[list[tuple[int, tuple[int, ...], int]]] = []  # of each dim: start, index in x, size
    shape, at = list[int](), 0
    for d in t.dims:
        *outer, last = d[: 1 + max((i for i, f in enumerate(d) if f.axes), default=0)]
        minor = math.prod(f.size for f in d[1 + len(outer) :])  # the minor factors, not split
        folds: list[tuple[int, tuple[int, ...], int]] = [(0, (), 1)]
        for f in (*outer, last):
            held, took = _places(f, t, first[at:], x.shape[at:])
            if f is not last:
                held = [(a + k, (*i, k), 1) for a, i, n in held for k in range(n)]
            folds = [(b * f.size + a, (*j, *i), n) for b, j, _ in folds for a, i, n in held]
            shape += x.shape[at : at + took]
            at += took
        shape[-1] *= minor
        at += len(d) - len(outer) - 1
        dims.append([(a * minor, i, n * minor) for a, i, n in folds])
    x = x.reshape(shape)
    for choice in itertools.product(*dims):
        if all(n > 0 for _, _, n in choice):
            index: Any = tuple(k for _, i, n in choice for k in (*i, slice(0, n)))
            yield tuple(a for a, _, _ in choice), x[(*index, ...)]


def _places(
    f: Factor, t: TensorType, first: Sequence[int], sizes: Sequence[int]
) -> tuple[list[tuple[int, tuple[int, ...], int]], int]:
    """Returns a device's parts of the factor `f`: (start, index, size) for each mesh place of the
    device; and the number of array dims of the factor. The device's part begins at `first` and has
    `sizes`."""
    if t.mesh is None or t.mesh.onto is None:
        return [(first[0], (), min(sizes[0], f.size - first[0]))], 1
    places: list[tuple[int, tuple[int, ...]]] = [(0, ())]
    for n, a in enumerate(f.axes):
        folds = t.mesh.folds[a]
        places = [
            (k * t.sizes[a] + first[2 * n] * folds + i, (*index, 0, i))
            for k, index in places
            for i in range(folds)
        ]
    local = sizes[2 * len(f.axes)]
    return [(k * local, i, min(local, f.size - k * local)) for k, i in places], 2 * len(f.axes) + 1


def local_row_indices(t: TensorType) -> np.ndarray[Any, Any]:
    """Returns the indices along dim 0 that the devices of this process hold, ascending."""
    t = without_time_axis(t)
    held, shape = np.zeros(t.shape[0], bool), array_shape(t)
    for index in sharding(t).addressable_devices_indices_map(shape).values():
        bounds = [s.indices(n)[:2] for s, n in zip(index, shape, strict=True)]
        block = np.broadcast_to(np.False_, [b - a for a, b in bounds])
        for begin, part in folds_of(t, [a for a, _ in bounds], block):
            held[begin[0] : begin[0] + part.shape[0]] = True
    return np.flatnonzero(held)


def fetch(data: Array, t: TensorType) -> np.ndarray[Any, Any]:
    """Returns the global value on the host; partial values are reduced there. Raises BackendError
    if other processes hold a part of it."""
    t = without_time_axis(t)
    if not (data.is_fully_addressable or data.is_fully_replicated):
        raise BackendError(
            "read: other processes hold a part of the tensor",
            tensor=t,
            fix="complete it first, in all of them: "
            + (f'dist.redistribute(x, "{[*t.shape]}")' if t.split_axes else "dist.all_reduce(x)")
            + ", or read it there: dist.to_host(x)",
        )
    if not data.sharding.addressable_devices:  # sharding is readable on a donated array, too
        raise BackendError(
            "read: other processes hold the tensor",
            tensor=f"{t} on {t.mesh.text() if t.mesh else 'no mesh'}",
            fix="read it in all processes: dist.to_host(x)",
        )
    one = len(data.sharding.device_set) == 1
    data = data if one else _copied_if_shared(data, t)
    try:
        x = (np.asarray(data) if one else _copied(data)).reshape(_flat_shape(t))
    except RuntimeError as error:
        if "deleted" in str(error):
            raise donated(t) from None
        raise failed("read", error, [("tensor", t)]) from None
    for _, kind in t.partial:
        x = FOLD[kind].reduce(x, axis=0, dtype=x.dtype)  # integers wrap around, as on devices
    axis_sizes = tuple(t.sizes[a] for a in t.varying)
    sizes = tuple(slice(0, n) for n in (*axis_sizes, *(f.size for d in t.dims for f in d)))
    return x[sizes].reshape((*axis_sizes, *t.shape))


def _copied_if_shared(data: Array, t: TensorType) -> Array:
    """Returns `data`, or a copy if another thread may donate it meanwhile."""
    if active_count() == 1 or jax.process_count() > 1:  # with several processes, one thread calls
        return data
    with LAUNCH:
        alive([data], [t])
        return data.copy()


def _copied(data: Array) -> np.ndarray[Any, Any]:
    """Returns its value as a copy in host memory.

    A view of device memory would end the process if another thread donated the array to a program
    over several devices while the view lives.
    """
    data.block_until_ready()  # outside of the lock: a program may wait for host callbacks
    with LAUNCH:
        return np.array(data)


def alive(arrays: Sequence[Array], types: Sequence[TensorType]) -> None:
    """Raises DonatedError if one of `arrays`, of these types, was donated. Without this check the
    engine reads the freed memory on several devices, and the process ends."""
    if not gone(arrays):
        return
    for a, t in zip(arrays, types, strict=True):
        if isinstance(a, ArrayImpl) and a.is_deleted():
            raise donated(t)


def donated(t: TensorType) -> DonatedError:
    """Returns the error for a tensor whose memory was donated. Raises DeviceLostError if one of its
    devices is lost."""
    if t.mesh is not None:
        need_devices(f"the tensor {t}", t.mesh.physical.ids)
    return DonatedError(
        "a tensor is used after its buffer was donated to a function",
        tensor=t,
        fix="use what the function returned, copy.deepcopy it before, or leave out donate=",
    )


def adopt(data: Array, mesh: Mesh | None) -> TensorType:
    """Returns the type of a JAX array made outside of Tessera; axes are named as in its sharding.
    An array on one device has no mesh. The mesh is `mesh` if the array's sharding is equivalent on
    it.

    Raises LayoutError if its sharding has no named axes, UsageError if JAX is tracing it.
    """
    if isinstance(data, jax.core.Tracer):
        raise UsageError(
            "an array that JAX is tracing has no values, and a function of Tessera needs them",
            array=data,
            fix="use ts.jit, ts.grad and ts.vmap instead of those of JAX; ts.op makes an op of a"
            " function of JAX",
        )
    where = data.sharding
    if isinstance(where, NamedSharding):
        jmesh = where.mesh
        device_mesh = Mesh(
            tuple(map(str, jmesh.axis_names)),
            devices=np.vectorize(lambda d: d.id)(jmesh.devices),
        )
        rows = [*where.spec, *[None] * (data.ndim - len(where.spec))]
        dims = tuple(
            (Factor(n, () if r is None else (r,) if isinstance(r, str) else tuple(r)),)
            for n, r in zip(data.shape, rows, strict=True)
        )
        t = TensorType(dtype_of(data.dtype), dims, (), device_mesh)
        if mesh is None or mesh.onto is not None or not {*t.split_axes}.issubset(mesh.axes):
            return t
        asked = t.on(mesh)
        return asked if where.is_equivalent_to(sharding(asked), data.ndim) else t
    if len(where.device_set) == 1 or where.is_fully_replicated:
        return plain(dtype_of(data.dtype), data.shape)
    raise LayoutError(
        f"from_jax: a sharding of kind {type(where).__name__} has no named axes",
        fix="device_put the array with a NamedSharding first",
    )
