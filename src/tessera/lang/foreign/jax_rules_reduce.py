"""Rules for JAX's reductions, running reductions, windows, sorting and searching."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ...core.dtypes import bool_, uint8
from ..autodiff.custom import vjp
from ..autodiff.scan import scan
from ..math import functions as F
from ..math.shape import sliced
from ..record.operands import emit
from ..value.tensor import Tensor
from .jax_rules import rule, tensor, wanted
from .jax_rules_shape import surrounded

Function = Callable[..., Any]


def _over(f: Function) -> Function:
    return lambda x, axes, **_: f(x, tuple(axes)).to(x.dtype) if axes else x


for _name, _f in (("sum", F.sum), ("prod", F.prod), ("max", F.max), ("min", F.min)):
    rule(f"reduce_{_name}")(_over(_f))


def _bitwise(every: Function, combine: Function) -> Function:
    """A reduction of bools by `every`, of integers by halves."""

    def run(x: Tensor, axes: Any, **_: Any) -> Tensor:
        if not axes:
            return x
        if x.dtype is bool_:
            return every(x, tuple(axes))  # type: ignore[no-any-return]
        kept = [d for d in range(x.ndim) if d not in axes]
        x = x.permute(*axes, *kept).reshape(-1, *(x.shape[d] for d in kept))
        while (n := x.shape[0]) > 1:
            half = n // 2
            rest = [sliced(x, {0: (2 * half, n, 1)})] if n % 2 else []
            pairs = (sliced(x, {0: (i * half, (i + 1) * half, 1)}) for i in (0, 1))
            x = F.concat([combine(*pairs), *rest], 0)
        return x.squeeze(0)

    return run


rule("reduce_and")(_bitwise(F.all, operator.and_))
rule("reduce_or")(_bitwise(F.any, operator.or_))
rule("reduce_xor")(_bitwise(lambda x, d: F.sum(x, d) % 2 == 1, operator.xor))
for _name, _best in (("argmax", F.argmax), ("argmin", F.argmin)):
    rule(_name)(lambda x, axes, index_dtype, f=_best, **_: f(x, axes[0]).to(wanted(index_dtype)))


@rule("reduce")
def reduced(*args: Any, jaxpr: Function, dimensions: Any, **_: Any) -> list[Tensor]:
    """Operands and first values, reduced by a function, one element after the other."""
    half = len(args) // 2
    xs, starts = args[:half], args[half:]
    kept = [d for d in range(xs[0].ndim) if d not in dimensions]
    shape = tuple(xs[0].shape[d] for d in kept)
    rows = [x.permute(*dimensions, *kept).reshape(-1, *shape) for x in xs]
    carry = [F.broadcast_to(s, shape) for s in starts]
    # The function is one of scalars: its ops work on whole tensors too.
    return scan(lambda c, x: (_like(c, jaxpr([*c, *x])), ()), carry, rows)[0]


def _like(before: Sequence[Tensor], after: Sequence[Any]) -> list[Tensor]:
    return [F.broadcast_to(tensor(y), x.shape) for x, y in zip(before, after, strict=True)]


# -- running --------------------------------------------------------------------------------------
def _running(f: Callable[[Tensor, int], Tensor]) -> Function:
    def run(x: Tensor, axis: int, reverse: bool = False, **_: Any) -> Tensor:
        out = f(F.flip(x, axis), axis) if reverse else f(x, axis)
        return (F.flip(out, axis) if reverse else out).to(x.dtype)

    return run


def _log_sums(x: Tensor, dim: int) -> Tensor:
    rows = F.swap(x, 0, dim)
    first = F.full(rows.shape[1:], -math.inf, x.dtype)

    def step(total: Tensor, row: Tensor) -> tuple[Tensor, Tensor]:
        most = F.stop_gradient(F.maximum(total, row))
        safe = F.where(F.isfinite(most), most, 0.0)
        new = safe + F.log(F.exp(total - safe) + F.exp(row - safe))
        return new, new

    return F.swap(scan(step, first, rows)[1], 0, dim)


rule("cumsum")(_running(F.cumsum))
rule("cumprod")(_running(F.cumprod))
rule("cummax")(_running(lambda x, d: F.cummax(x, d)[0]))
rule("cummin")(_running(lambda x, d: F.cummin(x, d)[0]))
rule("cumlogsumexp")(_running(_log_sums))


# -- windows --------------------------------------------------------------------------------------
FEW = 16  # the largest window that is one op


def _least(x: Tensor) -> float:
    """The identity of the maximum."""
    if x.dtype.is_float:
        return -math.inf
    return int(np.iinfo(x.dtype.numpy.name).min)


def _filled(x: Tensor, pads: Any, spread: Any, value: Any) -> Tensor:
    """`x` with `value` before and after each dim, and between elements `spread` apart."""
    config = [(low, high, s - 1) for (low, high), s in zip(pads, spread, strict=True)]
    if all(c == (0, 0, 0) for c in config):
        return x
    out = surrounded(x, config)
    if isinstance(value, (int, float)) and value == 0:
        return out
    held = surrounded(F.full(x.shape, 1, uint8), config) != 0
    return F.where(held, out, value)


def _patches(x: Tensor, size: Any, steps: Any, dilation: Any) -> tuple[Tensor, list[int]]:
    """(The elements of each window, in one more dim after each dim with windows; these dims)."""
    own: list[int] = []
    for d in reversed(range(len(size))):
        k, step, apart = size[d], steps[d], dilation[d]
        count = (x.shape[d] - (k - 1) * apart - 1) // step + 1
        if k == 1 and step == 1:
            continue
        ids = np.arange(count)[:, None] * step + np.arange(k)[None] * apart
        x = F.take_or_zero(x, ids.astype(np.int32), d)
        own = [d + 1, *(e + 1 for e in own)]
    return x, own


def windowed(kind: str, x: Tensor, size: Any, steps: Any, pads: Any, spread: Any,
             dilation: Any) -> Tensor:  # fmt: skip
    """The maximum or the sum of each window."""
    least = _least(x) if kind == "max" else 0
    plain = all(d == 1 or k == 1 for d, k in zip(dilation, size, strict=True))
    if any(s != 1 for s in spread):
        x, pads = _filled(x, pads, spread, least), [(0, 0)] * x.ndim
    if not plain or (kind == "sum" and not x.dtype.is_float):
        x, own = _patches(_filled(x, pads, (1,) * x.ndim, least), size, steps, dilation)
        f = F.max if kind == "max" else F.sum
        return f(x, tuple(own)).to(x.dtype) if own else x
    dims = [d for d in range(x.ndim) if (size[d], steps[d], tuple(pads[d])) != (1, 1, (0, 0))]
    most = {d: max(0, size[d] - 1) for d in dims}  # a pad of the op is smaller than its window
    # What the op does not take: pads beyond that, and elements that a negative pad removes.
    far = [
        tuple(max(0, n - most.get(d, 0)) + min(0, n) for n in ends) for d, ends in enumerate(pads)
    ]
    x = _filled(x, far, (1,) * x.ndim, least)
    near = [(low - f[0], high - f[1]) for (low, high), f in zip(pads, far, strict=True)]
    order = [*(d for d in range(x.ndim) if d not in dims), *dims]
    x = x.permute(*order)
    many = math.prod(size) > FEW
    for at in reversed(range(len(dims))) if many else [range(len(dims))]:
        own = [at] if isinstance(at, int) else list(at)
        x = emit(
            "window", x, kind=kind,
            size=tuple(size[d] if i in own else 1 for i, d in enumerate(dims)),
            stride=tuple(steps[d] if i in own else 1 for i, d in enumerate(dims)),
            pads=tuple(tuple(near[d]) if i in own else (0, 0) for i, d in enumerate(dims)),
        )  # fmt: skip
    return x.permute(*(order.index(d) for d in range(x.ndim)))


def _window_rule(f: Callable[..., Tensor]) -> Function:
    def run(
        x: Tensor, window_dimensions: Any, window_strides: Any, padding: Any,
        base_dilation: Any = None, window_dilation: Any = None, **_: Any,
    ) -> Tensor:  # fmt: skip
        ones = (1,) * x.ndim
        how = (padding, base_dilation or ones, window_dilation or ones)
        return f(x, window_dimensions, window_strides, *how)

    return run


def _least_of_windows(x: Tensor, *how: Any) -> Tensor:
    """The minimum, as the maximum of what falls where `x` rises."""
    if x.dtype.is_float:
        return -windowed("max", -x, *how)
    return ~windowed("max", ~x, *how)


_windows_max = _window_rule(lambda x, *how: windowed("max", x, *how))
_windows_min = _window_rule(_least_of_windows)
rule("reduce_window_max")(_windows_max)
rule("reduce_window_sum")(_window_rule(lambda x, *how: windowed("sum", x, *how)))
rule("reduce_window_min")(_windows_min)


@rule("reduce_window")
def _reduce_window(
    *args: Any, jaxpr: Function, window_dimensions: Any, window_strides: Any, padding: Any,
    base_dilation: Any, window_dilation: Any, **_: Any,
) -> list[Tensor]:  # fmt: skip
    half = len(args) // 2
    rows, own = [], list[int]()
    for x, start in zip(args[:half], args[half:], strict=True):
        x = _filled(x, padding, base_dilation, start)
        x, own = _patches(x, window_dimensions, window_strides, window_dilation)
        rows.append(x)
    return reduced(*rows, *args[half:], jaxpr=jaxpr, dimensions=tuple(own))  # type: ignore[no-any-return]


@rule("select_and_scatter_add")
def _spread_to_chosen(
    source: Tensor, x: Tensor, select_prim: Any, window_dimensions: Any, window_strides: Any,
    padding: Any, **_: Any,
) -> Tensor:  # fmt: skip
    """The gradient of the maximum of windows, or of the minimum."""
    how = {"window_dimensions": window_dimensions, "window_strides": window_strides}
    chosen = _windows_max if select_prim.name == "ge" else _windows_min
    out = vjp(lambda t: chosen(t, **how, padding=padding), x)[1](source)
    return out[0]  # type: ignore[no-any-return]


# -- order ----------------------------------------------------------------------------------------
@rule("sort")
def _sort(*xs: Tensor, dimension: int, num_keys: int = 1, **_: Any) -> list[Tensor]:
    """All operands in the order of the first `num_keys`, of which the first counts most."""
    order: Tensor | None = None
    for key in reversed(xs[:num_keys]):
        key = key.to(uint8) if key.dtype is bool_ else key
        if order is None:
            order = F.argsort(key, dimension)
        else:
            by_key = F.argsort(F.gather_or_zero(key, order, dimension), dimension)
            order = F.gather_or_zero(order, by_key, dimension)
    assert order is not None
    return [F.gather_or_zero(x, order, dimension) for x in xs]


@rule("top_k")
def _top_k(x: Tensor, k: int, axis: int = -1, **_: Any) -> tuple[Tensor, Tensor]:
    return F.topk(x, k, axis)


@rule("approx_top_k")
def _approx_top_k(
    x: Tensor, k: int, reduction_dimension: int, is_max_k: bool, **_: Any
) -> tuple[Tensor, Tensor]:
    """The exact result."""
    return F.topk(x, k, reduction_dimension, largest=bool(is_max_k))
