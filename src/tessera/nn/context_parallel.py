"""Context parallelism: attention over a sequence that is split over devices, and sequence layouts.

All-to-all attention (Ulysses, Jacobs et al. 2023) is a change of layout: from a split sequence to
split heads. Ring attention is in `ring.py`. `split_sequence` and `whole_sequence` are sequence
parallelism (Korthikanti et al. 2022).

>>> zigzag(F.arange(8), 2, 0).numpy().tolist()
[0, 1, 6, 7, 2, 3, 4, 5]
"""

from __future__ import annotations

from ..core.checks import axes_of, divides, unfit
from ..core.context import settings
from ..core.declared import Count, Flag, Real
from ..core.errors import MeshError, ShapeError, UsageError
from ..core.layout import dim_axes, shard_count
from ..core.reshard import completed, gathered
from ..lang.math import functions as F
from ..lang.math.shape import one_dim
from ..lang.parallel.collectives import split_over
from ..lang.record.local_view import view
from ..lang.record.operands import as_tensor, emit
from ..lang.value.tensor import Like, Tensor
from .dot_product_attention import check_heads
from .flash import flash_attention


# -- the order of a causal sequence ---------------------------------------------------------------
def zigzag_positions(seq: int, parts: int) -> Tensor:
    """The token at each position, i32[seq], of a causal sequence in zig-zag order.

    Of 2·parts chunks, device i holds chunks i and 2·parts-1-i: one early and one late, so that all
    devices see the same number of keys. Raises ShapeError if seq does not divide.

    >>> zigzag_positions(8, 2).numpy().tolist()
    [0, 1, 6, 7, 2, 3, 4, 5]
    """
    if parts == 1:
        return F.arange(seq)
    divides("zigzag", seq, 2 * parts, "a sequence of {count} does not divide into {parts} chunks")
    size = seq // (2 * parts)
    early = F.arange(parts).reshape(parts, 1, 1)
    chunks = F.concat([early, (2 * parts - 1) - early], 1)
    return (chunks * size + F.arange(size)).reshape(seq)


def zigzag(x: Like, parts: Count, dim: int = 1) -> Tensor:
    """`x` with `dim` in zig-zag order, as causal `ring_attention` over `parts` devices needs it.

    The sequence is cut into 2 * `parts` chunks, and device i gets chunks i and 2 * `parts` - 1 - i,
    so all devices have equal work. Apply it once to token ids and labels. Ops that act on each row
    separately need no change. Raises ShapeError if `dim` does not divide into 2 * `parts` chunks.
    """
    t = as_tensor(x)
    d = one_dim("zigzag", t, dim)
    return t if parts == 1 else _taken(t, zigzag_positions(t.shape[d], parts), d)


def unzigzag(x: Like, parts: Count, dim: int = 1) -> Tensor:
    """The inverse of `zigzag`.

    >>> unzigzag(zigzag(F.arange(8), 2, 0), 2, 0).numpy().tolist()
    [0, 1, 2, 3, 4, 5, 6, 7]
    """
    t = as_tensor(x)
    d = one_dim("unzigzag", t, dim)
    return t if parts == 1 else _taken(t, F.argsort(zigzag_positions(t.shape[d], parts)), d)


def _taken(x: Tensor, order: Tensor, dim: int) -> Tensor:
    return F.take_or_zero(F.relayout(x, gathered(x.type, dim_axes(x.type.dims[dim]))), order, dim)


# -- between layers -------------------------------------------------------------------------------
def split_sequence(x: Tensor, axis: str | None, dim: int = 1) -> Tensor:
    """`x` [B, S, ...] with S split over `axis` too, and a partial sum over it completed.

    For a partial sum this is a reduce_scatter, whose gradient is an all_gather; otherwise no data
    moves. With `axis` None or no mesh, `x` itself. A sequence of one token is completed only.
    """
    n = axis_size("split_sequence", x, axis)
    if axis is None or n == 1 or axis in x.type.split_axes:
        return x
    if x.shape[dim] == 1:
        return F.relayout(x, completed(x.type, (axis,)))
    return F.relayout(x, split_over(completed(x.type, (axis,)), dim, (axis,)))


def whole_sequence(x: Tensor, axis: str | None) -> Tensor:
    """`x` [B, S, ...] gathered over `axis`: an all_gather, whose gradient is a reduce_scatter.

    Matrix products read it, so inside `ts.autocast` it is rounded before it is sent.
    """
    if axis is None or axis_size("whole_sequence", x, axis) == 1:
        return x
    (sent,) = (x,) if settings().program.mesh_invariant else F.narrowed(x)
    whole = F.relayout(sent, gathered(sent.type, (axis,)))
    return whole if sent is x else emit("cast", whole, dtype=x.dtype, terms=True)


