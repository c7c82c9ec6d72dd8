"""Rules for JAX's primitives that move elements or make them from a shape."""

from __future__ import annotations

from typing import Any

import numpy as np

from ...core.dtypes import bool_, uint8
from ...core.errors import UsageError
from ..math import functions as F
from ..math.shape import sliced
from ..record.operands import emit, scalar
from ..value.tensor import Tensor
from .jax_rules import RULES, known, permuted, reshaped, rule, tensor, wanted

rule("squeeze")(lambda x, dimensions, **_: x.squeeze(tuple(dimensions)) if dimensions else x)
rule("transpose")(lambda x, permutation, **_: permuted(x, permutation))
rule("concatenate")(lambda *xs, dimension, **_: F.concat(list(xs), dimension))
rule("stack")(lambda *xs, axis, **_: F.stack(list(xs), axis))
rule("split")(lambda x, sizes, axis, **_: F.split(x, [*map(int, sizes)], axis))
rule("rev")(lambda x, dimensions, **_: F.flip(x, tuple(dimensions)) if dimensions else x)
rule("tile")(lambda x, reps, **_: F.tile(x, *reps))


@rule("unstack")
def _unstack(x: Tensor, axis: int = 0, **_: Any) -> list[Tensor]:
    return [part.squeeze(axis) for part in F.split(x, [1] * x.shape[axis], axis)]


@rule("reshape")
def _reshape(x: Tensor, new_sizes: Any, dimensions: Any = None, **_: Any) -> Tensor:
    return reshaped(x if dimensions is None else permuted(x, dimensions), new_sizes)


@rule("broadcast_in_dim")
def broadcast(x: Tensor, shape: Any, broadcast_dimensions: Any, **_: Any) -> Tensor:
    """Dim i of `x` is dim `broadcast_dimensions[i]` of the result."""
    sizes = dict(zip(broadcast_dimensions, x.shape, strict=True))
    x = reshaped(x, tuple(sizes.get(d, 1) for d in range(len(shape))))
    return x if x.shape == tuple(shape) else F.broadcast_to(x, tuple(shape))


@rule("slice")
def _slice(x: Tensor, start_indices: Any, limit_indices: Any, strides: Any, **_: Any) -> Tensor:
    steps = strides or (1,) * x.ndim
    rows = zip(start_indices, limit_indices, steps, strict=True)
    return sliced(x, dict(enumerate(rows)))


@rule("iota")
def _iota(dtype: Any, shape: Any, dimension: int, **_: Any) -> Tensor:
    line = F.arange(shape[dimension]).reshape(
        *(n if d == dimension else 1 for d, n in enumerate(shape))
    )
    return F.broadcast_to(line, tuple(shape)).to(wanted(dtype))


@rule("iota_2x32_shape")
def _wide_iota(shape: Any, **_: Any) -> list[Tensor]:
    """The row-major index of each element as (high, low) words of 32 bits."""
    size = int(np.prod(shape, dtype=np.int64))
    if size >= 2**31:
        raise UsageError(
            f"iota_2x32_shape of JAX has no rule for {size} numbers", fix="draw fewer at once"
        )
    low = F.arange(size).reshape(tuple(shape)).to("u32")
    return [F.broadcast_to(scalar(0, low.dtype), low.shape), low]


@rule("empty")
def _nothing(shape: Any = (), dtype: Any = None, **_: Any) -> Tensor:
    return F.broadcast_to(scalar(0, wanted(dtype)), tuple(shape))


@RULES.rule("pad")
def _pad(x: Any, value: Any, padding_config: Any, **_: Any) -> Tensor:
    zero = known(value)
    out, value = surrounded(tensor(x), padding_config), tensor(value)
    if zero == 0:
        return out
    places = _held(tensor(x).shape, padding_config)
    return out if places is None else F.where(places, out, value)


def surrounded(x: Tensor, config: Any) -> Tensor:
    """`x` with (low, high, interior) zeros before, after and between the elements of each dim; a
    negative number removes elements."""
    if x.dtype is bool_:
        return surrounded(x.to(uint8), config) != 0
    sizes = [n + max(0, n - 1) * inside for n, (_, _, inside) in zip(x.shape, config, strict=True)]
    lows, highs = ([max(0, c[i]) for c in config] for i in (0, 1))
    shape = tuple(low + n + high for low, n, high in zip(lows, sizes, highs, strict=True))
    if 0 in x.shape:
        x = F.broadcast_to(scalar(0, x.dtype), shape)
    elif shape != x.shape:
        steps = tuple(inside + 1 for _, _, inside in config)
        x = emit("pad", x, starts=tuple(lows), steps=steps, shape=shape)
    ends = [(max(0, -low), n - max(0, -high), 1)
            for n, (low, high, _) in zip(shape, config, strict=True)]  # fmt: skip
    return sliced(x, dict(enumerate(ends)))


def _held(shape: Any, config: Any) -> Tensor | None:
    """A mask of the elements that come of the operand of `surrounded`; None if all do."""
    out: Tensor | None = None
    for d, (n, (low, high, inside)) in enumerate(zip(shape, config, strict=True)):
        line = np.zeros(max(0, low) + n + max(0, n - 1) * inside + max(0, high), bool)
        line[max(0, low) :: inside + 1][:n] = True
        line = line[max(0, -low) : len(line) - max(0, -high)]
        if line.all():
            continue
        ones = [1] * len(shape)
        ones[d] = len(line)
        mask = tensor(line.reshape(ones))
        out = mask if out is None else out & mask
    return out


# -- slices at places that are values -------------------------------------------------------------
@RULES.rule("dynamic_slice")
def _part(operand: Any, *starts: Any, slice_sizes: Any, **_: Any) -> Tensor:
    x: Tensor = tensor(operand)
    for d, (start, size) in enumerate(zip(starts, slice_sizes, strict=True)):
        if size == x.shape[d]:
            continue
        most, at = x.shape[d] - size, known(start)
        if at is not None:
            at = min(max(0, at), most)
            x = sliced(x, {d: (at, at + size, 1)})
        else:
            first = F.clip(tensor(start).to("i32"), 0, most)  # within, as in JAX
            x = F.take_or_zero(x, first.reshape(1) if size == 1 else first + F.arange(size), d)
    return x


@RULES.rule("dynamic_update_slice")
def _updated(operand: Any, update: Any, *starts: Any, **_: Any) -> Tensor:
    """An operand with a part replaced: at each place the element of the update that lies there, if
    one does."""
    x: Tensor = tensor(operand)
    out: Tensor = tensor(update)
    inside: Tensor | None = None
    for d, start in enumerate(starts):
        n, m = x.shape[d], out.shape[d]
        if m == n:
            continue
        if m == 0:
            return x
        first = F.clip(tensor(start).to("i32"), 0, n - m)
        at = F.arange(n) - first
        out = F.take_or_zero(out, F.clip(at, 0, m - 1), d)
        here = ((at >= 0) & (at < m)).reshape(*(n if i == d else 1 for i in range(x.ndim)))
        inside = here if inside is None else inside & here
    return out if inside is None else F.where(inside, out, x)
