"""Conversion to another dtype: `cast` of values, `bitcast` of bits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ..core.dtypes import DType, fp8_e4m3, promote
from ..core.layout import TensorType
from .op import Array, Attrs, Build, Call, Inferred, Op, define


def _cast_rule(ins: tuple[TensorType, ...], attrs: Attrs) -> Inferred:
    src, dtype = ins[0], attrs["dtype"]
    # Widening is exact, so a partial sum may stay partial; narrowing completes it first. With
    # `terms` each term of the sum is rounded, as in a product with narrow results; the gradient's
    # sum likewise.
    widens = src.dtype.is_float and dtype.is_float and promote(src.dtype, dtype) is dtype
    src = (
        src
        if (widens or attrs.get("terms")) and all(k == "sum" for _, k in src.partial)
        else src.complete()
    )
    return Inferred((src,), (src.with_dtype(dtype),))


def _cast_grad(b: Build, n: Any, g: Any) -> Sequence[Any]:
    src = n.args[0].type.dtype
    if not src.is_float:
        return [None]
    # A gradient that was cast from `src`, in which sums over devices are sent, is used before that
    # cast.
    whole = _cast_source(b, g, lambda was: was is src) if b.reduce_dtype is src else None
    if whole is not None:
        return [whole]
    terms = n.attrs.get("terms") or (src.bytes < g.type.dtype.bytes and b.reduce_dtype is src)
    return [b("cast", g, dtype=src, **({"terms": True} if terms else {}))]


def _cast_local(c: Call, x: Array) -> Array:
    dtype = c.out.dtype
    if dtype is fp8_e4m3 and c.ins[0].dtype.is_float:
        # fp8_e4m3 has no infinity: a value above its maximum would become NaN.
        top = c.xp.full((), FP8_E4M3_MAX, c.ins[0].dtype)
        x = c.xp.maximum(c.xp.minimum(x, top), c.xp.neg(top))
    return c.xp.cast(x, dtype)


FP8_E4M3_MAX = 448.0
cast = define(
    Op("cast", _cast_rule, _cast_local, _cast_grad,
       flops=lambda ins, outs, attrs: 0, attrs="dtype terms?", elements="computed",
       memory="moves", linear="each", incidental=True)
)  # fmt: skip


def _bitcast_rule(ins: tuple[TensorType, ...], attrs: Attrs) -> Inferred:
    src = ins[0].complete()
    return Inferred((src,), (src.with_dtype(attrs["dtype"]),))


bitcast = define(
    Op("bitcast", _bitcast_rule, lambda c, x: c.xp.bitcast(x, c.out.dtype), None,
       flops=lambda ins, outs, attrs: 0, attrs="dtype", elements="computed", memory="cheap")
)  # fmt: skip


def narrowed(b: Build, x: Any) -> Any:
    """The narrower float that the node `x` was cast from, in the form of `x` (reshaped, transposed,
    …); None if there is none.

    It is sent over the network in place of `x`, also for sums: a narrow product has rounded their
    terms already.
    """
    return _cast_source(b, x, lambda was: was.bytes < x.type.dtype.bytes)


def _cast_source(b: Build, x: Any, fits: Callable[[DType], bool]) -> Any:
    """The float that `x` was cast from, in the form of `x`; None if `x` is no cast of a float whose
    dtype `fits`."""
    if x.op == cast.name:
        was = x.args[0].type.dtype
        return x.args[0] if was.is_float and x.type.dtype.is_float and fits(was) else None
    if x.kind.memory != "view" or x.kind.varying or len(x.args) != 1:
        return None
    source = _cast_source(b, x.args[0], fits)
    return None if source is None else b(x.op, source, **x.attrs)


MOST_NODES = 256  # that are looked at


def rounded(b: Build, x: Any) -> Any:
    """The partial sum `x` in the narrower dtype that all its terms were computed in, if only linear
    ops follow: each term is rounded. None if a term comes from a wide value, or from more elements
    than `x` has: a device's local sum stays wide.

    So the gradient of a norm's input is sent in the dtype of the gradient of its output, which a
    narrow product computed.
    """
    if x.type.dtype.kind != "float" or not x.type.partial:  # a part is no rounding of the whole
        return None
    dtypes, visited, todo = set(), set(), [x]
    while todo:
        n = todo.pop()
        if n in visited or not n.type.partial:
            continue
        visited.add(n)
        if n.op == "item" and n.args[0].op == "scan":
            todo.append(n.args[0].attrs["body"].outputs[n.attrs["index"]])
            continue
        source = n.args[0].type if n.op == cast.name else n.type
        if source.dtype.is_float and source.dtype.bytes < x.type.dtype.bytes:
            alike = source.partial == x.type.partial and source.size <= x.type.size
            dtypes.add(source.dtype if alike else x.type.dtype)
        elif not n.kind.creates:
            terms = [a for a in n.args if a.type.partial]
            if not terms or len(visited) > MOST_NODES:
                return None
            todo.extend(terms)
    if len(dtypes) != 1 or x.type.dtype in dtypes:
        return None
    return b("cast", x, dtype=dtypes.pop(), terms=True)
