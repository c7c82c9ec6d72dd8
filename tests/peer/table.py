"""The table of ops with a counterpart in PyTorch, each with Tessera's call."""

from __future__ import annotations

from typing import Any

import tessera as ts
from tessera import nn
from tests.peer.rows import ALL, FLOATS, NUMBERS, ROWS, WHOLE, NotOffered, row

TABLE = ROWS
F32 = ("f32",)

# -- elementwise, one argument --------------------------------------------------------------------
for name in (
    "exp",
    "log",
    "sqrt",
    "rsqrt",
    "tanh",
    "sin",
    "cos",
    "erf",
    "sigmoid",
    "floor",
    "ceil",
):
    row(name, getattr(ts, name))
for name in ("log1p", "expm1", "asin", "acos", "atan", "sinh", "cosh", "asinh", "acosh", "atanh"):
    row(name, getattr(ts, name))
for name in ("erfc", "erfinv", "atan2", "hypot"):
    row(name, getattr(ts, name))
for name in ("abs", "sign", "isfinite", "isnan", "isinf"):
    row(name, getattr(ts, name), dtypes=NUMBERS)
row("neg", lambda x: -x, dtypes=NUMBERS)
row("logical_not", lambda x: ~x, dtypes=("bool",))
row("nn.functional.relu", lambda x, inplace=False: nn.relu(x), dtypes=NUMBERS)
row("nn.functional.silu", lambda x, inplace=False: nn.silu(x), dtypes=FLOATS)
row("nn.functional.gelu", lambda x, approximate="none": nn.gelu(x, approximate), dtypes=FLOATS)
row("square", lambda x: x**2, dtypes=NUMBERS)
for name, dtype in (("float", ts.f32), ("half", ts.f16), ("bfloat16", ts.bf16), ("int", ts.int32)):
    row(name, lambda x, to=dtype: x.to(to), lacks=("memory_format",))
for name, dtype in (("char", ts.int8), ("byte", ts.uint8), ("bool", ts.bool)):
    row(name, lambda x, to=dtype: x.to(to), lacks=("memory_format",))

# -- elementwise, two arguments -------------------------------------------------------------------


def scaled(f: Any) -> Any:
    return lambda x, y, alpha=1: f(x, y if alpha == 1 else y * alpha)


