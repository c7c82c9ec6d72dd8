"""What happens to an op outside of recorded functions? It runs at once, as a program of one op.

The programs are cached. A result remembers how it was made, so that `ts.grad` works there too
(lang/tape.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np

from ..core.context import settings
from ..core.errors import DonatedError, caller
from ..core.layout import TensorType, plain
from ..core.options import ProgramOptions
from ..core.turns import put_back
from ..ir.graph.build import Builder
from ..ir.graph.node import Graph
from ..ops.create import full
from .engine import Engine, Program, engine
from .host_outputs import Act, HostOutput
from .tensor import Made, Tensor, Trace

# How many of them are kept, those that were used last.
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
    """The program of one op: all that it depends on is an argument here."""
    b = Builder(op, options, strict, ordered)
    ins = [b.input(t) for t in types]
    if op == "redistribute":
        return by.compile(b.graph([b.redistribute(ins[0], **dict(attrs))]))
    node = b(op, *ins, **dict(attrs))
    many = len(node.types) > 1 or node.kind.many
    outs = [b("item", node, index=i) for i in range(len(node.types))] if many else [node]
    return by.compile(b.graph(outs))


class Eager:
    """The trace of what runs at once."""

    def apply(self, op: str, args: Sequence[Tensor], attrs: dict[str, Any]) -> list[Tensor]:
        try:
            return self._applied(op, args, attrs)
        except DonatedError:
            with put_back():
                return self._applied(op, args, attrs)

    def _applied(self, op: str, args: Sequence[Tensor], attrs: dict[str, Any]) -> list[Tensor]:
        if op == "full":
            return [full_now(attrs)]
        if op == "redistribute":
            return [redistribute_now(args[0], attrs["to"])]
        return run_now(op, args, attrs)

    def read(self, t: Tensor) -> np.ndarray[Any, Any]:
        value: np.ndarray[Any, Any] = engine().fetch(t.stored, t.type)
        return value

    def show(self, tensors: Sequence[Tensor], act: Act, turns: bool = False) -> None:
        HostOutput(tuple(tensors), act).run(tensors)

    def check(self, t: Tensor) -> None:
        """A value is there for good."""


EAGER: Trace = Eager()
HERE: ContextVar[Trace] = ContextVar("tessera_trace", default=EAGER)
here = HERE.get
"""The trace in force: what ops on tensors are applied by."""


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
            out._made = made(op, made_of, attrs, i, loc)
        results.append(out)
    return results


def made(op: str, args: Sequence[Tensor], attrs: dict[str, Any], index: int, loc: str) -> Made:
    """How a tensor was made of `args`."""
    derived = any(a._made is not None and a._made.of_gradient for a in args)
    return Made(op, tuple(args), attrs, index, loc, derived)


class Number:
    """A scalar that is on no device yet. One-op programs take it as it is: no program of its own
    for each number, and no copy."""

    def __init__(self, value: float, type: TensorType) -> None:
        self.value, self.type = np.asarray(value, type.dtype.numpy), type

    def __call__(self) -> Any:
        return engine().place(self.value, self.type)


def is_number(t: Tensor) -> bool:
    """Whether `t` is a number with a value, which programs take as an argument: one that changes at
    each step compiles nothing, also not for gradients."""
    if t._made is None or t._made.op != full.name or (t._data is None and t._pending is None):
        return False
    return t._made.attrs["shape"] == () and t._made.attrs.get("layout") is None


def _number_of(t: Tensor) -> Any:
    return t._pending.value if isinstance(t._pending, Number) else t.stored


def full_now(attrs: dict[str, Any]) -> Tensor:
    """A tensor of one number, at once: the number is an argument of the program that spreads it."""
    layout, number = attrs.get("layout"), plain(attrs["dtype"], ())
    if layout is not None and layout.partial:  # zeros: no other number can lie like this
        return run_now("full", (), attrs)[0]
    out = Tensor(None, number)
    out._pending = Number(attrs["value"], number)
    if attrs["shape"] or layout is not None:
        spread = {k: v for k, v in attrs.items() if k in ("shape", "layout")}
        out = run_now("broadcast_to", (out,), spread)[0]
    out._made = Made("full", (), attrs, 0, caller())
    return out


@dataclass(frozen=True, slots=True)
class _Same:
    """A graph, which is the same as another of equal `key`."""

    key: object
    graph: Graph = field(compare=False)


def program_of(graph: Graph, donate: Sequence[int] = ()) -> Program:
    """The program of `graph`, which is compiled once however often the same is recorded; `donate`
    are arguments that are given up."""
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
    """`x` in the layout `to`, at once."""
    source = x.type if x.type.mesh is not None else x.type.on(to.mesh)
    now = settings()
    how = now.program, now.strict, now.ordered
    program = _program(engine(), *how, "redistribute", (source,), (("to", to),))
    out = Tensor(program([x.stored], (x.type,))[0], to)
    if not now.no_grad:
        out._made = made("redistribute", [x.now()], {"to": to}, 0, caller())
    return out
