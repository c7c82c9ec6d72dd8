"""Transfer of arrays to another mesh: by the engine's copy within a process, by programs between
processes (runtime/transfer.py).

`jax.device_put` takes 100 to 200 µs a value to find the needed copies: more than the launch of a
program. Between two equal slices of a mesh each block goes to the device at the same place, so the
engine's copy function is called directly.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import jax
import numpy as np

from ..core.layout import TensorType
from ..core.mesh import Mesh
from .arrays import sharding
from .cpu.throttle import throttle_of
from .jax_private import Copy, block_copy
from .transfer import moved

Array = Any


def sender(sources: Sequence[TensorType], to: Sequence[TensorType]) -> Callable[..., list[Array]]:
    """Returns a function from arrays of the types `sources` to the same values in the types `to`.
    Each process with a part of one of them before or after must call it."""
    where = [sharding(t) for t in to]
    alike = all(_in_place(a.mesh, b.mesh) for a, b in zip(sources, to, strict=True))
    copy = _engine_copy() if alike else mover()
    throttle = throttle_of(to[0].mesh) or throttle_of(sources[0].mesh)

    def send(*xs: Array) -> list[Array]:
        if throttle is not None:
            throttle()
        return list(copy([*xs], where))

    return send


def _in_place(a: Mesh | None, b: Mesh | None) -> bool:
    """Returns whether the meshes are equal slices without a common device, so that each block goes
    to the device at the same place."""
    if a is None or b is None:
        return False
    one, other = a.physical, b.physical
    apart = {*one.device_ids}.isdisjoint(other.device_ids)
    return apart and (a.axes, a.shape, one.shape) == (b.axes, b.shape, other.shape)


def mover() -> Copy:
    """Returns a function that copies arrays to shardings, whatever their own shardings are."""
    return moved if jax.process_count() > 1 else jax.device_put


@cache
def _engine_copy() -> Copy:
    """Returns the private function that `jax.device_put` calls; `device_put` itself if this version
    of jax lacks it, or if it does something else."""
    every = jax.local_devices()
    if jax.process_count() > 1 or len(every) < 2:
        return mover()
    try:
        copy = block_copy()
        x = jax.device_put(np.arange(2, dtype=np.float32), every[0])
        (y,) = copy([x], [jax.sharding.SingleDeviceSharding(every[1])])
        same = isinstance(y, jax.Array) and y.devices() == {every[1]} and y.tolist() == [0, 1]
    except (ImportError, AttributeError, TypeError, ValueError, AssertionError):
        same = False
    return copy if same else jax.device_put
