"""Measurements inside a recorded function: the same graph, with measurements added.

A probe chooses nodes of a recorded graph, also in the bodies of loops, and adds a measurement to
each: a function of tensors, recorded after the node. So it runs on the mesh like the program, each
device on its blocks, and returns little data. A measurement in a loop has one value per iteration.
The outputs run in pieces (lang/jit/segments.py): no node runs in two pieces, and memory holds
the values of one piece at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ..core.checks import shown
from ..core.context import replaced
from ..core.dtypes import f32
from ..core.errors import UsageError
from ..core.layout import TensorType
from ..ir.graph.node import Graph, Node, reachable
from ..lang.jit.segments import Recording, Segment
from ..lang.jit.trace import InputArgument, record_call
from ..lang.math import random
from ..lang.record.recorder import KEY_TYPE, Reader, Recorder, current, recording, symbolic
from ..lang.record.to_host import local_value
from ..lang.value.eager import run_graph
from ..lang.value.engine import engine
from ..lang.value.tensor import Tensor
from ..ops.op import infer, op_named

Array = np.ndarray[Any, Any]
Measure = Callable[[Tensor], Sequence[Tensor]]
Choose = Callable[[Graph, Node | None], Iterable[Node]]  # a graph, and the loop it is the body of
PIECE, PIECE_BYTES = 400, 2**28  # at most so many outputs come from one program


@dataclass(frozen=True, slots=True)
class Spot:
    """A node, and the loops around it, outermost first."""

    node: Node
    loops: tuple[Node, ...] = ()


@dataclass(frozen=True, slots=True)
class Run:
    """A graph and a value for each of its inputs; for a recorded call also the names of its
    results, and the results that are no tensors."""

    graph: Graph
    values: tuple[Tensor, ...]
    names: tuple[str, ...] | None = None
    plain: tuple[tuple[str, Any], ...] = ()


# ---- recording of a call -----------------------------------------------------------------------
def recorded(caller: str, fn: Callable[..., Any], args: Sequence[Any], kwargs: Any) -> Run:
    """The call as a graph with its values; `caller` is the caller for errors. Its random numbers
    are those of the next call. If `fn` reads values, the nodes that they depend on run then.

    Raises UsageError if an argument is a type, or inside a recorded function.
    """
    outside(caller)
    key = _key()

    def reader(arguments: dict[Node, InputArgument]) -> Reader:
        def read(r: Recorder, node: Node) -> Array:
            whole = r.builder.redistribute(node, node.type.replicated(), "to be read")
            graph = r.builder.graph([whole])
            known = {**arguments, **{n: t for t, n in r.captured}}
            values = [_value(caller, n, known.get(n), key) for n in graph.inputs]
            return run_graph(graph, values)[0].numpy()

        return read

    recording = record_call(caller, fn, args, kwargs, reader=reader)
    pairs = zip(recording.graph.inputs, recording.arguments, strict=True)
    values = tuple(_value(caller, n, x, key) for n, x in pairs)
    return Run(recording.graph, values, recording.names, recording.plain)


def outside(caller: str) -> None:
    """Raises UsageError inside a recorded function."""
    if current() is not None:
        raise UsageError(
            f"{caller}: a function is being recorded here, so there are no values to look at",
            fix=f"call {caller} outside of recorded functions",
        )


def _key() -> Tensor:
    saved = random.state()
    value = random.next_key()
    random.set_state(saved)
    return Tensor(engine().place(value, KEY_TYPE), KEY_TYPE)


def _value(caller: str, n: Node, x: InputArgument, key: Tensor) -> Tensor:
    if isinstance(x, TensorType):
        raise UsageError(
            f"{caller}: argument {n.attrs['name']!r} is a type, which has no values",
            type=x,
            fix="give a tensor",
        )
    return key if x is None else x


# ---- measuring ---------------------------------------------------------------------------------
def measured(run: Run, choose: Choose, measure: Measure) -> Iterator[tuple[Spot, list[Array]]]:
    """Yields (spot, measurements) in program order; bodies come before their loop's results.

    Arrays have a leading dim of iterations for each loop around the node.
    """
    with replaced(autocast=None, strict=False):
        graph, found = _added(run.graph, choose, measure, None, ())
    if not found:
        return
    outs = list(graph.outputs[len(run.graph.outputs) :])
    sources: dict[Node, Any] = {n: i for i, n in enumerate(graph.inputs)}
    rec = Recording(graph.name, graph.options, list(graph.nodes), sources)
    pieces = _pieces(found, outs)
    segments: list[Segment] = []
    for taken in pieces:
        segment = Segment()
        count = sum(n for _, n in taken)
        segment.define(rec, {}, outs[:count], segments)
        outs = outs[count:]
        segments.append(segment)
    env = {i: (t.stored, t.type) for i, t in enumerate(run.values)}
    held_arrays: dict[int, tuple[Any, TensorType]] = {}
    for taken, segment in zip(pieces, segments, strict=True):
        program = segment.program()
        inputs = [
            held_arrays[i] if i in held_arrays else env[segment.sources[i]]  # type: ignore[index]
            for i in segment.imports
        ]
        arrays = program([d for d, _ in inputs], tuple(t for _, t in inputs))
        k = len(segment.targets)
        for i, d, t in zip(segment.exports, arrays[k:], program.types[k:], strict=True):
            held_arrays[i] = d, t
        results = iter(zip(arrays[:k], program.types[:k], strict=True))
        for spot, n in taken:
            yield spot, [_fetched(*next(results), len(spot.loops)) for _ in range(n)]


def _pieces(spots: list[tuple[Spot, int]], outs: Sequence[Node]) -> list[list[tuple[Spot, int]]]:
    """The spots in pieces, each measured by one program, so that little data is returned at a
    time."""
    pieces: list[list[tuple[Spot, int]]] = []
    count = size = at = 0
    for spot, n in spots:
        here = sum(o.type.nbytes for o in outs[at : at + n])
        if not pieces or count + n > PIECE or size + here > PIECE_BYTES:
            pieces.append([])
            count = size = 0
        pieces[-1].append((spot, n))
        count, size, at = count + n, size + here, at + n
    return pieces


def _fetched(data: Any, t: TensorType, loops: int) -> Array:
    """The value on the host, with dims in the order: loops, varying axes, the value's own."""
    x: Array = local_value(Tensor(data, t))
    own = range(len(t.varying))
    return np.moveaxis(x, own, [loops + i for i in own])


