"""Devices that a program of TT-NN runs on: a `MeshDevice` is a grid of devices of the system.

>>> from tessera import ttnn
>>> device = ttnn.open_mesh_device(MeshShape(1, 2))
>>> device, device.get_device_ids()
(MeshDevice(1x2 grid, 2 devices), [0, 1])
>>> ttnn.close_mesh_device(device)
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from ..core.devices import process_count, process_index
from ..core.machine.share import mesh_id
from ..core.mesh import Mesh
from ..lang.value.engine import engine
from .configs import Arch, CoreCoord, CoreGrid, CoreRange, CoreRangeSet, SubDevice, SubDeviceId
from .errors import wrong
from .names import no_attribute
from .shapes import MeshCoordinate, MeshShape
from .system import Grid, folded, line

_AXES = ("w", "z", "y", "x")
_numbers = itertools.count()


@dataclass(frozen=True)
class SubDeviceManagerId:
    """The number of a manager that `create_sub_device_manager` made."""

    number: int


class SubDeviceManagers:
    """The sub-devices of a mesh device, which divide its cores: kept and checked, without effect on
    results, as XLA divides the work itself."""

    def __init__(self) -> None:
        self._managers: dict[SubDeviceManagerId, list[object]] = {}
        self._loaded: SubDeviceManagerId | None = None

    def create_sub_device_manager(
        self, sub_devices: Sequence[SubDevice], local_l1_size: int = 0
    ) -> SubDeviceManagerId:
        """A manager of `sub_devices`. Raises TTNNError if there is none, or one is no SubDevice."""
        if not sub_devices or not all(isinstance(s, SubDevice) for s in sub_devices):
            raise wrong(
                "create_sub_device_manager: it takes a list of sub-devices",
                [("given", sub_devices)],
                fix="device.create_sub_device_manager([ttnn.SubDevice([cores])], 0)",
            )
        made = SubDeviceManagerId(max((m.number for m in self._managers), default=0) + 1)
        self._managers[made] = [*sub_devices]
        return made

    def load_sub_device_manager(self, sub_device_manager_id: SubDeviceManagerId) -> None:
        """Uses a manager from now on. Raises TTNNError if the device has not made it."""
        self._manager("load_sub_device_manager", sub_device_manager_id)
        self._loaded = sub_device_manager_id

    def clear_loaded_sub_device_manager(self) -> None:
        """Uses the whole device again."""
        self._loaded = None

    def remove_sub_device_manager(self, sub_device_manager_id: SubDeviceManagerId) -> None:
        """Forgets a manager. Raises TTNNError if it is in use, or not the device's."""
        self._manager("remove_sub_device_manager", sub_device_manager_id)
        if self._loaded == sub_device_manager_id:
            raise wrong(
                "remove_sub_device_manager: this manager is loaded",
                [("manager", sub_device_manager_id)],
                fix="device.clear_loaded_sub_device_manager() first",
            )
        del self._managers[sub_device_manager_id]

    def set_sub_device_stall_group(self, sub_device_ids: Sequence[SubDeviceId]) -> None:
        """Names the sub-devices that reads and writes wait for; they wait for all. Raises TTNNError
        if the loaded manager has not so many."""
        count = len(self._managers[self._loaded]) if self._loaded else 1
        numbers = [getattr(s, "number", None) for s in sub_device_ids]
        if not numbers or any(n is None or not 0 <= n < count for n in numbers):
            raise wrong(
                "set_sub_device_stall_group: it takes the numbers of loaded sub-devices",
                [("given", [*sub_device_ids]), ("sub-devices", count)],
                fix="load a manager, then name its sub-devices: [ttnn.SubDeviceId(0)]",
            )

    def reset_sub_device_stall_group(self) -> None:
        """Reads and writes wait for all sub-devices, as they do."""

    def _manager(self, name: str, number: SubDeviceManagerId) -> None:
        if number not in self._managers:
            raise wrong(
                f"{name}: the device has no such manager",
                [("given", number), ("managers", [*self._managers] or "none")],
                fix="give what device.create_sub_device_manager returned",
            )


