"""How far may Python run ahead of virtual devices? A few programs: a full queue would stop them.

The engine's CPU backend has as many threads as devices. It lets 32 programs wait for a device, and
the launch of a program over several devices waits for room on each of them in one of those threads;
a collective that needs them all then waits for ever. So before there is no room, Python waits.

Programs over several devices end in the order in which they were launched, as do those on one
device. So one that does nothing, launched after each few of them, marks that these have ended: no
program has a result more for it, and no result is held.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from itertools import count
from threading import Lock
from typing import Any

import jax
import numpy as np

from ..core.mesh import Mesh

LAUNCHES = 6
"""Programs between two marks; twice as many and two marks wait, of each of two sorts: 28 of 32."""
Throttle = Callable[[], None]
_mark = jax.jit(lambda x: x + 1)


class Queue:
    """The programs over several devices, or those on one device, that may not have ended."""

    def __init__(self, devices: Any) -> None:
        mesh = jax.sharding.Mesh(np.array(devices), ("d",))
        where = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("d"))
        self._from = jax.device_put(np.zeros(len(devices), np.int32), where)
        self._count = count(1)
        self._lock = Lock()
        self._last: Any = _mark(self._from)  # is compiled here, not while a step is measured

    def enter(self) -> None:
        """To be called before each launch; waits where too many have not ended."""
        if next(self._count) % LAUNCHES:
            return
        with self._lock:
            before, self._last = self._last, _mark(self._from)
        before.block_until_ready()


def throttle_of(mesh: Mesh | None) -> Throttle | None:
    """What to call before each launch of a program over `mesh`; None where nothing has to wait."""
    queue = _queue_of(mesh)
    return None if queue is None else queue.enter


def _queue_of(mesh: Mesh | None) -> Queue | None:
    if jax.default_backend() != "cpu" or len(jax.local_devices()) == 1:
        return None
    every, here = jax.devices(), jax.local_devices()
    ids = mesh.physical.device_ids if mesh is not None else (every.index(here[0]),)
    devices = [d for d in (every[i] for i in ids) if d.process_index == jax.process_index()]
    # One order holds for all programs over several devices: two can stand for them.
    return _queue(tuple(here[:2] if len(devices) > 1 else devices[:1]))


@cache
def _queue(devices: tuple[Any, ...]) -> Queue | None:
    return Queue(devices) if devices else None
