"""Packing of rows between tokens and experts: unpacked, or as 8-bit floats with scales.

Packed rows are fp8_e4m3 with one f32 scale per 128 channels, so that the largest channel of a block
becomes the largest number of the format: the error of an element is at most 1/16 of itself, or
2**-10/448 of its block's largest. That is d + 4 d/128 bytes in place of 4 d. Gradients are sent
unpacked.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ...core.dtypes import f32, fp8_e4m3
from ...core.layout import TensorType
from ...lang.autodiff.custom import custom_gradient
from ...lang.math import functions as F
from ...lang.value.tensor import Tensor

BLOCK = 128  # channels that share a scale
LARGEST = 448.0  # of fp8_e4m3; larger values become NaN

To = Callable[[TensorType], TensorType]


def pack(x: Tensor) -> tuple[Tensor, Tensor]:
    """(x / scale in fp8_e4m3 [.., blocks, 128], scale in f32 [.., blocks, 1])."""
    short = -x.shape[-1] % BLOCK
    if short:
        x = F.concat([x, F.zeros((*x.shape[:-1], short), x.dtype)], -1)
    rows = x.to(f32).reshape(*x.shape[:-1], -1, BLOCK)
    top = F.max(F.abs(rows), -1, True)
    scale = F.where(top > 0.0, top * (1.0 / LARGEST), 1.0)
    inside = F.minimum(F.maximum(rows / scale, -LARGEST), LARGEST)
    return inside.to(fp8_e4m3), scale


def unpack(packed: Tensor, scale: Tensor, channels: int, dtype: Any) -> Tensor:
    """The rows that `pack` packed, to 8-bit precision."""
    x = (packed.to(f32) * scale).reshape(*packed.shape[:-2], -1)
    return (x if x.shape[-1] == channels else x[..., :channels]).to(dtype)


def exchange(x: Tensor, to: To, packing: str | None, algorithm: str = "") -> Tensor:
    """`x` [.., d] in the layout `to(x.type)`, packed while it is sent by an all_to_all of this
    algorithm. `to` does not change the last dim."""
    target = to(x.type)
    if target is x.type:
        return x
    if packing is None:
        return F.relayout(x, target, algorithm)
    if packing in ("bf16", "f16"):
        narrow = x.to(packing)
        return F.relayout(narrow, to(narrow.type), algorithm).to(x.dtype)

    @custom_gradient
    def through(x: Tensor) -> Any:
        packed, scale = (F.relayout(part, to(part.type), algorithm) for part in pack(x))
        home = x.type.complete()
        return unpack(packed, scale, x.shape[-1], x.dtype), lambda g: F.relayout(g, home, algorithm)

    out: Tensor = through(x)
    return out
