"""How far may Python run ahead of a CPU's devices? A few programs, and none that needs much memory.

The engine's CPU backend has as many threads as devices. It lets 32 programs wait for a device, and
the launch of a program over several devices waits for room on each of them in one of those threads;
a collective that needs them all then waits for ever. So before there is no room, Python waits.

Programs over several devices end in the order in which they were launched, as do those on one
device. So one that does nothing, launched after each few of them, marks that these have ended: no
program has a result more for it, and no result is held.

A thread gives back the memory of a program's temporaries some time after its results are there,
when the next program may have begun. Where that is much, Python waits for both before the next
launch: so no two programs have theirs at once, and the heap does not grow by them again and again.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import cache, cached_property
from itertools import count
from threading import Lock
from typing import Any

import jax
import numpy as np

from ..core.mesh import Mesh
from . import malloc

LAUNCHES = 6
"""Programs between two marks; twice as many and two marks wait, of each of two sorts: 28 of 32."""
LARGE = 64 << 20  # bytes of temporaries, of all devices, from which a program waits for the others
LONGEST_S, LOOK_S = 0.02, 5e-5  # memory is given back within a millisecond or two, if it is at all
BLIND = 64  # launches after one that looked in vain
Throttle = Callable[[], None]
_mark = jax.jit(lambda x: x + 1)
_left: dict[Queue, int] = {}  # whose program was the last large one, and bytes in use without it


class Queue:
    """The programs over several devices, or those on one device, that may not have ended."""

    def __init__(self, devices: Any) -> None:
        self._devices, self._count = devices, count(1)
        self._blind = 0  # so many launches do not look at the memory in use
        self._lock = Lock()
        self._last: Any = None
        self._few = len(jax.local_devices()) == 1  # a launch then waits for room where it is made
        self.is_shared = len(devices) > 1  # between the devices of a program
        if not self._few:
            self._last = _mark(self._from)  # is compiled here, not while a step is measured

    @cached_property
    def _from(self) -> Any:
        mesh = jax.sharding.Mesh(np.array(self._devices), ("d",))
        where = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("d"))
        return jax.device_put(np.zeros(len(self._devices), np.int32), where)

    def enter(self) -> None:
        """To be called before each launch; waits where too many have not ended."""
        if self._few or next(self._count) % LAUNCHES:
            return
        with self._lock:
            before, self._last = self._last, _mark(self._from)
        before.block_until_ready()

    def enter_alone(self, temporary: int, results: int) -> None:
        """To be called before the launch of a program that takes so many bytes for a while, and so
        many for its results; waits until all before it have ended."""
        _mark(self._from).block_until_ready()
        end_s = time.perf_counter() + LONGEST_S
        if not _left:  # the first: nobody knows how much that before it had
            time.sleep(LONGEST_S / 2)
        # Of other devices nobody here knows what runs there.
        left = _left.get(self, 0) if not self._blind else 0
        self._blind = max(self._blind - 1, 0)
        while (used := malloc.used_bytes()) > left > 0:
            if time.perf_counter() > end_s:  # it is the user who has taken so much
                self._blind = BLIND
                break
            time.sleep(LOOK_S)
        _left.clear()
        _left[self] = used + results + temporary // 2
        malloc.give_unused(temporary)


def queue_of(mesh: Mesh | None) -> Queue | None:
    """Where the programs over `mesh` wait; None where none has to."""
    if jax.default_backend() != "cpu":
        return None
    every, here = jax.devices(), jax.local_devices()
    ids = mesh.physical.device_ids if mesh is not None else (every.index(here[0]),)
    devices = [d for d in (every[i] for i in ids) if d.process_index == jax.process_index()]
    # One order holds for all programs over several devices: two can stand for them.
    return _queue(tuple(here[:2] if len(devices) > 1 else devices[:1]))


@cache
def _queue(devices: tuple[Any, ...]) -> Queue | None:
    return Queue(devices) if devices else None


def throttle_of(mesh: Mesh | None) -> Throttle | None:
    """What to call before each launch of what copies between devices of `mesh`."""
    queue = queue_of(mesh)
    return None if queue is None else queue.enter
