"""Signals that announce the end of a run: SIGTERM and SIGUSR1, as schedulers send them."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

from ..core.interrupts import Immediate

SAME_S = 1.0  # a signal that comes once more within it was sent to the launcher and to its ranks
SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


class Signals:
    """The signal that has arrived, as `heard`; 0 before. A second one ends the process at once."""

    def __init__(self, tell: Callable[[str], None]) -> None:
        self.heard = 0
        self._tell, self._heard_s = tell, 0.0
        self._before: dict[int, Any] = {}

    def open(self) -> None:
        """Installs the handlers, if called in the main thread."""
        # Python installs handlers in the main thread only.
        if threading.current_thread() is threading.main_thread():
            arrived = Immediate(self._arrived)
            self._before = {n: signal.signal(n, arrived) for n in SIGNALS}

    def close(self) -> None:
        """Restores the previous handlers."""
        for which, handler in self._before.items():
            signal.signal(which, handler)

    def _arrived(self, number: int, frame: FrameType | None) -> None:
        if self.heard and time.monotonic() - self._heard_s < SAME_S:
            return
        if self.heard:  # a second one does not wait
            raise SystemExit(128 + number)
        self.heard, self._heard_s = number, time.monotonic()
        name = signal.Signals(number).name
        self._tell(f"run: {name}: it saves after this step and ends; once more ends now")
