"""`ts.jit`: a function recorded once per kinds of arguments, then run as compiled programs.

Tensors (and arrays) in the arguments are dynamic, everything else is static and part of the key.
Where the function reads a value it is cut: the result is a tree of programs (lang/segments.py).
Containers that the function changes are changed in the caller's hands too.
"""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from inspect import isfunction
from operator import attrgetter
from typing import Any, Generic, ParamSpec, TypeVar, overload
from weakref import ref

import numpy as np

from ..core.checks import function_of
from ..core.context import Settings, settings
from ..core.errors import UsageError, caller, fail
from ..core.interrupts import opens, whole
from ..core.layout import TensorType
from ..core.options import ScheduleOptions
from ..core.renamed import renamed_arguments
from ..core.reshard import completed
from ..ir.graph.build import Builder
from ..ir.graph.node import Graph, Node
from ..ir.schedule.schedule import Schedule
from ..passes.plan import plan, prepared
from . import padding, random
from .around import around
from .checks import bound, signature_of
from .eager import run_graph
from .engine import Program, engine
from .entry import Entry, Written
from .host import engine_array
from .leaks import need_none_left
from .operands import as_tensor
from .outside import Outside, Place
from .parameter import Parameter
from .pipelines.microbatch import NeedsPipe, PipeState, state_of
from .pipelines.readings import read
from .record import KEY_TYPE, WHOLE, Recorder, current, recording
from .retraces import changing
from .segments import Recording, Run, Segment, Source, grow
from .store import owned_by, store_of
from .tensor import Tensor
from .tree import Spec, call_paths, flatten, path_name, spec_paths, tree_map, unflatten
from .writes import changes, put, remove, snapshot

P = ParamSpec("P")
R = TypeVar("R")
_data_of = attrgetter("_data")
MOST_ENTRIES = 64
"""Variants of a function that are kept for one structure of arguments; the oldest goes."""


class TraceWarning(UserWarning):
    """Warns that a function is recorded again and again, as its arguments differ at each call."""


