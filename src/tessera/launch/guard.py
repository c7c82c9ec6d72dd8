"""Guard: a child process that ends the ranks of a run if the launcher is killed.

It leads the process group of the ranks; when the pipe from the launcher closes, the guard ends the
group. It also hosts the run's coordinator, so that any rank may die, rank 0 as well. On Linux the
kernel ends the ranks of a killed launcher, also if the guard is killed with it.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from typing import NoReturn

from ..core.ranks import split_address
from ..runtime.processes.rendezvous import Rendezvous
from .commands import Run

TIES = sys.platform == "linux"  # the kernel can end the ranks of a killed launcher
_SET_PDEATHSIG = 1  # of prctl(2)
END_S = 3.0  # between SIGTERM and SIGKILL to the group
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Guard:
    """The launcher's handle of the process group `pid`, which ends with `release` or with this
    process. With `asks`, the guard sends the group SIGTERM before SIGKILL; without it the kernel
    has sent a signal already (`tied`), and mpirun abandons its ranks at a second one."""

    def __init__(self, run: Run, sock: socket.socket, limit_s: float, asks: bool) -> None:
        self.gone = False
        here, self.pipe = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            os.close(self.pipe)
            _guard(run, sock, limit_s, asks, here)
        os.close(here)
        sock.close()
        with_group(self.pid)

    def has_ended(self, rank: int) -> None:
        """Tells the coordinator that this rank's program has ended."""
        with contextlib.suppress(OSError):
            os.write(self.pipe, f"{rank}\n".encode())

    def signal(self, number: int) -> None:
        """Sends a signal to all ranks and their child processes."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, number)

    def ended(self) -> bool:
        """Returns whether the guard itself has ended, which is an error."""
        if not self.gone:
            self.gone = os.waitpid(self.pid, os.WNOHANG)[0] == self.pid
        return self.gone

    def release(self) -> None:
        """Ends the remaining processes of the group, and the guard."""
        self.signal(signal.SIGKILL)
        os.close(self.pipe)
        if not self.ended():
            os.waitpid(self.pid, 0)


def with_group(pid: int) -> None:
    """Makes `pid` the leader of a group. Parent and child both call it, as either may be first."""
    with contextlib.suppress(PermissionError, ProcessLookupError):
        os.setpgid(pid, pid)


def tied(number: signal.Signals) -> Callable[[], None] | None:
    """Returns a function for a child to call before `exec`, so that it gets the signal `number`
    when this process ends; None if the system has no such feature."""
    if not TIES:
        return None
    prctl, parent = ctypes.CDLL(None, use_errno=True).prctl, os.getpid()

    def tie() -> None:
        prctl(_SET_PDEATHSIG, int(number))
        if os.getppid() != parent:  # the parent ended before the call of prctl
            os._exit(1)

    return tie


def _guard(run: Run, sock: socket.socket, limit_s: float, asks: bool, pipe: int) -> NoReturn:
    """The child's main function; it never returns."""
    try:
        with_group(os.getpid())
        for number in SIGNALS:
            signal.signal(number, signal.SIG_IGN)
        signal.set_wakeup_fd(-1)
        host = split_address(run.coordinator)[0]

        def service() -> str:
            from ..runtime.processes.coordinator import service_near

            return service_near(sock, host, run.size)

        meeting = Rendezvous(run.size, run.token, limit_s, service, own_process=True)
        meeting.start(sock)
        with os.fdopen(pipe) as ended:
            for rank in ended:
                meeting.has_ended(int(rank))
        if asks:
            os.killpg(0, signal.SIGTERM)
        time.sleep(END_S)
        os.killpg(0, signal.SIGKILL)
    except BaseException as error:
        sys.stderr.write(f"tessera run: the coordinator ended: {error!r}\n")
    finally:
        os._exit(1)
