"""Rows of the ops that join many elements in one: products, norms, sums, the largest."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from .. import nn
from ..lang.math import functions as F
from ..lang.math.shape import swap
from ..lang.value.tensor import Tensor as Value
from .dtypes import DataType
from .elementwise import activated
from .errors import wrong
from .op import REQUIRED, in_place, op, row
from .shapes import TILE_SIZE


# -- products -------------------------------------------------------------------------------------
@op()
def linear(
    input_tensor_a: Value, input_tensor_b: Value, *, bias: Value | None = None,
    transpose_a: bool = False, transpose_b: bool = False, activation: Any = None,
) -> Value:  # fmt: skip
    """`matmul` with a `bias` that is broadcast to the product, and a function at the end."""
    x, w = input_tensor_a, input_tensor_b
    y = F.matmul(swap(x, -2, -1) if transpose_a else x, swap(w, -2, -1) if transpose_b else w)
    return activated(y if bias is None else y + bias, activation)


@op()
def matmul(
    input_tensor_a: Value, input_tensor_b: Value, *, transpose_a: bool = False,
    transpose_b: bool = False, activation: Any = None,
) -> Value:  # fmt: skip
    """The product of [..., M, K] and [..., K, N]; `transpose_a` and `transpose_b` swap the last two
    dims first. Raises ShapeError if they do not fit."""
    more = {"transpose_a": transpose_a, "transpose_b": transpose_b, "activation": activation}
    found: Value = linear.op.body(input_tensor_a, input_tensor_b, **more)
    return found


@op()
def addmm(
    input_tensor: Value, mat1: Value, mat2: Value, *, alpha: float = 1.0, beta: float = 1.0
) -> Value:
    """`beta * input + alpha * (mat1 @ mat2)`."""
    return beta * input_tensor + alpha * (mat1 @ mat2)


# -- softmax --------------------------------------------------------------------------------------
@op()
def softmax(input_tensor: Value, dim: int = -1, *, numeric_stable: bool = True) -> Value:
    """Softmax along `dim`. It is always the stable form."""
    return nn.softmax(input_tensor, dim)


@op()
def scale_mask_softmax(
    input_tensor: Value, scale: float | None = None, mask: Value | None = None, *,
    is_causal_mask: bool = False, numeric_stable: bool = True,
) -> Value:  # fmt: skip
    """Softmax along the last dim of the tensor times `scale` plus `mask`, which is broadcast to it
    (it is given in all cases, also with `is_causal_mask`)."""
    x = input_tensor if scale is None else input_tensor * scale
    return nn.softmax(x if mask is None else x + mask)


softmax_in_place = in_place(softmax, "softmax_in_place")
scale_mask_softmax_in_place = in_place(scale_mask_softmax, "scale_mask_softmax_in_place")
scale_causal_mask_hw_dims_softmax_in_place = scale_mask_softmax_in_place


# -- norms ----------------------------------------------------------------------------------------
def _scaled(x: Value, weight: Value | None, bias: Value | None) -> Value:
    """`x` times `weight` plus `bias`, which may come in rows of a tile, [..., width / 32, 32]."""
    x = x if weight is None else x * weight.reshape(x.shape[-1])
    return x if bias is None else x + bias.reshape(x.shape[-1])


def _norm(name: str, of: str, centre: bool) -> Any:
    def body(
        input_tensor: Value, *, epsilon: float = 1e-12, weight: Value | None = None,
        bias: Value | None = None, residual_input_tensor: Value | None = None,
    ) -> Value:  # fmt: skip
        x = input_tensor
        x = x if residual_input_tensor is None else x + residual_input_tensor
        if centre:
            x = x - F.mean(x, -1, keepdims=True)
        return _scaled(x * F.rsqrt(F.mean(x * x, -1, keepdims=True) + epsilon), weight, bias)

    body.__doc__ = (
        f"The last dim {of}, times `weight` plus `bias`; of the sum with `residual_input_tensor`"
        " if one is given."
    )
    return op(name=name)(body)


layer_norm = _norm("layer_norm", "with mean 0 and variance 1", True)
rms_norm = _norm("rms_norm", "divided by its root mean square", False)


# Norms of rows that are cut over devices: each device computes sums of its part, one in the first
# column of each tile, `all_gather` joins them along the last dim, and `post` takes them all.
def _sums_of_rows(name: str, powers: Sequence[int]) -> Any:
    def body(x: Value) -> Value:
        sums = [F.sum(x * x if p == 2 else x, -1, keepdims=True) for p in powers]
        return F.concat([F.pad(s, (0, TILE_SIZE - 1)) for s in sums], -1)

    return row(name, body, "input_tensor", dtype=DataType.BFLOAT16)


def _of_sums(name: str, tiles: int) -> Any:
    def body(
        input_tensor: Value, stats: Value, *, epsilon: float = 1e-12, weight: Value | None = None,
        bias: Value | None = None,
    ) -> Value:  # fmt: skip
        x, width = input_tensor, stats.shape[-1] if stats.ndim else 0
        if not width or width % (tiles * TILE_SIZE):
            raise wrong(
                f"{name}: stats have {tiles * TILE_SIZE} columns of each device",
                [("stats", stats.shape)],
                fix=f"ttnn.all_gather(ttnn.{name.replace('post', 'pre')}(x), dim=-1)",
            )
        devices = width // (tiles * TILE_SIZE)
        sums = F.sum(stats.reshape(*stats.shape[:-1], devices, tiles, TILE_SIZE)[..., 0], -2)
        means = sums / (devices * x.shape[-1])
        spread = means[..., :1]
        if tiles == 2:
            x, spread = x - means[..., 1:], spread - means[..., 1:] * means[..., 1:]
        return _scaled(x * F.rsqrt(spread + epsilon), weight, bias)

    body.__doc__ = "The norm of rows that are cut over devices: of a device's part, with the sums."
    return op(name=name)(body)


rms_norm_pre_all_gather = _sums_of_rows("rms_norm_pre_all_gather", [2])
layer_norm_pre_all_gather = _sums_of_rows("layer_norm_pre_all_gather", [2, 1])
rms_norm_post_all_gather = _of_sums("rms_norm_post_all_gather", 1)
layer_norm_post_all_gather = _of_sums("layer_norm_post_all_gather", 2)


# -- sums and the largest -------------------------------------------------------------------------
def _reduction(body: Callable[..., Value]) -> Any:
    """The op that makes one number of the elements along `dim`: one, several, or all."""
    name = body.__name__
    spread = name in ("std", "var")

    def local(x: Value, dim: Any, keepdim: bool, scalar: float, correction: bool) -> Value:
        more = {"correction": int(correction)} if spread else {}
        # No dims, [], are all, as in PyTorch.
        found = body(x, None if dim == () else dim, keepdims=keepdim, **more)
        return found if scalar == 1 else found * scalar

    return row(name, local, "input_tensor", options={"dim": None, "keepdim": False},
               keyword_options={"scalar": 1.0, "correction": True})  # fmt: skip


sum, mean, max, min = (_reduction(f) for f in (F.sum, F.mean, F.max, F.min))
std, var, prod = (_reduction(f) for f in (F.std, F.var, F.prod))


def _running(body: Callable[[Value, int], Value]) -> Any:
    def local(x: Value, dim: int, reverse_order: bool) -> Value:
        return F.flip(body(F.flip(x, dim), dim), dim) if reverse_order else body(x, dim)

    return row(body.__name__, local, "input_tensor", options={"dim": REQUIRED},
               keyword_options={"reverse_order": False})  # fmt: skip


cumsum, cumprod = _running(F.cumsum), _running(F.cumprod)


def _deviation(x: Value, dims: Any = None) -> Value:
    return F.std(x, dims, keepdims=dims is not None, correction=1)


_PLANE = (-2, -1)
std_hw = row("std_hw", lambda x: _deviation(x, _PLANE), "input_tensor")
var_hw = row("var_hw", lambda x: F.var(x, _PLANE, keepdims=True, correction=1), "input_tensor")
normalize_hw = row(
    "normalize_hw", lambda x: (x - F.mean(x, _PLANE, True)) / _deviation(x, _PLANE), "input_tensor"
)
normalize_global = row(
    "normalize_global", lambda x: (x - F.mean(x)) / _deviation(x), "input_tensor"
)
