"""Rules for norms of rows, groups and batches. Each also gives its mean and the reciprocal of its
deviation, as PyTorch's ops do."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ...core.dtypes import f32
from ...lang.math import functions as F
from ...lang.value.tensor import Tensor
from ...nn import conv as C
from .table import aten

Three = tuple[Tensor, Tensor, Tensor]


def _standard(x: Tensor, dims: tuple[int, ...], eps: float) -> Three:
    """`x` in f32 with zero mean and unit variance over `dims`, its mean, 1 / its deviation."""
    w = x.to(f32)
    mean = F.mean(w, dims, True)
    c = w - mean
    rate = F.rsqrt(F.mean(c * c, dims, True) + eps)
    return c * rate, mean, rate


def _scaled(y: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    y = y if weight is None else y * weight.to(f32)
    return y if bias is None else y + bias.to(f32)


@aten("native_layer_norm")
def _native_layer_norm(
    x: Tensor, normalized_shape: Sequence[int], weight: Tensor | None, bias: Tensor | None,
    eps: float,
) -> Three:  # fmt: skip
    dims = tuple(range(-len(normalized_shape), 0))
    y, mean, rate = _standard(x, dims, eps)
    return _scaled(y, weight, bias).to(x.dtype), mean, rate


@aten("layer_norm")
def _layer_norm(
    x: Tensor, normalized_shape: Sequence[int], weight: Tensor | None = None,
    bias: Tensor | None = None, eps: float = 1e-5, cudnn_enable: bool = True,
) -> Tensor:  # fmt: skip
    return _native_layer_norm(x, normalized_shape, weight, bias, eps)[0]


@aten("_fused_rms_norm")
def _fused_rms_norm(
    x: Tensor, normalized_shape: Sequence[int], weight: Tensor | None, eps: float | None
) -> tuple[Tensor, Tensor]:
    dims = tuple(range(-len(normalized_shape), 0))
    w = x.to(f32)
    least = (
        float(eps)
        if eps is not None
        else 2.0 ** (-23 if x.dtype is f32 else -7 if x.dtype.name == "bf16" else -10)
    )
    rate = F.rsqrt(F.mean(w * w, dims, True) + least)
    return _scaled(w * rate, weight, None).to(x.dtype), rate


@aten("rms_norm")
def _rms_norm(
    x: Tensor, normalized_shape: Sequence[int], weight: Tensor | None = None,
    eps: float | None = None,
) -> Tensor:  # fmt: skip
    return _fused_rms_norm(x, normalized_shape, weight, eps)[0]


@aten("native_group_norm")
def _native_group_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, n: int, c: int, hw: int, group: int,
    eps: float,
) -> Three:  # fmt: skip
    parts = x.reshape((n, group, (c // group) * hw))
    y, mean, rate = _standard(parts, (-1,), eps)
    by = (1, c, *(1,) * (x.ndim - 2))
    scales = [None if t is None else t.reshape(by) for t in (weight, bias)]
    out = _scaled(y.reshape(x.shape), *scales).to(x.dtype)
    return out, mean.reshape((n, group)), rate.reshape((n, group))


@aten("group_norm")
def _group_norm(
    x: Tensor, num_groups: int, weight: Tensor | None = None, bias: Tensor | None = None,
    eps: float = 1e-5, cudnn_enabled: bool = True,
) -> Tensor:  # fmt: skip
    n, c, *sizes = x.shape
    return _native_group_norm(x, weight, bias, n, c, math.prod(sizes), num_groups, eps)[0]


# -- batches --------------------------------------------------------------------------------------
@aten("_native_batch_norm_legit_functional")
def _batch_norm_functional(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, running_mean: Tensor,
    running_var: Tensor, training: bool, momentum: float, eps: float,
) -> tuple[Tensor, ...]:  # fmt: skip
    running = (running_mean, running_var)
    y, new = C.batch_norm(x, running, weight, bias, training, momentum, eps)
    return (y, *_batch_statistics(x, eps, training), *new)


def _batch_statistics(x: Tensor, eps: float, training: bool = True) -> tuple[Tensor, Tensor]:
    if not training:
        return F.full((0,), 0.0), F.full((0,), 0.0)
    _, mean, rate = _standard(x, (0, *range(2, x.ndim)), eps)
    return mean.reshape(-1), rate.reshape(-1)


@aten("_native_batch_norm_legit_no_training")
def _batch_norm_fixed(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, running_mean: Tensor,
    running_var: Tensor, momentum: float, eps: float,
) -> Three:  # fmt: skip
    y, _ = C.batch_norm(x, (running_mean, running_var), weight, bias, False, momentum, eps)
    return (y, *_batch_statistics(x, eps, False))


@aten("_native_batch_norm_legit.no_stats")
def _batch_norm_alone(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, training: bool, momentum: float,
    eps: float,
) -> Three:  # fmt: skip
    y, mean, rate = _standard(x, (0, *range(2, x.ndim)), eps)
    by = (1, -1, *(1,) * (x.ndim - 2))
    scales = [None if t is None else t.reshape(by) for t in (weight, bias)]
    return _scaled(y, *scales).to(x.dtype), mean.reshape(-1), rate.reshape(-1)


@aten("_weight_norm_interface")
def _weight_norm(v: Tensor, g: Tensor, dim: int = 0) -> tuple[Tensor, Tensor]:
    """`v` with the norms `g`, one for each place along `dim`."""
    others = tuple(d for d in range(v.ndim) if d != dim % v.ndim)
    size = F.sqrt(F.sum(v * v, others, True))
    return v * (g / size), size
