"""How is it known that this tier needs no jax? `make test-core` hides jax before anything loads."""

from __future__ import annotations

import os
import sys

if os.environ.get("TESSERA_TEST_HIDE_JAX") == "1":
    # None in sys.modules makes `import jax` an ImportError that names the importing line.
    for hidden in ("jax", "jaxlib"):
        sys.modules[hidden] = None  # type: ignore[assignment]  # the documented way to block one
