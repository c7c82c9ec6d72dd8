"""Elastic runs under random losses: the final bits of an undisturbed run.

One process loses virtual devices at random moments; others are killed and stopped at random, under
`tessera run --elastic`. `python -m tests.procs.torture elastic` takes devices 26 times and
processes 14 times, and reports the recovery times in its last line.
"""

from __future__ import annotations

import itertools
import os
import random
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path

from tests.procs.launched import command, lives, variables
from tests.quickly import FLAGS

PROGRAM = Path(__file__).with_name("elastic_program.py")
LIMIT_S = 600.0


def arguments(steps: int, folder: Path, pause_s: float = 0.0, losses: int = 0) -> list[str]:
    folder.mkdir(exist_ok=True)
    (folder / "steps").touch()
    return [str(PROGRAM), str(steps), "dp=24", str(folder), str(pause_s), str(losses)]


def alone(steps: int, folder: Path, losses: int = 0) -> list[str]:
    """Runs one process with 8 devices; returns the words of its output."""
    done = subprocess.run(
        [sys.executable, *arguments(steps, folder, 0.0, losses)],
        env=variables(TESSERA_DETERMINISTIC="1", XLA_FLAGS=FLAGS), capture_output=True, text=True,
        timeout=LIMIT_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout.split()


def made(folder: Path) -> int:
    """The number of steps that ran, with repeated ones."""
    return len((folder / "steps").read_text().splitlines())


def _is_rank(pid: int) -> bool:
    return PROGRAM.name.encode() in Path(f"/proc/{pid}/cmdline").read_bytes()


class Disturbed:
    """A run of up to four processes of two devices each."""

    def __init__(self, steps: int, folder: Path, most: int = 4, *more: str) -> None:
        self.folder, self.steps = folder, steps
        run = ("run", "--elastic", f"1:{most}", "--rejoin-after", "2", "--devices", 8 // most)
        self.files = [
            (folder.parent / f"{folder.name}.{what}").open("w+") for what in ("out", "err")
        ]
        self.popen = subprocess.Popen(
            command(*run, *arguments(steps, folder, pause_s=0.2), *more),
            env=variables(TESSERA_DETERMINISTIC="1", XLA_FLAGS=FLAGS), stdin=subprocess.DEVNULL,
            stdout=self.files[0], stderr=self.files[1], text=True, start_new_session=True,
        )  # fmt: skip

    def until(self, count: int) -> bool:
        """Waits until `count` steps have run. Returns whether they ran before the end of the
        run."""
        end_s = time.monotonic() + LIMIT_S
        while made(self.folder) < count and self.popen.poll() is None:
            assert time.monotonic() < end_s, f"no step in {LIMIT_S} s"
            time.sleep(0.05)
        return self.popen.poll() is None

    def ranks(self) -> list[int]:
        """The pids of the live processes."""
        there = [int(p.read_text()) for p in self.folder.glob("rank-*")]
        return [i for i in there if lives(i) and _is_rank(i)]

    def lose(self, draw: random.Random, number: int) -> float:
        """Sends the signal `number` to a process. Returns the seconds until the next step."""
        end_s = time.monotonic() + LIMIT_S
        while len(there := self.ranks()) < 2:  # without the last one there is no run; others rejoin
            assert self.popen.poll() is None and time.monotonic() < end_s, "no second rank"
            time.sleep(0.05)
        os.kill(draw.choice(there), number)
        begin_s, before = time.monotonic(), made(self.folder)
        self.until(before + 2)  # a step may have ended at the same moment
        return time.monotonic() - begin_s

    def end(self) -> tuple[int, str, str]:
        """Returns (exit status, stdout, stderr)."""
        try:
            self.popen.wait(LIMIT_S)
        finally:
            if self.popen.poll() is None:
                os.killpg(self.popen.pid, signal.SIGKILL)
                self.popen.wait(10)
        said = []
        for file in self.files:
            file.seek(0)
            said.append(file.read())
            file.close()
        return self.popen.returncode, *said


def torture(folder: Path, devices: int = 26, processes: int = 14, seed: int = 0) -> str:
    """Returns the failure after all losses of devices and processes, or ""."""
    draw, steps = random.Random(seed), 10 + 6 * max(devices, processes)
    want = alone(steps, folder / "quiet")[-1]
    words = alone(steps, folder / "devices", devices)
    back_s = [float(w) for w in words[2:-2]]
    print(f"devices lost {words[1]} times: back in {max(back_s):.2f} s at most, without compiling")
    if words[-1] != want or int(words[1]) < devices:
        return f"devices: {words}, and not {want}"
    run, took_s = Disturbed(steps, folder / "processes"), list[float]()
    for i in range(processes):
        if not run.until(made(run.folder) + draw.randint(1, 4)):
            break
        number = signal.SIGSTOP if i % 4 == 3 else signal.SIGKILL
        took_s.append(run.lose(draw, number))
        print(
            f"process lost by {signal.Signals(number).name}: steps again after {took_s[-1]:.1f} s"
        )
    status, out, said = run.end()
    if status or out.split()[-1] != want or len(took_s) < processes:
        return f"processes: {status}, {len(took_s)} lost: {out[-500:]} {said[-2000:]}, not {want}"
    sizes = [int(x.split()[1]) for x in (run.folder / "steps").read_text().splitlines()]
    changes = [sizes[0], *(b for a, b in itertools.pairwise(sizes) if a != b)]
    print("devices of the processes:", *changes)
    print(
        f"torture: {int(words[1]) + len(took_s)} losses, one hash; steps again after"
        f" {statistics.median(took_s):.1f} s (median of {len(took_s)} lost processes)"
    )
    return ""
