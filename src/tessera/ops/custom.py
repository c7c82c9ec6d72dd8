"""`custom`, an op with a user-defined gradient: its value is computed elsewhere and passed through.

`custom` takes the values, the tensors that they were computed from, and residuals of the backward.
The gradient is a graph (`backward`) from residuals and gradients of the values to gradients of the
tensors. A gradient pass adds its nodes one by one, so the result can be differentiated again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..core.errors import GraphError
from ..core.layout import TensorType
from .op import Array, Attrs, Build, Call, Inferred, Op, define


def _counts(ins: int, attrs: Attrs) -> tuple[int, int]:
    """(number of values, number of tensors that get gradients); the remaining arguments are
    residuals."""
    values, body = attrs["values"], attrs["backward"]
    sources = len(body.outputs)
    if ins != sources + len(body.inputs) or not 1 <= values <= len(body.inputs):
        raise GraphError(
            f"custom: {ins} arguments do not fit {values} values, {sources} gradients and a"
            f" backward graph of {len(body.inputs)} inputs",
            fix="give the values, then one argument per gradient, then what backward reads",
        )
    return values, sources


def sources(args: Sequence[Any], attrs: Attrs) -> tuple[int, int]:
    """The range (start, end) of the arguments that get gradients."""
    values, count = _counts(len(args), attrs)
    return values, values + count


def _rule(ins: tuple[TensorType, ...], attrs: Attrs) -> Inferred:
    values, _ = _counts(len(ins), attrs)
    return Inferred(ins, ins[:values])


def _local(c: Call, *args: Array) -> Any:
    values = c.attrs["values"]
    return args[0] if values == 1 else args[:values]


def _grad(b: Build, n: Any, gs: Any) -> Sequence[Any]:
    """The nodes of the user's backward graph, applied to the gradients of the values. Values that
    it captured get no gradient here."""
    body = n.attrs["backward"]
    values, sources = _counts(len(n.args), n.attrs)
    gradients = []
    for g, t in zip(gs if isinstance(gs, list) else [gs], n.types, strict=True):
        zero = t.complete()
        gradients.append(
            g if g is not None
            else b("full", dtype=t.dtype, shape=t.shape, value=0.0, layout=zero)
        )  # fmt: skip
    env: dict[Any, Any] = {}
    for node, x in zip(body.inputs, [*n.args[values + sources :], *gradients], strict=True):
        # The graph was recorded for these layouts, and its collectives start from them.
        want = node.type if node.type.mesh is not None else node.type.on(x.type.mesh)
        env[node] = x if x.type is want else b.redistribute(x, want, "for the gradient")
    for node in body.nodes:
        if node.op != "input":
            env[node] = b(node.op, *(env[a] for a in node.args), **node.attrs)
    extras = len(n.args) - values - sources
    return [*[None] * values, *(env[o] for o in body.outputs), *[None] * extras]


custom = define(
    Op(
        "custom",
        _rule,
        _local,
        _grad,
        flops=lambda ins, outs, attrs: 0,
        varying=True,
        attrs="values backward",
        bodies=True,
        memory="view",
        invariance="body",
    )
)