def num_cores_to_corerangeset(
    target_num_cores: int, grid_size: CoreCoord, row_wise: bool = False
) -> CoreRangeSet:
    """The first `target_num_cores` cores of a grid, row by row or column by column. Raises
    TTNNError if the grid has not so many.

    >>> [(r.start, r.end) for r in num_cores_to_corerangeset(3, CoreCoord(8, 8), True)]
    [(CoreCoord(x=0, y=0), CoreCoord(x=2, y=0))]
    """
    width, height = (grid_size.x, grid_size.y) if row_wise else (grid_size.y, grid_size.x)
    if not 0 < target_num_cores <= width * height:
        raise wrong(
            f"num_cores_to_corerangeset: there are no {target_num_cores} cores",
            [("grid", grid_size)],
            fix=f"ask for 1 to {width * height}",
        )
    lines, remainder = divmod(target_num_cores, width)
    parts = [(0, 0, width - 1, lines - 1)] if lines else []
    parts += [(0, lines, remainder - 1, lines)] if remainder else []
    ends = [((a, b), (c, d)) if row_wise else ((b, a), (d, c)) for a, b, c, d in parts]
    return CoreRangeSet([CoreRange(CoreCoord(*a), CoreCoord(*b)) for a, b in ends])


class MeshDevice(SubDeviceManagers):
    """Devices in a grid, on which every op runs at once, each with its own part of the tensors.

    `open_mesh_device` makes one. What a device of Tenstorrent has besides (cores, memories, command
    queues) is accepted and shown, and has no effect on results.
    """

    def __init__(
        self, ids: Grid, queues: int = 1, parent: MeshDevice | None = None, *,
        places: Sequence[int] = (), counted: bool = True,
    ) -> None:  # fmt: skip
        super().__init__()
        self._ids = ids
        # The number that the program has for each device of the system.
        self._places: Sequence[int] = parent._places if parent else places
        self.queues = queues
        self.parent = parent
        self.children: list[MeshDevice] = []
        self._number = next(_numbers) if counted else None
        self.closed = False
        self.programs: set[Any] = set()
        self.caches = True
        self.misses_allowed = True
        self.capture: Any = None  # the trace.Capture that is under way
        self.traces: dict[int, Any] = {}
        self.after: dict[int, Any] = {}  # the tensors that were made after each, where that counts
        self._singles: dict[MeshCoordinate, MeshDevice] | None = None
        self.last: Any = None  # the array that was computed last, for those that wait

    # -- facts ------------------------------------------------------------------------------------
    @property
    def shape(self) -> MeshShape:
        """Its rows and columns."""
        return MeshShape(self._ids.shape)

    @cached_property
    def _mesh(self) -> Mesh:
        places = [self._places[i] for i in self.get_device_ids()]
        return Mesh(_AXES[-self._ids.ndim :], devices=places, shape=self.shape)

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

    @property
    def is_open(self) -> bool:
        """True if neither it nor a mesh that it is a part of was closed."""
        return not self.closed and (self.parent is None or self.parent.is_open)

    def get_num_devices(self) -> int:
        """The number of devices."""
        return int(self._ids.size)

    def id(self) -> int:
        """The number of the mesh device; no other one of this program has it. Meshes and their
        parts are counted from 0 as they are made, a tensor's single devices when they are
        asked."""
        if self._number is None:
            self._number = next(_numbers)
        return self._number

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
        """The number of the system's mesh, by `TT_MESH_ID`; 0 where nothing says another one."""
        return mesh_id() or 0

    def ancestry(self) -> Iterator[MeshDevice]:
        """It, and the meshes that it is a part of, from the inside out."""
        here: MeshDevice | None = self
        while here is not None:
            yield here
            here = here.parent

    def parts(self) -> Iterator[MeshDevice]:
        """It, and the meshes that are parts of it, from the outside in."""
        yield self
        for part in (*self.children, *(self._singles or {}).values()):
            yield from part.parts()

    def remember(self, tensor: Any) -> None:
        """Notes that `tensor` was made, for the traces whose replays would overwrite it."""
        for holder in self.ancestry():
            for tensors in holder.after.values():
                tensors[id(tensor)] = tensor

    def get_view(self) -> MeshDeviceView:
        """The devices of the mesh that are those of this process."""
        return MeshDeviceView(self)

    def is_local(self, coord: Sequence[int]) -> bool:
        """True if the device at `coord` is this process's. Raises TTNNError if there is none."""
        return self._all_local([self.get_device_id(coord)])

    def all_local(self) -> bool:
        """True if all devices are of this process."""
        return self._all_local(self.get_device_ids())

    def _all_local(self, ids: Sequence[int]) -> bool:
        if process_count() == 1:
            return True
        mesh = Mesh(("x",), devices=[self._places[i] for i in ids])
        return engine().processes(mesh) == (process_index(),)

    def check_no_capture(self, name: str, action: str) -> None:
        """Raises TTNNError while a trace is captured on it, or on a mesh that it is a part of: a
        replay would not do `action` again."""
        if any(d.capture is not None for d in self.ancestry()):
            raise wrong(
                f"{name}: a trace is being captured, and {action} is no part of it",
                [("device", self)],
                fix="do it before ttnn.begin_trace_capture, or after ttnn.end_trace_capture",
            )

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
        _ = self.mesh  # it is open, or an error says so
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
        submesh = MeshDevice(part, self.queues, self)
        self.children.append(submesh)
        return submesh

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
                MeshCoordinate(at): MeshDevice(
                    self._ids[at].reshape(1, 1), self.queues, self, counted=False
                )
                for at in np.ndindex(*self._ids.shape)
            }
        return self._singles

    def get_submeshes(self) -> list[MeshDevice]:
        """The parts that were made of it and are open."""
        return [c for c in self.children if c.is_open]

    def reshape(self, new_shape: Sequence[int]) -> None:
        """Another grid of the same devices; neighbours in a line of it are neighbours in the old.

        Tensors that are on the mesh keep the grid that they were made on: until the mesh has it
        again, reading them is an error. Raises TTNNError if the sizes differ.
        """
        shape = MeshShape(new_shape)
        if shape.mesh_size() != self._ids.size:
            raise wrong(
                f"reshape: {shape} has not as many devices as the mesh",
                [("mesh", self.shape)],
                fix=f"give a shape of {self._ids.size} devices",
            )
        if shape == self.shape:
            return
        is_transposed = shape == self.shape[::-1] and min(shape) > 1
        self._ids = self._ids.T if is_transposed else folded(line(self._ids), shape)
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
        """The number of different programs that have run: an op, with its shapes and options."""
        return len(self.programs)

    def queue(self, cq_id: int | None) -> int:
        """The number of a command queue. Raises TTNNError if the device has not so many."""
        _ = self.mesh  # it is open, or an error says so
        found = 0 if cq_id is None else int(cq_id)
        if not 0 <= found < self.queues:
            raise wrong(
                f"there is no command queue {found}",
                [("device", self), ("command queues", self.queues)],
                fix=f"open the device with num_command_queues={found + 1}",
            )
        return found

    # -- facts of a device of Tenstorrent ---------------------------------------------------------
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

    def __getattr__(self, name: str) -> Any:
        raise no_attribute(self, name)

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
    """The devices of a mesh, of which some are this process's."""

    device: MeshDevice = field(repr=False)

    def shape(self) -> MeshShape:
        """The mesh's shape."""
        return self.device.shape

    def num_devices(self) -> int:
        """The number of devices of the mesh."""
        return self.device.get_num_devices()

    def is_local(self, coord: Sequence[int]) -> bool:
        """True if the device at `coord` is one of this process."""
        return self.device.is_local(coord)


__all__ = [
    "Device", "FabricNodeId", "MeshDevice", "MeshDeviceView", "SubDeviceManagerId",
    "num_cores_to_corerangeset",
]  # fmt: skip
