"""What do all tests share? A Hypothesis profile: no deadlines, the same draws; programs that
compile quickly; and no process that holds every program it ever compiled."""

from __future__ import annotations

import gc
import itertools
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

settings.register_profile("tessera", deadline=None, derandomize=True, max_examples=60)
settings.load_profile("tessera")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--refresh-golden", action="store_true", help="write the files of tests/golden anew"
    )
    parser.addoption(
        "--all-samples",
        action="store_true",
        help="run every sample of tests/peer on the engine, not a seeded few",
    )
    parser.addoption("--long", action="store_true", help="run the tests that are marked long too")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out what is long, unless it is asked for."""
    if not config.getoption("--long"):
        left_out = [i for i in items if i.get_closest_marker("long")]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [i for i in items if not i.get_closest_marker("long")]


# Compilation is most of what the tests of the engine take, and programs here run once or twice. So
# they compile without optimisations, and without the code generator that makes a whole compiler
# context for each fused loop, which halves the time again. These are compiled as users' programs
# are: what is promised of bits (in processes of their own), and what the documentation prints.
AS_USERS = ("test_bits.py", "test_docs.py", "test_opinfo.py", "test_gpu.py")
QUICK = {"xla_cpu_use_fusion_emitters": False, "xla_cpu_parallel_codegen_split_count": 1}


@pytest.fixture(autouse=True, scope="module")
def quickly_compiled(request: pytest.FixtureRequest) -> Iterator[None]:
    if "TESSERA_TEST_HIDE_JAX" in os.environ or request.path.name in AS_USERS:
        yield
        return
    import tessera as ts  # which sets the engine's flags, before jax is there

    assert ts
    import jax
    from jax._src import compiler  # jax has no setting for the engine's options of every program

    as_users = compiler.get_compile_options

    def quick(*args: Any, env_options_overrides: Any = None, **kwargs: Any) -> Any:
        options = {**QUICK, **(env_options_overrides or {})}
        return as_users(*args, env_options_overrides=options, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiler, "get_compile_options", quick)
        jax.config.update("jax_disable_most_optimizations", True)
        yield
        jax.config.update("jax_disable_most_optimizations", False)


# Compiled programs are mapped into memory in pieces. A process may hold 65,530 of them on Linux:
# beyond that the compiler ends it with a segmentation fault.
MAPS, MOST_MAPS = Path("/proc/self/maps"), 15_000
_ended = itertools.count(1)


def pytest_runtest_teardown() -> None:
    """Lets go of compiled programs where they have become many; counted after every eighth test."""
    jax = sys.modules.get("jax")
    if jax is None or next(_ended) % 8 or not MAPS.exists():
        return
    if MAPS.read_bytes().count(b"\n") > MOST_MAPS:
        from tessera.runtime.stage_programs import forget

        forget()
        gc.collect()
        jax.clear_caches()
        gc.collect()
