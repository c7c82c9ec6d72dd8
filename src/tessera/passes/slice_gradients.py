"""Gradients of slices of one value, concatenated if the slices are adjacent.

The gradient of a slice is a pad: zeros around the slice's gradient. A sum of pads writes every
element once for each slice; slices that fill a run of one dim are concatenated instead, which
writes each element once.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from functools import partial, reduce
from itertools import pairwise

from ..core.layout import Partial, dim_axes
from ..ir.graph.build import Builder
from ..ir.graph.node import Node
from ..ops.movement import pad


def joined(b: Builder, parts: Sequence[Node]) -> list[Node]:
    """`parts`, with gradients of slices that fill a run of one dim merged into one node at the
    place of the first. The sum of the parts does not change."""
    groups: dict[tuple[int, Partial], list[int]] = defaultdict(list)
    for at, g in enumerate(parts):
        dim = _grown(g)
        if dim is not None:
            groups[dim, g.type.partial].append(at)
    found: list[Node | None] = list(parts)
    for (dim, _), places in groups.items():
        one = _side_by_side(b, dim, [parts[i] for i in places]) if len(places) > 1 else None
        if one is not None:
            for i in places:
                found[i] = None
            found[places[0]] = one
    return [g for g in found if g is not None]


def _grown(g: Node) -> int | None:
    """The dim that the pad `g` enlarges, if it is the only one and the pad has no steps; else
    None."""
    if g.op != pad.name or any(k != 1 for k in g.attrs["steps"]):
        return None
    had = g.args[0].type.shape
    grown = [i for i, (n, m) in enumerate(zip(had, g.type.shape, strict=True)) if n != m]
    return grown[0] if len(grown) == 1 else None


def _side_by_side(b: Builder, dim: int, pads: Sequence[Node]) -> Node | None:
    """The sum of `pads` along `dim` if each begins where another ends, else None. Pads at the same
    place are added."""
    places: dict[tuple[int, int], list[Node]] = defaultdict(list)
    for g in pads:
        part = g.args[0]
        places[g.attrs["starts"][dim], part.type.shape[dim]].append(part)
    runs = sorted(places)
    if any(start + n != then for (start, n), (then, _) in pairwise(runs)):
        return None
    # Blocks of a split dim are adjacent on each device only if all parts have the same size.
    split = any(dim_axes(p.type.dims[dim]) for parts in places.values() for p in parts)
    if split and len({n for _, n in runs}) > 1:
        return None
    made = b("concat", *(reduce(partial(b, "add"), places[run]) for run in runs), dim=dim)
    shape = pads[0].type.shape
    starts = tuple(runs[0][0] if i == dim else 0 for i in range(len(shape)))
    if made.type.shape == shape:
        return made
    return b("pad", made, starts=starts, steps=(1,) * len(shape), shape=shape)
