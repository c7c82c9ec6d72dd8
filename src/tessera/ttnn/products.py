"""Which ops of TT-NN join many elements in one? Products, norms, sums, and what is largest."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from .. import nn
from ..lang import functions as F
from ..lang.shaping import swap
from ..lang.tensor import Tensor as Value
from .dtypes import DataType
from .elementwise import activated, named, unary
from .faults import wrong
from .run import how, run
from .shapes import TILE_SIZE
from .tensor import Tensor


# -- products -------------------------------------------------------------------------------------
def matmul(
    input_tensor_a: Tensor,
    input_tensor_b: Tensor,
    *,
    transpose_a: bool = False,
    transpose_b: bool = False,
    dtype: DataType | None = None,
    activation: Any = None,
    **options: Any,
) -> Tensor:
    """The product of [..., M, K] and [..., K, N]; `transpose_a` and `transpose_b` swap the last two
    dims first. Raises ShapeError if they do not fit."""
    return linear(
        input_tensor_a, input_tensor_b, transpose_a=transpose_a, transpose_b=transpose_b,
        dtype=dtype, activation=activation, **options,
    )  # fmt: skip


def linear(
    input_tensor_a: Tensor,
    input_tensor_b: Tensor,
    *,
    bias: Tensor | None = None,
    transpose_a: bool = False,
    transpose_b: bool = False,
    dtype: DataType | None = None,
    activation: Any = None,
    **options: Any,
) -> Tensor:
    """`matmul` with a `bias` that is broadcast to the product, and a function at the end."""
    tensors = [input_tensor_a, input_tensor_b, *([bias] if bias is not None else [])]
    return run(
        "linear", _linear, tensors, dtype, **how("linear", options), activation=activation,
        transpose_a=transpose_a, transpose_b=transpose_b,
    )  # fmt: skip


def _linear(
    x: Value, w: Value, bias: Value | None = None, *, transpose_a: bool, transpose_b: bool,
    activation: Any,
) -> Value:  # fmt: skip
    y = F.matmul(swap(x, -2, -1) if transpose_a else x, swap(w, -2, -1) if transpose_b else w)
    return activated(y if bias is None else y + bias, activation)


def addmm(
    input_tensor: Tensor, mat1: Tensor, mat2: Tensor, *, alpha: float = 1.0, beta: float = 1.0,
    dtype: DataType | None = None, **options: Any,
) -> Tensor:  # fmt: skip
    """`beta * input + alpha * (mat1 @ mat2)`."""
    said = how("addmm", options)
    return run("addmm", _addmm, [input_tensor, mat1, mat2], dtype, **said, alpha=alpha, beta=beta)


def _addmm(x: Value, a: Value, b: Value, *, alpha: float, beta: float) -> Value:
    return beta * x + alpha * (a @ b)


# -- norms and sums -------------------------------------------------------------------------------
def softmax(
    input_tensor: Tensor, dim: int = -1, *, numeric_stable: bool = True, dtype: Any = None,
    **options: Any,
) -> Tensor:  # fmt: skip
    """Softmax along `dim`. It is always the stable form."""
    return run("softmax", _softmax, [input_tensor], dtype, **how("softmax", options), dim=dim)


def _softmax(x: Value, dim: int) -> Value:
    return nn.softmax(x, dim)


def softmax_in_place(input_tensor: Tensor, dim: int = -1, **options: Any) -> Tensor:
    """`softmax`, written into its operand."""
    return softmax(input_tensor, dim, **options, output_tensor=input_tensor)


def scale_mask_softmax(
    input_tensor: Tensor, scale: float | None = None, mask: Tensor | None = None, *,
    is_causal_mask: bool = False, numeric_stable: bool = True, **options: Any,
) -> Tensor:  # fmt: skip
    """Softmax along the last dim of the tensor times `scale` plus `mask`, which is broadcast to it
    (it is given in all cases, also where `is_causal_mask` says what it is)."""
    said = how("scale_mask_softmax", options)
    tensors = [input_tensor, *([mask] if mask is not None else [])]
    return run("scale_mask_softmax", _masked, tensors, **said, scale=scale)


def _masked(x: Value, mask: Value | None = None, *, scale: float | None) -> Value:
    x = x if scale is None else x * scale
    return nn.softmax(x if mask is None else x + mask)


def scale_mask_softmax_in_place(input_tensor: Tensor, *given: Any, **options: Any) -> Tensor:
    """`scale_mask_softmax`, written into its first operand."""
    return scale_mask_softmax(input_tensor, *given, **options, output_tensor=input_tensor)


scale_causal_mask_hw_dims_softmax_in_place = scale_mask_softmax_in_place


def layer_norm(
    input_tensor: Tensor, *, epsilon: float = 1e-12, weight: Tensor | None = None,
    bias: Tensor | None = None, residual_input_tensor: Tensor | None = None, dtype: Any = None,
    **options: Any,
) -> Tensor:  # fmt: skip
    """The last dim with mean 0 and variance 1, times `weight` plus `bias`; of the sum with
    `residual_input_tensor` if one is given."""
    return _norm("layer_norm", _layer_norm, input_tensor, epsilon, weight, bias,
                 residual_input_tensor, dtype, options)  # fmt: skip


def rms_norm(
    input_tensor: Tensor, *, epsilon: float = 1e-12, weight: Tensor | None = None,
    bias: Tensor | None = None, residual_input_tensor: Tensor | None = None, dtype: Any = None,
    **options: Any,
) -> Tensor:  # fmt: skip
    """The last dim divided by its root mean square, times `weight` plus `bias`; of the sum with
    `residual_input_tensor` if one is given."""
    return _norm("rms_norm", _rms_norm, input_tensor, epsilon, weight, bias,
                 residual_input_tensor, dtype, options)  # fmt: skip


def _norm(
    name: str, body: Callable[..., Value], x: Tensor, epsilon: float, weight: Tensor | None,
    bias: Tensor | None, residual: Tensor | None, dtype: Any, options: dict[str, Any],
) -> Tensor:  # fmt: skip
    given = {"weight": weight, "bias": bias, "residual": residual}
    there = {k: v for k, v in given.items() if v is not None}
    tensors = [x, *there.values()]
    said = how(name, options)
    return run(name, body, tensors, dtype, **said, there=tuple(there), epsilon=epsilon)


def _layer_norm(x: Value, *more: Value, there: tuple[str, ...], epsilon: float) -> Value:
    return _scaled(x, more, there, epsilon, True)


def _rms_norm(x: Value, *more: Value, there: tuple[str, ...], epsilon: float) -> Value:
    return _scaled(x, more, there, epsilon, False)


def _scaled(
    x: Value, more: Sequence[Value], there: tuple[str, ...], epsilon: float, centre: bool
) -> Value:
    given = dict(zip(there, more))
    if "residual" in given:
        x = x + given["residual"]
    if centre:
        x = x - F.mean(x, -1, keepdims=True)
    x = x * F.rsqrt(F.mean(x * x, -1, keepdims=True) + epsilon)
    width = x.shape[-1]
    # A weight may come in rows of a tile, [..., width / 32, 32].
    flat = {k: v.reshape(width) for k, v in given.items() if k != "residual"}
    x = x * flat["weight"] if "weight" in flat else x
    return x + flat["bias"] if "bias" in flat else x


# -- norms of a row that several devices share -----------------------------------------------------
def rms_norm_pre_all_gather(
    input_tensor: Tensor, *, dtype: DataType = DataType.BFLOAT16, **options: Any
) -> Tensor:
    """What a device knows of the norm of rows that are cut over devices: the sum of squares of its
    part, in the first column of a tile [..., 32]. `all_gather` joins them along the last dim."""
    said = how("rms_norm_pre_all_gather", options)
    return run("rms_norm_pre_all_gather", _sums_of_rows, [input_tensor], dtype, **said, powers=(2,))


def layer_norm_pre_all_gather(
    input_tensor: Tensor, *, dtype: DataType = DataType.BFLOAT16, **options: Any
) -> Tensor:
    """As `rms_norm_pre_all_gather`, with the sum of the part in a second tile: [..., 64]."""
    name = "layer_norm_pre_all_gather"
    return run(name, _sums_of_rows, [input_tensor], dtype, **how(name, options), powers=(2, 1))


def _sums_of_rows(x: Value, powers: tuple[int, ...]) -> Value:
    sums = [F.sum(x * x if p == 2 else x, -1, keepdims=True) for p in powers]
    return F.concat([F.pad(s, (0, TILE_SIZE - 1)) for s in sums], -1)


def rms_norm_post_all_gather(
    input_tensor: Tensor, stats: Tensor, *, epsilon: float = 1e-12, weight: Tensor | None = None,
    bias: Tensor | None = None, dtype: DataType | None = None, **options: Any,
) -> Tensor:  # fmt: skip
    """`rms_norm` of rows that are cut over devices: of a device's part, with the gathered `stats`
    of `rms_norm_pre_all_gather`."""
    return _of_stats("rms_norm_post_all_gather", input_tensor, stats, epsilon, weight, bias, dtype,
                     1, options)  # fmt: skip


def layer_norm_post_all_gather(
    input_tensor: Tensor, stats: Tensor, *, epsilon: float = 1e-12, weight: Tensor | None = None,
    bias: Tensor | None = None, dtype: DataType | None = None, **options: Any,
) -> Tensor:  # fmt: skip
    """`layer_norm` of rows that are cut over devices: of a device's part, with the gathered `stats`
    of `layer_norm_pre_all_gather`."""
    return _of_stats("layer_norm_post_all_gather", input_tensor, stats, epsilon, weight, bias,
                     dtype, 2, options)  # fmt: skip


def _of_stats(
    name: str, x: Tensor, stats: Tensor, epsilon: float, weight: Tensor | None,
    bias: Tensor | None, dtype: DataType | None, tiles: int, options: dict[str, Any],
) -> Tensor:  # fmt: skip
    width = stats.shape[-1] if len(stats.shape) else 0
    if not width or width % (tiles * TILE_SIZE):
        raise wrong(
            f"{name}: stats have {tiles * TILE_SIZE} columns of each device",
            [("stats", stats.shape)],
            fix=f"ttnn.all_gather(ttnn.{name.replace('post', 'pre')}(x), dim=-1)",
        )
    given = {"weight": weight, "bias": bias}
    there = {k: v for k, v in given.items() if v is not None}
    return run(name, _normed, [x, stats, *there.values()], dtype, **how(name, options),
               there=tuple(there), epsilon=epsilon, tiles=tiles)  # fmt: skip


def _normed(
    x: Value, stats: Value, *more: Value, there: tuple[str, ...], epsilon: float, tiles: int
) -> Value:
    devices = stats.shape[-1] // (tiles * TILE_SIZE)
    sums = F.sum(stats.reshape(*stats.shape[:-1], devices, tiles, TILE_SIZE)[..., 0], -2)
    means = sums / (devices * x.shape[-1])
    spread = means[..., :1]
    if tiles == 2:
        x, spread = x - means[..., 1:], spread - means[..., 1:] * means[..., 1:]
    x = x * F.rsqrt(spread + epsilon)
    flat = {k: v.reshape(x.shape[-1]) for k, v in zip(there, more)}
    x = x * flat["weight"] if "weight" in flat else x
    return x + flat["bias"] if "bias" in flat else x


def reduction(name: str, body: Callable[..., Value]) -> Callable[..., Tensor]:
    """The op that makes one number of the elements along `dim`: one, several, or all."""

    def local(x: Value, dim: Any, keepdim: bool, scalar: float, correction: int) -> Value:
        more = {"correction": correction} if name in ("std", "var") else {}
        found = body(x, dim, keepdims=keepdim, **more)
        return found if scalar == 1 else found * scalar

    local.__name__ = name

    def op(
        input_tensor: Tensor, dim: int | Sequence[int] | None = None, keepdim: bool = False, *,
        scalar: float = 1.0, correction: bool = True, dtype: Any = None, **options: Any,
    ) -> Tensor:  # fmt: skip
        # No dims, [], are all, as in PyTorch.
        dims = (tuple(dim) or None) if isinstance(dim, Sequence) else dim
        return run(name, local, [input_tensor], dtype, **how(name, options), dim=dims,
                   keepdim=keepdim, scalar=scalar, correction=int(correction))  # fmt: skip

    return named(op, name, f"`{name}` along `dim`: one, several, or all (None).")


sum, mean, max, min = (reduction(f.__name__, f) for f in (F.sum, F.mean, F.max, F.min))
std, var, prod = (reduction(f.__name__, f) for f in (F.std, F.var, F.prod))


def _running(name: str, body: Callable[[Value, int], Value]) -> Callable[..., Tensor]:
    def local(x: Value, dim: int, reverse: bool) -> Value:
        return F.flip(body(F.flip(x, dim), dim), dim) if reverse else body(x, dim)

    local.__name__ = name

    def op(
        input_tensor: Tensor, dim: int, *, dtype: DataType | None = None,
        reverse_order: bool = False, **options: Any,
    ) -> Tensor:  # fmt: skip
        said = how(name, options)
        return run(name, local, [input_tensor], dtype, **said, dim=dim, reverse=reverse_order)

    return named(op, name, f"`{name}` of the elements along `dim` up to each, or from each on.")


cumsum, cumprod = _running("cumsum", F.cumsum), _running("cumprod", F.cumprod)


# -- of the last two dims, or of all ---------------------------------------------------------------
_PLANE = (-2, -1)
std_hw, var_hw = (
    unary(f"{f.__name__}_hw", lambda x, f=f: f(x, _PLANE, keepdims=True, correction=1))
    for f in (F.std, F.var)
)
normalize_hw = unary(
    "normalize_hw",
    lambda x: (x - F.mean(x, _PLANE, True)) / F.std(x, _PLANE, keepdims=True, correction=1),
)
normalize_global = unary("normalize_global", lambda x: (x - F.mean(x)) / F.std(x, correction=1))


setattr(Tensor, "__matmul__", matmul)  # noqa: B010  # it is above the class

__all__ = [
    "addmm", "cumprod", "cumsum", "layer_norm", "layer_norm_post_all_gather",
    "layer_norm_pre_all_gather", "linear", "matmul", "max", "mean", "min", "normalize_global",
    "normalize_hw", "prod", "rms_norm", "rms_norm_post_all_gather", "rms_norm_pre_all_gather",
    "scale_causal_mask_hw_dims_softmax_in_place", "scale_mask_softmax",
    "scale_mask_softmax_in_place", "softmax", "softmax_in_place", "std", "std_hw", "sum", "var",
    "var_hw",
]  # fmt: skip
