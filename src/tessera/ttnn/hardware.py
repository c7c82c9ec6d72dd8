"""What does a program ask of the hardware that this machine lacks? It is kept and shown, and
has no effect on results: semaphores, the network between devices, delays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ..core.devices import process_count
from .configs import (
    Arch,
    CoreRangeSet,
    FabricConfig,
    WormholeComputeKernelConfig,
    _words,
)
from .device import MeshDevice
from .faults import wrong
from .opening import close_mesh_device, get_num_devices, get_num_pcie_devices, open_device
from .run import count_program

FabricReliabilityMode = _words("FabricReliabilityMode", "STRICT_INIT RELAXED_INIT DYNAMIC_RECONFIG")
FabricTensixConfig = _words("FabricTensixConfig", "DISABLED MUX")
FabricUDMMode = _words("FabricUDMMode", "DISABLED ENABLED")


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
    return GlobalSemaphore(mesh_device, cores, int(initial_value))


def reset_global_semaphore_value(semaphore: GlobalSemaphore, reset_value: int) -> None:
    """Gives a semaphore another value."""
    semaphore.value = int(reset_value)


def set_fabric_config(config: Any, *rest: Any, **options: Any) -> None:
    """Says how devices are wired for collectives; the machine's description says it here. Raises
    TTNNError if `config` is no `FabricConfig`."""
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


def init_device_compute_kernel_config(arch: Any, *given: Any, **options: Any) -> Any:
    """The options of kernels for a chip: kept, without effect."""
    return WormholeComputeKernelConfig(**options)


def get_arch_name() -> str:
    """The name of the chip whose figures are shown."""
    return str(Arch.WORMHOLE_B0.name).lower()


def using_distributed_env() -> bool:
    """Whether several processes were started together."""
    return process_count() > 1


# The names of before the mesh, which are still there.
GetNumAvailableDevices, GetNumPCIeDevices = get_num_devices, get_num_pcie_devices
CreateDevice, CloseDevice = open_device, close_mesh_device


__all__ = [
    "CloseDevice", "CreateDevice", "FabricReliabilityMode", "FabricTensixConfig", "FabricUDMMode",
    "GetNumAvailableDevices", "GetNumPCIeDevices", "GlobalSemaphore", "apply_device_delay",
    "create_global_semaphore", "get_arch_name", "init_device_compute_kernel_config",
    "reset_global_semaphore_value", "set_fabric_config", "using_distributed_env",
]  # fmt: skip
