"""Convolution and pooling: `conv` and `window`, for any number of spatial dims.

A convolution is `n g c *x, g o c *k -> n g o *y`: n is the batch, g the groups, c the summed input
channels, o the output channels. So layouts of the batch and of channels follow from the index, a
grouped convolution needs no code of its own, and both gradients are convolutions.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import product
from typing import Any

from ..core.dtypes import int32
from ..core.errors import ShapeError
from ..core.layout import TensorType
from ..core.tensor_checks import one_dtype
from .batch import last_dims
from .elementwise import NUMBER, const, need
from .index_string import Index
from .op import Array, Attrs, Build, Call, Inferred, Op, define
from .trailing_dims import leading, propagate_heads

INDEX = Index((("n", "g", "c"), ("g", "o", "c")), ("n", "g", "o"))


def reach(size: int, step: int) -> int:
    """The extent of `size` elements that are `step` apart."""
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
    """The rule for x [N, groups, in, ...] and w [groups, out, in, ...]. Batch, groups and channels
    may be split; spatial dims are whole."""
    need("conv", ins, ("float",))
    x, w = ins
    one_dtype("conv", ins, "x", "w")
    alike = x.rank == w.rank == 3 + len(attrs["stride"]) and x.rank > 3
    if not alike or x.shape[1] != w.shape[0] or x.shape[2] != w.shape[2]:
        raise ShapeError(
            "conv: the shapes of x and w do not fit",
            x=x,
            w=w,
            fix="x is [batch, groups, in, *sizes], w is [groups, out, in, *sizes]",
        )
    sizes = _conv_sizes(x, w, attrs)
    if min(sizes) < 1 or max(sizes) >= 2**31:
        raise ShapeError(
            f"conv: {sizes} is no size of an output",
            x=x,
            w=w,
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
    # y[i] = Σ_k x[i·stride + k·dilation - low] w[k], with x spread out. For the gradient of x, g is
    # spread by the stride and convolved with the flipped kernel. For that of w, g is the kernel,
    # dilated by the stride, and the batch is summed.
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
    transposed = b("transpose", w, perm=(0, 2, 1, *spatial))
    for d in spatial:
        if w.type.shape[d] > 1:
            transposed = b("flip", transposed, dim=d)
    dx = b("conv", g, transposed, stride=a["spread"], pads=tuple(of_x), dilation=a["dilation"],
           spread=a["stride"])  # fmt: skip
    plain = (1,) * len(spatial)
    if a["spread"] != plain and a["stride"] == a["dilation"] == plain:
        # A transposed convolution. With x as the (flipped) kernel, the zeros between its elements
        # cost nothing.
        pads = tuple(
            (k - 1 - low, reach(size, spread) - out + low)
            for size, k, out, (low, _), spread in zip(
                x.type.shape[3:], w.type.shape[3:], n.type.shape[3:], a["pads"], a["spread"]
            )
        )
        dw = b("conv", b("transpose", g, perm=(2, 1, 0, *spatial)),
               b("transpose", x, perm=(1, 2, 0, *spatial)), stride=plain, pads=pads,
               dilation=a["spread"], spread=plain)  # fmt: skip
        for d in spatial:
            if w.type.shape[d] > 1:
                dw = b("flip", dw, dim=d)
        return [dx, b("transpose", dw, perm=(1, 0, 2, *spatial))]
    by_channel = b("transpose", x, perm=(2, 1, 0, *spatial))
    kernel = b("transpose", g, perm=(1, 2, 0, *spatial))
    dw = b("conv", by_channel, kernel, stride=a["dilation"], pads=tuple(of_w),
           dilation=a["stride"], spread=a["spread"])  # fmt: skip
    return [dx, b("transpose", dw, perm=(1, 2, 0, *spatial))]


def _conv_flops(ins: tuple[TensorType, ...], outs: tuple[TensorType, ...], attrs: Attrs) -> int:
    # A multiply-add counts two, also where it meets only padding.
    return 2 * outs[0].size * math.prod(ins[1].shape[2:])


# `spread` puts zeros between the elements of x, `dilation` between those of w. `pads` are zeros
# before and after each spatial dim; a negative pad cuts the dim.
conv = define(
    Op("conv", _conv_rule, _conv_local, _conv_grad, flops=_conv_flops,
       attrs="stride pads dilation spread", memory="conv",
       scratch=lambda ins, outs, attrs: sum(t.local_bytes for t in ins),  # in another order of dims
       invariance="library", linear="alone")
)  # fmt: skip


# -- windows --------------------------------------------------------------------------------------
def _window_rule(ins: tuple[TensorType, ...], attrs: Attrs) -> Inferred:
    """The rule of windows over the last dims, which are whole; leading dims keep their layout."""
    need("window", ins, ("float",) if attrs["kind"] == "sum" else NUMBER)
    x, size = ins[0], attrs["size"]
    lead = x.rank - len(size)
    rows = zip(x.shape[max(lead, 0) :], size, attrs["stride"], attrs["pads"])
    made = tuple((n + low + high - k) // step + 1 for n, k, step, (low, high) in rows)
    if lead < 0 or min(made) < 1:
        raise ShapeError(
            "window: the window is larger than the padded input",
            x=x,
            window=tuple(size),
            fix="use a smaller window, or more padding",
        )
    linear = "each" if attrs["kind"] == "sum" else ""
    dtype = int32 if attrs["kind"] == "first" else x.dtype
    return propagate_heads("window", leading((lead,)), ins, [(dtype, made)], linear=linear)


def _window_local(c: Call, x: Array) -> Array:
    a = c.attrs
    pads = tuple((int(low), int(high)) for low, high in a["pads"])
    return c.xp.window(x, a["kind"], tuple(a["size"]), tuple(a["stride"]), pads)


def _window_grad(b: Build, n: Any, g: Any) -> Sequence[Any]:
    return [_sum_grad(b, n, g) if n.attrs["kind"] == "sum" else _max_grad(b, n, g)]


def _sum_grad(b: Build, n: Any, g: Any) -> Any:
    """The sum of g over the windows that contain each element: g repeated if windows neither
    overlap nor leave gaps, otherwise a window sum over g spread by the stride."""
    x, a = n.args[0].type, n.attrs
    lead = x.rank - len(a["size"])
    sizes, out_shape = x.shape[lead:], g.type.shape[lead:]
    beside = a["size"] == a["stride"] and not any(low for low, _ in a["pads"])
    if beside and all(k * m == s for k, m, s in zip(a["size"], out_shape, sizes)):
        lead_shape = x.shape[:lead]
        line = (*lead_shape, *(v for m in out_shape for v in (m, 1)))
        whole = (*lead_shape, *(v for m, k in zip(out_shape, a["size"]) for v in (m, k)))
        each = b("broadcast_to", b("reshape", g, shape=line), shape=whole)
        return b("reshape", each, shape=x.shape)
    spread = tuple(reach(m, step) for m, step in zip(out_shape, a["stride"], strict=True))
    if spread != out_shape:
        steps = (*(1,) * lead, *a["stride"])
        g = b("pad", g, starts=(0,) * x.rank, steps=steps, shape=(*x.shape[:lead], *spread))
    pads = tuple(
        (k - 1 - low, s - m + low)
        for k, s, m, (low, _) in zip(a["size"], sizes, spread, a["pads"], strict=True)
    )
    return b("window", g, kind="sum", size=a["size"], stride=(1,) * len(sizes), pads=pads)


def _max_grad(b: Build, n: Any, g: Any) -> Any:
    """The gradient of a max: all of g goes to the first place of each window's maximum. Element
    u·stride + r of a dim gets a share from the places r, r + stride, … of a window, each shifted by
    one more step: the shares are summed for each r, then interleaved."""
    x, a = n.args[0].type, n.attrs
    lead = x.rank - len(a["size"])
    units = tuple(
        -(-(m + low + high) // step)
        for m, (low, high), step in zip(x.shape[lead:], a["pads"], a["stride"], strict=True)
    )
    shape, ones = (*x.shape[:lead], *units), (1,) * x.rank
    first, zero = b("window", n.args[0], **{**a, "kind": "first"}), const(b, g, 0.0)
    sums: dict[tuple[int, ...], Any] = {}
    for at, place in enumerate(product(*map(range, a["size"]))):
        share = b("where", b("eq", first, const(b, first, at)), g, zero)
        moved, rest = zip(*map(divmod, place, a["stride"]))
        if share.type.shape != shape or any(moved):
            share = b("pad", share, starts=(*(0,) * lead, *moved), steps=ones, shape=shape)
        sums[rest] = b("add", sums[rest], share) if rest in sums else share
    total = _side_by_side(b, sums, a["stride"], lead)
    if total.type.shape == x.shape:
        return total
    before = (*(0,) * lead, *(low for low, _ in a["pads"]))
    stops = tuple(s + m for s, m in zip(before, x.shape, strict=True))
    return b("slice", total, starts=before, stops=stops, steps=ones)


def _side_by_side(
    b: Build, by_offset: dict[tuple[int, ...], Any], stride: Sequence[int], lead: int
) -> Any:
    """`by_offset` interleaved: element u·stride + r of each dim after the first `lead` is element u
    of `by_offset[r]`, or 0."""
    dim = len(stride) - 1
    while dim >= 0:
        joined: dict[tuple[int, ...], Any] = {}
        for key in dict.fromkeys(k[:dim] for k in by_offset):
            example = next(v for k, v in by_offset.items() if k[:dim] == key)
            shape, at = example.type.shape, lead + dim + 1
            line = (*shape[:at], 1, *shape[at:])
            parts = [
                b("reshape", by_offset[(*key, r)], shape=line)
                if (*key, r) in by_offset
                else b("broadcast_to", const(b, example, 0.0), shape=line)
                for r in range(stride[dim])
            ]
            whole = b("concat", *parts, dim=at) if len(parts) > 1 else parts[0]
            joined[key] = b("reshape", whole, shape=(*shape[: at - 1], shape[at - 1] * stride[dim],
                                                     *shape[at:]))  # fmt: skip
        by_offset, dim = joined, dim - 1
    return by_offset[()]


def _window_flops(ins: tuple[TensorType, ...], outs: tuple[TensorType, ...], attrs: Attrs) -> int:
    return outs[0].size * math.prod(attrs["size"])


# The largest element of each window over the last dims ("max"), the row-major index in the window
# of its first maximum ("first"), or the sum. The padding of x is the identity of the reduction; a
# pad is smaller than its window.
window = define(
    Op("window", _window_rule, _window_local, _window_grad, flops=_window_flops,
       attrs="kind size stride pads", batch=last_dims, invariance="added")
)  # fmt: skip
