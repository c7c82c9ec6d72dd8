"""Rules for random numbers: drawn by `ts.random`, so they follow `ts.seed` and not PyTorch's
generator, and do not depend on layouts."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ...core.dtypes import DType, bool_, f32, int32
from ...lang.math import functions as F
from ...lang.math import random
from ...lang.value.tensor import Tensor
from .table import aten


@aten("native_dropout")
def _native_dropout(x: Tensor, p: float, train: bool | None = True) -> tuple[Tensor, Tensor]:
    if train is False or p == 0:
        return x, F.full(x.shape, True, bool_)
    if p == 1:
        return x * 0.0, F.full(x.shape, False, bool_)
    keep = random.bernoulli(x.shape, 1.0 - p, like=x.type)
    return F.where(keep, x * (1.0 / (1.0 - p)), 0.0), keep


@aten("dropout", "feature_dropout")
def _dropout(x: Tensor, p: float, train: bool) -> Tensor:
    return _native_dropout(x, p, train)[0]


@aten("rand")
def _rand(size: Sequence[int], *, dtype: DType | None = None) -> Tensor:
    return random.uniform(tuple(size), dtype=dtype or f32)


@aten("randn")
def _randn(size: Sequence[int], *, dtype: DType | None = None) -> Tensor:
    return random.normal(tuple(size), dtype=dtype or f32)


@aten("rand_like")
def _rand_like(x: Tensor, *, dtype: DType | None = None) -> Tensor:
    return random.uniform(x.shape, dtype=dtype or x.dtype, like=x.type)


@aten("randn_like")
def _randn_like(x: Tensor, *, dtype: DType | None = None) -> Tensor:
    return random.normal(x.shape, dtype=dtype or x.dtype, like=x.type)


@aten("randint.low")
def _randint(low: int, high: int, size: Sequence[int], *, dtype: DType | None = None) -> Tensor:
    return random.randint(tuple(size), low, high).to(dtype or int32)


@aten("randint")
def _randint_to(high: int, size: Sequence[int], *, dtype: DType | None = None) -> Tensor:
    return _randint(0, high, size, dtype=dtype)


@aten("randint_like", "randint_like.low_dtype")
def _randint_like(x: Tensor, *bounds: int, dtype: DType | None = None) -> Tensor:
    low, high = (0, *bounds)[-2:]
    return random.randint(x.shape, low, high, like=x.type).to(dtype or x.dtype)


@aten("randperm")
def _randperm(n: int, *, dtype: DType | None = None) -> Tensor:
    return F.argsort(random.uniform((n,)), 0).to(dtype or int32)


@aten("bernoulli")
def _bernoulli(x: Tensor) -> Tensor:
    return (random.uniform(x.shape, like=x.type) < x.to(f32)).to(x.dtype)


@aten("bernoulli.p")
def _bernoulli_p(x: Tensor, p: float = 0.5) -> Tensor:
    return (random.uniform(x.shape, like=x.type) < float(p)).to(x.dtype)


@aten("uniform")
def _uniform(x: Tensor, low: float = 0, high: float = 1) -> Tensor:
    return random.uniform(x.shape, low=float(low), high=float(high), dtype=x.dtype, like=x.type)


@aten("normal_functional")
def _normal(x: Tensor, mean: float = 0, std: float = 1) -> Tensor:
    return random.normal(x.shape, mean=float(mean), std=float(std), dtype=x.dtype, like=x.type)


@aten("exponential")
def _exponential(x: Tensor, lambd: float = 1) -> Tensor:
    drawn = -F.log1p(-random.uniform(x.shape, like=x.type))
    return (drawn * (1.0 / lambd)).to(x.dtype)


@aten("multinomial")
def _multinomial(x: Tensor, num_samples: int, replacement: bool = False) -> Tensor:
    found: Tensor = random.multinomial(x, num_samples, replacement)
    return found


@aten("alpha_dropout")
def _alpha_dropout(x: Tensor, p: float, train: bool) -> Tensor:
    if not train or p == 0:
        return x
    lost = -1.7580993408473766  # what SELU gives far below zero
    rate = 1.0 / math.sqrt((1.0 - p) * (1.0 + p * lost * lost))
    keep = random.bernoulli(x.shape, 1.0 - p, like=x.type)
    return F.where(keep, x, lost) * rate - rate * p * lost
