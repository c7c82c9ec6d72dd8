"""Which fixtures do tests have that were written for TT-NN's hardware? Those names, on the devices
of this machine: put `pytest_plugins = ["tessera.ttnn.testing"]` in a conftest.py.

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
from .opening import close_mesh_device, open_device, open_mesh_device
from .shapes import MeshShape
from .system import system
from .tensor import host_array

OPTIONS = ("l1_small_size", "trace_region_size", "num_command_queues", "worker_l1_size")


class ProgramCounter:
    """How many programs come into a device's cache: `device.cache_entries_counter` in tests."""

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


def _counted(device: MeshDevice) -> MeshDevice:
    device.cache_entries_counter = ProgramCounter(device)  # type: ignore[attr-defined]  # as theirs
    return device


def _opened(shape: Any, params: dict[str, Any]) -> Iterator[MeshDevice]:
    if shape is not None:
        shape = MeshShape(1, shape) if isinstance(shape, int) else MeshShape(shape)
        if shape.mesh_size() > system(shape.mesh_size()).ids.size:
            pytest.skip(f"the system has no {shape}")
    device = open_mesh_device(shape, **{k: v for k, v in params.items() if k in OPTIONS})
    yield _counted(device)
    close_mesh_device(device)


@pytest.fixture
def device_params(request: pytest.FixtureRequest) -> dict[str, Any]:
    """How a device is opened: a dict that the test passes."""
    found: dict[str, Any] = getattr(request, "param", {})
    return found


@pytest.fixture
def device(device_params: dict[str, Any]) -> Iterator[MeshDevice]:
    """One device."""
    found = open_device(0, **{k: v for k, v in device_params.items() if k in OPTIONS})
    yield _counted(found)
    close_mesh_device(found)


@pytest.fixture
def mesh_device(
    request: pytest.FixtureRequest, device_params: dict[str, Any]
) -> Iterator[MeshDevice]:
    """A mesh of the shape that the test passes, or of all devices."""
    yield from _opened(getattr(request, "param", None), device_params)


@pytest.fixture
def pcie_mesh_device(device_params: dict[str, Any]) -> Iterator[MeshDevice]:
    """1 x 4: the devices of a T3000 that the host reaches itself."""
    yield from _opened((1, 4), device_params)


@pytest.fixture
def n300_mesh_device(device_params: dict[str, Any]) -> Iterator[MeshDevice]:
    """1 x 2."""
    yield from _opened((1, 2), device_params)


@pytest.fixture
def t3k_mesh_device(device_params: dict[str, Any]) -> Iterator[MeshDevice]:
    """1 x 8: all devices of a T3000, in a line."""
    yield from _opened((1, 8), device_params)


@pytest.fixture
def t3k_single_board_mesh_device(device_params: dict[str, Any]) -> Iterator[MeshDevice]:
    """1 x 2: the devices of one board."""
    yield from _opened((1, 2), device_params)


@pytest.fixture
def bh_1d_mesh_device(device_params: dict[str, Any]) -> Iterator[MeshDevice]:
    """All devices in one column."""
    yield from _opened((int(system().ids.size), 1), device_params)


@pytest.fixture
def bh_2d_mesh_device(device_params: dict[str, Any]) -> Iterator[MeshDevice]:
    """All devices as a grid: 4 x 2 of 8, 4 x 8 of 32, else one column."""
    count = int(system().ids.size)
    yield from _opened({8: (4, 2), 32: (4, 8)}.get(count, (count, 1)), device_params)


@pytest.fixture
def ensure_devices_tg() -> None:
    """Tests for 32 devices are skipped where there are others."""
    if system().ids.size != 32:
        pytest.skip("the system has no 32 devices: start with TESSERA_DEVICES=32")


@pytest.fixture
def use_program_cache() -> None:
    """Programs are always kept."""


@pytest.fixture
def clear_compile_cache() -> None:
    """Compiled kernels are not kept between tests."""


@pytest.fixture
def is_ci_env() -> bool:
    """Whether the tests run in continuous integration."""
    return os.environ.get("CI") == "true"


@pytest.fixture
def silicon_arch_name() -> str:
    """The name of the chip whose figures are shown."""
    return get_arch_name()


@pytest.fixture
def silicon_arch_wormhole_b0() -> None:
    """Tests for this chip run."""


@pytest.fixture
def silicon_arch_blackhole() -> None:
    """Tests for this chip run too: results do not depend on the chip."""


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
    """Whether two arrays correlate at least so much, and how much they do. Equal arrays do wholly;
    with a NaN in one they do not at all."""
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
