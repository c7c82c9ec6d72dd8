"""Parts: nodes that only some ranks compute, and their branches in the merged program
(merge.py)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ....core.dtypes import int32
from ....core.errors import UsageError
from ....core.layout import TensorType
from ....ir.graph.build import Builder
from ....ir.graph.node import Graph, Node
from ....ir.graph.text import to_text
from ....ops.local import reinterpret
from ....ops.movement import broadcast_to


@dataclass(eq=False)
class Part:
    """A node that the ranks in `ranks`, of `every` ranks, have in common."""

    node: Node  # the node of the first rank
    args: tuple[Part, ...]
    every: int
    ranks: set[int] = field(default_factory=set)
    merged_node: Node | None = None  # its node in the merged program
    leaf: Any = None  # the source of an input's value; None for other nodes

    @property
    def common(self) -> bool:
        return self.leaf is not None or len(self.ranks) == self.every

    def cone(self) -> tuple[list[Part], list[Part]]:
        """Returns (the parts of only some ranks that it depends on, in order; the common parts that
        these read)."""
        own: dict[Part, None] = {}
        leaves: dict[Part, None] = {}

        def visit(p: Part) -> None:
            if p.common:
                leaves[p] = None
            elif p not in own:
                for a in p.args:
                    visit(a)
                own[p] = None

        visit(self)
        return list(own), list(leaves)


def choose(
    b: Builder,
    rank: Node,
    leaves: dict[Part, Node],
    groups: dict[Part, list[int]],
    top: bool = True,
) -> Node:
    """Adds to `b` a choice by `rank` among the parts of `groups`, as nested `cond` nodes. The last
    group needs no condition."""
    part, ranks = next(iter(groups.items()))
    if len(groups) == 1:
        return _replayed(b, leaves, part, top)
    other_groups = {p: r for p, r in groups.items() if p is not part}

    def branch(values: dict[Part, list[int]]) -> Graph:
        inner = Builder(b.name, b.options, b.strict, b.ordered)
        inner.scope, inner.loc = b.scope, b.loc if b.loc is not None else part.node.loc
        at = inner.input(rank.type.with_varying(()), "rank")
        given = {
            p: inner.input(n.type.with_varying(()), f"x{i}")
            for i, (p, n) in enumerate(leaves.items())
        }
        return inner.graph([choose(inner, at, given, values, False)])

    yes, no = branch({part: ranks}), branch(other_groups)
    node = b("cond", _among(b, rank, ranks), rank, *leaves.values(), yes=yes, no=no)
    return b("item", node, index=0)


def _among(b: Builder, rank: Node, ranks: Sequence[int]) -> Node:
    """Returns a node for `rank` in `ranks`."""
    asks = [b("eq", rank, b("full", dtype=int32, shape=(), value=r)) for r in ranks]
    found = asks[0]
    for ask in asks[1:]:
        found = b("logical_or", found, ask)
    return found


def _replayed(b: Builder, leaves: dict[Part, Node], part: Part, top: bool) -> Node:
    """Adds the nodes of `part` that only some ranks have to `b`. In a branch they are one device's
    own, so their types do not vary."""
    new = dict(leaves)
    for p in part.cone()[0]:
        n = p.node
        args = tuple(new[a] for a in p.args)
        new[p] = made = replace(n, args=args) if top else _alone(n, args)
        if made not in args:
            b.nodes.append(made)
    return new[part]


def _alone(n: Node, args: tuple[Node, ...]) -> Node:
    """Returns `n` with the arguments `args` and types that do not vary, also in a loop's body.
    Raises UsageError for a node that involves all devices."""
    if n.op == reinterpret.name:
        if args[0].type is not n.type.with_varying(()):
            raise UsageError(
                "a gradient is taken, or random numbers are drawn, by some ranks only",
                fix="do it on every rank, and choose by the rank among what comes of it",
                at=n.loc,
            )
        return args[0]
    attrs = {
        k: v.with_varying(()) if isinstance(v, TensorType) else _graph_alone(v)
        if isinstance(v, Graph) else v
        for k, v in n.attrs.items()
    }  # fmt: skip
    return replace(n, args=args, types=tuple(t.with_varying(()) for t in n.types), attrs=attrs)


def _graph_alone(graph: Graph) -> Graph:
    new: dict[Node, Node] = {}
    for n in graph.nodes:
        new[n] = _alone(n, tuple(new[a] for a in n.args))
    inputs, outputs = (tuple(new[n] for n in some) for some in (graph.inputs, graph.outputs))
    return Graph(graph.name, tuple(dict.fromkeys(new.values())), inputs, outputs, graph.options)


def each_element(n: Node) -> bool:
    """Returns whether each block of the result depends on the same blocks of the arguments only."""
    if n.op == broadcast_to.name:
        return not n.args[0].type.rank
    return n.kind.pure and (n.kind.creates or n.kind.elements in ("computed", "same"))


def attrs_key(n: Node) -> object:
    return tuple(
        (
            k,
            to_text(v)
            if isinstance(v, Graph)
            else (type(v), str(v) if isinstance(v, float) else v),
        )
        for k, v in n.attrs.items()
    )
