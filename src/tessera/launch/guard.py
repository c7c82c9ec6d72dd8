"""Who stays when the launcher is killed? A child of it, the guard, which leads the process group of
the ranks: when the pipe from the launcher ends, the guard ends the group. It also hosts the run's
coordinator, so that any rank may die, rank 0 as well.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import time
from typing import NoReturn

from ..core.ranks import split_address
from ..runtime.rendezvous import Rendezvous
from .commands import Run

END_S = 3.0  # between asking the group to end and ending it
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Guard:
    """The launcher's handle: the group `pid`, which ends with `release` or with this process."""

    def __init__(self, run: Run, sock: socket.socket, limit_s: float) -> None:
        self.gone = False
        here, self.pipe = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            os.close(self.pipe)
            _guard(run, sock, limit_s, here)
        os.close(here)
        sock.close()
        with_group(self.pid)

    def signal(self, number: int) -> None:
        """Sends it to all ranks and what they started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, number)

    def ended(self) -> bool:
        """Whether the guard itself has ended, which it should not."""
        if not self.gone:
            self.gone = os.waitpid(self.pid, os.WNOHANG)[0] == self.pid
        return self.gone

    def release(self) -> None:
        """Ends whatever is left of the group, and the guard."""
        self.signal(signal.SIGKILL)
        os.close(self.pipe)
        if not self.ended():
            os.waitpid(self.pid, 0)


def with_group(pid: int) -> None:
    """Makes `pid` the leader of a group. Parent and child both do it: who comes first."""
    with contextlib.suppress(PermissionError, ProcessLookupError):
        os.setpgid(pid, pid)


def _guard(run: Run, sock: socket.socket, limit_s: float, pipe: int) -> NoReturn:
    """What the child does; it never returns."""
    try:
        with_group(os.getpid())
        for number in SIGNALS:
            signal.signal(number, signal.SIG_IGN)
        signal.set_wakeup_fd(-1)
        host = split_address(run.coordinator)[0]

        def service() -> str:
            from ..runtime.coordinator import service_near

            return service_near(sock, host, run.size)

        Rendezvous(run.size, run.token, limit_s, service).start(sock)
        while os.read(pipe, 1):
            pass
        os.killpg(0, signal.SIGTERM)
        time.sleep(END_S)
        os.killpg(0, signal.SIGKILL)
    except BaseException as error:
        sys.stderr.write(f"tessera run: the coordinator ended: {error!r}\n")
    finally:
        os._exit(1)
