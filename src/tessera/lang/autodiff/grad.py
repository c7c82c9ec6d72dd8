"""Gradients: `ts.grad`, `op.autodiff`, `graph.backward`.

In a recorded function they add nodes to its graph. Outside they differentiate the history (the
tape) of eager tensors.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, Protocol, TypeVar, overload

from ...core.context import replaced, settings
from ...core.dtypes import DType, bf16, dtype_of, f16, f32
from ...core.errors import DTypeError, GraphError, TraceWarning, UsageError, caller, lines_up
from ...core.layout import TensorType
from ...ir.graph.build import Builder
from ...ir.graph.node import Graph, Node
from ...ops.custom import custom, sources
from ...ops.redistribute import NAMES
from ...passes.differentiate import reached
from ..record.gradients import derived
from ..record.parameter import Parameter, need_trained, trained
from ..record.recorder import CALLED, Recorder, current, symbolic
from ..record.tree import Spec, flatten, path_name, paths, spec_paths, unflatten
from ..value.eager import history_entry, is_number, run_graph
from ..value.tensor import HistoryEntry, Tensor
from .gradient_checks import goals, need_current, need_loss, need_reached, need_weights
from .tape import constants, history, let_go

W = TypeVar("W")


class HasParameters(Protocol):
    """A module, for type checkers."""

    def parameters(self) -> Any: ...


@overload
def grad(
    loss: Tensor,
    weights: HasParameters | None = None,
    *,
    layout: Any = None,
    reduce_partial: bool = True,
    reduce_dtype: object = None,
) -> dict[str, Tensor]: ...
@overload
def grad(
    loss: Tensor,
    weights: W,
    *,
    layout: Any = None,
    reduce_partial: bool = True,
    reduce_dtype: object = None,
) -> W: ...
def grad(
    loss: Tensor,
    weights: Any = None,
    *,
    layout: Any = None,
    reduce_partial: bool = True,
    reduce_dtype: object = None,
) -> Any:
    """The gradient of the scalar `loss` with respect to `weights`, in the structure of `weights`.

    `weights` is a tensor, a tree of tensors, or a module (then the result is a dict by name of its
    parameters that are not frozen). Without `weights`: a dict of all named weights that the loss
    depends on. A weight that the loss does not depend on has a gradient of zeros.

    Gradients are complete sums over devices in the layout of their weights, or in `layout`: a
    strategy, or a tree like `weights` of tensors or types. A sharded optimizer therefore gets
    reduce_scatter. With `reduce_partial=False` sums over devices stay pending, for a collective
    that the user writes.

    `reduce_dtype` is the dtype in which these sums are sent, as in PyTorch's MixedPrecisionPolicy:
    each device's term is rounded to it. None sends the gradients of products as they were computed
    (bf16 inside `ts.autocast`), all others in f32. A gradient has the dtype of its weight in either
    case.

    Raises UsageError if `loss` is not a tensor, no weight is given, one is no float, or `layout` or
    `reduce_dtype` is given where sums stay pending; ShapeError if `loss` is not a scalar;
    DTypeError if it is complex or no float, or `reduce_dtype` is not f32, bf16 or f16; GraphError
    if it depends on none of the weights; LayoutError if `layout` does not fit a weight's shape.
    """
    return grad_holding(loss, weights, (), layout, reduce_partial, reduce_dtype)


def grad_holding(
    loss: Tensor,
    weights: Any,
    held: Sequence[Tensor],
    layout: Any = None,
    reduce_partial: bool = True,
    reduce_dtype: Any = None,
) -> Any:
    """`grad` with the tensors `held` as constants, even if they depend on the weights."""
    fix = "pass the scalar tensor that the model gives: ts.grad(loss, weights)"
    if hasattr(loss, "__call__"):  # noqa: B004 (a type checker knows that no tensor is callable)
        fix = "of a function: loss, gradient = ts.value_and_grad(f)(weights, ...)"
    need_loss("grad", loss, fix)
    if weights is None:
        weights = _named(loss)
    given, weights = weights, trained(weights)
    leaves, spec = flatten(weights)
    need_weights(given, leaves)
    need_trained("grad", zip(map(path_name, spec_paths(spec)), leaves, strict=True))
    for leaf, path in zip(leaves, paths(weights), strict=True):
        if not isinstance(leaf, Tensor) or not leaf.dtype.is_float:
            problem = leaf.type if isinstance(leaf, Tensor) else type(leaf).__name__
            raise UsageError(
                f"grad: weight {path_name(path)!r} is not a float tensor",
                weight=problem,
                fix="leave it out of the weights"
                if path
                else "give the model, its parameters(), or a list of tensors",
            )
    wanted = goals(leaves, spec, layout, reduce_partial)
    with replaced(reduce_dtype=_reduced_in(reduce_dtype, reduce_partial)):
        return _gradients(loss, leaves, spec, wanted, held)


def held_constant(x: Tensor, weights: Any) -> Tensor:
    """Returns `x`, or its value as a separate tensor if it depends on `weights`, so that it can be
    held constant."""
    recorder, leaves = current(), flatten(trained(weights))[0]
    if recorder is not None:
        there = reached(recorder.node(x))
        return x if there.isdisjoint(map(recorder.node, leaves)) else separate(x)
    ids = {id(t.now()) for t in leaves}
    return separate(x) if any(id(t) in ids for t in history(x)) else x


def _reduced_in(dtype: object, reduce_partial: bool) -> DType | None:
    """The dtype in which gradients are summed over devices. Raises DTypeError for another dtype,
    UsageError if the sums stay pending."""
    if dtype is None:
        return settings().reduce_dtype
    want = dtype_of(dtype)
    if want not in (f32, bf16, f16):
        raise DTypeError(
            f"grad: gradients cannot be summed in {want}", fix="give ts.f32, ts.bf16 or ts.f16"
        )
    if not reduce_partial:
        raise UsageError(
            f"grad: with reduce_partial=False no sum over devices is made, in {want} neither",
            fix="leave out reduce_dtype, and cast before your own collective",
        )
    return want


def _gradients(
    loss: Tensor,
    leaves: list[Any],
    spec: Spec,
    goals: list[TensorType | None],
    held: Sequence[Tensor],
) -> Any:
    """The gradients of `loss` by `leaves`, in the layouts `goals`."""
    recorder = current()
    if recorder is not None:
        wrt = [recorder.node(t) for t in leaves]
        frame, end = recorder.frame, recorder.node(loss)
        if cut := frame.ends(reached(end), wrt):
            raise GraphError(
                f"grad: {cut[0]}",
                loss=loss.type,
                made_at=end.loc,
                fix=cut[1],
            )
        if was := recorder.root.changes.stale_sources(end):
            ancestors = reached(end)
            is_current = [
                n in ancestors or id(t) not in was for n, t in zip(wrt, leaves, strict=True)
            ]
            need_current(is_current, loss, spec)
        changes, b = recorder.root.changes, recorder.builder
        b.constants = changes.constants(wrt, b.nodes) | {recorder.node(t) for t in held}
        try:
            if not frame.one_of_many:
                need_reached(end, wrt, loss, leaves, spec, b.constants)
            by_frame = frame.gradients(recorder, end, wrt, leaves, goals)
        finally:
            b.constants = set()
        changes.slopes.update(by_frame)
        return unflatten(spec, [symbolic(n, recorder) for n in by_frame])
    return unflatten(spec, _from_tape(loss, [t.now() for t in leaves], spec, goals, held))


def autodiff(
    loss: Tensor, weights: Any = None, *, layout: Any = None, reduce_partial: bool = False
) -> Any:
    """`ts.grad` whose sums over devices stay pending, for a collective that the user writes.

    Raises the errors of `ts.grad`.
    """
    return grad(loss, weights, layout=layout, reduce_partial=reduce_partial)


def separate(t: Tensor) -> Tensor:
    """Returns the value of `t` as a separate tensor: a gradient by it does not include other uses
    of `t`."""
    recorder = current()
    if recorder is not None:
        out = symbolic(recorder.builder("reshape", recorder.node(t), shape=t.shape), recorder)
    else:
        out = Tensor(t.stored, t.type)
        if not settings().no_grad:
            out._history = history_entry("reshape", [t.now()], {"shape": t.shape}, 0, caller())
    out.name, out.of = t.name, t
    return out


def weights_read(recorder: Recorder) -> dict[str, Tensor]:
    """The weights that the current recording has read, by name."""
    return _weights(_tensors_read(recorder))


def _tensors_read(recorder: Recorder) -> list[Tensor]:
    return [*(t for t, _ in recorder.captured), *recorder.named_inputs]


def weight_names(tensors: Iterable[Tensor]) -> dict[int, str]:
    """Returns the names of the weights among `tensors`, by id. A weight of a graph function has its
    name there; another parameter is called by its path in the outermost module that was called,
    else by its own name, else by its path in its module. Any other tensor is a weight if it has a
    name. Raises UsageError for a parameter without a name."""
    recorder = current()
    if recorder is None:
        labels, called = dict[int, str](), [m() for m in CALLED.valuerefs()]
    else:
        root = recorder.root
        labels, called = (
            root.labels,
            [*root.called_modules.values(), *root.changes.created.values()],
        )
    tensors = list(tensors)
    label_of = {id(t): t.label for t in tensors if isinstance(t, Parameter) and t.label}
    names = _paths(called) | label_of | labels
    for t in tensors:
        if id(t) in names or t.frozen or not (t.name or isinstance(t, Parameter)):
            continue
        home = None if t.home is None else t.home()
        names[id(t)] = t.name or _paths([home]).get(id(t), "")
        if not names[id(t)]:
            raise UsageError(
                "grad: a parameter has no name",
                parameter=t.type,
                fix='name it, nn.Parameter(4, 8, name="w"), or pass the weights: ts.grad(loss, w)',
            )
    counts = Counter(names[i] for i in {id(t) for t in tensors} if i in names)
    for t in tensors:  # submodules called one by one: the path in the whole module is unique
        if counts[names.get(id(t), "")] > 1 and t.name.endswith(f".{names[id(t)]}"):
            names[id(t)] = t.name
    return names


def _paths(modules: Iterable[Any]) -> dict[int, str]:
    """Returns the longest path to each parameter of `modules`, by its id."""
    names: dict[int, str] = {}
    for module in modules:
        for name, t in module.parameters().items() if hasattr(module, "parameters") else ():
            names[id(t)] = max(names.get(id(t), ""), name, key=len)
    return names


def _weights(tensors: Iterable[Tensor]) -> dict[str, Tensor]:
    """Returns the weights among `tensors` by name. Raises UsageError if two have one name, as one
    of them would be lost."""
    tensors = list(tensors)
    names, weights = weight_names(tensors), dict[str, Tensor]()
    for t in tensors:
        if id(t) in names and t.dtype.is_float and not t.frozen:
            name = names[id(t)]
            other = weights.setdefault(name, t)
            if other is not t and not _same(other, t):
                raise UsageError(
                    f"grad: two weights are called {name!r}",
                    one=other.type,
                    other=t.type,
                    fix="pass the weights: ts.grad(loss, [a.parameters(), b.parameters()]); parts"
                    " of one module have names of their own",
                )
    return weights


def _same(a: Tensor, b: Tensor) -> bool:
    """Returns whether both are one node of the recording, or hold one array."""
    recorder = current()
    if recorder is not None:
        return recorder.node(a) is recorder.node(b)
    return a.now()._data is b.now()._data


def _named(loss: Tensor) -> dict[str, Tensor]:
    """The named weights that the loss depends on, in the recording or on the tape. Raises
    UsageError if there are none."""
    recorder = current()
    if recorder is not None:
        within = reached(recorder.node(loss))
        found = _weights(t for t in _tensors_read(recorder) if recorder.node(t) in within)
    else:
        found = _weights(t if t.box is None else t.box for t in _tape_leaves(loss))
    if not found:
        raise UsageError(
            "grad: the loss reaches no named weight",
            loss=loss.type,
            fix="name them: dist.tensor(..., name=...), or pass them: ts.grad(loss, weights)",
        )
    return found


def _tape_leaves(loss: Tensor) -> list[Tensor]:
    return [t for t in history(loss) if t._history is None or t.box is not None]


def _from_tape(
    loss: Tensor,
    leaves: list[Tensor],
    spec: Spec,
    goals: list[TensorType | None],
    held: Sequence[Tensor],
) -> list[Tensor]:
    """The gradients of an eager loss. The ops on the tape from the weights to the loss become a
    graph, which is differentiated and run. The gradients go onto the tape too, for second
    derivatives."""
    wanted = {id(t) for t in leaves}
    ends = _ends(loss, wanted)
    order = history(loss, ends)
    stopped = _need_whole(loss, order, leaves, spec)
    there, boxes = set(map(id, order)), {id(t.box) for t in order if t.box is not None}
    need_current([id(t) in there or id(t.box) not in boxes for t in leaves], loss, spec)
    missing = wanted - {id(t) for t in order}
    b = _builder()
    mesh = next((t.mesh for t in order if t.mesh is not None), None)
    env: dict[int, Node] = {}
    values: list[Tensor] = []
    calls: dict[tuple[object, ...], Node] = {}
    for t in [*order, *(t for t in leaves if id(t) in missing)]:
        entry = t._history
        if entry is None or id(t) in ends or id(t) in missing or is_number(t):
            env[id(t)] = b.input(t.type.on(mesh))
            values.append(t)
            continue
        args = [env[id(a)] for a in entry.args]
        b.loc = entry.loc
        if entry.op == "redistribute":
            env[id(t)] = b.redistribute(args[0], entry.attrs["to"])
            continue
        key = (entry.op, id(entry.attrs), *map(id, entry.args))
        node = calls.get(key)
        if node is None:
            node = calls[key] = b(entry.op, *args, **entry.attrs)
        many = len(node.types) > 1 or node.kind.many
        env[id(t)] = b("item", node, index=entry.index) if many else node
    wrt = [env[id(t)] for t in leaves]
    fixed = constants(order, wanted) | set(map(id, held))
    b.constants = {node for i, node in env.items() if i in fixed}
    if not stopped:
        need_reached(env[id(loss)], wrt, loss, leaves, spec, b.constants)
    _warn_of_compiled(loss, leaves)
    found = derived(b, env[id(loss)], wrt, goals)
    graph = b.graph(found)
    results = run_graph(graph, values)
    if not settings().no_grad:
        known = {env[id(t)]: t for t in order} | dict(zip(graph.inputs, values, strict=True))
        results = _remembered(graph, known, results)
    let_go(leaves)
    return results


def _ends(loss: Tensor, wanted: set[int]) -> set[int]:
    """Returns the ids in `wanted` of tensors that depend on no other wanted tensor: the history of
    `loss` ends there."""
    behind: set[int] = set()
    for t in history(loss):
        if t._history is not None and any(
            id(a) in wanted or id(a) in behind for a in t._history.args
        ):
            behind.add(id(t))
    return wanted - behind


def _builder() -> Builder:
    """Returns a builder for the graph of eager gradients."""
    now = settings()
    b = Builder("grad", now.program, now.strict, now.ordered)
    b.reduce_dtype = now.reduce_dtype
    return b


def _need_whole(loss: Tensor, order: list[Tensor], leaves: list[Tensor], spec: Spec) -> bool:
    """Returns whether one of `leaves` is behind a `ts.stop_gradient` in `order`, the history of
    `loss`. Raises GraphError if the history between one of them and the loss was freed."""
    wanted, stopped = set(map(id, leaves)), False
    for t in order:
        if t._past is None or id(t) in wanted or not (lost := t._past.has(leaves)):
            continue
        if not t._past.stopped:
            at = next(i for i, x in enumerate(leaves) if x is lost[0])
            name = path_name(spec_paths(spec)[at]) or lost[0].name or "the weight"
            raise GraphError(
                f"grad: what leads from {name!r} to the loss was let go of, by an earlier gradient,"
                " as weights were set, or as it was moved",
                loss=loss.type,
                weight=lost[0].type,
                through=t.type,
                fix="put all of it in one function under ts.jit, which remembers; or take the"
                " gradient by the newest weights; nn.functional_call(model, w, x) sets none",
            )
        stopped = True
    return stopped


def _warn_of_compiled(loss: Tensor, leaves: list[Tensor]) -> None:
    """Gives one TraceWarning if the loss depends on results of compiled functions, through which no
    gradient flows. Functions that made one of the `leaves` are left out."""
    ends = {id(x): x for t in leaves for x in (t, t.of) if x is not None}
    mine = {x._past.by for x in ends.values() if x._past is not None}
    every: list[str] = []
    todo, visited = [loss], set(ends)
    while todo:
        t = todo.pop()
        if id(t) in visited:
            continue
        visited.add(id(t))
        if t._history is not None:
            args, attrs = t._history.args, t._history.attrs
            todo += args if t._history.op != custom.name else args[slice(*sources(args, attrs))]
        elif t._past is not None:
            every.append(t._past.by)
    if names := [n for n in dict.fromkeys(every) if n and n not in mine]:
        warnings.warn(
            f"grad: the loss is made of results of {', '.join(names)}, which is compiled: no"
            " gradient flows through what runs as a program of its own\n  put all of it into one"
            " function, under ts.jit or ts.value_and_grad; or say that they are constants:"
            " ts.stop_gradient(y)",
            TraceWarning,
            stacklevel=lines_up(),
        )


def _remembered(graph: Graph, tensor_of: dict[Node, Tensor], results: list[Tensor]) -> list[Tensor]:
    """Records on the tape how `graph` made `results`, so that they can be differentiated again.
    `tensor_of` maps nodes to tensors; intermediate tensors have a type and no data."""
    recorded = set(tensor_of)
    for n in graph.nodes:
        if n in recorded:
            continue
        source, index = (n.args[0], n.attrs["index"]) if n.op == "item" else (n, 0)
        moved = n.op in NAMES
        entry = HistoryEntry(
            "redistribute" if moved else source.op,
            tuple([tensor_of[a] for a in source.args]),
            {"to": n.type} if moved else source.attrs,  # type: ignore[arg-type]
            index,
            n.loc,
        )
        if len(n.types) == 1:
            tensor_of[n] = Tensor(None, n.type)
            tensor_of[n]._history = entry
    for node, t in zip(graph.outputs, results, strict=True):
        how = tensor_of[node]._history
        if how is None or node in recorded:  # the gradient is one of the known tensors itself
            how = HistoryEntry("save_for_backward", (tensor_of[node],), {}, 0, "")
        t._history = replace(how, of_gradient=True, is_gradient=True)
    return results
