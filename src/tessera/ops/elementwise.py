"""Elementwise ops, with NumPy's broadcasting."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from ..core.dtypes import (
    DType,
    beyond,
    bool_,
    complex64,
    complex128,
    f32,
    f64,
    int32,
    uint32,
)
from ..core.errors import DTypeError
from ..core.layout import TensorType, dim_axes
from ..core.tensor_checks import integers, one_dtype
from .batch import last_dims
from .index_string import elementwise_index, propagate
from .op import (
    Array,
    Attrs,
    Build,
    Call,
    Grad,
    Inferred,
    Linear,
    Local,
    Memory,
    Op,
    Rule,
    define,
)


def need(name: str, ins: Sequence[TensorType], kinds: tuple[str, ...]) -> None:
    """Raises DTypeError unless every argument's dtype is of one of `kinds`."""
    if any(t.dtype.kind not in kinds for t in ins):
        raise DTypeError(
            f"{name}: takes {' or '.join(kinds)} tensors",
            rows=[(f"arg {i}", t) for i, t in enumerate(ins)],
            fix=f"cast with .to(ts.{'f32' if 'float' in kinds else 'int32'})",
        )


NUMBER = ("float", "int", "uint")
FIELD = (*NUMBER, "complex")
SMOOTH = ("float", "complex")
ANY = (*FIELD, "bool")


def _rule(
    name: str,
    kinds: tuple[str, ...],
    result: Callable[[tuple[TensorType, ...]], DType],
    linear: str,
) -> Rule:
    """The rule of an elementwise op after broadcasting; `result` gives its dtype."""

    def rule(ins: tuple[TensorType, ...], attrs: Attrs) -> Inferred:
        need(name, ins, kinds)
        one_dtype(name, ins)
        index = elementwise_index(tuple(t.rank for t in ins))
        return propagate(name, index, ins, result(ins), linear=linear)

    return rule


def unbroadcast(b: Build, g: Any, to: TensorType) -> Any:
    """`g` summed over the dims along which a value of type `to` was broadcast."""
    if g.type.shape == to.shape:
        return g
    extra = g.type.rank - to.rank
    dims = (
        *range(extra),
        *(i + extra for i, n in enumerate(to.shape) if n == 1 and g.type.shape[i + extra] != 1),
    )
    if dims:
        g = b("sum", g, dims=dims)
    return g if g.type.shape == to.shape else b("reshape", g, shape=to.shape)


def _same(ins: tuple[TensorType, ...]) -> DType:
    return ins[0].dtype


def _bool(ins: tuple[TensorType, ...]) -> DType:
    return bool_


def unary(
    name: str,
    grad: Grad | None,
    linear: str = "",
    kinds: tuple[str, ...] = SMOOTH,
    memory: Memory = "expensive",
    local: Local | None = None,
    result: Callable[[tuple[TensorType, ...]], DType] | None = None,
) -> Op:
    """Defines an elementwise op of one argument, computed by `local(c, x)`, or by the function
    `name` of the backend."""

    def by_name(c: Call, x: Array) -> Array:
        return getattr(c.xp, name)(x)

    degree: Linear = "each" if linear else ""
    return define(
        Op(name, _rule(name, kinds, result or _same, linear), local or by_name, grad,
           elements="computed", memory=memory, linear=degree)
    )  # fmt: skip


def binary(
    name: str,
    grad: Grad | None,
    linear: str = "",
    kinds: tuple[str, ...] = NUMBER,
    result: Callable[[tuple[TensorType, ...]], DType] = _same,
    local: Local | None = None,
    memory: Memory = "cheap",
) -> Op:
    """Defines an elementwise op of two broadcast arguments. Gradients from `grad` are summed back
    to each argument's shape. `linear` says which partial sums pass through: "each" if it is linear
    in each argument, "joint" if in both together."""

    def by_name(c: Call, x: Array, y: Array) -> Array:
        return getattr(c.xp, name)(x, y)

    def both(b: Build, node: Any, g: Any) -> Sequence[Any]:
        assert grad is not None
        return [
            None if part is None else unbroadcast(b, part, arg.type)
            for part, arg in zip(grad(b, node, g), node.args, strict=True)
        ]

    degree: Linear = "product" if linear == "each" else "joint" if linear == "joint" else ""
    return define(
        Op(name, _rule(name, kinds, result, linear), local or by_name, grad and both,
           elements="computed", memory=memory, linear=degree)
    )  # fmt: skip


