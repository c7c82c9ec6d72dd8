"""Which flags must the engine find at its import? Those that keep what is promised of bits."""

from __future__ import annotations

import os
import sys

from .context import settings

# Without fused multiply-add: a compiler contracts a multiplication and an addition where neighbours
# suggest it, and neighbours differ from mesh to mesh. The engine reads this at its import.
PLAIN = "--xla_cpu_max_isa=AVX"
_seen: list[bool] = []


def prepare() -> None:
    """Sets the engine's flags for the promise in force; called before the engine is imported."""
    if _seen:
        return
    flags = os.environ.get("XLA_FLAGS", "")
    if settings().promise == "mesh_invariant" and PLAIN not in flags and "jax" not in sys.modules:
        flags = os.environ["XLA_FLAGS"] = f"{flags} {PLAIN}".strip()
    _seen.append(PLAIN in flags)


def is_plain() -> bool:
    """Whether a CPU engine was started without fused multiply-add."""
    prepare()
    return _seen[0]
