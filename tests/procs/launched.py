"""`tessera run` in its own process, as a user calls it; every wait has a limit."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tests.procs.harness import free_port

SRC = Path(__file__).resolve().parents[2] / "src"
LIMIT_S = 240.0  # also on a busy machine
END_S = 60.0  # for work that takes 1 to 15 seconds on an idle machine
HEAD = """\
import os, sys, time
import numpy as np
import tessera as ts
from tessera import dist
RANK, SIZE = dist.process_index(), dist.process_count()
MESH = dist.Mesh(("dp",), devices=SIZE)
X = ts.tensor(np.arange(2.0 * SIZE).reshape(SIZE, 2), mesh=MESH, layout=f"[{SIZE}@dp, 2]")
"""


@dataclass(frozen=True)
class Done:
    code: int
    out: str
    err: str
    took_s: float


def command(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "tessera.launch.cli", *map(str, arguments)]


def variables(**env: str) -> dict[str, str]:
    """The environment of a user without settings for Tessera or the engine."""
    kept = {
        n: v for n, v in os.environ.items() if not n.startswith(("TESSERA_", "XLA_", "TT_", "TF_"))
    }
    return {**kept, "PYTHONPATH": str(SRC), "JAX_PLATFORMS": "cpu", **env}


def launch(
    *arguments: object,
    folder: Path,
    meanwhile: Callable[[subprocess.Popen[str]], None] | None = None,
    whole: list[str] | None = None,
    limit_s: float = LIMIT_S,
    **env: str,
) -> Done:
    """Runs `tessera run` with `arguments` in `folder`; `meanwhile` may act on it."""
    begin_s = time.monotonic()
    with (folder / "out").open("w+") as out, (folder / "err").open("w+") as err:
        started = subprocess.Popen(
            whole or command("run", *arguments), cwd=folder, env=variables(**env),
            stdin=subprocess.DEVNULL, stdout=out, stderr=err, text=True, start_new_session=True,
        )  # fmt: skip
        try:
            if meanwhile is not None:
                meanwhile(started)
            started.wait(limit_s)
        finally:
            took_s = time.monotonic() - begin_s
            if started.poll() is None:
                os.killpg(started.pid, signal.SIGKILL)
                started.wait(10)
        out.seek(0)
        err.seek(0)
        return Done(started.returncode, out.read(), err.read(), took_s)


def others(folder: Path, size: int, program: str, **env: str) -> list[subprocess.Popen[str]]:
    """Starts processes with torchrun's variables; rank 0 is the coordinator. Rank K writes to outK
    and errK."""
    (folder / "program.py").write_text(program)
    port = free_port() - 1
    started = []
    for k in range(size):
        env |= {"RANK": str(k), "WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1"}
        with (folder / f"out{k}").open("w") as out, (folder / f"err{k}").open("w") as err:
            started.append(
                subprocess.Popen(
                    [sys.executable, "program.py"], cwd=folder, text=True, stdout=out, stderr=err,
                    stdin=subprocess.DEVNULL, env=variables(MASTER_PORT=str(port), **env),
                )
            )  # fmt: skip
    return started


def said(out: str, line: str) -> list[str]:
    """The matches of `line` in the ranks' output, sorted, since ranks print in any order. Without
    `tessera run`, messages of Gloo may come before or within a line."""
    return sorted(re.findall(line, out))


def until(met: Callable[[], object], limit_s: float = LIMIT_S, folder: Path | None = None) -> float:
    """Waits for `met`; returns the seconds. Raises AssertionError at the limit, with the output of
    the programs in `folder`."""
    begin_s = time.monotonic()
    while not met():
        assert time.monotonic() - begin_s < limit_s, f"it does not happen{wrote(folder)}"
        time.sleep(0.02)
    return time.monotonic() - begin_s


def wrote(folder: Path | None) -> str:
    """The names of the files there, and the texts of the output files."""
    files = sorted(f for f in folder.iterdir() if f.is_file()) if folder else []
    texts = [f"\n{f.name}:\n{f.read_text()}" for f in files if f.name.startswith(("out", "err"))]
    return f": {' '.join(f.name for f in files)}{''.join(texts)}"


def lives(pid: int) -> bool:
    """Returns whether a process runs; a zombie does not."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return text.rpartition(")")[2].split()[0] not in "ZX"
