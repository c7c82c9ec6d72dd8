"""Tuning of a compiled function at a call: it is recorded for each candidate, timed with the
arguments of the call, and the fastest recording stays.

The results of timed runs are dropped, so the call that tunes changes state once, like any other.
Donated arguments are copied for each run. `TESSERA_TUNE` decides for a whole process: "off" (no
choice is searched or read), "read" (recorded choices are used for all functions), "search" (all
functions are tuned), "freeze" (a function that asks to be tuned and has no recorded choice is an
error). Unset, only functions that ask are tuned.
"""

from __future__ import annotations

import itertools
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

from ...autotune import records as store
from ...autotune.choices import Candidate, applied, is_set, kind_of, singles, words
from ...autotune.predict import predict, why_not
from ...autotune.search import gain, search, summary
from ...core import environment
from ...core.context import replaced, settings
from ...core.contexts import within
from ...core.declared import Scale
from ...core.devices import process_index
from ...core.errors import EngineWarning, TesseraError, UsageError, lines_up, warn_no_effect
from ...core.limits import limits
from ...ir.schedule.schedule import Schedule
from ...ops.redistribute import all_gather, all_reduce, reduce_scatter
from ..math import random
from ..value.engine import engine
from .cache_entry import Entry
from .segments import Run, source_of

LIMIT_S = 60.0  # of the search for one program
SHORT_S = 5e-3  # steps shorter than this are timed several at a time
MODES = ("", "off", "read", "search", "freeze")
SHOWN = 6  # types of arguments in a record
_numbers = itertools.count(1)


class Tuned(Protocol):
    """A compiled function, as the tuner needs it."""

    name: str

    def show(self, entry: Entry, line: str) -> None: ...


@within("ts.tune", "write with ts.tune(limit_s=60):")
def tune(limit_s: Scale = LIMIT_S) -> AbstractContextManager[Any]:
    """A context in which each compiled function is tuned at its next call.

    The search for one program takes at most `limit_s` seconds, and the time of the compilation that
    is under way then. Choices are recorded, and read by later processes. Raises
    UsageError if `limit_s` is not above 0.

    >>> with tune(limit_s=30):
    ...     pass
    """
    return replaced(tune_limit_s=limit_s)


def mode() -> str:
    """Returns the value of `TESSERA_TUNE`. Raises UsageError if it is unknown."""
    word = environment.text(environment.TUNE).lower()
    if word not in MODES:
        fix = "set it to off, read, search or freeze"
        raise UsageError(f"{environment.TUNE}: {word!r} is no mode", fix=fix)
    return word


def asks(fn: Tuned) -> bool:
    """Returns whether `fn` is tuned by the settings in force or its own options."""
    now = settings()
    return now.tune_limit_s is not None or bool(now.program.schedule.tune) or mode() == "search"


def best(fn: Tuned, entry: Entry, call: Callable[[], Entry], leaves: Any) -> Entry | None:
    """Returns the entry for the best choices of `entry`'s program: recorded, or found now. None if
    none are asked for. `call` records the call with these leaves again."""
    word, wanted = mode(), asks(fn)
    if word == "off" or not (wanted or word in ("read", "freeze")):
        return None
    tuner = Tuner(fn, entry, call, leaves)
    if why := tuner.why_not():
        if wanted:
            warn_no_effect(
                f"tune: {fn.name}",
                why,
                means="candidates of the open choices are timed at the first call",
                fix="leave it out",
            )
        return entry
    state = random.state()
    try:
        found = tuner.recorded()
        if found is None and wanted and word not in ("read", "freeze"):
            found = tuner.search()
    finally:
        random.set_state(state)  # timed runs draw numbers
    if found is None and wanted and word == "freeze":
        raise UsageError(
            f"tune: no choice is recorded for {fn.name}, and {environment.TUNE}=freeze",
            program=tuner.id,
            fix=f"tune it before: {environment.TUNE}=search, or `tessera tune SCRIPT`",
        )
    return found or entry


