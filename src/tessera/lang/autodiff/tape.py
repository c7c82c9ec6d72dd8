"""The tape: the history of eager tensors, and when it is freed.

Outside of recorded functions each result refers to the tensors that it was made from. A finished
`ts.grad` frees the history of its weights if they were made from an earlier gradient, that is, the
history of earlier steps. `ts.stop_gradient` frees it at once, and inside `ts.no_grad` none is kept.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any
from weakref import ref

from ..math import functions as F
from ..record.recorder import current
from ..record.tree import flatten, tree_map
from ..value.tensor import Past, Tensor, behind, method


def history(loss: Tensor, stop: Iterable[int] = ()) -> list[Tensor]:
    """Returns all tensors that `loss` was made from, each after its arguments."""
    order: list[Tensor] = []
    seen: set[int] = set()
    todo: list[tuple[Tensor, bool]] = [(loss, False)]
    while todo:
        t, ready = todo.pop()
        if ready:
            order.append(t)
            continue
        if id(t) in seen:
            continue
        seen.add(id(t))
        todo.append((t, True))
        if t._history is not None and id(t) not in stop:
            todo.extend((a, False) for a in t._history.args)
    return order


def let_go(weights: Iterable[Tensor]) -> None:
    """Frees the history of those `weights` that were made from an earlier gradient, and of tensors
    in it that were too, such as optimizer moments. If a weight is already separate from its
    history, as a parameter that was set is, the moments in that history are freed and the gradients
    are kept."""
    for w in (w if w.of is None else w.of for w in weights):
        if w._history is not None and any(
            a._history and a._history.of_gradient for a in w._history.args
        ):
            _cut(history(w))
        elif w._past is not None:
            for t in [t for r in w._past.tensors if (t := r()) is not None]:
                if t._history is not None and t._history.of_gradient and not t._history.is_gradient:
                    _cut([x for x in history(t) if not (x._history and x._history.is_gradient)])


def _cut(order: list[Tensor]) -> None:
    """Frees the history of the tensors in `order` that were made from gradients."""
    past = Past(_alive(order), False)
    for t in order:
        if t._history is not None and t._history.of_gradient:
            t._history, t._past = None, past


def constants(order: list[Tensor], wanted: set[int]) -> set[int]:
    """The ids of the tensors in `order` that are constants for gradients by `wanted`; the rule is
    that of `Changes.constants`."""
    others = {id(t) for t in order if t._history is not None and t._history.is_update} - wanted
    made = set(wanted) if others else set()
    for t in order if others else ():
        if not made.isdisjoint(map(id, behind(t))):
            made.add(id(t))
    return others if made.isdisjoint(others) else set()


def mark_as_updates(weights: Iterable[Tensor]) -> None:
    """Marks `weights` as an optimizer's updates of earlier weights."""
    recorder = current()
    for t in weights:
        if recorder is not None:
            recorder.root.changes.updates.add(recorder.node(t))
        elif t._history is not None:
            t._history = replace(t._history, is_update=True)


@method("detach")
def stop_gradient(x: Any) -> Any:
    """Returns the same value as a constant: no gradient flows through it. `x` is a tensor or a tree
    of tensors."""
    if isinstance(x, (dict, list, tuple)) and any(isinstance(t, Tensor) for t in flatten(x)[0]):
        return tree_map(lambda t: stop_gradient(t) if isinstance(t, Tensor) else t, x)
    out = F.stop_gradient(x)
    if out._history is not None:
        out._past, out._history = Past(_alive(history(out)[:-1]), True), None
    return out


Tensor.data = property(stop_gradient)  # type: ignore[assignment, method-assign]


def _alive(order: list[Tensor]) -> list[ref[Tensor]]:
    known = {id(t): ref(t) for t in order}
    for t in order:
        for r in t._past.tensors if t._past is not None else ():
            if (old := r()) is not None:
                known.setdefault(id(old), r)
    return list(known.values())