def const(b: Build, like: Any, value: float) -> Any:
    """A scalar of the dtype of `like`."""
    return b("full", dtype=like.type.dtype, shape=(), value=value)


neg = unary("neg", lambda b, n, g: [b("neg", g)], "each", FIELD, "cheap")
exp = unary("exp", lambda b, n, g: [b("mul", g, n)])
log = unary("log", lambda b, n, g: [b("div", g, n.args[0])])
log1p = unary("log1p", lambda b, n, g: [b("div", g, b("add", n.args[0], const(b, n, 1.0)))])
expm1 = unary("expm1", lambda b, n, g: [b("mul", g, b("exp", n.args[0]))])
sqrt = unary("sqrt", lambda b, n, g: [b("div", b("mul", g, const(b, n, 0.5)), n)])
rsqrt = unary(
    "rsqrt",
    lambda b, n, g: [b("mul", b("mul", g, const(b, n, -0.5)), b("mul", n, b("mul", n, n)))],
)
tanh = unary("tanh", lambda b, n, g: [b("mul", g, b("sub", const(b, n, 1.0), b("mul", n, n)))])
sigmoid = unary(
    "sigmoid",
    lambda b, n, g: [b("mul", g, b("mul", n, b("sub", const(b, n, 1.0), n)))],
)
sin = unary("sin", lambda b, n, g: [b("mul", g, b("cos", n.args[0]))])
cos = unary("cos", lambda b, n, g: [b("neg", b("mul", g, b("sin", n.args[0])))])


def _bell(b: Build, x: Any, height: float) -> Any:
    return b("mul", b("exp", b("neg", b("mul", x, x))), const(b, x, height))


_SLOPE = 2.0 / math.sqrt(math.pi)  # that of erf at 0
_REAL = ("float",)
erf = unary("erf", lambda b, n, g: [b("mul", g, _bell(b, n.args[0], _SLOPE))], kinds=_REAL)
erfc = unary("erfc", lambda b, n, g: [b("mul", g, _bell(b, n.args[0], -_SLOPE))], kinds=_REAL)
erfinv = unary("erfinv", lambda b, n, g: [b("div", g, _bell(b, n, _SLOPE))], kinds=_REAL)


def _part(ins: tuple[TensorType, ...]) -> DType:
    return ins[0].dtype.real


def _abs_grad(b: Build, n: Any, g: Any) -> Sequence[Any]:
    x = n.args[0]
    if not x.type.dtype.is_complex:
        return [b("mul", g, b("sign", x))]
    zero, one = const(b, n, 0.0), const(b, n, 1.0)
    share = b("div", g, b("where", b("eq", n, zero), one, n))
    return [b("mul", b("cast", share, dtype=x.type.dtype), b("conj", x))]


abs_ = unary("abs", _abs_grad, "", FIELD, "cheap", result=_part)
sign = unary("sign", lambda b, n, g: [None], "", NUMBER, "cheap")
floor = unary("floor", lambda b, n, g: [None], kinds=_REAL, memory="cheap")
isfinite = unary("isfinite", None, kinds=_REAL, memory="cheap", result=_bool)
logical_not = unary("logical_not", None, "", ("bool",), "cheap", result=_bool)

# Complex numbers. The gradient of a real loss with respect to x + iy is dL/dx - i dL/dy, as in JAX,
# so the rule of a holomorphic function is the one of real numbers.
conj = unary("conj", lambda b, n, g: [b("conj", g)], "each", ("complex",), "cheap")
real = unary("real", lambda b, n, g: [b("cast", g, dtype=n.args[0].type.dtype)], "each",
             ("complex",), "cheap", result=_part)  # fmt: skip
