"""`ts.vmap`: a function of one row, applied to many rows at once.

The function is recorded for one row. Each of its ops is then applied to all rows together: an op
defines its form with one more leading dim (`Op.batched`). An op without such a form runs row by
row, in a loop. Changes of layout are dropped, as they change no value, and the layouts for all rows
are derived anew. In a local body they change values, so they are kept.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, ParamSpec, TypeVar

from ...core.checks import shown
from ...core.errors import ShapeError, UsageError
from ...core.reshard import gathered
from ...core.tracebacks import boundary
from ...core.value_checks import is_whole
from ...ir.graph.node import Graph, Node
from ...ops.control import item
from ...ops.local import reinterpret
from ...ops.redistribute import NAMES
from ..math.functions import broadcast_to, permute, relayout, reshape
from ..record.operands import as_tensor, emit, emit_many
from ..record.recorder import Recorder, current, recording, symbolic
from ..record.tree import flatten, unflatten
from ..value.checks import asked_function
from ..value.host_data import is_array
from ..value.tensor import Tensor
from .scan import scan
from .vmap_bodies import Rows, of_rows

P = ParamSpec("P")
R = TypeVar("R")


def vmap(fn: Callable[P, R], in_dims: Any = 0, out_dims: Any = 0) -> Callable[P, R]:
    """A function that applies `fn` to each slice of its arguments, all at once, and stacks results.

    `in_dims` is the dim along which the tensors of each positional argument are sliced: a number
    for all, or a tuple with a number, None (whole for each) or a tree of them for each argument.
    Arguments by name are whole for each. `out_dims` does the same for the results: the dim along
    which they are stacked, or None for a result that is the same for all. As in `torch.func.vmap`;
    gradients by `ts.grad` inside are those of each slice.

    Raises ShapeError if the dims do not exist or differ in size; UsageError if no argument is
    sliced, `in_dims` or `out_dims` do not fit, or `fn` draws random numbers, reads a value or sets
    the state of a module.

    >>> import tessera as ts
    >>> x, w = ts.tensor([[1.0, 2.0], [3.0, 4.0]]), ts.tensor([1.0, 10.0])
    >>> ts.vmap(lambda row: ts.sum(row * w))(x).numpy().tolist()
    [21.0, 43.0]
    >>> slopes = ts.vmap(lambda row, w: ts.grad(ts.sum(row * w) ** 2, w), in_dims=(0, None))
    >>> slopes(x, w).numpy().tolist()  # the gradient of w by each row alone
    [[42.0, 84.0], [258.0, 344.0]]
    """
    fn = asked_function("vmap", "the function", fn)

    @boundary
    @functools.wraps(fn)
    def run(*args: Any, **kwargs: Any) -> Any:
        leaves, spec = flatten(args)
        every = _spread("in_dims", tuple(in_dims) if isinstance(in_dims, list) else in_dims, args)
        given = [_with_rows_first(x, d) for x, d in zip(leaves, every, strict=True)]
        return _of_rows(fn, spec, given, kwargs, out_dims)

    return run


def _spread(label: str, dims: Any, tree: Any) -> list[int | None]:
    """Returns the dim of each leaf of `tree`; `dims` is a tree like it, or a prefix of it."""
    if dims is None or is_whole(dims):
        return [dims] * len(flatten(tree)[0])
    parts = _below(dims, tree)
    if parts is None:
        raise UsageError(
            f"vmap: {label} does not fit what it is about",
            rows=[(label, shown(dims)), ("about", shown(tree))],
            fix="give a number, None, or as many of them as there are arguments or results",
        )
    return [d for part, below in parts for d in _spread(label, part, below)]


def _below(dims: Any, tree: Any) -> list[tuple[Any, Any]] | None:
    if isinstance(dims, (tuple, list)) and isinstance(tree, (tuple, list)):
        return list(zip(dims, tree, strict=True)) if len(dims) == len(tree) else None
    if isinstance(dims, Mapping) and isinstance(tree, Mapping) and dims.keys() == tree.keys():
        return [(dims[k], tree[k]) for k in tree]
    return None


def _with_rows_first(x: Any, dim: int | None) -> Any:
    """Returns (a leaf with the dim of rows in front, whether it has one)."""
    if dim is None or isinstance(x, (str, bytes)):
        return as_tensor(x) if is_array(x) else x, False
    t = as_tensor(x)
    if not -t.ndim <= dim < t.ndim:
        raise ShapeError(
            f"vmap: there is no dim {dim} to take apart",
            x=t.type,
            fix="give in_dims with None for an argument that is whole for each row",
        )
    d = dim % t.ndim
    t = relayout(t, t.type.complete())
    return (t if d == 0 else permute(t, d, *(i for i in range(t.ndim) if i != d))), True


def _count(leaves: Sequence[tuple[Any, bool]]) -> int:
    sizes: list[int] = [x.shape[0] for x, rows in leaves if rows]
    if len(set(sizes)) == 1:
        return sizes[0]
    if not sizes:
        raise UsageError(
            "vmap: no argument is taken apart",
            fix="give in_dims with a number for at least one argument",
        )
    raise ShapeError(
        f"vmap: the dims that are taken apart have {', '.join(map(str, sizes))} rows",
        rows=[(f"x{i}", x.type) for i, (x, rows) in enumerate(leaves) if rows],
        fix="give as many of each, or None in in_dims for what is whole for each row",
    )


def _of_rows(
    fn: Callable[..., Any],
    spec: Any,
    leaves_in: list[Any],
    kwargs: Any,
    out_dims: Any,
) -> Any:
    rows = _count(leaves_in)
    around = current()
    r = Recorder(f"vmap_{getattr(fn, '__name__', 'function')}", around)
    r.draws, r.of_row = [], True
    inputs: list[Tensor] = []
    with recording(r):
        leaves = []
        for x, taken in leaves_in:
            if taken:
                x = r.input(x.type.with_dims(x.type.dims[1:]), f"row{len(inputs)}")
                inputs.append(x)
            leaves.append(x)
        out_leaves, out_spec = flatten(fn(*unflatten(spec, leaves), **kwargs))
        _need_pure(r)
        outs = [r.node(as_tensor(t)) for t in out_leaves]
        graph = r.builder.graph(outs)
    values_of: dict[Node, list[Rows]] = {node: [(t, False)] for t, node in r.captured}
    taken_apart = (x for x, taken in leaves_in if taken)
    values_of.update({r_node: [(x, True)] for r_node, x in zip(map(r.node, inputs), taken_apart)})
    _applied(graph, values_of, rows)
    results = [values_of[n][0] for n in graph.outputs]
    dims = _spread("out_dims", out_dims, unflatten(out_spec, [t for t, _ in results]))
    stacked = [_put_back(t, has, d, rows) for (t, has), d in zip(results, dims, strict=True)]
    return unflatten(out_spec, stacked)


def _need_pure(r: Recorder) -> None:
    for wrong, what, fix in (
        (r.draws or r.key, "draws random numbers", "draw them for all rows outside, and pass them"),
        (r.host_outputs, "shows or records a value", "return it, and show what vmap gives back"),
    ):
        if wrong:
            raise UsageError(f"vmap: the function {what}", fix=fix)


def _applied(graph: Graph, values_of: dict[Node, list[Rows]], rows: int) -> None:
    """Fills `values_of` with the values of each node of `graph` for all rows."""
    local = any(n.op == reinterpret.name for n in graph.nodes)  # else layouts change no value
    recorder = current()
    for n in graph.nodes:
        if n not in values_of:
            with recorder.builder.at(n.loc, n.scope) if recorder is not None else nullcontext():
                values_of[n] = _of_node(n, [values_of[a] for a in n.args], rows, local)


def _of_graph(graph: Graph, given: Sequence[Rows], rows: int) -> list[Rows]:
    """The results of `graph`, the body of a loop or branch, for all rows."""
    values_of = {n: [x] for n, x in zip(graph.inputs, given, strict=True)}
    _applied(graph, values_of, rows)
    return [values_of[n][0] for n in graph.outputs]


def _of_node(n: Node, arg_values: list[list[Rows]], rows: int, local: bool) -> list[Rows]:
    if n.op == item.name:
        return [arg_values[0][n.attrs["index"]]]
    args = [values[0] for values in arg_values]
    if n.op in NAMES or n.op == reinterpret.name:
        return [_laid(n, *args[0])] if local else args
    if any(has for _, has in args):
        found = of_rows(n, args, rows, lambda graph, given: _of_graph(graph, given, rows))
        return found or [(t, True) for t in _node_of_rows(n, args, rows)]
    return [(t, False) for t in emit_many(n.op, *(t for t, _ in args), **n.attrs)]


def _laid(n: Node, t: Tensor, has: bool) -> Rows:
    """Applies a change of layout, or of the meaning as local blocks, for all rows."""
    type_before, to = n.args[0].type, n.type
    if has:
        used = {*type_before.split_axes, *type_before.partial_axes, *type_before.varying}
        used |= {*to.split_axes, *to.partial_axes, *to.varying}
        line = [a for f in t.type.dims[0] for a in f.axes if a in used]
        t = relayout(t, gathered(t.type, line)) if line else t
        type_before, to = ((x.with_dims((t.type.dims[0], *x.dims))) for x in (type_before, to))
    recorder = current()
    if recorder is None:
        t = relayout(t, to if n.op != reinterpret.name else type_before)
        return emit("reinterpret", t, layout=to) if n.op == reinterpret.name else t, has
    b = recorder.builder
    node = t._node if t._trace is recorder else recorder.node(t)  # own nodes skip `frame.part`
    assert node is not None
    if n.op == reinterpret.name:
        return symbolic(
            b("reinterpret", b.redistribute(node, type_before), layout=to), recorder
        ), has
    return symbolic(b.redistribute(node, to), recorder), has


def _node_of_rows(n: Node, args: list[Rows], rows: int) -> list[Tensor]:
    ins, which = tuple(a.type for a in n.args), tuple(has for _, has in args)
    how = n.kind.batched(n.attrs, which, ins, rows)
    if how is None and not all(which):
        args = [(t if has else broadcast_to(t, (rows, *t.shape)), True) for t, has in args]
        which = (True,) * len(args)
        how = n.kind.batched(n.attrs, which, ins, rows)
    if how is None:
        return _row_by_row(n, args)
    values = []
    for t, has in args:
        if has and how.rank is not None and t.ndim - 1 < how.rank:
            t = reshape(t, (rows, *(1,) * (how.rank - t.ndim + 1), *t.shape[1:]))
        values.append(t)
    made = emit_many(n.op, *values, **how.attrs)
    if how.out:
        made = [permute(t, how.out, *(i for i in range(t.ndim) if i != how.out)) for t in made]
    return made


def _row_by_row(n: Node, args: list[Rows]) -> list[Tensor]:
    def body(nothing: Any, row: Any) -> tuple[Any, tuple[Tensor, ...]]:
        own = iter(row)
        now = [next(own) if has else t for t, has in args]
        return (), tuple(emit_many(n.op, *now, **n.attrs))

    _, ys = scan(body, (), tuple(t for t, has in args if has), name="vmap")
    return list(ys)


def _put_back(t: Tensor, has: bool, dim: int | None, rows: int) -> Tensor:
    if dim is None:
        if has:
            raise UsageError(
                "vmap: a result differs between rows, and out_dims says None",
                result=t.type,
                fix="give the dim along which to stack it",
            )
        return t
    t = t if has else broadcast_to(t, (rows, *t.shape))
    if not -t.ndim <= dim < t.ndim:
        raise ShapeError(
            f"vmap: out_dims {dim} is not a dim of a result",
            result=t.type,
            fix=f"dims are {-t.ndim} to {t.ndim - 1}",
        )
    other_dims = list(range(1, t.ndim))
    other_dims.insert(dim % t.ndim, 0)
    return t if other_dims == list(range(t.ndim)) else permute(t, *other_dims)
