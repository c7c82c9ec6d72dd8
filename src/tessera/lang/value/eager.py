"""Eager execution: an op outside of recorded functions runs at once, as a cached one-op program.

An op on a tensor whose data are not made yet waits until its result is read (deferred_values.py). A
result remembers how it was made, so that `ts.grad` works there too (lang/autodiff/tape.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np

from ...core.context import settings
from ...core.devices import process_count
from ...core.errors import DonatedError, caller
from ...core.layout import TensorType, plain, same_type
from ...core.locks import put_back
from ...core.options import ProgramOptions
from ...ir.graph.build import Builder
from ...ir.graph.node import Graph
from ...ops.create import full
from ...ops.movement import broadcast_to
from ...ops.op import Op, infer, op_named
from .deferred_values import Recipe, can_wait, wanted
from .engine import Engine, Program, engine
from .host_outputs import Act, HostOutput
from .tensor import HistoryEntry, Tensor, Trace

# The most cached programs; the least recently used are dropped.
MOST_PROGRAMS = 1024


@lru_cache(maxsize=MOST_PROGRAMS)
def _program(
    by: Engine,
    options: ProgramOptions,
    strict: bool,
    ordered: bool,
    op: str,
    types: tuple[TensorType, ...],
    attrs: tuple[Any, ...],
) -> Program:
    """The program of one op. The arguments are the whole cache key."""
    b = Builder(op, options, strict, ordered)
    ins = [b.input(t) for t in types]
    if op == "redistribute":
        return by.compile(b.graph([b.redistribute(ins[0], **dict(attrs))]))
    node = b(op, *ins, **dict(attrs))
    many = len(node.types) > 1 or node.kind.many
    outs = [b("item", node, index=i) for i in range(len(node.types))] if many else [node]
    return by.compile(b.graph(outs))


class Eager:
    """The trace of ops that run at once."""

    def apply(self, op: str, args: Sequence[Tensor], attrs: dict[str, Any]) -> list[Tensor]:
        try:
            return self._applied(op, args, attrs)
        except DonatedError:
            with put_back():
                return self._applied(op, args, attrs)

    def _applied(self, op: str, args: Sequence[Tensor], attrs: dict[str, Any]) -> list[Tensor]:
        if op == "full":
            return [full_now(attrs)]
        across = op == "redistribute" and args[0].mesh not in (None, attrs["to"].mesh)
        later = None if across else waiting(op, args, attrs)  # from mesh to mesh is an error
        if later is not None:
            return [later]
        if op == "redistribute":
            return [redistribute_now(args[0], attrs["to"])]
        return run_now(op, args, attrs)

    def value(self, t: Tensor) -> np.ndarray[Any, Any]:
        value: np.ndarray[Any, Any] = engine().fetch(t.stored, t.type)
        return value

    def show(self, tensors: Sequence[Tensor], act: Act) -> None:
        HostOutput(tuple(tensors), act).run(tensors)

    def check(self, t: Tensor) -> None:
        """A no-op: an eager value never expires."""


EAGER: Trace = Eager()
CURRENT_TRACE: ContextVar[Trace] = ContextVar("tessera_trace", default=EAGER)
current_trace = CURRENT_TRACE.get
"""Returns the current trace, which applies ops on tensors."""


@contextmanager
def eager() -> Iterator[None]:
    """A context in which ops run at once, outside of any recording that is in progress."""
    token = CURRENT_TRACE.set(EAGER)
    try:
        yield
    finally:
        CURRENT_TRACE.reset(token)


def run_now(op: str, args: Sequence[Tensor], attrs: dict[str, Any]) -> list[Tensor]:
    """Runs one op on tensors that have values, as a cached one-op program."""
    args = [a.now() for a in args]
    types = tuple([a.type for a in args])
    now = settings()
    how = now.program, now.strict, now.ordered
    program = _program(engine(), *how, op, types, tuple(attrs.items()))
    results = []
    loc = caller()
    made_of = None if now.no_grad else args
    given = [_number_of(a) if a._data is None else a._data for a in args]
    for i, (data, t) in enumerate(zip(program(given, types), program.types, strict=True)):
        out = Tensor(data, t)
        if made_of is not None and t.dtype.is_float:  # through others no gradient flows
            out._history = history_entry(op, made_of, attrs, i, loc)
        results.append(out)
    return results


def history_entry(
    op: str, args: Sequence[Tensor], attrs: dict[str, Any], index: int, loc: str
) -> HistoryEntry:
    """Returns the history entry of result `index` of `op` on `args`."""
    derived = any(a._history is not None and a._history.of_gradient for a in args)
    return HistoryEntry(op, tuple(args), attrs, index, loc, derived)


class Number:
    """A scalar that is on no device yet. One-op programs take it as a host value: it needs neither
    a program nor a copy of its own."""

    def __init__(self, value: float, type: TensorType) -> None:
        self.value, self.type = np.asarray(value, type.dtype.numpy), type

    def __call__(self) -> Any:
        return engine().place(self.value, self.type)


def is_number(t: Tensor) -> bool:
    """Returns whether `t` is a number with a value. Programs take numbers as arguments, also for
    gradients, so a number that changes at each step compiles nothing."""
    if t._history is None or t._history.op != full.name or (t._data is None and t._pending is None):
        return False
    return t._history.attrs["shape"] == () and t._history.attrs.get("layout") is None


def _number_of(t: Tensor) -> Any:
    return t._pending.value if isinstance(t._pending, Number) else t.stored


def _is_held(t: Tensor) -> bool:
    return isinstance(t._pending, Number)


def full_now(attrs: dict[str, Any]) -> Tensor:
    """Returns a tensor filled with one number. The number is an argument of the program that fills
    it."""
    layout, number = attrs.get("layout"), plain(attrs["dtype"], ())
    if layout is not None and layout.partial:  # only zeros can have a partial layout
        return run_now("full", (), attrs)[0]
    out = Tensor(None, number)
    out._pending = held = Number(attrs["value"], number)
    out._recipe = Recipe(lambda to: engine().place(held.value, to), permanent=True)
    if attrs["shape"] or layout is not None:
        spread = {k: v for k, v in attrs.items() if k in ("shape", "layout")}
        (t,) = infer(broadcast_to, (number,), spread).outs
        out = _waiting(broadcast_to, [out], spread, t, permanent=True)
    out._history = HistoryEntry("full", (), attrs, 0, caller())
    return out


# -- tensors whose data are not made yet ----------------------------------------------------------
def waiting(op: str, args: Sequence[Tensor], attrs: dict[str, Any]) -> Tensor | None:
    """Returns the deferred result of `op` on deferred `args`; None if the op has to run now."""
    moves = op == "redistribute"
    if not args or any(a._recipe is None or (a._data is not None and not moves) for a in args):
        return None
    args = [a.now() for a in args]
    recipes = [a._recipe for a in args if a._recipe is not None]
    if len(recipes) < len(args):  # another thread made one of them
        return None
    alone = process_count() == 1
    if not alone and any(r.of_host for r in recipes):  # not all processes may have read the value
        return None
    if moves:
        if args[0]._data is not None:  # of a kept recipe: the data may have been donated
            engine().alive(args[0]._data, args[0].type)
        to: TensorType = attrs["to"]
        if not alone and args[0].mesh not in (None, to.mesh):
            return None
        if to.partial or to.varying or args[0].type.partial:
            return None
    else:
        kind, ins = op_named(op), tuple([a.type for a in args])
        if not any(a.shape for a in args) or not can_wait(kind, recipes):
            return None
        got = infer(kind, ins, attrs)
        if len(got.outs) > 1 or not all(map(same_type, got.wants, ins)):
            return None  # it communicates, so all processes must run it at the same point
        (to,) = got.outs
    out = _waiting(None if moves else kind, args, attrs, to)
    if not settings().no_grad and to.dtype.is_float:
        out._history = history_entry(op, args, attrs, 0, caller())
    return out


def _waiting(
    op: Op | None,
    args: Sequence[Tensor],
    attrs: dict[str, Any],
    t: TensorType,
    permanent: bool = False,
) -> Tensor:
    """Returns a tensor of type `t` with a recipe that runs `op` on the deferred `args`. Without
    `op` the recipe makes the argument in another layout."""
    now = settings()
    how = now.program, now.strict, now.ordered
    parts = [(a, a.type, a._recipe) for a in args]

    def make(to: TensorType) -> Any:
        if op is None:
            return _laid(*parts[0], to)
        ins, said = tuple([t for _, t, _ in parts]), attrs
        if to is not t:
            ins = tuple(wanted(op, ins, attrs, to))
            said = {**attrs, "layout": to} if op is broadcast_to else attrs
        ins = tuple([was if _is_held(a) else want for (a, was, _), want in zip(parts, ins)])
        given = [_laid(*part, want) for part, want in zip(parts, ins, strict=True)]
        program = _program(engine(), *how, op.name, ins, tuple(said.items()))
        done = Tensor(program(given, ins)[0], program.types[0])
        return done.stored if done.type is to else redistribute_now(done, to).stored

    recipes = [r for _, _, r in parts if r is not None]
    steps = sum(r.steps for r in recipes) + (op is not None)
    out = Tensor(None, t)
    out.wait(Recipe(make, steps, any(r.of_host for r in recipes), permanent))
    return out


def _laid(t: Tensor, was: TensorType, recipe: Recipe | None, to: TensorType) -> Any:
    """Returns the data of `t` in the layout `to`: its own if its layout is still `was`; else, or if
    they were donated, new data of its recipe."""
    if to is was is t.type:
        if isinstance(t._pending, Number):
            return t._pending.value
        try:
            return engine().alive(t.stored, to)
        except DonatedError:
            pass
    assert recipe is not None
    return recipe(to)


@dataclass(frozen=True, slots=True)
class _Same:
    """A graph that is equal to another graph of equal `key`."""

    key: object
    graph: Graph = field(compare=False)


def program_of(graph: Graph, donate: Sequence[int] = ()) -> Program:
    """Returns the program of `graph`, compiled once for all recordings of an equal graph; `donate`
    are the numbers of the donated arguments."""
    if graph.key is None:
        return engine().compile(graph, donate)
    places = tuple([(n.loc, n.scope) for n in graph.nodes])  # reports of a program show them
    key = graph.name, places, graph.key
    return _compiled(engine(), _Same(key, graph), tuple(donate))


@lru_cache(maxsize=MOST_PROGRAMS // 4)
def _compiled(by: Engine, same: _Same, donate: tuple[int, ...]) -> Program:
    return by.compile(same.graph, donate)


def run_graph(graph: Graph, values: Sequence[Tensor]) -> list[Tensor]:
    """Runs `graph` at once on tensors that have values."""
    program = program_of(graph)
    types = tuple([v.type for v in values])
    data = program([_number_of(v) if v._data is None else v._data for v in values], types)
    return [Tensor(d, t) for d, t in zip(data, program.types, strict=True)]


def redistribute_now(x: Tensor, to: TensorType) -> Tensor:
    """Redistributes `x` to the layout `to`, at once."""
    source = x.type if x.type.mesh is not None else x.type.on(to.mesh)
    now = settings()
    how = now.program, now.strict, now.ordered
    program = _program(engine(), *how, "redistribute", (source,), (("to", to),))
    out = Tensor(program([x.stored], (x.type,))[0], to)
    if not now.no_grad:
        out._history = history_entry("redistribute", [x.now()], {"to": to}, 0, caller())
    return out
