"""Flight recorder: a ring of each rank's last programs and steps, and a watch that ends hangs.

With several processes a rank is a process: each publishes its progress through the coordination
service, so a process that waits too long can name the missing ranks. In one process, run step by
step, a rank is a device: before a collective runs, its operand must be ready on every device.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import re
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax

from ...core import environment
from ...core.errors import BackendError, TesseraError, caller
from ...core.files import write_whole
from ...core.limits import limits
from ...core.wording import DUMP_VERSION, ranks_text, record_text
from ..jax_private import service
from .store import ended

Array = Any
_LIBRARY = re.compile(rf"site-packages|^<frozen|^{re.escape(os.path.dirname(os.__file__))}")
TOLD = 32  # records that the others can see
_SLOWEST_S, _FASTEST_S = 1.0, 0.02  # between two checks
_LAST_S = 5.0  # time limit of the last check
# by then a wait in the processes' store would itself have found ended processes
_ENDED_AFTER_S = 5.0


@dataclass(slots=True)
class Record:
    """One program or step of a rank. Times are of `time.time`, in seconds."""

    number: int
    program: str
    step: str  # "" for a whole program
    what: str
    at: str
    group: tuple[int, ...]
    place: int  # number of this record within the group, from 1
    bytes: int
    limit_s: float
    start_s: float
    end_s: float | None = None
    error: str = ""
    since_s: float | None = None  # start of the wait; None while it is compiled
    results: list[weakref.ref[Array]] | None = field(default=None, repr=False)

    def told(self) -> dict[str, Any]:
        """Returns the record in the form of the dump."""
        names = ("number", "program", "step", "what", "at", "place", "bytes", "start_s", "end_s")
        return {k: getattr(self, k) for k in (*names, "error")} | {"group": list(self.group)}

    def text(self) -> str:
        return record_text(self.program, self.step, self.what, self.at)


class Flight:
    """The recorder of this process."""

    def __init__(self) -> None:
        self.ring: deque[Record] = deque(maxlen=limits().flight_records)
        self.open: list[Record] = []
        self.group_counts: dict[tuple[int, ...], int] = {}
        self.count = 0
        self.ended = ""
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._told: object = None
        self._thread: threading.Thread | None = None

    # -- records ----------------------------------------------------------------------------------
    def begin(
        self,
        program: str,
        step: str,
        operation: str,
        at: str,
        group: tuple[int, ...],
        size: int,
        compiles: bool = False,
    ) -> Record:
        """Records that a rank of `group` came to a program or step. If the program `compiles`
        first, its waiting time counts from its dispatch."""
        now = limits()
        if self.ring.maxlen != now.flight_records:
            self.ring = deque(self.ring, maxlen=now.flight_records)
        place = self.group_counts[group] = self.group_counts.get(group, 0) + 1
        self.count += 1
        record = Record(
            self.count, program, step, operation, at, group, place, size, now.collective_s,
            time.time(),
        )  # fmt: skip
        record.since_s = None if compiles else record.start_s
        self.ring.append(record)
        if len(group) > 1 and jax.process_count() > 1:
            with self._lock:
                self.open.append(record)
            self._watch()
        return record

    def dispatched(self, record: Record, outs: Sequence[Array]) -> None:
        """Records that the program was dispatched; it is done when its results are ready."""
        record.since_s = record.since_s or time.time()
        record.results = [weakref.ref(x) for x in outs[:1]]

    def failed(self, record: Record, error: BaseException) -> None:
        record.error = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        record.end_s = time.time()
        with self._lock:
            self.open = [r for r in self.open if r is not record]
        self._tell()

    def finish(self, record: Record) -> None:
        """Records that the program or step is done."""
        record.end_s = time.time()
        with self._lock:
            self.open = [r for r in self.open if r is not record]

    def lines(self, count: int) -> list[str]:
        """Returns the last records, a line each."""
        return [
            f"{r.text()}: "
            + (f"raised {r.error}" if r.error else "done" if r.end_s else "not done")
            for r in list(self.ring)[-count:]
        ]

    # -- the watch --------------------------------------------------------------------------------
    def _watch(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._look, name="tessera-flight", daemon=True)
            self._thread.start()
            atexit.register(self._end)

    def _end(self) -> None:
        """Stops the watch before the interpreter ends: a thread that is then inside the engine
        would crash the process."""
        self.ended = "its program has ended"
        self._wake.set()
        if self._thread is not None:
            self._thread.join(_LAST_S)
        self._tell()

    def _look(self) -> None:
        """The loop of the watching thread: marks finished collectives, and ends the process if the
        oldest unfinished one waits longer than its limit."""
        limit_s = _SLOWEST_S * 4
        while not self.ended:
            if self._wake.wait(min(max(limit_s / 8, _FASTEST_S), _SLOWEST_S)):
                return
            with self._lock:
                held = list(self.open)
            for r in held:
                if r.results is not None and all(map(_is_done, r.results)):
                    r.end_s = time.time()
            with self._lock:
                self.open = [r for r in self.open if r.end_s is None]
                held = list(self.open)
            if held:
                limit_s = held[0].limit_s
            self._tell()
            waits_s = self.waits_s()
            if waits_s > limit_s or (waits_s > _ENDED_AFTER_S and self.ended_ranks(held[0])):
                self.end(self.late(held[0], limit_s))

    def waits_s(self) -> float:
        """Returns how long the first unfinished program or step has waited for the others, in
        seconds; 0 if none waits."""
        with self._lock:
            first = self.open[0] if self.open else None
        if first is None or first.since_s is None or first.end_s is not None:
            return 0.0
        # A program queued behind another does not wait for other ranks yet.
        ends_s = [r.end_s for r in list(self.ring) if r.end_s is not None]
        return time.time() - max([first.since_s, *ends_s])

    def _tell(self) -> None:
        client = service()
        if client is None:
            return
        told = self._state(list(self.ring)[-TOLD:])
        text = json.dumps(told)
        if text == self._told:
            return
        self._told = text
        # The service has ended: no other process reads this.
        with contextlib.suppress(RuntimeError):
            client.key_value_set(f"tessera/flight/{jax.process_index()}", text, True)

    def _state(self, records: Sequence[Record]) -> dict[str, Any]:
        """Returns the published state of this rank: its progress in each group, its records, and
        the current line."""
        line = "" if self.ended else _main_line()
        return {
            "ended": self.ended,
            "doing": f"now at {line}" if line else "",
            "seen": {_key(g): k for g, k in self.group_counts.items()},
            "records": [r.told() for r in records],
        }

    # -- the end ----------------------------------------------------------------------------------
    def others(self, group: Sequence[int]) -> dict[int, dict[str, Any]]:
        """Returns the published state of each rank of `group`."""
        found: dict[int, dict[str, Any]] = {}
        with contextlib.suppress(RuntimeError):
            for key, text in service().key_value_dir_get("tessera/flight/"):
                found[int(key.rpartition("/")[2])] = json.loads(text)
        found[jax.process_index()] = self._state(list(self.ring))
        return {r: found.get(r, {}) for r in group}

    def ended_ranks(self, record: Record) -> list[int]:
        """Returns the ranks whose programs have ended without `record`."""
        gone = ended(record.group)
        return _missing(self.others(gone), record) if gone else []

    def late(self, record: Record, waited_s: float, fix: str = "") -> BackendError:
        """Returns the error that names the ranks missing at `record`; writes the dump. Its advice
        begins with `fix`."""
        ranks = self.others(record.group)
        missing = _missing(ranks, record)
        path = write_dump(ranks, record.told(), missing, waited_s)
        rows = [(f"rank {r}", _last(ranks[r])) for r in missing]
        here = [r for r in ranks if r not in missing]
        rows += [(ranks_text(here), f"at {record.text()}")] if here else []
        ranks_missing = ranks_text(missing)
        message = f"took longer than {waited_s:g} s: "
        message += f"{ranks_missing} did not arrive" if missing else "all ranks arrived"
        if missing and ended(missing) == missing:
            message = f"cannot take place: {ranks_missing} ended without it"
        return BackendError(
            f"{record.program}: a collective {message}",
            rows=[*rows, ("dump", path)],
            fix=f"{fix}see what they did last: tessera flight {path}",
            at="",
        )

    def latest(self, group: tuple[int, ...]) -> Record:
        """Returns the last record of that group."""
        return next((r for r in reversed(self.ring) if r.group == group), self.ring[-1])

    def end(self, error: TesseraError) -> None:
        """Ends the process from the watch's thread, as the main thread is inside the engine."""
        sys.stdout.flush()
        print(f"{type(error).__module__}.{type(error).__name__}: {error}", file=sys.stderr)
        sys.stderr.flush()
        if jax.process_index() == 0:
            time.sleep(
                min(2.0, limits().collective_s)
            )  # the other processes read the missing ranks from this process's service
        os._exit(1)


