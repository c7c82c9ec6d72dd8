"""How does a typed tensor lie in device memory? One JAX array, one array dim a factor.

A dim of one factor is one array dim, padded to whole blocks; a dim of several factors is several;
each partial axis is a leading dim of its size. So every type has a `NamedSharding`.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from ..core.dtypes import dtype_of
from ..core.errors import BackendError, DonatedError, LayoutError, fail
from ..core.layout import Factor, TensorType, ways
from ..core.mesh import Mesh
from ..ir.graph.oracle import FOLD
from .devices import jax_mesh, start

Array = Any


@lru_cache(maxsize=65536)
def array_shape(t: TensorType) -> tuple[int, ...]:
    """The shape of the JAX array that holds a value of type `t`."""
    lead = [t.sizes[a] for a in t.partial_axes]
    return (*lead, *(_padded(f, t) for dim in t.dims for f in dim))


def _padded(f: Factor, t: TensorType) -> int:
    n = ways(f.axes, t.sizes)
    return -(-f.size // n) * n


@lru_cache(maxsize=65536)
def block_shape(t: TensorType) -> tuple[int, ...]:
    """The shape of one device's block of that array."""
    factors = (-(-f.size // ways(f.axes, t.sizes)) for dim in t.dims for f in dim)
    return (*(1 for _ in t.partial), *factors)


@lru_cache(maxsize=65536)
def spec(t: TensorType) -> PartitionSpec:
    """The partition of that array over the mesh axes."""
    rows: list[Any] = list(t.partial_axes)
    for dim in t.dims:
        rows.extend(f.axes if len(f.axes) > 1 else (f.axes[0] if f.axes else None) for f in dim)
    return PartitionSpec(*rows)


@lru_cache(maxsize=65536)
def sharding(t: TensorType) -> Any:
    """Where that array lives. Raises BackendError where the machine is smaller than the mesh."""
    if t.mesh is None:
        start()
        return jax.sharding.SingleDeviceSharding(jax.devices()[0])
    return NamedSharding(jax_mesh(t.mesh), spec(t))


def place(value: np.ndarray[Any, Any], t: TensorType) -> Array:
    """A host array on the devices, in the layout `t`."""
    x = np.ascontiguousarray(value, t.dtype.numpy).reshape([f.size for d in t.dims for f in d])
    rows = [(0, _padded(f, t) - f.size) for d in t.dims for f in d]
    if any(after for _, after in rows):
        x = np.pad(x, rows)
    for axis, kind in t.partial:
        n = t.sizes[axis]
        others = np.zeros_like(x) if kind == "sum" else x
        x = np.stack([x, *[others] * (n - 1)])
    # Partial dims were stacked last to first.
    k = len(t.partial)
    x = np.transpose(x, (*reversed(range(k)), *range(k, x.ndim)))
    if t.mesh is None:
        # Bound to no device, like the results of programs: or a program would be compiled twice,
        # once for values from the host and once for its own.
        start()
        return jax.device_put(x)
    return jax.device_put(x, sharding(t))


def fetch(data: Array, t: TensorType) -> np.ndarray[Any, Any]:
    """The global value on the host; partial values are completed here, by one reader."""
    try:
        x = np.asarray(data)
    except RuntimeError as error:
        if "deleted" in str(error):
            raise donated(t) from None
        raise fail(
            BackendError,
            f"read: the engine failed: {str(error).splitlines()[0]}",
            [("tensor", t)],
            fix="the text above is the engine's own report",
        ) from None
    for _, kind in t.partial:
        x = FOLD[kind].reduce(x, axis=0)
    sizes = tuple(slice(0, f.size) for d in t.dims for f in d)
    return x[sizes].reshape(t.shape)


def donated(t: TensorType) -> DonatedError:
    return fail(
        DonatedError,
        "a tensor is used after its buffer was donated to a function",
        [("tensor", t)],
        fix="use what the function returned, or call it without donate=",
    )


def adopt(data: Array, mesh: Mesh | None) -> TensorType:
    """The type of a JAX array that came from outside, its axes named as its sharding names them.

    Raises LayoutError where its sharding has no such form.
    """
    where = data.sharding
    if isinstance(where, NamedSharding):
        jmesh = where.mesh
        if mesh is None:
            mesh = Mesh(
                tuple(map(str, jmesh.axis_names)),
                devices=np.vectorize(lambda d: d.id)(jmesh.devices),
            )
        rows = [*where.spec, *[None] * (data.ndim - len(where.spec))]
        dims = tuple(
            (Factor(n, () if r is None else (r,) if isinstance(r, str) else tuple(r)),)
            for n, r in zip(data.shape, rows, strict=True)
        )
        return TensorType(dtype_of(data.dtype), dims, (), mesh)
    if len(where.device_set) == 1 or where.is_fully_replicated:
        return TensorType(dtype_of(data.dtype), tuple((Factor(n),) for n in data.shape), (), mesh)
    raise fail(
        LayoutError,
        f"from_jax: a sharding of kind {type(where).__name__} has no named axes",
        fix="device_put the array with a NamedSharding first",
    )
