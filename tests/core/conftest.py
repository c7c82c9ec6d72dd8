"""How is it known that this tier needs no jax? `make test-core` hides jax before anything loads.

What a test then runs, NumPy's oracle runs.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator

import pytest

HIDDEN = os.environ.get("TESSERA_TEST_HIDE_JAX") == "1"
if HIDDEN:
    # None in sys.modules makes `import jax` an ImportError that names the importing line.
    for hidden in ("jax", "jaxlib"):
        sys.modules[hidden] = None  # type: ignore[assignment]  # the documented way to block one


@pytest.fixture(autouse=HIDDEN)
def engine_without_jax() -> Iterator[None]:
    import tessera as ts
    from tessera.lang.engine import set_engine
    from tests.core.test_lang import Oracle

    made = Oracle()
    set_engine(lambda: made)
    yield
    set_engine(ts._load_engine)
