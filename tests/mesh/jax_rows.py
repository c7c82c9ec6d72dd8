"""For each primitive of JAX with a rule, a function whose program has it, and its arguments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import NamedSharding, PartitionSpec

import tessera as ts

assert ts  # which sets the engine's flags
RNG = np.random.default_rng(3)
X = RNG.normal(size=(4, 6)).astype(np.float32)
Y = RNG.normal(size=(4, 6)).astype(np.float32)
UNIT = RNG.uniform(0.05, 0.95, (4, 6)).astype(np.float32)
ABOVE = UNIT + 1
I = RNG.integers(-50, 50, (4, 6)).astype(np.int32)  # noqa: E741  # integers
J = RNG.integers(1, 9, (4, 6)).astype(np.int32)
U = RNG.integers(0, 2**32, (4, 6), dtype=np.uint32)
B = X > 0
C = Y > 0
ODD = np.array([0.0, -0.0, np.nan, -np.nan, np.inf, -np.inf, 1e-45, -2.5], np.float32)
IMAGE = RNG.normal(size=(2, 7, 8, 4)).astype(np.float32)
KERNEL = RNG.normal(size=(3, 2, 2, 6)).astype(np.float32)
SQUARE = X @ X.T + np.eye(4, dtype=np.float32)
ROWS: dict[str, list[Row]] = {}


class Row(NamedTuple):
    """A function of JAX and its arguments; `smooth` if its gradient is compared."""

    fn: Callable[..., Any]
    args: tuple[Any, ...]
    smooth: bool
    rtol: float


def row(name: str, fn: Callable[..., Any], *args: Any, smooth: bool = False,
        rtol: float = 2e-5) -> None:  # fmt: skip
    ROWS.setdefault(name, []).append(Row(fn, args, smooth, rtol))


# -- elementwise ----------------------------------------------------------------------------------
for _name in ("abs", "cos", "erf", "erfc", "exp", "exp2", "expm1", "logistic", "sin", "square",
              "tan", "tanh", "asinh", "atan", "cosh", "sinh", "neg", "cbrt"):  # fmt: skip
    row(_name, getattr(lax, _name), X, smooth=True)
for _name in ("log", "log1p", "sqrt", "rsqrt", "erf_inv", "asin", "acos", "atanh"):
    row(_name, getattr(lax, _name), UNIT, smooth=True)
row("acosh", lax.acosh, ABOVE, smooth=True)
for _name in ("ceil", "floor", "sign", "is_finite"):
    row(_name, getattr(lax, _name), 3 * X)
row("is_finite", lax.is_finite, ODD)
row("sign", lax.sign, I)
row("abs", lax.abs, I)
row("neg", lax.neg, I)
row("not", lambda x, y: (~x, ~y), I, B)
row("stop_gradient", lambda x: lax.stop_gradient(x) * x, X, smooth=True)
row("copy", lambda x: jnp.array(x, copy=True), X, smooth=True)
row("remat2", jax.checkpoint(lambda x: jnp.sin(x) * x), X, smooth=True)
row("name", lambda x: checkpoint_name(jnp.sin(x), "s"), X, smooth=True)


def _placed(x: jax.Array) -> jax.Array:
    mesh = jax.make_mesh((1,), ("a",), axis_types=(jax.sharding.AxisType.Auto,))
    return lax.with_sharding_constraint(x, NamedSharding(mesh, PartitionSpec("a")))


row("sharding_constraint", _placed, X)
row("optimization_barrier", lambda x, y: lax.optimization_barrier((x, y)), X, Y, smooth=True)
row("device_put", lambda x: jax.device_put(x, jax.devices()[0]), X)
for _name in ("add", "sub", "mul", "max", "min", "atan2", "div"):
    row(_name, getattr(lax, _name), X, Y, smooth=True)
for _name in ("add", "sub", "mul", "max", "min"):
    row(_name, getattr(lax, _name), I, J)
    row(_name, getattr(lax, _name), U, U[::-1])
for _name in ("max", "min"):
    row(_name, getattr(lax, _name), B, C)
row("add_any", jax.grad(lambda x: jnp.sum(jnp.sin(x) * jnp.cos(x))), X, smooth=True)
for _name in ("eq", "ne", "lt", "le", "gt", "ge"):
    row(_name, getattr(lax, _name), np.round(X), np.round(Y))
    row(_name, getattr(lax, _name), I % 5, J % 5)
for _name in ("and", "or", "xor"):
    row(_name, getattr(lax, f"bitwise_{_name}"), I, J)
    row(_name, getattr(lax, f"bitwise_{_name}"), B, C)
row("div", lax.div, I, J)
row("div", lax.div, U, U[::-1] % 9 + 1)
row("rem", lax.rem, I, J - 10)
row("rem", lax.rem, 9 * X, Y, smooth=True)
row("rem", lax.rem, np.round(X), Y, smooth=True)
row("pow", lax.pow, ABOVE, Y, smooth=True)
row("pow", lax.pow, X, J)
row("integer_pow", lambda x: lax.integer_pow(x, 3) + lax.integer_pow(x, -2), ABOVE, smooth=True)
row("round", lambda x: lax.round(x * 2, lax.RoundingMethod.AWAY_FROM_ZERO), np.round(X * 4) / 4)
row("round", lambda x: lax.round(x * 2, lax.RoundingMethod.TO_NEAREST_EVEN), np.round(X * 4) / 4)
row("clamp", lambda x: lax.clamp(-0.5, x, 0.7), X, smooth=True)
row("clamp", lambda x: lax.clamp(-1.0, x, 1.0), np.round(X), smooth=True)
row("select_n", lambda p, x, y: lax.select(p, x, y), B, X, Y)
row("select_n", lambda i, x, y: lax.select_n(i % 3, x, y, x * y), J, X, Y)
row(
    "convert_element_type", lambda x: (x.astype(bool), (9 * x).astype(int), x.astype("bfloat16")), X
)
row("bitcast_convert_type", lambda x: lax.bitcast_convert_type(x, jnp.uint32), X)
for _name in ("shift_left", "shift_right_logical", "shift_right_arithmetic"):
    row(_name, getattr(lax, _name), I, J * 5)
    row(_name, getattr(lax, _name), U, (J * 5).astype(np.uint32))
row("population_count", lambda x, y: (lax.population_count(x), lax.population_count(y)), I, U)
row("clz", lambda x, y: (lax.clz(x), lax.clz(y >> 9), lax.clz(y * 0)), I, U)
row("nextafter", lax.nextafter, np.tile(ODD, 8), np.repeat(ODD, 8))
row("nextafter", lax.nextafter, X, Y)
row("reduce_precision", lambda x: lax.reduce_precision(x, 8, 7) + lax.reduce_precision(x, 5, 10), X)

# -- shape ----------------------------------------------------------------------------------------
row("broadcast_in_dim", lambda x: lax.broadcast_in_dim(x, (2, 4, 5, 6), (1, 3)), X, smooth=True)
row("reshape", lambda x: lax.reshape(x, (3, 8)), X, smooth=True)
row("squeeze", lambda x: lax.squeeze(x[:1], (0,)), X, smooth=True)
row("transpose", lambda x: lax.transpose(x, (1, 0)), X, smooth=True)
row("concatenate", lambda x, y: lax.concatenate([x, y], 1), X, Y, smooth=True)
row("stack", lambda k: jax.random.split(k), np.array([0, 1], np.uint32))
row("unstack", lambda x: lax.unstack(x, axis=1) if hasattr(lax, "unstack") else tuple(x), X)
row("split", lambda x: lax.split(x, (1, 3, 2), 1), X, smooth=True)
row("tile", lambda x: lax.tile(x, (2, 3)), X, smooth=True)
row("rev", lambda x: lax.rev(x, (0, 1)), X, smooth=True)
row("slice", lambda x: lax.slice(x, (1, 0), (4, 5), (2, 3)), X, smooth=True)
row("pad", lambda x: lax.pad(x, 2.0, ((1, -1, 2), (-2, 3, 0))), X, smooth=True)
row("pad", lambda x, p: lax.pad(x, p, ((0, 0, 0), (1, 2, 1))), B, np.bool_(True))
row("iota", lambda: lax.broadcasted_iota(jnp.uint32, (3, 4), 1))
row(
    "empty", lambda: jnp.shape(lax.empty((3, 4), jnp.float32))[0] * lax.empty((2,), jnp.float32) * 0
)
row("dynamic_slice", lambda x, i: lax.dynamic_slice(x, (i[0], i[1]), (2, 3)), X, np.array([3, 1]),
    smooth=True)  # fmt: skip
row("dynamic_update_slice", lambda x, y, i: lax.dynamic_update_slice(x, y[:2, :3], (i[0], i[1])),
    X, Y, np.array([1, 5]), smooth=True)  # fmt: skip

# -- indexing -------------------------------------------------------------------------------------
IDS = np.array([[1, 2], [3, 0], [3, 5]], np.int32)
row("gather", lambda x, i: jnp.take(x, i, axis=1), X, IDS, smooth=True)
row("gather", lambda x, i: jnp.take(x, i + 3, axis=1, mode="clip"), X, IDS, smooth=True)
row("gather", lambda x, i: jnp.take(x, i + 3, axis=1, fill_value=7.0), X, IDS, smooth=True)
row("gather", lambda x, i: x[i[:, 0], i[:, 1]], X, IDS, smooth=True)
row("gather", lambda x, i: x[:, i][i[:2]], X, IDS, smooth=True)
row("gather", lambda x, y: jnp.take_along_axis(x, jnp.argsort(y, 1)[:, :3], 1), X, Y, smooth=True)
row("gather", lambda x, i: jax.vmap(lambda r, k: lax.dynamic_slice(r, (k,), (3,)))(x, i[:, 0]),
    X, I, smooth=True)  # fmt: skip
row("gather", lambda x, i: jax.vmap(lambda r, k: r[k], (1, 0), 0)(x, i[0] % 4), X, J)
SOME = np.array([0, 2, 0, 3, 0], np.int32)
_wide = np.concatenate([Y, X])[:5]
row("scatter", lambda x, i, u: x.at[i].set(u), X, SOME, _wide, smooth=True)
row("scatter", lambda x, i, u: x.at[1:3, i].set(u[:2, :5]), X, SOME, _wide, smooth=True)
row(
    "scatter", lambda x, i, u: x.at[i, i + 4].set(u[:, 0], mode="drop"), X, SOME, _wide, smooth=True
)
row("scatter", lambda x, i: x.at[i[:, 0] % 4, i[:, 1]].set(True), B, J % 6)
row("scatter", lambda x, y, i: jax.vmap(lambda r, s, k: r.at[k].set(s[:2]))(x, y, i[:, :2]),
    X, Y, J % 6, smooth=True)  # fmt: skip
row("scatter", lambda x, y, i: jax.vmap(lambda r, s, k: lax.dynamic_update_slice(r, s[:2], (k,)))(
    x, y, i[:, 0]), X, Y, J, smooth=True)  # fmt: skip
row("scatter-add", lambda x, i, u: x.at[i].add(u), X, SOME, _wide, smooth=True)
row("scatter-add", lambda x, i: x.at[i[:, 0] % 4, i[:, 1]].add(i[:, 2]), I, J % 6)
row("scatter-sub", lambda x, i, u: x.at[i].subtract(u), X, SOME, _wide)
row("scatter-mul", lambda x, i, u: x.at[i].mul(u), X, SOME, _wide)
row("scatter-min", lambda x, i, u: x.at[i].min(u, mode="drop"), X, SOME + 1, _wide)
row("scatter-max", lambda x, i, u: x.at[i].max(u), X, SOME, _wide)
row("scatter-max", lambda x, i: x.at[i[:, 0] % 4].max(i), I, J)

# -- reductions -----------------------------------------------------------------------------------
for _f in (jnp.sum, jnp.prod, jnp.max, jnp.min):
    row(f"reduce_{_f.__name__}", lambda x, f=_f: f(x, 1), X, smooth=True)
    row(f"reduce_{_f.__name__}", lambda x, f=_f: f(x, (0, 1)), J)
row("reduce_and", lambda x, b: (lax.reduce(x, np.int32(-1), lax.bitwise_and, (1,)), b.all(0)), I, B)
row("reduce_or", lambda x, b: (lax.reduce(x, np.int32(0), lax.bitwise_or, (0,)), b.any(0)), I, B)
row("reduce_xor", lambda x: lax.reduce(x, np.int32(0), lax.bitwise_xor, (0, 1)), I)
row("reduce_xor", lambda x: lax.reduce(x, np.bool_(False), lax.bitwise_xor, (1,)), B)
for _f in (lax.argmax, lax.argmin):
    row(_f.__name__, lambda x, f=_f: f(x, 1, np.int32), X)
row("reduce", lambda x: lax.reduce(x, np.float32(1), lambda p, q: p * 0.5 + q * p, (1,)), X)
row("reduce", lambda x, i: lax.reduce(
    (x, i), (-jnp.inf, np.int32(-1)),
    lambda p, q: (jnp.maximum(p[0], q[0]), jnp.where(p[0] >= q[0], p[1], q[1])), (0,)),
    X, I)  # fmt: skip
for _f in (lax.cumsum, lax.cumprod, lax.cummax, lax.cummin, lax.cumlogsumexp):
    for _back in (False, True):
        row(_f.__name__, lambda x, f=_f, r=_back: f(x, 1, reverse=r), X, smooth=True)
WINDOW = ((2, 3), (1, 2), ((1, 3), (0, 4)))
row("reduce_window_max", lambda x: lax.reduce_window(x, -jnp.inf, lax.max, *WINDOW), X, smooth=True)
row("reduce_window_max", lambda x: lax.reduce_window(
    x, -jnp.inf, lax.max, *WINDOW, base_dilation=(2, 1), window_dilation=(1, 2)), X)  # fmt: skip
row("reduce_window_min", lambda x: lax.reduce_window(x, jnp.inf, lax.min, *WINDOW), X)
row("reduce_window_min", lambda x: lax.reduce_window(x, np.int32(2**31 - 1), lax.min, *WINDOW), I)
row("reduce_window_sum", lambda x: lax.reduce_window(x, 0.0, lax.add, *WINDOW), X, smooth=True)
row("reduce_window_sum", lambda x: lax.reduce_window(x, 0.0, lax.add, (4, 5), (1, 1), "SAME"), X,
    smooth=True)  # fmt: skip
row("reduce_window_sum", lambda x: lax.reduce_window(x, np.int32(0), lax.add, *WINDOW), I)
row("reduce_window", lambda x: lax.reduce_window(
    x, 0.0, lambda p, q: p + 2 * q, *WINDOW[:2], "SAME"), X)  # fmt: skip


def _pooled(x: Any) -> Any:
    return jnp.sum(lax.reduce_window(x, -jnp.inf, lax.max, *WINDOW[:2], "VALID") ** 2)


row("select_and_scatter_add", jax.grad(_pooled), X)
row("select_and_scatter_add", jax.grad(lambda x: jnp.sum(jnp.sin(
    lax.reduce_window(x, np.inf, lax.min, (1, 2), (1, 1), "VALID")))), X)  # fmt: skip
row("sort", lambda x, y: lax.sort((jnp.round(x), y, x), num_keys=2), X, Y, smooth=True)
row("sort", lambda x: lax.sort(x, 0), ODD)
row("lt_to", lambda x: jnp.searchsorted(jnp.sort(x), x, method="compare_all"), ODD)
row("le_to", lambda x, y: jnp.searchsorted(jnp.sort(x), y), np.round(X[0]), np.round(Y[0]))
row("top_k", lambda x: lax.top_k(x, 3), X, smooth=True)
row("approx_top_k", lambda x: (lax.approx_max_k(x, 3), lax.approx_min_k(x, 2)), X)

# -- products -------------------------------------------------------------------------------------
row("dot_general", lambda x, y: jnp.einsum("bij,bkj->bki", x.reshape(2, 2, 6), y.reshape(2, 2, 6)),
    X, Y, smooth=True)  # fmt: skip
row("dot_general", lambda x, y: lax.dot(x.astype("bfloat16"), y.T.astype("bfloat16"),
                                        preferred_element_type=jnp.float32), X, Y)  # fmt: skip
row("dot_general", lambda x, y: lax.dot(x.astype("int8"), y.T.astype("int8"),
                                        preferred_element_type=jnp.int32), I, J)  # fmt: skip


def _conv(x: Any, w: Any, **how: Any) -> Any:
    how = {"window_strides": (1, 1), "padding": "SAME", "feature_group_count": 2} | how
    numbers = how.pop("dimension_numbers", ("NHWC", "HWIO", "NHWC"))
    return lax.conv_general_dilated(x, w, dimension_numbers=numbers, **how)


for _how in (
    {"window_strides": (2, 1), "padding": "VALID"}, {"rhs_dilation": (2, 1)},
    {"lhs_dilation": (2, 3), "padding": ((1, -1), (0, 2))},
):  # fmt: skip
    row("conv_general_dilated", lambda x, w, h=_how: _conv(x, w, **h), IMAGE, KERNEL, smooth=True)
row("conv_general_dilated", lambda x, w: _conv(x, w, dimension_numbers=("HNCW", "WOIH", "NWHC"),
    feature_group_count=1, batch_group_count=2), IMAGE.transpose(1, 0, 3, 2), KERNEL.reshape(
    3, 2, 4, 3), smooth=True)  # fmt: skip
row("conv_general_dilated", jax.grad(lambda w, x: jnp.sum(_conv(x, w) ** 2)), KERNEL, IMAGE,
    rtol=1e-4)  # fmt: skip
row("cholesky", lambda x: jnp.linalg.cholesky(x), SQUARE, smooth=True)
for _lower, _trans, _unit in ((True, 0, False), (True, 1, True), (False, 1, False)):
    row("triangular_solve", lambda a, b, lo=_lower, t=_trans, u=_unit:
        jax.scipy.linalg.solve_triangular(a, b, lower=lo, trans=t, unit_diagonal=u), SQUARE, X,
        smooth=True, rtol=1e-3)  # fmt: skip
row("triangular_solve", lambda a, b: lax.linalg.triangular_solve(a, b, left_side=False, lower=True),
    SQUARE, X.T, smooth=True, rtol=1e-3)  # fmt: skip
row("eigh", lambda a: jnp.linalg.eigh(a)[0], SQUARE, rtol=1e-4)
row("qr", lambda x: jnp.abs(jnp.linalg.qr(x.T)[1]), X, rtol=1e-4)
row("svd", lambda x: jnp.linalg.svd(x, compute_uv=False), X, rtol=1e-4)
row("svd", lambda x: jnp.abs(jnp.linalg.svd(x, full_matrices=False)[0]), X, rtol=1e-3)

# -- control, gradients and random bits -----------------------------------------------------------
for _back in (False, True):
    row("scan", lambda x, y, r=_back: lax.scan(
        lambda c, v: (c * 0.5 + v * y[0], (c, c * v)), y[1], x, reverse=r), X, Y,
        smooth=True)  # fmt: skip
row("scan", lambda x: lax.fori_loop(0, 20, lambda i, v: v * 0.9 + i, x), X, smooth=True)
row("while", lambda x, y: lax.while_loop(
    lambda v: jnp.sum(jnp.abs(v[0])) > y[0, 0], lambda v: (v[0] * 0.9, v[1] + 1), (x, 0)), X,
    ABOVE)  # fmt: skip
for _sign in (1, -1):
    row("cond", lambda x, s=_sign: lax.cond(
        s * jnp.sum(x * x) > 0, lambda v: jnp.sin(v), lambda v: v * v, x), X,
        smooth=True)  # fmt: skip
row("cond", lambda x, i: lax.switch(i[0, 0] + 9, [jnp.sin, jnp.cos, jnp.exp], x), X, J, smooth=True)
row("custom_gradient", jax.nn.relu, np.round(X), smooth=True)
row("custom_gradient", lambda x, y: jnp.logaddexp(x, jax.nn.relu6(y)), X, Y, smooth=True)


@jax.custom_vjp
def _clipped(x: Any, y: Any) -> Any:
    return x * y


_clipped.defvjp(lambda x, y: (x * y, y), lambda y, g: (jnp.clip(g * y, -0.1, 0.1), None))
row("custom_gradient", lambda x, y: _clipped(jnp.sin(x), y), X, Y, smooth=True)
row("iota_2x32_shape", lambda k: jax.random.bits(k, (3, 4)), np.array([0, 1], np.uint32))
for _draw in (
    lambda k: jax.random.normal(k, (3, 4)),
    lambda k: jax.random.uniform(jax.random.split(k, 3)[1], (5,)),
    lambda k: jax.random.randint(jax.random.fold_in(k, 7), (5,), 0, 1000),
    lambda k: jax.random.permutation(k, 10),
    lambda k: jax.random.bernoulli(k, 0.3, (9,)),
    lambda k: jax.random.categorical(k, jnp.asarray(X)),
    lambda k: jax.vmap(lambda q: jax.random.exponential(q, (2,)))(jax.random.split(k, (3,))),
    lambda k: jax.random.normal(jax.random.split(jax.random.wrap_key_data(k), (2, 3))[1, 2], (2,)),
    lambda k: jax.random.normal(jax.random.key(5), (2,)) + 0 * k[0],
):
    row("threefry2x32", _draw, np.array([0, 3], np.uint32))
