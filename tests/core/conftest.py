"""How is it known that this tier needs no jax? `make test-core` hides jax before anything loads.

What a test then runs, NumPy's oracle runs.
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
    """The engine of this test: one of NumPy."""
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
        """The engine of every test where there is no other."""