class Tuner:
    """The search for one entry of the compiled function `fn`."""

    def __init__(
        self, fn: Tuned, entry: Entry, call: Callable[[], Entry], leaves: Sequence[Any]
    ) -> None:
        self.fn, self.entry, self._call, self._leaves = fn, entry, call, leaves
        self._entries: dict[str, Entry] = {"{}": entry}
        self.program = entry.root.program()
        self.schedule: Schedule = self.program.schedule
        self._options = self.schedule.options.schedule
        self._fast = self.schedule.options.determinism == "fast"
        mesh = self.schedule.mesh
        self._processes = engine().processes(mesh) if mesh is not None else (0,)
        self._number = next(_numbers) if len(self._processes) > 1 else 0
        self._messages = itertools.count(1)

    def why_not(self) -> str:
        """Returns why the function is not tuned; "" if it is."""
        count = self.schedule.options.processes
        return "" if len(self._processes) == count else "only some processes run it"

    # -- records ----------------------------------------------------------------------------------
    @cached_property
    def key(self) -> dict[str, Any]:
        """The facts that the best choices depend on."""
        types = self.program.wants
        more = f" and {len(types) - SHOWN} more" if len(types) > SHOWN else ""
        layouts = [str(t).partition("[")[2] for t in types[:SHOWN]]
        return {
            **engine().machine(self.schedule.mesh),
            "dtype": ",".join(sorted({t.dtype.name for t in types})),
            "shape": " ".join("x".join(map(str, t.shape)) or "scalar" for t in types[:SHOWN])
            + more,
            "layout": " ".join(f"[{text}" for text in layouts) + more,
            "program": self.schedule.hash,
        }

    @property
    def id(self) -> str:
        return store.id_of(self.key)

    @cached_property
    def _records(self) -> store.Records | None:
        place = folder()
        return None if place is None else store.records_in(place)

    def _add(self, **row: Any) -> None:
        if self._records is None or process_index():  # the first process records
            return
        try:
            self._records.add(self.id, **row)
        except OSError as error:
            self._records = None
            text = f"tune: choices are not recorded: {error}"
            warnings.warn(text, EngineWarning, stacklevel=lines_up())

    def recorded(self) -> Entry | None:
        """Returns the entry for the recorded choices; None without a record that fits."""
        row = None if self._records is None else self._records.choice(self.id)
        row = self._agreed(row)[0]  # the first process decides for all
        if row is None or not all(self._may(name) for name in row["chosen"]):
            return None
        entry = self._entry(row["chosen"])
        if isinstance(entry, str):
            return None
        entry.timings = () if self._records is None else self._records.timings(self.id)
        self.fn.show(entry, summary(row["chosen"], row["gain"], row["timed"]))
        return entry

    # -- candidates -------------------------------------------------------------------------------
    def _may(self, name: str) -> bool:
        """Returns whether the choice `name` is open at this level of determinism."""
        fast = self._fast or kind_of(name) == "speed"
        return fast and not is_set(self._options, name)

    def _candidates(self) -> list[Candidate]:
        values: dict[str, Sequence[Any]] = {
            **engine().open_choices(self.schedule),
            **_schedule_choices(self.schedule),
        }
        values.update(self.entry.open_choices)
        return singles(values, self._may)

    def _entry(self, choices: Candidate) -> Entry | str:
        """Returns the entry for `choices`, or why there is none."""
        name = repr(dict(choices))
        if name not in self._entries:
            under = applied(settings().program.schedule, choices)
            try:
                with warnings.catch_warnings(), replaced(schedule=replace(under, tune=None)):
                    warnings.simplefilter("ignore")
                    self._entries[name] = self._call()
            except TesseraError as error:
                return str(error).splitlines()[0]
        return self._entries[name]

    # -- timing -----------------------------------------------------------------------------------
    def search(self) -> Entry:
        """Times the candidates, records the choice and returns its entry."""
        limit_s = settings().tune_limit_s or environment.number(
            environment.TUNE_LIMIT, int(LIMIT_S)
        )
        end_s = time.monotonic() + limit_s

        def remaining() -> float:
            return float(self._agreed((end_s - time.monotonic()) / limit_s)[0])

        self._add(key=self.key)
        candidates = self._pruned(self._candidates())
        with _progress(self.fn.name, not process_index()) as advance:
            timings = search(
                candidates,
                lambda choices: self._sample(choices, advance),
                remaining,
                self._temporary_bytes,
            )
        if timings[0].error:  # the call itself will raise it
            return self.entry
        chosen = next(t for t in timings if t.chosen)
        timed = sum(not t.error for t in timings)
        times = round(gain(timings), 4)
        self._add(chosen=dict(chosen.choices), gain=times, timed=timed)
        entry = self._entry(chosen.choices)
        assert isinstance(entry, Entry)
        entry.timings = tuple(timings)
        self.fn.show(entry, summary(chosen.choices, times, timed))
        return entry

    def _pruned(self, candidates: Sequence[Candidate]) -> list[Candidate]:
        """Returns the candidates that may win, by prediction, without those that failed before."""
        failed = [] if self._records is None else self._records.failed(self.id)
        failed = self._agreed(failed)[0]
        base, memory, found = predict(self.schedule), engine().memory_bytes(), []
        steps = {tuple(self.schedule.lines[1:])}
        compiled = {*engine().open_choices(self.schedule)}
        for choices in candidates:
            if dict(choices) in failed:
                continue
            entry = self._entry(choices)
            if isinstance(entry, str):
                self._add(choices=dict(choices), error=entry)
                continue
            schedule = entry.root.program().schedule
            # A choice without effect on the steps is left out, unless the compiler reads it.
            same = compiled.isdisjoint(choices) and tuple(schedule.lines[1:]) in steps
            now = predict(schedule)
            why = why_not(now, base, memory) if base and now else ""
            if why:
                self._add(choices=dict(choices), pruned=why)
            elif not same:
                steps.add(tuple(schedule.lines[1:]))
                found.append(choices)
        return found

    def _sample(self, choices: Candidate, advance: Callable[[Candidate], None]) -> float | str:
        """Returns the seconds of a step, the maximum over processes; or an error's first line."""
        advance(choices)
        entry = self._entry(choices)
        measured = self._slowest(entry if isinstance(entry, str) else self._seconds(entry, 1))
        if isinstance(measured, float) and measured < SHORT_S and isinstance(entry, Entry):
            measured = self._slowest(self._seconds(entry, int(SHORT_S / measured)))
        if isinstance(measured, str):
            self._add(choices=dict(choices), error=measured)
        else:
            self._add(choices=dict(choices), time_s=round(measured, 9))
        return measured

    def _slowest(self, measured: float | str) -> float | str:
        """Returns the maximum over processes, or an error of one of them."""
        every = self._gathered(measured)
        wrong = [x for x in every if isinstance(x, str)]
        return wrong[0] if wrong else float(max(every))

    def _seconds(self, entry: Entry, count: int) -> float | str:
        """Returns the mean seconds of `count` runs, or an error's first line."""
        try:
            if not entry.is_warm:
                self._run(entry)  # compiles
                entry.is_warm = True
            return sum(self._run(entry) for _ in range(count)) / count
        except TesseraError as error:
            return str(error).splitlines()[0]

    def _run(self, entry: Entry) -> float:
        """Returns the seconds of one run with the call's arguments; its results are dropped."""
        device = engine()
        values = [t.now() for t in entry.pick(self._leaves)]
        plain, copies = source_of(values), {k: values[k] for k in entry.donated}
        fresh = {k: device.copied(t.stored) for k, t in copies.items()}

        def source(where: Any) -> Any:
            found, type = plain(where)
            return fresh.get(where, found) if isinstance(where, int) else found, type

        device.wait(list(fresh.values()))
        run = Run(entry.root, source)
        begin_s = time.perf_counter()
        run.go()
        device.wait([x for _, outs, _ in run.done for x in outs])
        return time.perf_counter() - begin_s

    def _temporary_bytes(self, choices: Candidate) -> int | None:
        entry = self._entry(choices)
        if isinstance(entry, str) or entry.fast_path is None or self.schedule.is_staged:
            return None
        if self.schedule.options.executor == "stepped":
            return None
        return engine().program_bytes(entry.root.program())["temporary"]

    # -- several processes ------------------------------------------------------------------------
    def _gathered(self, value: Any) -> list[Any]:
        if not self._number:
            return [value]
        name = f"tune/{self._number}/{next(self._messages)}"
        return engine().gather(name, value, limits().collective_s)

    def _agreed(self, value: Any) -> list[Any]:
        """Returns a list with the value of the first process, so that all decide alike."""
        return self._gathered(value)[:1]


