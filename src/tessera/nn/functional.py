"""Functions of a transformer, composed of ops: softmax, norms, activations, rotary embedding.

None has a sharding or gradient rule of its own. Statistics are computed in f32.
"""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Callable
from typing import Annotated, Any, TypeVar, cast

from ..core.checks import unfit
from ..core.context import replaced, settings
from ..core.declared import Count, Flag, OneOf, Probability, Scale
from ..core.dtypes import f32
from ..core.errors import ShapeError
from ..core.peers import no_name
from ..core.tensor_checks import integers
from ..lang.autodiff.map_chunks import map_chunks
from ..lang.math import functions as F
from ..lang.math import random
from ..lang.math.elementwise import as_float
from ..lang.math.shape import dims_of
from ..lang.record.index_bounds import check_ids
from ..lang.record.operands import as_tensor, emit
from ..lang.value.tensor import Like, Tensor
from .block_size import rows_at_once

C = TypeVar("C", bound=Callable[..., Tensor])


def wide(x: Like) -> Tensor:
    """`x` as f32, unless it is wider."""
    return F.wide(as_tensor(x))


def rounded_once(fn: C) -> C:
    """`fn` computed in f32 for a narrower float `x`, so that only its result is rounded, as in
    PyTorch. A CPU has no instructions for most narrow floats either."""

    @functools.wraps(fn)
    def rounded(x: Like, *args: Any, **kwargs: Any) -> Tensor:
        t = as_tensor(x)
        if not t.dtype.is_float or t.dtype.bytes >= 4:
            return fn(t, *args, **kwargs)
        return fn(t.to(f32), *args, **kwargs).to(t.dtype)

    return cast(C, rounded)


def softmax(x: Like, dim: int = -1) -> Tensor:
    """`exp(x) / sum(exp(x))` along `dim`, computed in f32, in the dtype of `x`; of whole numbers in
    f32."""
    t = as_float("softmax", x)
    dims = dims_of("softmax", t, dim)
    w = wide(t)
    e = F.exp(w - F.stop_gradient(F.reduce("max", w, dims, True)))
    # A product with the reciprocal: compilers rewrite a division by a broadcast, and do so
    # differently for one device and for many.
    return (e * (1.0 / F.sum(e, dims, True))).to(t.dtype)


def log_softmax(x: Like, dim: int = -1) -> Tensor:
    """The logarithm of the softmax of `x` along `dim`, computed in f32, in the dtype of `x`."""
    t = as_float("log_softmax", x)
    dims = dims_of("log_softmax", t, dim)
    w = wide(t)
    z = w - F.stop_gradient(F.reduce("max", w, dims, True))
    return (z - F.log(F.sum(F.exp(z), dims, True))).to(t.dtype)


def relu(x: Like) -> Tensor:
    """`max(x, 0)`, elementwise. The gradient at 0 is 0, as in PyTorch."""
    t = as_tensor(x)
    return F.where(t <= 0, 0, t)


@rounded_once
def silu(x: Like) -> Tensor:
    """`x * sigmoid(x)`, elementwise (Hendrycks & Gimpel 2016)."""
    t = as_tensor(x)
    return t * F.sigmoid(t)


@rounded_once
def gelu(x: Like, approximate: Annotated[str, OneOf("tanh", "none")] = "tanh") -> Tensor:
    """The Gaussian error linear unit, elementwise (Hendrycks & Gimpel 2016).

    `approximate` is "tanh" (the approximation by tanh) or "none" (exact, by erf). Raises UsageError
    if it is anything else.
    """
    t = as_tensor(x)
    if approximate == "none":
        return t * (0.5 * (1.0 + F.erf(t * (1.0 / math.sqrt(2.0)))))
    inner = t * (math.sqrt(2.0 / math.pi) * (1.0 + 0.044715 * (t * t)))
    # 0.5 (1 + tanh u) is the logistic function of 2u.
    return t * F.sigmoid(2.0 * inner)


