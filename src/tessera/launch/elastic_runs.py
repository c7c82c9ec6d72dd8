"""Elastic runs: when a process is lost, the run goes on with fewer, from the last safe point.

The processes of a generation keep safe points in a folder in the memory of this host, which
outlives them (elastic/snapshot.py). When one is lost, the others are ended, and a new generation
without it begins at the last safe point; after some time all processes run again.
"""

from __future__ import annotations

import re
import shutil
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..checkpoint.listing import manifests
from ..checkpoint.storage import Storage
from ..core.environment import ELASTIC
from ..core.environment import text as text_of
from ..core.errors import UsageError
from ..elastic.snapshot import memory_folder
from .commands import Run
from .supervisor import Supervisor

REJOIN_AFTER_S = 60
STOPPED_S = 10.0  # a process that is stopped (SIGSTOP) for longer counts as lost
TRIES = 3  # generations in a row without a safe point after which the run ends


def elastic_sizes(
    text: str | None,
    backend: str,
    nproc: int | None,
    rank_binding: Path | None,
    rejoin_after: int | None,
) -> tuple[int, int] | None:
    """Returns (MIN, MAX) of `--elastic MIN:MAX`; None without it. Raises UsageError for wrong or
    conflicting options."""
    if text is None:
        if rejoin_after is not None:
            raise UsageError(
                "--rejoin-after has no effect without --elastic",
                fix="say how many processes there may be: --elastic 2:8",
                at="",
            )
        return None
    match = re.fullmatch(r"(\d+):(\d+)", text)
    low, high = (int(match[1]), int(match[2])) if match else (0, 0)
    if not 1 <= low <= high:
        raise UsageError(
            f"--elastic: {text!r} is not MIN:MAX",
            fix="give the fewest and the most processes: --elastic 2:8",
            at="",
        )
    other = "-n" if nproc is not None else "--rank-binding" if rank_binding is not None else ""
    if other or backend != "local":
        raise UsageError(
            f"--elastic does not go with {other or f'--backend {backend}'}",
            fix="it says itself how many processes of this machine there are; over several machines"
            " set TESSERA_ELASTIC=/dev/shm/NAME, and let the scheduler start the run again",
            at="",
        )
    if text_of(ELASTIC):
        raise UsageError(
            f"--elastic: {ELASTIC}={text_of(ELASTIC)} is set, and it has a folder of its own",
            fix="leave one of both out: --elastic starts lost processes of this machine anew, the"
            " variable names the safe points where a scheduler does",
            at="",
        )
    return low, high


class Generations:
    """Runs `run` with all its processes, and with fewer (at least `low`) after losses. `run()`
    returns the exit status of the whole."""

    def __init__(
        self, run: Run, low: int, rejoin_after_s: float, supervised: Callable[..., Supervisor]
    ) -> None:
        self.whole, self.low, self.rejoin_after_s = run, low, rejoin_after_s
        self.supervised = supervised
        self.folder = ""  # of the safe points, during `run`

    def run(self) -> int:
        self.folder = memory_folder()
        try:
            return self._run()
        finally:
            shutil.rmtree(self.folder, ignore_errors=True)

    def _run(self) -> int:
        most = n = self.whole.size
        tries = 0
        while True:
            before = self._last()
            environments = tuple({**e, ELASTIC: self.folder} for e in self.whole.environments[:n])
            now = self.supervised(
                replace(self.whole, environments=environments), stopped_s=STOPPED_S,
                may_end=self._grows(before) if n < most else lambda: False,
            )  # fmt: skip
            status = now.run()
            last = self._last()
            if now.signals and last is not None:
                _say(
                    f"its safe points end with it{_from(last)}; the same command goes on from the"
                    " program's newest checkpoint, and where it saves none it begins anew"
                )
            if now.signals or not (status or now.was_ended):
                return status
            if now.was_ended:
                n = most
                _say(f"goes on with all {most} processes{_from(last)}")
                continue
            tries = tries + 1 if _name(last) == _name(before) else 0
            # If the coordinator ended (`alone`), all processes can start again. Otherwise at least
            # one is lost: a rank that failed by itself was not killed.
            lost = 0 if now.alone else max(1, sum(_was_killed(p.code) for p in now.failed))
            if tries >= TRIES:
                _say(f"{TRIES} times in a row no safe point was kept, so the run ends")
                return status
            if n - lost < self.low:
                _say(f"{n - lost} processes are left, and --elastic asks for {self.low} at least")
                return status
            n -= lost
            _say(f"goes on with {n} of {most} processes{_from(last)}")

    def _grows(self, before: Any) -> Callable[[], bool]:
        """Returns a function that tells when to start a generation of all processes:
        `rejoin_after_s` after the first safe point of the generation that began at `before`. So the
        time to start and compile is not counted."""
        first_s: float | None = None

        def grows() -> bool:
            nonlocal first_s
            last = self._last()
            if last is None or last.id == _name(before):
                return False
            now_s = time.monotonic()
            first_s = now_s if first_s is None else first_s
            return bool(now_s - first_s >= self.rejoin_after_s and last.state["rejoin"])

        return grows

    def _last(self) -> Any:
        """Returns the manifest of the last safe point; None before the first."""
        found, _ = manifests(Storage(self.folder))
        return found[-1] if found else None


def _was_killed(code: int | None) -> bool:
    # The engine aborts its own process (SIGABRT) when another one is lost.
    return code is not None and code < 0 and code != -signal.SIGABRT


def _name(manifest: Any) -> str:
    return "" if manifest is None else manifest.id


def _from(manifest: Any) -> str:
    if manifest is None:
        return "; they begin anew: no safe point was kept"
    step = manifest.step
    return f"; the last safe point is after {step} step{'s' * (step != 1)}"


def _say(text: str) -> None:
    print(f"tessera run: {text}", file=sys.stderr, flush=True)
