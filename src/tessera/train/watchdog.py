"""Watchdog: after a time limit the process reports its state and ends.

A Python thread writes the report. If it cannot run, because the engine holds the interpreter lock,
`faulthandler` writes the stacks a little later and ends the process.
"""

from __future__ import annotations

import faulthandler
import os
import threading
import time

from ..lang.value.engine import engine

HUNG = 124
"""The exit status of a process that the watchdog ended, as in the shell's `timeout`."""
_SPARE_S = 10.0
_LAST = 5  # collectives in the report


class Watchdog:
    """Ends the process if the last stage that was announced takes longer than `limit_s` seconds."""

    def __init__(self, limit_s: float) -> None:
        self.limit_s = limit_s
        self._stage, self._since_s = "", time.monotonic()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._look, name="tessera-watchdog", daemon=True)
        self._thread.start()

    def at(self, stage: str) -> None:
        """Announces the stage `stage`, and restarts the clock."""
        self._stage, self._since_s = stage, time.monotonic()
        faulthandler.dump_traceback_later(self.limit_s + _SPARE_S, exit=True, file=2)

    def close(self) -> None:
        self._closed.set()
        faulthandler.cancel_dump_traceback_later()
        self._thread.join()

    def _look(self) -> None:
        while not self._closed.wait(min(1.0, self.limit_s / 8)):
            if time.monotonic() - self._since_s > self.limit_s:
                self._end()

    def _end(self) -> None:
        lines = [
            f"run: {self._stage} has not ended within {self.limit_s:g} s, so this process ends:"
            " hang_s= is that limit"
        ]
        last = engine().last_collectives(_LAST)
        lines += ["the last collectives:", *(f"  {line}" for line in last)] if last else []
        # Not `print`: a thread that hangs may hold the lock of stderr.
        os.write(2, ("\n".join([*lines, "the stacks of all threads:"]) + "\n").encode())
        faulthandler.dump_traceback(file=2, all_threads=True)
        # SystemExit here would end this thread only.
        os._exit(HUNG)


__all__ = ["HUNG", "Watchdog"]
