"""The ops on values of a kernel: one value per op, with its attributes, the type of its result, and
a computation against `xp`, which NumPy and JAX both provide (ops/op.py).

>>> from tessera.core.dtypes import bf16
>>> dot = op_of("dot", {})
>>> dot.infer([Type(bf16, (64, 32)), Type(bf16, (16, 32))], {"transpose": "b"}, {})
f32[64, 16]
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from ...core.dtypes import bool_, dtype_of, f32, int8, int32
from ...core.errors import DTypeError, ShapeError
from ...core.wording import nearest
from .index import Index, parts, sizes_of, wrong
from .op import (
    Args,
    Array,
    Attrs,
    Call,
    Read,
    TileOp,
    Type,
    broadcast,
    dim_of,
    need_kind,
    need_number,
    number_text,
    one_dtype,
    unlike,
    values_of,
)

OPS: dict[str, TileOp] = {}
REDUCTIONS: dict[str, TileOp] = {}  # those that have a dim, also if their name is in OPS


# ---- attributes --------------------------------------------------------------------------------
def _shape(text: str) -> str:
    return ",".join(Index(part).text for part in parts(text)) if text else ""


def _sizes(attrs: Attrs, names: Mapping[str, int]) -> tuple[int, ...]:
    texts = tuple(Index(p) for p in parts(attrs["shape"])) if attrs["shape"] else ()
    shape = sizes_of(texts, names)
    if any(n < 1 for n in shape):
        raise wrong(f"shape {list(shape)} has a dim below 1", "make each at least 1", ShapeError)
    return shape


def _transpose(text: str) -> str:
    if text not in ("", "a", "b", "a,b"):
        raise wrong(f"transpose={text} is not a, b or a,b", "write transpose=b, or leave it out")
    return text


def _index(text: str) -> str:
    return Index(text).text


def _dtype(text: str) -> str:
    return dtype_of(text).name


# ---- ops on each element -----------------------------------------------------------------------
def _each(
    name: str, operands: int, takes: str, compute: Callable[..., Array] | str = "", out: str = ""
) -> None:
    """Defines an op on each element. `compute` is a function, or the name that `xp` has for it;
    `out` the dtype of the result if it is not that of the operands."""

    def infer(args: Args, attrs: Attrs, names: Mapping[str, int]) -> Type:
        dtype = one_dtype(name, args)
        need_kind(name, takes, dtype)
        return Type(dtype_of(out) if out else dtype, broadcast(name, args))

    def local(c: Call, *xs: Array) -> Array:
        return getattr(c.xp, str(compute) or name)(*xs)

    run = compute if callable(compute) else local
    OPS[name] = TileOp(name, operands, infer, run, lambda ins, out: out.size)


def _logistic_of(slope: Callable[[Call, Array], Array]) -> Callable[[Call, Array], Array]:
    """x times the logistic function of `slope(x)`, in f32 if x is narrower."""

    def compute(c: Call, x: Array) -> Array:
        wide = c.cast(x, f32)
        return c.cast(c.xp.mul(wide, c.xp.sigmoid(slope(c, wide))), c.out.dtype)

    return compute


def _gelu_slope(c: Call, x: Array) -> Array:
    """2u, where gelu is half of x (1 + tanh u)."""
    cubic = c.xp.mul(c.scalar("0.044715", f32), c.xp.mul(x, x))
    root = repr(2 * math.sqrt(2 / math.pi))
    return c.xp.mul(x, c.xp.mul(c.scalar(root, f32), c.xp.add(c.scalar("1", f32), cubic)))


_each("add", 2, "numbers")
_each("sub", 2, "numbers")
_each("mul", 2, "numbers")
_each("div", 2, "floats")
_each("max", 2, "numbers", "maximum")
_each("min", 2, "numbers", "minimum")
_each("neg", 1, "numbers")
_each("abs", 1, "numbers")
_each("exp", 1, "floats")
_each("log", 1, "floats")
_each("tanh", 1, "floats")
_each("sqrt", 1, "floats")
_each("rsqrt", 1, "floats")
_each("erf", 1, "floats")
_each("sigmoid", 1, "floats")
_each("gelu", 1, "floats", _logistic_of(_gelu_slope))
_each("silu", 1, "floats", _logistic_of(lambda c, x: x))
_each("lt", 2, "numbers", out="bool")
_each("le", 2, "numbers", out="bool")
_each("gt", 2, "numbers", out="bool")
_each("ge", 2, "numbers", out="bool")
_each("eq", 2, "numbers", out="bool")
_each("ne", 2, "numbers", out="bool")
_each("and", 2, "bools", "logical_and")
_each("or", 2, "bools", "logical_or")
_each("not", 1, "bools", "logical_not")


def _where(args: Args, attrs: Attrs, names: Mapping[str, int]) -> Type:
    pick, *rest = args
    if not isinstance(pick, Type) or pick.dtype is not bool_:
        fix = "compare first, as in: %c = lt %a %b"
        raise wrong(f"where chooses by a bool, not {pick}", fix, DTypeError)
    return Type(one_dtype("where", rest), broadcast("where", args))


OPS["where"] = TileOp("where", 3, _where, lambda c, *xs: c.xp.where(*xs), lambda ins, out: out.size)


# ---- other ops ---------------------------------------------------------------------------------
def _full(args: Args, attrs: Attrs, names: Mapping[str, int]) -> Type:
    made = Type(dtype_of(attrs.get("dtype", "f32")), _sizes(attrs, names))
    need_number(attrs["value"], made.dtype)
    return made


def _iota(args: Args, attrs: Attrs, names: Mapping[str, int]) -> Type:
    made = Type(int32, _sizes(attrs, names))
    dim_of("iota", made, attrs["dim"])
    return made


def _count(c: Call) -> Array:
    dim = int(c.attrs["dim"])
    sizes = [n if d == dim else 1 for d, n in enumerate(c.out.shape)]
    line = c.xp.add(c.cast(np.arange(c.out.shape[dim], dtype=np.int32), int32), c.start)
    return c.xp.broadcast_to(c.xp.reshape(line, tuple(sizes)), c.out.shape)


def _cast(args: Args, attrs: Attrs, names: Mapping[str, int]) -> Type:
    return Type(dtype_of(attrs["to"]), values_of("cast", args)[0].shape)


def _dot(args: Args, attrs: Attrs, names: Mapping[str, int]) -> Type:
    x, y = values_of("dot", args)
    if len(x.shape) != 2 or len(y.shape) != 2:
        raise unlike("dot", (x, y), "give it two values of two dims", ShapeError)
    flags = attrs.get("transpose", "")
    (m, k), (k2, n) = x.shape[:: -1 if "a" in flags else 1], y.shape[:: -1 if "b" in flags else 1]
    if k != k2:
        by = f" with transpose={flags}" if flags else ""
        fix = "make the summed dims equal, or give transpose=a, b or a,b"
        raise wrong(f"dot of {x} and {y}{by} sums over {k} and {k2}", fix, ShapeError)
    if x.dtype is not y.dtype or not (x.dtype.is_float or x.dtype is int8):
        raise unlike("dot", (x, y), "cast both to one float dtype, or to i8", DTypeError)
    return Type(f32 if x.dtype.is_float else int32, (m, n))


def _product(c: Call, x: Array, y: Array) -> Array:
    flags = c.attrs.get("transpose", "")
    if c.out.dtype is int32:  # i8 would wrap
        x, y = c.cast(x, int32), c.cast(y, int32)
    left, right = ("km" if "a" in flags else "mk"), ("nk" if "b" in flags else "kn")
    return c.xp.contract([left, right], "mn", [x, y], c.out.dtype)


OPS["full"] = TileOp(
    "full", 0, _full,
    lambda c: c.xp.broadcast_to(c.scalar(c.attrs["value"], c.out.dtype), c.out.shape),
    attrs={"shape": (_shape, None), "value": (number_text, None), "dtype": (_dtype, "f32")},
)  # fmt: skip
OPS["iota"] = TileOp(
    "iota", 0, _iota, _count,
    attrs={"shape": (_shape, None), "dim": (_index, None), "start": (_index, "0")},
)  # fmt: skip
OPS["cast"] = TileOp(
    "cast", 1, _cast, lambda c, x: c.cast(x, c.out.dtype), attrs={"to": (_dtype, None)}
)
OPS["dot"] = TileOp(
    "dot", 2, _dot, _product,
    lambda ins, out: 2 * out.size * (ins[0].size // out.shape[0]),
    {"transpose": (_transpose, "")},
)  # fmt: skip


def _turned(name: str, shape: Callable[[int], tuple[int, int]]) -> None:
    """Defines an op that gives a value of one dim a second one."""

    def infer(args: Args, attrs: Attrs, names: Mapping[str, int]) -> Type:
        (x,) = values_of(name, args)
        if len(x.shape) != 1:
            raise wrong(f"{name} takes one dim, not {x}", "reduce the other dims", ShapeError)
        return Type(x.dtype, shape(x.shape[0]))

    OPS[name] = TileOp(name, 1, infer, lambda c, x: c.xp.reshape(x, c.out.shape))


_turned("row", lambda n: (1, n))
_turned("col", lambda n: (n, 1))


def _reduces(name: str) -> None:
    """Defines a reduction of one dim."""

    def infer(args: Args, attrs: Attrs, names: Mapping[str, int]) -> Type:
        (x,) = values_of(name, args)
        dim = dim_of(name, x, attrs["dim"])
        need_kind(name, "numbers", x.dtype)
        return Type(x.dtype, x.shape[:dim] + x.shape[dim + 1 :])

    def local(c: Call, x: Array) -> Array:
        return getattr(c.xp, name)(x, (int(c.attrs["dim"]),))

    attrs: dict[str, tuple[Read, str | None]] = {"dim": (_index, None)}
    REDUCTIONS[name] = TileOp(name, 1, infer, local, lambda ins, out: ins[0].size, attrs)


_reduces("sum")
_reduces("max")
_reduces("min")


# ---- finding them ------------------------------------------------------------------------------
def op_of(name: str, attrs: Attrs) -> TileOp:
    """The op of this name with these attributes. Raises GraphError if there is none."""
    found = REDUCTIONS.get(name) if "dim" in attrs or name not in OPS else None
    if found is None and name not in OPS:
        names = nearest(name, {**OPS, **REDUCTIONS})
        raise wrong(f"there is no op {name!r}", f"use one of {names}")
    return found or OPS[name]


def plain_attrs(
    name: str, operands: int, given: Sequence[tuple[str, str]]
) -> tuple[tuple[str, str], ...]:
    """The attributes of an op in their one form: in order, and without defaults. Raises GraphError
    for an unknown op, a wrong number of operands, and unknown or missing attributes."""
    have = dict(given)
    op = op_of(name, have)
    if len(have) != len(given) or not have.keys() <= op.attrs.keys():
        more = ", ".join(k for k, _ in given if k not in op.attrs) or "an attribute twice"
        fix = f"give it {', '.join(op.attrs)}" if op.attrs else "leave it out"
        raise wrong(f"{name} does not take {more}", fix)
    made = []
    for key, (read, default) in op.attrs.items():
        text = have.get(key, default)
        if text is None:
            raise wrong(f"{name} needs its {key}", f"add it: {name} ... {key}=")
        if text != default and (text := read(text)) != default:
            made.append((key, text))
    if operands != op.operands:
        hint = ", or one and a dim" if name in OPS and name in REDUCTIONS else ""
        what = f"{name} takes {op.operands} operands, {operands} are given"
        raise wrong(what, f"give it {op.operands}{hint}")
    return tuple(made)