class Jit(Generic[P, R]):
    """A compiled function, which `ts.jit` returns; `.graph` is the Graph of its last recording."""

    def __init__(
        self,
        fn: Callable[P, R],
        donate: str | int | Sequence[str | int],
        reduce_partial: bool,
        pad: padding.Pads | None = None,
    ):
        # A model's attributes may change: they are not copied.
        functools.update_wrapper(self, fn, updated=("__dict__",) if isfunction(fn) else ())
        self.fn = fn
        self.name = getattr(fn, "__name__", "function")
        self.reduce_partial = reduce_partial
        self._signature = signature_of("jit", fn)
        self._donate = self._names(donate)
        self._pads = padding.checked(self.name, self._signature, pad or {}, self._donate)
        self._entries: dict[Any, list[Entry]] = {}
        self._last: tuple[Builder, list[Node]] | None = None
        self._piped: Schedule | None = None  # of the last recording, where it calls a pipeline
        self._recordings = 0
        self._owners: set[type] = set()  # classes that it is a method of
        self._around: list[Any] = []  # modules and parameters from outside (lang/around.py)

    def _names(self, donate: str | int | Sequence[str | int]) -> frozenset[str]:
        params = list(self._signature.parameters)
        names = set()
        for n in donate if isinstance(donate, (tuple, list, set, frozenset)) else [donate]:
            name = params[n] if isinstance(n, int) and 0 <= n < len(params) else n
            if name not in params:
                raise fail(
                    UsageError,
                    f"jit: {self.name} has no argument {n!r} to donate",
                    [("arguments", ", ".join(params))],
                    fix="name one of them",
                )
            names.add(str(name))
        return frozenset(names)

    @property
    def graph(self) -> Graph:
        """The Graph of the last recording. Raises UsageError before the first call."""
        builder, results = self._latest()
        return prepared(builder.graph(results))

    def _latest(self) -> tuple[Builder, list[Node]]:
        if self._last is None:
            raise fail(UsageError, f"jit: {self.name} has not been called yet", fix="call it once")
        return self._last

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
        return [e.root.program() for e in every if e.root.written is not None]

    @property
    def choices(self) -> ScheduleOptions:
        """The schedule options of the last recording. Raises UsageError before the first call."""
        return self._latest()[0].options.schedule

    @property
    def schedule(self) -> Schedule:
        """The Schedule of the last recording: its steps in order, and what each step waits for.

        Raises UsageError before the first call.
        """
        if self._piped is not None:
            return self._piped
        builder, results = self._latest()
        return plan(builder.graph(results))

    def __get__(self, obj: Any, owner: Any = None) -> Any:
        if obj is None:
            return self
        self._owners.add(type(obj))
        return functools.partial(self, obj)

    @whole
    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        run = self._run if current() is None else self.fn
        return self._padded(run, args, kwargs) if self._pads else run(*args, **kwargs)

    def _padded(self, fn: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        return padding.called(fn, self.name, self._signature, self._pads, args, kwargs)

    def _run(self, *args: P.args, **kwargs: P.kwargs) -> R:
        entry, leaves, spec = self._entry(args, kwargs)
        if entry.checks:
            tensors = entry.pick(leaves)
            for at, check in entry.checks:
                check(tensors[at])
        if entry.straight is not None:
            return self._straight(entry, leaves, args, kwargs)  # type: ignore[no-any-return]
        return self._cut(entry, leaves, spec, args, kwargs)  # type: ignore[no-any-return]

    def plan(self, *args: P.args, **kwargs: P.kwargs) -> Schedule:
        """The Schedule that a call with these arguments will run.

        The function is recorded; its program is neither compiled nor run, and the later call does
        not record again. If the function reads a value on the host, that value is computed.
        """
        self._padded(lambda *args, **kwargs: self._entry(args, kwargs), args, kwargs)
        return self.schedule

    def _entry(self, args: Any, kwargs: Any) -> tuple[Entry, list[Any], Spec]:
        """What is recorded for these arguments, now if it was not before; and their leaves."""
        leaves, spec = flatten((args, kwargs))
        more, shape = flatten(self._around) if self._around else _NOTHING
        key, setting = (spec, shape), settings()
        entry = self._known(leaves, more, key, setting)
        if entry is None and not _KNOWN.issuperset(map(type, leaves)):
            leaves = [_dynamic(x) for x in leaves]
            entry = self._known(leaves, more, key, setting)
        if entry is None:
            entry = Entry(leaves + more, setting, self._marks(args, kwargs), self._owners)
            entry.key = key
            more = self._record(entry, leaves, more, spec, [])
            entry.settle()
            same = self._entries.setdefault(entry.key, [])
            same.insert(0, entry)
            del same[MOST_ENTRIES:]
        return entry, leaves + more if more else leaves, spec

    def _known(
        self, leaves: list[Any], more: list[Any], key: Any, setting: Settings
    ) -> Entry | None:
        for entry in self._entries.get(key, ()):
            if entry.matches(leaves + more if more else leaves, setting):
                return entry
        return None

    def _covered(
        self, entry: Entry, leaves: list[Any], more: list[Any], recorder: Recorder
    ) -> list[Any]:
        """What is around `leaves` now that the function was recorded; the entry knows of it."""
        new = around(recorder, self._around)
        if not new:
            return more
        self._around = [*self._around, *new]
        more, shape = flatten(self._around)
        entry.cover(leaves + more)
        mine = self._entries.get(entry.key, [])
        entry.key = (entry.key[0], shape)
        if entry in mine:  # it goes on after a read
            mine.remove(entry)
            self._entries.setdefault(entry.key, []).insert(0, entry)
        return more

    # -- running ----------------------------------------------------------------------------------
    def _straight(self, entry: Entry, leaves: list[Any], args: Any, kwargs: Any) -> Any:
        data = list(map(_data_of, entry.pick(leaves)))
        if None.__class__ in map(type, data):
            data = [t.data for t in entry.pick(leaves)]
        program = entry.root.program()
        assert entry.straight is not None
        if entry.have == program.wants:
            entry.have = None  # from now on nothing needs to be moved
        done: list[list[Any]] = []
        try:
            program(entry.straight(data), entry.have, done)
        finally:  # what was given up is gone: its successors are put in place, whatever happens
            for outs in done:
                tensors = entry.pick(leaves)
                out = _give(entry.root.written, outs, program.types, args, kwargs, tensors)
        return out

    def _cut(self, entry: Entry, leaves: list[Any], spec: Any, args: Any, kwargs: Any) -> Any:
        own = len(spec_paths(spec))
        leaves, more = leaves[:own], leaves[own:]
        while True:
            tensors = entry.pick(leaves + more)
            run, drawn = Run(entry.root, _sources(tensors)), random.state()
            try:
                run.go()
            finally:
                for done in run.done:
                    out = _give(*done, args, kwargs, tensors)
                if not run.done:  # it draws the same once more
                    random.set_state(drawn)
            if run.done:
                return out
            more = self._record(entry, leaves, more, spec, run.values)

    def _marks(self, args: Any, kwargs: Any) -> list[bool]:
        """Per leaf: is its argument donated?"""
        if not self._donate:
            return [False] * len(flatten((args, kwargs))[0])
        names = bound(self.name, self._signature, args, kwargs).arguments
        given = {id(v) for k, v in names.items() if k in self._donate}

        def mark(value: Any) -> Any:
            yes = id(value) in given
            return tree_map(lambda _: yes, value)

        return flatten((tuple(map(mark, args)), {k: mark(v) for k, v in kwargs.items()}))[0]

    # -- recording --------------------------------------------------------------------------------
    def _record(
        self, entry: Entry, leaves: list[Any], more: list[Any], spec: Any, values: list[Any]
    ) -> list[Any]:
        """Records the function along the values read so far; adds the segments that follow. Gives
        the leaves of what is around it."""
        self._warn(bool(values), entry, spec)
        try:
            more, made = self._alone_or_piped(entry, leaves, more, spec, values)
        except BaseException:
            self._recordings -= not values
            raise
        need_none_left(self.name, made)
        return more

    def _alone_or_piped(
        self, entry: Entry, leaves: list[Any], more: list[Any], spec: Any, values: list[Any]
    ) -> tuple[list[Any], list[ref[Tensor]]]:
        need: NeedsPipe | None = None
        try:
            more, made = self._recorded(entry, leaves, more, spec, values, None)
        except NeedsPipe as found:
            need = found.with_traceback(None)
        if need is not None:
            names = dict(enumerate(map(path_name, call_paths(self._signature, spec))))
            tensors = {i: leaves[i] for i in entry.dynamic if i < len(leaves)}
            trial = functools.partial(self._recorded, entry, leaves, more, spec, [])
            pipe = read(need, tensors, names, trial)
            more, made = self._recorded(entry, leaves, more, spec, [], pipe)
        return more, made

    @opens
    def _recorded(
        self,
        entry: Entry,
        leaves: list[Any],
        more: list[Any],
        spec: Any,
        values: list[Any],
        pipe: PipeState | None,
    ) -> tuple[list[Any], list[ref[Tensor]]]:
        given = list(values)
        reads: list[tuple[Node, dict[Node, Node]]] = []

        def reader(r: Recorder, node: Node) -> np.ndarray[Any, Any]:
            whole = r.builder.redistribute(node, node.type.replicated(), "to be read")
            reads.append((whole, dict(r.builder.replaced)))
            if len(reads) > len(given):
                held = list(map(r.content, entry.pick(leaves + more)))
                given.append(_value_now(r, whole, sources, _sources(held)))
            value: np.ndarray[Any, Any] = given[len(reads) - 1]
            return value

        recorder = Recorder(self.name, reader=None if pipe is not None else reader)
        recorder.frame, recorder.compiles = pipe or WHOLE, True
        inputs: dict[int, Tensor] = {}
        sources: dict[Node, Source] = {}
        named = call_paths(self._signature, spec)
        bindings: list[tuple[Parameter, Node]] = []
        known: set[int] = set()
        own = [(k, i) for k, i in enumerate(entry.dynamic) if i < len(leaves)]
        for k, i in own:
            if id(leaves[i]) in known:  # a parameter under a second name
                inputs[i] = leaves[i]
                continue
            kind = leaves[i].type if pipe is None else pipe.type_of(leaves[i], i)
            t = recorder.input(kind, path_name(named[i]))
            if pipe is not None:
                pipe.met(recorder.node(t), leaves[i], i)
            t.name, t.drawn = leaves[i].name, leaves[i].drawn
            if t.name:
                recorder.named.append(t)
            sources[recorder.node(t)] = k
            inputs[i] = t
            if type(leaves[i]) is Parameter:
                inputs[i] = leaves[i]
                known.add(id(leaves[i]))
                bindings.append((leaves[i], recorder.node(t)))
        args, kwargs = unflatten(spec, leaves)
        outside = Outside(self.fn, [*args, *kwargs.values()], self._owners)
        try:
            with recording(recorder), owned_by(store_of(self.fn, self.name)):
                for box, node in bindings:
                    recorder.bind(box, node)
                args, kwargs = unflatten(spec, [inputs.get(i, x) for i, x in enumerate(leaves)])
                bound(self.name, self._signature, args, kwargs)
                before = snapshot((args, kwargs))
                out = self.fn(*args, **kwargs)
            found, places, left = outside.end(recorder)
        finally:
            outside.restore(recorder)
        if pipe is not None and pipe.trial:
            pipe.outputs = [recorder.node(x) for x in flatten(out)[0] if _belongs(x, recorder)]
            return more, []
        if found.tensors or found.others:
            entry.found.append(found)
        more = self._covered(entry, leaves, more, recorder)
        place: dict[int, int] = {}
        for k, t in enumerate(entry.pick(leaves + more)):
            place.setdefault(id(t), k)
        writes, removed = changes(before, (args, kwargs))
        out_leaves, out_spec = flatten(out)
        same = [(i, place[id(x)]) for i, x in enumerate(out_leaves) if id(x) in recorder.boxes]
        slots = [i for i, x in enumerate(out_leaves) if _belongs(x, recorder)]
        written_slots = [i for i, (_, x) in enumerate(writes) if _belongs(x, recorder)]
        results = [recorder.node(out_leaves[i]) for i in slots]
        results += [recorder.node(writes[i][1]) for i in written_slots]
        # A parameter that is given back is the caller's own, with what it was given or set to.
        back = {id(out_leaves[i]) for i, _ in same}
        opened = [o for i, o in recorder.boxes.items() if o.is_set or i in back]
        results += [recorder.node(o.last) for o in opened if o.last is not None]
        assigned = list(recorder.assigned.values())
        results += [recorder.node(a.last) for a in assigned]
        results += [recorder.node(t) for t in left]
        results += [recorder.node(t) for t in recorder.host_tensors]
        if self.reduce_partial:
            results = [self._finished(recorder, n) for n in results]
        for t, node in recorder.captured:
            sources[node] = place.get(id(t), places.get(id(t), t))
        if recorder.key is not None:
            sources[recorder.key] = None
        rec = Recording(self.name, recorder.options, list(recorder.builder.nodes), sources)
        for i in slots:
            out_leaves[i] = None
        for i in written_slots:
            writes[i] = writes[i][0], None
        self._last = recorder.builder, results
        written = Written(
            out_spec, out_leaves, slots, writes, written_slots, removed, found.writes,
            recorder.host_outputs, [place[id(o.box)] for o in opened], same,
            [(a.holder, a.name) for a in assigned],
        )  # fmt: skip
        self._piped = None
        if pipe is not None:
            self._pipelined(entry, leaves + more, recorder, rec, results)
            entry.root.written = written
            return more, recorder.left()
        way, last = grow(entry.root, given[: len(reads)])
        for k, (segment, (node, replaced)) in enumerate(zip(way, reads, strict=True)):
            if segment.recording is None:
                segment.define(rec, replaced, [node], way[:k])
        sure = [] if reads else recorder.checks  # all calls come by, whatever they read
        asked = ((sources.get(n), check) for n, check in sure)
        entry.checks = [(k, check) for k, check in asked if isinstance(k, int)]
        last.written = written
        last.define(rec, dict(recorder.builder.replaced), results, way)
        last.donate = frozenset(
            i for i, s in last.sources.items() if isinstance(s, int) and s in entry.donated
        )
        return more, recorder.left()

    def _pipelined(
        self,
        entry: Entry,
        leaves: list[Any],
        recorder: Recorder,
        rec: Recording,
        results: list[Node],
    ) -> None:
        """The program of a function that calls a pipeline, recorded for one microbatch."""
        pipe = state_of(recorder)
        assert pipe is not None
        inner = {*pipe.sums, *pipe.ahead}
        given = [n for n in recorder.builder.inputs if n not in inner]
        tensors = entry.pick(leaves)
        wholes = []
        for n in given:
            where = rec.sources[n]
            t = _held(where, tensors)
            wholes.append(KEY_TYPE.on(pipe.mesh) if t is None else pipe.whole(t))
        piped = pipe.pipe.compiled(recorder, results, wholes)
        given_up = tuple(
            i for i, n in enumerate(given)
            if isinstance(where := rec.sources[n], int) and where in entry.donated
        )  # fmt: skip
        schedule = replace(piped, donated=given_up)
        root = entry.root
        root.recording, root.imports = rec, [rec.place[n] for n in given]
        root.sources = {rec.place[n]: rec.sources[n] for n in given}
        root.targets = [rec.place.get(n, 0) for n in results]
        program = engine().step_by_step(schedule)
        self._piped = program.schedule
        root.stand_in(program)

    def _finished(self, recorder: Recorder, n: Node) -> Node:
        recorder.builder.loc = n.loc
        t = completed(n.type, n.type.partial_axes)
        done = recorder.builder.redistribute(n, t, "for the result")
        recorder.builder.loc = None
        return done

    def _warn(self, along_a_cut: bool, entry: Entry, spec: Any) -> None:
        self._recordings += not along_a_cut
        # One recording for each size that arguments are padded to is what was asked for.
        many = 3 + padding.count(self._pads)
        if self._recordings == many and not along_a_cut:
            before = [e for k, same in self._entries.items() if k[0] == spec for e in same]
            names = list(map(path_name, call_paths(self._signature, spec)))
            what = (
                "the structure of its arguments keeps changing; give as many of each at each call"
            )
            if len(before) > 1 or len(self._entries) == 1:
                what = changing([*reversed(before), entry], names)
            warnings.warn(
                f"{self.name} is recorded for the {'third' if many == 3 else f'{many}th'} time"
                f" ({caller() or 'here'}): {what}",
                TraceWarning,
                stacklevel=4,
            )


# -- parts of a call ------------------------------------------------------------------------------
_KNOWN = {Tensor, Parameter, int, float, bool, str}
_NOTHING: tuple[list[Any], Any] = ([], None)


def _dynamic(x: Any) -> Any:
    """A leaf as a Tensor where it is an array."""
    return as_tensor(x) if isinstance(x, np.ndarray) or engine_array(x) else x


def _belongs(x: Any, recorder: Recorder) -> bool:
    return isinstance(x, Tensor) and x._trace is recorder


def _held(where: Source, tensors: Sequence[Any]) -> Any:
    """The tensor that `where` means among these arguments; None is the key."""
    if isinstance(where, int):
        return tensors[where]
    return where.now() if isinstance(where, Place) else where


def _sources(tensors: Sequence[Any]) -> Callable[[Source], tuple[Any, TensorType]]:
    key: list[Any] = []

    def source(where: Source) -> tuple[Any, TensorType]:
        if where is None:
            if not key:
                key.append(engine().place(random.next_key(), KEY_TYPE))
            return key[0], KEY_TYPE
        t = _held(where, tensors)
        return t.data, t.type

    return source


def _value_now(
    r: Recorder, node: Node, sources: dict[Node, Source], source: Callable[[Source], Any]
) -> np.ndarray[Any, Any]:
    """The value of `node`, by running everything it depends on, while recording goes on."""
    known = {**sources, **{n: r.content(t) for t, n in r.captured}}
    if r.key is not None:
        known[r.key] = None
    segment = Segment()
    rec = Recording(r.builder.name, r.options, list(r.builder.nodes), known)
    segment.define(rec, r.builder.replaced, [node], [])
    values = []
    for i in segment.imports:
        data, t = source(segment.sources[i])
        values.append(Tensor(data, t))
    return run_graph(segment.graph, values)[0].numpy()


def _give(
    written: Written,
    outs: list[Any],
    types: Sequence[TensorType],
    args: Any,
    kwargs: Any,
    tensors: Sequence[Any],
) -> Any:
    """The call's result from the program's; writes go into the caller's containers, parameters
    among the call's `tensors`, and modules."""
    made = list(map(Tensor, outs, types))
    if written.plain:
        return unflatten(written.spec, made)
    leaves = list(written.leaves)
    for i, t in zip(written.slots, made, strict=False):
        leaves[i] = t
    for k in written.fills:
        tensors[k]._keep()  # which may fail: now, not between two weights
    rest = made[len(written.slots) :]
    taken = len(rest) - sum(len(output.tensors) for output in written.host_outputs)
    try:
        _put_all(written, rest[:taken], args, kwargs, tensors)
    except BaseException:
        with contextlib.suppress(Exception):  # of another thread, say: all weights or none
            _put_all(written, rest[:taken], args, kwargs, tensors)
        raise
    for i, k in written.same:
        leaves[i] = tensors[k]
    left = iter(rest[taken:])
    for output in written.host_outputs:
        output.run([next(left) for _ in output.tensors])
    return unflatten(written.spec, leaves)


def _put_all(
    written: Written, values: list[Tensor], args: Any, kwargs: Any, tensors: Sequence[Any]
) -> None:
    """Puts the results of a call where its function has put them. To do it twice does no harm."""
    rest = iter(values)
    writes = dict(enumerate(x for _, x in written.writes))
    writes.update((i, next(rest)) for i in written.written_slots)
    top = (args, kwargs)
    for (path, _), value in zip(written.writes, writes.values(), strict=True):
        put(top, path, value)
    for path in written.removed:
        remove(top, path)
    for k in written.fills:
        new = next(rest)
        tensors[k].fill(new._data, new.type)
    for holder, name in written.assigned:
        setattr(holder, name, next(rest))
    for place in written.outside:
        place.put(next(rest))


@overload
def jit(fn: Callable[P, R], /) -> Jit[P, R]: ...
@overload
def jit(
    *,
    donate: str | int | Sequence[str | int] = (),
    reduce_partial: bool = True,
    pad: padding.Pads | None = None,
) -> Callable[[Callable[P, R]], Jit[P, R]]: ...
@renamed_arguments("ts.jit", finish="reduce_partial")
def jit(
    fn: Callable[P, R] | None = None,
    /,
    *,
    donate: str | int | Sequence[str | int] = (),
    reduce_partial: bool = True,
    pad: padding.Pads | None = None,
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
        return lambda f: Jit(f, donate, reduce_partial, pad)
    function_of("jit", "the function", fn, "put @ts.jit above a function, or call ts.jit(function)")
    return Jit(fn, donate, reduce_partial, pad)
