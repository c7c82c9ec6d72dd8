"""Fixtures and hooks of all tests.

A Hypothesis profile without deadlines and with fixed draws, fast compilation, and a limit on the
compiled programs that one process holds.
"""

from __future__ import annotations

import atexit
import gc
import itertools
import logging
import os
import re
import shutil
import signal
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from tests.messages import GOLDEN, Golden, messages, refresh
from tests.quickly import quickly

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A background job of a shell ignores Ctrl-C, and so would all programs that the tests start.
    signal.signal(signal.SIGINT, signal.default_int_handler)

os.environ.setdefault("TESSERA_TRACEBACK_FILTERING", "off")  # a failing test must show our frames
if "TESSERA_PROGRAM_CACHE" not in os.environ:
    # The processes of a run share one program cache, which is deleted after the run.
    _programs = tempfile.mkdtemp(prefix="tessera-programs-")
    os.environ["TESSERA_PROGRAM_CACHE"] = _programs
    atexit.register(shutil.rmtree, _programs, ignore_errors=True)

collect_ignore = ["procs/elastic_program.py"]  # a program, which takes its arguments when it begins

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
    parser.addoption("--guides", help="the folder of the guides that tests/guide runs")
    parser.addoption("--long", action="store_true", help="run the tests that are marked long too")


NAMES: dict[Path, list[str]] = defaultdict(list)  # of the tests of a file, also of those left out


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselects tests marked `long` unless `--long` is given."""
    for item in items:
        NAMES[item.path].append(item.name)
    if not config.getoption("--long"):
        left_out = [i for i in items if i.get_closest_marker("long")]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [i for i in items if not i.get_closest_marker("long")]


def pytest_collection_finish() -> None:
    """Freezes all objects that exist before the first test, so that the garbage collector skips
    them, and lets it run more rarely."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Golden:
    """Compares a text, or an error's kind and text, with the message of this test in
    `tests/golden/errors`. `AT` stands for a line of the test's own file."""
    path, name = request.path, request.node.name
    file = GOLDEN / "errors" / f"{path.parent.name}_{path.stem.removeprefix('test_')}.txt"

    def compare(said: object) -> None:
        text = f"{type(said).__name__}: {said}" if isinstance(said, Exception) else str(said)
        found = re.sub(rf"\b{path.name}:\d+", "AT", text).strip("\n")
        if request.config.getoption("--refresh-golden"):
            refresh(file, name, found, NAMES[path])
        assert found == messages(file).get(name)
        if not any("::" in a for a in request.config.args):
            assert messages(file).keys() <= set(NAMES[path]), "a message without a test"

    return compare


@pytest.fixture
def everything(request: pytest.FixtureRequest) -> bool:
    """Returns whether a test runs all of its cases (`--long`) or a sample of the same kinds."""
    return bool(request.config.getoption("--long"))


# These are compiled as for users: tests of reproducible bits (in their own processes), and with
# --long the documentation's output and PyTorch's samples.
AS_USERS = ("test_bits.py", "test_gpu.py", "test_gpu_aot.py")
AS_USERS_IF_LONG = ("test_docs.py", "test_opinfo.py")


@pytest.fixture(autouse=True, scope="module")
def quickly_compiled(request: pytest.FixtureRequest) -> Iterator[None]:
    as_users = AS_USERS + AS_USERS_IF_LONG * request.config.getoption("--long")
    if "TESSERA_TEST_HIDE_JAX" in os.environ or request.path.name in as_users:
        yield
        return
    with quickly():
        yield


class ToStderr(logging.Handler):
    """The handler of a program that does not set up logging. Pytest's own takes its place."""

    def emit(self, record: logging.LogRecord) -> None:
        print(self.format(record), file=sys.stderr)


@pytest.fixture(autouse=True)
def messages_to_stderr() -> Iterator[None]:
    logger, handler = logging.getLogger("tessera"), ToStderr()
    logger.addHandler(handler)
    logger.setLevel("INFO")
    yield
    logger.removeHandler(handler)
    logger.setLevel("NOTSET")


@pytest.fixture(autouse=True)
def all_devices() -> Iterator[None]:
    """Restores all devices after a test, even if a test that removes a device fails."""
    yield
    devices = sys.modules.get("tessera.core.devices")  # its import sets variables of the engine
    if devices is not None:
        devices.LOST.clear()


# Compiled programs are mapped into memory in pieces. A process may hold 65,530 of them on Linux:
# beyond that the compiler ends it with a segmentation fault.
MAPS, MOST_MAPS = Path("/proc/self/maps"), 15_000
_ended = itertools.count(1)


def pytest_runtest_teardown() -> None:
    """Clears compiled programs if there are too many. Checked after every eighth test."""
    jax = sys.modules.get("jax")
    if jax is None or next(_ended) % 8 or not MAPS.exists():
        return
    if MAPS.read_bytes().count(b"\n") > MOST_MAPS:
        from tessera.runtime.stepped_executor import forget

        forget()
        gc.collect()
        jax.clear_caches()
        gc.collect()
