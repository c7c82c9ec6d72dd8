"""How do values get to another mesh? The engine copies the blocks that are not there yet; between
processes programs carry them (runtime/between.py).

`jax.device_put` takes 100 to 200 µs a value to find out which copies these are: more than the
launch of a program. From one slice of a mesh to another it is known that each block goes to the
device in its place, so the engine's copy is called directly.
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
from .between import moved
from .jax_private import Copy, block_copy
from .throttle import throttle_of

Array = Any


def sender(sources: Sequence[TensorType], to: Sequence[TensorType]) -> Callable[..., list[Array]]:
    """Arrays of the types `sources` in, the same values as arrays of the types `to` out. To be
    called by each process that has a part of one of them before or after."""
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
    """Whether each block on `a` has a device on `b` to go to, and none is there already."""
    if a is None or b is None:
        return False
    one, other = a.physical, b.physical
    apart = {*one.device_ids}.isdisjoint(other.device_ids)
    return apart and (a.axes, a.shape, one.shape) == (b.axes, b.shape, other.shape)


def mover() -> Copy:
    """What copies arrays to shardings, from whatever they have."""
    return moved if jax.process_count() > 1 else jax.device_put


@cache
def _engine_copy() -> Copy:
    """The copy in which `jax.device_put` ends. It is no public name: where this version of the
    engine lacks it, or it does something else, `device_put` itself."""
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
