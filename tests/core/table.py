"""The table of ops: one row with an expected result gives an op all the tests of test_ops.

A row's `expect` is an independent formula over whole arrays of any precision.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from statistics import NormalDist
from typing import Any

import numpy as np

from tessera.core.dtypes import DType, bf16, bool_, complex64, f32, fp8_e4m3, int32, uint8
from tessera.ir.tile.text import parse as parse_kernel

Array = np.ndarray[Any, np.dtype[Any]]
NUMBER = ("float", "int", "uint")
FIELD = (*NUMBER, "complex")
ANY = (*FIELD, "bool")

# Ops whose rows need a graph, a key or a mesh, with the files that have their rows.
ELSEWHERE = {
    "scan": "test_loops.py",
    "item": "test_loops.py",
    "custom": "test_custom.py",
    "user": "test_user_op.py",
    "random_bits": "test_random.py",
    "all_gather": "test_reshard.py",
    "all_reduce": "test_reshard.py",
    "reduce_scatter": "test_reshard.py",
    "all_to_all": "test_reshard.py",
    "shard": "test_reshard.py",
    "to_partial": "test_reshard.py",
    "to_mesh": "test_reshard.py",
    "reinterpret": "test_local.py",
    "axis_index": "test_local.py",
    "permute": "test_local.py",
    "broadcast": "test_local.py",
    "cond": "test_local.py",
    "mesh_kernel": "test_tile_node.py",
}


@dataclass(frozen=True, slots=True)
class Row:
    """A case: `op` on `ins` with `attrs` equals `expect(*ins)`, an array or a tuple of arrays.

    `kinds` are the dtype kinds that all arguments may have ("" if they may differ), `result` is the
    dtype of the first result if it is not that of the first argument, `free` says that the op
    counts no FLOPs, and `smooth` that its gradient equals finite differences.
    """

    op: str
    ins: tuple[Array, ...]
    expect: Callable[..., Any]
    attrs: Mapping[str, Any] = field(default_factory=dict)
    kinds: tuple[str, ...] = ()
    result: DType | None = None
    free: bool = False
    smooth: bool = True
    tag: str = ""

    @property
    def name(self) -> str:
        return f"{self.op}-{self.tag}" if self.tag else self.op


RNG = np.random.default_rng(7)


def real(*shape: int, low: float = -2.0, high: float = 2.0) -> Array:
    return RNG.uniform(low, high, shape).astype(np.float32)


def ids(*shape: int, below: int, low: int = 0) -> Array:
    return RNG.integers(low, below, shape).astype(np.int32)


def words(*shape: int) -> Array:
    return RNG.integers(0, 2**32, shape, dtype=np.uint32)


def bits(*shape: int) -> Array:
    return RNG.integers(0, 2, shape).astype(np.bool_)


ROWS: list[Row] = []


def row(op: str, *ins: Array, expect: Callable[..., Any], **rest: Any) -> None:
    names = ("kinds", "result", "free", "smooth", "tag")
    known = {k: rest.pop(k) for k in names if k in rest}
    ROWS.append(Row(op, ins, expect, rest, **known))


# Ops whose result has the dtype of the parts of a complex argument.
PARTS = ("real", "imag", "abs")
# ---- elementwise, one argument -----------------------------------------------------------------
FLOAT = ("float",)
SMOOTH = ("float", "complex")
COMPLEX = ("complex",)
X = real(5, 8)
POSITIVE = real(5, 8, low=0.3, high=3.0)
row("neg", X, expect=lambda x: 0 - x, kinds=FIELD)
row("exp", X, expect=lambda x: np.e**x, kinds=SMOOTH)
row("log", POSITIVE, expect=lambda x: np.log2(x) * math.log(2), kinds=SMOOTH)
row("log1p", POSITIVE, expect=lambda x: np.log(1 + x), kinds=SMOOTH)
row("expm1", X, expect=lambda x: np.exp(x) - 1, kinds=SMOOTH)
row("sqrt", POSITIVE, expect=lambda x: x**0.5, kinds=SMOOTH)
row("rsqrt", POSITIVE, expect=lambda x: x**-0.5, kinds=SMOOTH)
row("tanh", X, expect=lambda x: (np.exp(2 * x) - 1) / (np.exp(2 * x) + 1), kinds=SMOOTH)
row("sigmoid", X, expect=lambda x: (1 + np.tanh(x / 2)) / 2, kinds=SMOOTH)
row("sin", X, expect=lambda x: np.exp(1j * x).imag, kinds=SMOOTH)
row("cos", X, expect=lambda x: np.exp(1j * x).real, kinds=SMOOTH)
row("erf", X, expect=lambda x: np.array([[math.erf(v) for v in r] for r in x]), kinds=FLOAT)
row("erfc", X, expect=lambda x: np.array([[math.erfc(v) for v in r] for r in x]), kinds=FLOAT)
BELL = NormalDist(0, 0.5**0.5)
row("erfinv", X * 0.45, kinds=FLOAT, expect=lambda x: np.array(
    [[BELL.inv_cdf((v + 1) / 2) for v in r] for r in x.astype(float)]))  # fmt: skip
Z = (real(5, 8) + 1j * real(5, 8)).astype(np.complex64)
row("conj", Z, expect=lambda z: z.real - 1j * z.imag, kinds=COMPLEX, smooth=False)
row("real", Z, expect=lambda z: np.abs(z) * np.cos(np.angle(z)), kinds=COMPLEX, smooth=False)
row("imag", Z, expect=lambda z: np.abs(z) * np.sin(np.angle(z)), kinds=COMPLEX, smooth=False)
row("abs", Z, expect=lambda z: np.hypot(z.real, z.imag), kinds=FIELD, smooth=False, tag="complex")
row("abs", X, expect=lambda x: np.where(x < 0, -x, x), kinds=FIELD)
row("sign", X, expect=lambda x: (x > 0) * 1.0 - (x < 0) * 1.0, kinds=NUMBER)
row("floor", X, expect=lambda x: x - np.mod(x, 1), kinds=FLOAT)
row(
    "isfinite",
    np.array([1.0, np.inf, -np.inf, np.nan, 0.0], np.float32),
    expect=lambda x: np.array([True, False, False, False, True]),
    kinds=FLOAT,
    result=bool_,
)
row("logical_not", bits(3, 8), expect=lambda x: x == False, kinds=("bool",))  # noqa: E712
row("save_for_backward", X, expect=lambda x: x, kinds=ANY, free=True)
row("in_memory", X, space="host", expect=lambda x: x, free=True)
row("stop_gradient", X, expect=lambda x: x, kinds=ANY, free=True, smooth=False)

# ---- elementwise, two arguments ----------------------------------------------------------------
Y = real(5, 8)
COLUMN, LINE, SCALAR = real(5, 1), real(8), real()
row("add", X, Y, expect=lambda x, y: x - (-y), kinds=FIELD)
row("add", X, LINE, expect=lambda x, y: x + y[None], kinds=FIELD, tag="line")
row("add", COLUMN, LINE, expect=lambda x, y: x + y[None], kinds=FIELD, tag="outer")
row("sub", X, Y, expect=lambda x, y: x + (-y), kinds=FIELD)
row("sub", SCALAR, Y, expect=lambda x, y: x + (-y), kinds=FIELD, tag="scalar")
row("straight_through", X, Y, expect=lambda x, y: x, free=True, smooth=False)
row("after", X, Y, expect=lambda x, y: x, free=True)
row("mul", X, Y, expect=lambda x, y: x / (1 / y), kinds=FIELD)
row("mul", X, COLUMN, expect=lambda x, y: x / (1 / y), kinds=FIELD, tag="column")
row("complex", X, Y, expect=lambda x, y: x + 1j * y, result=complex64, smooth=False)
row("div", X, POSITIVE, expect=lambda x, y: x * y**-1.0, kinds=SMOOTH)
row("div", X, real(5, 1, low=0.5), expect=lambda x, y: x * y**-1.0, kinds=SMOOTH, tag="column")
row("pow", POSITIVE, Y, expect=lambda x, y: np.exp(y * np.log(x)), kinds=FIELD)
row("pow", ids(5, 8, below=6, low=-5), ids(5, 8, below=12, low=-2), tag="whole",
    expect=lambda x, y: np.vectorize(  # towards zero, like a division
        lambda a, n: a**n if n >= 0 else int(abs(a) == 1) * a ** (-n % 2))(x, y))  # fmt: skip
row("atan2", X, Y, expect=lambda x, y: np.angle(y + 1j * x), kinds=FLOAT)
row("maximum", X, Y, expect=lambda x, y: np.where(x > y, x, y), kinds=NUMBER)
row("minimum", X, LINE, expect=lambda x, y: np.where(x < y, x, y), kinds=NUMBER)
row("mod", X, POSITIVE, expect=lambda x, y: x - y * np.floor(x / y), kinds=NUMBER)
row("floordiv", X, POSITIVE, expect=lambda x, y: np.floor(x / y), kinds=NUMBER)
A, B = ids(5, 8, below=4), ids(5, 8, below=4)
row("eq", A, B, expect=lambda x, y: x - y == 0, kinds=ANY, result=bool_)
row("ne", A, B, expect=lambda x, y: x - y != 0, kinds=ANY, result=bool_)
row("lt", X, Y, expect=lambda x, y: y - x > 0, kinds=NUMBER, result=bool_)
row("le", A, B, expect=lambda x, y: y - x >= 0, kinds=NUMBER, result=bool_)
row("gt", X, Y, expect=lambda x, y: x - y > 0, kinds=NUMBER, result=bool_)
row("ge", A, B, expect=lambda x, y: x - y >= 0, kinds=NUMBER, result=bool_)
P, Q = bits(5, 8), bits(5, 8)
row("logical_and", P, Q, expect=lambda x, y: x * y, kinds=("bool",))
row("logical_or", P, Q, expect=lambda x, y: x + y > 0, kinds=("bool",))
row("logical_xor", P, Q, expect=lambda x, y: x != y, kinds=("bool",))
U, V = words(5, 8), words(5, 8)
WHOLE = ("int", "uint")
row("bit_and", U, V, expect=lambda x, y: x & y, kinds=WHOLE)
row("bit_or", U, V, expect=lambda x, y: x ^ y ^ (x & y), kinds=WHOLE)
row("bit_xor", U, V, expect=lambda x, y: (x | y) - (x & y), kinds=WHOLE)
SHIFT = RNG.integers(0, 32, (5, 8)).astype(np.uint32)
row("shift_left", U, SHIFT, kinds=WHOLE,
    expect=lambda x, y: np.vectorize(lambda a, n: int(a) * 2 ** int(n) % 2**32)(x, y))  # fmt: skip
row("shift_right", U, SHIFT, kinds=WHOLE,
    expect=lambda x, y: np.vectorize(lambda a, n: int(a) // 2 ** int(n))(x, y))  # fmt: skip
row("shift_right", ids(5, 8, below=99, low=-99), ids(5, 8, below=8), tag="signed",
    expect=lambda x, y: np.floor(x / 2.0**y))  # fmt: skip
row("where", bits(5, 8), X, Y, expect=lambda p, x, y: p * x + (1 - p) * y, result=f32)
row("where", bits(5, 1), X, SCALAR, result=f32, tag="broadcast",
    expect=lambda p, x, y: p * x + (1 - p) * y)  # fmt: skip
row("cast", X, dtype=bf16, result=bf16, free=True, smooth=False,
    expect=lambda x: x.astype(np.float32).astype(bf16.numpy))  # fmt: skip
row("cast", X, dtype=f32, expect=lambda x: x, free=True, tag="same")
row("cast", X, dtype=int32, expect=np.trunc, result=int32, free=True, smooth=False, tag="int")
row("bitcast", U, dtype=int32, result=int32, free=True, smooth=False,
    expect=lambda x: x.view(np.int32))  # fmt: skip
row("cast", P, dtype=f32, expect=lambda x: x + 0.0, result=f32, free=True, tag="bool")

# ---- created -----------------------------------------------------------------------------------
row("full", dtype=f32, shape=(5, 8), value=2.5, free=True, result=f32,
    expect=lambda: np.ones((5, 8)) * 2.5)  # fmt: skip
row("iota", dtype=int32, shape=(5, 8), dim=1, free=True, result=int32,
    expect=lambda: np.outer(np.ones(5), range(8)))  # fmt: skip
row("iota", dtype=uint8, shape=(256,), dim=0, free=True, result=uint8, tag="narrow",
    expect=lambda: np.arange(256))  # fmt: skip
row("iota", dtype=f32, shape=(7,), dim=0, free=True, result=f32, tag="float",
    expect=lambda: np.cumsum(np.ones(7)) - 1)  # fmt: skip

# ---- contract ----------------------------------------------------------------------------------
row("contract", real(5, 8), real(8, 6), index="m k, k n -> m n", kinds=FIELD,
    expect=lambda x, w: (x[:, :, None] * w[None]).sum(1))  # fmt: skip
row("contract", real(2, 3, 8), real(8, 5), index="... m k, k n -> ... m n", tag="rows",
    expect=lambda x, w: (x.reshape(6, 8) @ w).reshape(2, 3, 5))  # fmt: skip
row("contract", real(2, 5, 4), real(2, 4, 3), index="... m k, ... k n -> ... m n", tag="batched",
    expect=lambda x, w: np.stack([a @ b for a, b in zip(x, w)]))  # fmt: skip
row("contract", real(4, 6), real(4, 6), index="i j, i j ->", tag="inner",
    expect=lambda x, y: np.vdot(x, y))  # fmt: skip
row("contract", real(4, 6, 3), index="i j k -> k i", tag="sum",
    expect=lambda x: x.sum(1).T)  # fmt: skip
row("contract", real(3, 4), real(4, 6), real(6, 2), index="a b, b c, c d -> a d", tag="three",
    expect=lambda x, y, z: x @ (y @ z))  # fmt: skip
row("contract", real(5), real(6), index="i, j -> i j", tag="outer",
    expect=lambda x, y: x[:, None] * y)  # fmt: skip
row("contract", real(5, 8), real(8, 6), index="m k, k n -> m n", dtype=bf16, result=bf16,
    smooth=False, tag="narrow",
    expect=lambda x, w: (x @ w).astype(np.float32).astype(bf16.numpy))  # fmt: skip


# ---- reduce ------------------------------------------------------------------------------------
def rounded_to_fp8(x: Array, scale: Array) -> Array:
    """`x / scale` with 4 significant bits, times `scale`; at least 2**-6 of it."""
    y = x / scale
    step = 2.0 ** np.maximum(np.floor(np.log2(np.maximum(np.abs(y), 1e-9))) - 3, -9)
    return np.clip(np.round(y / step) * step, -448, 448) * scale


row("contract_fp8", real(5, 8), real(8, 6), np.float32(0.005), np.float32(0.01), left=fp8_e4m3,
    index="m k, k n -> m n", dtype=f32, result=f32, smooth=False,
    expect=lambda x, y, s, t: rounded_to_fp8(x, s) @ rounded_to_fp8(y, t))  # fmt: skip


def dft(n: int, sign: int = -1) -> Array:
    return np.exp(sign * 2j * np.pi * np.outer(np.arange(n), np.arange(n)) / n)


row("fft", Z, kind="fft", dim=1, n=8, expect=lambda z: z @ dft(8), smooth=False)
row("fft", Z, kind="ifft", dim=0, n=5, expect=lambda z: dft(5, 1) @ z / 5, smooth=False, tag="back")
row("fft", X, kind="rfft", dim=1, n=8, result=complex64, smooth=False, tag="real",
    expect=lambda x: (x @ dft(8))[:, :5])  # fmt: skip
row("fft", Z, kind="irfft", dim=1, n=14, result=f32, smooth=False, tag="to-real",
    expect=lambda z: (np.concatenate([z[:, :1].real, z[:, 1:7], z[:, 7:].real,
                      z[:, 6:0:-1].conj()], 1) @ dft(14, 1)).real / 14)  # fmt: skip
row("sum", X, dims=(0,), expect=lambda x: np.ones(5) @ x, kinds=FIELD)
row("sum", real(3, 4, 5), dims=(0, 2), expect=lambda x: np.einsum("ijk->j", x), tag="two")
row("max", X, dims=(1,), expect=lambda x: np.sort(x, 1)[:, -1], kinds=NUMBER)
row("min", X, dims=(0, 1), expect=lambda x: np.sort(x.ravel())[0], kinds=NUMBER)
row("prod", POSITIVE, dims=(1,), expect=lambda x: np.exp(np.log(x).sum(1)), kinds=FIELD)
row("argmax", X, dim=1, expect=lambda x: np.argsort(x, 1)[:, -1], kinds=NUMBER, result=int32)
row("argmin", X, dim=0, expect=lambda x: np.argsort(x, 0)[0], kinds=NUMBER, result=int32)
row("flip", X, dim=1, expect=lambda x: x[:, ::-1], kinds=ANY, free=True)
row("cumsum", X, dim=1, expect=lambda x: x @ np.triu(np.ones((8, 8))), kinds=FIELD)
row("argsort", A, dim=1, kinds=NUMBER, result=int32, expect=lambda x: np.array(
    [sorted(range(len(r)), key=lambda i, r=r: (r[i], i)) for r in x]))  # fmt: skip
row("argsort", A, dim=0, descending=True, kinds=NUMBER, result=int32, tag="descending",
    expect=lambda x: np.array(
        [sorted(range(len(r)), key=lambda i, r=r: (-r[i], i)) for r in x.T]).T)  # fmt: skip
row("top_k", X, k=3, kinds=NUMBER,
    expect=lambda x: (-np.sort(-x, 1)[:, :3], np.argsort(-x, 1)[:, :3]))  # fmt: skip

# ---- movement ----------------------------------------------------------------------------------
row("reshape", real(4, 6), shape=(2, 2, 6), expect=lambda x: np.stack([x[:2], x[2:]]), free=True)
row("reshape", real(3, 4, 2), shape=(3, 8), free=True, tag="merge",
    expect=lambda x: np.concatenate([x[:, i] for i in range(4)], 1))  # fmt: skip
row("transpose", real(3, 4, 8), perm=(2, 0, 1), free=True,
    expect=lambda x: np.einsum("abc->cab", x))  # fmt: skip
row("broadcast_to", real(5, 1), shape=(3, 5, 8), free=True,
    expect=lambda x: np.ones((3, 5, 8)) * x)  # fmt: skip
row("slice", real(5, 8), starts=(1, 2), stops=(4, 8), steps=(1, 3), free=True,
    expect=lambda x: x[[1, 2, 3]][:, [2, 5]])  # fmt: skip
row("slice", real(4, 8), starts=(2, 0), stops=(4, 8), steps=(1, 1), free=True, tag="half",
    expect=lambda x: x[[2, 3]])  # fmt: skip
row("pad", real(3, 4), starts=(1, 0), steps=(2, 1), shape=(7, 5), free=True,
    expect=lambda x: np.array([[x[(i - 1) // 2, j] if i % 2 and i < 6 and j < 4 else 0
                                for j in range(5)] for i in range(7)]))  # fmt: skip
row("pad", real(4, 3), starts=(4, 0), steps=(1, 1), shape=(12, 3), free=True, tag="third",
    expect=lambda x: np.concatenate([0 * x, x, 0 * x]))  # fmt: skip
row("unstack", real(3, 8), expect=lambda x: (x[0], x[1], x[2]), free=True)
row("unstack", real(1, 8), expect=lambda x: (x[0],), free=True, tag="single")
row("concat", real(3, 4), real(3, 4), dim=1, free=True, expect=lambda x, y: np.hstack([x, y]))
row("concat", real(3, 4), real(2, 4), real(1, 4), dim=0, free=True, tag="uneven",
    expect=lambda *xs: np.vstack(xs))  # fmt: skip


# ---- indexing ----------------------------------------------------------------------------------
def rows_of(table: Array, at: Array) -> Array:
    """Rows of a table; zeros for indices out of range."""
    n = len(table)
    hot = np.array([[i == int(k) for i in range(n)] for k in at.ravel()], table.dtype)
    return (hot @ table.reshape(n, -1)).reshape(*at.shape, *table.shape[1:])


def along(x: Array, at: Array) -> Array:
    """x[i, at[i, j]]; zero for indices out of range."""
    n = x.shape[1]
    return np.array([[x[i, k] if 0 <= k < n else 0 for k in r] for i, r in enumerate(at)], x.dtype)


def added(at: Array, values: Array, n: int) -> Array:
    """out[at[i]] += values[i] over `n` rows."""
    out = np.zeros((n, *values.shape[at.ndim :]), values.dtype)
    for place in np.ndindex(at.shape):
        if 0 <= at[place] < n:
            out[at[place]] += values[place]
    return out


def added_along(at: Array, values: Array, n: int) -> Array:
    """out[i, at[i, j]] += values[i, j] over `n` columns."""
    out = np.zeros((len(values), n), values.dtype)
    for i, j in np.ndindex(values.shape):
        if 0 <= at[i, j] < n:
            out[i, at[i, j]] += values[i, j]
    return out


row("take", real(7, 4), ids(5, below=7), dim=0, expect=rows_of)
row("take", real(8, 4), ids(2, 3, below=9, low=-1), dim=0, expect=rows_of, tag="outside")
row("take", real(4, 7), ids(5, below=7), dim=1, tag="columns",
    expect=lambda x, i: rows_of(x.T, i).T)  # fmt: skip
row("put", ids(6, below=5), real(6, 4), dim=0, into="5", result=f32,
    expect=lambda i, v: added(i, v, 5))  # fmt: skip
row("put", ids(2, 3, below=9, low=-1), real(2, 3, 4), dim=0, into="8", result=f32, tag="outside",
    expect=lambda i, v: added(i, v, 8))  # fmt: skip
row("take_along", real(5, 8), ids(5, 3, below=9, low=-1), dim=1, expect=along)
row("take_along", real(1, 8), ids(5, 3, below=8), dim=1, tag="broadcast",
    expect=lambda x, i: along(np.repeat(x, 5, 0), i))  # fmt: skip
row("put_along", ids(5, 3, below=9, low=-1), real(5, 3), dim=1, into="8", result=f32,
    expect=lambda i, v: added_along(i, v, 8))  # fmt: skip
row("put_along", ids(5, 1, below=9, low=-1), real(5, 1), dim=1, into="8", result=f32, tag="one",
    expect=lambda i, v: added_along(i, v, 8))  # fmt: skip


def marked(places: Array, n: int, low: int = 0) -> tuple[Array, Array]:
    """Returns (ids as non-negative indices into a dim of size `n`, a mask of those out of
    range)."""
    outside = (places < low) | (places >= n)
    return np.where(places < 0, places + n, places) if low else places, outside


def rows_or_nan(table: Array, at: Array, low: int = 0, mark: Any = np.nan) -> Array:
    at, outside = marked(at, len(table), low)
    return np.where(outside[..., None], np.asarray(mark, table.dtype), rows_of(table, at))


def added_or_nan(at: Array, values: Array, n: int) -> Array:
    """Scatter-add in which an id out of range adds NaN to the first or last row."""
    return added(np.clip(at, 0, n - 1), np.where(marked(at, n)[1][:, None], np.nan, values), n)


row("take", real(8, 4), ids(2, 3, below=11, low=-3), dim=0, ids="exact", expect=rows_or_nan,
    tag="exact", smooth=False)  # fmt: skip
row("take", real(8, 4), ids(12, below=10, low=-10), dim=0, ids="signed", tag="signed",
    expect=lambda x, i: rows_or_nan(x, i, -8), smooth=False)  # fmt: skip
row("take", ids(8, 4, below=99), ids(12, below=12, low=-3), dim=0, ids="exact", tag="whole",
    expect=lambda x, i: rows_or_nan(x, i, mark=-(2**31)))  # fmt: skip
row("take", words(8, 4), words(3) % 8 + np.array([0, 0, 2**31], np.uint32), dim=0, ids="exact",
    tag="unsigned", expect=lambda x, i: rows_or_nan(x, i, mark=2**32 - 1))  # fmt: skip
row("put", ids(6, below=7, low=-1), real(6, 4), dim=0, into="5", ids="exact", result=f32,
    expect=lambda i, v: added_or_nan(i, v, 5), tag="exact", smooth=False)  # fmt: skip
row("take_along", real(5, 8), ids(5, 3, below=9, low=-1), dim=1, ids="exact", tag="exact",
    expect=lambda x, i: np.where(marked(i, 8)[1], np.nan, along(x, i)), smooth=False)  # fmt: skip
row("put_along", ids(5, 3, below=9, low=-1), real(5, 3), dim=1, into="8", ids="exact", result=f32,
    expect=lambda i, v: added_along(np.clip(i, 0, 7), np.where(marked(i, 8)[1], np.nan, v), 8),
    tag="exact", smooth=False)  # fmt: skip
row("inside", np.array([0, 7, 8, -1, -100, 3, 2, 1], np.int32), size=8, result=f32,
    expect=lambda i: np.array([1, 1, np.nan, np.nan, np.nan, 1, 1, 1], np.float32))  # fmt: skip
row("inside", np.array([0, 8, -1, -100], np.int32), size=8, ignore=-100, result=f32, tag="ignore",
    expect=lambda i: np.array([1, np.nan, np.nan, 0], np.float32))  # fmt: skip


# ---- kernels ------------------------------------------------------------------------------------
# Tiles of one row and column, as blocks may be of any size.
OUTER = parse_kernel("""\
kernel outer  v1
  dims M=8 K=16 N=8
  tune bm=1 bk=4
  grid i=M//bm j=N
  in x : f32[M, K] tiles [bm, bk]
  in w : f32[K, N] tiles [bk, 1]
  out y : f32[M, N] tiles [bm, 1]
  out high : f32[M, N] tiles [bm, 1]
  %zero = full shape=bm value=0
  %sum = loop k in 0..K//bk carry %zero
    %x = load x[i, k]
    %w = load w[k, j]
    %l = row %w
    %p = mul %x %l
    %s = sum %p dim=1
    %next = add %zero %s
    next %next
  store y[i, j] = %sum
  %high = max %sum 0
  store high[i, j] = %high""")
row("kernel", real(8, 16), real(16, 8), kernel=OUTER, split=("M", "N"), smooth=False,
    expect=lambda x, w: (x @ w, np.maximum(x @ w, 0)))  # fmt: skip


# ---- products of rows in runs ------------------------------------------------------------------
def of_runs(counts: Array, rows: int) -> Array:
    """[a, j, r, e]: 1 if row r belongs to run e."""
    ends = np.cumsum(counts, -1)[..., None, :]
    at = np.arange(rows)[:, None]
    return ((at >= ends - counts[..., None, :]) & (at < ends)).astype(np.float64)


LINES, MATRICES, WIDER = real(2, 4, 8, 4), real(4, 3, 4, 8), real(2, 4, 8, 8)
RUNS = np.array([[[3, 0, 4], [0, 0, 0], [8, 0, 0], [2, 3, 3]],
                 [[0, 0, 8], [1, 1, 1], [0, 5, 2], [2, 2, 0]]], np.int32)  # fmt: skip
row("ragged_dot", LINES, MATRICES, RUNS, turned=False,
    expect=lambda x, w, n: np.einsum("ajre,ajrd,jedh->ajrh", of_runs(n, 8), x, w))  # fmt: skip
row("ragged_dot", WIDER, MATRICES, RUNS, turned=True, tag="turned",
    expect=lambda x, w, n: np.einsum("ajre,ajrh,jedh->ajrd", of_runs(n, 8), x, w))  # fmt: skip
row("ragged_contract", LINES, WIDER, RUNS,
    expect=lambda x, y, n: np.einsum("ajre,ajrd,ajrh->jedh", of_runs(n, 8), x, y))  # fmt: skip


# ---- convolution and windows -------------------------------------------------------------------
def convolved(stride: tuple[int, ...], pads: Any, dilation: tuple[int, ...], spread: Any) -> Any:
    """y[n, g, o, i] = Σ x[n, g, c, j] w[g, o, c, k], j·spread + low = i·stride + k·dilation."""

    def expect(x: Array, w: Array) -> Array:
        lines = []
        for d, (low, high) in enumerate(pads):
            size, k = x.shape[3 + d], w.shape[3 + d]
            room = (size - 1) * spread[d] + 1 + low + high - (k - 1) * dilation[d] - 1
            meets = np.zeros((room // stride[d] + 1, size, k))
            for i, j, m in np.ndindex(meets.shape):
                meets[i, j, m] = j * spread[d] + low == i * stride[d] + m * dilation[d]
            lines.append(meets)
        if len(lines) == 1:
            return np.einsum("ngcj,gock,ijk->ngoi", x, w, *lines)
        return np.einsum("ngcab,gocpq,iap,jbq->ngoij", x, w, *lines)

    return expect


def conv_row(tag: str, x: Array, w: Array, **how: Any) -> None:
    rank = x.ndim - 3
    full = {"stride": (1,) * rank, "pads": ((0, 0),) * rank, "dilation": (1,) * rank,
            "spread": (1,) * rank, **how}  # fmt: skip
    kinds = FLOAT if not tag else ()
    row("conv", x, w, expect=convolved(**full), kinds=kinds, tag=tag, **full)


conv_row("", real(4, 1, 3, 4, 3), real(1, 5, 3, 2, 3))
conv_row("line", real(4, 1, 4, 7), real(1, 3, 4, 3), stride=(2,), pads=((1, 2),), dilation=(2,))
conv_row("groups", real(2, 4, 2, 4, 3), real(4, 2, 2, 3, 3), pads=((1, 1), (0, 1)), stride=(2, 1))
conv_row("spread", real(3, 2, 2, 4), real(2, 2, 2, 3), spread=(3,), pads=((-2, 1),))
conv_row("far", real(3, 1, 2, 4), real(1, 2, 2, 2), pads=((4, 3),), stride=(3,))


def windowed(fold: Any, size: Any, stride: Any, pads: Any, around: float) -> Any:
    def expect(x: Array) -> Array:
        wide = np.pad(x, [(0, 0)] * (x.ndim - len(size)) + list(pads), constant_values=around)
        last = range(-len(size), 0)
        counts = [(wide.shape[d] - k) // s + 1 for d, k, s in zip(last, size, stride)]
        out = np.zeros((*x.shape[: x.ndim - len(size)], *counts), x.dtype)
        for at in np.ndindex(*counts):
            cut = tuple(slice(i * s, i * s + k) for i, k, s in zip(at, size, stride))
            out[(..., *at)] = fold(wide[(..., *cut)], axis=tuple(last))
        return out

    return expect


def window_row(
    tag: str, x: Array, kind: str, size: Any, stride: Any, pads: Any, **more: Any
) -> None:
    fold, around = (np.max, -1e6) if kind == "max" else (np.sum, 0.0)
    row("window", x, expect=windowed(fold, size, stride, pads, around), kind=kind, size=size,
        stride=stride, pads=pads, tag=tag, **more)  # fmt: skip


def first_of_windows(size: Any, stride: Any, pads: Any) -> Any:
    def expect(x: Array) -> Array:
        inner = [(0, 0)] * (x.ndim - len(size)) + list(pads)
        wide, there = np.pad(x, inner), np.pad(np.ones(x.shape, bool), inner)
        shape = windowed(np.max, size, stride, pads, -1e6)(x).shape
        out = np.zeros(shape, np.int32)
        for at in np.ndindex(*shape):
            places = at[-len(size) :]
            cut = (*at[: -len(size)], *(slice(i * s, i * s + k) for i, k, s in
                                        zip(places, size, stride)))  # fmt: skip
            seen = [(v, -n) for n, (v, h) in enumerate(zip(wide[cut].flat, there[cut].flat)) if h]
            out[at] = -max(seen)[1]
        return out

    return expect


for pool in (((2, 2), (2, 2), ((0, 0), (0, 0))), ((3, 2), (1, 3), ((1, 2), (0, 1)))):
    row("window", ids(3, 2, 5, 6, below=4), expect=first_of_windows(*pool), kind="first",
        size=pool[0], stride=pool[1], pads=pool[2], tag=f"first {pool[1]}")  # fmt: skip
window_row("", real(5, 6, 4), "max", (2, 2), (2, 2), ((0, 0), (0, 0)))
window_row("overlap", real(4, 7), "max", (3,), (2,), ((1, 1),), kinds=NUMBER)
window_row("padded", real(2, 3, 5, 6), "max", (3, 2), (1, 3), ((1, 2), (0, 1)))
window_row("sum", real(3, 5, 6), "sum", (3, 2), (2, 1), ((1, 1), (0, 0)), kinds=FLOAT)
window_row("ids", ids(4, 6, below=9), "max", (2,), (2,), ((0, 0),))

# ---- matrices ----------------------------------------------------------------------------------


def apart(*shape: int) -> Array:
    """Well-conditioned matrices with well-separated singular values."""
    k = min(shape[-2:])
    u, v = (np.linalg.qr(RNG.normal(size=(*shape[:-2], n, k)))[0] for n in shape[-2:])
    return np.asarray((u * (1 + np.arange(k))) @ np.swapaxes(v, -1, -2), np.float32)


def positive(*shape: int) -> Array:
    a = apart(*shape)
    return np.asarray(a @ np.swapaxes(a, -1, -2) / 4 + np.eye(shape[-1]), np.float32)


def mean_of(a: Array) -> Array:
    return (a + np.swapaxes(a, -1, -2)) / 2


def turned(v: Array) -> Array:
    """+1 or -1 per column: the sign of its first large element."""
    first = np.argmax(np.abs(v) >= 0.9 * np.abs(v).max(-2, keepdims=True), -2)
    return np.sign(np.take_along_axis(v, first[..., None, :], -2))


def by_columns(a: Array) -> tuple[Array, Array]:
    """A QR decomposition by Gram-Schmidt."""
    q = np.zeros_like(a)
    for j in range(a.shape[-1]):
        left = a[..., j] - np.einsum("...mk,...nk,...n->...m", q, q, a[..., j])
        q[..., j] = left / np.linalg.norm(left, axis=-1, keepdims=True)
    return q, np.einsum("...mk,...mn->...kn", q, a)


def eigen(a: Array) -> tuple[Array, Array]:
    values, vectors = np.linalg.eigh(mean_of(a))
    return values, vectors * turned(vectors)


def singular(a: Array) -> tuple[Array, Array, Array]:
    """A singular value decomposition from the eigenvectors of a aᵀ."""
    k = min(a.shape[-2:])
    values, u = np.linalg.eigh(a @ np.swapaxes(a, -1, -2))
    s, u = np.sqrt(values[..., ::-1][..., :k]), u[..., ::-1][..., :k]
    u = u * turned(u)
    return u, s, np.swapaxes(u, -1, -2) @ a / s[..., None]


row("cholesky", positive(5, 3, 3), kinds=FLOAT, expect=lambda a: np.linalg.cholesky(mean_of(a)))
row("triangular_solve", apart(5, 3, 3), real(5, 3, 2), lower=True, kinds=FLOAT,
    expect=lambda a, y: np.linalg.inv(np.tril(a)) @ y)  # fmt: skip
row("triangular_solve", apart(4, 4), real(4, 2), lower=False, tag="upper",
    expect=lambda a, y: np.linalg.inv(np.triu(a)) @ y)  # fmt: skip
row("solve", apart(5, 3, 3), real(5, 3, 2), kinds=FLOAT,
    expect=lambda a, y: np.linalg.inv(a) @ y)  # fmt: skip
row("slogdet", apart(5, 3, 3), kinds=FLOAT, expect=lambda a: (
    np.sign(np.linalg.det(a)), np.log(np.abs(np.linalg.det(a)))))  # fmt: skip
row("eigh", positive(5, 3, 3), kinds=FLOAT, expect=eigen)
row("qr", apart(5, 4, 3), kinds=FLOAT, expect=by_columns)
row("svd", apart(5, 4, 3), kinds=FLOAT, expect=singular)
row("svd", apart(2, 3, 4), expect=singular, tag="wide")


# ---- attention ---------------------------------------------------------------------------------
def attended(q: Array, k: Array, v: Array, causal: bool = False) -> Array:
    """Attention query by query, each over its visible keys."""
    out = np.zeros((*q.shape[:-1], v.shape[-1]))
    for at in np.ndindex(*q.shape[:-1]):
        seen = k.shape[-2] - q.shape[-2] + at[-1] + 1 if causal else k.shape[-2]
        scores = k[at[:-2]][:seen].astype(float) @ q[at] / 2
        shares = np.exp(scores) / np.exp(scores).sum()
        out[at] = shares @ v[at[:-2]][:seen]
    return out


def attended_grad(q: Array, k: Array, v: Array, g: Array, causal: bool = False) -> Any:
    """The gradient of attention by finite differences, accurate to eight digits in f64."""
    found = []
    for i in range(3):
        slopes = np.zeros((q, k, v)[i].shape)
        for at in np.ndindex(*slopes.shape):
            sides = []
            for step in (1e-6, -1e-6):
                moved = [x.astype(float) for x in (q, k, v)]
                moved[i][at] += step
                sides.append((attended(*moved, causal) * g).sum())
            slopes[at] = (sides[0] - sides[1]) / 2e-6
        found.append(slopes)
    return tuple(found)


QUERIES, KEYS, VALUES, SLOPES = (
    real(4, 2, *tail) for tail in ((2, 3, 4), (5, 4), (5, 3), (2, 3, 3))
)
row("attention", QUERIES, KEYS, VALUES, causal=False, scale=0.5, kinds=FLOAT, expect=attended)
row("attention", QUERIES, KEYS, VALUES, causal=True, scale=0.5, kinds=FLOAT, tag="causal",
    expect=lambda *xs: attended(*xs, causal=True))  # fmt: skip
row("attention_grad", QUERIES, KEYS, VALUES, SLOPES, causal=False, scale=0.5, kinds=FLOAT,
    smooth=False, expect=attended_grad)  # fmt: skip
row("attention_grad", QUERIES, KEYS, VALUES, SLOPES, causal=True, scale=0.5, kinds=FLOAT,
    smooth=False, tag="causal", expect=lambda *xs: attended_grad(*xs, causal=True))  # fmt: skip
