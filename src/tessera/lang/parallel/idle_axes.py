"""Mesh axes along which all devices of a program compute the same."""

from __future__ import annotations

from collections.abc import Iterator

from ...core.layout import TensorType
from ...ir.graph.node import Graph
from ...ir.schedule.schedule import Schedule


def idle_axes(program: Graph | Schedule) -> tuple[str, ...]:
    """The axes along which no product of `program` is divided; none if it has no products.

    >>> from tessera.core.layout import parse_type
    >>> from tessera.core.mesh import Mesh
    >>> from tessera.ir.graph.build import Builder
    >>> mesh = Mesh.parse("dp=2,tp=4")
    >>> b = Builder("f")
    >>> x, w = (b.input(parse_type(t, mesh)) for t in ("f32[8, 16]", "f32[16, 32@tp]"))
    >>> idle_axes(b.graph([b("contract", x, w, index="a b, b c -> a c")]))
    ('dp',)
    """
    graphs = [s.graph for s in program.steps] if isinstance(program, Schedule) else [program]
    types = [t for g in graphs for t in _of_products(g)]
    if program.mesh is None or not types:
        return ()
    # A stage of a pipeline runs on a slice of the mesh: it is divided along the missing axes.
    divided = {
        a for t in types for a in (*t.split_axes, *t.partial_axes, *t.varying, *_lacks(program, t))
    }
    return tuple(a for a, n in program.mesh.sizes.items() if n > 1 and a not in divided)


def _lacks(program: Graph | Schedule, t: TensorType) -> list[str]:
    assert program.mesh is not None
    return [a for a in program.mesh.axes if t.mesh is not None and a not in t.mesh]


def _of_products(g: Graph) -> Iterator[TensorType]:
    for n in g.nodes:
        if n.kind.memory == "product":
            yield from n.types
            yield from (t for a in n.args for t in a.types)
        for body in n.attrs.values():
            if isinstance(body, Graph):
                yield from _of_products(body)