def _main_line() -> str:
    """Returns the user's line that the main thread is at; frames of libraries are skipped."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None and _LIBRARY.search(frame.f_code.co_filename):
        frame = frame.f_back
    return caller(frame) if frame is not None else ""


def _missing(ranks: dict[int, dict[str, Any]], record: Record) -> list[int]:
    """Returns the ranks that have not come to `record`, by their published states. A rank that ran
    another program in its place is missing, too."""
    key, mine = _key(record.group), record.told()

    def came(told: dict[str, Any]) -> bool:
        if told.get("seen", {}).get(key, 0) < record.place:
            return False
        there = (r for r in told["records"] if all(r[k] == mine[k] for k in ("group", "place")))
        return all(r[k] == mine[k] for r in there for k in ("program", "step", "what"))

    return [r for r, told in ranks.items() if not came(told)]


def _key(group: Sequence[int]) -> str:
    return ",".join(map(str, group))


def _is_done(ref: weakref.ref[Array]) -> bool:
    x = ref()
    if x is None:
        return True
    try:
        return bool(x.is_deleted() or x.is_ready())
    except RuntimeError:  # deleted between the two calls
        return True


def _last(told: dict[str, Any]) -> str:
    """Returns the text of a rank's last action."""
    if not told:
        return "has told nothing yet"
    state = told["ended"] or told["doing"]
    records = told["records"]
    if not records:
        return state or "came to no collective yet"
    r = records[-1]
    how = f"raised {r['error']}" if r["error"] else "did last" if r["end_s"] else "is in"
    said = record_text(r["program"], r["step"], r["what"], r["at"])
    return f"{how} {said}" + (f"; {state}" if state else "")


