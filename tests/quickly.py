"""Fast compilation for tests of the engine.

Compilation is most of their time, and their programs run once or twice. Optimisations are off, and
so is the separate compiler context for each fused loop, which halves the time again.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from typing import Any

import pytest

# The engine of jax 0.11.2 no longer has the first of these.
_HAS_EMITTERS = tuple(map(int, version("jaxlib").split(".")[:3])) < (0, 11, 2)
OPTIONS = {"xla_cpu_use_fusion_emitters": False} if _HAS_EMITTERS else {}
OPTIONS |= {"xla_cpu_parallel_codegen_split_count": 1}
# XLA_FLAGS with the same effect in another process, including jax_disable_most_optimizations.
FLAGS = " ".join(f"--{name}={str(value).lower()}" for name, value in OPTIONS.items()) + (
    " --xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
)


@contextmanager
def quickly() -> Iterator[None]:
    """Compiles the programs inside without optimisations."""
    import tessera as ts  # which sets the engine's flags, before jax is there

    assert ts
    import jax
    from jax._src import compiler  # jax has no setting for the engine's options of every program

    as_users = compiler.get_compile_options

    def quick(*args: Any, env_options_overrides: Any = None, **kwargs: Any) -> Any:
        options = {**OPTIONS, **(env_options_overrides or {})}
        return as_users(*args, env_options_overrides=options, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiler, "get_compile_options", quick)
        jax.config.update("jax_disable_most_optimizations", True)
        yield
        jax.config.update("jax_disable_most_optimizations", False)
