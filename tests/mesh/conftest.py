"""What does this tier need? One process with 8 virtual devices, which start by themselves."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import tessera as ts
from tessera import dist
from tests.issued import checked


@pytest.fixture(scope="session", autouse=True)
def started() -> None:
    """The devices run before any test, so that none finds as many as it happens to ask for."""
    ts.ones((1,)).numpy()


@pytest.fixture(scope="session", autouse=True)
def as_planned(started: None) -> Iterator[None]:
    """Every program that a test runs issues what its schedule holds."""
    with checked():
        yield


@pytest.fixture(scope="session")
def mesh() -> dist.Mesh:
    """dp=2 tp=4: the mesh that most tests of this tier run on."""
    return dist.Mesh(("dp", "tp"), shape={"dp": 2, "tp": 4})
