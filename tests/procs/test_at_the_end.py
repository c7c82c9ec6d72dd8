"""A background save at the end of a program: written, however the program ends."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tessera import checkpoint
from tests.cases import LONG

SRC = str(Path(checkpoint.__file__).parents[2])
BEGIN = """
import atexit, time
from concurrent.futures import thread
import numpy as np
from tessera import checkpoint
from tessera.checkpoint import writing

data = writing._data


def late(job, id):  # once the program ends and its pools take nothing new
    limit_s = time.monotonic() + 60
    while not thread._shutdown and time.monotonic() < limit_s:
        time.sleep(0.01)
    return data(job, id)


writing._data = late
W = {"w": np.arange(8.0)}
"""
ENDS = {
    "without wait": ('checkpoint.save("a", W, quiet=True)', 0),
    "by an error": ('checkpoint.save("a", W, quiet=True); 1 / 0', 1),
    "by sys.exit": ('checkpoint.save("a", W, quiet=True); raise SystemExit(3)', 3),
    "by a save of its last moment": ('atexit.register(checkpoint.save, "a", W)', 0),
}


@pytest.mark.parametrize("end", [
    "without wait", "by a save of its last moment",
    pytest.param("by an error", marks=LONG), pytest.param("by sys.exit", marks=LONG),
])  # fmt: skip
def test_what_was_begun_is_written(end: str, tmp_path: Path) -> None:
    words, status = ENDS[end]
    done = subprocess.run(
        [sys.executable, "-c", BEGIN + words], cwd=tmp_path, capture_output=True, text=True,
        timeout=240, check=False, env={**os.environ, "PYTHONPATH": SRC},
    )  # fmt: skip
    assert done.returncode == status, done.stderr
    assert "schedule" not in done.stderr, done.stderr
    found = checkpoint.load("a", root=tmp_path / "checkpoints").tensors["w"].numpy()
    assert np.array_equal(found, np.arange(8.0))
