"""Translation of an `einsum` index to the plain form of the op `contract`.

In an index of `contract` each letter stands once in a group and has one size. Three forms are
translated here: an index without a result, a letter that stands twice in an argument (a diagonal),
and dims of size one that broadcast.

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

from ...core.errors import ShapeError

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
