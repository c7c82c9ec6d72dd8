"""Fixtures of tests that were written for TT-NN's hardware, on the devices of this machine: put
`pytest_plugins = ["tessera.ttnn.testing"]` in a conftest.py.

`mesh_device` takes what tests pass to it: a number of devices, (rows, columns), or nothing for all;
`device_params` its other arguments.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import numpy as np
import pytest

from .device import MeshDevice
from .hardware import get_arch_name
from .lifecycle import create_mesh_device, manage_device
from .shapes import MeshShape
from .system import system
from .tensor import host_array

OPTIONS = ("l1_small_size", "trace_region_size", "num_command_queues", "worker_l1_size")


class ProgramCounter:
    """The number of programs that come into a device's cache: `device.cache_entries_counter` in
    tests."""

    def __init__(self, device: MeshDevice) -> None:
        self.device, self.total = device, 0

    def reset(self) -> None:
        """Counts from zero."""
        self.total = 0

    @contextmanager
    def measure(self) -> Iterator[None]:
        """Counts those of the block too."""
        before = self.device.num_program_cache_entries()
        yield
        self.total += self.device.num_program_cache_entries() - before

    def decorator(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """`fn`, whose programs are counted."""

        @wraps(fn)
        def counted(*args: Any, **kwargs: Any) -> Any:
            with self.measure():
                return fn(*args, **kwargs)

        return counted


def _counted(opened: Any) -> Iterator[MeshDevice]:
    with opened as device:
        device.cache_entries_counter = ProgramCounter(device)
        yield device


def _mesh(shape: Any, params: dict[str, Any]) -> Iterator[MeshDevice]:
    if shape is not None:
        shape = MeshShape(1, shape) if isinstance(shape, int) else MeshShape(shape)
        if shape.mesh_size() > system(shape.mesh_size()).ids.size:
            pytest.skip(f"the system has no {shape}")
    yield from _counted(create_mesh_device(shape, **params))


@pytest.fixture
def device_params(request: pytest.FixtureRequest) -> dict[str, Any]:
    """Arguments of a device: those of the dict that the test passes which a mesh here has."""
    return {k: v for k, v in getattr(request, "param", {}).items() if k in OPTIONS}


@pytest.fixture
def device(device_params: dict[str, Any]) -> Iterator[MeshDevice]:
    """One device."""
    yield from _counted(manage_device(0, **device_params))


@pytest.fixture
def mesh_device(
    request: pytest.FixtureRequest, device_params: dict[str, Any]
) -> Iterator[MeshDevice]:
    """A mesh of the shape that the test passes, or of all devices."""
    yield from _mesh(getattr(request, "param", None), device_params)


def _of_shape(name: str, shape: Callable[[int], tuple[int, int]]) -> Any:
    def opened(device_params: dict[str, Any]) -> Iterator[MeshDevice]:
        yield from _mesh(shape(int(system().ids.size)), device_params)

    return pytest.fixture(name=name)(opened)


pcie_mesh_device = _of_shape("pcie_mesh_device", lambda n: (1, 4))  # a T3000's next to the host
n300_mesh_device = _of_shape("n300_mesh_device", lambda n: (1, 2))
t3k_mesh_device = _of_shape("t3k_mesh_device", lambda n: (1, 8))
t3k_single_board_mesh_device = _of_shape("t3k_single_board_mesh_device", lambda n: (1, 2))
bh_1d_mesh_device = _of_shape("bh_1d_mesh_device", lambda n: (n, 1))
bh_2d_mesh_device = _of_shape("bh_2d_mesh_device", lambda n: {8: (4, 2), 32: (4, 8)}.get(n, (n, 1)))


@pytest.fixture
def ensure_devices_tg() -> None:
    """Tests for 32 devices are skipped where there are others."""
    if system().ids.size != 32:
        pytest.skip("the system has no 32 devices: start with TESSERA_DEVICES=32")


# Programs are always kept, kernels never, and results do not depend on the chip.
use_program_cache, clear_compile_cache, silicon_arch_wormhole_b0, silicon_arch_blackhole = (
    pytest.fixture(name=name)(lambda: None)
    for name in (
        "use_program_cache", "clear_compile_cache", "silicon_arch_wormhole_b0",
        "silicon_arch_blackhole",
    )
)  # fmt: skip
is_ci_env = pytest.fixture(name="is_ci_env")(lambda: os.environ.get("CI") == "true")
silicon_arch_name = pytest.fixture(name="silicon_arch_name")(get_arch_name)


@pytest.fixture
def reset_seeds() -> None:
    """Random numbers of PyTorch, NumPy and Python begin anew."""
    import torch

    torch.manual_seed(213919)
    np.random.seed(213919)
    random.seed(213919)


@pytest.fixture
def function_level_defaults(reset_seeds: None) -> None:
    """Random numbers begin anew for each test."""


def comp_pcc(golden: Any, calculated: Any, pcc: float = 0.99) -> tuple[bool, float]:
    """Compares two arrays: whether they correlate at least so much, and their correlation. It is 1
    for equal arrays, and 0 with a NaN in one."""
    a, b = (host_array(x).astype(np.float64).ravel() for x in (golden, calculated))
    if a.shape != b.shape or np.isnan(a).any() != np.isnan(b).any():
        return False, 0.0
    if np.array_equal(a, b) or not a.size:
        return True, 1.0
    found = float(np.corrcoef(a, b)[0, 1]) if a.std() and b.std() else 0.0
    return found >= pcc, found


def assert_with_pcc(expected: Any, actual: Any, pcc: float = 0.9999) -> tuple[bool, float]:
    """Asserts that two arrays have a shape and correlate at least so much."""
    assert list(expected.shape) == list(actual.shape), f"{expected.shape} and {actual.shape}"
    fits, found = comp_pcc(expected, actual, pcc)
    assert fits, f"they correlate at {found}, not at {pcc}"
    return fits, found