imag = unary("imag", lambda b, n, g: [b("complex", const(b, g, 0.0), b("neg", g))], "each",
             ("complex",), "cheap", result=_part)  # fmt: skip
stop_gradient = define(
    Op(
        "stop_gradient",
        _rule("stop_gradient", ANY, _same, "moves"),
        lambda c, x: x,
        lambda b, n, g: [None],
        flops=lambda ins, outs, attrs: 0,
        elements="same",
        memory="view",
        linear="each",
    )
)

# The identity, as a mark: a loop that recomputes its body saves this value (passes/loops.py).
save_for_backward = define(
    Op(
        "save_for_backward",
        _rule("save_for_backward", ANY, _same, "moves"),
        lambda c, x: x,
        lambda b, n, g: [g],
        flops=lambda ins, outs, attrs: 0,
        elements="same",
        memory="view",
        linear="each",
    )
)

# The value of the first argument with the gradient of the second, whose value is not used.
straight_through = define(
    Op(
        "straight_through",
        _rule("straight_through", ("float",), _same, ""),
        lambda c, value, path: value,
        lambda b, n, g: [None, g],
        flops=lambda ins, outs, attrs: 0,
        batch=last_dims,
        elements="same",
        memory="view",
    )
)

add = binary("add", lambda b, n, g: [g, g], "joint", FIELD)
sub = binary("sub", lambda b, n, g: [g, b("neg", g)], "joint", FIELD)
mul = binary("mul", lambda b, n, g: [b("mul", g, n.args[1]), b("mul", g, n.args[0])], "each", FIELD)


def _of_parts(ins: tuple[TensorType, ...]) -> DType:
    return complex128 if ins[0].dtype is f64 else complex64


def _complex_rule(ins: tuple[TensorType, ...], attrs: Attrs) -> Inferred:
    if ins[0].dtype not in (f32, f64):
        need("complex", [t.with_dtype(bool_) for t in ins], ("float",))
    return _each_complex(ins, attrs)


_each_complex = _rule("complex", ("float",), _of_parts, "joint")


def _complex_grad(b: Build, n: Any, g: Any) -> Sequence[Any]:
    x, y = n.args
    return [unbroadcast(b, b("real", g), x.type),
            unbroadcast(b, b("neg", b("imag", g)), y.type)]  # fmt: skip


complex_ = define(
    Op("complex", _complex_rule, lambda c, x, y: c.xp.complex(x, y), _complex_grad,
       elements="computed", memory="cheap", linear="joint")
)  # fmt: skip


def _div_rule(ins: tuple[TensorType, ...], attrs: Attrs) -> Inferred:
    # Linear in the numerator alone: a partial denominator must be completed first.
    done = (ins[0], ins[1].complete())
    return _each_div(done, attrs)


_each_div = _rule("div", SMOOTH, _same, "each")


def _div_grad(b: Build, n: Any, g: Any) -> Sequence[Any]:
    x, y = n.args
    gx = b("div", g, y)
    return [unbroadcast(b, gx, x.type), unbroadcast(b, b("neg", b("mul", gx, n)), y.type)]


div = define(
    Op("div", _div_rule, lambda c, x, y: c.xp.div(x, y), _div_grad,
       elements="computed", memory="expensive", linear="quotient")
)  # fmt: skip


def _pow_grad(b: Build, n: Any, g: Any) -> Sequence[Any]:
    x, y = n.args
    zero, one = const(b, x, 0.0), const(b, x, 1.0)
    gx = b("mul", g, b("mul", y, b("pow", x, b("sub", y, one))))
    if x.type.dtype.is_complex:
        none = b("eq", x, zero)
        log = b("log", b("where", none, one, x))
        return [b("where", b("eq", y, zero), zero, gx), b("mul", g, b("mul", n, log))]
    if y.op != "full" or not y.attrs["value"]:  # x**0 is one everywhere, at zero too
        gx = b("where", b("eq", y, zero), zero, gx)
    # 0**y is zero for all positive y, so its gradient at zero is that limit.
    flat = b("logical_and", b("eq", x, zero), b("ge", y, zero))
    gy = b("mul", g, b("mul", n, b("log", b("where", flat, one, x))))
    return [gx, b("where", flat, zero, gy)]


