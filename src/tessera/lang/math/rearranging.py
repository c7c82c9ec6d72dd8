"""Padding, repeating and rolling, and dims of size 1: `pad`, `tile`, `roll`, `squeeze`,
`flatten`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import numpy as np

from ...core.checks import several, sizes, whole
from ...core.declared import Integer, Natural, OneOf
from ...core.errors import ShapeError, UsageError
from ...core.value_checks import is_list, is_whole
from ..record.operands import as_tensor, emit
from ..value.checks import fitting
from ..value.tensor import Like, Tensor, method
from .shape import Dims, along, broadcast_to, concat, dims_of, one_dim, reshape, sliced


# -- dims of size 1 -------------------------------------------------------------------------------
@method("squeeze")
def squeeze(x: Like, dim: Dims = None) -> Tensor:
    """`x` without the dims `dim` that have size 1 (an int, several ints, or None for all such).

    A dim of another size stays, as in PyTorch (NumPy and JAX raise an error). Raises ShapeError if
    `x` has no such dim.
    """
    t = as_tensor(x)
    gone = {d for d in dims_of("squeeze", t, dim) if t.shape[d] == 1}
    return reshape(t, tuple(n for i, n in enumerate(t.shape) if i not in gone))


@method("unsqueeze")
def unsqueeze(x: Like, dim: Integer) -> Tensor:
    """`x` with a new dim of size 1 at place `dim` of the result: NumPy's expand_dims.

    Raises ShapeError if `dim` is not from -rank - 1 to rank.
    """
    t = as_tensor(x)
    if not -t.ndim - 1 <= dim <= t.ndim:
        raise ShapeError(
            f"unsqueeze: the result has no dim {dim}",
            x=t.type,
            fix=f"dims are {-t.ndim - 1} to {t.ndim}",
        )
    dim %= t.ndim + 1
    return reshape(t, (*t.shape[:dim], 1, *t.shape[dim:]))


@method("flatten")
def flatten(x: Like, start_dim: int = 0, end_dim: int = -1) -> Tensor:
    """`x` with its dims from `start_dim` to `end_dim`, both included, as one; a scalar as [1].

    Raises ShapeError if `x` has no such dim, or `end_dim` comes before `start_dim`.
    """
    t = as_tensor(x)
    t = t if t.ndim else reshape(t, 1)
    first, last = one_dim("flatten", t, start_dim), one_dim("flatten", t, end_dim)
    if last < first:
        raise ShapeError(
            f"flatten: end_dim {last} comes before start_dim {first}",
            x=t.type,
            fix="give them in their order",
        )
    count = 1
    for n in t.shape[first : last + 1]:
        count *= n
    return reshape(t, (*t.shape[:first], count, *t.shape[last + 1 :]))


# -- repeating and padding ------------------------------------------------------------------------
def tile(x: Like, *dims: int | Sequence[int]) -> Tensor:
    """`x` repeated `dims[i]` times along dim i; `dims` count from the last dim.

    With more `dims` than `x` has, new dims come first, as in NumPy and PyTorch. Raises ShapeError
    if one of `dims` is negative.
    """
    return _tiled("tile", as_tensor(x), dims, rank=0)


@method("repeat")
def _repeat(x: Tensor, *repeats: int | Sequence[int]) -> Tensor:
    """`tile` under PyTorch's name, with a number for each dim at least. (NumPy's is
    `repeat_interleave`.)"""
    return _tiled("repeat", x, repeats, x.ndim)


def _tiled(name: str, t: Tensor, dims: Sequence[int | Sequence[int]], rank: int) -> Tensor:
    given: object = dims[0] if len(dims) == 1 and not is_whole(dims[0]) else dims
    counts = sizes(name, given)
    if len(counts) < rank:
        raise ShapeError(
            f"{name}: {len(counts)} numbers for {rank} dims",
            x=t.type,
            fix="give one for each dim; to repeat each element: ts.repeat_interleave(x, n, dim)",
        )
    counts = (*(1,) * (t.ndim - len(counts)), *counts)
    t = reshape(t, (*(1,) * (len(counts) - t.ndim), *t.shape))
    shape = tuple(n * k for n, k in zip(t.shape, counts, strict=True))
    apart = tuple(n for pair in zip((1,) * t.ndim, t.shape, strict=True) for n in pair)
    wide = tuple(n for pair in zip(counts, t.shape, strict=True) for n in pair)
    return t if shape == t.shape else reshape(broadcast_to(reshape(t, apart), wide), shape)


def repeat_interleave(x: Like, repeats: Natural, dim: int | None = None) -> Tensor:
    """Each element of `x` along `dim`, `repeats` times in a row: NumPy's repeat.

    With `dim` None, `x` is taken as one row first. Raises UsageError if `repeats` is negative,
    ShapeError if `x` has no such dim.
    """
    t = as_tensor(x)
    t, d = (reshape(t, -1), 0) if dim is None else (t, one_dim("repeat_interleave", t, dim))
    shape = t.shape
    wide = broadcast_to(
        reshape(t, (*shape[: d + 1], 1, *shape[d + 1 :])),
        (*shape[: d + 1], repeats, *shape[d + 1 :]),
    )
    return reshape(wide, (*shape[:d], shape[d] * repeats, *shape[d + 1 :]))


Mode = Annotated[str, OneOf("constant", "reflect", "replicate", "circular")]


def pad(x: Like, pad: Sequence[int], mode: Mode = "constant", value: float = 0.0) -> Tensor:
    """`x` with more elements before and after its last dims, in PyTorch's order of `pad`.

    `pad` is (before, after) of the last dim, then of the one before it, and so on. (NumPy's and
    JAX's begins with the first dim, in pairs.) A negative number removes elements. `mode` is
    "constant" (`value`), "reflect" (the elements next to the edge, mirrored), "replicate" (the
    edge) or "circular" (from the other end). Raises ShapeError if `pad` has more pairs than `x` has
    dims or is larger than the part to mirror, DTypeError if `value` does not fit the dtype.
    """
    t = as_tensor(x)
    if not is_list(pad, is_whole) or len(pad) % 2:
        raise UsageError(
            "pad: pad is no list of pairs of whole numbers",
            fix="give (before, after) of the last dim, then of the one before it: (1, 1, 0, 2)",
        )
    if len(pad) > 2 * t.ndim:
        raise ShapeError(
            f"pad: {len(pad) // 2} pairs for {t.ndim} dims",
            x=t.type,
            fix="give (before, after) for each of the last dims",
        )
    pairs = {t.ndim - 1 - i: (int(pad[2 * i]), int(pad[2 * i + 1])) for i in range(len(pad) // 2)}
    if any(t.shape[d] + a + b < 0 for d, (a, b) in pairs.items()):
        raise ShapeError(
            f"pad: {tuple(pad)} takes more away than there is",
            x=t.type,
            fix="leave 0 elements or more of each dim",
        )
    if mode == "constant":
        return _surrounded(t, pairs, value)
    for d, (before, after) in pairs.items():
        if mode == "circular":  # elements are removed before others are added, as in PyTorch
            t = sliced(t, {d: (max(0, -before), t.shape[d] - max(0, -after), 1)})
            before, after = max(0, before), max(0, after)
        if before or after:
            ids = _mirrored(mode, t, d, before, after)
            t = emit("take", t, as_tensor(ids), dim=d)
    return t


def _surrounded(t: Tensor, pairs: dict[int, tuple[int, int]], value: float) -> Tensor:
    """Returns `t` with `value` around it, and with elements removed for negative numbers."""
    held = fitting("pad", value, t.dtype)
    cut = {d: (max(0, -a), t.shape[d] - max(0, -b), 1) for d, (a, b) in pairs.items()}
    t = sliced(t, {d: (min(a, max(a, b)), max(a, b), 1) for d, (a, b, _) in cut.items()})
    for d, (before, after) in pairs.items():
        sides = []
        for n in (before, after):
            shape = (*t.shape[:d], max(0, n), *t.shape[d + 1 :])
            sides.append([emit("full", dtype=t.dtype, shape=shape, value=held)] if n > 0 else [])
        t = concat([*sides[0], t, *sides[1]], d)
    return t


def _mirrored(mode: str, t: Tensor, dim: int, before: int, after: int) -> np.ndarray:
    """The ids of the elements of dim `dim` after padding by `mode`. Raises ShapeError if the dim is
    too small."""
    n = t.shape[dim]
    most = {"reflect": n - 1, "circular": n, "replicate": max(before, after) if n else 0}[mode]
    if max(before, after) > max(0, most):
        raise ShapeError(
            f"pad: dim {dim} of size {n} has not {max(before, after)} elements for mode {mode}",
            x=t.type,
            fix=f"pad by {max(0, most)} at most, or use mode='constant'",
        )
    at = np.arange(-before, n + after)
    if mode == "circular":
        return (at % max(1, n)).astype(np.int32)
    if mode == "reflect":
        at = (n - 1) - np.abs((n - 1) - np.abs(at))
    return np.clip(at, 0, max(0, n - 1)).astype(np.int32)


# -- rolling --------------------------------------------------------------------------------------
def roll(x: Like, shifts: int | Sequence[int], dims: Dims = None) -> Tensor:
    """`x` with its elements moved by `shifts` places along `dims`, cyclically.

    Both are one number, or as many. With `dims` None, `x` is rolled as one row and keeps its shape.
    (NumPy and JAX call them shift and axis.) Raises ShapeError if `x` has no such dim, UsageError
    if the numbers of shifts and dims differ.
    """
    t = as_tensor(x)
    by = [whole("roll", "a shift", s) for s in ([shifts] if is_whole(shifts) else _list(shifts))]
    if dims is None:
        if len(by) != 1:
            raise _as_many(by, [])
        return reshape(_rolled(reshape(t, -1), by[0], 0), t.shape)
    at = [dims] if is_whole(dims) else _list(dims)
    if len(at) != len(by):
        raise _as_many(by, at)
    for s, d in zip(by, at, strict=True):
        t = along(lambda t, d, s=s: _rolled(t, s, d), "roll", t, d)  # type: ignore[misc]
    return t


def _list(value: object) -> Sequence[int]:
    return several("roll", list(value) if isinstance(value, (range, np.ndarray)) else value)


def _as_many(shifts: Sequence[int], dims: Sequence[int]) -> UsageError:
    return UsageError(
        f"roll: {len(shifts)} shifts for {len(dims)} dims",
        fix="give a shift for each dim, e.g. ts.roll(x, (1, 2), dims=(0, 1))",
    )


def _rolled(t: Tensor, shift: int, dim: int) -> Tensor:
    n = t.shape[dim]
    cut = -shift % n if n else 0
    if not cut:
        return t
    return concat([sliced(t, {dim: (cut, n, 1)}), sliced(t, {dim: (0, cut, 1)})], dim)
