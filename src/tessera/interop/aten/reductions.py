"""Rules for sums, means, extremes and running results along dims."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ...core.dtypes import DType, bool_, f32, uint8
from ...lang.math import functions as F
from ...lang.math.norms import vector_norm
from ...lang.value.tensor import Tensor
from .table import as_float, aten, dims_of, in_dim, of, unless_bool

Dims = int | Sequence[int] | None


def _over(fn: Callable[..., Tensor], x: Tensor, dim: Dims, keepdim: bool) -> Tensor:
    """`fn(x, dims, keepdims)`; a scalar is its own result."""
    dims = dims_of(x, dim)
    return fn(x, dims, keepdim) if dims else fn(x.reshape(1), (0,), False)


@aten("sum", "sum.dim_IntList")
def _sum(
    x: Tensor, dim: Dims = None, keepdim: bool = False, *, dtype: DType | None = None
) -> Tensor:
    return of(_over(F.sum, of(x, dtype), dim, keepdim), dtype)


@aten("nansum")
def _nansum(
    x: Tensor, dim: Dims = None, keepdim: bool = False, *, dtype: DType | None = None
) -> Tensor:
    return _sum(F.where(x != x, 0, x), dim, keepdim, dtype=dtype)


@aten("mean", "mean.dim")
def _mean(
    x: Tensor, dim: Dims = None, keepdim: bool = False, *, dtype: DType | None = None
) -> Tensor:
    return _over(F.mean, of(x, dtype), dim, keepdim)


@aten("prod", "prod.dim_int")
def _prod(
    x: Tensor, dim: Dims = None, keepdim: bool = False, *, dtype: DType | None = None
) -> Tensor:
    return of(_over(F.prod, of(x, dtype), dim, keepdim), dtype)


@aten("amax")
def _amax(x: Tensor, dim: Dims = (), keepdim: bool = False) -> Tensor:
    return unless_bool(lambda t: _over(F.max, t, dim, keepdim))(x)  # type: ignore[no-any-return]


@aten("amin")
def _amin(x: Tensor, dim: Dims = (), keepdim: bool = False) -> Tensor:
    return unless_bool(lambda t: _over(F.min, t, dim, keepdim))(x)  # type: ignore[no-any-return]


aten("max")(lambda x: _amax(x))
aten("min")(lambda x: _amin(x))
aten("aminmax")(
    lambda x, *, dim=None, keepdim=False: (_amin(x, dim, keepdim), _amax(x, dim, keepdim))
)


@aten("max.dim")
def _max_dim(x: Tensor, dim: int, keepdim: bool = False) -> tuple[Tensor, Tensor]:
    ids = _argmax(x, dim, True)
    return _picked(x, ids, dim, keepdim)


@aten("min.dim")
def _min_dim(x: Tensor, dim: int, keepdim: bool = False) -> tuple[Tensor, Tensor]:
    ids = _argmin(x, dim, True)
    return _picked(x, ids, dim, keepdim)


def _picked(x: Tensor, ids: Tensor, dim: int, keepdim: bool) -> tuple[Tensor, Tensor]:
    """The elements at `ids`, which get the whole gradient, and the ids."""
    if not x.ndim:
        return x, ids
    values = unless_bool(lambda t: F.gather(t, ids, dim))(x)
    if keepdim:
        return values, ids
    return F.squeeze(values, dim), F.squeeze(ids, dim)


@aten("argmax")
def _argmax(x: Tensor, dim: int | None = None, keepdim: bool = False) -> Tensor:
    return _best(F.argmax, x, dim, keepdim)


@aten("argmin")
def _argmin(x: Tensor, dim: int | None = None, keepdim: bool = False) -> Tensor:
    return _best(F.argmin, x, dim, keepdim)


def _best(fn: Any, x: Tensor, dim: int | None, keepdim: bool) -> Tensor:
    t = x.to(uint8) if x.dtype is bool_ else x
    if not x.ndim:
        return F.full((), 0, "i32")
    if dim is None:
        found: Tensor = fn(t.reshape(-1), 0)
        return found.reshape((1,) * x.ndim) if keepdim else found
    found = fn(t, dim, keepdim)
    return found


@aten("any", "any.dim", "any.dims")
def _any(x: Tensor, dim: Dims = None, keepdim: bool = False) -> Tensor:
    return _over(F.any, x, dim, keepdim)


@aten("all", "all.dim", "all.dims")
def _all(x: Tensor, dim: Dims = None, keepdim: bool = False) -> Tensor:
    return _over(F.all, x, dim, keepdim)


@aten("count_nonzero", "count_nonzero.dim_IntList")
def _count(x: Tensor, dim: Dims = None) -> Tensor:
    return _over(F.sum, x != 0 if x.dtype is not bool_ else x, dim, False)


# -- spread and size ------------------------------------------------------------------------------
def _spread(name: str, of: Callable[..., Tensor]) -> None:
    """Adds the rules of the variance or the standard deviation `of`, and of it beside the mean."""

    @aten(f"{name}.correction")
    def spread(
        x: Tensor, dim: Dims = None, *, correction: float | None = None, keepdim: bool = False
    ) -> Tensor:
        by = 1 if correction is None else correction
        return _over(lambda t, d, k: of(t, d, keepdims=k, correction=by), x, dim, keepdim)

    @aten(f"{name}.dim")
    def along(x: Tensor, dim: Dims, unbiased: bool = True, keepdim: bool = False) -> Tensor:
        return spread(x, dim, correction=int(unbiased), keepdim=keepdim)

    aten(name)(lambda x, unbiased=True: spread(x, correction=int(unbiased)))

    @aten(f"{name}_mean.correction")
    def with_mean(x: Tensor, dim: Dims = None, **options: Any) -> tuple[Tensor, Tensor]:
        return spread(x, dim, **options), _mean(x, dim, options.get("keepdim", False))


_spread("var", F.var)
_spread("std", F.std)


@aten("logsumexp")
def _logsumexp(x: Tensor, dim: Dims, keepdim: bool = False) -> Tensor:
    return _over(F.logsumexp, as_float(x), dim, keepdim)


@aten("linalg_vector_norm")
def _norm(
    x: Tensor,
    ord: float = 2,
    dim: Dims = None,
    keepdim: bool = False,
    *,
    dtype: DType | None = None,
) -> Tensor:
    return _over(lambda t, d, k: vector_norm(t, ord, d, k), of(x, dtype), dim, keepdim)


@aten("norm.ScalarOpt_dim", "norm.Scalar")
def _norm_by(x: Tensor, p: float | None = None, dim: Dims = None, keepdim: bool = False) -> Tensor:
    return _norm(x, 2 if p is None else p, dim, keepdim)


# -- running --------------------------------------------------------------------------------------
@aten("cumsum")
def _cumsum(x: Tensor, dim: int, *, dtype: DType | None = None) -> Tensor:
    found: Tensor = in_dim(F.cumsum, of(x, dtype), dim)
    return of(found, dtype)


@aten("cumprod")
def _cumprod(x: Tensor, dim: int, *, dtype: DType | None = None) -> Tensor:
    found: Tensor = in_dim(F.cumprod, of(x, dtype), dim)
    return of(found, dtype)


def _by_number(fn: Any) -> Any:
    """`fn`, (values, ids) along a dim; bools are compared as small numbers."""

    def run(x: Tensor, dim: int) -> tuple[Tensor, Tensor]:
        values, ids = fn(x.to(uint8) if x.dtype is bool_ else x, dim)
        return values.to(x.dtype), ids

    return run


@aten("cummax")
def _cummax(x: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    found: tuple[Tensor, Tensor] = in_dim(_by_number(F.cummax), x, dim)
    return found


@aten("cummin")
def _cummin(x: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    found: tuple[Tensor, Tensor] = in_dim(_by_number(F.cummin), x, dim)
    return found


@aten("logcumsumexp")
def _logcumsumexp(x: Tensor, dim: int) -> Tensor:
    def run(t: Tensor, d: int) -> Tensor:
        return F.running(lambda a, b: [F.logaddexp(a[0], b[0])], [t.to(f32)], d)[0].to(t.dtype)

    found: Tensor = in_dim(run, x, dim)
    return found
