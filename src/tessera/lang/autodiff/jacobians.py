"""All derivatives of a function: `linearize`, `jacfwd`, `jacrev`, `hessian`.

A function is recorded with its derivative along tangents (or the gradient from cotangents). The
nodes that do not depend on these are computed once; the others are one op, which `ts.vmap` applies
to all unit vectors at once.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec

from ...core.checks import unfit
from ...core.errors import DTypeError, UsageError
from ...core.tracebacks import boundary
from ...ir.graph.node import Graph, Node, reachable
from ..math.functions import eye, reshape, zeros
from ..record.operands import emit_many
from ..record.recorder import Recorder, current, recording
from ..record.tree import Spec, fitted, flatten, unflatten
from ..value.checks import asked_function
from ..value.tensor import Tensor
from .custom import places_of, pulled_back, tensors, under_no_grad
from .forward import jvp
from .iteration import iteration_keys
from .vmap import vmap

P = ParamSpec("P")
Linear = Callable[[Sequence[Tensor]], list[Tensor]]
# Returns the inputs of the linear part, the results that do not depend on them, and those that do.
Build = Callable[[Recorder], tuple[list[Tensor], list[Tensor], list[Tensor]]]


def linearize(fn: Callable[..., Any], *primals: Any) -> tuple[Any, Callable[..., Any]]:
    """(`fn(*primals)`, its derivative there), as `jax.linearize`.

    The derivative is a function of tangents like the primals; it returns what `ts.jvp` does, and
    computes `fn` no second time. Raises UsageError if the value holds anything but float tensors,
    or `fn` shows a value; GraphError if it depends on none of the primals; ShapeError in the
    derivative if the tangents are not like the primals.

    >>> import tessera as ts
    >>> y, slope = ts.linearize(ts.sin, ts.tensor([0.0, 1.0]))
    >>> slope(ts.tensor([2.0, 0.0])).numpy().tolist()
    [2.0, 0.0]
    """
    fn = asked_function("linearize", "the function", fn)
    xs, spec = flatten(tensors(primals))
    value, linear, out_spec = _derivative("linearize", fn, xs, spec)

    @boundary
    def slope(*tangents: Any) -> Any:
        moved, moved_spec = flatten(tensors(tangents))
        moved = fitted(
            "linearize: the tangents are not like the primals", ("primals", "tangents"),
            spec, xs, moved_spec, moved,
            "give a tensor like each of the primals, in the same structure", dtypes=False,
        )  # fmt: skip
        return unflatten(out_spec, linear([t.to(x.dtype) for t, x in zip(moved, xs)]))

    return unflatten(out_spec, value), slope


def jacfwd(fn: Callable[P, Any], argnums: int | Sequence[int] = 0) -> Callable[P, Any]:
    """A function that returns all derivatives of `fn` by an argument, as `jax.jacfwd`.

    The argument at `argnums` is a float tensor or a tree of them; for several positions there is a
    tuple. For a value [m] and an argument [n] the result is [m, n]; for trees it has the structure
    of the value, with one of the argument in place of each tensor. One derivative along each
    element of the argument is computed, all at once: for few arguments and many values. Raises
    UsageError if there is no such argument, DTypeError if it is no float or complex, and the errors
    of `ts.linearize`.

    >>> import tessera as ts
    >>> ts.jacfwd(lambda x: x**2)(ts.tensor([1.0, 3.0])).numpy().tolist()
    [[2.0, 0.0], [0.0, 6.0]]
    """
    return _jacobian("jacfwd", fn, argnums, _forward)


def jacrev(fn: Callable[P, Any], argnums: int | Sequence[int] = 0) -> Callable[P, Any]:
    """A function that returns all derivatives of `fn` by an argument, as `jax.jacrev`.

    The result is that of `ts.jacfwd`. One gradient of each element of the value is computed, all at
    once: for many arguments and few values. Arguments may be complex. Raises UsageError if there is
    no such argument, DTypeError if it is no float or the value is complex, and the errors of
    `ts.vjp`.

    >>> import tessera as ts
    >>> ts.jacrev(lambda x: ts.sum(x**2))(ts.tensor([1.0, 3.0])).numpy().tolist()
    [2.0, 6.0]
    """
    return _jacobian("jacrev", fn, argnums, _reverse)


def hessian(fn: Callable[P, Any], argnums: int | Sequence[int] = 0) -> Callable[P, Any]:
    """A function that returns all second derivatives of `fn` by an argument, as `jax.hessian`.

    For a scalar value and an argument [n] the result is [n, n]; other structures are those of
    `ts.jacrev` applied twice. Raises the errors of `ts.jacrev`.

    >>> import tessera as ts
    >>> ts.hessian(lambda x: x[0] * x[1] ** 2)(ts.tensor([1.0, 3.0])).numpy().tolist()
    [[0.0, 6.0], [6.0, 2.0]]
    """
    return _jacobian("hessian", jacrev(fn, argnums), argnums, _reverse)


Rows = Callable[[str, Callable[..., Any], list[Tensor], Spec], Any]


def _jacobian(
    caller: str, fn: Callable[..., Any], argnums: int | Sequence[int], rows: Rows
) -> Callable[..., Any]:
    fn = asked_function(caller, "the function", fn)
    places, several = places_of(caller, argnums)

    @boundary
    @functools.wraps(fn)
    @under_no_grad
    def run(*args: Any, **kwargs: Any) -> Any:
        if max(places) >= len(args) or min(places) < -len(args):
            fix = "its derivatives are by arguments that are given by place"
            raise unfit(caller, "the number of arguments by place", len(args), fix)
        at = [n % len(args) for n in places]

        def of(*chosen: Any) -> Any:
            given = dict(zip(at, chosen, strict=True))
            return fn(*(given.get(i, x) for i, x in enumerate(args)), **kwargs)

        by = tensors(tuple(args[n] for n in at))
        xs, spec = flatten(by)
        for x in xs:
            if not x.dtype.is_float:
                raise DTypeError(
                    f"{caller}: an argument is no float tensor",
                    argument=x.type,
                    fix="cast it with .to(ts.f32), or leave it out of argnums",
                )
        out_spec, parts = rows(caller, of, xs, spec)
        inner = [unflatten(spec, row) for row in parts]
        return unflatten(out_spec, inner if several else [row[0] for row in inner])

    return run


def _forward(
    caller: str, fn: Callable[..., Any], xs: list[Tensor], spec: Spec
) -> tuple[Spec, list[list[Tensor]]]:
    """(The structure of the value, the derivatives of each tensor in it by each of `xs`)."""
    value, linear, out_spec = _derivative(caller, fn, xs, spec)
    columns = []
    for i, x in enumerate(xs):

        def along(t: Tensor, i: int = i) -> list[Tensor]:
            return linear([t if k == i else zeros(y.shape, y.dtype) for k, y in enumerate(xs)])

        found = vmap(along, out_dims=-1)(_units(caller, "an argument", x))
        columns.append([reshape(t, (*y.shape, *x.shape)) for t, y in zip(found, value)])
    return out_spec, [list(row) for row in zip(*columns, strict=True)]


def _reverse(
    caller: str, fn: Callable[..., Any], xs: list[Tensor], spec: Spec
) -> tuple[Spec, list[list[Tensor]]]:
    """As `_forward`, by gradients."""
    specs: list[Spec] = []

    def build(r: Recorder) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        value, pull = pulled_back(caller, fn, unflatten(spec, xs))
        outs, out_spec = flatten(value)
        specs.append(out_spec)
        gs = [r.input(t.type.complete(), f"g{i}") for i, t in enumerate(outs)]
        return gs, outs, flatten(pull(unflatten(out_spec, gs)))[0]

    value, linear = _split(caller, build)
    rows = []
    for i, y in enumerate(value):

        def back(g: Tensor, i: int = i) -> list[Tensor]:
            return linear([g if k == i else zeros(t.shape, t.dtype) for k, t in enumerate(value)])

        found = vmap(back)(_units(caller, "a value", y))
        rows.append([reshape(t, (*y.shape, *x.shape)) for t, x in zip(found, xs)])
    return specs[0], rows


def _units(caller: str, what: str, x: Tensor) -> Tensor:
    """The unit vectors of the space of `x`: [n, *shape]. Raises DTypeError if it is complex: a
    derivative by its real part says nothing of one by its imaginary part."""
    if x.dtype.is_complex:
        raise DTypeError(
            f"{caller}: {what} is complex",
            rows=[(what.split()[1], x.type)],
            fix="take the real and the imaginary part apart; or use ts.jvp, ts.vjp",
        )
    return reshape(eye(x.size, dtype=x.dtype), (x.size, *x.shape))


def _derivative(
    caller: str, fn: Callable[..., Any], xs: list[Tensor], spec: Spec
) -> tuple[list[Tensor], Linear, Spec]:
    """(The value of `fn` as a list, its derivative as a function of tangents, the structure)."""
    specs: list[Spec] = []

    def build(r: Recorder) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        moved = [r.input(x.type.complete(), f"t{i}") for i, x in enumerate(xs)]
        value, slopes = jvp(fn, unflatten(spec, xs), unflatten(spec, moved))
        outs, out_spec = flatten(value)
        specs.append(out_spec)
        return moved, outs, flatten(slopes)[0]

    value, linear = _split(caller, build)
    return value, linear, specs[0]


def _split(caller: str, build: Build) -> tuple[list[Tensor], Linear]:
    """(The results that do not depend on the inputs of the linear part, the linear part)."""
    r = Recorder(caller, current())
    r.draws = []
    with recording(r):
        inputs, outs, results = build(r)
        moved, ends, linear_ends = ([r.node(t) for t in part] for part in (inputs, outs, results))
    if r.host_outputs:
        raise UsageError(
            f"{caller}: the function shows or records a value",
            fix="return it, and show what the transformed function gives",
        )
    whole_graph = r.builder.graph([*ends, *linear_ends])
    ends, linear_ends = (
        list(whole_graph.outputs[: len(ends)]), list(whole_graph.outputs[len(ends) :])
    )  # fmt: skip
    late = _dependents(whole_graph, set(moved))
    read = {a for n in reachable(linear_ends) & late for a in n.args} | {*linear_ends}
    kept = [n for n in whole_graph.nodes if n in read and n not in late]
    draws = [r.node(k) for k in r.draws]
    keys = [reshape(k, k.shape[1:]) for k in iteration_keys(1, r.draws)]
    consts = [node for _, node in r.captured]
    args = [*(t for t, _ in r.captured), *keys]
    first = whole_graph.part([*consts, *draws], [*ends, *kept])
    found = _called(first, args)
    value, known = found[: len(ends)], found[len(ends) :]
    second = whole_graph.part([*kept, *moved], linear_ends)
    return value, lambda given: _called(second, [*known, *given])


def _dependents(graph: Graph, sources: set[Node]) -> set[Node]:
    found = set(sources)
    for n in graph.nodes:
        if any(a in found for a in n.args):
            found.add(n)
    return found


def _called(graph: Graph, args: Sequence[Tensor]) -> list[Tensor]:
    """The results of `graph` for `args`, as a region."""
    if not graph.outputs:
        return []
    rows = emit_many(
        "scan", *args, body=graph, consts=len(args), carries=0, length=1, reverse=False,
        policy="save",
    )  # fmt: skip
    return [reshape(t, t.shape[1:]) for t in rows]
