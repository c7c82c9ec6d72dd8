"""What does this tier need? One process with 8 virtual devices, which start by themselves."""

from __future__ import annotations

import pytest

from tessera import dist


@pytest.fixture(scope="session")
def mesh() -> dist.Mesh:
    """dp=2 tp=4: the mesh that most tests of this tier run on."""
    return dist.Mesh(("dp", "tp"), shape={"dp": 2, "tp": 4})
