"""Local array functions in NumPy: the oracle's side of the `xp` protocol.

The engine's side (runtime/xp_jax.py) has the same names. Narrow floats are computed in f32 and
rounded back, as in the engine.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from statistics import NormalDist
from typing import Any

import numpy as np

from ...core.dtypes import DType, f32
from ...core.errors import UsageError

Array = Any


def _wide(x: Array) -> Array:
    """`x` with narrow floats as f32; other dtypes are unchanged."""
    x = np.asarray(x)
    return x.astype(np.float32) if x.dtype.itemsize < 4 and x.dtype.kind not in "iub" else x


def _unary(f: Callable[..., Array]) -> Callable[[Array], Array]:
    return lambda x: np.asarray(f(_wide(x))).astype(np.asarray(x).dtype)


def _binary(f: Callable[..., Array]) -> Callable[[Array, Array], Array]:
    return lambda x, y: np.asarray(f(_wide(x), _wide(y))).astype(np.result_type(x, y))


def _compare(f: Callable[..., Array]) -> Callable[[Array, Array], Array]:
    return lambda x, y: f(x, y)


def _of_one(f: Callable[[float], float]) -> Callable[[Array], Array]:
    """The function `f` of one number, applied to each element."""
    return np.vectorize(f, otypes=[np.float64])


def _inverse_of_erf(x: float) -> float:
    if not -1 < x < 1:
        return math.copysign(math.inf, x) if abs(x) == 1 else math.nan
    return NormalDist().inv_cdf((x + 1) / 2) / math.sqrt(2)


neg, exp, log, sqrt = map(_unary, (np.negative, np.exp, np.log, np.sqrt))
log1p, expm1 = _unary(np.log1p), _unary(np.expm1)
tanh, sin, cos, floor, sign = map(_unary, (np.tanh, np.sin, np.cos, np.floor, np.sign))
real, imag, conj = np.real, np.imag, np.conj
erf, erfc = _unary(_of_one(math.erf)), _unary(_of_one(math.erfc))
erfinv = _unary(_of_one(_inverse_of_erf))
rsqrt = _unary(lambda x: 1 / np.sqrt(x))
sigmoid = _unary(lambda x: 1 / (1 + np.exp(-x)))
isfinite, logical_not = np.isfinite, np.logical_not
add, sub, mul = map(_binary, (np.add, np.subtract, np.multiply))
div, pow, atan2 = map(_binary, (np.divide, np.power, np.arctan2))
maximum, minimum, mod, floordiv = map(_binary, (np.maximum, np.minimum, np.mod, np.floor_divide))
eq, ne, lt = map(_compare, (np.equal, np.not_equal, np.less))
le, gt, ge = map(_compare, (np.less_equal, np.greater, np.greater_equal))
logical_and, logical_or, logical_xor = np.logical_and, np.logical_or, np.logical_xor
bit_and, bit_or, bit_xor = np.bitwise_and, np.bitwise_or, np.bitwise_xor
shift_left, shift_right = np.left_shift, np.right_shift
where = np.where


def abs(x: Array) -> Array:  # the protocol's name
    x = np.asarray(x)
    return np.abs(_wide(x)).astype(x.real.dtype)


def complex(x: Array, y: Array) -> Array:
    return np.asarray(x) + np.asarray(y) * np.asarray(1j, np.result_type(x, np.complex64))


def fft(x: Array, kind: str, dim: int, n: int) -> Array:
    """The transform `kind` along `dim`; `n` is the size of the untransformed dim."""
    made = getattr(np.fft, kind)(x, n, dim)
    double = x.dtype.name in ("float64", "complex128")
    narrow = np.float32 if kind == "irfft" else np.complex64
    return made if double else made.astype(narrow)


def _as(dtype: DType, *arrays: Array) -> np.dtype[Any]:
    """The NumPy dtype of a result: the node's dtype, but f64 if that is f32 and an argument is f64.

    No program has f64; tests pass f64 to the oracle to compare gradients with finite differences.
    """
    double = dtype is f32 and any(np.asarray(x).dtype == np.float64 for x in arrays)
    return np.dtype(np.float64) if double else dtype.numpy


def cast(x: Array, dtype: DType) -> Array:
    x = x if dtype.is_complex else np.real(x)
    return np.asarray(x).astype(_as(dtype, x))


def bitcast(x: Array, dtype: DType) -> Array:
    return np.ascontiguousarray(x).reshape(np.shape(x)).view(dtype.numpy)  # scalars stay scalars


def full(shape: tuple[int, ...], value: float, dtype: DType | str) -> Array:
    return np.full(shape, value, np.int32 if isinstance(dtype, str) else dtype.numpy)


def contract(
    args: Sequence[Sequence[str]], out: Sequence[str], values: Sequence[Array], dtype: DType
) -> Array:
    names = {k: i for i, k in enumerate(dict.fromkeys(k for a in (*args, out) for k in a))}
    operands: list[Any] = []
    for letters, v in zip(args, values, strict=True):
        operands += [_wide(v), [names[k] for k in letters]]
    result = np.einsum(*operands, [names[k] for k in out], optimize=True)
    return np.asarray(result).astype(_as(dtype, *values))


def sum(x: Array, dims: tuple[int, ...]) -> Array:
    return np.sum(_wide(x), axis=dims).astype(np.asarray(x).dtype)


def identity(kind: str, dtype: np.dtype[Any]) -> float:
    """The identity element of a sum, max or min."""
    if kind == "sum":
        return 0
    if dtype.kind in "iu":
        return int(np.iinfo(dtype).min if kind == "max" else np.iinfo(dtype).max)
    if dtype.name == "float8_e4m3fn":  # it has no infinity
        return -448.0 if kind == "max" else 448.0
    return -np.inf if kind == "max" else np.inf


def _first(kind: str, x: Array) -> dict[str, Any]:
    """The keyword `initial` for the maximum or minimum of an empty array, for which NumPy has no
    default."""
    return {} if x.size else {"initial": identity(kind, x.dtype)}


def max(x: Array, dims: tuple[int, ...]) -> Array:
    return np.max(x, axis=dims, **_first("max", x))


def min(x: Array, dims: tuple[int, ...]) -> Array:
    return np.min(x, axis=dims, **_first("min", x))


def prod(x: Array, dims: tuple[int, ...]) -> Array:
    return np.prod(_wide(x), axis=dims).astype(x.dtype)


def argmax(x: Array, dim: int) -> Array:
    return np.argmax(x, axis=dim).astype(np.int32)


def argmin(x: Array, dim: int) -> Array:
    return np.argmin(x, axis=dim).astype(np.int32)


def cumsum(x: Array, dim: int) -> Array:
    return np.cumsum(_wide(x), axis=dim).astype(x.dtype)


def argsort(x: Array, dim: int, descending: bool) -> Array:
    if descending and x.dtype.kind not in "iub":  # NaN is beyond all numbers
        return np.lexsort((-_wide(x), x == x), axis=dim).astype(np.int32)
    if descending:
        x = ~x  # the order of integers turned round, of the least one too
    return np.argsort(x, axis=dim, kind="stable").astype(np.int32)


def top_k(x: Array, k: int) -> tuple[Array, Array]:
    ids = argsort(x, -1, True)[..., :k]
    return np.take_along_axis(x, ids, -1), ids


def flip(x: Array, dim: int) -> Array:
    return np.flip(x, dim)


def reshape(x: Array, shape: tuple[int, ...]) -> Array:
    return np.reshape(x, shape)


def transpose(x: Array, perm: tuple[int, ...]) -> Array:
    return np.transpose(x, perm)


def broadcast_to(x: Array, shape: tuple[int, ...]) -> Array:
    return np.broadcast_to(x, shape)


def slice(
    x: Array, starts: tuple[int, ...], stops: tuple[int, ...], steps: tuple[int, ...]
) -> Array:
    import builtins

    return x[tuple(builtins.slice(*row) for row in zip(starts, stops, steps, strict=True))]


def pad(x: Array, starts: tuple[int, ...], steps: tuple[int, ...], shape: tuple[int, ...]) -> Array:
    import builtins

    out = np.zeros(shape, x.dtype)
    rows = zip(starts, steps, x.shape, strict=True)
    out[tuple(builtins.slice(s, s + (n - 1) * k + 1, k) for s, k, n in rows)] = x
    return out


def concat(xs: Sequence[Array], dim: int) -> Array:
    return np.concatenate(xs, dim)


def take(table: Array, ids: Array, dim: int) -> Array:
    n = table.shape[dim]
    ok = (ids >= 0) & (ids < n)
    rows = np.take(table, np.where(ok, ids, 0), axis=dim)
    shape = (1,) * dim + ids.shape + (1,) * (table.ndim - dim - 1)
    return np.where(ok.reshape(shape), rows, np.zeros((), table.dtype))


def put(ids: Array, updates: Array, dim: int, size: int) -> Array:
    k = ids.ndim
    rest = updates.shape[:dim] + updates.shape[dim + k :]
    rows = np.moveaxis(updates, range(dim, dim + k), range(k)).reshape(ids.size, math.prod(rest))
    flat = ids.reshape(-1)
    ok = (flat >= 0) & (flat < size)
    out = np.zeros((size, rows.shape[1]), _wide(updates).dtype)
    np.add.at(out, flat[ok], _wide(rows)[ok])
    return np.moveaxis(out.reshape(size, *rest), 0, dim).astype(updates.dtype)


def take_along(x: Array, ids: Array, dim: int) -> Array:
    ok = (ids >= 0) & (ids < x.shape[dim])
    ids = np.where(ok, ids, 0)
    shape = tuple(n if i != dim else x.shape[dim] for i, n in enumerate(ids.shape))
    wide = np.broadcast_shapes(shape, x.shape)
    ids_shape = tuple(n if i != dim else ids.shape[dim] for i, n in enumerate(wide))
    got = np.take_along_axis(np.broadcast_to(x, wide), np.broadcast_to(ids, ids_shape), dim)
    return np.where(np.broadcast_to(ok, ids_shape), got, np.zeros((), x.dtype))


def put_along(ids: Array, updates: Array, dim: int, size: int) -> Array:
    shape = tuple(size if i == dim else n for i, n in enumerate(updates.shape))
    out = np.zeros(shape, _wide(updates).dtype)
    ids = np.broadcast_to(ids, updates.shape)
    ok = (ids >= 0) & (ids < size)
    grid = list(np.indices(updates.shape, sparse=True))
    grid[dim] = np.where(ok, ids, 0)
    np.add.at(out, tuple(grid), np.where(ok, _wide(updates), 0))
    return out.astype(updates.dtype)


def scan(
    step: Callable[..., Any],
    carry: tuple[Array, ...],
    xs: tuple[Array, ...],
    length: int,
    reverse: bool,
) -> tuple[tuple[Array, ...], tuple[Array, ...]]:
    rows = []
    for i in range(length - 1, -1, -1) if reverse else range(length):
        carry, ys = step(carry, tuple(x[i] for x in xs))
        rows.append(ys)
    if reverse:
        rows.reverse()
    return carry, tuple(np.stack(column) for column in zip(*rows, strict=True))


def while_loop(
    step: Callable[[tuple[Array, ...]], tuple[Array, ...]], carry: tuple[Array, ...]
) -> tuple[Array, ...]:
    while bool(carry[0]):
        carry = step(carry)
    return carry


def in_memory(x: Array, space: str) -> Array:
    return x


def after(x: Array, first: Array, copied: bool) -> Array:
    return x


def cond(
    pick: Array,
    yes: Callable[[Sequence[Array]], tuple[Array, ...]],
    no: Callable[[Sequence[Array]], tuple[Array, ...]],
    args: Sequence[Array],
) -> tuple[Array, ...]:
    return yes(args) if bool(pick) else no(args)


# -- attention ------------------------------------------------------------------------------------
def attention(q: Array, k: Array, v: Array, causal: bool, scale: float) -> Array:
    shares = _shares(q, k, causal, scale)
    return np.einsum("...rst,...te->...rse", shares, _wide(v)).astype(v.dtype)


def attention_grad(
    q: Array, k: Array, v: Array, g: Array, causal: bool, scale: float
) -> tuple[Array, ...]:
    shares, (q, k, v, g), dtype = _shares(q, k, causal, scale), map(_wide, (q, k, v, g)), q.dtype
    dv = np.einsum("...rst,...rse->...te", shares, g)
    slope = np.einsum("...rse,...te->...rst", g, v)
    slope = shares * (slope - (slope * shares).sum(-1, keepdims=True)) * scale
    dq = np.einsum("...rst,...td->...rsd", slope, k)
    dk = np.einsum("...rst,...rsd->...td", slope, q)
    return tuple(x.astype(dtype) for x in (dq, dk, dv))


def _shares(q: Array, k: Array, causal: bool, scale: float) -> Array:
    """The attention weights of each query over the keys [..., R, S, T]."""
    scores = np.einsum("...rsd,...td->...rst", _wide(q), _wide(k)) * scale
    if causal:
        seq, keys = scores.shape[-2:]
        scores = np.where(np.tri(seq, keys, keys - seq, bool), scores, -np.inf)
    e = np.exp(scores - scores.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


# -- products of rows in runs ---------------------------------------------------------------------
def ragged_dot(x: Array, w: Array, counts: Array, transposed: bool, dtype: DType) -> Array:
    out = np.zeros((*x.shape[:3], w.shape[2 if transposed else 3]), _wide(x).dtype)
    for a, j, e, rows in _runs(counts):
        out[a, j, rows] = _wide(x)[a, j, rows] @ (
            _wide(w)[j, e].T if transposed else _wide(w)[j, e]
        )
    return out.astype(_as(dtype, x, w))


def ragged_contract(x: Array, y: Array, counts: Array, dtype: DType) -> Array:
    out = np.zeros((*counts.shape[1:], x.shape[3], y.shape[3]), _wide(x).dtype)
    for a, j, e, rows in _runs(counts):
        out[j, e] += _wide(x)[a, j, rows].T @ _wide(y)[a, j, rows]
    return out.astype(_as(dtype, x, y))


def _runs(counts: Array) -> Iterator[tuple[int, int, int, Any]]:
    """Yields (a, j, e, slice of its rows) of each run."""
    import builtins

    ends = np.cumsum(counts, -1)
    for (a, j, e), end in np.ndenumerate(ends):
        yield a, j, e, builtins.slice(int(end - counts[a, j, e]), int(end))


# -- convolution and windows ----------------------------------------------------------------------
def _around(
    x: Array, pads: Sequence[tuple[int, int]], spread: Sequence[int], fill: Any = 0
) -> Array:
    """`x` with `fill` between the elements of its last dims and around them; negative pads cut."""
    lead = x.ndim - len(pads)
    for d, ((low, high), step) in enumerate(zip(pads, spread, strict=True), lead):
        n = x.shape[d]
        size = (n - 1) * step + 1 + low + high
        places = low + np.arange(n) * step
        ok = (places >= 0) & (places < size)
        out = np.full((*x.shape[:d], size, *x.shape[d + 1 :]), fill, x.dtype)
        np.moveaxis(out, d, 0)[places[ok]] = np.moveaxis(x, d, 0)[ok]
        x = out
    return x


def _windows(x: Array, size: Sequence[int], stride: Sequence[int]) -> Array:
    """Every window of `size` over the last dims: [..., *places, *size]."""
    dims = tuple(range(x.ndim - len(size), x.ndim))
    seen = np.lib.stride_tricks.sliding_window_view(x, tuple(size), axis=dims)
    for d, step in zip(dims, stride, strict=True):
        seen = np.take(seen, np.arange(0, seen.shape[d], step), axis=d)
    return seen


def conv(
    x: Array,
    w: Array,
    stride: tuple[int, ...],
    pads: tuple[tuple[int, int], ...],
    dilation: tuple[int, ...],
    spread: tuple[int, ...],
    dtype: DType,
) -> Array:
    """Convolution as one einsum over all windows; x is [N, groups, in, ...], w [groups, out, in,
    ...]."""
    rank = len(stride)
    kernel = _around(_wide(w), ((0, 0),) * rank, dilation)
    windows = _windows(_around(_wide(x), pads, spread), kernel.shape[3:], stride)
    places, inside = list(range(4, 4 + rank)), list(range(4 + rank, 4 + 2 * rank))
    n, g, c, o = range(4)
    out = np.einsum(
        windows, [n, g, c, *places, *inside], kernel, [g, o, c, *inside], [n, g, o, *places],
        optimize=True,
    )  # fmt: skip
    return np.asarray(out).astype(_as(dtype, x, w))


def window(
    x: Array,
    kind: str,
    size: tuple[int, ...],
    stride: tuple[int, ...],
    pads: tuple[tuple[int, int], ...],
) -> Array:
    """The maximum ("max") or sum ("sum") of each window of the last dims, padded with the identity;
    "first" gives the index in the window of its first maximum."""
    lowest: Any = 0
    if kind != "sum":
        lowest = np.iinfo(x.dtype).min if x.dtype.kind in "iu" else -np.inf

    def windows_of(of: Array, edge: Any) -> Array:
        """[..., windows, places of one]."""
        found = _windows(_around(of, pads, (1,) * len(size), edge), size, stride)
        return found.reshape(*found.shape[: x.ndim], -1)

    rows = windows_of(_wide(x), lowest)
    if kind != "first":
        return (np.max if kind == "max" else np.sum)(rows, axis=-1).astype(x.dtype)
    holds = (rows == rows.max(-1, keepdims=True)) | (rows != rows)
    inner = windows_of(np.ones_like(x, bool), False)
    return np.argmax(holds & inner, axis=-1).astype(np.int32)


# -- matrices -------------------------------------------------------------------------------------
def _each(f: Callable[..., Any], *xs: Array) -> Any:
    """`f` applied to each matrix of a batch, in the dtype of the arguments; NaN where `f` raises
    LinAlgError."""

    def several(*matrices: Array) -> tuple[Array, ...]:
        made = f(*matrices)
        return made if isinstance(made, tuple) else (made,)

    wide = [_wide(x) for x in xs]
    lead, rows = wide[0].shape[:-2], []
    for at in np.ndindex(lead):
        matrices = [x[at] for x in wide]
        try:
            rows.append(several(*matrices))
        except np.linalg.LinAlgError:
            like = several(*(np.eye(*m.shape, dtype=m.dtype) for m in matrices))
            rows.append(tuple(np.full_like(part, np.nan) for part in like))
    parts = [
        np.stack(part).reshape((*lead, *np.shape(part[0]))).astype(xs[0].dtype)
        for part in zip(*rows, strict=True)
    ]
    return parts[0] if len(parts) == 1 else tuple(parts)


def _mean(a: Array) -> Array:
    return (a + a.T) / 2


def _column_signs(v: Array) -> Array:
    """For each column, the sign of its first element that is about as large as its largest."""
    size = np.abs(v)
    at = np.argmax(size >= 0.9 * size.max(0), axis=0)
    return np.where(v[at, np.arange(v.shape[1])] < 0, -1, 1).astype(v.dtype)


def cholesky(a: Array) -> Array:
    return _each(lambda a: np.linalg.cholesky(_mean(a)), a)


def triangular_solve(a: Array, y: Array, lower: bool) -> Array:
    return _each(lambda a, y: np.linalg.solve(np.tril(a) if lower else np.triu(a), y), a, y)


def solve(a: Array, y: Array) -> Array:
    return _each(np.linalg.solve, a, y)


def slogdet(a: Array) -> tuple[Array, Array]:
    found: tuple[Array, Array] = _each(lambda a: tuple(np.linalg.slogdet(a)), a)
    return found


def eigh(a: Array) -> tuple[Array, Array]:
    def one(a: Array) -> tuple[Array, Array]:
        values, vectors = np.linalg.eigh(_mean(a))
        return values, vectors * _column_signs(vectors)

    found: tuple[Array, Array] = _each(one, a)
    return found


def qr(a: Array) -> tuple[Array, Array]:
    def one(a: Array) -> tuple[Array, Array]:
        q, r = np.linalg.qr(a)
        signs = np.where(np.diagonal(r) < 0, -1, 1).astype(a.dtype)
        return q * signs, r * signs[:, None]

    found: tuple[Array, Array] = _each(one, a)
    return found


def svd(a: Array) -> tuple[Array, Array, Array]:
    def one(a: Array) -> tuple[Array, Array, Array]:
        u, s, vt = np.linalg.svd(a, full_matrices=False)
        signs = _column_signs(u)
        return u * signs, s, vt * signs[:, None]

    found: tuple[Array, Array, Array] = _each(one, a)
    return found


# -- a kernel of Tile IR, and a user's function ---------------------------------------------------
def kernel(k: Any, axes: tuple[str, ...], arrays: Sequence[Array]) -> tuple[Array, ...]:
    from ..tile.oracle import evaluate  # which computes with the functions above

    wide = any(x.dtype == np.float64 for x in arrays)
    return evaluate(k, *arrays, wide=wide)


def user(f: Any, *args: Any) -> Array:
    raise UsageError(
        f"evaluate: {f.name} is a user's JAX function, which NumPy cannot run",
        fix="run the compiled function, and evaluate the parts of the graph around it",
        at=f.at,
    )
