"""What do all tests share? A Hypothesis profile: no deadlines, the same draws; and no process that
holds every program it ever compiled."""

from __future__ import annotations

import gc
import itertools
import os
import sys
from collections.abc import Iterator
from pathlib import Path

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


# Compilation is four fifths of what the tests of the engine take, and programs here run once or
# twice. These are compiled as users' programs are: what is promised of bits (in processes of their
# own), and what the documentation prints.
AS_USERS = ("test_bits.py", "test_docs.py", "test_opinfo.py", "test_gpu.py")


@pytest.fixture(autouse=True, scope="module")
def quickly_compiled(request: pytest.FixtureRequest) -> Iterator[None]:
    if "TESSERA_TEST_HIDE_JAX" in os.environ or request.path.name in AS_USERS:
        yield
        return
    import tessera as ts  # which sets the engine's flags, before jax is there

    assert ts
    import jax

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
