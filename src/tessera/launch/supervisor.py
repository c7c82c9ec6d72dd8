"""Supervisor of a run's processes: passes on their output, and ends all when one fails."""

from __future__ import annotations

import os
import re
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import BinaryIO

from ..core.errors import BackendError
from ..runtime.processes.rendezvous import LOST
from .commands import Job
from .guard import SIGNALS, Guard, tied

GRACE_S = 300  # time for ranks to save and end after a signal to the launcher
OTHERS_S = 5.0  # time to end after another rank failed; saving is impossible without that rank
LOOK_S = 1.0  # between two checks for stopped processes
# Exit statuses of a rank that saved after a signal.
TOLD = tuple(128 + n for n in (signal.SIGTERM, signal.SIGUSR1))
LAST = 20  # lines of a failed rank that are shown again
_MOST = 1 << 16
# The engine prints this line to stdout for each group; mpirun and srun may put a tag before it.
_GLOO = re.compile(
    rb"(?:\[\d+,\d+\]<stdout>: ?|\d+: )?\[Gloo\] Rank \d+ is connected to \d+ peer ranks\. "
    rb"Expected number of connected peer ranks is : \d+\n"
)


@dataclass
class _Stream:
    """One output file of a process, read by lines."""

    name: str
    out: BinaryIO
    prefix: bytes
    last: deque[bytes]
    partial_line: bytes = b""

    def feed(self, data: bytes, end: bool = False) -> None:
        """Passes on whole lines; a progress bar's lines end in a carriage return. Lines of the
        engine go to stderr, as stdout is the program's."""
        data = self.partial_line + data
        if said := _GLOO.findall(data):
            data = _GLOO.sub(b"", data)
            sys.stderr.buffer.writelines(self.prefix + line for line in said)
            sys.stderr.buffer.flush()
        lines = data.splitlines(keepends=True)
        self.partial_line = b""
        if lines and not end and not lines[-1].endswith((b"\n", b"\r")) and len(lines[-1]) < _MOST:
            self.partial_line = lines.pop()
        for line in lines:
            if line.strip():
                self.last.append(line.rstrip())
            self.out.write(self.prefix + line)
        if lines:
            self.out.flush()


@dataclass
class _Process:
    job: Job
    popen: subprocess.Popen[bytes]
    last: deque[bytes] = field(default_factory=lambda: deque(maxlen=LAST))
    code: int | None = None


