"""Fixtures of the tests without jax: `make test-core` hides jax before anything is imported.

A test that runs a program uses the NumPy oracle.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from typing import Any

import pytest

HIDDEN = os.environ.get("TESSERA_TEST_HIDE_JAX") == "1"
if HIDDEN:
    # None in sys.modules makes `import jax` an ImportError that names the importing line.
    for hidden in ("jax", "jaxlib"):
        sys.modules[hidden] = None  # type: ignore[assignment]  # the documented way to block one


@pytest.fixture
def oracle() -> Iterator[Any]:
    """Sets the NumPy engine for this test."""
    import tessera as ts
    from tessera.lang.value.engine import set_engine
    from tests.core.numpy_engine import Oracle

    made = Oracle()
    set_engine(lambda: made)
    yield made
    set_engine(ts._load_engine)


if HIDDEN:

    @pytest.fixture(autouse=True)
    def engine_without_jax(oracle: Any) -> None:
        """Sets the NumPy engine for every test that sets no other."""
