"""Products of tensors: `einsum`, and `matmul` with the rules of NumPy.

Inside `ts.autocast` they are computed in the narrow dtype.

>>> plain_form("ii", [(3, 3)])
Plain(index='i ->', diagonals=(((0, 1),),), squeezed=((),))
>>> plain_form("...i, i...", [(2, 3, 4), (4, 1)])
Plain(index='a b i, i -> a b', diagonals=((), ()), squeezed=((), (1,)))
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from string import ascii_letters

import numpy as np

from ...core.checks import several, shown
from ...core.context import settings
from ...core.dtypes import bf16, dtype_of, f32, fp8_e4m3, summed
from ...core.errors import ShapeError, UsageError
from ...ops.fp8 import scale_of
from ..record.operands import as_tensor, emit, matched, tensor_like
from ..value.tensor import Like, Tensor, method
from .matrices import diagonal
from .shape import broadcast_to, permute


def narrowed(*xs: Tensor) -> tuple[Tensor, ...]:
    """Returns the f32 operands of a product in the narrow dtype of `ts.autocast`, if inside of
    one."""
    to = settings().autocast
    if to is None:
        return xs
    want = dtype_of(to)
    return tuple(x.to(want) if x.dtype is f32 else x for x in xs)


def _same_dtype(name: str, *xs: Tensor) -> tuple[Tensor, ...]:
    xs = narrowed(*xs)
    if len({x.dtype for x in xs}) > 1:
        first = xs[0]
        out = [first]
        for x in xs[1:]:
            first, y = matched(name, first, x)
            out.append(y)
        xs = tuple(x.to(first.dtype) for x in out)
    return xs


def einsum(index: str, *xs: Like) -> Tensor:
    """A sum of products described by an index string, e.g. `einsum("b s d, d n -> b s n", x, w)`.

    The rules are those of `numpy.einsum`; blanks are optional. Without an arrow the result has the
    letters that occur once, in alphabetical order. A letter that occurs twice in one group takes
    the diagonal. `...` stands for any number of dims; these dims, and dims of size 1, broadcast.
    Raises UsageError if `index` is not a string, ShapeError if it does not fit the shapes.
    """
    if not isinstance(index, str):
        raise UsageError(
            f"einsum: {shown(index)} is no index string",
            fix='say which dims go where, e.g. "b s d, d n -> b s n"',
        )
    ts = _same_dtype("einsum", *map(as_tensor, several("einsum", xs)))
    form = plain_form(index, [t.shape for t in ts])
    left, _, right = form.index.partition("->")
    if any(left.count(k) == 1 and k not in right for k in set(left) - set(" ,")):
        ts = tuple(t.to(summed(t.dtype)) for t in ts)  # sums a dim of one argument, as ts.sum
    if "->" in index and not any(form.diagonals) and not any(form.squeezed):
        return emit("contract", *ts, index=index)  # as the user wrote it
    operands = []
    for t, pairs, drop in zip(ts, form.diagonals, form.squeezed, strict=True):
        for i, j in pairs:
            d = diagonal(t, 0, i, j)
            t = permute(d, (*range(i), d.ndim - 1, *range(i, d.ndim - 1)))
        operands.append(t.reshape([n for i, n in enumerate(t.shape) if i not in drop]))
    return emit("contract", *operands, index=form.index)


def matmul(x: Like, y: Like) -> Tensor:
    """The matrix product of `x` [..., m, k] and `y` [..., k, n]; leading dims broadcast.

    The result is [..., m, n]. A vector [k] is multiplied as one row on the left or one column on
    the right, and that dim is dropped from the result. Raises ShapeError if the two sizes k differ,
    if an argument is a scalar, or if the leading dims do not broadcast.
    """
    a, b = _same_dtype("matmul", as_tensor(x), as_tensor(y))
    if not a.ndim or not b.ndim:
        raise ShapeError(
            "matmul: a scalar has no matrix", x=a.type, y=b.type, fix="multiply by it: x * y"
        )
    inner = b.shape[-2] if b.ndim > 1 else b.shape[0]
    if a.shape[-1] != inner:
        raise ShapeError(
            f"matmul: the inner sizes {a.shape[-1]} and {inner} differ",
            x=_type_and_place(a),
            y=_type_and_place(b),
            fix=f"transpose one of them, or give y a dim -2 of {a.shape[-1]}",
        )
    if b.ndim == 1:
        return emit("contract", a, b, index="... k, k -> ...")
    if a.ndim == 1:
        return emit("contract", a, b, index="k, ... k n -> ... n")
    if b.ndim == 2:
        index = "... k, k n -> ... n"
        if settings().autocast_fp8 and a.dtype is b.dtype is bf16:
            scales = scale_of(emit, a, fp8_e4m3), scale_of(emit, b, fp8_e4m3)
            return emit("contract_fp8", a, b, *scales, index=index, left=fp8_e4m3, dtype=bf16)
        return emit("contract", a, b, index=index)
    lead = broadcast_lead("matmul", a, b)
    a = broadcast_to(a, (*lead, *a.shape[-2:]))
    b = broadcast_to(b, (*lead, *b.shape[-2:]))
    return emit("contract", a, b, index="... m k, ... k n -> ... m n")


@method("__matmul__")
def _matmul(x: Tensor, y: Like) -> Tensor:
    return matmul(x, tensor_like(y, x, "matmul"))


@method("__rmatmul__")
def _rmatmul(y: Tensor, x: Like) -> Tensor:
    return matmul(tensor_like(x, y, "matmul"), y)


def _type_and_place(t: Tensor) -> str:
    loc = t._node.loc if t._node is not None else ""
    return f"{t.type}   made at {loc}" if loc else str(t.type)


def broadcast_lead(name: str, a: Tensor, b: Tensor) -> tuple[int, ...]:
    """Returns the dims before the last two, broadcast together. Raises ShapeError if they do not
    broadcast."""
    try:
        return np.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    except ValueError:
        raise ShapeError(
            f"{name}: the leading dims {a.shape[:-2]} and {b.shape[:-2]} do not broadcast",
            x=a.type,
            y=b.type,
            fix="make them equal, or 1",
        ) from None


# Translation of an `einsum` index to the plain form of the op `contract`.
#
# In an index of `contract` each letter stands once in a group and has one size. Three forms are
# translated here: an index without a result, a letter that stands twice in an argument (a
# diagonal), and dims of size one that broadcast.

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Plain:
    """An index for `contract`, and the preparation of each argument: diagonals of pairs of dims,
    taken in order with the new dim in the place of the first, then dims of size one to drop."""

    index: str
    diagonals: tuple[tuple[tuple[int, int], ...], ...]
    squeezed: tuple[tuple[int, ...], ...]


def plain_form(index: str, shapes: Sequence[Shape]) -> Plain:
    """The plain form of `index` for arguments of these shapes. Raises ShapeError if `index` does
    not fit the shapes."""
    left, arrow, right = index.partition("->")
    groups = [_letters(part) for part in left.split(",")]
    if len(groups) != len(shapes):
        raise ShapeError(
            f"einsum: {index!r} is for {len(groups)} arguments, got {len(shapes)}",
            fix="write one group of letters per argument",
        )
    out = _letters(right) if arrow else _implied(groups)
    if any(group.count("...") > 1 for group in (*groups, out)):
        raise ShapeError(f"einsum: {index!r} has two ... in a group", fix="keep one")
    counts = [
        len(shape) - len(group) + 1 if "..." in group else 0
        for group, shape in zip(groups, shapes, strict=True)
    ]
    for group, shape, count in zip(groups, shapes, counts, strict=True):
        if count < 0 or ("..." not in group and len(group) != len(shape)):
            raise ShapeError(
                f"einsum: {index!r} names {len(group) - ('...' in group)} dims of an argument "
                f"with {len(shape)}",
                fix="name each dim once, or use ... for leading dims",
            )
    named = {k for group in (*groups, out) for k in group}
    fresh = [k for k in ascii_letters if k not in named][: max(counts, default=0)]
    filled = [_filled(g, fresh[len(fresh) - n :]) for g, n in zip(groups, counts, strict=True)]
    out = _filled(out, fresh)
    diagonals, once, sizes = [], [], []
    for group, shape in zip(filled, shapes, strict=True):
        pairs, letters, dims = _diagonals(index, group, shape)
        diagonals.append(pairs)
        once.append(letters)
        sizes.append(dims)
    whole: dict[str, int] = {}
    for letters, dims in zip(once, sizes, strict=True):
        for k, n in zip(letters, dims, strict=True):
            whole[k] = max(n, whole.get(k, 1))
    squeezed, kept = [], []
    for letters, dims in zip(once, sizes, strict=True):
        drop = tuple(i for i, k in enumerate(letters) if dims[i] == 1 < whole[k])
        squeezed.append(drop)
        kept.append([k for i, k in enumerate(letters) if i not in drop])
    text = ", ".join(map(" ".join, kept)) + " -> " + " ".join(out)
    return Plain(text.strip(), tuple(diagonals), tuple(squeezed))


def _letters(part: str) -> list[str]:
    return re.findall(r"\.\.\.|\S", part)


def _implied(groups: Sequence[Sequence[str]]) -> list[str]:
    """The letters of the result of an index without an arrow: `...`, then the letters that stand
    once, sorted."""
    every = [k for group in groups for k in group]
    out = sorted(k for k in set(every) if k != "..." and every.count(k) == 1)
    return ["...", *out] if "..." in every else out


def _filled(group: Sequence[str], letters: Sequence[str]) -> list[str]:
    return [k for g in group for k in (letters if g == "..." else (g,))]


def _diagonals(
    index: str, group: Sequence[str], shape: Sequence[int]
) -> tuple[tuple[tuple[int, int], ...], list[str], list[int]]:
    """Returns (pairs of dims, then the letters and the sizes after the diagonals are taken)."""
    letters, dims, pairs = list(group), list(shape), []
    i = 0
    while i < len(letters):
        if letters[i] not in letters[i + 1 :]:
            i += 1
            continue
        j = letters.index(letters[i], i + 1)
        if dims[i] != dims[j]:
            raise ShapeError(
                f"einsum: {index!r}: the two dims {letters[i]!r} have sizes {dims[i]} "
                f"and {dims[j]}",
                fix="a diagonal is of dims of one size",
            )
        pairs.append((i, j))
        del letters[j], dims[j]
    return tuple(pairs), letters, dims
