"""`ts.jit`: functions recorded once per kind of arguments, then run as compiled programs.

Tensors (and arrays) in the arguments are dynamic; everything else is static and part of the cache
key. A read of a value splits the function: the result is a tree of programs (lang/jit/segments.py).
Changes of the argument containers are made in the caller's objects too.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from inspect import isfunction
from operator import attrgetter
from typing import Any, Generic, ParamSpec, TypeVar, overload

from ...autotune.choices import Timing
from ...core import environment
from ...core.checks import function_of
from ...core.context import Settings, replaced, settings
from ...core.contexts import above
from ...core.errors import DonatedError, NotYetError, TraceWarning, caller, lines_up
from ...core.interrupts import handle_waiting, whole
from ...core.layout import TensorType
from ...core.locks import DONATION_LOCK, RECORDING_LOCK, put_back
from ...core.options import ScheduleOptions
from ...core.peers import no_name
from ...ir.graph.build import Builder
from ...ir.graph.node import Graph, Node
from ...ir.schedule.schedule import Schedule
from ...passes.plan import plan, prepared
from ..math import ragged_padding, random
from ..record.operands import as_tensor
from ..record.parameter import Parameter
from ..record.tree import Spec, flatten, path_name, spec_paths
from ..record.variables import Place
from ..value.checks import signature_of
from ..value.eager import EAGER, current_trace
from ..value.engine import Program, engine
from ..value.host_data import is_array, unmade
from ..value.tensor import Tensor
from .cache_entry import Entry
from .call import Call, Recorded
from .donation import donated_leaves, donated_names
from .guards import contents
from .modules_read import around
from .retraces import changed_arguments
from .schedule_options import Chosen, warn_if_unused
from .segments import Reads, Recording, Run, define, held, source_of
from .side_effects import warn
from .taken_out import Lowered, OneProgram, one_program

P = ParamSpec("P")
R = TypeVar("R")
Straight = tuple[Callable[[list[Any]], list[Any]], Sequence[TensorType]]
_data_of = attrgetter("_data")
MOST_ENTRIES = 64
"""The cached entries of a function for one structure of arguments; the oldest is dropped."""


class Jit(Generic[P, R]):
    """A compiled function, as returned by `ts.jit`; `.graph` is the Graph of its last recording."""

    def __init__(
        self,
        fn: Callable[P, R],
        donate: str | int | Sequence[str | int] | None,
        reduce_partial: bool,
        pad: ragged_padding.Pads | None = None,
        quiet: bool = False,  # an internal function: no warning if it is recorded often
    ):
        # The attributes of a model may change, so they are not copied.
        functools.update_wrapper(self, fn, updated=("__dict__",) if isfunction(fn) else ())
        self.fn = fn
        self.name = getattr(fn, "__name__", "function")
        self.reduce_partial, self._quiet = reduce_partial, quiet
        self._signature = signature_of("jit", fn)
        self._donate = donated_names(self.name, self._signature, donate)
        self._pads = ragged_padding.checked(self.name, self._signature, pad or {}, self._donate)
        self._entries: dict[Any, list[Entry]] = {}
        self.chosen: Chosen | None = fn.chosen if isinstance(fn, Jit) else None
        # The last recording; its Schedule is None if it follows from the graph.
        self._last: tuple[Builder, list[Node], Schedule | None] | None = None
        self._staged: Graph | None = None  # the graph of a pipeline, on the mesh of one stage
        self._recordings = 0
        self._warned: set[str] = set()  # the warnings that were given
        self._owners: set[type] = set()  # classes that it is a method of
        self._held: list[Place] = []  # variables that hold tensors: guards.py
        self._around: list[Any] = []  # modules and boxes from outside: modules_read.py

    def under(self, options: ScheduleOptions) -> Jit[P, R]:
        """Returns the same function compiled with these options too: `@schedule(...)`."""
        chosen = Chosen(self.name, options)
        made: Jit[P, R] = Jit(self.fn, tuple(self._donate), self.reduce_partial, dict(self._pads))
        made.chosen = chosen if self.chosen is None else self.chosen.after(chosen)
        return made

    @property
    def compiled(self) -> Jit[P, R]:
        """The function itself: the compiled function of `@schedule(...)`."""
        return self

    @property
    def graph(self) -> Graph:
        """The Graph of the last recording; for a pipeline, on the mesh of one stage. Raises
        UsageError before the first call."""
        builder, results, _ = self._latest()
        return prepared(self._staged or builder.graph(results))

    def _latest(self) -> tuple[Builder, list[Node], Schedule | None]:
        if self._last is None:
            raise NotYetError(f"jit: {self.name} has not been called yet", fix="call it once")
        return self._last

    @property
    def program(self) -> Graph | Schedule:
        """The last recording: its Schedule if it is a pipeline, or else its Graph. Raises
        UsageError before the first call."""
        builder, results, schedule = self._latest()
        return builder.graph(results) if schedule is None else schedule

    @property
    def builder(self) -> Builder | None:
        """The builder of the last recording, or None before the first call."""
        return None if self._last is None else self._last[0]

    @property
    def programs(self) -> list[Program]:
        """The compiled programs, latest first: one for each combination of types of arguments.

        Recordings that read a value on the host are left out.
        """
        every = [e for entries in self._entries.values() for e in entries]
        every = [e.best or e for e in every]
        return [e.root.program() for e in every if e.root.written is not None]

    @property
    def timings(self) -> tuple[Timing, ...]:
        """The candidates of the latest program that the autotuner timed, one of which is chosen;
        none if it was not tuned."""
        every = (e for entries in self._entries.values() for e in entries)
        return next((e.best.timings for e in every if e.best is not None), ())

    @property
    def choices(self) -> ScheduleOptions:
        """The schedule options of the last recording. Raises UsageError before the first call."""
        return self._latest()[0].options.schedule

    @property
    def schedule(self) -> Schedule:
        """The Schedule of the last recording: its steps in order, with the steps that each one
        waits for.

        Raises UsageError before the first call.
        """
        builder, results, schedule = self._latest()
        return plan(builder.graph(results)) if schedule is None else schedule

    def __getattr__(self, name: str) -> Any:
        if hasattr(type(self), name):  # a property that is not there yet
            return object.__getattribute__(self, name)
        have = [n for n in dir(Jit) if not n.startswith("_")]
        raise no_name("a function of ts.jit", "Jit", name, have)

    def __deepcopy__(self, memo: Any) -> Jit[P, R]:
        return self  # as a function is its own copy

    def __reduce__(self) -> str:
        return str(getattr(self, "__qualname__", self.name))  # by its name, as a function

    def __get__(self, obj: Any, owner: Any = None) -> Any:
        if obj is None:
            return self
        self._owners.add(type(obj))
        return functools.partial(self, obj)

    @whole
    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        handle_waiting()
        now = settings()
        run = self.fn if now.op_by_op or current_trace() is not EAGER else self._run
        if now.called is not None and run is not self.fn:
            return now.called(self, args, kwargs)  # type: ignore[no-any-return]  # is R
        with self.in_force():
            return self._padded(run, args, kwargs) if self._pads else run(*args, **kwargs)

    def at_once(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Calls the function as one program, also inside a context where ops run one by one."""
        with replaced(op_by_op=False):
            return self(*args, **kwargs)

    def in_force(self) -> AbstractContextManager[None]:
        """A context with the schedule options of this function, for its recording."""
        return nullcontext() if self.chosen is None else self.chosen.in_force()

    def _padded(self, fn: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        return ragged_padding.called(fn, self.name, self._signature, self._pads, args, kwargs)

    def _run(self, *args: P.args, **kwargs: P.kwargs) -> R:
        if self._donate:
            with DONATION_LOCK:
                return self._run_now(args, kwargs)
        try:
            return self._run_now(args, kwargs)
        except DonatedError:
            with put_back():
                return self._run_now(args, kwargs)

    def _run_now(self, args: Any, kwargs: Any) -> R:
        with RECORDING_LOCK:  # until the arguments are taken
            entry, leaves, spec = self._entry(args, kwargs)
            if entry.best is None and (not entry.is_looked_up or settings().tune_limit_s):
                entry.best = self._tuned(entry, leaves, spec, args, kwargs)
                entry.is_looked_up = True
            entry = entry.best or entry
            tensors = entry.pick(leaves)
            data = None if entry.fast_path is None else self._taken(entry, tensors)
        for at, check in entry.checks:
            check(tensors[at])
        if data is not None:
            return self._straight(entry, tensors, data, args, kwargs)  # type: ignore[no-any-return]
        return self._cut(entry, leaves, spec, args, kwargs)  # type: ignore[no-any-return]

    def plan(self, *args: P.args, **kwargs: P.kwargs) -> Schedule:
        """The Schedule that a call with these arguments will run.

        The function is recorded; its program is neither compiled nor run, and the later call does
        not record again. If the function reads a value on the host, that value is computed.
        """
        with RECORDING_LOCK, self.in_force():
            self._padded(lambda *args, **kwargs: self._entry(args, kwargs), args, kwargs)
            return self.schedule

    def lower(self, *args: P.args, **kwargs: P.kwargs) -> Lowered:
        """The program of a call with these arguments, to be looked at: `.stablehlo()`, and
        `.compile()`, whose result has `.text`, `.cost` and `.memory`.

        Nothing is run. Raises UsageError if the call is several programs: a pipeline, a stepped
        executor, or a function that reads a value on the host.
        """
        return Lowered(self.one_program("lower", args, kwargs).program)

    def one_program(self, caller: str, args: Any, kwargs: Any) -> OneProgram:
        """The program of a call with these arguments and its recording, for `caller`."""
        found: list[tuple[Entry, list[Any], Spec]] = []
        with RECORDING_LOCK, self.in_force():
            if self._pads:
                self._padded(lambda *a, **k: found.append(self._entry(a, k)), args, kwargs)
            else:
                found.append(self._entry(args, kwargs))
            entry, leaves, spec = found[0]
            return one_program(caller, self.name, entry.best or entry, leaves, spec)

    def planned(self, args: Any, kwargs: Any) -> R | None:
        """Returns the result of a call that does not run: NaN, and 0 for other dtypes. Numbers of
        the result are on one device, to be read; larger values are made where they are read. None
        if the function reads a value on the host."""
        with RECORDING_LOCK, self.in_force():
            entry, leaves, _ = self._entry(args, kwargs)
            written, results = entry.root.written, entry.last[0][1]
        if written is None:
            return None
        types = [n.type for n in results]
        for i, t in enumerate(types[: len(written.slots)]):
            types[i] = t if t.shape else t.replicated().on(None)
        made = list(map(unmade, types))
        return written.put_results(made, args, kwargs, entry.pick(leaves))  # type: ignore[no-any-return]  # is R

    def straight(self, *args: P.args, **kwargs: P.kwargs) -> Straight | None:
        """Returns (a function from the arguments' arrays to the results' arrays, the results'
        types): the fast path for a caller whose tensors always have these types. None if a call is
        not just one program of its arguments."""
        with RECORDING_LOCK, self.in_force():
            entry, _, _ = self._entry(args, kwargs)
        entry = entry.best or entry
        root, pick = entry.root, entry.fast_path
        program = root.program() if pick is not None else None
        if program is None or pick is None or entry.checks or not root.written.plain:
            return None
        if entry.arg_types not in (None, program.wants):  # an argument is moved first
            return None
        if pick is list:  # all arguments in their order
            return functools.partial(program, arg_types=None), program.types
        return lambda data: program(pick(data), None), program.types

    def _entry(self, args: Any, kwargs: Any) -> tuple[Entry, list[Any], Spec]:
        """Returns (the entry for these arguments, recorded now if there is none; their leaves;
        their structure)."""
        leaves, spec = flatten((args, kwargs))
        more, shape = self._outside()
        key, setting = (spec, shape), settings()
        entry = self._matching_entry(leaves, more, key, setting)
        if entry is None and not _SIMPLE_TYPES.issuperset(map(type, leaves)):
            leaves = [_dynamic(x) for x in leaves]
            entry = self._matching_entry(leaves, more, key, setting)
        if entry is None:
            entry = Entry(
                leaves + more, setting, self._donated(args, kwargs), self._owners, len(leaves)
            )
            entry.key = key
            more = self._record(entry, leaves, more, spec, [])
            entry.settle()
            entry.last = self._last, self._staged
            same = self._entries.setdefault(entry.key, [])
            same.insert(0, entry)
            del same[MOST_ENTRIES:]
        return entry, leaves + more if more else leaves, spec

    def _tuned(
        self, entry: Entry, leaves: list[Any], spec: Spec, args: Any, kwargs: Any
    ) -> Entry | None:
        """Returns the entry for the best choices of `entry`'s program, None if none are asked for.
        Candidates are recorded with the arguments of the call."""
        now = settings()
        if not (
            now.tune_limit_s or now.program.schedule.tune or environment.text(environment.TUNE)
        ):
            return None
        from . import tuner  # most programs are not tuned

        own = len(spec_paths(spec))

        def record() -> Entry:
            again = Entry(leaves, settings(), self._donated(args, kwargs), self._owners, own)
            again.key = entry.key
            self._recorded(again, leaves[:own], leaves[own:], spec, [])
            again.settle()
            again.last = self._last, self._staged
            return again

        return tuner.best(self, entry, record, leaves)

    def show(self, entry: Entry, line: str) -> None:
        """Makes `entry` the last recording; its text shows `line`, of the autotuner."""
        (builder, results, schedule), self._staged = entry.last
        builder.options = replace(builder.options, tuned=line)
        if schedule is not None:
            schedule = replace(schedule, options=replace(schedule.options, tuned=line))
        self._last = builder, results, schedule

    def _outside(self) -> tuple[list[Any], Any]:
        """Returns (the leaves, the structure) of the variables that hold tensors, and of the outer
        modules and boxes."""
        if not (self._held or self._around):
            return _NOTHING
        rows, (leaves, shape) = self._in_variables(), flatten(self._around)
        return [*(x for found, _ in rows for x in found), *leaves], (shape, *(s for _, s in rows))

    def _in_variables(self) -> list[tuple[list[Any], object]]:
        return [contents(place.now()) for place in self._held]

    def _matching_entry(
        self, leaves: list[Any], more: list[Any], key: Any, setting: Settings
    ) -> Entry | None:
        for entry in self._entries.get(key, ()):
            if entry.matches(leaves + more if more else leaves, setting):
                return entry
        return None

    def _covered(
        self, entry: Entry, leaves: list[Any], more: list[Any], done: Recorded
    ) -> list[Any]:
        """Returns the leaves of the outer variables, modules and boxes after the recording, and
        extends the entry and its key by those found in this recording."""
        recorder, held = done.recorder, done.held
        known, new = {p.name for p in self._held}, around(recorder, self._around)
        variables = [p for p in held if p.name not in known]
        if not new and not variables:
            return more
        self._around, self._held = [*self._around, *new], [*self._held, *variables]
        with recorder.changes.numbers_before():
            more, shape = self._outside()
            entry.cover(leaves + more, len(leaves))
        mine = self._entries.get(entry.key, [])
        entry.key = (entry.key[0], shape)
        if entry in mine:  # the recording continued an entry after a read
            mine.remove(entry)
            self._entries.setdefault(entry.key, []).insert(0, entry)
        return more

    # -- running ----------------------------------------------------------------------------------
    def _taken(self, entry: Entry, tensors: Sequence[Any]) -> list[Any]:
        """The arrays of `tensors`, the arguments of an entry that is one program."""
        data = list(map(_data_of, tensors))
        if None.__class__ in map(type, data):
            entry.root.program().start()  # else `stored` would start too few devices
            data = [t.stored for t in tensors]
        return data

    def _straight(
        self, entry: Entry, tensors: Sequence[Any], data: list[Any], args: Any, kwargs: Any
    ) -> Any:
        """Runs an entry that is one program on the arrays `data` of its `tensors`."""
        program = entry.program = entry.program or entry.root.program()
        assert entry.fast_path is not None
        if entry.arg_types == program.wants:
            entry.arg_types = None  # all types match: later calls skip the check
        done: list[list[Any]] = []
        try:
            program(entry.fast_path(data), entry.arg_types, done)
        finally:  # donated arrays are gone, so the new ones are stored even after an exception
            for outs in done:
                out = entry.root.written.give(outs, program.types, args, kwargs, tensors)
        return out

    def _cut(self, entry: Entry, leaves: list[Any], spec: Any, args: Any, kwargs: Any) -> Any:
        """Runs a recording with reads, program by program, and picks each next segment by the
        values that are read. If no earlier call had these values, the rest is recorded."""
        argument_count = len(spec_paths(spec))
        leaves, more = leaves[:argument_count], leaves[argument_count:]
        while True:
            with RECORDING_LOCK:
                tensors = entry.pick(leaves + more)
                values = [t.now() for t in tensors]
            run, drawn = Run(entry.root, source_of(values)), random.state()
            try:
                run.go()
            finally:
                for written, outs, types in run.done:
                    out = written.give(outs, types, args, kwargs, tensors)
                if not run.done:  # the recording that follows must draw the same numbers
                    random.set_state(drawn)
            if run.done:
                return out
            with RECORDING_LOCK:
                more = self._record(entry, leaves, more, spec, run.values)

    def _donated(self, args: Any, kwargs: Any) -> list[bool]:
        return donated_leaves(self.name, self._signature, self._donate, args, kwargs)

    # -- recording --------------------------------------------------------------------------------
    def _record(
        self, entry: Entry, leaves: list[Any], more: list[Any], spec: Spec, values: list[Any]
    ) -> list[Any]:
        """Records the function along the values read so far, and adds the segments that follow.
        Returns the leaves of its outer variables, modules and boxes."""
        self._warn(bool(values), entry, spec)
        try:
            more, once = self._recorded(entry, leaves, more, spec, values)
        except BaseException:
            # A recording that failed does not count for the warning.
            self._recordings -= not values
            raise
        warn(self.name, once, self._warned)
        return more

    def _recorded(
        self, entry: Entry, leaves: list[Any], more: list[Any], spec: Spec, values: list[Any]
    ) -> tuple[list[Any], list[str]]:
        own = [i for i in entry.dynamic if i < len(leaves)]
        call = Call(self.fn, self.name, self._signature, self._owners, leaves, spec, own)
        reads = Reads(list(values), lambda: entry.pick(leaves + more))
        done = call.record(reads)
        if done.guards.others or done.guards.read:
            entry.guards.append(done.guards)
        now = self._covered(entry, leaves, more, done)
        self._settle(entry, entry.pick(leaves + now), done, reads)
        schedule, chosen = self._latest()[2], [] if self.chosen is None else [self.chosen]
        cut = entry.root.written is None
        warn_if_unused(done.recorder, "" if schedule is None else schedule.table, *chosen, cut=cut)
        done.recorder.clear()
        return now, done.once

    def _settle(self, entry: Entry, tensors: Sequence[Any], done: Recorded, reads: Reads) -> None:
        """Builds the programs of `entry` from the recording `done` of a call with these tensors."""
        recorder, sources = done.recorder, reads.sources
        entry.open_choices = recorder.open_choices
        place: dict[int, int] = {}
        for k, t in enumerate(tensors):
            place.setdefault(id(t), k)
        results, written = done.results(place, self.reduce_partial)
        for t, node in recorder.captured:
            sources[node] = place.get(id(t), t)
        if recorder.key is not None:
            sources[recorder.key] = None
        gone = entry.donated and entry.donated - {sources.get(n) for n in done.never_donated}
        rec = Recording(self.name, recorder.options, list(recorder.builder.nodes), sources)
        self._last, self._staged = (recorder.builder, results, None), None
        how = recorder.stages or recorder.frame
        scheduled = how.scheduled(recorder, results, lambda n: held(sources[n], tensors))
        if scheduled is not None:
            given, schedule = scheduled
            at = enumerate(sources[n] for n in given)
            donated = tuple([i for i, s in at if isinstance(s, int) and s in gone])
            program = engine().step_by_step(replace(schedule, donated=donated))
            entry.root.use_program(rec, given, results, program)
            entry.root.written = written
            self._last = recorder.builder, results, program.schedule
            self._staged = recorder.stages and recorder.stages.graph
            return
        sure = [] if reads.nodes else recorder.checks  # a read may skip ops with checks
        asked = ((sources.get(n), check) for n, check in sure)
        entry.checks = [(k, check) for k, check in asked if isinstance(k, int)]
        last = define(entry.root, reads, rec, recorder.builder.replaced, results)
        last.written = written
        last.donate = frozenset(
            i for i, s in last.sources.items() if isinstance(s, int) and s in gone
        )

    def _warn(self, along_a_cut: bool, entry: Entry, spec: Any) -> None:
        """Warns once, at the third recording of the function, and names the argument that keeps
        changing. A recording for other devices alone does not count."""
        others = (e for k, same in self._entries.items() if k[0] == spec for e in same)
        if not along_a_cut and any(e.leads_to(entry) for e in others):
            return
        self._recordings += not along_a_cut
        # Padded arguments have one recording for each size.
        many = 3 + ragged_padding.count(self._pads)
        if self._recordings == many and not along_a_cut and not self._quiet:
            changes = changed_arguments(
                self._signature, self._entries, entry, spec, self._names_around()
            )
            warnings.warn(
                f"{self.name} is recorded for the {'third' if many == 3 else f'{many}th'} time"
                f" ({caller() or 'here'}): {changes}",
                TraceWarning,
                stacklevel=lines_up(),
            )

    def _names_around(self) -> list[str]:
        """The names of the leaves of the outer variables, modules and boxes."""
        rows = zip(self._held, self._in_variables(), strict=True)
        names = [p.label for p, (leaves, _) in rows for _ in leaves]
        kinds = [type(x).__name__ for x in self._around]
        return names + [
            path_name((kinds[i], *rest)) for i, *rest in spec_paths(flatten(self._around)[1])
        ]


# -- parts of a call ------------------------------------------------------------------------------
_SIMPLE_TYPES = {Tensor, Parameter, int, float, bool, str}
_NOTHING: tuple[list[Any], Any] = ([], None)


def _dynamic(x: Any) -> Any:
    """Returns a leaf as a Tensor if it is an array, else as it is."""
    return as_tensor(x) if is_array(x) else x


@overload
def jit(fn: Callable[P, R], /) -> Jit[P, R]: ...
@overload
def jit(
    *,
    donate: str | int | Sequence[str | int] | None = (),
    reduce_partial: bool = True,
    pad: ragged_padding.Pads | None = None,
) -> Callable[[Callable[P, R]], Jit[P, R]]: ...
def jit(
    fn: Callable[P, R] | None = None,
    /,
    *,
    donate: str | int | Sequence[str | int] | None = (),
    reduce_partial: bool = True,
    pad: ragged_padding.Pads | None = None,
) -> Any:
    """Compiles `fn`: it is recorded at its first call and then runs as one program.

    It is recorded again for arguments of another shape, dtype, layout or structure, and for other
    values of static (non-tensor) arguments. `donate` names arguments (by name or place) whose
    buffers the program may reuse; using them afterwards raises DonatedError. With
    `reduce_partial=False` results whose sum over devices is pending stay partial. `pad` is a dict
    that gives arguments of varying length a `ts.Pad`. Raises UsageError if `fn` is not a function,
    or if `donate` or `pad` names an argument that `fn` does not have.

    >>> import tessera as ts
    >>> @ts.jit
    ... def double(x):
    ...     return x * 2
    >>> double(ts.tensor([1.0, 2.0])).numpy().tolist()
    [2.0, 4.0]
    """
    if fn is None:
        return above("ts.jit", lambda f: Jit(f, donate, reduce_partial, pad))
    function_of("jit", "the function", fn, "put @ts.jit above a function, or call ts.jit(function)")
    return Jit(fn, donate, reduce_partial, pad)
