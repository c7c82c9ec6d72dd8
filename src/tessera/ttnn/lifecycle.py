"""Meshes of devices opened and closed: parts of the system's grid.

A mesh of one row is a line through the system; another one lies in it from `offset` on.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import numpy as np

from ..core import environment
from ..core.checks import whole
from ..core.devices import process_count, process_index
from ..lang.value.engine import engine
from . import args
from .device import MeshDevice
from .errors import wrong
from .shapes import MeshShape
from .system import Grid, System, line, system

Ids = Sequence[int]


def open_mesh_device(
    mesh_shape: Sequence[int] | None = None, l1_small_size: int | Ids = 0,
    trace_region_size: int = 0, num_command_queues: int = 1, dispatch_core_config: object = None,
    offset: Sequence[int] | None = None, physical_device_ids: Ids = (), worker_l1_size: int = 0,
    **older: object,
) -> MeshDevice:  # fmt: skip
    """A mesh of `mesh_shape` devices of the system; without a shape, all of it.

    A mesh of one row is a line through the system, one device beside the next; another one lies in
    the system from `offset` on, turned where it fits only so. `physical_device_ids` names devices
    instead. Sizes of memory and the kind of dispatch have no effect. Raises TTNNError if the system
    has no room.
    """
    if isinstance(mesh_shape, int):
        raise wrong(
            f"open_mesh_device: {mesh_shape} is no shape of a mesh",
            fix="ttnn.open_mesh_device(ttnn.MeshShape(2, 4))",
        )
    unknown = [*older.keys() - {"mesh_type", "pcie_device_ids"}]
    if unknown:
        raise wrong(
            f"open_mesh_device: it has no argument {unknown[0]!r}",
            fix="give mesh_shape, num_command_queues, offset, physical_device_ids, ...",
        )
    queues = whole("open_mesh_device", "num_command_queues", num_command_queues, 1)
    whole("open_mesh_device", "trace_region_size", trace_region_size, 0)
    if isinstance(l1_small_size, Sequence):  # a form of 2024: the second argument are devices
        physical_device_ids = l1_small_size
    shape = MeshShape(mesh_shape) if mesh_shape is not None else None
    machine = system(shape.mesh_size() if shape else 1)
    shape = shape or machine.shape
    ids = _chosen(machine, shape, offset, [*physical_device_ids])
    return MeshDevice(ids, queues, places=machine.places)


def _chosen(system: System, shape: MeshShape, offset: Sequence[int] | None, ids: list[int]) -> Grid:
    count = shape.mesh_size()
    everything = system.ids.ravel().tolist()
    if ids:
        if len(ids) < count or len(set(ids)) < len(ids) or not set(ids) <= set(everything):
            raise wrong(
                f"open_mesh_device: the devices that are named make no {shape}",
                [("named", ids), ("system", everything)],
                fix=f"name {count} different devices of the system",
            )
        return np.array(ids[:count]).reshape(shape)
    if len(shape) == 2 and system.ids.ndim == 2:
        start = tuple(offset or (0, 0))
        for size, is_transposed in ((shape, False), (shape[::-1], True)):
            if all(a + n <= m for a, n, m in zip(start, size, system.shape)):
                part = system.ids[start[0] : start[0] + size[0], start[1] : start[1] + size[1]]
                return part.T if is_transposed else part
    if max(shape) == count <= len(everything) and offset is None:
        return line(system.ids)[:count].reshape(shape)
    raise wrong(
        f"open_mesh_device: Requested mesh is too big and is not rotatable: {shape} and system "
        f"mesh {system.shape}",
        [("devices", f"{len(everything)}"), ("offset", offset or "none")],
        fix=f"ask for a part of {system.shape}, or start with more: {environment.DEVICES}={count}",
    )


def close_mesh_device(mesh_device: MeshDevice) -> None:
    """Closes a mesh and its parts: their tensors are gone, and no op runs on them any more."""
    args.mesh_device("close_mesh_device", mesh_device)
    for part in mesh_device.children:
        close_mesh_device(part)
    mesh_device.closed = True
    mesh_device.capture = None
    mesh_device.traces.clear()


@contextmanager
def create_mesh_device(*arguments: Any, **named: Any) -> Iterator[MeshDevice]:
    """`open_mesh_device` for a `with` block, which closes it."""
    device = open_mesh_device(*arguments, **named)
    try:
        yield device
    finally:
        close_mesh_device(device)


def open_device(device_id: int = 0, **options: Any) -> MeshDevice:
    """One device of the system, as a mesh of 1 x 1. Raises TTNNError if there is none."""
    return open_mesh_device(MeshShape(1, 1), physical_device_ids=[device_id], **options)


close_device = close_mesh_device


def manage_device(device_id: int = 0, **options: Any) -> AbstractContextManager[MeshDevice]:
    """`open_device` for a `with` block, which closes it."""
    one = MeshShape(1, 1)
    return create_mesh_device(one, physical_device_ids=[device_id], **options)


def get_num_devices() -> int:
    """The number of devices of the system."""
    return int(system().ids.size)


def get_device_ids() -> list[int]:
    """The numbers of the system's devices."""
    found: list[int] = system().ids.ravel().tolist()
    return found


def get_num_pcie_devices() -> int:
    """The number of devices that the host reaches itself."""
    return len(system().pcie_ids)


def get_pcie_device_ids() -> list[int]:
    """The devices that the host reaches itself."""
    return system().pcie_ids


# -- several processes, which `tt-run` started -----------------------------------------------------
_begun: list[bool] = []
_barriers = itertools.count()
BARRIER_S = 600.0  # how long a process waits for the others


def init_distributed_context(arguments: Sequence[str] | None = None) -> None:
    """Makes this process one of those that were started together; alone it is the only one.
    `arguments` have no effect."""
    engine().start(None)
    _begun[:] = [True]


def distributed_context_is_initialized() -> bool:
    """True if `init_distributed_context` was called."""
    return bool(_begun)


def distributed_context_get_rank() -> int:
    """The number of this process, from 0. Raises TTNNError before `init_distributed_context`."""
    _need("distributed_context_get_rank")
    return process_index()


def distributed_context_get_size() -> int:
    """The number of processes. Raises TTNNError before `init_distributed_context`."""
    _need("distributed_context_get_size")
    return process_count()


def distributed_context_barrier() -> None:
    """Returns when all processes have come here. Raises TTNNError before
    `init_distributed_context`, BackendError if one does not come within 10 minutes."""
    _need("distributed_context_barrier")
    engine().gather(f"ttnn barrier {next(_barriers)}", None, BARRIER_S)


def _need(name: str) -> None:
    if not _begun:
        raise wrong(
            f"{name}: the processes have not been joined",
            fix="call ttnn.init_distributed_context() first",
        )


__all__ = [
    "close_device", "close_mesh_device", "create_mesh_device", "distributed_context_barrier",
    "distributed_context_get_rank", "distributed_context_get_size",
    "distributed_context_is_initialized", "get_device_ids", "get_num_devices",
    "get_num_pcie_devices", "get_pcie_device_ids", "init_distributed_context", "manage_device",
    "open_device", "open_mesh_device",
]  # fmt: skip
