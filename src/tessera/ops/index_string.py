"""Layout propagation by index strings: the layouts of arguments and result from their letters.

In `"... m k, k n -> ... m n"` a letter names a dim. Letters that two arguments share must be split
the same way. A letter that is missing from the result is reduced; if it was split over an axis, the
result is partial over that axis. If two letters compete for an axis, the leftmost one of the result
keeps it (so a batch stays split and a weight is gathered).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from ..core.dtypes import DType
from ..core.errors import MeshError, ShapeError
from ..core.layout import Dim, Factor, Partial, TensorType, dim_axes, shard_count, without
from ..core.mesh import Mesh, joined
from .op import Inferred


@dataclass(frozen=True, slots=True)
class Index:
    """A parsed index string: the letters of each argument and of the result."""

    args: tuple[tuple[str, ...], ...]
    out: tuple[str, ...]

    @property
    def reduced(self) -> tuple[str, ...]:
        kept = set(self.out)
        return tuple(dict.fromkeys(k for arg in self.args for k in arg if k not in kept))

    def text(self) -> str:
        return ", ".join(map(" ".join, self.args)) + " -> " + " ".join(self.out)


@lru_cache(maxsize=4096)
def parse_index(text: str, ranks: tuple[int, ...]) -> Index:
    """Parses an index string for arguments of these ranks, expanding each `...`.

    Letters are single characters, with or without blanks between. Raises ShapeError if it does not
    fit.
    """
    left, arrow, right = text.partition("->")
    args = [_letters(part) for part in left.split(",")]
    if not arrow or len(args) != len(ranks):
        raise ShapeError(
            f"einsum: {text!r} is for {len(args)} arguments, got {len(ranks)}",
            fix="write one group of letters per argument, then -> and the result's letters",
        )
    extra = max(
        (r - (len(a) - 1) for a, r in zip(args, ranks, strict=True) if "..." in a), default=0
    )
    filler = tuple(f"_{i}" for i in range(extra))
    full: list[tuple[str, ...]] = []
    for letters, rank in zip(args, ranks, strict=True):
        if "..." in letters:
            n = rank - (len(letters) - 1)
            at = letters.index("...")
            letters = [*letters[:at], *(filler[extra - n :] if n >= 0 else ()), *letters[at + 1 :]]
        if len(letters) != rank:
            raise ShapeError(
                f"einsum: {text!r} names {len(letters)} dims of an argument with {rank}",
                fix="name each dim once, or use ... for leading dims",
            )
        full.append(tuple(letters))
    out = _letters(right)
    if "..." in out:
        at = out.index("...")
        out = [*out[:at], *filler, *out[at + 1 :]]
    arg_letters = {k for arg in full for k in arg}
    lost = [k for k in out if k not in arg_letters]
    twice = [k for arg in (*full, tuple(out)) for k in set(arg) if arg.count(k) > 1]
    if lost or twice:
        problem = (
            f"result letter {lost[0]!r} is in no argument" if lost else f"{twice[0]!r} stands twice"
        )
        raise ShapeError(f"einsum: {text!r}: {problem}", fix="each letter once per group")
    return Index(tuple(full), tuple(out))


def _letters(part: str) -> list[str]:
    """The letters of one group of an index string, including `...`."""
    out: list[str] = []
    rest = part.strip()
    while rest:
        if rest.startswith("..."):
            out.append("...")
            rest = rest[3:]
        else:
            if not rest[0].isspace():
                out.append(rest[0])
            rest = rest[1:]
    return out


@lru_cache(maxsize=4096)
def elementwise_index(ranks: tuple[int, ...]) -> Index:
    """The index of an elementwise op: right-aligned dims share their letters."""
    rank = max(ranks, default=0)
    letters = tuple(f"_{i}" for i in range(rank))
    return Index(tuple(letters[rank - r :] for r in ranks), letters)


def common_mesh(name: str, ins: Sequence[TensorType], argument: str = "argument") -> Mesh | None:
    """The mesh of the arguments; an argument without a mesh fits any. Raises MeshError if meshes
    differ."""
    mesh: Mesh | None = None
    for t in ins:
        if t.mesh is None or t.mesh is mesh:
            continue
        both = t.mesh if mesh is None else joined(mesh, t.mesh)
        if both is None:
            assert mesh is not None
            two, rows = (mesh, t.mesh), list[tuple[str, object]]()
            for i, x in enumerate(ins):
                other = two[x.mesh == mesh]
                where = x.mesh.text_beside(other) if x.mesh is not None else "no mesh"
                rows.append((f"{argument.removesuffix('ument')} {i}", f"{x} on {where}"))
            fix = "build all on one mesh, or outside of a function: dist.place(x, mesh=...)"
            if mesh.unfolded == t.mesh.unfolded:
                fix += "; in a loop that lost devices: put all that a step uses into its state"
            raise MeshError(f"{name}: {argument}s are on different meshes", rows=rows, fix=fix)
        mesh = both
    return mesh


def letter_sizes(name: str, index: Index, ins: Sequence[TensorType]) -> dict[str, int]:
    """The size of every letter; 1 broadcasts. Raises ShapeError if two sizes differ."""
    sizes: dict[str, int] = {}
    for letters, t in zip(index.args, ins, strict=True):
        for k, n in zip(letters, t.shape, strict=True):
            have = sizes.get(k, 1)
            if n != have and n != 1 and have != 1:
                which = f" of {k!r}" if not k.startswith("_") else ""
                raise ShapeError(
                    f"{name}: sizes {have} and {n}{which} do not match",
                    rows=[(f"arg {i}", t) for i, t in enumerate(ins)],
                    fix="make the dims equal, or one of them 1",
                )
            sizes[k] = n if have == 1 else have
    return sizes


def propagate(
    name: str,
    index: Index,
    ins: tuple[TensorType, ...],
    dtype: DType,
    *,
    linear: str = "",
    reduce: str = "sum",
    whole: frozenset[str] = frozenset(),
) -> Inferred:
    """The layouts of an op by its index: those that arguments must have, and those of the result.

    `linear` says which partial sums pass through: "" none, "each" through any one argument (the op
    is multilinear), "joint" if all arguments are partial together, "moves" every kind of partial
    (the op only moves elements). `reduce` is the reduction over the missing letters. `whole` are
    letters that must not be split.
    """
    mesh = common_mesh(name, ins)
    sizes = letter_sizes(name, index, ins)
    if mesh is None:
        # Without a mesh nothing can be split; the general case below would give the same, more
        # slowly.
        outs = (TensorType(dtype, tuple((Factor(sizes[k]),) for k in index.out)),)
        return Inferred(ins, outs)
    axis_sizes = mesh.sizes
    chosen: dict[str, Dim] = {}
    used: set[str] = set()
    for k in (*index.out, *index.reduced):
        best: Dim = ((Factor(sizes[k])),)
        score = (1, 0)
        for letters, t in zip(index.args, ins, strict=True):
            if k not in letters or k in whole:
                continue
            dim = t.dims[letters.index(k)]
            if t.shape[letters.index(k)] != sizes[k]:
                continue
            dim = without(dim, used, axis_sizes)
            n = (shard_count(dim_axes(dim), axis_sizes), t.nbytes)
            if n > score and n[0] > 1:
                best, score = dim, n
        chosen[k] = best
        used.update(dim_axes(best))
    partial = _passing(ins, used, linear)
    rest = _resting(ins)
    wants = []
    for letters, t in zip(index.args, ins, strict=True):
        dims = tuple(
            chosen[k] if n == sizes[k] else (Factor(1),)
            for k, n in zip(letters, t.shape, strict=True)
        )
        keep = tuple(p for p in t.partial if p in partial)
        wants.append(TensorType(t.dtype, dims, keep, mesh, (), rest))
    gone = [(a, reduce) for k in index.reduced for a in dim_axes(chosen[k])]
    dims = tuple(chosen[k] for k in index.out)
    out = TensorType(dtype, dims, (*partial, *gone), mesh, (), rest)
    dropped = set(index.reduced)
    reduces = tuple(
        (i, d, reduce)
        for i, letters in enumerate(index.args)
        for d, k in enumerate(letters)
        if k in dropped and d in wants[i].padded_dims
    )
    return Inferred(tuple(wants), (out,), reduces)


def _resting(ins: Sequence[TensorType]) -> tuple[str, ...]:
    """The axes over which every argument that is split over them is only at rest."""
    at_rest = {a for t in ins for a in t.rest_axes}
    in_use = {a for t in ins for a in t.split_axes if a not in t.rest_axes} if at_rest else set()
    return tuple(at_rest - in_use)


def _passing(ins: tuple[TensorType, ...], used: set[str], linear: str) -> Partial:
    """The partials that pass through, as `linear` allows, on axes over which nothing is split."""
    if not linear:
        return ()
    out = []
    for p in dict.fromkeys(p for t in ins for p in t.partial):
        holders = [t for t in ins if p in t.partial]
        if p[0] in used or (p[1] != "sum" and linear != "moves"):
            continue
        if (linear == "each" and len(holders) == 1) or len(holders) == len(ins):
            if linear == "each" and len(holders) > 1:
                continue
            out.append(p)
    if linear == "each" and out:
        # One argument only: a product of two partial sums is not the sum of their products.
        first = next(t for t in ins if any(p in t.partial for p in out))
        out = [p for p in out if p in first.partial]
    return tuple(out)


def contraction_flops(index: Index, sizes: Mapping[str, int]) -> int:
    """FLOPs of a contraction: 2 · the product of all letters' sizes, as a multiply-add counts
    two."""
    letters = {k for arg in index.args for k in arg}
    return 2 * math.prod(sizes[k] for k in letters)
