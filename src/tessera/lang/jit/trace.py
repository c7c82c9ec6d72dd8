"""`graph.trace(model, batch)`: a function's graph, without running it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

from ...core.checks import function_of
from ...core.errors import MeshError
from ...core.layout import TensorType
from ...core.mesh import Mesh
from ...core.reshard import completed
from ...ir.graph.node import Graph, Node
from ...ops.index_string import common_mesh
from ..record.operands import as_tensor, of_floats
from ..record.recorder import NeedsLocal, Reader, Recorder, options_of_run, recording
from ..record.tree import call_paths, flatten, path_name, spec_paths, unflatten
from ..value.checks import bound, signature_of
from ..value.host_data import is_array
from ..value.tensor import Tensor
from .jit import Jit
from .schedule_options import Chosen, warn_if_unused
from .weight_store import owned_by, store_of

# The argument of an input: a tensor, only a type, or None for the random key.
InputArgument = Tensor | TensorType | None


@dataclass(frozen=True, slots=True)
class Recorded:
    """A recorded call: its graph, the argument of each of the graph's inputs, the names of its
    results, and the results that are no tensors. `piped` is True if a pipeline ran as a plain
    function in it."""

    graph: Graph
    arguments: tuple[InputArgument, ...]
    names: tuple[str, ...]
    plain: tuple[tuple[str, Any], ...]
    piped: bool


def trace(fn: Callable[..., Any], *args: Any, reduce_partial: bool = True, **kwargs: Any) -> Graph:
    """The Graph that `fn(*args, **kwargs)` records. Nothing is computed and no device is needed.

    Arguments are tensors, arrays, or types (`TensorType`) in place of tensors; the rest is static.
    A read of a value inside `fn` is an error here.
    """
    return record_call("trace", fn, args, kwargs, reduce_partial=reduce_partial).graph


def record_call(
    caller: str,
    fn: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    reduce_partial: bool = True,
    reader: Callable[[dict[Node, InputArgument]], Reader] | None = None,
) -> Recorded:
    """Records `fn(*args, **kwargs)`, in the name of `caller`. With `reduce_partial` the pending
    sums of its results are completed. `reader` gets the inputs recorded so far and returns a
    function that answers reads of values; without it a read is an error. With it floats and arrays
    of them that `fn` returns are results, too."""
    function_of(caller, "the function", fn)
    options = (fn.chosen,) if isinstance(fn, Jit) and fn.chosen is not None else ()
    local = frozenset[object]()
    with fn.in_force() if isinstance(fn, Jit) else nullcontext():
        while True:
            try:
                return _recorded(caller, fn, args, kwargs, reduce_partial, reader, options, local)
            except NeedsLocal as needs:
                local |= {needs.body}


def _need_one_mesh(caller: str, inputs: Sequence[Node]) -> None:
    """Raises MeshError if the arguments lie on several meshes, such as the weights of a pipeline on
    their stages."""
    first: dict[Mesh, Node] = {}
    for n in inputs:
        if n.type.mesh is not None:
            first.setdefault(n.type.mesh, n)
    if len(first) > 1:
        one, other, *_ = first
        where = {one: one.text_beside(other), **{m: m.text_beside(one) for m in (*first,)[1:]}}
        raise MeshError(
            f"{caller}: the arguments lie on {len(first)} meshes, and one graph lies on one",
            rows=[(n.attrs["name"], f"{n.type} on {where[m]}") for m, n in first.items()],
            fix="of a pipeline take the schedule, ts.jit(f).plan(...), or dist.place(x, mesh=...)",
        )


def _recorded(
    caller: str,
    fn: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    reduce_partial: bool,
    reader: Callable[[dict[Node, InputArgument]], Reader] | None,
    chosen: Sequence[Chosen],
    local: frozenset[object],
) -> Recorded:
    fn = getattr(fn, "fn", fn)
    bound(getattr(fn, "__name__", caller), signature_of(caller, fn), args, dict(kwargs))
    given: dict[Node, InputArgument] = {}
    read = None if reader is None else reader(given)
    name = getattr(fn, "__name__", type(fn).__name__.lower())
    recorder = Recorder(name, reader=read, options=options_of_run())
    recorder.local = local
    leaves, spec = flatten((tuple(args), dict(kwargs)))
    new = []
    for x, path in zip(leaves, call_paths(inspect.signature(fn), spec), strict=True):
        if is_array(x):
            x = as_tensor(x)
        if isinstance(x, (Tensor, TensorType)):
            kind = x.type if isinstance(x, Tensor) else x
            t = recorder.input(kind, path_name(path))
            t.name = x.name if isinstance(x, Tensor) else ""
            if t.name:
                recorder.named_inputs.append(t)
            given[recorder.node(t)] = x
            x = t
        new.append(x)
    _need_one_mesh(caller, recorder.builder.inputs)
    with recording(recorder), owned_by(store_of(fn, name)):
        new_args, new_kwargs = unflatten(spec, new)
        out = fn(*new_args, **new_kwargs)
        leaves, spec = flatten(out)
        ends = [of_floats(x, numbers=True) if read else x for x in leaves]
        named = [(path_name(p), x) for p, x in zip(spec_paths(spec), ends, strict=True)]
        outs = [recorder.node(x) for _, x in named if isinstance(x, Tensor)]
    if reduce_partial:
        whole = [completed(n.type, n.type.partial_axes) for n in outs]
        outs = [
            recorder.builder.redistribute(n, t, "for the result")
            for n, t in zip(outs, whole, strict=True)
        ]
    graph = recorder.builder.graph(outs)
    common_mesh(name, [n.type for n in graph.inputs], "input")
    common_mesh(name, [n.type for n in graph.outputs], "result")
    if not recorder.piped:
        warn_if_unused(recorder, "", *chosen)
    value_of = {**given, **{n: t for t, n in recorder.captured}}
    return Recorded(
        graph,
        tuple(value_of.get(n) for n in graph.inputs),
        tuple(name for name, x in named if isinstance(x, Tensor)),
        tuple((name, x) for name, x in named if not isinstance(x, Tensor)),
        recorder.piped,
    )
