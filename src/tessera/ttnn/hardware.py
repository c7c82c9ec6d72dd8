"""Hardware that this machine lacks: semaphores, the network between devices, delays, settings.
It is kept, checked and shown, and has no effect on results."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..core.checks import instance
from ..core.devices import process_count
from ..core.wording import nearest
from .args import check_types
from .configs import Arch, CoreRangeSet, FabricConfig, WormholeComputeKernelConfig, enumeration
from .device import MeshDevice
from .errors import TTNNError, wrong
from .lifecycle import close_mesh_device, get_num_devices, get_num_pcie_devices, open_device
from .op import count_program
from .system import system


@dataclass
class GlobalSemaphore:
    """A number that kernels on several devices wait for. Programs here wait for their operands."""

    device: MeshDevice = field(repr=False)
    cores: CoreRangeSet = field(repr=False)
    value: int


def create_global_semaphore(
    mesh_device: MeshDevice, cores: CoreRangeSet, initial_value: int, buffer_type: Any = None
) -> GlobalSemaphore:
    """A semaphore for the collectives that take one. Raises TTNNError if the device is closed."""
    _ = mesh_device.mesh
    check_types("create_global_semaphore", buffer_type=buffer_type)
    return GlobalSemaphore(mesh_device, cores, int(initial_value))


def reset_global_semaphore_value(semaphore: GlobalSemaphore, reset_value: int) -> None:
    """Gives a semaphore another value."""
    semaphore.value = int(reset_value)


def set_fabric_config(config: Any, *args: Any, **options: Any) -> None:
    """Names the wiring of devices for collectives, which the machine's description gives here.
    Raises TTNNError if `config` is no `FabricConfig`."""
    if not isinstance(config, FabricConfig):
        raise wrong(
            f"set_fabric_config: {config!r} is no configuration of the fabric",
            fix="ttnn.set_fabric_config(ttnn.FabricConfig.FABRIC_1D)",
        )


def apply_device_delay(
    mesh_device: MeshDevice, delays: Sequence[Sequence[int]], subdevice_id: Any = None
) -> None:
    """Lets devices wait on hardware, to find races; here nothing races. Raises TTNNError unless
    `delays` has a number of cycles for each device of the mesh."""
    rows, cols = mesh_device.shape
    if len(delays) != rows or any(len(row) != cols for row in delays):
        raise wrong(
            "apply_device_delay: it takes a number for each device",
            [("mesh", mesh_device.shape), ("rows of delays", [len(row) for row in delays])],
            fix=f"give {rows} rows of {cols} numbers",
        )
    count_program("apply_device_delay", mesh_device, apply_device_delay)


def init_device_compute_kernel_config(arch: Any, *args: Any, **options: Any) -> Any:
    """The options of kernels for a chip: kept, without effect."""
    return WormholeComputeKernelConfig(**options)


def get_arch_name() -> str:
    """The name of the chip whose figures are shown."""
    return str(Arch.WORMHOLE_B0.name).lower()


def using_distributed_env() -> bool:
    """True if several processes were started together."""
    return process_count() > 1


SETTINGS: dict[str, object] = {
    "cache_path": None, "model_cache_path": None, "tmp_dir": None, "enable_model_cache": False,
    "enable_fast_runtime_mode": True, "throw_exception_on_fallback": False, "enable_logging": False,
    "enable_graph_report": False, "enable_detailed_buffer_report": False,
    "enable_detailed_tensor_report": False, "enable_comparison_mode": False,
    "comparison_mode_should_raise_exception": False, "comparison_mode_pcc": 0.9999,
    "root_report_path": None, "report_name": None, "report_path": None,
    "strict_ccl_topology": False,
}  # fmt: skip


class Config:
    """TT-NN's settings, `ttnn.CONFIG`: kept and shown, without effect but for
    `strict_ccl_topology` (ccl.py). Raises TTNNError for one that TT-NN does not have."""

    strict_ccl_topology: bool

    def __init__(self) -> None:
        vars(self).update(SETTINGS)

    def __setattr__(self, name: str, value: object) -> None:
        if name not in SETTINGS:
            raise wrong(
                f"ttnn.CONFIG has no {name!r}",
                fix=f"the names most like it are {nearest(name, SETTINGS, 3)}",
            )
        usual = SETTINGS[name]
        if usual is not None:
            instance("ttnn.CONFIG", name, value, type(usual), f"{name} = {usual}", TTNNError)
        super().__setattr__(name, value)

    def __repr__(self) -> str:
        return f"Config({', '.join(f'{k}={v!r}' for k, v in vars(self).items())})"


CONFIG = Config()


@contextlib.contextmanager
def manage_config(name: str, value: object) -> Iterator[None]:
    """Another value of a setting of `ttnn.CONFIG` within the block."""
    before = getattr(CONFIG, name, None)
    setattr(CONFIG, name, value)
    try:
        yield
    finally:
        setattr(CONFIG, name, before)


_default: list[MeshDevice | None] = [None]


def SetDefaultDevice(device: MeshDevice | None) -> None:
    """Sets the device that `GetDefaultDevice` gives."""
    _default[0] = device


def GetDefaultDevice() -> MeshDevice | None:
    """The device of `SetDefaultDevice`; None before."""
    return _default[0]


# The names of before the mesh, which are still there.
GetNumAvailableDevices, GetNumPCIeDevices = get_num_devices, get_num_pcie_devices
CreateDevice, CloseDevice = open_device, close_mesh_device

_BY_SHAPE: dict[tuple[int, ...], str] = {
    (1, 1): "N150",
    (1, 2): "N300",
    (2, 4): "T3K",
    (8, 4): "GALAXY",
}
_ClusterType = enumeration("ClusterType", "INVALID N150 N300 T3K GALAXY CUSTOM")


class cluster:
    """The machine, by the names that TT-NN has for its own."""

    ClusterType = _ClusterType

    @staticmethod
    def get_cluster_type() -> Any:
        """The machine that has the system's grid of devices; CUSTOM for another grid."""
        return _ClusterType[_BY_SHAPE.get(tuple(system().shape), "CUSTOM")]


__all__ = [
    "CONFIG", "CloseDevice", "Config", "CreateDevice", "GetDefaultDevice",
    "GetNumAvailableDevices", "GetNumPCIeDevices", "GlobalSemaphore", "SetDefaultDevice",
    "apply_device_delay", "cluster", "create_global_semaphore", "get_arch_name",
    "init_device_compute_kernel_config", "manage_config", "reset_global_semaphore_value",
    "set_fabric_config", "using_distributed_env",
]  # fmt: skip
