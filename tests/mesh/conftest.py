"""Fixtures of the tests on a mesh: one process with 8 virtual CPU devices."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import tessera as ts
from tessera import dist
from tests.issued import checked


@pytest.fixture(scope="session", autouse=True)
def started() -> None:
    """Starts all devices before any test, so that no test starts fewer."""
    ts.ones((1,)).numpy()


@pytest.fixture(scope="session", autouse=True)
def as_planned(started: None) -> Iterator[None]:
    """Checks that every program of a test issues the collectives of its schedule."""
    with checked():
        yield


@pytest.fixture(scope="session")
def mesh() -> dist.Mesh:
    """dp=2 tp=4: the mesh of most tests in this folder."""
    return dist.Mesh(("dp", "tp"), shape={"dp": 2, "tp": 4})
