"""How long does a tensor remember how it was made? As long as a gradient could be asked for.

Outside of recorded functions each result holds what it was made of, and so all that came before.
A finished `ts.grad` lets go of that for the weights that it was by, where they were made of an
earlier gradient: of the steps before, that is. `ts.stop_gradient` does so at once, and inside
`ts.no_grad` nothing is remembered.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any
from weakref import ref

from . import functions as F
from .record import current
from .tensor import Past, Tensor, behind, method
from .tree import flatten, tree_map


def history(loss: Tensor, stop: Iterable[int] = ()) -> list[Tensor]:
    """All tensors that `loss` was made from, each after its arguments."""
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
        if t._made is not None and id(t) not in stop:
            todo.extend((a, False) for a in t._made.args)
    return order


def let_go(weights: Iterable[Tensor]) -> None:
    """Ends the past of those `weights` that were made of an earlier gradient, and of what they were
    made of that was, too, such as moments. Where a weight is cut from what it was made of, as a
    parameter that was set is, the moments behind the cut go, and the gradients there stay."""
    for w in (w if w.of is None else w.of for w in weights):
        if w._made is not None and any(a._made and a._made.of_gradient for a in w._made.args):
            _cut(history(w))
        elif w._past is not None:
            for t in [t for r in w._past.tensors if (t := r()) is not None]:
                if t._made is not None and t._made.of_gradient and not t._made.is_gradient:
                    _cut([x for x in history(t) if not (x._made and x._made.is_gradient)])


def _cut(order: list[Tensor]) -> None:
    """Ends the past of those of `order`, each after its arguments, that were made of gradients."""
    past = Past(_alive(order), False)
    for t in order:
        if t._made is not None and t._made.of_gradient:
            t._made, t._past = None, past


def constants(order: list[Tensor], wanted: set[int]) -> set[int]:
    """The ids of those of `order` that are constants to gradients by `wanted`, as
    `Changes.constants` says."""
    others = {id(t) for t in order if t._made is not None and t._made.is_update} - wanted
    made = set(wanted) if others else set()
    for t in order if others else ():
        if not made.isdisjoint(map(id, behind(t))):
            made.add(id(t))
    return others if made.isdisjoint(others) else set()


def known_as_updates(weights: Iterable[Tensor]) -> None:
    """Notes that an optimizer made these of the weights before."""
    recorder = current()
    for t in weights:
        if recorder is not None:
            recorder.root.changes.updates.add(recorder.node(t))
        elif t._made is not None:
            t._made = replace(t._made, is_update=True)


@method("detach")
def stop_gradient(x: Any) -> Any:
    """The same value as a constant: no gradient flows through it. `x` is a tensor or a tree of
    tensors."""
    if isinstance(x, (dict, list, tuple)) and any(isinstance(t, Tensor) for t in flatten(x)[0]):
        return tree_map(lambda t: stop_gradient(t) if isinstance(t, Tensor) else t, x)
    out = F.stop_gradient(x)
    if out._made is not None:
        out._past, out._made = Past(_alive(history(out)[:-1]), True), None
    return out


Tensor.data = property(stop_gradient)  # type: ignore[assignment, method-assign]


def _alive(order: list[Tensor]) -> list[ref[Tensor]]:
    known = {id(t): ref(t) for t in order}
    for t in order:
        for r in t._past.tensors if t._past is not None else ():
            if (old := r()) is not None:
                known.setdefault(id(old), r)
    return list(known.values())