row("add", scaled(lambda x, y: x + y), dtypes=NUMBERS)
row("sub", scaled(lambda x, y: x - y), dtypes=NUMBERS)
row("mul", lambda x, y: x * y, dtypes=NUMBERS)
row("div.no_rounding_mode", lambda x, y: x / y, dtypes=NUMBERS)
row("div.floor_rounding", lambda x, y, rounding_mode: x // y, dtypes=NUMBERS)
row("floor_divide", lambda x, y: x // y, dtypes=NUMBERS)
row("remainder", lambda x, y: x % y, dtypes=NUMBERS)
row("pow", lambda x, y: x**y, dtypes=NUMBERS)
row("__rpow__", lambda x, y: y**x, dtypes=NUMBERS)
row("__radd__", lambda x, y: y + x, dtypes=NUMBERS)
row("__rsub__", lambda x, y: y - x, dtypes=NUMBERS)
row("__rmul__", lambda x, y: y * x, dtypes=NUMBERS)
row("__rdiv__", lambda x, y: y / x, dtypes=NUMBERS)
row("__rmod__", lambda x, y: y % x, dtypes=NUMBERS)
for name in ("maximum", "minimum"):
    row(name, getattr(ts, name), dtypes=NUMBERS)
row("eq", lambda x, y: x == y)
row("ne", lambda x, y: x != y)
row("lt", lambda x, y: x < y, dtypes=NUMBERS)
row("le", lambda x, y: x <= y, dtypes=NUMBERS)
row("gt", lambda x, y: x > y, dtypes=NUMBERS)
row("ge", lambda x, y: x >= y, dtypes=NUMBERS)
row("logical_and", lambda x, y: x & y, dtypes=("bool",))
row("logical_or", lambda x, y: x | y, dtypes=("bool",))
row("where", lambda x, pick, y: ts.where(pick, x, y))
row("masked_fill", lambda x, mask, value: ts.where(mask, value, x), dtypes=NUMBERS)

row("clamp", lambda x, min=None, max=None: ts.clip(x, min, max), dtypes=NUMBERS)
row(
    "nn.functional.leaky_relu",
    lambda x, negative_slope=0.01, inplace=False: nn.leaky_relu(x, negative_slope),
    dtypes=FLOATS,
)
row("nn.functional.elu", lambda x, alpha=1.0, inplace=False: nn.elu(x, alpha), dtypes=FLOATS)
for name in ("and", "or", "xor", "left_shift", "right_shift"):
    row(f"bitwise_{name}", getattr(ts, f"bitwise_{name}"), dtypes=WHOLE)
row("bitwise_not", ts.bitwise_not, dtypes=(*WHOLE, "bool"))

# -- products -------------------------------------------------------------------------------------
for name in ("matmul", "mm", "bmm", "mv", "dot"):
    row(name, lambda x, y: x @ y, dtypes=NUMBERS)
row("__rmatmul__", lambda x, y: y @ x, dtypes=NUMBERS)
row("einsum", lambda xs, index: ts.einsum(index, *xs), dtypes=NUMBERS)
row("outer", lambda x, y: ts.einsum("i,j->ij", x, y), dtypes=NUMBERS)
row("nn.functional.linear", lambda x, w, b=None: nn.linear(x, w.T, b), dtypes=NUMBERS)

# -- reductions -----------------------------------------------------------------------------------


def folded(f: Any) -> Any:
    def call(x: Any, dim: Any = None, keepdim: bool = False) -> Any:
        return f(x, None if dim in ((), []) else dim, keepdim)

    return call


row("sum", folded(ts.sum), lacks=("dtype",))
row("mean", folded(ts.mean), dtypes=FLOATS, lacks=("dtype",))
row("prod", folded(ts.prod), lacks=("dtype",))
row("amax", folded(ts.max))
row("amin", folded(ts.min))
row("max.reduction_no_dim", lambda x: ts.max(x), dtypes=NUMBERS)
row("min.reduction_no_dim", lambda x: ts.min(x), dtypes=NUMBERS)
row("max.binary", ts.maximum, dtypes=NUMBERS)
row("logsumexp", folded(ts.logsumexp), dtypes=FLOATS)


def placed(f: Any) -> Any:
    return lambda x, dim=None: f(x) if dim is None else f(x, dim)


row("argmax", placed(ts.argmax), dtypes=NUMBERS, lacks=("keepdim",))
row("argmin", placed(ts.argmin), dtypes=NUMBERS, lacks=("keepdim",))
row("cumsum", lambda x, dim: ts.cumsum(x, dim), dtypes=NUMBERS, lacks=("dtype",))


def variance(
    x: Any, dim: Any = None, unbiased: Any = None, correction: Any = None, keepdim: bool = False
) -> Any:
    if isinstance(dim, bool):
        dim, unbiased = None, dim
    if correction is None:  # PyTorch's default is 1, ours 0
        correction = 0 if unbiased is False else 1
    return ts.var(x, None if dim in ((), []) else dim, keepdims=keepdim, correction=correction)


row("var", variance, dtypes=FLOATS)
row(
    "std",
    lambda *args, **kwargs: (lambda v: ts.where(v == 0, 0.0, ts.sqrt(ts.where(v == 0, 1.0, v))))(
        variance(*args, **kwargs)
    ),
    dtypes=FLOATS,
)
row("any", folded(ts.any))
row("all", folded(ts.all))
row("cumprod", lambda x, dim: ts.cumprod(x, dim), dtypes=NUMBERS, lacks=("dtype",))
row("cummax", lambda x, dim: ts.cummax(x, dim), dtypes=NUMBERS)
row("cummin", lambda x, dim: ts.cummin(x, dim), dtypes=NUMBERS)
row("softmax", lambda x, dim: nn.softmax(x, dim), dtypes=FLOATS, lacks=("dtype",))
row("log_softmax", lambda x, dim: nn.log_softmax(x, dim), dtypes=FLOATS, lacks=("dtype",))
row("argsort", lambda x, dim=-1, descending=False, stable=False: ts.argsort(x, dim, descending))
row("sort", lambda x, dim=-1, descending=False, stable=False: ts.sort(x, dim, descending))


def largest_of(x: Any, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> Any:
    return ts.topk(x, k, dim, largest)


row("topk", largest_of, dtypes=NUMBERS)
row("trace", lambda x: ts.linalg.trace(x), dtypes=NUMBERS)

# -- movement -------------------------------------------------------------------------------------


row("flip", lambda x, dims: ts.flip(x, dims))
row("reshape", lambda x, shape: ts.reshape(x, shape))
row("view", lambda x, shape: ts.reshape(x, shape))
row("flatten", lambda x, start_dim=0, end_dim=-1: x.flatten(start_dim, end_dim))
row("transpose", lambda x, a, b: x.transpose(a, b))
row("permute", lambda x, dims: ts.permute(x, dims))
row("T", lambda x: x.T)
row("mT", lambda x: x.transpose(-2, -1))
row("expand", lambda x, shape: ts.broadcast_to(x, shape))
row("broadcast_to", ts.broadcast_to)
row("squeeze", lambda x, dim=None: ts.squeeze(x, dim))
row("unsqueeze", ts.unsqueeze)
row("tile", ts.tile)
row("repeat", lambda x, *sizes: x.repeat(*sizes))
row("repeat_interleave", lambda x, repeats, dim=None, output_size=None: repeated(x, repeats, dim))


def repeated(x: Any, repeats: Any, dim: Any) -> Any:
    if isinstance(repeats, ts.Tensor):  # the result's shape depends on values
        raise NotOffered
    return ts.repeat_interleave(x, repeats, dim)


row("roll", lambda x, shifts, dims=(): ts.roll(x, shifts, None if dims in ((), None) else dims))
for name in ("constant", "reflect", "replicate", "circular"):
    row(
        f"nn.functional.pad.{name}",
        lambda x, pad, mode=name, value=0: ts.pad(x, pad, mode, value or 0),
        dtypes=ALL if name == "constant" else FLOATS,
    )
row("cat", lambda xs, dim=0: ts.concat(xs, dim))
row("stack", lambda xs, dim=0: ts.stack(xs, dim))
row("split_with_sizes", lambda x, sizes, dim=0: ts.split(x, sizes, dim))
row("__getitem__", lambda x, key: x[key])
row("select", lambda x, dim, index: x[(slice(None),) * (dim % x.ndim) + (index,)])
row("narrow", lambda x, dim, start, length: cut(x, dim, start, length))


def cut(x: Any, dim: int, start: Any, length: int) -> Any:
    if isinstance(start, ts.Tensor):
        raise NotOffered
    start = start % x.shape[dim] if start < 0 else start
    return x[(slice(None),) * (dim % x.ndim) + (slice(start, start + length),)]


row("tril", lambda x, diagonal=0: ts.tril(x, diagonal))
row("triu", lambda x, diagonal=0: ts.triu(x, diagonal))
row("diagonal", lambda x, offset=0, dim1=0, dim2=1: ts.diagonal(x, offset, dim1, dim2))
row(
    "eye",
    lambda n, m=None, dtype=ts.f32, device=None, requires_grad=False: ts.eye(n, m, dtype),
    dtypes=(*FLOATS, "i32", "bool"),
)

# -- indexing -------------------------------------------------------------------------------------
row("gather", lambda x, dim, ids: ts.gather(x, ids, dim))
row("take_along_dim", lambda x, ids, dim=None: along(x, ids, dim))


def along(x: Any, ids: Any, dim: Any) -> Any:
    return ts.gather(x.reshape(-1), ids.reshape(-1), 0) if dim is None else ts.gather(x, ids, dim)


row("index_select", lambda x, dim, ids: ts.take(x, ids, dim))
row("scatter_add", lambda x, dim, ids, src: ts.scatter_add(x, ids, src, dim))
row(
    "index_add",
    lambda x, dim, ids, src, alpha=1: ts.scatter_add(
        x, ids, src if alpha == 1 else src * alpha, dim
    ),
)
row(
    "nn.functional.embedding",
    lambda table, ids: nn.embedding(ids, table),
    dtypes=FLOATS,
    lacks=("max_norm", "norm_type", "padding_idx", "scale_grad_by_freq", "sparse"),
)
row("nn.functional.one_hot", lambda ids, num_classes=-1: hot(ids, num_classes), dtypes=("i64",))


def hot(ids: Any, count: int) -> Any:
    if count == -1:  # the length is the largest id plus one: the shape depends on values
        raise NotOffered
    return ts.one_hot(ids, count, ts.int32)


# -- matrices -------------------------------------------------------------------------------------
row("linalg.cholesky", ts.linalg.cholesky, dtypes=F32, lacks=("upper",), loose=8)
row("linalg.det", ts.linalg.det, dtypes=F32, loose=8)
row("linalg.slogdet", ts.linalg.slogdet, dtypes=F32, loose=8)
row("linalg.inv", ts.linalg.inv, dtypes=F32, loose=64)
row("linalg.solve", lambda a, b: ts.linalg.solve(a, b), dtypes=F32, loose=64)
row(
    "linalg.solve_triangular",
    lambda a, b, upper, left=True: by_left(a, b, upper, left),
    dtypes=F32,
    lacks=("unitriangular",),
    loose=64,
)


def by_left(a: Any, b: Any, upper: bool, left: bool) -> Any:
    if not left:
        raise NotOffered
    return ts.linalg.solve_triangular(a, b, not upper)


row("linalg.svdvals", lambda a: ts.linalg.svd(a)[1], dtypes=F32, loose=8)


def one_triangle(a: Any, UPLO: str = "L") -> Any:
    """Eigenvalues from one triangle; Tessera reads the lower one."""
    return ts.linalg.eigh(a if UPLO == "L" else a.transpose(-2, -1))[0]


row("linalg.eigvalsh", one_triangle, dtypes=F32, loose=8, grad=False)
row(
    "linalg.vector_norm",
    lambda x, ord=2, dim=None, keepdim=False: ts.linalg.vector_norm(x, ord, dim, keepdim),
    dtypes=FLOATS,
    lacks=("dtype",),
)
row(
    "linalg.norm",
    lambda x, ord=None, dim=None, keepdim=False: ts.linalg.norm(x, ord, dim, keepdim),
    dtypes=F32,
    lacks=("dtype",),
)
row(
    "linalg.matrix_norm",
    lambda x, ord="fro", dim=(-2, -1), keepdim=False: ts.linalg.matrix_norm(x, ord, dim, keepdim),
    dtypes=F32,
    lacks=("dtype",),
)


def last(x: Any, shape: Any) -> Any:
    if len(shape) != 1:  # ours are over the last dim
        raise NotOffered
    return x


# -- layers ---------------------------------------------------------------------------------------
row(
    "nn.functional.layer_norm",
    lambda x, shape, weight=None, bias=None, eps=1e-5: nn.layer_norm(
        last(x, shape), weight, bias, eps
    ),
    dtypes=FLOATS,
)
row(
    "nn.functional.rms_norm",
    lambda x, shape, weight=None, eps=None: nn.rms_norm(last(x, shape), weight, eps or 2.0**-23),
    dtypes=FLOATS,
)
row(
    "nn.functional.group_norm",
    lambda x, groups, weight=None, bias=None, eps=1e-5: nn.group_norm(x, groups, weight, bias, eps),
    dtypes=FLOATS,
    loose=4,
)


def conv(f: Any) -> Any:
    return lambda x, w, b=None, stride=1, padding=0, dilation=1, groups=1: f(
        x, w, b, stride, padding, dilation, groups
    )


row("nn.functional.conv1d", conv(nn.conv1d), dtypes=FLOATS, loose=4)
row("nn.functional.conv2d", conv(nn.conv2d), dtypes=FLOATS, loose=4)
row("nn.functional.conv3d", conv(nn.conv3d), dtypes=FLOATS, loose=4)


def conv_transpose(f: Any) -> Any:
    return lambda x, w, b=None, stride=1, padding=0, output_padding=0, groups=1, dilation=1: f(
        x, w, b, stride, padding, output_padding, groups=groups, dilation=dilation
    )


row("nn.functional.conv_transpose1d", conv_transpose(nn.conv_transpose1d), dtypes=FLOATS, loose=4)
row("nn.functional.conv_transpose2d", conv_transpose(nn.conv_transpose2d), dtypes=FLOATS, loose=4)


def largest_in(f: Any) -> Any:
    def call(
        x: Any,
        size: Any = None,
        stride: Any = None,
        padding: Any = 0,
        dilation: Any = 1,
        ceil_mode: bool = False,
        return_indices: bool = False,
        kernel_size: Any = None,
    ) -> Any:
        if dilation not in (1, (1, 1)) or ceil_mode or return_indices:
            raise NotOffered
        return f(x, kernel_size if size is None else size, stride, padding)

    return call


def mean_in(f: Any) -> Any:
    def call(
        x: Any,
        kernel_size: Any,
        stride: Any = None,
        padding: Any = 0,
        ceil_mode: bool = False,
        count_include_pad: bool = True,
        divisor_override: Any = None,
    ) -> Any:
        if ceil_mode or not count_include_pad or divisor_override is not None:
            raise NotOffered
        return f(x, kernel_size, stride or None, padding)

    return call


row("nn.functional.max_pool1d", largest_in(nn.max_pool1d), dtypes=F32)
row("nn.functional.max_pool2d", largest_in(nn.max_pool2d), dtypes=F32)
row("nn.functional.avg_pool1d", mean_in(nn.avg_pool1d), dtypes=FLOATS)
row("nn.functional.avg_pool2d", mean_in(nn.avg_pool2d), dtypes=FLOATS)
for name in ("adaptive_avg_pool1d", "adaptive_avg_pool2d"):
    row(f"nn.functional.{name}", getattr(nn, name), dtypes=FLOATS)


def indexless(f: Any) -> Any:
    def call(x: Any, size: Any, return_indices: bool = False) -> Any:
        if return_indices:
            raise NotOffered
        return f(x, size)

    return call


for name in ("adaptive_max_pool1d", "adaptive_max_pool2d"):
    row(f"nn.functional.{name}", indexless(getattr(nn, name)), dtypes=F32)
row(
    "nn.functional.scaled_dot_product_attention",
    lambda q, k, v, is_causal=False, scale=None: nn.attention(q, k, v, is_causal, scale),
    dtypes=FLOATS,
    lacks=("attn_mask", "dropout_p", "enable_gqa"),
    loose=16,
)
row(
    "nn.functional.cross_entropy",
    lambda x, y, ignore_index=-100, reduction="mean": loss(x, y, ignore_index, reduction),
    dtypes=FLOATS,
    lacks=("weight", "label_smoothing"),
)


def loss(x: Any, y: Any, ignore_index: int, reduction: str) -> Any:
    if reduction != "mean":
        raise NotOffered
    if x.ndim > 2:  # classes are PyTorch's dim 1, our last
        x = x.permute(0, *range(2, x.ndim), 1)
    return nn.cross_entropy(x, y, ignore_index)


for name in ("mse_loss", "kl_div"):
    row(f"nn.functional.{name}", getattr(nn, name), dtypes=FLOATS)
row(  # PyTorch's weights have no gradient here; test_losses.py has that of the logits
    "nn.functional.binary_cross_entropy_with_logits",
    nn.binary_cross_entropy_with_logits,
    dtypes=FLOATS,
    grad=False,
)
row(
    "linspace",
    lambda start, end, steps, dtype=None, device=None: ts.linspace(
        numeric(start), numeric(end), steps, dtype or ts.f32
    ),
    dtypes=FLOATS,
    grad=False,
)


def numeric(x: Any) -> Any:
    if isinstance(x, ts.Tensor):
        raise NotOffered
    return x


row("zeros_like", lambda x, dtype=None, device=None: alike(x, 0, dtype), grad=False)
row("ones_like", lambda x, dtype=None, device=None: alike(x, 1, dtype), grad=False)


def alike(x: Any, value: int, dtype: Any) -> Any:
    return (ts.full(x.shape, value, x.dtype) if value else ts.zeros_like(x)).to(dtype or x.dtype)


def counted(
    start: Any, end: Any = None, step: int = 1, dtype: Any = None, device: Any = None
) -> Any:
    if dtype is None:  # PyTorch's are of 64 bits
        raise NotOffered
    return ts.arange(start, end, step, dtype)


row("arange", counted, dtypes=(*FLOATS, *WHOLE), grad=False)
