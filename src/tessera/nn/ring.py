"""Ring attention over a split sequence (Liu et al. 2023). Keys and values pass from device to
device; each device attends with its own queries to the passing block, and merges the results by the
logsumexp of their scores."""

from __future__ import annotations

import math
from functools import cache, lru_cache
from typing import Any

from ..core.checks import divides
from ..core.context import settings
from ..core.declared import Flag, Real
from ..core.dtypes import bool_
from ..core.errors import UsageError
from ..core.layout import TensorType, dim_axes, without
from ..core.reshard import gathered
from ..lang.autodiff.custom import custom_gradient
from ..lang.math import functions as F
from ..lang.math.create import ShardSpec
from ..lang.parallel.collectives import shift, split_over
from ..lang.parallel.local.collectives import rank_along
from ..lang.parallel.local.distribute import distribute
from ..lang.record.local_view import view
from ..lang.record.operands import as_tensor, emit
from ..lang.value.tensor import Like, Tensor
from .blockwise import NONE, Scores, attend, extras, merged, pulled
from .context_parallel import checked, in_view
from .flash import flash_attention


def ring_attention(
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

    Blocks of keys and values pass from device to device in a ring (Liu et al. 2023), in the
    backward pass once more together with their gradients. A device never holds more than two blocks
    of them, nor all scores of a block. With `causal` the sequence must be in zig-zag order
    (`zigzag`); then each device computes two of four quarters of the scores in each step. `bias`
    [H, S] or [B, H, S] is added by key, in the order of the sequence, as is `mask`. A mask by key,
    [B, 1, 1, S] or [B, H, 1, S], passes around with the keys; a mask of all scores, bool [B, H, S,
    S] with 1 in place of B or H, is split by the rows of each device's queries. In a local body
    over `axis`, q, k and v are one device's blocks, and so are `bias` and `mask`.

    Raises MeshError if the mesh has no such axis, ShapeError if S does not divide, or `bias` or
    `mask` does not fit, and UsageError for a float mask of all scores: it would have no gradient.
    """
    q, k, v = F.narrowed(*map(as_tensor, (q, k, v)))
    axis, n = checked("ring_attention", q, k, v, axis)
    local, local_view = in_view(axis), view()
    if n == 1:
        return flash_attention(q, k, v, causal, scale, bias=bias, mask=mask)
    if local_view is not None and not local:
        raise UsageError(
            f"ring_attention: the local body around it is not local over {axis!r}",
            local=", ".join(local_view.axes),
            fix=f"name {axis!r} in its mesh_axes too, or call it in the global view",
        )
    (batch, heads, seq, d), groups = q.shape, k.shape[1]
    chunks = 2 if causal else 1
    into = f"does not divide into {chunks} chunks for each of {n} devices"
    parts = chunks if local else chunks * n
    divides("ring_attention", seq, parts, "a sequence of {count} " + into, q=q.type)
    if not seq:  # an empty sequence
        return flash_attention(q, k, v, causal, scale, bias=bias, mask=mask)
    operands = {"q": q.type, "k": k.type}
    q = q * (1.0 / math.sqrt(d) if scale is None else scale)
    q = q.reshape(batch, groups, heads // groups, seq, d)
    k, v = (t.reshape(batch, groups, 1, seq, t.shape[-1]) for t in (k, v))
    extra, masks = extras("ring_attention", q, bias, mask, seq * n if local else seq, operands, seq)
    tensors = [q, k, v, *extra]
    if not local:
        mesh = next(t.mesh for t in tensors if t.mesh is not None)
        tensors, masks = (
            [F.relayout(t, _only(t.type.on(mesh), 3, axis)) for t in ts] for ts in (tensors, masks)
        )
    q, *keys = tensors
    out: Tensor = _ring(axis, n, causal)(q, keys, masks)
    return out.reshape(batch, heads, seq, v.shape[-1])


def _only(t: TensorType, dim: int, axis: str) -> TensorType:
    """`t` with `dim` split over `axis` only, and no other dim over `axis`."""
    t = gathered(t.complete(), (axis,))
    bare = without(t.dims[dim], dim_axes(t.dims[dim]), t.sizes)
    return split_over(t.with_dims((*t.dims[:dim], bare, *t.dims[dim + 1 :])), dim, (axis,))


@lru_cache(maxsize=64)
def _ring(axis: str, n: int, causal: bool) -> Any:
    """Ring attention of q [B, G, R, S, D] (scaled), with the keys and masks of `attend`."""
    own_scores, whole = Scores(causal), Scores()

    def shifted(xs: list[Tensor], by: int = 1) -> list[Tensor]:
        return [shift(x, axis, by) for x in xs]

    def passed(grads: list[Tensor], keys: list[Tensor]) -> list[Tensor]:
        """The f32 sums of the gradients of `keys`, passed to the next device in the dtypes of
        `keys`."""
        dtypes = [x.dtype for x in keys if x.dtype.is_float]
        sent = shifted([g.to(dtype) for g, dtype in zip(grads, dtypes, strict=True)], -1)
        return [x.to(g.dtype) for x, g in zip(sent, grads, strict=True)]

    def columns(masks: list[Tensor], step: int) -> list[Tensor]:
        """The part of each mask for the keys of the device `step` places before this one."""
        if not masks:
            return []
        at = ((rank_along((axis,)) + (n - step)) % n).reshape(1)
        found = []
        for m in masks:
            parts = m.reshape(*m.shape[:4], n, m.shape[4] // n)
            found.append(F.take_or_zero(parts, at, 4).reshape(*m.shape[:4], m.shape[4] // n))
        return found

    def hide(keys: list[Tensor], masks: list[Tensor]) -> bool:
        """Returns whether some queries may see no key."""
        return bool(masks) or any(x.dtype is bool_ for x in keys)

    def quarters(masks: list[Tensor], before: Tensor) -> list[list[Tensor]]:
        """[masks of the late queries and early keys, masks of the other pair of chunks]."""
        halves = [[F.split(rows, 2, 4) for rows in F.split(m, 2, 3)] for m in masks]
        others = _pick(before, [m[0][0] for m in halves], [m[1][1] for m in halves])
        return [[m[1][0] for m in halves], others]

    def forward(q: Tensor, keys: list[Tensor], masks: list[Tensor]) -> list[Tensor]:
        """[result, logsumexp of each query's scores]."""
        now = list(keys)
        found = attend(q, now, own_scores, columns(masks, 0))
        for step in range(1, n):
            now, hiding = _behind(shifted(now), found[:1]), columns(masks, step)
            if not causal:
                found = merged(found, attend(q, now, whole, hiding))
                continue
            # The passing block comes from a device before this one, whose early chunk all queries
            # see, or from one after it, both of whose chunks the late queries see. In both cases
            # the late queries see its early chunk, and one more pair of chunks remains.
            before = rank_along((axis,)) >= step
            (early, late), (first, last) = _halves([q, *found]), _halves(now)
            below, beside = quarters(hiding, before)
            done = merged(late[1:], attend(late[0], first, whole, below))
            (queries,) = _pick(before, early[:1], late[:1])
            new = attend(queries, _pick(before, first, last), whole, beside)
            new = merged(_pick(before, early[1:], done), new)
            ends = _pick(before, new, early[1:]), _pick(before, done, new)
            found = [F.concat(list(pair), 3) for pair in zip(*ends, strict=True)]
        out, lse = found
        if hide(keys, masks):
            out = F.where((lse < NONE).reshape(*lse.shape, 1), 0.0, out)
        return [out.to(keys[1].dtype), lse]

    def backward(
        q: Tensor, keys: list[Tensor], masks: list[Tensor], out: Tensor, lse: Tensor, g: Tensor
    ) -> list[Tensor]:
        """The gradients of q and of the floats in `keys`, which are passed on with the keys.

        They pass in the opposite direction to the forward pass: in the same direction, each block
        would be kept from the forward pass instead.
        """
        g = g.to(out.dtype)
        if hide(keys, masks):
            g = F.where((lse < NONE).reshape(*lse.shape, 1), 0.0, g)
        rows = [q, g, lse, F.sum(F.wide(g) * F.wide(out), -1)]
        now = keys
        dq, *grads = pulled(rows, now, own_scores, columns(masks, 0))
        for step in range(1, n):
            now, grads = _behind(shifted(now, -1), [dq, *grads]), passed(grads, keys)
            hiding = columns(masks, n - step)
            if not causal:
                more, *new = pulled(rows, now, whole, hiding)
            else:
                before = rank_along((axis,)) >= n - step
                (early, late), (first, last) = _halves(rows), _halves(now)
                below, beside = quarters(hiding, before)
                dlate, *dfirst = pulled(late, first, whole, below)
                queries, others = _pick(before, early, late), _pick(before, first, last)
                dqueries, *dothers = pulled(queries, others, whole, beside)
                a, b = _put(before, dqueries)
                more = F.concat([a, b + dlate], 3)
                pairs = zip(dfirst, (_put(before, x) for x in dothers), strict=True)
                new = [F.concat([a + d, b], 3) for d, (a, b) in pairs]
            dq, grads = dq + more, [a + b for a, b in zip(grads, new, strict=True)]
        return [dq, *passed(grads, keys)]

    local = distribute(mesh_axes=[axis], layouts={"return": ShardSpec((3,), (axis,))})
    ahead, back = local(forward), local(backward)

    @cache
    def by_puts() -> Any:
        from .kernels import ring_by_puts  # imports the texts of kernels

        return local(ring_by_puts(axis, n, causal))

    @custom_gradient
    def ring(q: Tensor, keys: list[Tensor], masks: list[Tensor]) -> tuple[Tensor, Any]:
        k, v, *extra = keys
        puts = settings().program.schedule.backend == "nvshmem" and k.shape == v.shape
        puts = puts and not (masks or extra) and q.mesh is not None and q.mesh.onto is None
        out, lse = (by_puts() if puts else ahead)(q, keys, masks)

        def pull(g: Tensor) -> Any:
            dq, *found = back(q, keys, masks, out, lse, g)
            grads = iter(found)
            dkeys = [next(grads) if x.dtype.is_float else None for x in keys]
            return (dq, dkeys, None) if masks else (dq, dkeys)

        return out, pull

    return ring


def _behind(xs: list[Tensor], done: list[Tensor]) -> list[Tensor]:
    """`xs`, which are read after `done` is computed. Without this the compiler starts with the
    scores of all steps, and holds them at once. Steps of microbatches stay free: a pipeline could
    not tell the sums over them from their parts."""
    mesh = xs[0].mesh
    if mesh is not None and mesh.time:
        return xs
    for first in done:
        xs = [emit("after", x, first) for x in xs]
    return xs


def _halves(xs: list[Tensor]) -> list[list[Tensor]]:
    """[early chunk of each, late chunk of each]."""
    return [list(part) for part in zip(*(F.split(x, 2, 3) for x in xs), strict=True)]


def _pick(yes: Tensor, xs: list[Tensor], ys: list[Tensor]) -> list[Tensor]:
    return [F.where(yes, x, y) for x, y in zip(xs, ys, strict=True)]


def _put(yes: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """(`x`, zeros) where `yes`, else (zeros, `x`)."""
    return F.where(yes, x, 0.0), F.where(yes, 0.0, x)