def write_dump(
    ranks: dict[int, dict[str, Any]], stuck: dict[str, Any], missing: list[int], limit_s: float
) -> str:
    """Writes the published states of all ranks as JSON. Returns the file's path."""
    folder = Path(environment.folder(environment.FLIGHT_DIR))
    path = folder / f"tessera-flight-{jax.process_index()}-{os.getpid()}.json"
    content = {
        "version": DUMP_VERSION,
        "written_s": time.time(),
        "rank": jax.process_index(),
        "limit_s": limit_s,
        "stuck": stuck,
        "missing": missing,
        "ranks": {str(r): told for r, told in ranks.items()},
    }
    try:
        write_whole(path, json.dumps(content, indent=1).encode())
    except OSError as error:
        return f"none ({error.strerror})"
    return str(path)


_flights: list[Flight] = []


def flight() -> Flight:
    """Returns the recorder of this process."""
    if not _flights:
        _flights.append(Flight())
    return _flights[0]


# -- devices of one process -----------------------------------------------------------------------
def arrive(record: Record, steps: Sequence[str], args: Sequence[Array]) -> None:
    """Returns when `args` are ready on all devices of this process. `steps` has the step that made
    each argument.

    Raises BackendError and writes a dump if a device's program raised, or if an argument is not
    ready in time: the engine would wait for it inside the collective, and then end the process.
    """
    if not all(x.is_ready() for x in args):
        _wait(record, steps, args)
    try:
        jax.block_until_ready(args)
    except RuntimeError as error:
        raise _raised(record, steps, args, error) from None


def _wait(record: Record, steps: Sequence[str], args: Sequence[Array]) -> None:
    start_s, pause_s = time.monotonic(), 1e-5
    while not all(x.is_ready() for x in args):
        if time.monotonic() - start_s > record.limit_s:
            late: dict[int, str] = {}
            for x, step in zip(args, steps, strict=True):
                for s in x.addressable_shards:
                    if not s.data.is_ready():
                        late.setdefault(s.device.id, f"is in {step}")
            what = f"a collective took longer than {record.limit_s:g} s: "
            raise _ended(record, args, late, what + f"{ranks_text(sorted(late))} did not arrive")
        time.sleep(pause_s)
        pause_s = min(pause_s * 2, 1e-3)


def _raised(
    record: Record, steps: Sequence[str], args: Sequence[Array], error: BaseException
) -> BackendError:
    bad: dict[int, str] = {}
    for x, step in zip(args, steps, strict=True):
        for s in x.addressable_shards:
            try:
                s.data.block_until_ready()
            except RuntimeError as own:
                bad.setdefault(s.device.id, f"raised in {step}: {_first(own)}")
    return _ended(record, args, bad, f"{ranks_text(sorted(bad))} raised before a collective")


def _first(error: BaseException) -> str:
    """Returns the line of the engine's report with the Python exception."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    said = [line for line in lines if line.split(":")[0].endswith(("Error", "Exception"))]
    return (said or lines or [type(error).__name__])[-1 if said else 0]


def _ended(record: Record, args: Sequence[Array], bad: dict[int, str], reason: str) -> BackendError:
    """Returns the error of one process whose devices `bad` did not come to `record`."""
    me = flight()
    devices = sorted({s.device.id for x in args for s in x.addressable_shards})
    before = [r.told() for r in me.ring if r is not record]
    ranks: dict[int, dict[str, Any]] = {
        d: {
            "ended": "",
            "doing": bad.get(d, ""),
            "seen": {},
            "records": before + ([] if d in bad else [record.told()]),
        }
        for d in devices
    }
    path = write_dump(ranks, record.told(), sorted(bad), record.limit_s)
    good_devices = [d for d in devices if d not in bad]
    rows = [(f"rank {d}", text) for d, text in sorted(bad.items())]
    rows += [(ranks_text(good_devices), f"at {record.text()}")] if good_devices else []
    return BackendError(
        f"{record.program}: {reason}",
        rows=[*rows, ("dump", path)],
        fix=f"see what they did last: tessera flight {path}",
        at=caller(),
    )
