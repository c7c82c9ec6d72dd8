"""The loss of a host in a run with safe points in memory: no step is lost.

Two processes with separate folders stand for two hosts: neither sees the other's files.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests.procs.elastic_torture import LIMIT_S, alone, arguments, made
from tests.procs.harness import free_port
from tests.procs.launched import END_S, variables
from tests.quickly import FLAGS

STEPS = 12


@contextmanager
def hosts(folder: Path, kept: Sequence[Path], pause_s: float) -> Iterator[list[subprocess.Popen]]:
    """Starts the run with a process for each of `kept`; ends all of them afterwards."""
    port = free_port() - 1
    started = []
    try:
        for rank, own in enumerate(kept):
            env = variables(
                RANK=str(rank), WORLD_SIZE=str(len(kept)), MASTER_ADDR="127.0.0.1",
                MASTER_PORT=str(port), TESSERA_ELASTIC=str(own), TESSERA_DEVICES="2",
                TESSERA_DETERMINISTIC="1", XLA_FLAGS=FLAGS,
            )  # fmt: skip
            with (folder.parent / f"{folder.name}.{rank}").open("w") as file:
                started.append(
                    subprocess.Popen(
                        [sys.executable, *arguments(STEPS, folder, pause_s)], env=env,
                        stdin=subprocess.DEVNULL, stdout=file, stderr=file,
                    )
                )  # fmt: skip
        yield started
    finally:
        for process in started:
            process.kill()
            process.wait(END_S)


def said(folder: Path) -> str:
    return "\n".join(
        f"rank {k}:\n" + (folder.parent / f"{folder.name}.{k}").read_text() for k in range(2)
    )


def test_a_host_that_is_lost_takes_nothing_with_it(tmp_path: Path) -> None:
    kept, run = [tmp_path / f"memory{k}" for k in range(3)], tmp_path / "run"
    with hosts(run, kept[:2], 0.5) as first:
        end_s = time.monotonic() + LIMIT_S
        while made(run) < 4:
            assert time.monotonic() < end_s and all(p.poll() is None for p in first), said(run)
            time.sleep(0.05)
    assert "elastic: safe points lie in " in said(run) and "of 2 hosts" in said(run)
    shutil.rmtree(kept[1])
    # A new host is rank 0 now, and the first host is rank 1.
    again = tmp_path / "again"
    with hosts(again, [kept[2], kept[0]], 0.0) as second:
        codes = [p.wait(LIMIT_S) for p in second]
    assert codes == [0, 0], said(again)
    assert f"goes on after {STEPS - made(again)} steps on 4 of 24 devices" in said(again)
    assert made(again) <= STEPS - 3
    words = next(x for x in said(again).splitlines() if x.startswith("hash ")).split()
    assert words[-1] == alone(STEPS, tmp_path / "quiet")[-1]
