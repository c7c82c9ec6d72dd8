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
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field, replace

from ..core.errors import TesseraError
from ..core.layout import TensorType, same_type
from ..core.reshard import completed, device_wire_bytes
from ..ir.graph.node import Emit, Graph, Node
from ..ops.op import BODIES, infer
from ..ops.redistribute import NAMES, all_reduce, reduce_scatter, shard, to_partial
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


class _Choice:
    """The choice for one graph and axis."""

    def __init__(self, graph: Graph, axis: str) -> None:
        self.whole, self.axis = graph, axis
        self.values: dict[Node, _Value] = {}
        self.sources: dict[Node, Node] = {}  # inserted all_reduce over the axis → what it completes
        self.new: dict[Node, Node] = {}  # value → the new one
        self.types: dict[TensorType, TensorType] = {}  # partial → complete, and complete → partial
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

    # -- the values and their readers -------------------------------------------------------------
    def _add(self, n: Node) -> None:
        """Adds `n` to the values, if it is partial over the axis or could be."""
        is_partial = self._is_partial(n.type)
        at = tuple([i for i, a in enumerate(n.args) if self._source(a) in self.values])
        if not (is_partial or at):
            return
        carriers = self._carriers(n, at) if at and self._may_change(n) else ()
        if is_partial or carriers:
            ends = self._type(n.type, True), self._type(n.type, False)
            price = device_wire_bytes(all_reduce.name, (self.axis,), *ends)
            self.values[n] = _Value(n, price, carriers, is_partial, is_partial, not carriers)

    def _may_change(self, n: Node) -> bool:
        """Returns whether the layout of `n` alone decides whether it is partial."""
        if n.op in BODIES or n.op == "item" or len(n.types) > 1 or not n.kind.pure:
            return False
        if n.is_collective or n.op in NAMES:
            own = not n.note or {"order", "algorithm"} & n.attrs.keys()
            if own or n.op not in NAMES or self._is_part(n):
                return False
        # A cast with `terms` chooses the dtype of a sum. A wider one is not given up.
        wide = bool(n.attrs.get("terms")) and n.type.dtype.bytes > n.args[0].type.dtype.bytes
        return not wide and not any(t.varying for t in (n.type, *n.ins))

    def _carriers(self, n: Node, at: tuple[int, ...]) -> tuple[int, ...]:
        """The positions of the arguments with which `n` is partial; () if it cannot be both."""
        if self._is_taken(n.type) or not self._fits(n, ()):
            return ()
        if self._is_partial(n.type):
            own = tuple([i for i, a in enumerate(n.args) if self._is_partial(a.type)])
            return own if own and self._fits(n, own) else ()
        one = sorted(at, key=lambda i: -n.args[i].type.local_bytes)
        tries = (at, self._joint(n), *((i,) for i in one))
        return next((some for some in tries if some and self._fits(n, some)), ())

    def _joint(self, n: Node) -> tuple[int, ...]:
        """The arguments that `n` would take as partial values, if all were."""
        wants, _ = self._inferred(n, range(len(n.args))) or ((), None)
        return tuple([i for i, t in enumerate(wants) if self._is_partial(t)])

    def _fits(self, n: Node, some: tuple[int, ...]) -> bool:
        """Returns whether `n` takes partial values at `some`, complete ones elsewhere, and gives
        its type, partial over the axis if `some` are."""
        got = self._inferred(n, some)
        if got is None or self._is_partial(got[1]) != bool(some):
            return False
        kept = all(map(same_type, got[0], self._ins(n, some)))
        return kept and self._type(got[1], False) is self._type(n.type, False)

    def _inferred(
        self, n: Node, some: Collection[int]
    ) -> tuple[tuple[TensorType, ...], TensorType] | None:
        """The types that `n` takes and gives if its arguments `some` are partial; None if it has
        no such form."""
        if any(
            self.axis not in n.args[i].type.sizes or self._is_taken(n.args[i].type) for i in some
        ):
            return None
        try:
            got = infer(n.kind, self._ins(n, some), n.attrs)
        except TesseraError:
            return None
        return got.wants, got.outs[0]

    def _ins(self, n: Node, some: Collection[int]) -> tuple[TensorType, ...]:
        return tuple([self._type(a.type, i in some) for i, a in enumerate(n.args)])

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
        if self._is_partial(a.type):
            u.fixed = True
        else:
            u.needed = True

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
        import networkx  # only few programs need it, and it is slow to import
        from networkx.algorithms.flow import boykov_kolmogorov

        net = networkx.DiGraph()
        net.add_nodes_from(("partial", "complete"))
        for v in region:
            if v.fixed:  # an edge without a capacity is never cut
                net.add_edge("partial", v.node)
            done = v.node, "done"
            net.add_edge(v.node, done, capacity=v.bytes)
            net.add_edge(done, v.node)
            if v.needed:
                net.add_edge(done, "complete")
            elif v.parts:
                net.add_edge(done, "complete", capacity=sum(v.parts.values()))
            for r in self._open(v):
                net.add_edge(done, r.node)
        sent, (partial, _) = networkx.minimum_cut(
            net, "partial", "complete", flow_func=boykov_kolmogorov
        )
        if sent < now:
            for v in region:
                v.partial = v.node in partial

    # -- the new graph ----------------------------------------------------------------------------
    def graph(self) -> Graph:
        """The graph under the cheapest choice; the graph itself if nothing changes."""
        self._choose()
        return self.whole.rewrite(self._rule, lambda body: body)

    def _rule(self, was: Node, n: Node, emit: Emit) -> Node:
        if was in self.sources:
            x = self.new[self.sources[was]]
            return self.other.setdefault(x, n) if self._is_partial(x.type) else x
        v = self.values.get(was)
        if v is not None and v.carriers:
            args = tuple(
                self._form(a, now, v.partial and i in v.carriers, was, emit)
                for i, (a, now) in enumerate(zip(was.args, n.args, strict=True))
            )
            types = (self._type(was.type, v.partial),)
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
        if self._is_partial(x.type) is partial:
            return x
        if x not in self.other:
            op, types = (to_partial if partial else all_reduce), (self._type(x.type, partial),)
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

    def _is_partial(self, t: TensorType) -> bool:
        return (self.axis, "sum") in t.partial

    def _is_taken(self, t: TensorType) -> bool:
        """Returns whether the axis splits `t`, or reduces it by a maximum or minimum."""
        return self.axis in t.split_axes or dict(t.partial).get(self.axis, "sum") != "sum"

    def _type(self, t: TensorType, partial: bool) -> TensorType:
        """`t`, partial over the axis or complete."""
        if self._is_partial(t) is partial:
            return t
        if t not in self.types:
            whole = not partial and completed(t, (self.axis,))
            self.types[t] = whole or t.with_partial((*t.partial, (self.axis, "sum")))
        return self.types[t]
