"""Steps in turn by sides in separate processes.

A worker prints one line when it is ready and takes one step for each line that it reads; between
its steps it is idle, so the running side has the whole machine. Every wait has a limit.
"""

from __future__ import annotations

import itertools
import json
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple


class Taken(NamedTuple):
    """One step: wall seconds, its value (a loss), processor seconds, and the process's peak memory
    since the second step in MB (0: not known)."""

    wall_s: float
    value: float
    cpu_s: float
    peak_mb: float = 0.0


@dataclass
class Steps:
    """The steps of one side. The times leave out the first ones, the values do not."""

    wall_s: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)
    values: list[float] = field(default_factory=list)
    peak_mb: float = 0.0

    @property
    def median_s(self) -> float:
        return statistics.median(self.wall_s)


def timed(run: Callable[[], float], peak: Callable[[], float] | None = None) -> Callable[[], Taken]:
    """Returns `run` as a side of `in_turn`; `peak` gives an allocator's memory in place of the
    process's."""
    count = itertools.count()

    def step() -> Taken:
        if next(count) == 1 and REFS.exists():  # the first step's memory includes the compiler's
            REFS.write_text("5")  # resets the peak (proc(5))
        begin, worked = time.perf_counter(), time.process_time()
        value = run()
        took_s, worked_s = time.perf_counter() - begin, time.process_time() - worked
        return Taken(took_s, value, worked_s, (peak or peak_mb)())

    return step


REFS, STATUS = Path("/proc/self/clear_refs"), Path("/proc/self/status")


def peak_mb() -> float:
    """The process's peak memory in MB; 0 if it is not known."""
    rows = STATUS.read_text().splitlines() if STATUS.exists() else []
    return next((int(r.split()[1]) / 1e3 for r in rows if r.startswith("VmHWM")), 0.0)


def in_turn(sides: dict[str, Callable[[], Taken]], rounds: int, warm: int = 1) -> dict[str, Steps]:
    """Runs `rounds` steps of each side in turn, after `warm` that are not timed."""
    found = {name: Steps() for name in sides}
    for k in range(rounds + warm):
        for name in list(sides)[:: 1 if k % 2 else -1]:
            taken, steps = sides[name](), found[name]
            steps.values.append(taken.value)
            steps.peak_mb = taken.peak_mb
            if k >= warm:
                steps.wall_s.append(taken.wall_s)
                steps.cpu_s.append(taken.cpu_s)
    return found


def ratio(over: Sequence[float], under: Sequence[float]) -> float:
    """The median of the quotients of steps in the same turn."""
    return statistics.median(a / b for a, b in zip(over, under, strict=True))


def apart(*sides: Steps, at_most: float) -> float:
    """Returns the largest difference between values of the same step. Exits if it is over
    `at_most`."""
    far = max(max(row) - min(row) for row in zip(*(s.values for s in sides), strict=True))
    if not far <= at_most:
        sys.exit(f"losses differ by {far:g}, more than {at_most:g}: not the same computation")
    return far


def serve(step: Callable[[], float], peak: Callable[[], float] | None = None, **about: Any) -> None:
    """In a worker: prints `about`, then the measurements of one step for each line read."""
    print(json.dumps(about), flush=True)
    for _ in sys.stdin:
        print(json.dumps(timed(step, peak)()), flush=True)


class Workers:
    """The processes of one side, each started by one of `commands`; killed after `limit_s`."""

    def __init__(
        self, commands: Sequence[Sequence[str]], limit_s: float, env: dict[str, str] | None = None
    ) -> None:
        self.name = " ".join(commands[0])
        self.processes = [
            subprocess.Popen(
                [sys.executable, *c], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
                env={**os.environ, **(env or {})},
            )
            for c in commands
        ]  # fmt: skip
        self.clock = threading.Timer(limit_s, self.kill)
        self.clock.start()
        self.about: dict[str, Any] = {}

    def __enter__(self) -> Workers:
        try:
            self.about = self._answers()[0]
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.clock.cancel()
        self.kill()

    def kill(self) -> None:
        for p in reversed(self.processes):  # the others may depend on the first
            p.kill()
            p.wait()

    def step(self, word: str = "") -> Taken:
        """Runs one step of all processes, with the input `word`: the time of the slowest, the mean
        of values, all processor time, all memory."""
        for p in self.processes:
            assert p.stdin is not None
            try:
                p.stdin.write(f"{word}\n")
                p.stdin.flush()
            except BrokenPipeError:
                self._ended()
        taken = [Taken(*answer) for answer in self._answers()]
        return Taken(
            max(t.wall_s for t in taken),
            statistics.mean(t.value for t in taken),
            sum(t.cpu_s for t in taken),
            sum(t.peak_mb for t in taken),
        )

    def _answers(self) -> list[Any]:
        lines = [p.stdout.readline() for p in self.processes if p.stdout is not None]
        if not all(lines):
            self._ended()
        return [json.loads(line) for line in lines]

    def _ended(self) -> None:
        sys.exit(f"{self.name}: ended, or was not done in time")
