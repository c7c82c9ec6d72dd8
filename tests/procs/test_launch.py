"""Does `tessera run` make one program of many processes, and does none stay behind?"""

from __future__ import annotations

import os
import re
import signal
import subprocess
from pathlib import Path

import pytest

from tests.procs.launched import HEAD, launch, lives, until

TOTAL = HEAD + "print(RANK, dist.all_reduce(X.sum()).item(), ts.tensor([1.0, 2.0]).sum().item())\n"
# A rank that says that it is there, with its number, and waits.
WAIT = 'echo $$ > pid$RANK; exec sleep 600'  # fmt: skip


def pids(folder: Path, size: int) -> list[int]:
    """The numbers of the ranks, once all have begun."""
    files = [folder / f"pid{k}" for k in range(size)]
    until(lambda: all(f.is_file() and f.read_text().strip() for f in files))
    return [int(f.read_text()) for f in files]


def test_ranks_join_and_compute_together(tmp_path: Path) -> None:
    (tmp_path / "total.py").write_text(TOTAL)
    done = launch("-n", 3, "--prefix", "total.py", folder=tmp_path)
    assert done.code == 0, done.err
    lines = [x for x in done.out.splitlines() if "[Gloo]" not in x]
    assert sorted(lines) == [f"[rank {k}] {k} 15.0 3.0" for k in range(3)]


def test_a_rank_that_fails_ends_the_others_and_is_shown(tmp_path: Path) -> None:
    body = (
        "echo $$ > pid$RANK; [ $RANK = 1 ] || exec sleep 600; echo first; echo second >&2; exit 3"
    )
    done = launch("-n", 3, "sh", "-c", body, folder=tmp_path)
    assert done.code == 3
    assert done.out == "first\n"
    said = re.sub(r"after \d+\.\d s", "after S s", done.err)
    assert said == (
        "second\n"
        "tessera run: rank 1 exited with status 3 after S s; the others were ended\n"
        "  the last lines of rank 1:\n"
        "  | first\n"
        "  | second\n"
    )
    assert not any(map(lives, pids(tmp_path, 3)))


@pytest.mark.parametrize("rank", [0, 2])
def test_a_rank_that_is_killed_ends_the_others_and_is_named(rank: int, tmp_path: Path) -> None:
    def kill(started: subprocess.Popen[str]) -> None:
        os.kill(pids(tmp_path, 3)[rank], signal.SIGKILL)

    done = launch("-n", 3, "sh", "-c", WAIT, folder=tmp_path, meanwhile=kill)
    assert done.code == 128 + 9
    assert f"tessera run: rank {rank} was killed by SIGKILL (by a user, or as memory" in done.err
    assert not any(map(lives, pids(tmp_path, 3)))


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_ctrl_c_ends_every_rank(number: int, code: int, tmp_path: Path) -> None:
    def interrupt(started: subprocess.Popen[str]) -> None:
        pids(tmp_path, 2)
        started.send_signal(number)

    # One does not listen to the signal, and what it started does not either.
    body = f"[ $RANK = 1 ] && trap '' INT TERM; sleep 600 & echo $! > child$RANK; {WAIT}"
    done = launch("-n", 2, "sh", "-c", body, folder=tmp_path, meanwhile=interrupt)
    assert done.code == code, done.err
    children = [int((tmp_path / f"child{k}").read_text()) for k in range(2)]
    assert not any(map(lives, pids(tmp_path, 2) + children))


def test_nothing_stays_when_the_launcher_is_killed(tmp_path: Path) -> None:
    def kill(started: subprocess.Popen[str]) -> None:
        pids(tmp_path, 2)
        started.kill()

    body = f"[ $RANK = 1 ] && trap '' TERM; sleep 600 & echo $! > child$RANK; {WAIT}"
    done = launch("-n", 2, "sh", "-c", body, folder=tmp_path, meanwhile=kill)
    assert done.code == -9
    children = [int((tmp_path / f"child{k}").read_text()) for k in range(2)]
    assert until(lambda: not any(map(lives, pids(tmp_path, 2) + children))) < 15


def test_a_run_that_ends_leaves_nothing_that_its_ranks_started(tmp_path: Path) -> None:
    done = launch("-n", 2, "sh", "-c", "sleep 600 & echo $! > child$RANK", folder=tmp_path)
    assert (done.code, done.err) == (0, "")
    assert not any(lives(int((tmp_path / f"child{k}").read_text())) for k in range(2))
