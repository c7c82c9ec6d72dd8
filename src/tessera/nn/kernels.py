"""Layers by kernels of Tile IR: attention, a ring of devices, a head with its loss.

The autotuner takes them where they are faster (`attention`, `head_loss` in autotune/choices.py).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

from ..core.devices import platform
from ..core.dtypes import f32, int32
from ..ir.tile.kernel import Kernel, with_sizes
from ..ir.tile.kernels import (
    cross_entropy,
    cross_entropy_dw,
    cross_entropy_dx,
    flash,
    flash_dkv,
    flash_dq,
    flash_grads,
)
from ..ir.tile.kernels import ring_attention as ring_text
from ..ir.tile.text import parse
from ..lang.autodiff.custom import custom_gradient
from ..lang.math import functions as F
from ..lang.record.kernel_op import kernel_op
from ..lang.value.tensor import Tensor

TILE = 128  # rows of a tile, at most


def _kernel(text: Callable[..., str], options: tuple[Any, ...], sizes: dict[str, int]) -> Kernel:
    return with_sizes(_parsed(text(*options)), **sizes)


_parsed = lru_cache(maxsize=64)(parse)


def _tile(size: int, most: int = TILE) -> int:
    """The largest divisor of `size` up to `most`; `most` itself if all are small."""
    best = max(n for n in range(1, min(size, most) + 1) if size % n == 0)
    return best if 2 * best > min(size, most) else most


def _divisor(size: int, most: int) -> int:
    """The same, or `size` itself: a size that divides it."""
    tile = _tile(size, most)
    return tile if size % tile == 0 else size


def _in_front(x: Tensor, dim: int, tile: int, value: float = 0) -> Tensor:
    """`x` padded in front to a multiple of `tile` along `dim`."""
    short = -x.shape[dim] % tile
    if not short:
        return x
    shape = (*x.shape[:dim], short, *x.shape[dim + 1 :])
    return F.concat([F.full(shape, value, x.dtype), x], dim)


# -- attention ------------------------------------------------------------------------------------
def attention_by_kernel(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> Tensor:
    """Attention [B, G, R, S, D] of q [B, G, R, S, D], k and v [B, G, T, D], in tiles of queries and
    keys. The gradient keeps the result and one number per query."""
    bq, bk = _tile(q.shape[3]), _tile(k.shape[2])
    rows, keys = q.shape[3], k.shape[2]
    segments: list[Tensor] = []
    if rows % bq or keys % bk:  # padding is a segment by itself
        batch = q.shape[0]
        seg = F.zeros((batch, rows), int32), F.zeros((batch, keys), int32)
        segments = [_in_front(seg[0], 1, bq, 1), _in_front(seg[1], 1, bk, 2)]
        q, k, v = _in_front(q, 3, bq), _in_front(k, 2, bk), _in_front(v, 2, bk)
    how = (causal, bool(segments), q.dtype.name)
    b, h, g, t, d = q.shape
    sizes = {"B": b, "H": h, "G": g, "T": t, "S": k.shape[2], "D": d, "bq": bq, "bk": bk}
    factor = F.full((1,), scale, f32)

    def run(text: Callable[..., str], *tensors: Tensor) -> list[Tensor]:
        return kernel_op(_kernel(text, how, sizes), *tensors, factor, split=("B", "H"))

    @custom_gradient
    def attend(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Any]:
        o, lse = run(flash, q, k, v, *segments)

        def pull(go: Tensor) -> tuple[Tensor, ...]:
            go = go.to(o.dtype)
            given = [q, k, v, *segments, go, lse, F.sum(go.to(f32) * o.to(f32), -1)]
            if platform() == "cpu":  # which runs the steps of a grid one after the other
                dq, dk, dv = run(flash_grads, *given)
                return dq.to(q.dtype), dk, dv
            return (*run(flash_dq, *given), *run(flash_dkv, *given))

        return o, pull

    o: Tensor = attend(q, k, v)
    return o[:, :, :, t - rows :]


def ring_by_puts(
    axis: str, n: int, causal: bool
) -> Callable[[Tensor, list[Tensor], list[Tensor]], list[Tensor]]:
    """A function of one device's q [B, G, R, S, D] (scaled), [k, v] [B, G, 1, S, D] and no masks:
    [attention over the ring `axis`, its logsumexp], by one kernel that puts."""

    def forward(q: Tensor, keys: list[Tensor], masks: list[Tensor]) -> list[Tensor]:
        (b, h, g, seq, d), c = q.shape, 2 if causal else 1
        tile = _divisor(seq // c, TILE)
        sizes = {
            "B": b,
            "H": h,
            "G": g,
            "C": c,
            "R": seq // c,
            "D": d,
            "bq": tile,
            "bk": tile,
            "x": n,
        }
        k, v = (x.reshape(b, h, c, seq // c, d) for x in keys)
        o, lse = kernel_op(
            _kernel(ring_text, (causal, q.dtype.name), sizes),
            q.reshape(b, h, g, c, seq // c, d), k, v, F.full((1,), 1.0, f32),
            split=("B", "H"), axes=(axis,),
        )  # fmt: skip
        return [o.reshape(q.shape).to(v.dtype), lse.reshape(q.shape[:-1])]

    return forward


# -- a head with its loss -------------------------------------------------------------------------
def losses_by_kernel(x: Tensor, w: Tensor, labels: Tensor, ignore: int) -> Tensor:
    """The cross-entropy f32[N] of each row of x [N, C] @ w [C, V] with its label. A row with the
    label `ignore` has 0. No label is outside of V otherwise."""
    (rows, channels), classes = x.shape, w.shape[1]
    local = x.type.local_shape[0]
    local = rows if rows % local else local  # uneven blocks are gathered
    bn = max(n for n in range(1, min(local, TILE) + 1) if local % n == 0)
    bc, bv = _divisor(channels, 4 * TILE), _tile(classes, 4 * TILE)
    w = F.concat([w, F.zeros((channels, -classes % bv), w.dtype)], 1) if classes % bv else w
    sizes = {"N": rows, "C": channels, "V": w.shape[1], "classes": classes}
    sizes |= {"bn": bn, "bc": bc, "bv": bv}

    def run(text: Callable[..., str], *tensors: Tensor) -> list[Tensor]:
        return kernel_op(_kernel(text, (ignore, x.dtype.name), sizes), *tensors, split=("N",))

    @custom_gradient
    def head(x: Tensor, w: Tensor) -> tuple[Tensor, Any]:
        loss, lse = run(cross_entropy, x, w, labels)

        def pull(g: Tensor) -> tuple[Tensor, Tensor]:
            given = (x, w, labels, lse, g.to(f32))
            (dx,), (dw,) = run(cross_entropy_dx, *given), run(cross_entropy_dw, *given)
            return dx.to(x.dtype), dw.to(w.dtype)

        return loss, pull

    found: Tensor = head(x, w)
    return found
