"""Several processes of one program on this machine; every wait has a limit."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

SRC = Path(__file__).resolve().parents[2] / "src"
# The engine's connections write to fd 1 in pieces; `out` has the program's own output alone.
OWN_OUT = "import os, sys; sys.stdout = os.fdopen(os.dup(1), 'w'); os.dup2(2, 1); "
# The first lines of each process; the test's lines follow.
HEAD = """\
import os, sys, time
import jax, numpy as np
RANK = int(os.environ["TEST_RANK"])
jax.distributed.initialize(
    os.environ["TEST_ADDRESS"], int(os.environ["TEST_SIZE"]), RANK, initialization_timeout=30
)
import tessera as ts
from tessera import dist, schedule
MESH = dist.Mesh(("dp",), devices=int(os.environ["TEST_SIZE"]))
X = ts.tensor(np.arange(8, dtype=np.float32).reshape(4, 2), mesh=MESH, layout="[4@dp, 2]")
"""


@dataclass(frozen=True)
class Ended:
    """A process's exit: its code (None: stopped at the limit) and its output."""

    code: int | None
    out: str
    err: str
    took_s: float


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def run_ranks(
    body: str, folder: Path, *, size: int = 2, limit_s: float = 240, head: str = HEAD, **env: str
) -> list[Ended]:
    """Runs `body` (after `head`) in `size` processes of one device each; returns the exit of each.

    A process that runs longer than `limit_s` is stopped by its pid.
    """
    program = folder / "prog.py"
    program.write_text(OWN_OUT + head + body, encoding="utf-8")
    common = {
        **os.environ,
        "PYTHONPATH": str(SRC),
        "JAX_PLATFORMS": "cpu",
        "TESSERA_DEVICES": "1",
        "TESSERA_FLIGHT_DIR": str(folder),
        "TEST_ADDRESS": f"127.0.0.1:{free_port()}",
        "TEST_SIZE": str(size),
        **env,
    }
    start_s = time.monotonic()
    files = [[(folder / f"{r}.{what}").open("w+") for what in ("out", "err")] for r in range(size)]
    started = [
        subprocess.Popen(
            [sys.executable, str(program)],
            env={**common, "TEST_RANK": str(r), "PYTHONHASHSEED": str(r + 1)},
            stdout=out,
            stderr=err,
        )
        for r, (out, err) in enumerate(files)
    ]
    took: dict[int, float] = {}
    codes: dict[int, int | None] = {}
    try:
        while len(codes) < size and time.monotonic() - start_s < limit_s:
            for r, p in enumerate(started):
                if r not in codes and p.poll() is not None:
                    codes[r], took[r] = p.returncode, time.monotonic() - start_s
            time.sleep(0.02)
    finally:
        for p in started:
            if p.poll() is None:
                p.kill()
            p.wait(timeout=10)
    ended = []
    for r, (out, err) in enumerate(files):
        for f in (out, err):
            f.seek(0)
        ended.append(Ended(codes.get(r), out.read(), err.read(), took.get(r, limit_s)))
        out.close()
        err.close()
    return ended


def line_of(mark: str, body: str, head: str = HEAD) -> str:
    """`prog.py:N` for the line of `body` that ends in `# mark`."""
    lines = (head + body).split("\n")
    (at,) = [i for i, line in enumerate(lines, 1) if line.endswith(f"# {mark}")]
    return f"prog.py:{at}"
