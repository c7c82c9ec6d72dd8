"""Which devices does a program of TT-NN run on? A `MeshDevice`: a grid of devices of the system.

>>> device = open_mesh_device(MeshShape(1, 2))
>>> device, device.get_device_ids()
(MeshDevice(1x2 grid, 2 devices), [0, 1])
>>> close_mesh_device(device)
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from ..core import environment
from ..core.mesh import Mesh
from .configs import Arch, CoreCoord, CoreGrid
from .faults import wrong
from .shapes import MeshCoordinate, MeshShape
from .subdevices import SubDeviceManagers
from .system import Grid, System, folded, line, system

if TYPE_CHECKING:
    from .trace import Capture

_AXES = ("w", "z", "y", "x")


class MeshDevice(SubDeviceManagers):
    """Devices in a grid, on which every op runs at once, each with its own part of the tensors.

    `open_mesh_device` makes one. What a device of Tenstorrent has besides (cores, memories, command
    queues) is accepted and shown, and has no effect on results.
    """

    def __init__(self, ids: Grid, queues: int = 1, parent: MeshDevice | None = None) -> None:
        super().__init__()
        self._ids = ids
        self.queues = queues
        self.parent = parent
        self.children: list[MeshDevice] = []
        self.number: int = parent.number if parent else 0
        self.is_open = True
        self.programs: set[Any] = set()
        self.caches = True
        self.misses_allowed = True
        self.capture: Capture | None = None
        self.traces: dict[int, Capture] = {}
        self.after: dict[int, Any] = {}  # the tensors that were made after each, where that counts
        self._singles: dict[MeshCoordinate, MeshDevice] | None = None
        self.last: Any = None  # the array that was computed last, for those that wait

    # -- what it is -------------------------------------------------------------------------------
    @property
    def shape(self) -> MeshShape:
        """Its rows and columns."""
        return MeshShape(self._ids.shape)

    @cached_property
    def _mesh(self) -> Mesh:
        return Mesh(_AXES[-self._ids.ndim :], devices=self._ids.ravel().tolist(), shape=self.shape)

    @property
    def mesh(self) -> Mesh:
        """The same devices as a `ts.dist.Mesh`, with axes "y" and "x"."""
        if not self.is_open:
            raise wrong(
                "the mesh device is closed",
                [("device", self)],
                fix="close it when all is done, or open another one",
            )
        return self._mesh

    def get_num_devices(self) -> int:
        """How many devices."""
        return int(self._ids.size)

    def id(self) -> int:
        """The number of the mesh device."""
        return self.number

    def get_device_ids(self) -> list[int]:
        """The devices' numbers, row by row."""
        found: list[int] = self._ids.ravel().tolist()
        return found

    def get_device_id(self, coord: Sequence[int]) -> int:
        """The number of the device at a coordinate. Raises TTNNError if there is none."""
        return int(self._ids[self.place(coord)])

    def get_fabric_node_id(self, coord: Sequence[int]) -> FabricNodeId:
        """The device at a coordinate, as the network between devices names it."""
        return FabricNodeId(self.get_system_mesh_id(), self.get_device_id(coord))

    def get_system_mesh_id(self) -> int:
        """The number of the system's mesh; 0, as this process has one."""
        return 0

    def ancestry(self) -> Iterator[MeshDevice]:
        """It, and the meshes that it is a part of, from the inside out."""
        here: MeshDevice | None = self
        while here is not None:
            yield here
            here = here.parent

    def remember(self, tensor: Any) -> None:
        """Notes that `tensor` was made, for the traces whose replays would overwrite it."""
        for holder in self.ancestry():
            for tensors in holder.after.values():
                tensors.add(tensor)

    def get_view(self) -> MeshDeviceView:
        """What of the mesh this process has: all of it."""
        return MeshDeviceView(self)

    def place(self, coord: Sequence[int]) -> tuple[int, ...]:
        """`coord`, if it is on the mesh. Raises TTNNError."""
        at = MeshCoordinate(coord)
        if len(at) != self._ids.ndim or any(a >= n for a, n in zip(at, self._ids.shape)):
            raise wrong(
                f"{at} is no place on the mesh",
                [("mesh", self.shape)],
                fix=f"give {self._ids.ndim} numbers, each below the mesh's size there",
            )
        return tuple(at)

    # -- parts ------------------------------------------------------------------------------------
    def create_submesh(
        self, submesh_shape: Sequence[int], offset: Sequence[int] | None = None
    ) -> MeshDevice:
        """The part of `submesh_shape` from `offset` on (default: from the first device).

        Its tensors are its own; ops on it run on its devices alone. Raises TTNNError if it does not
        lie on the mesh.
        """
        shape = MeshShape(submesh_shape)
        start = tuple(offset) if offset is not None else (0,) * len(shape)
        ends = [a + n for a, n in zip(start, shape)]
        lies = len(shape) == len(start) == self._ids.ndim
        if not lies or any(b > n for b, n in zip(ends, self._ids.shape)):
            raise wrong(
                f"create_submesh: {shape} from {MeshCoordinate(start)} is not on the mesh",
                [("mesh", self.shape)],
                fix="give a part that lies within it",
            )
        part = self._ids[tuple(slice(a, b) for a, b in zip(start, ends))]
        made = MeshDevice(part, self.queues, self)
        self.children.append(made)
        return made

    def create_submeshes(self, submesh_shape: Sequence[int]) -> list[MeshDevice]:
        """The whole mesh as parts of `submesh_shape`, row by row. Raises TTNNError unless they fit
        exactly."""
        shape = MeshShape(submesh_shape)
        if len(shape) != self._ids.ndim or any(n % s for n, s in zip(self._ids.shape, shape)):
            raise wrong(
                f"create_submeshes: parts of {shape} do not fill the mesh",
                [("mesh", self.shape)],
                fix="give a shape whose sizes divide the mesh's",
            )
        counts = [n // s for n, s in zip(self._ids.shape, shape)]
        return [
            self.create_submesh(shape, [k * s for k, s in zip(at, shape)])
            for at in np.ndindex(*counts)
        ]

    def singles(self) -> dict[MeshCoordinate, MeshDevice]:
        """Each device as a mesh of its own, by its place."""
        if self._singles is None:
            self._singles = {
                MeshCoordinate(at): MeshDevice(self._ids[at].reshape(1, 1), self.queues, self)
                for at in np.ndindex(*self._ids.shape)
            }
        return self._singles

    def get_submeshes(self) -> list[MeshDevice]:
        """The parts that were made of it and are open."""
        return [c for c in self.children if c.is_open]

    def reshape(self, new_shape: Sequence[int]) -> None:
        """Another grid of the same devices; neighbours in a line of it are neighbours in the old.

        Tensors that are on the mesh keep the grid that they were made on, and can only be read.
        Raises TTNNError if the sizes differ.
        """
        shape = MeshShape(new_shape)
        if shape.mesh_size() != self._ids.size:
            raise wrong(
                f"reshape: {shape} has not as many devices as the mesh",
                [("mesh", self.shape)],
                fix=f"give a shape of {self._ids.size} devices",
            )
        turned = shape == self.shape[::-1] and min(shape) > 1
        self._ids = self._ids.T if turned else folded(line(self._ids), shape)
        self.__dict__.pop("_mesh", None)
        self._singles = None

    # -- programs ---------------------------------------------------------------------------------
    def enable_program_cache(self) -> None:
        """Counts programs from now on. (They are always kept.)"""
        self.caches = True

    def clear_program_cache(self) -> None:
        """Forgets which programs have run."""
        self.programs.clear()

    def disable_and_clear_program_cache(self) -> None:
        """Forgets which programs have run, and counts no more."""
        self.programs.clear()
        self.caches = False

    def set_program_cache_misses_allowed(self, allowed: bool) -> None:
        """With False, an op that has not run before with such arguments is an error."""
        self.misses_allowed = allowed

    def num_program_cache_entries(self) -> int:
        """How many different programs have run: an op, with the shapes and options that it had."""
        return len(self.programs)

    def queue(self, cq_id: int | None) -> int:
        """The number of a command queue. Raises TTNNError if the device has not so many."""
        found = 0 if cq_id is None else int(cq_id)
        if not 0 <= found < self.queues:
            raise wrong(
                f"there is no command queue {found}",
                [("device", self), ("command queues", self.queues)],
                fix=f"open the device with num_command_queues={found + 1}",
            )
        return found

    # -- what a device of Tenstorrent is asked ----------------------------------------------------
    def arch(self) -> Arch:
        """The kind of chip whose figures are shown."""
        return Arch.WORMHOLE_B0

    @property
    def core_grid(self) -> CoreGrid:
        """The cores of a device for compute."""
        return CoreGrid(y=8, x=8)

    def compute_with_storage_grid_size(self) -> CoreCoord:
        """The cores of a device for compute."""
        return CoreCoord(8, 8)

    def dram_grid_size(self) -> CoreCoord:
        """The banks of a device's memory."""
        return CoreCoord(12, 1)

    def __repr__(self) -> str:
        grid = "x".join(map(str, self.shape))
        return f"MeshDevice({grid} grid, {self._ids.size} devices)"


Device = MeshDevice


@dataclass(frozen=True)
class FabricNodeId:
    """A device, as the network between devices names it."""

    mesh_id: int
    chip_id: int


@dataclass(frozen=True)
class MeshDeviceView:
    """Which of a mesh's devices are this host's."""

    device: MeshDevice = field(repr=False)

    def shape(self) -> MeshShape:
        """The mesh's shape."""
        return self.device.shape

    def num_devices(self) -> int:
        """How many devices the mesh has."""
        return self.device.get_num_devices()

    def is_local(self, coord: Sequence[int]) -> bool:
        """Whether the device at `coord` is this host's."""
        self.device.place(coord)
        return True


# -- open and close -------------------------------------------------------------------------------
_opened: list[MeshDevice] = []
Ids = Sequence[int]


def open_mesh_device(
    mesh_shape: Sequence[int] | None = None,
    l1_small_size: int | Ids = 0,
    trace_region_size: int = 0,
    num_command_queues: int = 1,
    dispatch_core_config: object = None,
    offset: Sequence[int] | None = None,
    physical_device_ids: Ids = (),
    worker_l1_size: int = 0,
    **older: object,
) -> MeshDevice:
    """A mesh of `mesh_shape` devices of the system; without a shape, all of it.

    A mesh of one row is a line through the system, one device beside the next; another one lies in
    the system from `offset` on, turned where it fits only so. `physical_device_ids` names devices
    instead. Sizes of memory and the kind of dispatch have no effect. Raises TTNNError if the system
    has no room.
    """
    unknown = [*older.keys() - {"mesh_type", "pcie_device_ids"}]
    if unknown:
        raise wrong(
            f"open_mesh_device: it has no argument {unknown[0]!r}",
            fix="give mesh_shape, num_command_queues, offset, physical_device_ids, ...",
        )
    if isinstance(l1_small_size, Sequence):  # a form of 2024: the second argument are devices
        physical_device_ids = l1_small_size
    shape = MeshShape(mesh_shape) if mesh_shape is not None else None
    found = system(shape.mesh_size() if shape else 1)
    shape = shape or found.shape
    ids = _chosen(found, shape, offset, [*physical_device_ids])
    device = MeshDevice(ids, max(num_command_queues, 1))
    device.number = len(_opened)
    _opened.append(device)
    return device


def _chosen(found: System, shape: MeshShape, offset: Sequence[int] | None, ids: list[int]) -> Grid:
    count = shape.mesh_size()
    everything = found.ids.ravel().tolist()
    if ids:
        if len(ids) < count or len(set(ids)) < len(ids) or not set(ids) <= set(everything):
            raise wrong(
                f"open_mesh_device: the devices that are named make no {shape}",
                [("named", ids), ("system", everything)],
                fix=f"name {count} different devices of the system",
            )
        return np.array(ids[:count]).reshape(shape)
    if len(shape) == 2 and found.ids.ndim == 2:
        start = tuple(offset or (0, 0))
        for size, turn in ((shape, False), (shape[::-1], True)):
            if all(a + n <= m for a, n, m in zip(start, size, found.shape)):
                part = found.ids[start[0] : start[0] + size[0], start[1] : start[1] + size[1]]
                return part.T if turn else part
    if max(shape) == count <= len(everything) and offset is None:
        return line(found.ids)[:count].reshape(shape)
    raise wrong(
        f"open_mesh_device: Requested mesh is too big and is not rotatable: {shape} and system "
        f"mesh {found.shape}",
        [("devices", f"{len(everything)}"), ("offset", offset or "none")],
        fix=f"ask for a part of {found.shape}, or start with more: {environment.DEVICES}={count}",
    )


def close_mesh_device(mesh_device: MeshDevice) -> None:
    """Closes a mesh and its parts: their tensors are gone, and no op runs on them any more."""
    for part in mesh_device.children:
        close_mesh_device(part)
    mesh_device.is_open = False
    mesh_device.traces.clear()
    if mesh_device in _opened:
        _opened.remove(mesh_device)


@contextlib.contextmanager
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


@contextlib.contextmanager
def manage_device(device_id: int = 0, **options: Any) -> Iterator[MeshDevice]:
    """`open_device` for a `with` block, which closes it."""
    device = open_device(device_id, **options)
    try:
        yield device
    finally:
        close_mesh_device(device)


def get_num_devices() -> int:
    """How many devices the system has."""
    return int(system().ids.size)


def get_device_ids() -> list[int]:
    """The numbers of the system's devices."""
    found: list[int] = system().ids.ravel().tolist()
    return found


def get_num_pcie_devices() -> int:
    """How many of the system's devices the host reaches itself."""
    return len(system().pcie_ids)


def get_pcie_device_ids() -> list[int]:
    """The devices that the host reaches itself."""
    return system().pcie_ids


__all__ = [
    "Device", "FabricNodeId", "MeshDevice", "MeshDeviceView", "close_device", "close_mesh_device",
    "create_mesh_device", "get_device_ids", "get_num_devices", "get_num_pcie_devices",
    "get_pcie_device_ids", "manage_device", "open_device", "open_mesh_device",
]  # fmt: skip
