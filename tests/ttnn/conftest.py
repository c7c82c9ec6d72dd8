"""Meshes of TT-NN on 8 virtual devices, for the tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import tessera as ts
from tessera import ttnn
from tests.issued import checked


@pytest.fixture(scope="session", autouse=True)
def started() -> Iterator[None]:
    """Starts all devices before any test; checks each program against its schedule."""
    ts.ones((1,)).numpy()
    with checked():
        yield


@pytest.fixture(scope="module")
def device() -> Iterator[ttnn.MeshDevice]:
    """2 x 4 devices, like a QuietBox."""
    with ttnn.create_mesh_device(ttnn.MeshShape(2, 4)) as found:
        yield found


@pytest.fixture(scope="module")
def pair() -> Iterator[ttnn.MeshDevice]:
    """1 x 2 devices, like an N300."""
    with ttnn.create_mesh_device(ttnn.MeshShape(1, 2)) as found:
        yield found
