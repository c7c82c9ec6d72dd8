"""Runs over several hosts, each with its own address."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cases import LONG
from tests.procs import hosts
from tests.procs.launched import HEAD, LIMIT_S, command, launch, said, variables

WHY_NOT = hosts.missing()
pytestmark = pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT or "there can be hosts here")
MPI = pytest.mark.skipif(
    not shutil.which("mpirun"), reason="mpirun is not installed here (apt-get install openmpi-bin)"
)
TOTAL = HEAD + "import socket\nprint(socket.gethostname(), RANK, dist.all_reduce(X.sum()).item())\n"
SUMS = {"host0 0 6.0", "host1 1 6.0"}
# mpirun's replacement for ssh, which forwards no environment variables.
AGENT = """#!/bin/sh
shift
exec nsenter --target={pid} --net --uts --mount env -i PATH="$PATH" HOME=/root sh -c "$*"
"""


@pytest.fixture
def pids(tmp_path: Path) -> Iterator[list[int]]:
    with hosts.two(tmp_path) as found:
        yield found


@MPI
def test_the_launcher_reaches_ranks_on_another_host(pids: list[int], tmp_path: Path) -> None:
    (tmp_path / "total.py").write_text(TOTAL)
    (tmp_path / "agent").write_text(AGENT.format(pid=pids[1]))
    (tmp_path / "agent").chmod(0o700)
    more = f"--host host0,host1 --mca plm_rsh_agent {tmp_path / 'agent'} --mca btl tcp,self"
    whole = command("run", "-n", 2, "--coordinator", "host0", "--mpi-args", more, "total.py")
    root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    done = launch(whole=hosts.on(pids[0], *whole, folder=tmp_path), folder=tmp_path, **root)
    assert done.code == 0, done.err
    assert said(done.out, r"host\d \d 6\.0") == sorted(SUMS)


def ranks(pids: list[int], folder: Path, **env: str) -> list[tuple[int, str]]:
    """Runs a process on each host without our launcher; returns the exit code and output of
    each."""
    started = []
    for k, pid in enumerate(pids):
        own = {"RANK": str(k), "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", **env}
        whole = hosts.on(pid, sys.executable, "total.py", folder=folder)
        with (folder / f"said{k}").open("w") as out:
            started.append(
                subprocess.Popen(whole, cwd=folder, env=variables(**own), stdout=out, stderr=out)
            )
    try:
        codes = [p.wait(LIMIT_S) for p in started]
    finally:
        for p in started:
            p.kill()
    return [(code, (folder / f"said{k}").read_text()) for k, code in enumerate(codes)]


@LONG
def test_processes_of_two_hosts_join_by_themselves(pids: list[int], tmp_path: Path) -> None:
    (tmp_path / "total.py").write_text(TOTAL)
    ended = ranks(pids, tmp_path, MASTER_ADDR="host0", MASTER_PORT="29500")
    assert [code for code, _ in ended] == [0, 0], ended
    assert {line for _, out in ended for line in out.splitlines()} >= SUMS


@LONG
def test_a_coordinator_that_the_other_host_cannot_reach(pids: list[int], tmp_path: Path) -> None:
    """The address means each host itself; the ranks name the missing rank and the address."""
    (tmp_path / "total.py").write_text(TOTAL)
    (first, here), (second, there) = ranks(
        pids, tmp_path, MASTER_ADDR="127.0.0.1", MASTER_PORT="29500", TESSERA_JOIN_LIMIT="4"
    )
    assert (first, second) == (1, 1)
    assert "BackendError: join: rank 1 did not come within 4 s\n  came : rank 0\n" in here
    assert "join: the coordinator at 127.0.0.1:29501 cannot be reached within 4 s\n" in there
    assert "  here : host1\n" in there and "tessera run --coordinator HOST" in there