def _whole_power(c: Call, x: Array, y: Array) -> Array:
    """`x` to the integer power `y` by repeated squaring; an overflow wraps. A negative `y` gives
    1/x**-y for x of 1 and -1, and 0 otherwise."""
    xp, dtype = c.xp, c.out.dtype

    def number(n: int) -> Array:
        return xp.full((), n, dtype)

    def odd(v: Array) -> Array:
        return xp.eq(xp.bit_and(v, number(1)), number(1))

    one = number(1)
    out, square, exponent = one, x, y
    for _ in range(8 * dtype.bytes - (dtype.kind == "int")):
        out = xp.where(odd(exponent), xp.mul(out, square), out)
        square, exponent = xp.mul(square, square), xp.shift_right(exponent, one)
    if dtype.kind == "uint":
        return out
    sign = xp.where(odd(y), x, one)
    unit = xp.logical_or(xp.eq(x, one), xp.eq(x, number(-1)))
    return xp.where(xp.lt(y, number(0)), xp.where(unit, sign, number(0)), out)


def _pow_local(c: Call, x: Array, y: Array) -> Array:
    return c.xp.pow(x, y) if c.out.dtype.is_float else _whole_power(c, x, y)


def _pow_both(b: Build, n: Any, g: Any) -> Sequence[Any]:
    return [unbroadcast(b, d, a.type) for d, a in zip(_pow_grad(b, n, g), n.args, strict=True)]


pow_ = define(
    Op("pow", _rule("pow", FIELD, _same, ""), _pow_local, _pow_both,
       elements="computed", memory="expensive")
)  # fmt: skip


def _atan2_grad(b: Build, n: Any, g: Any) -> Sequence[Any]:
    """The gradient of atan2, zero at the origin as in PyTorch. The point is normalised first,
    because the square of a small coordinate would underflow."""
    y, x = n.args
    zero, one = const(b, n, 0.0), const(b, n, 1.0)
    size = b("maximum", b("abs", x), b("abs", y))
    inside = b("logical_and", b("gt", size, zero), b("isfinite", size))
    size = b("stop_gradient", b("where", inside, size, one))
    x, y = b("div", x, size), b("div", y, size)
    square = b("add", b("mul", x, x), b("mul", y, y))
    part = b("div", g, b("mul", size, b("where", b("eq", square, zero), one, square)))
    return [b("mul", part, x), b("neg", b("mul", part, y))]


atan2 = binary("atan2", _atan2_grad, kinds=("float",), memory="expensive")


def _pick_grad(loses: str) -> Grad:
    def grad(b: Build, n: Any, g: Any) -> Sequence[Any]:
        # Equal arguments share the gradient, as the mean of the two one-sided derivatives. With a
        # NaN neither comparison holds, so both get the gradient.
        x, y = n.args
        zero, half = const(b, g, 0.0), b("mul", g, const(b, g, 0.5))
        tie = b("eq", x, y)
        first = b("where", b(loses, x, y), zero, g)
        second = b("where", b(loses, y, x), zero, g)
        return [b("where", tie, half, first), b("where", tie, half, second)]

    return grad


maximum = binary("maximum", _pick_grad("lt"))
minimum = binary("minimum", _pick_grad("gt"))


