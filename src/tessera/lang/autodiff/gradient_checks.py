"""Checks of the arguments of `ts.grad`, and the layout of each gradient."""

from __future__ import annotations

from collections.abc import Sequence, Set
from typing import Any

from ...core.checks import instance, shown
from ...core.context import settings
from ...core.errors import DTypeError, GraphError, LayoutError, ShapeError, UsageError
from ...core.layout import TensorType
from ...ir.graph.node import Node
from ...passes.differentiate import reached
from ..parallel.strategy import Strategy, layout_rule
from ..record.recorder import current
from ..record.tree import Spec, aligned, path_name, spec_paths
from ..value.tensor import Tensor


def need_loss(call: str, loss: Tensor, fix: str) -> None:
    """Raises UsageError, ShapeError or DTypeError unless `loss` is a float scalar tensor."""
    instance(call, "the loss", loss, Tensor, fix)
    if loss.shape != ():
        raise ShapeError(
            f"{call}: the loss is not a scalar", loss=loss.type, fix="reduce it first: loss.mean()"
        )
    if not loss.dtype.is_float:
        raise DTypeError(
            f"{call}: the loss is not a float",
            loss=loss.type,
            fix="compute it from float tensors, without a cast to integers on the way",
        )
    if loss.dtype.is_complex:
        raise DTypeError(
            f"{call}: the loss is complex, and has no gradient",
            loss=loss.type,
            fix="take the gradient of a real number: ts.real(loss), ts.abs(loss); or use ts.vjp",
        )


def need_weights(weights: Any, leaves: Sequence[Any]) -> None:
    """Raises UsageError if none of `weights` is trained: there would be no gradient, and
    a step would change nothing."""
    if leaves:
        return
    what, fix = shown(weights), "give the model, or a dict or list of tensors that is not empty"
    if hasattr(type(weights), "trainable_parameters"):
        what = f"{type(weights).__name__}, no parameter of which is trained"
        fix = 'train some of it: model.unfreeze("head.*")'
    who = "grad: there is no weight to take a gradient by"
    raise UsageError(who, weights=what, fix=fix)


def need_current(is_current: Sequence[bool], loss: Tensor, spec: Spec) -> None:
    """Raises GraphError if an entry of `is_current` is False: the loss was computed from its old
    value, before it was set."""
    for path, known in zip(spec_paths(spec), is_current, strict=True):
        if not known:
            name = path_name(path) or "the weight"
            raise GraphError(
                f"grad: {name} was set after the loss was computed of it",
                loss=loss.type,
                fix="take all gradients of a loss before the weights are set: ts.grad(loss, model);"
                " or compute the loss again",
            )


def need_reached(
    end: Node, wrt: list[Node], loss: Tensor, leaves: list[Tensor], spec: Spec, held: Set[Node]
) -> None:
    """Raises GraphError if `end`, the loss, depends on none of the weights `wrt`: all gradients
    would be zero, surely a mistake."""
    within = reached(end, held)
    if not wrt or not within.isdisjoint(wrt):
        return
    names = [
        path_name(path).strip("0123456789.") or t.name for path, t in zip(spec_paths(spec), leaves)
    ]
    few = [name or str(t.type) for name, t in zip(names, leaves)][:5]
    others = len(leaves) - len(few)
    recorder = current()
    fix = "compute the loss from these, all in ts.jit or all outside; .item() cuts a gradient"
    captured = [] if recorder is None else recorder.captured
    outside = [t for t, n in captured if n in within]
    if any(t._history or (t._node is not None and t._node.args) for t in outside):
        fix = (
            "the loss is made of what was computed outside of the function that is recorded here:"
            " compute all of it inside; of ts.vjp, call both parts there"
        )
    if settings().no_grad:
        fix = "ts.no_grad() is in force here: leave it, or use ts.value_and_grad(fn), as that works"
    raise GraphError(
        "grad: the loss does not depend on any of the weights",
        loss=loss.type,
        weights=", ".join(few) + (f" and {others} more" if others else ""),
        fix=fix,
    )


def goals(
    leaves: list[Tensor], spec: Spec, layout: Any, reduce_partial: bool
) -> list[TensorType | None]:
    """The type of each gradient; None leaves its layout and its pending sums. Raises UsageError if
    `layout` is given with pending sums, LayoutError if it does not fit a weight."""
    if not reduce_partial and layout is not None:
        raise UsageError(
            "grad: a gradient whose sums stay pending has the layout that they leave it in",
            layout=shown(layout),
            fix="give reduce_partial=True, or leave out layout",
        )
    if not reduce_partial:
        return [None] * len(leaves)
    if layout is None:
        return [t.type.complete() for t in leaves]
    if isinstance(layout, Strategy):
        of = layout_rule(layout, "gradient")
        named = zip(spec_paths(spec), leaves, strict=True)
        return [of(path_name(path), t.type.complete()) for path, t in named]
    types = [w.type if isinstance(w, Tensor) else w for w in aligned(spec, layout)]
    for w, t, path in zip(types, leaves, spec_paths(spec), strict=True):
        if not isinstance(w, TensorType) or w.shape != t.shape:
            raise LayoutError(
                f"grad: the layout of {path_name(path)!r} is no type of its shape",
                weight=t.type,
                layout=shown(w),
                fix="give tensors or types of the weights' shapes: strategy.gradient(name, w.type)",
            )
    return [w.with_dtype(t.dtype).complete() for w, t in zip(types, leaves, strict=True)]