class Supervisor:
    """Runs `jobs` until all have ended. `run` returns the exit status of the whole."""

    def __init__(
        self,
        jobs: Sequence[Job],
        guard: Guard,
        prefix: bool,
        *,
        grace_s: float = GRACE_S,
        stopped_s: float | None = None,
        may_end: Callable[[], bool] = lambda: False,
    ) -> None:
        """`stopped_s`: a process that has been stopped (SIGSTOP) for so long is killed, and counts
        as failed. `may_end`: asked each second; when it returns True, all processes are ended
        without a failure. `grace_s`: time to end after a signal, or after a rank exited with the
        status of one (TOLD)."""
        self.guard, self.prefix, self.grace_s = guard, prefix, grace_s
        self.stopped_s, self.may_end, self.was_ended = stopped_s, may_end, False
        self._stopped: dict[int, float] = {}
        self.begin_s = time.monotonic()
        self.selector = selectors.DefaultSelector()
        self.signals: list[int] = []
        self.end_s: float | None = None
        self.tell_s = float("inf")  # time at which the wait for ranks is reported
        self.jobs = jobs
        self.processes: list[_Process] = []
        self.failed: list[_Process] = []
        self.alone = False  # the coordinator ended before the ranks

    def run(self) -> int:
        """Starts the jobs and waits for them. Returns 0, the status of the job that failed first,
        or 128 and the signal's number."""
        wake, woken = socket.socketpair()
        for s in (wake, woken):
            s.setblocking(False)
        self.selector.register(wake, selectors.EVENT_READ, None)
        # Ignored signals stay ignored: under nohup, or as a shell's background job.
        heard = [n for n in SIGNALS if signal.getsignal(n) is not signal.SIG_IGN]
        before = {n: signal.signal(n, self._signalled) for n in (*heard, signal.SIGCHLD)}
        old = signal.set_wakeup_fd(woken.fileno(), warn_on_full_buffer=False)
        try:
            for job in self.jobs:
                self._start(job)
            while any(p.code is None for p in self.processes):
                self._handle_events()
            self._drain()
        finally:
            self.guard.release()
            signal.set_wakeup_fd(old)
            for number, handler in before.items():
                signal.signal(number, handler)
            wake.close()
            woken.close()
        if self.alone:
            sys.stderr.write("tessera run: the coordinator ended, so all ranks were ended\n")
        elif self.failed:
            self._report()
        if self.signals:
            return 128 + self.signals[0]
        return _status(self.failed[0].code) if self.failed else int(self.alone)

    def _start(self, job: Job) -> None:
        if self.signals:
            return
        try:
            popen = subprocess.Popen(
                job.command,
                env=job.environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                process_group=self.guard.pid,
                preexec_fn=tied(job.orphaned),  # safe, as this process has one thread
            )
        except OSError as error:
            raise BackendError(
                f"{job.name}: {job.command[0]!r} cannot be started: {error.strerror}",
                fix="see that it is a program of this machine, and how many files and processes the"
                " user may have (ulimit -n, ulimit -u)",
                at="",
            ) from None
        process = _Process(job, popen)
        self.processes.append(process)
        label = f"[{job.name}] ".encode() if self.prefix else b""
        for file, out in ((popen.stdout, sys.stdout.buffer), (popen.stderr, sys.stderr.buffer)):
            assert file is not None
            os.set_blocking(file.fileno(), False)
            stream = _Stream(job.name, out, label, process.last)
            self.selector.register(file, selectors.EVENT_READ, stream)

    def _signalled(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGCHLD:
            return
        self.signals.append(number)
        if len(self.signals) == 1:
            self._end(number, self.grace_s)
        else:  # a second signal: the user does not want to wait
            self.guard.signal(signal.SIGKILL)

    def _end(self, number: int, grace_s: float) -> None:
        self.guard.signal(number)
        self.end_s = time.monotonic() + grace_s
        self.tell_s = self.end_s - grace_s + OTHERS_S

    def _handle_events(self) -> None:
        """Waits for output, ends of processes and signals, and handles them."""
        next_s = None if self.end_s is None else min(self.end_s, self.tell_s)
        left_s = None if next_s is None else max(next_s - time.monotonic(), 0.0)
        if self.stopped_s is not None and self.end_s is None:
            left_s = LOOK_S
        self._read(left_s)
        ended = []
        for p in self.processes:
            if p.code is None and (code := p.popen.poll()) is not None:
                p.code = code
                if code == 0 and p.job.rank is not None:
                    self.guard.has_ended(p.job.rank)
                ended.append(p)
        if self.end_s is None:
            self.alone = self.guard.ended()
            self.failed = sorted((p for p in ended if p.code), key=_blame)
            if self.failed or self.alone:
                told = not self.alone and self.failed[0].code in TOLD
                self._end(signal.SIGTERM, self.grace_s if told else OTHERS_S)
            elif self.stopped_s is not None:
                self._look(self.stopped_s)
        elif time.monotonic() >= self.end_s:
            self.guard.signal(signal.SIGKILL)
            self.end_s = self.tell_s = float("inf")
        elif time.monotonic() >= self.tell_s:
            self.tell_s = float("inf")
            running = [p.job.name for p in self.processes if p.code is None]
            sys.stderr.write(
                f"tessera run: waits for {', '.join(running)} to save and end, for "
                f"{self.grace_s:g} s"
                " at most (--grace); a signal, or Ctrl-C, once more ends them now\n"
            )
            sys.stderr.flush()

    def _look(self, stopped_s: float) -> None:
        """Kills processes that have been stopped for too long, and ends all of them once `may_end`
        says so."""
        now_s = time.monotonic()
        for p in self.processes:
            if p.code is None and _is_stopped(p.popen.pid):
                if now_s - self._stopped.setdefault(p.popen.pid, now_s) >= stopped_s:
                    p.popen.kill()
            else:
                self._stopped.pop(p.popen.pid, None)
        if not self._stopped and self.may_end():
            self.was_ended = True
            self._end(signal.SIGTERM, OTHERS_S)

    def _read(self, wait_s: float | None) -> bool:
        """Passes on the output that comes within `wait_s` seconds; returns whether there was
        any."""
        if wait_s == float("inf"):
            wait_s = None
        found = self.selector.select(wait_s)
        for key, _ in found:
            data = os.read(key.fd, _MOST) if key.data else key.fileobj.recv(_MOST)  # type: ignore[union-attr]
            if key.data:
                key.data.feed(data, end=not data)
                if not data:
                    self.selector.unregister(key.fileobj)
        return any(key.data for key, _ in found)

    def _drain(self) -> None:
        """Passes on the last output of the processes. It does not wait for the end of the files, as
        child processes may keep them open."""
        while self._read(0.1):
            pass
        for key in [*self.selector.get_map().values()]:
            if key.data:
                key.data.feed(b"", end=True)

    def _report(self) -> None:
        """Prints the rank that failed, the reason, and its last lines."""
        first = self.failed[0]
        took_s = time.monotonic() - self.begin_s
        others = "; the others were ended" if len(self.processes) > 1 else ""
        lines = [f"tessera run: {first.job.name} {ended(first.code)} after {took_s:.1f} s{others}"]
        if first.last:
            lines.append(f"  the last lines of {first.job.name}:")
            lines += [f"  | {line.decode(errors='replace')}" for line in first.last]
        sys.stdout.flush()
        sys.stderr.write("\n".join(lines) + "\n")
        sys.stderr.flush()


def _is_stopped(pid: int) -> bool:
    """Returns whether a process was stopped by a signal; False if the system does not tell (not
    Linux)."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return text.rpartition(")")[2].split()[0] == "T"


def _blame(p: _Process) -> tuple[int, str]:
    """Returns a sort key of processes that ended at the same time, the likely cause first: killed
    ones, then failed ones, then those whose engine or coordinator noticed the failure of another.
    """
    code = p.code or 0
    kind = 2 if code == -signal.SIGABRT else 3 if code == LOST else 0 if code < 0 else 1
    return kind, p.job.name


def ended(code: int | None) -> str:
    """Returns how a process ended, in words.

    >>> ended(3), ended(-9)
    ('exited with status 3', 'was killed by SIGKILL (by a user, or as memory ran out)')
    >>> ended(-11)
    'was killed by SIGSEGV'
    """
    if code is None or code >= 0:
        return f"exited with status {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    why = " (by a user, or as memory ran out)" if code == -signal.SIGKILL else ""
    return f"was killed by {name}{why}"


def _status(code: int | None) -> int:
    """Returns the shell's status: 128 and the number of the signal, if a signal ended the
    process."""
    return 0 if code is None else code if code >= 0 else 128 - code