def folder() -> Path | None:
    """Returns the folder of the records, beside the compiled programs; None if these are off."""
    named = environment.text(environment.PROGRAM_CACHE)
    if named.lower() in environment.OFF:
        return None
    try:
        return (Path(named).expanduser() if named else environment.cache_folder()) / "tuning"
    except RuntimeError:  # there is no home folder
        return None


def _schedule_choices(schedule: Schedule) -> dict[str, tuple[Any, ...]]:
    """Returns the open choices about the collectives of `schedule`."""
    nodes = [n for n, _ in schedule.collectives()]
    if not nodes:
        return {}
    found: dict[str, tuple[Any, ...]] = {"overlap": (True, False)}
    sums = [n for n in nodes if n.op in (all_reduce.name, reduce_scatter.name)]
    if len(sums) > 1:
        found["bucket_bytes"] = (1 << 20, 1 << 22, 1 << 25)
    if any(n.op == all_gather.name for n in nodes):
        found["prefetch"] = (1, 2)
        found["reshard_after_forward"] = (False,)
    if any(n.op == all_reduce.name for n in nodes):
        found["algorithm"] = ("ring", "halving")
    return found


@contextmanager
def _progress(name: str, shown: bool) -> Iterator[Callable[[Candidate], None]]:
    """A context that shows the candidate being timed, on a terminal only."""
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    columns = SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn()
    off = not (shown and console.is_terminal)
    with Progress(*columns, console=console, transient=True, disable=off) as bar:
        task = bar.add_task(f"tuning {name}", total=None)

        def advance(choices: Candidate) -> None:
            bar.update(task, description=f"tuning {name}: {words(choices)}")

        yield advance
