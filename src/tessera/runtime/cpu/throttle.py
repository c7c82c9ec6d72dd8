"""Throttle of Python's dispatch to CPU devices: few programs in flight, large ones one at a time.

The engine's CPU backend has as many threads as devices. It queues up to 32 programs for a device.
The launch of a program over several devices waits in one of those threads for room on each device;
a collective that needs all threads then deadlocks. So Python waits before the queue is full.

Programs over several devices end in the order in which they were launched, as do those on one
device. So an empty program ("mark"), launched after every few programs, shows that these have
ended; no program needs an additional result, and no result is held.

A thread frees a program's temporaries some time after its results are ready, when the next program
may have begun. If the temporaries are large, Python waits for both before the next launch, so that
no two programs hold theirs at once, and the heap does not grow by them again and again.
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

from ...core.mesh import Mesh
from ..devices import platform
from . import malloc

LAUNCHES = 6
"""Programs between two marks. At most 2 * 6 programs and 2 marks are queued, in each of two queues:
28 of the 32 places."""
LARGE = 64 << 20  # bytes of temporaries on all devices from which a program waits for the others
LONGEST_S, LOOK_S = 0.02, 5e-5  # memory is freed within a millisecond or two, or not at all
BLIND = 64  # launches without a check of memory after a check that timed out
Throttle = Callable[[], None]
_mark = jax.jit(lambda x: x + 1)
# queue of the last large program: bytes in use once it is freed
_bytes_after_free: dict[Queue, int] = {}


class Queue:
    """The unfinished programs over several devices, or those on one device."""

    def __init__(self, devices: Any) -> None:
        self._devices, self._count = devices, count(1)
        self._blind = 0  # launches that skip the check of memory
        self._lock = Lock()
        self._last: Any = None
        self._few = len(jax.local_devices()) == 1  # a launch then waits in the calling thread
        self.is_shared = len(devices) > 1  # its programs run on several devices
        if not self._few:
            self._last = _mark(self._from)  # compiles here, not while a step is measured

    @cached_property
    def _from(self) -> Any:
        mesh = jax.sharding.Mesh(np.array(self._devices), ("d",))
        where = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("d"))
        return jax.device_put(np.zeros(len(self._devices), np.int32), where)

    def enter(self) -> None:
        """Waits if too many programs are in flight; called before each launch."""
        if self._few or next(self._count) % LAUNCHES:
            return
        with self._lock:
            before, self._last = self._last, _mark(self._from)
        before.block_until_ready()

    def enter_alone(self, temporary: int, results: int) -> None:
        """Waits until all programs before have ended; called before the launch of a program with
        these bytes of temporaries and results."""
        _mark(self._from).block_until_ready()
        end_s = time.perf_counter() + LONGEST_S
        # the first large program: the memory of those before it is unknown
        if not _bytes_after_free:
            time.sleep(LONGEST_S / 2)
        # For a program of another queue it is unknown what still runs.
        left = _bytes_after_free.get(self, 0) if not self._blind else 0
        self._blind = max(self._blind - 1, 0)
        while (used := malloc.used_bytes()) > left > 0:
            if time.perf_counter() > end_s:  # the memory is in use by other code
                self._blind = BLIND
                break
            time.sleep(LOOK_S)
        _bytes_after_free.clear()
        _bytes_after_free[self] = used + results + temporary // 2
        malloc.give_unused(temporary)


def queue_of(mesh: Mesh | None) -> Queue | None:
    """Returns the queue of programs over `mesh`; None if they need none."""
    if platform() != "cpu":
        return None
    every, here = jax.devices(), jax.local_devices()
    ids = mesh.physical.device_ids if mesh is not None else (every.index(here[0]),)
    devices = [d for d in (every[i] for i in ids) if d.process_index == jax.process_index()]
    # All programs over several devices end in one order, so marks on two devices are enough.
    return _queue(tuple(here[:2] if len(devices) > 1 else devices[:1]))


@cache
def _queue(devices: tuple[Any, ...]) -> Queue | None:
    return Queue(devices) if devices else None


def throttle_of(mesh: Mesh | None) -> Throttle | None:
    """Returns a function to call before each launch of a copy between devices of `mesh`."""
    queue = queue_of(mesh)
    return None if queue is None else queue.enter
