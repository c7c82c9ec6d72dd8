"""The heap on CPUs: pages are kept while memory is free, and returned when it is short."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import tessera as ts
from tessera.runtime.cpu import malloc

CODE = """
import numpy as np
from tessera.runtime.cpu import malloc

SIZE = 300 << 20

def left() -> bool:
    "Whether the pages of an array that is gone are still there."
    before = malloc.resident_bytes()
    x = np.ones(SIZE, np.uint8)
    assert malloc.resident_bytes() > before + SIZE // 2
    del x
    return malloc.resident_bytes() > before + SIZE // 2

assert not left()
assert malloc.keep_pages() and left()
malloc.free_bytes = lambda: malloc.resident_bytes() + 1
malloc.give_if_short()
kept = malloc.resident_bytes()
assert kept > SIZE
malloc.free_bytes = lambda: malloc.resident_bytes() - 1
malloc.give_if_short()
assert malloc.resident_bytes() < kept - SIZE // 2 and not left()
"""


GROWS = """
import numpy as np
from tessera.runtime.cpu import malloc

SIZE = 100 << 20
assert malloc.keep_pages()

def made(count: int) -> int:
    "Pages that are kept and that nobody uses."
    x = [np.ones(SIZE, np.uint8) for _ in range(count)]
    del x
    return malloc.resident_bytes()

before = malloc.resident_bytes()
assert made(4) > before + 3 * SIZE
malloc.give_unused(SIZE)  # the first time whatever it costs
assert malloc.resident_bytes() < before + SIZE // 2
assert made(1) > before + SIZE // 2
malloc.give_unused(SIZE)  # what runs next has them
assert malloc.resident_bytes() > before + SIZE // 2
assert made(4) > before + 3 * SIZE
malloc.give_unused(SIZE)  # too soon
assert malloc.resident_bytes() > before + 3 * SIZE
malloc._Unused.begin_s -= 1000
malloc.give_unused(SIZE)
assert malloc.resident_bytes() < before + SIZE // 2
"""

# A thread that allocates before the engine starts, and prints the number of heaps afterwards.
THREADED = """
import ctypes
import threading
import numpy as np
import tessera as ts

threading.Thread(target=lambda: bytes(5000), daemon=True).start()
x = ts.tensor(np.ones((512, 512), np.float32))
(x @ x).numpy()
ctypes.CDLL(None).malloc_stats()
"""

# Blocks of many sizes, every other one freed, like the heap after a compilation.
HOLES = """
import ctypes
import numpy as np
from tessera.runtime.cpu import malloc

SIZE = 100 << 20
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
libc.free.argtypes = [ctypes.c_void_p]
sizes = np.random.default_rng(0).integers(2 << 10, 100 << 10, 8000).tolist()

def littered() -> list:
    pieces = [libc.malloc(n) for n in sizes]
    for piece, n in zip(pieces, sizes):
        ctypes.memset(piece, 1, n)
    for piece in pieces[::2]:
        libc.free(piece)
    return pieces[1::2]

def lies_in_a_hole(size: int) -> bool:
    piece = libc.malloc(size)
    libc.free(piece)
    return piece < max(held)

held = littered()
malloc.close_holes()
assert lies_in_a_hole(50 << 10)  # a heap that is not kept is let alone
assert malloc.keep_pages()
x = np.ones(SIZE, np.uint8)
held += littered()
del x
used, there = malloc.used_bytes(), malloc.resident_bytes()
malloc.close_holes()
assert not any(lies_in_a_hole(n << 10) for n in (4, 10, 50, 90))
assert lies_in_a_hole(SIZE - (1 << 20))  # large arrays have their places
assert abs(malloc.used_bytes() - used) < 1 << 20
assert malloc.resident_bytes() < there - SIZE - (100 << 20)
few = [libc.malloc(50 << 10) for _ in range(100)]
assert max(few) < max(held) + malloc.STOCK + (16 << 20)
malloc.MOST_CLOSED = 1
malloc.close_holes()  # there are too many
assert lies_in_a_hole(50 << 10) and abs(malloc.used_bytes() - used) < 8 << 20
"""

# Queued steps without reads, with 128 MiB of temporaries each.
STEPS = """
import numpy as np
import tessera as ts
from tessera.runtime.cpu import malloc, throttle

@ts.jit
def step(x):
    h = ts.concat([x] * 16, 0)
    for _ in range(4):
        h = ts.tanh(h @ x)
    return h.sum()

x = ts.tensor(np.full((1024, 1024), 1e-3, np.float32))
before = malloc.used_bytes()
first, used = float(step(x)), []
malloc.give_unused = lambda size: used.append(malloc.used_bytes() - before)  # as the next begins
found = [step(x) for _ in range(8)]
assert all(float(y) == first for y in found)
assert len(used) == 8 and max(used) < throttle.LARGE // 2, used
"""


def ran(code: str, **env: str) -> str:
    """The stderr of a new process that runs `code`."""
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **env}, capture_output=True, text=True, timeout=90, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stderr


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="of glibc alone")
@pytest.mark.parametrize("code", [CODE, GROWS, HOLES], ids=["short", "grown", "holes"])
def test_pages_are_given_back_where_memory_is_short_or_has_grown(code: str) -> None:
    ran(code)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="of glibc alone")
def test_steps_that_nobody_reads_have_their_temporaries_one_after_the_other() -> None:
    ran(STEPS)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="of glibc alone")
def test_a_thread_that_begins_before_the_engine_has_no_heap_of_its_own() -> None:
    """Otherwise the engine's threads would share its heap, and map their temporaries anew at each
    step."""
    assert ran(THREADED, MALLOC_ARENA_MAX="8").count("Arena ") == 1
    assert ran(THREADED, MALLOC_ARENA_MAX="8", TESSERA_HEAP="0").count("Arena ") > 1


@pytest.mark.skipif(platform.system() != "Linux", reason="of Linux alone")
def test_what_is_left_is_the_least_of_host_and_control_group(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert malloc.resident_bytes() > 0 and 0 < malloc.free_bytes() < 1 << 46
    monkeypatch.setattr(malloc, "GROUPS", tmp_path)
    files = {"max": "max", "current": "900", "stat": "anon 300\ninactive_file 200"}
    for name, text in files.items():
        (tmp_path / f"memory.{name}").write_text(f"{text}\n")
    assert malloc.free_bytes() > 1000
    (tmp_path / "memory.max").write_text("1000\n")
    assert malloc.free_bytes() == 300


def test_the_memory_is_looked_at_after_some_programs_and_some_time(monkeypatch: Any) -> None:
    run, x, looks, now_s = ts.jit(lambda x: x + 1.0), ts.zeros((2,)), list[int](), 100.0
    x = run(x)
    monkeypatch.setattr(malloc, "_looked_s", [0.0])
    monkeypatch.setattr(malloc, "give_if_short", lambda: looks.append(1))
    monkeypatch.setattr(malloc, "time", SimpleNamespace(monotonic=lambda: now_s))
    for after in (1, 2):
        now_s += 1.1 * malloc.LOOK_S
        for _ in range(3 * malloc.LAUNCHES):
            x = run(x)
        assert len(looks) == after