def axis_size(name: str, x: Tensor, axis: str | None) -> int:
    """The number of devices along `axis` of the mesh of `x`, 1 without a mesh. Raises MeshError if
    the mesh lacks it."""
    if axis is None or x.mesh is None:
        return 1
    if axis not in x.mesh:
        raise MeshError(
            f"{name}: axis {axis!r} is not an axis of the mesh",
            x=x.type,
            mesh=x.mesh.text(),
            fix=f"give the mesh an axis {axis!r}, or name another",
        )
    return x.mesh.sizes[axis]


# -- by all-to-all --------------------------------------------------------------------------------
def all_to_all_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    axis: str = "cp",
    causal: Flag = False,
    scale: Real | None = None,
    bias: Like | None = None,
    mask: Like | None = None,
) -> Tensor:
    """`attention` of q [B, H, S, D], k and v [B, G, S, D] whose dim S is split over `axis`.

    One all_to_all gives each device all positions of some heads, a second returns to each device
    its positions of all heads (Jacobs et al. 2023). Splits over other axes (batch over dp, heads
    over tp) stay. Raises MeshError if the mesh has no such axis, ShapeError if the heads of k and v
    do not divide over it, UsageError in a local body over `axis`.
    """
    q, k, v = F.narrowed(*map(as_tensor, (q, k, v)))
    axis, n = checked("all_to_all_attention", q, k, v, axis)
    if n == 1:
        return flash_attention(q, k, v, causal, scale, bias=bias, mask=mask)
    (batch, heads, seq, d), groups = q.shape, k.shape[1]
    devices = n * shard_count([a for a in dim_axes(k.type.dims[1]) if a != axis], k.type.sizes)
    divides(
        "all_to_all_attention", groups, devices,
        "{count} heads of keys do not divide over {parts} devices",
        "make them a multiple of {parts}, or use ring attention", q=q.type, k=k.type,
    )  # fmt: skip
    if in_view(axis):
        raise UsageError(
            f"all_to_all_attention: {axis!r} is local here",
            q=q.type,
            fix="call it in the global view, or use dist.all_to_all in the local one",
        )
    shared = heads // groups
    mesh = next(t.mesh for t in (q, k, v) if t.mesh is not None)
    q, k, v = (F.relayout(t, t.type.on(mesh)) for t in (q, k, v))
    # Concatenated per group of heads, so that one all_to_all sends all three.
    parts = [q.reshape(batch, groups, shared, seq, d)]
    parts += [t.reshape(batch, groups, 1, seq, t.shape[-1]) for t in (k, v)]
    if v.shape[-1] == d:
        parts = F.split(_moved_to(1, axis, F.concat(parts, 2)), (shared, 1, 1), 2)
    else:
        parts = [_moved_to(1, axis, t) for t in parts]
    q, k, v = (t.reshape(batch, t.shape[1] * t.shape[2], seq, t.shape[-1]) for t in parts)
    bias, mask = (
        None if t is None else F.relayout(u := as_tensor(t), gathered(u.type.on(mesh), (axis,)))
        for t in (bias, mask)
    )
    out = flash_attention(q, k, v, causal, scale, bias=bias, mask=mask)
    return _moved_to(2, axis, out)


def _moved_to(dim: int, axis: str, x: Tensor) -> Tensor:
    """`x` split over `axis` along `dim` only."""
    if axis in dim_axes(x.type.dims[dim]):
        return x
    bare = gathered(x.type.complete(), (axis,))
    return F.relayout(x, split_over(bare, dim, (axis,)))


def checked(name: str, q: Tensor, k: Tensor, v: Tensor, axis: str) -> tuple[str, int]:
    """(axis, number of devices along it). Raises ShapeError, MeshError or UsageError if the
    arguments do not fit."""
    check_heads(name, q, k, v)
    axes = axes_of(name, axis)
    if len(axes) != 1:
        raise unfit(name, "axis", axis, 'name one axis of the mesh, e.g. "cp"')
    axis = axes[0]
    if q.ndim != 4 or q.shape[2] != k.shape[2]:
        raise ShapeError(
            f"{name}: it takes q [B, H, S, D], k [B, G, S, D] and v [B, G, S, E]",
            q=q.type,
            k=k.type,
            v=v.type,
            fix="give queries and keys of the same positions",
        )
    n = axis_size(name, next((t for t in (q, k, v) if t.mesh is not None), q), axis)
    seq = q.shape[2] * (n if in_view(axis) else 1)
    divides(name, seq, n, "a sequence of {count} does not divide over {parts} devices", q=q.type)
    return axis, n


def in_view(axis: str) -> bool:
    seen = view()
    return seen is not None and axis in seen.axes
