"""Runs under Slurm, on a cluster of this machine with its own daemons."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cases import LONG
from tests.procs import slurm
from tests.procs.launched import END_S, HEAD, launch, lives, said, until

WHY_NOT = slurm.missing()
pytestmark = pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT or "Slurm is here")
TOTAL = HEAD + "print(RANK, SIZE, dist.all_reduce(X.sum()).item())\n"
SUMS = ["0 2 6.0", "1 2 6.0"]


@pytest.fixture(scope="module")
def env(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    # Job numbers of two clusters may be equal, and `srun` programs derive their port from them.
    with (tmp_path_factory.getbasetemp().parent / "slurm.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with slurm.cluster(tmp_path_factory.mktemp("slurm")) as found:
            yield found


@LONG
def test_tasks_of_srun_join_by_themselves(env: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "total.py").write_text(TOTAL)
    whole = ["srun", "--ntasks=2", sys.executable, "total.py"]
    done = launch(whole=whole, folder=tmp_path, **env)
    assert done.code == 0, done.err
    assert said(done.out, r"\d 2 6\.0") == SUMS


@LONG
def test_the_launcher_starts_ranks_by_srun(env: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "total.py").write_text(TOTAL)
    done = launch("-n", 2, "--slurm-args", "--nodes=1", "total.py", folder=tmp_path, **env)
    assert done.code == 0, done.err
    assert said(done.out, r"\d 2 6\.0") == SUMS


WAIT = """
import os, re, signal, time, pathlib
rank = os.environ["RANK"]
token = os.environ["TESSERA_TOKEN"].encode()
seen = []
for file in pathlib.Path("/proc").glob("[0-9]*/cmdline"):
    try:
        seen += [str(file)] if token in file.read_bytes() else []
    except OSError:
        pass
pathlib.Path("seen" + rank).write_text(" ".join(seen))
pathlib.Path("part" + rank).write_text(str(os.getpid()))
os.rename("part" + rank, "pid" + rank)
time.sleep(600)
"""


@pytest.mark.parametrize("what", ["a rank", "the launcher"])
def test_all_ranks_end(what: str, env: dict[str, str], tmp_path: Path) -> None:
    """After a killed rank, or a killed launcher; no command line shows the token."""
    (tmp_path / "wait.py").write_text(WAIT)
    ranks: list[int] = []

    def kill(started: subprocess.Popen[str]) -> None:
        files = [tmp_path / f"pid{k}" for k in range(2)]
        until(lambda: all(f.exists() for f in files), folder=tmp_path)
        ranks.extend(int(f.read_text()) for f in files)
        os.kill(ranks[1] if what == "a rank" else started.pid, 9)

    done = launch("-n", 2, "--slurm-args", "--nodes=1", "wait.py", folder=tmp_path,
                  meanwhile=kill, **env)  # fmt: skip
    if what == "a rank":  # srun exits with the status of a killed or ended task
        assert done.code in (137, 143), done.err
        assert f"tessera run: srun exited with status {done.code} after " in done.err
        assert "task 1: Killed\n" in done.err
    else:
        assert done.code == -9
    assert until(lambda: not any(map(lives, ranks))) < END_S
    assert [(tmp_path / f"seen{k}").read_text() for k in range(2)] == ["", ""]
