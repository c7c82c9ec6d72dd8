"""What do all tests share? A Hypothesis profile: no deadlines, the same draws; and no process that
holds every program it ever compiled."""

from __future__ import annotations

import gc
import itertools
import sys
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
