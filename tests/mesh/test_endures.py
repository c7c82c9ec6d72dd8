"""Does a program endure what goes on for hours? Short forms of what `make soak` runs for long."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

SOAK = Path(__file__).parents[2] / "bench" / "soak"


def test_steps_that_nobody_reads_end() -> None:
    """On all devices of a machine: they stopped after some hundred of them, and never went on."""
    here = {**os.environ, "TESSERA_DEVICES": "2", "PYTHONPATH": str(SOAK.parents[1] / "src")}
    done = subprocess.run(
        [sys.executable, SOAK / "queued.py", "2", "400"],
        env=here, capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    assert len(done.stdout.splitlines()) == 7
