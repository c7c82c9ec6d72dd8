"""What does this tier need? PyTorch as the peer, and 8 virtual devices in one process."""

from __future__ import annotations

import pytest

import tessera as ts


@pytest.fixture(scope="session", autouse=True)
def started() -> None:
    """The devices run before any test, so that none finds as many as it happens to ask for."""
    ts.ones((1,)).numpy()
