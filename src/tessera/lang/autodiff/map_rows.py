"""`map`: a function of one row, applied row by row or in batches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from ...core.declared import Count
from ..math.functions import concat, reshape
from ..math.shape import sliced
from ..record.operands import as_tensor
from ..record.tree import flatten, tree_map, unflatten
from ..value.checks import asked_function
from ..value.tensor import Tensor
from .iteration import Policy, length_of
from .scan import scan
from .vmap import vmap

X = TypeVar("X")
Y = TypeVar("Y")


def map(
    fn: Callable[[X], Y], xs: X, *, batch_size: Count | None = None, policy: Policy = "save"
) -> Y:
    """`fn` of each slice of `xs` along dim 0, one after the other, as `jax.lax.map`.

    `xs` and the results are trees of tensors; results are stacked along a new dim 0. With
    `batch_size` so many slices are computed at once, by `ts.vmap`; a last batch may be smaller.
    `policy` is that of `ts.scan`. For all slices at once there is `ts.vmap`. Raises ShapeError if
    the tensors of `xs` differ in length, and the errors of `ts.scan` and `ts.vmap`.

    >>> import tessera as ts
    >>> ts.map(lambda r: ts.sum(r * r), ts.tensor([[1.0, 2.0], [3.0, 4.0]])).numpy().tolist()
    [5.0, 25.0]
    """
    fn = asked_function("map", "the function", fn)
    if batch_size is None:
        return scan(lambda _, x: ((), fn(x)), (), xs, policy=policy, name="map")[1]
    leaves, spec = flatten(xs)
    rows = [as_tensor(t) for t in leaves]
    count = length_of("map", rows)
    size = min(batch_size, max(count, 1))
    inside = count - count % size
    every = vmap(fn)
    parts: list[Any] = []
    if inside:
        head = [_rows(t, 0, inside) for t in rows]
        blocks = [reshape(t, (inside // size, size, *t.shape[1:])) for t in head]
        tree = unflatten(spec, blocks)
        ys = scan(lambda _, x: ((), every(x)), (), tree, policy=policy, name="map")[1]
        parts.append(tree_map(lambda y: reshape(y, (inside, *y.shape[2:])), ys))
    if inside < count or not count:
        parts.append(every(unflatten(spec, [_rows(t, inside, count) for t in rows])))
    if len(parts) == 1:
        return parts[0]  # type: ignore[no-any-return]
    (heads, y_spec), (tails, _) = flatten(parts[0]), flatten(parts[1])
    return unflatten(y_spec, [concat([a, b], 0) for a, b in zip(heads, tails, strict=True)])  # type: ignore[no-any-return]


def _rows(t: Tensor, first: int, last: int) -> Tensor:
    return t if last - first == t.shape[0] else sliced(t, {0: (first, last, 1)})
