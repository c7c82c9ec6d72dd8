"""Does the process keep its pages while there is room, and give them back when there is none?"""

from __future__ import annotations

import platform
import subprocess
import sys
from pathlib import Path

import pytest

from tessera.runtime import malloc

CODE = """
import numpy as np
from tessera.runtime import malloc

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
from tessera.runtime import malloc

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

# Steps that nobody reads, with 128 MiB of temporaries each.
STEPS = """
import numpy as np
import tessera as ts
from tessera.runtime import malloc, throttle

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


def ran(code: str) -> None:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=90)
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="of glibc alone")
@pytest.mark.parametrize("code", [CODE, GROWS], ids=["short", "grown"])
def test_pages_are_given_back_where_memory_is_short_or_has_grown(code: str) -> None:
    ran(code)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="of glibc alone")
def test_steps_that_nobody_reads_have_their_temporaries_one_after_the_other() -> None:
    ran(STEPS)


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
