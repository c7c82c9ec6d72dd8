"""Long sequences: attention over a sequence that is split over devices, and layouts between layers.

Ring attention (Liu et al. 2023) hands keys and values round; each device attends with its own
queries to what is passing, and merges what it found by the logsumexp of the scores. All-to-all
attention (Ulysses, Jacobs et al. 2023) is a change of layout: the sequence split becomes heads
split. `split_sequence` and `whole_sequence` are sequence parallelism (Korthikanti et al. 2022).

>>> zigzag(F.arange(8), 2, 0).numpy().tolist()
[0, 1, 6, 7, 2, 3, 4, 5]
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

from ..core.checks import axes_of, divides, flag, shaped, whole
from ..core.dtypes import f32
from ..core.errors import MeshError, ShapeError, UsageError, fail
from ..core.layout import TensorType, dim_axes, ways, without
from ..core.reshard import completed, gathered
from ..lang import functions as F
from ..lang.collectives import shift, split_over
from ..lang.create import ShardSpec
from ..lang.custom import custom_gradient
from ..lang.local.collectives import rank_along
from ..lang.local.distribute import distribute
from ..lang.local.view import view
from ..lang.operands import as_tensor
from ..lang.shaping import one_dim
from ..lang.tensor import Like, Tensor
from .blockwise import attend, merged, pulled
from .functional import check_heads, flash_attention


# -- the order of a causal sequence ---------------------------------------------------------------
def zigzag_positions(seq: int, parts: int) -> Tensor:
    """i32[seq]: which token stands where when a causal sequence lies in zig-zag order.

    Of 2·parts chunks, device i holds chunks i and 2·parts-1-i: one early and one late, so that all
    devices see as many keys. Raises ShapeError if seq does not divide.

    >>> zigzag_positions(8, 2).numpy().tolist()
    [0, 1, 6, 7, 2, 3, 4, 5]
    """
    seq, parts = whole("zigzag", "seq", seq, 1), whole("zigzag", "parts", parts, 1)
    if parts == 1:
        return F.arange(seq)
    divides("zigzag", seq, 2 * parts, "a sequence of {count} does not divide into {parts} chunks")
    size = seq // (2 * parts)
    early = F.arange(parts).reshape(parts, 1, 1)
    chunks = F.concat([early, (2 * parts - 1) - early], 1)
    return (chunks * size + F.arange(size)).reshape(seq)


def zigzag(x: Like, parts: int, dim: int = 1) -> Tensor:
    """`x` with `dim` reordered as causal `ring_attention` over `parts` devices needs it.

    The sequence is cut into 2 * `parts` chunks, and device i gets chunks i and 2 * `parts` - 1 - i,
    so all devices have equal work. Apply it once to token ids and labels. Ops that act on each row
    separately need no change. Raises ShapeError if `dim` does not divide into 2 * `parts` chunks.
    """
    t = as_tensor(x)
    d = one_dim("zigzag", t, dim)
    parts = whole("zigzag", "parts", parts, 1)
    return t if parts == 1 else _taken(t, zigzag_positions(t.shape[d], parts), d)


def unzigzag(x: Like, parts: int, dim: int = 1) -> Tensor:
    """The inverse of `zigzag`.

    >>> unzigzag(zigzag(F.arange(8), 2, 0), 2, 0).numpy().tolist()
    [0, 1, 2, 3, 4, 5, 6, 7]
    """
    t = as_tensor(x)
    d = one_dim("unzigzag", t, dim)
    parts = whole("unzigzag", "parts", parts, 1)
    return t if parts == 1 else _taken(t, F.argsort(zigzag_positions(t.shape[d], parts)), d)


def _taken(x: Tensor, order: Tensor, dim: int) -> Tensor:
    return F.take_or_zero(F.relayout(x, gathered(x.type, dim_axes(x.type.dims[dim]))), order, dim)


# -- between layers -------------------------------------------------------------------------------
def split_sequence(x: Tensor, axis: str | None, dim: int = 1) -> Tensor:
    """[B, S, ...] with S split over `axis` too; a sum pending there is completed on the way.

    A reduce_scatter where the sum is pending, whose gradient is an all_gather; else nothing moves.
    With `axis` None or no mesh, `x` itself. A token that comes alone is completed only.
    """
    n = axis_size("split_sequence", x, axis)
    if axis is None or n == 1 or axis in x.type.split_axes:
        return x
    if x.shape[dim] == 1:
        return F.relayout(x, completed(x.type, (axis,)))
    return F.relayout(x, split_over(completed(x.type, (axis,)), dim, (axis,)))


def whole_sequence(x: Tensor, axis: str | None) -> Tensor:
    """[B, S, ...] no longer split over `axis`: an all_gather, its gradient a reduce_scatter."""
    if axis is None or axis_size("whole_sequence", x, axis) == 1:
        return x
    return F.relayout(x, gathered(x.type, (axis,)))


def axis_size(name: str, x: Tensor, axis: str | None) -> int:
    """The devices along `axis` of the mesh of `x`, 1 without a mesh. Raises MeshError."""
    if axis is None or x.mesh is None:
        return 1
    if axis not in x.mesh:
        raise fail(
            MeshError,
            f"{name}: axis {axis!r} is not an axis of the mesh",
            [("x", x.type), ("mesh", x.mesh.text())],
            fix=f"give the mesh an axis {axis!r}, or name another",
        )
    return x.mesh.sizes[axis]


# -- by all-to-all --------------------------------------------------------------------------------
def all_to_all_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    axis: str = "cp",
    causal: bool = False,
    scale: float | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """`attention` of q [B, H, S, D], k and v [B, G, S, D] whose dim S is split over `axis`.

    One all_to_all gives each device all positions of some heads, a second returns to each device
    its positions of all heads (Jacobs et al. 2023). Splits over other axes (batch over dp, heads
    over tp) stay. Raises MeshError if the mesh has no such axis, ShapeError if the heads of k and v
    do not divide over it, UsageError in a local body over `axis`.
    """
    q, k, v = F.narrowed(*map(as_tensor, (q, k, v)))
    axis, n = _checked("all_to_all_attention", q, k, v, axis, causal)
    if n == 1:
        return flash_attention(q, k, v, causal, scale, bias=bias)
    (batch, heads, seq, d), groups = q.shape, k.shape[1]
    devices = n * ways([a for a in dim_axes(k.type.dims[1]) if a != axis], k.type.sizes)
    divides(
        "all_to_all_attention", groups, devices,
        "{count} heads of keys do not divide over {parts} devices",
        "make them a multiple of {parts}, or use ring attention", q=q.type, k=k.type,
    )  # fmt: skip
    if _in_view(axis):
        raise fail(
            UsageError,
            f"all_to_all_attention: {axis!r} is local here",
            [("q", q.type)],
            fix="call it in the global view, or use dist.all_to_all in the local one",
        )
    shared = heads // groups
    mesh = next(t.mesh for t in (q, k, v) if t.mesh is not None)
    q, k, v = (F.relayout(t, t.type.on(mesh)) for t in (q, k, v))
    # Side by side per group of heads, so that one exchange carries all three.
    parts = [q.reshape(batch, groups, shared, seq, d)]
    parts += [t.reshape(batch, groups, 1, seq, t.shape[-1]) for t in (k, v)]
    if v.shape[-1] == d:
        parts = F.split(_moved_to(1, axis, F.concat(parts, 2)), (shared, 1, 1), 2)
    else:
        parts = [_moved_to(1, axis, t) for t in parts]
    q, k, v = (t.reshape(batch, -1, seq, t.shape[-1]) for t in parts)
    if bias is not None:
        bias = as_tensor(bias)
        bias = F.relayout(bias, gathered(bias.type.on(mesh), (axis,)))
    return _moved_to(2, axis, flash_attention(q, k, v, causal, scale, bias=bias))


def _moved_to(dim: int, axis: str, x: Tensor) -> Tensor:
    """`x` split over `axis` along `dim` and no other."""
    if axis in dim_axes(x.type.dims[dim]):
        return x
    bare = gathered(x.type.complete(), (axis,))
    return F.relayout(x, split_over(bare, dim, (axis,)))


def _checked(
    name: str, q: Tensor, k: Tensor, v: Tensor, axis: str, causal: bool
) -> tuple[str, int]:
    """(the axis, the devices along it). Raises ShapeError, MeshError, UsageError."""
    flag(name, "causal", causal)
    check_heads(name, q, k, v)
    axis, *more = axes_of(name, axis)
    if more or q.ndim != 4 or q.shape[2] != k.shape[2]:
        raise fail(
            UsageError if more else ShapeError,
            f"{name}: it takes one axis, q [B, H, S, D], k [B, G, S, D] and v [B, G, S, E]",
            [("q", q.type), ("k", k.type), ("v", v.type)],
            fix="give queries and keys of the same positions",
        )
    n = axis_size(name, next((t for t in (q, k, v) if t.mesh is not None), q), axis)
    seq = q.shape[2] * (n if _in_view(axis) else 1)
    divides(name, seq, n, "a sequence of {count} does not divide over {parts} devices", q=q.type)
    return axis, n


def _in_view(axis: str) -> bool:
    seen = view()
    return seen is not None and axis in seen.axes


# -- by ring --------------------------------------------------------------------------------------
def ring_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    axis: str = "cp",
    causal: bool = False,
    scale: float | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """`attention` of q [B, H, S, D], k and v [B, G, S, D] whose dim S is split over `axis`.

    Blocks of keys and values pass from device to device in a ring (Liu et al. 2023), in the
    backward pass once more together with their gradients. A device never holds more than two blocks
    of them, nor all scores of a block. With `causal` the sequence must be in zig-zag order
    (`zigzag`); then each device computes two of four quarters of the scores in each step. `bias`
    [H, S] is added by key, in the order of the sequence. In a local body over `axis`, q, k and v
    are one device's blocks. Raises MeshError if the mesh has no such axis, ShapeError if S does not
    divide or `bias` does not fit.
    """
    q, k, v = F.narrowed(*map(as_tensor, (q, k, v)))
    axis, n = _checked("ring_attention", q, k, v, axis, causal)
    local, seen = _in_view(axis), view()
    if n == 1:
        return flash_attention(q, k, v, causal, scale, bias=bias)
    if seen is not None and not local:
        raise fail(
            UsageError,
            f"ring_attention: the local body around it is not local over {axis!r}",
            [("local", ", ".join(seen.axes))],
            fix=f"name {axis!r} in its mesh_axes too, or call it in the global view",
        )
    (batch, heads, seq, d), groups = q.shape, k.shape[1]
    chunks = 2 if causal else 1
    into = f"does not divide into {chunks} chunks for each of {n} devices"
    parts = chunks if local else chunks * n
    divides("ring_attention", seq, parts, "a sequence of {count} " + into, q=q.type)
    q = q * (1.0 / math.sqrt(d) if scale is None else scale)
    q = q.reshape(batch, groups, heads // groups, seq, d)
    k, v = (t.reshape(batch, groups, 1, seq, t.shape[-1]) for t in (k, v))
    given = [q, k, v]
    if bias is not None:
        bias = as_tensor(bias).to(f32)
        shaped("ring_attention", "the bias", bias.type, (heads, seq), q=q.type)
        given.append(bias.reshape(1, groups, heads // groups, seq))
    if not local:
        mesh = next(t.mesh for t in given if t.mesh is not None)
        given = [F.relayout(t, _only(t.type.on(mesh), 3, axis)) for t in given]
    out: Tensor = _ring(axis, n, causal)(*given)
    return out.reshape(batch, heads, seq, v.shape[-1])


def _only(t: TensorType, dim: int, axis: str) -> TensorType:
    """`t` with `dim` split over `axis` and nothing else, and no other dim over `axis`."""
    t = gathered(t.complete(), (axis,))
    bare = without(t.dims[dim], dim_axes(t.dims[dim]), t.sizes)
    return split_over(t.with_dims((*t.dims[:dim], bare, *t.dims[dim + 1 :])), dim, (axis,))


@lru_cache(maxsize=64)
def _ring(axis: str, n: int, causal: bool) -> Any:
    """Ring attention of q [B, G, R, S, D] (scaled), k and v [B, G, 1, S, D], bias [1, G, R, S]."""

    def turned(xs: list[Tensor], by: int = 1) -> list[Tensor]:
        return [shift(x, axis, by) for x in xs]

    def forward(q: Tensor, *keys: Tensor) -> list[Tensor]:
        """[the result, the logsumexp of each query's scores]."""
        now = list(keys)
        found = attend(q, now, causal)
        for step in range(1, n):
            now = turned(now)
            if not causal:
                found = merged(found, attend(q, now, False))
                continue
            # What passes comes from a device before this one, whose early chunk all queries see, or
            # from one after it, both of whose chunks the late queries see. In both cases the late
            # queries see its early chunk, and one more pair of chunks is left.
            before = rank_along((axis,)) >= step
            (early, late), (first, last) = _halves([q, *found]), _halves(now)
            done = merged(late[1:], attend(late[0], first, False))
            (queries,) = _pick(before, early[:1], late[:1])
            new = attend(queries, _pick(before, first, last), False)
            new = merged(_pick(before, early[1:], done), new)
            ends = _pick(before, new, early[1:]), _pick(before, done, new)
            found = [F.concat(list(pair), 3) for pair in zip(*ends, strict=True)]
        return [found[0].to(keys[1].dtype), found[1]]

    def backward(
        q: Tensor, keys: list[Tensor], out: Tensor, lse: Tensor, g: Tensor
    ) -> list[Tensor]:
        """The gradients of q and of the keys, which travel with the keys. They go round the other
        way than forward: on the same way, each part would be kept since then instead."""
        g = g.to(out.dtype)
        rows = [q, g, lse, F.sum(g.to(f32) * out.to(f32), -1)]
        now = keys
        dq, *grads = pulled(rows, now, causal)
        for step in range(1, n):
            now, grads = turned(now, -1), turned(grads, -1)
            if not causal:
                more, *new = pulled(rows, now, False)
            else:
                before = rank_along((axis,)) >= n - step
                (early, late), (first, last) = _halves(rows), _halves(now)
                dlate, *dfirst = pulled(late, first, False)
                queries, others = _pick(before, early, late), _pick(before, first, last)
                dqueries, *dothers = pulled(queries, others, False)
                a, b = _put(before, dqueries)
                more = F.concat([a, b + dlate], 3)
                pairs = zip(dfirst, (_put(before, x) for x in dothers), strict=True)
                new = [F.concat([a + d, b], 3) for d, (a, b) in pairs]
            dq, grads = dq + more, [a + b for a, b in zip(grads, new, strict=True)]
        return [dq, *turned(grads, -1)]

    local = distribute(mesh_axes=[axis], layouts={"return": ShardSpec((3,), (axis,))})
    ahead, back = local(forward), local(backward)

    @custom_gradient
    def ring(q: Tensor, *keys: Tensor) -> tuple[Tensor, Any]:
        out, lse = ahead(q, *keys)
        return out, lambda g: tuple(back(q, list(keys), out, lse, g))

    return ring


def _halves(xs: list[Tensor]) -> list[list[Tensor]]:
    """[the early chunk of each, the late chunk of each]."""
    return [list(part) for part in zip(*(F.split(x, 2, 3) for x in xs), strict=True)]


def _pick(yes: Tensor, xs: list[Tensor], ys: list[Tensor]) -> list[Tensor]:
    return [F.where(yes, x, y) for x, y in zip(xs, ys, strict=True)]


def _put(yes: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """`x` as the first of two, or as the second, with zeros as the other."""
    return F.where(yes, x, 0.0), F.where(yes, 0.0, x)
