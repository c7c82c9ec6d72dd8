"""User-defined functions as an op, known by name, index string and declarations only.

The index string gives shapes, layouts and FLOPs. A letter may be split over devices if the function
treats its elements independently; otherwise the letter is `whole`. The gradient of such a function
is another one: the gradient of argument i has the letters of argument i and sums over all others,
so it is partial if one of those is split.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..core.dtypes import DType
from ..core.errors import ShapeError, UsageError
from ..core.layout import TensorType, dim_axes, plain
from .index_string import Index, _letters, common_mesh, propagate
from .op import Array, Attrs, Build, Call, Inferred, Op, define


@dataclass(frozen=True, slots=True, eq=False)
class UserFunction:
    """A registered function: the function on arrays, its gradient or None, its source line."""

    name: str
    fn: Callable[..., Any]
    grad: Callable[..., Any] | None
    at: str


FUNCTIONS: dict[str, UserFunction] = {}


def add_function(
    name: str, fn: Callable[..., Any], grad: Callable[..., Any] | None, at: str
) -> UserFunction:
    """Registers `fn` under `name`, or under `name.2` … if another function has the name."""
    free, k = name, 1
    while free in FUNCTIONS:
        k += 1
        free = f"{name}.{k}"
    FUNCTIONS[free] = UserFunction(free, fn, grad, at)
    return FUNCTIONS[free]


def user_function(name: str) -> UserFunction:
    """The function registered as `name`. Raises UsageError if this process has none."""
    found = FUNCTIONS.get(name)
    if found is None:
        raise UsageError(
            f"{name}: no function of this name is known, so a graph that calls it cannot run",
            fix="define it with ts.op(index=...) before the graph is run",
        )
    return found


# -- index strings --------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Groups:
    """An index string: the letters of each argument and each result; "..." stands for any dims."""

    args: tuple[tuple[str, ...], ...]
    outs: tuple[tuple[str, ...], ...]

    def text(self) -> str:
        sides = (", ".join(map(" ".join, side)) for side in (self.args, self.outs))
        return " -> ".join(sides)

    def written_out(self, ranks: Sequence[int]) -> Groups | None:
        """The groups with each "..." expanded to letters, or None if the ranks do not fit."""
        extra = [r - len(a) + 1 for a, r in zip(self.args, ranks, strict=True) if "..." in a]
        if len(set(extra)) > 1 or any(n < 0 for n in extra):
            return None
        filler = tuple(f"_{i}" for i in range(extra[0] if extra else 0))

        def full(letters: tuple[str, ...]) -> tuple[str, ...]:
            return tuple(x for k in letters for x in (filler if k == "..." else (k,)))

        found = Groups(tuple(map(full, self.args)), tuple(map(full, self.outs)))
        fits = all(len(a) == r for a, r in zip(found.args, ranks, strict=True))
        return found if fits else None


def parse_groups(name: str, index: object, sizes: Mapping[str, int]) -> Groups:
    """Parses an index string with one or several results. Raises ShapeError if it cannot be read.

    >>> parse_groups("f", "b s d, d -> b s d, b", {}).outs
    (('b', 's', 'd'), ('b',))
    """
    left, arrow, right = index.partition("->") if isinstance(index, str) else ("", "", "")
    args = tuple(tuple(_letters(part)) for part in left.split(","))
    outs = tuple(tuple(_letters(part)) for part in right.split(","))
    groups = Groups(args, outs)
    letters = {k for a in args for k in a} | set(sizes)
    wrong = ""
    if not arrow:
        wrong = "it is no string with an arrow"
    for group in (*args, *outs):
        twice = next((k for k in group if group.count(k) > 1), None)
        odd = next((k for k in group if k != "..." and not k.isalpha()), None)
        if twice or odd:
            wrong = f"{twice!r} stands twice in one group" if twice else f"{odd!r} is no letter"
    lost = next((k for o in outs for k in o if k not in letters), None)
    if not wrong and lost:
        wrong = f"result letter {lost!r} is in no argument"
    if wrong:
        raise ShapeError(
            f"{name}: index {index!r} cannot be read: {wrong}",
            fix='name the dims of each argument and result, e.g. "b s d, d -> b s d";'
            " sizes={...} gives those of new letters",
        )
    return groups


# -- the op ---------------------------------------------------------------------------------------
def _sizes(attrs: Attrs, groups: Groups, ins: Sequence[TensorType]) -> dict[str, int]:
    """The size of each letter. Raises ShapeError if two arguments differ."""
    sizes = dict(attrs.get("sizes", ()))
    for letters, t in zip(groups.args, ins, strict=True):
        for k, n in zip(letters, t.shape, strict=True):
            if sizes.setdefault(k, n) != n:
                raise ShapeError(
                    f"{attrs['name']}: sizes {sizes[k]} and {n} of {k!r} do not match",
                    rows=[("index", attrs["index"]), *((f"arg {i}", t) for i, t in enumerate(ins))],
                    fix="dims of one letter have one size; a user's op does not broadcast",
                )
    return sizes


def _groups(attrs: Attrs, ins: Sequence[TensorType]) -> Groups:
    """The index string with `...` expanded for these ranks. Raises ShapeError if the arguments do
    not fit it."""
    given = parse_groups(attrs["name"], attrs["index"], dict(attrs.get("sizes", ())))
    found = None
    if len(given.args) == len(ins):
        found = given.written_out([t.rank for t in ins])
    if found is None:
        raise ShapeError(
            f"{attrs['name']}: the arguments do not fit its index {attrs['index']!r}",
            rows=[(f"arg {i}", t) for i, t in enumerate(ins)],
            fix="give one argument per group, each with a dim per letter",
        )
    return found


def _rule(ins: tuple[TensorType, ...], attrs: Attrs) -> Inferred:
    """The rule of an index string, with blocks that are never padded: a letter is whole if the
    function declares it, if its blocks would be padded, or if it is reduced without
    `reduces="sum"`."""
    groups = _groups(attrs, ins)
    sizes = _sizes(attrs, groups, ins)
    dtypes = attrs["dtypes"]
    if len(dtypes) != len(groups.outs):
        raise ShapeError(
            f"{attrs['name']}: {len(dtypes)} dtypes for {len(groups.outs)} results",
            fix="give a dtype per result",
        )
    every = {k for side in (groups.outs, groups.args) for g in side for k in g}
    whole = set(attrs.get("whole", ()))
    if "..." in whole:
        whole |= {k for k in every if k.startswith("_")}
    if attrs.get("reduces") != "sum":
        whole |= {k for k in every if not all(k in o for o in groups.outs)}
    return split_by_letter(attrs["name"], groups, sizes, dtypes, whole, ins)


def split_by_letter(
    name: str,
    groups: Groups,
    sizes: Mapping[str, int],
    dtypes: Sequence[DType],
    whole: set[str],
    ins: tuple[TensorType, ...],
) -> Inferred:
    """The layouts of a function on blocks: a letter is split as in the arguments, unless it is in
    `whole` or its blocks would be padded. A result without a split letter is partial."""
    mesh = common_mesh(name, ins)
    ins = tuple(t.complete() for t in ins)
    # An index with all letters in its result gives the axes of each letter; letters of results come
    # first.
    every = tuple(dict.fromkeys(k for side in (groups.outs, groups.args) for g in side for k in g))
    fresh = tuple(k for k in every if all(k not in a for a in groups.args))
    out_type = plain(dtypes[0], [sizes[k] for k in fresh])
    index = Index((*groups.args, fresh), every)
    whole = {*whole, *fresh}
    while True:
        got = propagate(name, index, (*ins, out_type), dtypes[0], whole=frozenset(whole))
        # The function sees blocks, so none may be padded.
        uneven = {every[d] for d in got.outs[0].padded_dims}
        if not uneven:
            break
        whole |= uneven
    dims = dict(zip(every, got.outs[0].dims, strict=True))
    outs = []
    for letters, dtype in zip(groups.outs, dtypes, strict=True):
        gone = tuple((a, "sum") for k in every if k not in letters for a in dim_axes(dims[k]))
        outs.append(TensorType(dtype, tuple(dims[k] for k in letters), gone, mesh))
    return Inferred(got.wants[:-1], tuple(outs))


def _local(c: Call, *args: Array) -> Any:
    want = [(tuple(c.site.shape(t)), t.dtype) for t in c.outs]
    return c.xp.user(user_function(c.attrs["name"]), c.attrs.get("below", ()), args, want, c.ins)


def _grad(b: Build, n: Any, gs: Any) -> Sequence[Any]:
    """The gradient, as another user function: its index string is this one's, with the results'
    gradients as further arguments. `below` gives, for each order of gradient, the number of
    arguments before it."""
    attrs = n.attrs
    groups = parse_groups(attrs["name"], attrs["index"], dict(attrs.get("sizes", ())))
    given, letters = [], []
    for g, t, out in zip(gs if isinstance(gs, list) else [gs], n.types, groups.outs, strict=True):
        if not t.dtype.is_float:
            continue
        if g is None:
            g = b("full", dtype=t.dtype, shape=t.shape, value=0.0, layout=t.complete())
        given.append(g)
        letters.append(out)
    smooth = [i for i, a in enumerate(n.args) if a.type.dtype.is_float]
    back = Groups((*groups.args, *letters), tuple(groups.args[i] for i in smooth))
    whole = set(attrs.get("whole", ()))
    if attrs.get("reduces") != "sum":  # its gradient has the same whole letters
        every = {k for side in (groups.args, groups.outs) for g in side for k in g}
        whole |= {k for k in every if not all(k in o for o in groups.outs)}
    told = {"whole": tuple(sorted(whole)), "flops": attrs.get("flops"), "turn": attrs.get("turn")}
    node = b(
        "user",
        *n.args,
        *given,
        name=attrs["name"],
        index=back.text(),
        dtypes=tuple(n.args[i].type.dtype for i in smooth),
        reduces="sum",
        below=(*attrs.get("below", ()), len(n.args)),
        **{k: v for k, v in told.items() if v not in (None, ())},
    )
    gradients: list[Any] = [None] * len(n.args)
    for k, i in enumerate(smooth):
        gradients[i] = b("item", node, index=k) if len(smooth) > 1 else node
    return gradients


def _flops(ins: tuple[TensorType, ...], outs: tuple[TensorType, ...], attrs: Attrs) -> int:
    """The FLOPs as declared; otherwise one per point of all letters, or two if some are reduced.
    Each order of gradient doubles them."""
    groups = _groups(attrs, ins)
    sizes = _sizes(attrs, groups, ins)
    points = math.prod(sizes.values())
    count = attrs.get("flops")
    if count is None:
        reduced = any(k not in o for k in sizes for o in groups.outs)
        count = points * (2 if reduced else 1)
    return int(count) << len(attrs.get("below", ()))


user = define(
    Op(
        "user",
        _rule,
        _local,
        _grad,
        flops=_flops,
        attrs="name index dtypes whole? reduces? sizes? below? flops? turn?",
    )
)