def _whole_quotient(name: str) -> Callable[[Call, Array, Array], Array]:
    """The function `name` of the backend; an integer quotient by zero is the farthest integer
    (`beyond`)."""

    def local(c: Call, x: Array, y: Array) -> Array:
        dtype = c.out.dtype
        if dtype.is_float:
            return getattr(c.xp, name)(x, y)
        nought = c.xp.eq(y, c.xp.full((), 0, dtype))
        made = getattr(c.xp, name)(x, c.xp.where(nought, c.xp.full((), 1, dtype), y))
        return c.xp.where(nought, c.xp.full((), beyond(dtype), dtype), made)

    return local


mod = binary("mod", lambda b, n, g: [g, b("neg", b("mul", g, b("floordiv", *n.args)))],
             local=_whole_quotient("mod"), memory="expensive")  # fmt: skip
floordiv = binary("floordiv", lambda b, n, g: [None, None], local=_whole_quotient("floordiv"),
                  memory="expensive")  # fmt: skip
for _name in ("eq", "ne"):
    binary(_name, None, kinds=ANY, result=_bool)
for _name in ("lt", "le", "gt", "ge"):
    binary(_name, None, result=_bool)
for _name in ("logical_and", "logical_or", "logical_xor"):
    binary(_name, None, kinds=("bool",), result=_bool)
for _name in ("bit_and", "bit_or", "bit_xor", "shift_left", "shift_right"):
    binary(_name, None, kinds=("uint", "int"))


def _where_rule(ins: tuple[TensorType, ...], attrs: Attrs) -> Inferred:
    need("where (condition)", ins[:1], ("bool",))
    one_dtype("where", ins[1:], "if true", "if false")
    index = elementwise_index(tuple(t.rank for t in ins))
    partial = tuple(p for p in ins[1].partial if p in ins[2].partial and p[1] == "sum")
    ins = (ins[0].complete(), ins[1].with_partial(partial), ins[2].with_partial(partial))
    got = propagate("where", index, tuple(t.complete() for t in ins), ins[1].dtype)
    free = tuple(p for p in partial if not any(p[0] in dim_axes(d) for d in got.outs[0].dims))
    wants = (got.wants[0], got.wants[1].with_partial(free), got.wants[2].with_partial(free))
    return Inferred(wants, (got.outs[0].with_partial(free),))


def _where_grad(b: Build, n: Any, g: Any) -> Sequence[Any]:
    pick, x, y = n.args
    zero = const(b, g, 0.0)
    return [
        None,
        unbroadcast(b, b("where", pick, g, zero), x.type),
        unbroadcast(b, b("where", pick, zero, g), y.type),
    ]


where = define(
    Op("where", _where_rule, lambda c, p, x, y: c.xp.where(p, x, y), _where_grad,
       elements="computed", memory="cheap", linear="joint")
)  # fmt: skip


def _inside_rule(ins: tuple[TensorType, ...], attrs: Attrs) -> Inferred:
    integers("inside", "ids", ins[0])
    return propagate("inside", elementwise_index((ins[0].rank,)), ins, f32)


def _inside_local(c: Call, ids: Array) -> Array:
    """1 for an id from 0 to `size` - 1, NaN for any other id, and 0 for the id `ignore`."""
    xp, size, ignore = c.xp, c.attrs["size"], c.attrs.get("ignore")

    def number(value: float, dtype: DType = f32) -> Array:
        return xp.full((), value, dtype)

    if c.ins[0].dtype is uint32:  # the upper half is outside too
        ids = xp.minimum(ids, number(2**31 - 1, uint32))
    ids = xp.cast(ids, int32)
    ok = xp.logical_and(xp.ge(ids, number(0, int32)), xp.lt(ids, number(size, int32)))
    weight = xp.where(ok, number(1.0), number(math.nan))
    if ignore is None:
        return weight
    return xp.where(xp.eq(ids, number(ignore, int32)), number(0.0), weight)


# 1 for an id from 0 to size - 1, NaN for one outside, 0 for the id `ignore`: the weight of a label
# in a loss, so that the loss is NaN if a label is none of its classes.
inside = define(
    Op("inside", _inside_rule, _inside_local, attrs="size ignore?",
       elements="computed", memory="cheap")
)  # fmt: skip
