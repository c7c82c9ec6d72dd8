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


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="of glibc alone")
def test_pages_are_given_back_where_memory_is_short() -> None:
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


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
