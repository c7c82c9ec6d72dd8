"""How does a program divide the cores of its devices? By managers of sub-devices: they are kept and
checked, and have no effect on results, as XLA divides the work itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .configs import CoreCoord, CoreRange, CoreRangeSet, SubDevice, SubDeviceId
from .faults import wrong


@dataclass(frozen=True)
class SubDeviceManagerId:
    """The number of a manager that `create_sub_device_manager` made."""

    number: int


class SubDeviceManagers:
    """What a mesh device knows of its sub-devices; `MeshDevice` is the only one that has them."""

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
        """For which sub-devices reads and writes wait; they wait for all. Raises TTNNError if the
        loaded manager has not so many."""
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
    lines, rest = divmod(target_num_cores, width)
    parts = [(0, 0, width - 1, lines - 1)] if lines else []
    parts += [(0, lines, rest - 1, lines)] if rest else []
    ends = [((a, b), (c, d)) if row_wise else ((b, a), (d, c)) for a, b, c, d in parts]
    return CoreRangeSet([CoreRange(CoreCoord(*a), CoreCoord(*b)) for a, b in ends])


__all__ = ["SubDeviceManagerId", "num_cores_to_corerangeset"]
