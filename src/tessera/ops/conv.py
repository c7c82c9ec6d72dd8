"""Convolution and pooling: two ops, `conv` and `window`, for any number of spatial dims.

A convolution is `n g c *x, g o c *k -> n g o *y`: n the batch, g groups that do not mix, c what is
summed, o what comes out. So every layout of a batch or of channels follows from the index, a
grouped convolution needs no code of its own, and both gradients are convolutions again.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import product
from typing import Any

from ..core.checks import one_dtype
from ..core.dtypes import int32
from ..core.errors import ShapeError, fail
from ..core.layout import TensorType
from .batch import last_dims
from .elementwise import NUMBER, const, need
from .index_string import Index
from .op import Array, Attrs, Build, Call, Inferred, Op, define
from .reduce import held
from .trailing_dims import leading, propagate_heads

INDEX = Index((("n", "g", "c"), ("g", "o", "c")), ("n", "g", "o"))


def reach(size: int, step: int) -> int:
    """How many places `size` elements take that stand `step` apart."""
    return (size - 1) * step + 1


def _conv_sizes(x: TensorType, w: TensorType, attrs: Attrs) -> tuple[int, ...]:
    rows = zip(
        x.shape[3:], w.shape[3:], attrs["stride"], attrs["pads"], attrs["dilation"],
        attrs["spread"], strict=True,
    )  # fmt: skip
    return tuple(
        (reach(n, spread) + low + high - reach(k, dilation)) // stride + 1
        for n, k, stride, (low, high), dilation, spread in rows
    )


def _conv_rule(ins: tuple[TensorType, ...], attrs: Attrs) -> Inferred:
    """x is [N, groups, in, ...], w [groups, out, in, ...]; batch, groups and channels may be split,
    the spatial dims are whole."""
    need("conv", ins, ("float",))
    x, w = ins
    one_dtype("conv", ins, "x", "w")
    alike = x.rank == w.rank == 3 + len(attrs["stride"]) and x.rank > 3
    if not alike or x.shape[1] != w.shape[0] or x.shape[2] != w.shape[2]:
        raise fail(
            ShapeError,
            "conv: the shapes of x and w do not fit",
            [("x", x), ("w", w)],
            fix="x is [batch, groups, in, *sizes], w is [groups, out, in, *sizes]",
        )
    sizes = _conv_sizes(x, w, attrs)
    if min(sizes) < 1 or max(sizes) >= 2**31:
        raise fail(
            ShapeError,
            f"conv: {sizes} is no size of an output",
            [("x", x), ("w", w)],
            fix="pad so much that the kernel fits into the input, and not more",
        )
    return propagate_heads("conv", INDEX, ins, [(x.dtype, sizes)], linear="each")


def _conv_local(c: Call, x: Array, w: Array) -> Array:
    a = c.attrs
    pads = tuple((int(low), int(high)) for low, high in a["pads"])
    return c.xp.conv(
        x, w, tuple(a["stride"]), pads, tuple(a["dilation"]), tuple(a["spread"]), c.out.dtype
    )


def _conv_grad(b: Build, n: Any, g: Any) -> Sequence[Any]:
    # y[i] = Σ_k x[i·stride + k·dilation - low] w[k], with x spread out. Read as a sum for x, g is
    # spread by the stride under a kernel turned round; read as a sum for w, g is the kernel,
    # dilated by the stride, and the batch is what is summed.
    x, w = n.args
    a = n.attrs
    of_x: list[tuple[int, int]] = []
    of_w: list[tuple[int, int]] = []
    rows = zip(
        x.type.shape[3:], w.type.shape[3:], n.type.shape[3:], a["stride"], a["pads"],
        a["dilation"], a["spread"], strict=True,
    )  # fmt: skip
    for size, k, out, stride, (low, _), dilation, spread in rows:
        x_reach, k_reach, g_reach = reach(size, spread), reach(k, dilation), reach(out, stride)
        of_x.append((k_reach - 1 - low, x_reach - g_reach + low))
        of_w.append((low, g_reach - x_reach + k_reach - 1 - low))
    spatial = range(3, x.type.rank)
    turned = b("transpose", w, perm=(0, 2, 1, *spatial))
    for d in spatial:
        if w.type.shape[d] > 1:
            turned = b("flip", turned, dim=d)
    dx = b("conv", g, turned, stride=a["spread"], pads=tuple(of_x), dilation=a["dilation"],
           spread=a["stride"])  # fmt: skip
    by_channel = b("transpose", x, perm=(2, 1, 0, *spatial))
    kernel = b("transpose", g, perm=(1, 2, 0, *spatial))
    dw = b("conv", by_channel, kernel, stride=a["dilation"], pads=tuple(of_w),
           dilation=a["stride"], spread=a["spread"])  # fmt: skip
    return [dx, b("transpose", dw, perm=(1, 2, 0, *spatial))]


def _conv_flops(ins: tuple[TensorType, ...], outs: tuple[TensorType, ...], attrs: Attrs) -> int:
    # A multiply-add counts two; those that meet only padding are counted as the rest.
    return 2 * outs[0].size * math.prod(ins[1].shape[2:])


# `spread` puts zeros between the elements of x, `dilation` between those of w; `pads` are zeros
# before and after each spatial dim, and where they are negative cut it.
conv = define(
    Op("conv", _conv_rule, _conv_local, _conv_grad, flops=_conv_flops,
       attrs="stride pads dilation spread", memory="conv", invariance="library")
)  # fmt: skip


# -- windows --------------------------------------------------------------------------------------
def _window_rule(ins: tuple[TensorType, ...], attrs: Attrs) -> Inferred:
    """The last dims, those of the window, are whole; those before are as they come."""
    need("window", ins, NUMBER if attrs["kind"] == "max" else ("float",))
    x, size = ins[0], attrs["size"]
    lead = x.rank - len(size)
    rows = zip(x.shape[max(lead, 0) :], size, attrs["stride"], attrs["pads"])
    made = tuple((n + low + high - k) // step + 1 for n, k, step, (low, high) in rows)
    if lead < 0 or min(made) < 1:
        raise fail(
            ShapeError,
            "window: the window is larger than the padded input",
            [("x", x), ("window", tuple(size))],
            fix="use a smaller window, or more padding",
        )
    linear = "each" if attrs["kind"] == "sum" else ""
    return propagate_heads("window", leading((lead,)), ins, [(x.dtype, made)], linear=linear)


def _window_local(c: Call, x: Array) -> Array:
    a = c.attrs
    pads = tuple((int(low), int(high)) for low, high in a["pads"])
    return c.xp.window(x, a["kind"], tuple(a["size"]), tuple(a["stride"]), pads)


def _window_grad(b: Build, n: Any, g: Any) -> Sequence[Any]:
    # Place by place in the window: its share of g is put back to where the place stood. For a
    # maximum that is all of g for the first place that holds it, and nothing for the others.
    x, a = n.args[0], n.attrs
    lead = x.type.rank - len(a["size"])
    before = (*(0,) * lead, *(low for low, _ in a["pads"]))
    padded = tuple(
        m + low + high for m, (low, high) in zip(x.type.shape, [(0, 0)] * lead + list(a["pads"]))
    )
    steps = (*(1,) * lead, *a["stride"])
    largest = a["kind"] == "max"
    wide = _padded(b, x, before, padded) if largest else None
    total: Any = None
    free: Any = None
    for place in product(*map(range, a["size"])):
        starts = (*(0,) * lead, *place)
        share = g
        if largest:
            stops = tuple(
                s + (m - 1) * k + 1 for s, m, k in zip(starts, n.type.shape, steps, strict=True)
            )
            hit = held(b, b("slice", wide, starts=starts, stops=stops, steps=steps), n)
            free = b("logical_not", hit) if free is None else free
            if total is not None:
                hit, free = (
                    b("logical_and", hit, free),
                    b("logical_and", free, b("logical_not", hit)),
                )
            share = b("where", hit, g, const(b, g, 0.0))
        part = b("pad", share, starts=starts, steps=steps, shape=padded)
        total = part if total is None else b("add", total, part)
    if padded == x.type.shape:
        return [total]
    stops = tuple(s + m for s, m in zip(before, x.type.shape, strict=True))
    return [b("slice", total, starts=before, stops=stops, steps=(1,) * x.type.rank)]


def _padded(b: Build, x: Any, before: tuple[int, ...], shape: tuple[int, ...]) -> Any:
    """`x` inside minus infinity."""
    if shape == x.type.shape:
        return x
    wide = b("pad", x, starts=before, steps=(1,) * x.type.rank, shape=shape)
    for d, (first, size) in enumerate(zip(before, x.type.shape, strict=True)):
        if shape[d] != size:
            line = tuple(m if i == d else 1 for i, m in enumerate(shape))
            at = b("iota", dtype=int32, shape=line, dim=d)
            bounds = (b("full", dtype=int32, shape=(), value=v) for v in (first, first + size))
            inside = b("logical_and", *(b(o, at, v) for o, v in zip(("ge", "lt"), bounds)))
            wide = b("where", inside, wide, const(b, x, -math.inf))
    return wide


def _window_flops(ins: tuple[TensorType, ...], outs: tuple[TensorType, ...], attrs: Attrs) -> int:
    return outs[0].size * math.prod(attrs["size"])


# The largest element, or the sum, of every window over the last dims. Around x stands what changes
# neither; a pad is smaller than its window.
window = define(
    Op("window", _window_rule, _window_local, _window_grad, flops=_window_flops,
       attrs="kind size stride pads", batch=last_dims, invariance="added")
)  # fmt: skip
