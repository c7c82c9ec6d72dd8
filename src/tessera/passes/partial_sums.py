"""Completion of partial sums: a pass that moves all_reduces so that fewer bytes are sent.

The recording completes a partial value for each use by itself, as late as its layouts allow. This
pass sees all uses. Over one axis, every value of a linear op may be partial or complete, and a
partial value costs one all_reduce if any reader needs it complete. The cheapest choice is a minimum
cut: partial values on one side, complete ones on the other. A complete value becomes partial
without sending anything (`to_partial`).

Only inserted collectives move. A collective that the user wrote, a sum with an order or algorithm
of its own, and the values that loops and branches exchange stay as they are. So does the dtype of a
sum that was chosen for it. A program of the level "mesh_invariant" does not change, because where a
sum is completed decides how it rounds.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import lru_cache

from ..core.reshard import device_wire_bytes
from ..ir.graph.build import Builder
from ..ir.graph.node import Emit, Graph, Node
from ..ops.op import BODIES
from ..ops.redistribute import NAMES, all_reduce, reduce_scatter, shard, to_partial
from .carriers import carriers, in_form, is_partial, sum_bytes
from .simplify import common_subexpressions, dead_code

MOST_NODES = 32  # that are looked at to see where a value comes from


def complete_once(graph: Graph) -> Graph:
    """`graph` with its partial sums completed where that sends the fewest bytes. Its inputs and
    outputs keep their types.

    It is the least over all choices of the values that are completed, one axis after the other, if
    no op multiplies two partial values; of such a product only the larger one may stay partial.
    """
    return graph if graph.options.mesh_invariant else _all_axes(graph)


def _all_axes(graph: Graph) -> Graph:
    graph = graph.rewrite(None, _all_axes)
    sums = [n for n in graph.nodes if _is_inserted_sum(n)]
    for axis in dict.fromkeys(a for n in sums for a in n.attrs["axes"]):
        made = _Choice(graph, axis).graph()
        if made is not graph:
            made = common_subexpressions(dead_code(made))
            if _sent(made) < _sent(graph):
                graph = made
    return graph


def _is_inserted_sum(n: Node) -> bool:
    """Returns whether `n` completes a partial sum and was inserted for a layout."""
    if n.op not in (all_reduce.name, reduce_scatter.name) or not n.note:
        return False
    kinds, own = dict(n.args[0].type.partial), {"order", "algorithm"} & n.attrs.keys()
    return not own and all(kinds.get(a) == "sum" for a in n.attrs["axes"])


def _sent(graph: Graph) -> int:
    return sum(n.wire_bytes for n in graph.nodes if n.is_collective)


@dataclass(slots=True)
class _Value:
    """A value that is partial over the axis, or could be.

    `bytes` are those of its all_reduce. `carriers` are the positions of the arguments that are
    partial where it is, `carried` their values, `readers` the values that carry it on. `fixed`: it
    stays partial, as it was recorded. `needed`: another reader takes it complete. `parts` are the
    readers that complete it together with other changes, with the bytes of each.
    """

    node: Node
    bytes: int
    carriers: tuple[int, ...]
    was_partial: bool
    partial: bool
    fixed: bool
    needed: bool = False
    at_hand: bool = False  # it is needed complete anyway, or follows from such values
    parts: dict[object, int] = field(default_factory=dict)
    carried: list[_Value] = field(default_factory=list)
    readers: list[_Value] = field(default_factory=list)

    @property
    def is_summed(self) -> bool:
        """Returns whether an all_reduce completes it."""
        if not self.partial:
            return False
        used = self.needed or any(not r.partial for r in self.readers)
        return used or sum(self.parts.values()) > self.bytes

    @property
    def changes(self) -> bool:
        """Returns whether it, or one of its `parts`, is computed in another way than recorded."""
        return self.partial is not self.was_partial or bool(
            self.parts and (not self.partial or self.is_summed)
        )

    @property
    def sent(self) -> int:
        if not self.partial:
            return 0
        return self.bytes if self.is_summed else sum(self.parts.values())


def _origin(v: _Value) -> _Value | None:
    """The open carrier of `v` from which the others follow, if completing it costs no more than
    completing `v`; None if there is none."""
    carried = [u for u in v.carried if not u.at_hand]
    for u in carried:
        if u.bytes <= v.bytes and all(w is u or _follows(w, u) for w in carried):
            return u
    return None


def _follows(v: _Value, u: _Value) -> bool:
    """Returns whether `v` is complete if `u` is, as far as few nodes tell."""
    todo, left = [v], MOST_NODES
    while todo:
        x = todo.pop()
        if x is u or x.at_hand:
            continue
        left -= 1
        if x.fixed or not left:
            return False
        todo.extend(x.carried)
    return True


@lru_cache(maxsize=256)  # layers repeat themselves
def _least(
    region: tuple[tuple[int, bool, bool, int, tuple[int, ...]], ...],
) -> tuple[int, frozenset[int]]:
    """(fewest bytes, the values that are partial then) for a region, given for each value as the
    bytes of its all_reduce, whether it is fixed and needed, the bytes of its parts, and its
    readers."""
    import networkx  # only few programs need it, and it is slow to import
    from networkx.algorithms.flow import boykov_kolmogorov

    net = networkx.DiGraph()
    net.add_nodes_from(("partial", "complete"))
    for i, (whole, fixed, needed, parts, readers) in enumerate(region):
        done = i, "done"
        net.add_edge(i, done, capacity=whole)
        net.add_edge(done, i)  # an edge without a capacity is never cut
        net.add_edges_from((done, r) for r in readers)
        if fixed:
            net.add_edge("partial", i)
        if needed:
            net.add_edge(done, "complete")
        elif parts:
            net.add_edge(done, "complete", capacity=parts)
    sent, (partial, _) = networkx.minimum_cut(
        net, "partial", "complete", flow_func=boykov_kolmogorov
    )
    return sent, frozenset(i for i in range(len(region)) if i in partial)


class _Choice:
    """The choice for one graph and axis."""

    def __init__(self, graph: Graph, axis: str) -> None:
        self.whole, self.axis = graph, axis
        self.values: dict[Node, _Value] = {}
        self.sources: dict[Node, Node] = {}  # inserted all_reduce over the axis → what it completes
        self.new: dict[Node, Node] = {}  # value → the new one
        self.other: dict[Node, Node] = {}  # new value → its completed or its partial form
        for n in graph.nodes:
            if _is_inserted_sum(n) and n.op == all_reduce.name and n.attrs["axes"] == (axis,):
                self.sources[n] = n.args[0]
            else:
                self._add(n)
        for n in graph.nodes:
            self._note_uses(n)
        for o in graph.outputs:
            self._use(o)
        for n in graph.nodes:
            if self._is_part(n) and Builder().narrow(n.args[0], n.type) is not None:
                self._keep_wide(self.values[n.args[0]])

    # -- the values and their readers -------------------------------------------------------------
    def _add(self, n: Node) -> None:
        """Adds `n` to the values, if it is partial over the axis or could be."""
        was_partial = is_partial(n.type, self.axis)
        at = tuple([i for i, a in enumerate(n.args) if self._source(a) in self.values])
        if not (was_partial or at):
            return
        own = carriers(n, self.axis, at) if at and self._may_change(n) else ()
        if was_partial or own:
            price = sum_bytes(n.type, self.axis)
            self.values[n] = _Value(n, price, own, was_partial, was_partial, not own)

    def _may_change(self, n: Node) -> bool:
        """Returns whether the layout of `n` alone decides whether it is partial."""
        if n.op in BODIES or n.op == "item" or len(n.types) > 1 or not n.kind.pure:
            return False
        if n.is_collective or n.op in NAMES:
            own = not n.note or {"order", "algorithm"} & n.attrs.keys()
            if own or n.op not in NAMES or self._is_part(n):
                return False
        return not any(t.varying for t in (n.type, *n.ins))

    def _note_uses(self, n: Node) -> None:
        if n in self.sources:
            return
        own = self.values.get(n)
        for i, a in enumerate(n.args):
            u = self.values.get(self._source(a))
            if u is None:
                continue
            if own is not None and i in own.carriers:
                u.readers.append(own)
                own.carried.append(u)
            elif self._is_part(n):
                price = device_wire_bytes(n.op, n.attrs["axes"], a.type, n.type)
                u.parts[n.op, n.type] = min(price, u.bytes)
            else:
                self._use(a)
                u.needed |= n.op == all_reduce.name and n.attrs == {"axes": (self.axis,)}

    def _use(self, a: Node) -> None:
        """Notes a reader that takes `a` as it is recorded."""
        u = self.values.get(self._source(a))
        if u is None:
            return
        if is_partial(a.type, self.axis):
            u.fixed = True
        else:
            u.needed = True

    def _keep_wide(self, u: _Value) -> None:
        """Keeps `u` partial: it is summed in the wide dtype that the user chose (`reduce_dtype`),
        where the recording would otherwise send narrower terms."""
        todo, visited = [u], set[Node]()
        while todo:
            v = todo.pop()
            if v.node not in visited and v.node.type.dtype is u.node.type.dtype:
                visited.add(v.node)
                v.fixed = True
                todo.extend(v.carried)

    # -- the choice -------------------------------------------------------------------------------
    def _choose(self) -> None:
        """Sets `partial` of all values."""
        self._settle()
        for region in self._regions():
            self._cut(region)
        for v in reversed(self.values.values()):  # what nobody reads complete stays as it was
            idle = not v.needed and not v.parts and all(r.partial for r in v.readers)
            v.partial |= idle and v.was_partial

    def _settle(self) -> None:
        """Marks the values that are complete in a cheapest choice, as far as that is plain: those
        that a reader needs, those that follow from them, and the one that such a value comes from
        if completing it costs no more."""
        values, found = [*self.values.values()], True
        while found:
            for v in values:
                if not v.fixed and all(u.at_hand for u in v.carried):
                    v.partial, v.at_hand = False, True
                v.at_hand |= v.needed
            found = False
            for v in reversed(values):
                if v.needed and not v.was_partial and (u := _origin(v)):
                    u.needed = u.at_hand = found = True

    def _open(self, v: _Value) -> list[_Value]:
        """The readers of `v` that can be complete only if `v` is completed."""
        return [] if v.at_hand else [r for r in v.readers if not r.fixed]

    def _regions(self) -> Iterator[list[_Value]]:
        """Yields the parts of the values whose choices depend on each other."""
        beside = defaultdict[Node, list[Node]](list)
        for v in self.values.values():
            for r in self._open(v):
                beside[v.node].append(r.node)
                beside[r.node].append(v.node)
        visited: set[Node] = set()
        for v in self.values.values():
            todo, region = [v.node], list[_Value]()
            while todo:
                n = todo.pop()
                if n not in visited:
                    visited.add(n)
                    region.append(self.values[n])
                    todo.extend(beside[n])
            if len(region) > 1:
                yield region

    def _cut(self, region: list[_Value]) -> None:
        """Chooses for the values of `region`, if that sends fewer bytes than what is recorded."""
        now = sum(v.sent for v in region)
        if now <= min(min([v.bytes, *v.parts.values()]) for v in region):
            return
        index = {v.node: i for i, v in enumerate(region)}
        shape = tuple(
            (v.bytes, v.fixed, v.needed, sum(v.parts.values()),
             tuple([index[r.node] for r in self._open(v)]))
            for v in region
        )  # fmt: skip
        sent, partial = _least(shape)
        if sent < now:
            for i, v in enumerate(region):
                v.partial = i in partial

    # -- the new graph ----------------------------------------------------------------------------
    def graph(self) -> Graph:
        """The graph under the cheapest choice; the graph itself if nothing changes."""
        self._choose()
        if not any(v.changes for v in self.values.values()):
            return self.whole
        return self.whole.rewrite(self._rule, lambda body: body)

    def _rule(self, was: Node, n: Node, emit: Emit) -> Node:
        if was in self.sources:
            x = self.new[self.sources[was]]
            return self.other.setdefault(x, n) if is_partial(x.type, self.axis) else x
        v = self.values.get(was)
        if v is not None and v.carriers:
            args = tuple(
                self._form(a, now, v.partial and i in v.carriers, was, emit)
                for i, (a, now) in enumerate(zip(was.args, n.args, strict=True))
            )
            types = (in_form(was.type, self.axis, v.partial),)
            if args != n.args or types != was.types:
                n = emit(replace(n, args=args, types=types))
        elif self._is_part(was):
            n = self._part(was, n, emit)
        if v is None:
            return n
        self.new[was] = n
        # Readers that are no values take it as it was recorded.
        return self._form(was, n, False, was, emit) if v.needed and not v.was_partial else n

    def _form(self, a: Node, now: Node, partial: bool, reader: Node, emit: Emit) -> Node:
        """The argument `a` of `reader`, partial or complete. Unless it is a value, it is `now`."""
        x = self.new.get(self._source(a), now)
        if is_partial(x.type, self.axis) is partial:
            return x
        if x not in self.other:
            op, types = (
                (to_partial if partial else all_reduce),
                (in_form(x.type, self.axis, partial),),
            )
            attrs, note = {"axes": (self.axis,)}, reader.note or f"for {reader.op}"
            self.other[x] = emit(Node(op.name, (x,), types, attrs, reader.loc, reader.scope, note))
        return self.other[x]

    def _part(self, was: Node, n: Node, emit: Emit) -> Node:
        """`n`, which completes a value in a form of its own; of a value that is complete anyway it
        is a slice, or the sum over its other axes."""
        u = self.values[was.args[0]]
        if u.partial and not u.is_summed:
            return n
        x = self._form(was.args[0], n.args[0], False, was, emit)
        if n.op == reduce_scatter.name:
            return emit(replace(n, op=shard.name, args=(x,)))
        axes = tuple(a for a in n.attrs["axes"] if a != self.axis)
        return emit(replace(n, args=(x,), attrs={"axes": axes}))

    # -- small parts ------------------------------------------------------------------------------
    def _source(self, n: Node) -> Node:
        return self.sources.get(n, n)

    def _is_part(self, n: Node) -> bool:
        return _is_inserted_sum(n) and self.axis in n.attrs["axes"]