def linear(x: Like, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`x @ weight + bias` with x [..., in], weight [in, out] and bias [out]."""
    y = F.matmul(x, weight)
    return y if bias is None else y + as_tensor(bias).to(y.dtype)


def logits(x: Like, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`linear`, which is bf16 inside `ts.autocast("fp8")`: a loss reads each logit by itself, so
    their rounding is not averaged."""
    with replaced(autocast_fp8=False):
        return linear(x, weight, bias)


def soft_cap(x: Tensor, cap: float | None) -> Tensor:
    """`x` bounded to -cap and cap, smoothly: `cap * tanh(x / cap)`; unchanged if `cap` is None."""
    return x if cap is None else F.tanh(x * (1.0 / cap)) * cap


def layer_norm(
    x: Like, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> Tensor:
    """`x` with zero mean and unit variance over the last dim, times `weight`, plus `bias`.

    A `weight` of several dims normalizes over as many of the last dims, whose sizes it must have;
    so there is no argument for the sizes. `eps` is added to the variance (Ba et al. 2016). Computed
    in f32; the result has the dtype of `x`. Raises ShapeError if `weight` or `bias` does not have
    the sizes of the last dims.
    """
    t = as_float("layer_norm", x)
    dims = _normed("layer_norm", t, weight, bias)
    w = wide(t)
    c = w - F.mean(w, dims, True)
    y = c * F.rsqrt(F.mean(c * c, dims, True) + eps)
    return _scaled(y, weight, bias).to(t.dtype)


def rms_norm(x: Like, weight: Like | None = None, eps: float = 1e-6) -> Tensor:
    """`x` over its root mean square along the last dim, times `weight` (Zhang & Sennrich 2019).

    A `weight` of several dims normalizes over as many of the last dims. `eps` is added to the mean
    square. Computed in f32; the result has the dtype of `x`. Raises ShapeError if `weight` does not
    have the sizes of the last dims.
    """
    t = as_float("rms_norm", x)
    dims = _normed("rms_norm", t, weight, None)
    w = wide(t)
    return _scaled(w * F.rsqrt(F.mean(w * w, dims, True) + eps), weight, None).to(t.dtype)


def _normed(name: str, x: Tensor, *scales: Like | None) -> tuple[int, ...]:
    """The dims of `x` that a norm is over: as many of the last ones as `scales`, its weight and
    bias, have. Raises ShapeError if their sizes differ."""
    sizes = next((w for w in scales if isinstance(w, tuple | list | int)), None)
    if sizes is not None:
        raise unfit(
            name,
            "the weight",
            sizes,
            "there is no argument for sizes: it goes over the last dim, or those of the weight;"
            f" nn.{name}(x, weight=ts.ones(sizes)) for more",
        )
    tensors = [as_tensor(w) for w in scales if w is not None]
    rank = tensors[0].ndim if tensors else 1
    if any(not rank or w.shape != x.shape[-rank:] for w in tensors):
        raise ShapeError(
            f"{name}: weight and bias do not have the sizes of the last dims",
            rows=[("x", x.type), *(("given", w.type) for w in tensors)],
            fix="give weights of these sizes, or none: over which dims it goes follows from them",
        )
    return tuple(range(-rank, 0))


def _scaled(y: Tensor, weight: Like | None, bias: Tensor | None) -> Tensor:
    if weight is not None:
        y = y * wide(weight)
    return y if bias is None else y + wide(bias)


def embedding(ids: Like, table: Tensor) -> Tensor:
    """Rows of `table` [vocab, d] by integer ids [...]: [..., d].

    An id is from 0 to vocab - 1. Where the host knows the ids, one outside raises ShapeError; on
    the device it gives a row of NaN. The result has the dtype of `table`, rounded to the narrow one
    inside `ts.autocast(embeddings=True)`. Raises DTypeError if `ids` are not integers.
    """
    t, at = as_tensor(table), as_tensor(ids)
    fix = "the ids come first: nn.embedding(ids, table)" if t.dtype.is_int else ""
    integers("embedding", "ids", at.type, fix or "cast them with .to(ts.int32)")
    check_ids("embedding", "id", at, t.shape[0] if t.ndim else 0)
    (rows,) = F.narrowed(t) if settings().autocast_embeddings else (t,)
    return emit("take", rows, at, dim=0, ids="exact").to(t.dtype)


def dropout(x: Like, p: Probability, training: Flag = True) -> Tensor:
    """`x` with elements set to zero with probability `p` and the rest multiplied by 1/(1-p).

    Returns `x` if `training` is False. Raises UsageError if `p` is not in 0 <= p < 1.
    """
    t = as_tensor(x)
    if not training or p == 0.0:
        return t
    keep = random.bernoulli(t.shape, 1.0 - p, like=t.type)
    return F.where(keep, t * (1.0 / (1.0 - p)), 0.0)


def rotary(
    x: Like,
    base: Scale = 10000.0,
    positions: Tensor | None = None,
    rates: Tensor | None = None,
    scale: float = 1.0,
) -> Tensor:
    """Rotary position embedding of x [..., S, D], by halves of D (Su et al. 2021).

    `positions` [..., S] are by default 0 to S - 1, and broadcast to [..., S] of `x`. Positions of
    two dims fit only if `x` has three, or the first is 1: for x [B, H, S, D] give [B, 1, S], not
    [B, S]. `rates` [R/2], in radians per position, replace those of `base` (`nn.Rope` makes scaled
    ones); the first R elements of D are rotated, and multiplied by `scale`. Raises ShapeError if D
    is odd, `x` has fewer than 2 dims, `positions` do not fit, or there are more rates than pairs;
    UsageError if `base` is not above 0. For whole numbers the result is f32.
    """
    t = as_float("rotary", x)
    if t.ndim < 2 or t.shape[-1] % 2:
        raise ShapeError(
            "rotary: the last dim is not even, or there is none before it",
            x=t.type,
            fix="give [..., S, D] with an even D",
        )
    seq, d = t.shape[-2], t.shape[-1]
    at = F.arange(seq, dtype=f32) if positions is None else _positions(as_tensor(positions), t)
    if rates is None:
        rates = F.exp(F.arange(d // 2, dtype=f32) * (-2.0 * math.log(base) / max(1, d)))
    pairs = shaped_rates("rotary", as_tensor(rates), t)
    angle = at.reshape(*at.shape, 1) * as_tensor(rates).reshape(1, pairs)
    c, s = F.cos(angle), F.sin(angle)
    if scale != 1.0:
        c, s = c * scale, s * scale
    c, s = c.to(t.dtype), s.to(t.dtype)
    rotated, unrotated = (t, []) if 2 * pairs == d else (t[..., : 2 * pairs], [t[..., 2 * pairs :]])
    a, b = F.split(rotated, 2, -1)
    return F.concat([a * c - b * s, b * c + a * s, *unrotated], -1)


def _positions(at: Tensor, x: Tensor) -> Tensor:
    """`at` in f32. Raises ShapeError unless it broadcasts to x [..., S, D] without its last dim,
    and it is clear which dim has positions of its own."""
    to = x.shape[:-1]
    fits = at.ndim <= len(to) and all(
        n in (1, m) for n, m in zip(at.shape[::-1], to[::-1], strict=False)
    )
    by_row = at.ndim == 2 < len(to) and at.shape[0] > 1  # [B, S] of [B, H, S, D]
    if fits and not by_row:
        return at.to(f32)
    ones = ", 1" * (len(to) - 2)
    raise ShapeError(
        "rotary: positions of two dims would be those of the dim before S, not of sequences"
        if by_row
        else "rotary: the positions do not broadcast to those of x",
        positions=at.type,
        x=x.type,
        fix=f"give [S], or for each sequence its own: positions.reshape({to[0]}{ones}, {to[-1]})",
    )


def shaped_rates(name: str, rates: Tensor, x: Tensor) -> int:
    """The number of `rates`. Raises ShapeError unless they are [n], with n at most the pairs of
    `x`."""
    if rates.ndim == 1 and rates.shape[0] <= x.shape[-1] // 2:
        return rates.shape[0]
    raise ShapeError(
        f"{name}: there are more rates than pairs in the last dim",
        rates=rates.type,
        x=x.type,
        fix=f"give at most {x.shape[-1] // 2} rates",
    )


def swiglu(x: Like, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """`(silu(x @ gate) * (x @ up)) @ down` (Shazeer 2020), with x [..., d].

    `gate` and `up` are [d, hidden], `down` is [hidden, d].
    """
    return F.matmul(silu(F.matmul(x, gate)) * F.matmul(x, up), down)


def by_rows(fn: Callable[[Tensor], Tensor], x: Tensor, rows: int) -> Tensor:
    """`fn` over the last dim of [..., d], in blocks of rows whose intermediates are not kept."""
    sizes, order = row_order(x)
    y = map_chunks(fn, rows_of(x, sizes, order), rows=rows)
    if order:
        y = y.reshape(*(sizes[i] for i in order), y.shape[-1])
        y = y.permute(*(order.index(i) for i in range(len(order))), len(order))
    return y.reshape(*x.shape[:-1], y.shape[-1])


def row_order(x: Tensor, last: int = 1) -> tuple[list[int], list[int]]:
    """(sizes of the digits of the dims before the `last`, order of these digits). In that order
    split digits come first, so that each device's rows are contiguous. Both are empty if they are
    so already."""
    run = [d for i in range(x.ndim - last) for d in x.type.digits(i)]
    split = [i for i, d in enumerate(run) if d.axes]
    if split == list(range(len(split))) or any(d.uneven for d in run):
        return [], []
    return [d.size for d in run], split + [i for i, d in enumerate(run) if not d.axes]


def rows_of(x: Tensor, sizes: list[int], order: list[int], last: int = 1) -> Tensor:
    """`x` with all dims but the `last` merged into one, with their digits in `order`. No data moves
    between devices."""
    rest = x.shape[x.ndim - last :]
    if order:
        x = x.reshape(*sizes, *rest)
        x = x.permute(*order, *range(len(order), x.ndim))
    return x.reshape(-1, *rest)


def mlp(
    x: Like,
    up: Tensor,
    down: Tensor,
    up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    activation: Callable[[Tensor], Tensor] = gelu,
    rows: Count | None = None,
) -> Tensor:
    """`activation(x @ up + b) @ down + b`, computed in blocks of rows of x [..., d].

    The hidden layer exists for one block at a time. The backward pass keeps each block's hidden
    layer before the activation. `rows` is the number of rows of a block on one device; None: 512 on
    a CPU, and elsewhere as many as have 1 GiB of hidden elements. Raises UsageError unless `rows`
    is a whole number from 1 on.
    """
    t, up = as_tensor(x), as_tensor(up)
    most = rows_at_once(rows, t, up.shape[-1] if up.ndim else 1)
    y = by_rows(
        lambda r: F.matmul(activation(F.save_for_backward(linear(r, up, up_bias))), down), t, most
    )
    return y if down_bias is None else y + as_tensor(down_bias).to(y.dtype)


def __getattr__(name: str) -> Any:
    """Other functions of `nn`, for users of PyTorch's `F`: `F.cross_entropy`."""
    nn = sys.modules[__package__]  # an import would be circular
    if name in getattr(nn, "__all__", ()) and not name[0].isupper():
        return getattr(nn, name)
    raise no_name(f"module {__name__!r}", "nn.functional", name, getattr(nn, "__all__", ()))