def _added(
    graph: Graph, choose: Choose, measure: Measure, loop: Node | None, loops: tuple[Node, ...]
) -> tuple[Graph, list[tuple[Spot, int]]]:
    """(`graph` with the measurements as further outputs, [(spot, number of its outputs)])."""
    live = reachable(graph.outputs)
    chosen = live.intersection(choose(graph, loop))
    recorder = Recorder(graph.name, options=graph.options)
    b = recorder.builder
    b.inputs = list(graph.inputs)
    new: dict[Node, Node] = {}
    spots: list[tuple[Spot, int]] = []
    outs: list[Node] = []
    with recording(recorder):
        for n in graph.nodes:
            if n not in live and n.op != "input":
                continue
            made, inner = _copied(n, new, choose, measure, loops)
            new[n] = made
            b.nodes.append(made)
            b.loc, b.scope = n.loc, n.scope
            first = len(n.types)
            for spot, count in inner:
                spots.append((spot, count))
                outs += [b("item", made, index=first + i) for i in range(count)]
                first += count
            if n in chosen:
                results = measure(symbolic(made, recorder))
                spots.append((Spot(n, loops), len(results)))
                outs += [recorder.node(t) for t in results]
    done = (*(new[o] for o in graph.outputs), *outs)
    return replace(graph, nodes=tuple(b.nodes), outputs=done), spots


def _copied(
    n: Node, new: Mapping[Node, Node], choose: Choose, measure: Measure, loops: tuple[Node, ...]
) -> tuple[Node, list[tuple[Spot, int]]]:
    """`n` with the new arguments; a loop has the measurements of its body as further results."""
    args = tuple(new[a] for a in n.args)
    made = n.with_args(args)
    inner: list[tuple[Spot, int]] = []
    if n.op == "scan" and n.attrs["length"] is not None:  # a while loop stacks nothing
        body, inner = _added(n.attrs["body"], choose, measure, n, (*loops, n))
        if inner:
            attrs = {**n.attrs, "body": body}
            types = infer(op_named("scan"), tuple(a.type for a in args), attrs).outs
            made = replace(made, types=types, attrs=attrs)
    return made, inner


# ---- choices and measurements that several questions share --------------------------------------
def every_float(graph: Graph, loop: Node | None) -> list[Node]:
    """All float results that have elements."""
    return [n for n in results(graph) if n.type.dtype.is_float and n.type.size]


def results(graph: Graph) -> list[Node]:
    """The nodes with a single value, without those that are read through `item` nodes."""
    several = {n.args[0] for n in graph.nodes if n.op == "item"}
    return [n for n in graph.nodes if len(n.types) == 1 and n.op != "scan" and n not in several]


def as_f32(x: Tensor) -> Tensor:
    return x if x.dtype is f32 else x.to(f32)


def tidy(value: float) -> str:
    """A number with four significant digits.

    >>> tidy(0.1), tidy(3), tidy(1234567.0), tidy(float("nan"))
    ('0.1', '3', '1.235e+06', 'nan')
    """
    return f"{value:.4g}"


def run_of(caller: str, argument: str, graph: Graph, values: Any) -> Run:
    """A Run of a graph with arrays or tensors for its inputs. Raises UsageError if they do not
    fit."""
    from ..lang.record.operands import as_tensor

    if not isinstance(values, (list, tuple)) or len(values) != len(graph.inputs):
        raise UsageError(
            f"{caller}: {argument} is a graph of {len(graph.inputs)} inputs with values "
            f"{shown(values)}",
            inputs=", ".join(n.attrs["name"] for n in graph.inputs),
            fix="give one tensor per input, in a list",
        )
    arrays = []
    for n, v in zip(graph.inputs, values, strict=True):
        t = as_tensor(v)
        if t.shape != n.type.shape or t.dtype is not n.type.dtype:
            raise UsageError(
                f"{caller}: {argument} got {t.type} for its input {n.attrs['name']!r}",
                input=n.type,
                fix="give values of the shapes and dtypes that were recorded",
            )
        arrays.append(t)
    return Run(graph, tuple(arrays))


__all__ = [
    "Measure", "Run", "Spot", "as_f32", "every_float", "measured", "outside",
    "recorded", "results", "run_of", "tidy",
]  # fmt: skip
