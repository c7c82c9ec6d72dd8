"""`associative_scan`: all prefixes of an associative operation, in a logarithmic number of steps.

Along a dim that is split, each device scans its own part; then the totals of the parts are scanned,
and each device combines its part with the total of those before it. So only totals are sent.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from ...core.declared import Flag
from ...core.errors import ShapeError
from ...core.layout import TensorType, dim_axes, without
from ..math.functions import arange, broadcast_to, concat, flip, relayout, reshape, stack, where
from ..math.shape import one_dim, sliced
from ..record.operands import as_tensor
from ..record.tree import fitted, flatten, unflatten
from ..value.checks import asked_function
from ..value.tensor import Tensor

Parts = list[Tensor]
Combine = Callable[[Parts, Parts], Parts]


def associative_scan(
    fn: Callable[[Any, Any], Any], elems: Any, reverse: Flag = False, dim: int = 0
) -> Any:
    """All prefixes of `elems` along `dim`, combined by `fn`, as `jax.lax.associative_scan`.

    `elems` is a tree of tensors of equal size along `dim`; the result is like it, and its element i
    is `fn(... fn(elems[0], elems[1]) ..., elems[i])`. `fn(a, b)` takes two trees like `elems`,
    which have some elements along `dim`, and combines them element by element; it must be
    associative. With `reverse` the elements are combined from the last to the first.

    Raises ShapeError if the sizes differ, or `fn` returns another structure, shape or dtype.

    >>> import tessera as ts
    >>> ts.associative_scan(ts.maximum, ts.tensor([1, 4, 2, 6, 3])).numpy().tolist()
    [1, 4, 4, 6, 6]
    """
    fn = asked_function("associative_scan", "the function", fn)
    leaves, spec = flatten(elems)
    xs = [as_tensor(t) for t in leaves]
    dims = [one_dim("associative_scan", t, dim) for t in xs]
    if len({t.shape[d] for t, d in zip(xs, dims, strict=True)}) != 1 or len({*dims}) != 1:
        raise ShapeError(
            "associative_scan: the tensors differ in size along the dim",
            rows=[(f"x{i}", t.type) for i, t in enumerate(xs)],
            fix="give at least one tensor, and tensors of one size",
        )
    d = dims[0]

    def combine(a: Parts, b: Parts) -> Parts:
        found, found_spec = flatten(fn(unflatten(spec, a), unflatten(spec, b)))
        return fitted(
            "associative_scan: the function changes the structure, a shape or a dtype",
            ("takes", "returns"), spec, b, found_spec, [as_tensor(t) for t in found],
            "return values like those that came in",
        )  # fmt: skip

    xs = [relayout(t, t.type.complete()) for t in xs]
    xs = [flip(t, d) for t in xs] if reverse else xs
    out = _scanned(combine, xs, d)
    return unflatten(spec, [flip(t, d) for t in out] if reverse else out)


def _scanned(combine: Combine, xs: Parts, d: int) -> Parts:
    devices = max((_devices(t.type, d) for t in xs), default=1)
    if devices == 1:
        return _prefixes(combine, [_whole(t, d) for t in xs], d)
    lead = next(t for t in xs if _devices(t.type, d) == devices)
    xs = [_alike(t, lead.type, d) for t in xs]
    shapes = [t.shape for t in xs]
    each = lead.shape[d] // devices
    parts = [reshape(t, (*s[:d], devices, each, *s[d + 1 :])) for t, s in zip(xs, shapes)]

    def in_parts(a: Parts, b: Parts) -> Parts:
        """`combine` of values as the user has them: the devices' parts are one dim."""
        found = combine(*(
            [reshape(t, (*t.shape[:d], devices * t.shape[d + 1], *t.shape[d + 2 :])) for t in ts]
            for ts in (a, b)
        ))  # fmt: skip
        return [reshape(t, x.shape) for t, x in zip(found, b, strict=True)]

    parts = _prefixes(in_parts, parts, d + 1)
    totals = [_whole(reshape(_span(t, d + 1, each - 1, each), (*s[:d], devices, *s[d + 1 :])), d)
              for t, s in zip(parts, shapes)]  # fmt: skip
    totals = _prefixes(combine, totals, d)
    # The total before each part; before the first there is none, and its own stands for it.
    before = [concat([_span(t, d, 0, 1), _span(t, d, 0, devices - 1)], d) for t in totals]
    wide = [
        broadcast_to(reshape(t, (*s[:d], devices, 1, *s[d + 1 :])), p.shape)
        for t, s, p in zip(before, shapes, parts)
    ]
    both = in_parts([relayout(t, p.type) for t, p in zip(wide, parts, strict=True)], parts)
    first = reshape(arange(devices), (devices, 1)) > 0
    out = [
        where(reshape(first, (devices, *(1,) * (p.ndim - d - 1))), b, p)
        for b, p in zip(both, parts, strict=True)
    ]
    return [reshape(t, s) for t, s in zip(out, shapes, strict=True)]


def _devices(t: TensorType, d: int) -> int:
    """The number of equal parts, one after the other, in which dim `d` is split; 1 if it is not
    split so."""
    run = t.digits(d)
    split = [x for x in run if x.axes]
    if any(x.uneven for x in run) or run[: len(split)] != split:
        return 1
    return math.prod(x.size for x in split)


def _whole(t: Tensor, d: int) -> Tensor:
    dims = list(t.type.dims)
    dims[d] = without(dims[d], dim_axes(dims[d]), t.type.sizes)
    return relayout(t, t.type.with_dims(dims))


def _alike(t: Tensor, like: TensorType, d: int) -> Tensor:
    """`t` with dim `d` split as in `like`."""
    want = t.type.on(like.mesh)
    axes = dim_axes(like.dims[d])
    dims = [
        like.dims[d] if i == d else without(x, axes, want.sizes) for i, x in enumerate(want.dims)
    ]
    return relayout(t, want.with_dims(dims))


def _span(t: Tensor, d: int, first: int, last: int, step: int = 1) -> Tensor:
    return sliced(t, {d: (first, last, step)})


def _prefixes(combine: Combine, xs: Parts, d: int) -> Parts:
    """The prefixes along a dim that is not split: those of pairs give every second one, and one
    more combination the others."""
    n = xs[0].shape[d]
    if n < 2:
        return xs

    def every_second(first: int, last: int) -> Parts:
        count = len(range(first, last, 2))
        return [_span(t, d, first, first + 2 * count - 1, 2) for t in xs]

    odd = _prefixes(combine, combine(every_second(0, n - 1), every_second(1, n)), d)
    even = [_span(t, d, 0, 1) for t in xs]
    if n > 2:
        before = [_span(t, d, 0, (n - 1) // 2) for t in odd]
        more = combine(before, every_second(2, n))
        even = [concat([a, b], d) for a, b in zip(even, more, strict=True)]
    return [_interleaved(a, b, d) for a, b in zip(even, odd, strict=True)]


def _interleaved(even: Tensor, odd: Tensor, d: int) -> Tensor:
    m = odd.shape[d]
    pairs = stack([_span(even, d, 0, m), odd], d + 1)
    out = reshape(pairs, (*odd.shape[:d], 2 * m, *odd.shape[d + 1 :]))
    return out if even.shape[d] == m else concat([out, _span(even, d, m, m + 1)], d)
