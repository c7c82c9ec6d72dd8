"""Reductions and scans over dims: sum, max, min, prod, argmax, cumsum, top-k and sort."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from ..core.dtypes import DType, int32
from ..core.layout import Factor, TensorType, dim_axes, without
from .batch import last_dims, next_dim
from .elementwise import ANY, FIELD, NUMBER, const, need
from .index_string import Index, propagate
from .op import Array, Attrs, Build, Call, Inferred, Local, Op, Rule, define


def _index(t: TensorType, dims: Sequence[int]) -> Index:
    letters = tuple(f"_{i}" for i in range(t.rank))
    return Index((letters,), tuple(k for i, k in enumerate(letters) if i not in set(dims)))


def _rule(name: str, kind: str, linear: str = "", kinds: tuple[str, ...] = NUMBER) -> Rule:
    def rule(ins: tuple[TensorType, ...], attrs: Attrs) -> Inferred:
        need(name, ins, kinds)
        index = _index(ins[0], attrs["dims"])
        # Without a kind there is no collective that finishes a split reduction, so the dims are
        # gathered.
        whole = frozenset() if kind else frozenset(index.reduced)
        return propagate(
            name, index, ins, ins[0].dtype, linear=linear, reduce=kind or "sum", whole=whole
        )

    return rule


def keep_dims(b: Build, x: Any, like: TensorType, dims: Sequence[int]) -> Any:
    """`x` with its reduced dims restored as size 1, broadcast to the shape of `like`."""
    shape = tuple(1 if i in set(dims) else n for i, n in enumerate(like.shape))
    x = b("reshape", x, shape=shape)
    if not like.split_axes:
        return b("broadcast_to", x, shape=like.shape)
    # Each device broadcasts to its own block, in the layout of the value that was reduced.
    layout = like.complete().with_dtype(x.type.dtype)
    return b("broadcast_to", x, shape=like.shape, layout=layout)


def _sum_grad(b: Build, n: Any, g: Any) -> Sequence[Any]:
    return [keep_dims(b, g, n.args[0].type, n.attrs["dims"])]


def held(b: Build, x: Any, best: Any) -> Any:
    """A mask of the elements of `x` equal to `best`, their maximum or minimum; if that is NaN, a
    mask of the NaNs."""
    same = b("eq", x, best)
    return b("logical_or", same, b("ne", x, x)) if x.type.dtype.is_float else same


def _extreme_grad(b: Build, n: Any, g: Any) -> Sequence[Any]:
    # Equal extremes share the gradient, and so do several NaNs, as in PyTorch.
    x, dims = n.args[0], n.attrs["dims"]
    hit = b("cast", held(b, x, keep_dims(b, n, x.type, dims)), dtype=x.type.dtype)
    share = b("div", g, b("sum", hit, dims=dims))
    return [b("mul", hit, keep_dims(b, share, x.type, dims))]


def _prod_grad(b: Build, n: Any, g: Any) -> Sequence[Any]:
    # The derivative by a factor is the product of the others: without zeros the product over x,
    # with one zero the product of the rest at the zero, with more zeros 0.
    x, dims = n.args[0], n.attrs["dims"]
    zero, one = const(b, x, 0.0), const(b, x, 1.0)
    hole = b("eq", x, zero)
    filled = b("where", hole, one, x)
    holes = keep_dims(b, b("sum", b("cast", hole, dtype=x.type.dtype), dims=dims), x.type, dims)
    rest = keep_dims(b, b("mul", g, b("prod", filled, dims=dims)), x.type, dims)
    alone = b("logical_and", hole, b("eq", holes, one))
    slope = b("div", rest, filled)  # where x is the zero, filled is one and this is `rest`
    counts = b("logical_or", b("eq", holes, zero), alone)
    return [b("where", counts, slope, zero)]


def _fold(name: str) -> Local:
    def local(c: Call, x: Array) -> Array:
        return getattr(c.xp, name)(x, tuple(c.attrs["dims"]))

    return local


def _size(ins: tuple[TensorType, ...], outs: tuple[TensorType, ...], attrs: Attrs) -> int:
    return ins[0].size


sum_ = define(
    Op("sum", _rule("sum", "sum", "each", FIELD), _fold("sum"), _sum_grad, flops=_size,
       attrs="dims", batch=next_dim("dims"), memory="reduced", invariance="sums", linear="each")
)  # fmt: skip
max_ = define(
    Op("max", _rule("max", "max"), _fold("max"), _extreme_grad, flops=_size, attrs="dims",
       batch=next_dim("dims"), memory="reduced", invariance="moves")
)  # fmt: skip
min_ = define(
    Op("min", _rule("min", "min"), _fold("min"), _extreme_grad, flops=_size, attrs="dims",
       batch=next_dim("dims"), memory="reduced", invariance="moves")
)  # fmt: skip
prod = define(
    Op("prod", _rule("prod", "", kinds=FIELD), _fold("prod"), _prod_grad, flops=_size, attrs="dims",
       batch=next_dim("dims"), memory="reduced", invariance="sums")
)  # fmt: skip


def _arg_rule(name: str) -> Rule:
    def rule(ins: tuple[TensorType, ...], attrs: Attrs) -> Inferred:
        need(name, ins, NUMBER)
        index = _index(ins[0], [attrs["dim"]])
        return propagate(name, index, ins, int32, whole=frozenset(index.reduced))

    return rule


argmax = define(
    Op(
        "argmax",
        _arg_rule("argmax"),
        lambda c, x: c.xp.argmax(x, c.attrs["dim"]),
        flops=_size,
        attrs="dim",
        batch=next_dim("dim"),
        invariance="moves",
    )
)
argmin = define(
    Op(
        "argmin",
        _arg_rule("argmin"),
        lambda c, x: c.xp.argmin(x, c.attrs["dim"]),
        flops=_size,
        attrs="dim",
        batch=next_dim("dim"),
        invariance="moves",
    )
)


def along_rule(
    name: str, dtype: DType | None = None, linear: str = "", kinds: tuple[str, ...] = NUMBER
) -> Rule:
    """The rule of an op that needs one dim (`attrs["dim"]`) whole and keeps the shape."""

    def rule(ins: tuple[TensorType, ...], attrs: Attrs) -> Inferred:
        need(name, ins, kinds)
        letters = tuple(f"_{i}" for i in range(ins[0].rank))
        whole = frozenset({letters[attrs["dim"]]})
        index = Index((letters,), letters)
        return propagate(name, index, ins, dtype or ins[0].dtype, linear=linear, whole=whole)

    return rule


def _flip_grad(b: Build, n: Any, g: Any) -> Sequence[Any]:
    return [b("flip", g, dim=n.attrs["dim"])]


flip = define(
    Op("flip", along_rule("flip", linear="each", kinds=ANY),
       lambda c, x: c.xp.flip(x, c.attrs["dim"]),
       _flip_grad, flops=lambda ins, outs, attrs: 0, attrs="dim",
       batch=next_dim("dim"), elements="moved", memory="moves")
)  # fmt: skip


def _cumsum_grad(b: Build, n: Any, g: Any) -> Sequence[Any]:
    dim = n.attrs["dim"]
    return [b("flip", b("cumsum", b("flip", g, dim=dim), dim=dim), dim=dim)]


def _running(ins: tuple[TensorType, ...], outs: tuple[TensorType, ...], attrs: Attrs) -> int:
    """Scratch bytes: a long sum is computed in windows, in f32 or wider and in another order of
    dims."""
    x = ins[0]
    long = x.local_shape[attrs["dim"]] > _WINDOW
    return 2 * _in_f32(x) - x.local_bytes if long else 0


def _in_f32(t: TensorType) -> int:
    """Bytes per device of a copy with at least four bytes per element."""
    return math.prod(t.local_shape) * max(4, t.dtype.bytes)


_WINDOW = 16
cumsum = define(
    Op("cumsum", along_rule("cumsum", linear="each", kinds=FIELD),
       lambda c, x: c.xp.cumsum(x, c.attrs["dim"]), _cumsum_grad, flops=_size, attrs="dim",
       batch=next_dim("dim"), scratch=_running, invariance="sums", linear="alone")
)  # fmt: skip


def _argsort_local(c: Call, x: Array) -> Array:
    return c.xp.argsort(x, c.attrs["dim"], c.attrs.get("descending", False))


def _sort_flops(ins: tuple[TensorType, ...], outs: tuple[TensorType, ...], attrs: Attrs) -> int:
    return ins[0].size * max(1, int(math.log2(max(1, ins[0].shape[attrs["dim"]]))))


# Stable: equal keys keep their order, so the result does not depend on the backend.
argsort = define(
    Op("argsort", along_rule("argsort", int32), _argsort_local,
       flops=_sort_flops, attrs="dim descending?", batch=next_dim("dim"),
       scratch=lambda ins, outs, attrs: _in_f32(ins[0]), invariance="moves")
)  # fmt: skip


def _top_k_rule(ins: tuple[TensorType, ...], attrs: Attrs) -> Inferred:
    need("top_k", ins, NUMBER)
    x = ins[0].complete()
    want = x.with_dims((*x.dims[:-1], without(x.dims[-1], dim_axes(x.dims[-1]), x.sizes)))
    values = want.with_dims((*want.dims[:-1], (Factor(attrs["k"]),)))
    return Inferred((want,), (values, values.with_dtype(int32)))


def _top_k_grad(b: Build, n: Any, gs: Any) -> Sequence[Any]:
    x, ids = n.args[0], b("item", n, index=1)
    dim = x.type.rank - 1
    return [b("put_along", ids, gs[0], dim=dim, into=str(x.type.shape[dim]))]


# Stable: equal values keep the order of their ids.
top_k = define(
    Op("top_k", _top_k_rule, lambda c, x: c.xp.top_k(x, c.attrs["k"]), _top_k_grad, attrs="k",
       batch=last_dims, invariance="moves")
)  # fmt: skip
