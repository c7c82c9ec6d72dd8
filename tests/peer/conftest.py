"""Fixtures of the comparison with PyTorch: 8 virtual devices in one process."""

from __future__ import annotations

import pytest

import tessera as ts


@pytest.fixture(scope="session", autouse=True)
def started() -> None:
    """Starts all devices before any test, so that no test starts fewer."""
    ts.ones((1,)).numpy()
