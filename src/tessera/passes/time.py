"""Lowering of axes in time: a graph on a mesh with such an axis, as loops on the mesh of the
devices.

A value that is split over the axis, or is a partial sum over it, is computed in a loop with one
turn per coordinate of the axis. A node that needs all coordinates at once, such as a collective
over the axis, is computed outside, on global values: it ends one loop, and another begins. So a
loop has the nodes with the same number of such nodes between them and the results. A sum over the
axis is accumulated by the loop that computes its terms. A value that does not depend on the axis is
computed once.

A value has one of three forms: at rest outside of loops (whole along the axis), one turn in a loop
(the part of one coordinate), or a stack of its turns between loops.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from ..core.dtypes import bool_, f32, uint32
from ..core.errors import TesseraError
from ..core.layout import TensorType, dim_text, plain, same_type
from ..core.mesh import Mesh
from ..ir.graph.build import Builder
from ..ir.graph.node import Graph, Node, input_node
from ..ir.graph.remat import choose_saved, is_form, is_free
from ..ir.graph.time_axis import (
    combined,
    combining,
    cut,
    depends_on_time,
    joined,
    one_step,
    place_of_time,
    step_count,
    without_time_axis,
)
from ..ir.graph.xp_numpy import identity
from ..ops.control import item, scan, stacked
from ..ops.create import iota
from ..ops.custom import custom
from ..ops.local import cond
from ..ops.movement import broadcast_to, pad, slice_
from ..ops.op import BODIES, OPS, infer
from ..ops.random import random_bits
from ..ops.redistribute import NAMES, gathers_for_use, to_mesh


def lower_time(graph: Graph) -> Graph:
    """`graph` without axes in time: its inputs and results are on the mesh of the devices."""
    if any(n.op in BODIES for n in graph.nodes):
        graph = graph.rewrite(None, lambda body: body if _is_open(body) else lower_time(body))
    every = (t.mesh for n in graph.nodes for t in n.types if t.mesh is not None)
    for mesh in dict.fromkeys(m for m in every if m.time):
        graph = StepLoops(graph, mesh).lowered()
    return graph


def _is_open(body: Graph) -> bool:
    """Returns whether `body` has inputs or outputs on a mesh with an axis in time: then it is
    lowered with its node."""
    ends = (*body.inputs, *body.outputs)
    return any(n.type.mesh is not None and n.type.mesh.time for n in ends)


# -- one node, for one turn or for all ------------------------------------------------------------
def over_time(n: Node) -> bool:
    """Returns whether `n` changes a layout along the axis in time."""
    time = n.type.mesh.time if n.type.mesh is not None else ()
    return n.op in NAMES and any(a in time for a in n.attrs.get("axes", ()))


def _counts(n: Node) -> bool:
    """Returns whether `n` uses the indices of elements along the axis in time."""
    if n.op in (iota.name, random_bits.name):
        return depends_on_time(n.type)
    return any(map(_counts, (m for g in _bodies(n).values() for m in g.nodes)))


def _bodies(n: Node) -> dict[str, Graph]:
    """The bodies that `n` runs. The backward of a `custom` is not one, as its nodes are in the
    graph already."""
    if n.op not in BODIES or n.op == custom.name:
        return {}
    return {k: v for k, v in n.attrs.items() if isinstance(v, Graph)}


def step_node(n: Node, args: Sequence[Node], number: Node) -> Node:
    """`n` for one turn, applied to `args`; the argument itself if only the mesh changes. `number`
    is the number of the turn, u32[]."""
    types = tuple(map(one_step, n.types))
    if n.op == to_mesh.name and args[0].type is types[0]:
        return args[0]
    attrs: dict[str, Any] = {
        k: one_step(v) if isinstance(v, TensorType) else v for k, v in n.attrs.items()
    }
    if n.op == custom.name:  # its gradient is in the graph already
        attrs["backward"] = _rested_body(attrs["backward"], without_time_axis)
    attrs |= {k: _step_body(g, _counts(n)) for k, g in _bodies(n).items()}
    out, now = n.type, types[0]
    if n.op == broadcast_to.name and "layout" in attrs and out.shape == now.shape:
        # a partial sum over the axis has whole copies
        attrs["layout"] = without_time_axis(n.attrs["layout"])
    if "shape" in attrs and tuple(attrs["shape"]) == out.shape:
        attrs["shape"] = now.shape
    if n.op == pad.name:
        attrs["starts"] = _scaled(attrs["starts"], out.shape, now.shape)
    elif n.op == slice_.name:
        t = n.args[0].type
        starts = attrs["starts"] = _scaled(attrs["starts"], t.shape, one_step(t).shape)
        rows = zip(starts, attrs["steps"], now.shape, strict=True)
        attrs["stops"] = tuple(s + (m - 1) * k + 1 if m else s for s, k, m in rows)
    if "to_dim" in attrs:
        attrs["into"] = dim_text(now.dims[attrs["to_dim"]])
    new_args = list(args)
    if _counts(n):
        new_args.insert(n.op in (random_bits.name, cond.name), number)
        if n.op == scan.name:
            attrs["consts"] += 1
        elif n.op != cond.name:
            dim, _, below = place_of_time(out)
            attrs["blocks"] = (dim, step_count(out), below, *attrs.get("blocks", ()))
    return Node(n.op, tuple(new_args), types, attrs, n.loc, n.scope, n.note)


def _scaled(starts: Sequence[int], of: Sequence[int], sizes: Sequence[int]) -> tuple[int, ...]:
    """Indices in dims of the sizes `of` as indices in dims of the sizes `sizes`."""
    return tuple(s if n == m else s * m // n for s, n, m in zip(starts, of, sizes, strict=True))


def _step_body(graph: Graph, counts: bool) -> Graph:
    """`graph`, the body of a loop or branch, for one turn; if it `counts`, the number of the turn
    is its first input."""
    number = input_node(plain(uint32, ()), "turn")
    new: dict[Node, Node] = {}
    for n in graph.nodes:
        if n.op == "input":
            new[n] = input_node(one_step(n.type), n.attrs["name"])
        else:
            new[n] = step_node(n, [new[a] for a in n.args], number)
    first = (number,) if counts else ()
    ends = (*first, *(new[n] for n in graph.inputs)), tuple(new[o] for o in graph.outputs)
    nodes = (*first, *dict.fromkeys(new.values()))
    return Graph(graph.name, nodes, *ends, graph.options)


def runs_by_step(n: Node) -> bool:
    """Returns whether `n` can run turn by turn: the rule of its op holds for one turn."""
    if over_time(n) or not all(
        map(runs_by_step, (m for g in _bodies(n).values() for m in g.nodes))
    ):
        return False
    time = {*n.type.mesh.time} if n.type.mesh is not None else set()
    digits = (d for t in (*n.ins, *n.types) for i in range(t.rank) for d in t.digits(i))
    if any(d.uneven and time & {*d.axes} for d in digits):
        return False
    if n.op in ("input", item.name, to_mesh.name):
        return True
    node = step_node(n, [input_node(one_step(t), "x") for t in n.ins], _NUMBER)
    ins = tuple(a.type for a in node.args)
    try:
        got = infer(OPS[n.op], ins, node.attrs)
    except TesseraError:
        return False
    pairs = [*zip(got.wants, ins, strict=True)]
    pairs += zip(got.outs, node.types, strict=True)
    return all(same_type(a, b) for a, b in pairs)


_NUMBER = input_node(plain(uint32, ()), "turn")


Lie = Callable[[TensorType], TensorType]


def rested(b: Builder, n: Node, args: Sequence[Node], lie: Lie = without_time_axis) -> Node:
    """`n` applied to `args` for all turns at once, added to `b`. `lie` gives the type of each
    value, on a mesh with fewer axes."""
    to, args = lie(n.type), tuple(args)
    if n.op != to_mesh.name and not n.kind.bodies and to.mesh is not None:
        args = tuple([b.onto(a, to.mesh) for a in args])
    lost = n.op in NAMES and any(a not in to.sizes for a in n.attrs.get("axes", ()))
    if lost or (n.op == to_mesh.name and args[0].type.mesh != to.mesh):
        return b.redistribute(args[0], to, n.note)
    if n.op == to_mesh.name and args[0].type is to:
        return args[0]
    types = tuple(map(lie, n.types))
    attrs: dict[str, Any] = {
        k: lie(v) if isinstance(v, TensorType) else v for k, v in n.attrs.items()
    }
    bodies = ((k, g) for k, g in n.attrs.items() if isinstance(g, Graph))
    attrs |= {k: _rested_body(g, lie) for k, g in bodies}
    if "to_dim" in attrs:
        attrs["into"] = dim_text(to.dims[attrs["to_dim"]])
    return b._add(Node(n.op, args, types, attrs, n.loc, n.scope, n.note))


def _rested_body(graph: Graph, lie: Lie) -> Graph:
    if all(lie(t) is t for n in graph.nodes for t in n.types):
        return graph
    b, new = Builder(graph.name, graph.options), dict[Node, Node]()
    for n in graph.nodes:
        b.loc, b.scope = n.loc, n.scope
        if n.op == "input":
            new[n] = b.input(lie(n.type), n.attrs["name"])
        else:
            new[n] = rested(b, n, [new[a] for a in n.args], lie)
    b.inputs = [new[n] for n in graph.inputs]
    return b.graph([new[o] for o in graph.outputs])


# -- the whole graph ------------------------------------------------------------------------------
class StepLoops:
    """The lowering of `graph`, with loops for the nodes on `mesh` that depend on time."""

    def __init__(self, graph: Graph, mesh: Mesh) -> None:
        self.graph, self.mesh, self.count = graph, mesh, mesh.sizes[mesh.time[0]]
        self.place = {n: i for i, n in enumerate(graph.nodes)}
        timed = {
            n
            for n in graph.nodes
            if any(t.mesh == mesh and depends_on_time(t) for t in (*n.types, *n.ins))
        }
        outside: set[Node] = set()
        for n in (n for n in graph.nodes if n in timed):  # also `item` nodes of outside nodes
            of_outside = n.op == item.name and n.args[0] in outside
            if n.op == "input" or of_outside or not runs_by_step(n):
                outside.add(n)
        # Values recomputed for each reader: constants, and weights at rest that a gradient gathers
        # again.
        twice = {n.args for n in graph.nodes if n.attrs.get("again")}
        self.again: set[Node] = set()
        for n in graph.nodes:
            gathered = gathers_for_use(n) and n.args in twice
            gathered = gathered or (is_form(n) and n.args[0] in self.again)
            if n not in outside and n.op != "input" and (is_free(n) or gathered):
                self.again.add(n)
        self.inner = timed - outside - self.again
        self.phase = self._phases()
        self.b = Builder(graph.name, graph.options)
        self.out: dict[Node, Node] = {}  # values outside of loops, at rest
        self.stack: dict[Node, Node] = {}  # values of all turns, stacked

    def _phases(self) -> dict[Node, int]:
        """For each node, the number of loops from the one that computes it to the results,
        including its own: a value that leaves a loop ends it."""
        nodes = self.graph.nodes
        early: dict[Node, int] = {}
        for n in nodes:
            early[n] = max((self._after(a, n) + early[a] for a in n.args), default=0)
        late = self._late(nodes, {})
        most = max(late.values(), default=0)
        # A row of a result is computed in the loop of the gradients, unless a dependency forbids
        # it.
        ends = {o: 1 for o in self.graph.outputs if o in self.inner and early[o] < most}
        return self._late(nodes, ends)

    def _late(self, nodes: Sequence[Node], ends: Mapping[Node, int]) -> dict[Node, int]:
        late = dict.fromkeys(nodes, 0)
        for n in reversed(nodes):
            late[n] = max(late[n], ends.get(n, 0))
            for a in n.args:
                late[a] = max(late[a], late[n] + self._after(a, n))
        for n in nodes:  # an `item` has the phase of its argument
            if n.op == item.name:
                late[n] = late[n.args[0]]
        return late

    def _after(self, a: Node, n: Node) -> int:
        return int(a in self.inner and n not in self.inner)

    def lowered(self) -> Graph:
        for n in self.graph.inputs:
            self.out[n] = self.b.input(without_time_axis(n.type), n.attrs["name"])
        groups: dict[int, list[Node]] = {}
        for n, phase in self.phase.items():
            if n.op != "input" and n not in self.again:
                groups.setdefault(phase, []).append(n)
        plans = {k: self._reads(k, group) for k, group in groups.items()}
        read = {a for n in self.phase if n not in self.inner for a in n.args}
        self.leaves = (read | {*self.graph.outputs}) & self.inner
        self.saved = {n for _, saved in plans.values() for n in saved}
        for k in sorted(groups, reverse=True):
            for n in groups[k]:
                if n not in self.inner:
                    self._outside(n)
            body = [n for n in groups[k] if n in self.inner]
            if body:
                self._loop(body, *plans[k])
        return self.b.graph([self._value(o) for o in self.graph.outputs])

    def _reads(self, k: int, group: Sequence[Node]) -> tuple[list[Node], list[Node]]:
        """(nodes that the loop of phase `k` recomputes, nodes that it reads from earlier loops),
        with few bytes kept between loops."""
        own = {n for n in self.inner if self.phase[n] > k}
        read = own.intersection(a for n in group if n in self.inner for a in n.args)
        if not read:
            return [], []
        saved, again = choose_saved(read, own, {n for n in self.graph.nodes if n not in self.inner})
        return sorted(again, key=self.place.__getitem__), sorted(saved, key=self.place.__getitem__)

    def _value(self, n: Node) -> Node:
        if n not in self.out:
            self._outside(n)
        return self.out[n]

    def _outside(self, n: Node) -> None:
        if n in self.out:
            return
        args = [self._value(a) for a in n.args]
        self.b.loc, self.b.scope = n.loc, n.scope
        self.out[n] = rested(self.b, n, args)

    # -- a loop ------------------------------------------------------------------------------------
    def _loop(self, nodes: Sequence[Node], again: Sequence[Node], saved: Sequence[Node]) -> None:
        """Adds the loop that computes the nodes `nodes`. It reads `saved` from earlier loops and
        recomputes `again`."""
        b = Builder("microbatches", self.graph.options)
        new: dict[Node, Node] = {}
        consts: dict[Node, Node] = {}  # input of the body to the value outside
        rows: dict[Node, Node] = {}  # input of the body to the stack outside
        number: list[Node] = []
        in_loop = {*nodes, *again}

        def value(n: Node) -> Node:
            if n in new:
                return new[n]
            if n in in_loop or n in self.again:
                compute([n])
            elif n in saved and n in self.stack:
                new[n] = b.input(one_step(n.type), "kept")
                rows[new[n]] = self.stack[n]
            else:
                x = self._value(n)
                new[n] = b.input(one_step(n.type), str(n.attrs.get("name", n.op)))
                if depends_on_time(n.type) and combined(n.type) in ("", "sum"):
                    rows[new[n]] = self._cut(n, x)
                else:
                    consts[new[n]] = x
            return new[n]

        def compute(nodes: Iterable[Node]) -> None:
            for n in nodes:
                if n in new:
                    continue
                args = [value(a) for a in n.args]
                if _counts(n) and not number:
                    number.append(b.input(plain(uint32, ()), "turn"))
                    self.b.loc = ""
                    rows[number[0]] = self.b("iota", dtype=uint32, shape=(self.count,), dim=0)
                x = step_node(n, args, *number or (_NUMBER,))
                new[n] = x if x in args else b._add(x)

        compute(sorted(in_loop, key=self.place.__getitem__))
        results_needed = [n for n in nodes if n in self.leaves or n in self.saved]
        sums = [
            n
            for n in results_needed
            if combined(n.type) and (n in self.leaves or combined(n.type) == "same")
        ]
        stacks = [
            n
            for n in results_needed
            if n not in sums or (n in self.saved and combined(n.type) != "same")
        ]
        totals, ends = [], []
        b.loc = ""
        for n in sums:
            x, kind, dtype = new[n], combined(n.type), n.type.dtype
            exact = self.graph.options.mesh_invariant
            if kind == "sum" and dtype.is_float and dtype.bytes < 4 and not exact:
                x = b("cast", x, dtype=f32)
            if kind not in ("sum", "same") or dtype is bool_:
                x = b.redistribute(x, x.type.complete())
            totals.append(b.input(x.type, "sum"))
            ends.append(_combined(b, kind, totals[-1], x))
        outs = [*ends, *(new[n] for n in stacks)]
        b.inputs = [*consts, *totals, *rows]
        kinds = [combined(n.type) for n in sums]
        results = self._scan(
            b.graph(outs), list(consts.values()), kinds, list(rows.values()), nodes[0]
        )
        for n, x in zip(sums, results, strict=False):
            self.b.loc, self.b.scope = n.loc, n.scope
            if x.type.dtype is not n.type.dtype:
                x = self.b("cast", x, dtype=n.type.dtype, terms=True)
            self.out[n] = x
        for n, x in zip(stacks, results[len(sums) :], strict=True):
            self.stack[n] = x
            if n in self.leaves and n not in self.out:
                self.b.loc, self.b.scope = n.loc, n.scope
                self.out[n] = joined(self.b, x, n.type)

    def _scan(
        self, body: Graph, consts: Sequence[Node], kinds: Sequence[str], rows: Sequence[Node],
        at: Node,
    ) -> list[Node]:  # fmt: skip
        """The results of `body` run for all turns: totals of these `kinds`, then stacks. At the
        level "mesh_invariant", totals are added in adjacent pairs, then pairs of these."""
        b, sizes = self.b, [self.count]
        while self.graph.options.mesh_invariant and sizes[0] % 2 == 0 and sizes[0] > 2:
            sizes[:1] = [sizes[0] // 2, 2]
        first = len(consts)
        for size in sizes[:0:-1]:
            inner = Builder(body.name, body.options)
            inner.loc = ""
            xs = [inner.input(n.type, n.attrs["name"]) for n in body.inputs[:first]]
            totals = [inner.input(n.type, "sum") for n in body.outputs[: len(kinds)]]
            ys = [inner.input(stacked(n.type, size), n.attrs["name"])
                  for n in body.inputs[first + len(kinds) :]]  # fmt: skip
            got = _run(inner, body, size, xs, kinds, ys)
            pairs = zip(kinds, totals, got, strict=False)
            ends = [_combined(inner, kind, t, x) for kind, t, x in pairs]
            body = inner.graph([*ends, *got[len(kinds) :]])
        b.loc, b.scope = at.loc, ""
        if len(sizes) > 1:
            rows = [b("reshape", x, shape=(*sizes, *x.type.shape[1:])) for x in rows]
        results = _run(b, body, sizes[0], consts, kinds, rows)
        stacks = results[len(kinds) :]
        if len(sizes) > 1:
            stacks = [
                b("reshape", x, shape=(self.count, *x.type.shape[len(sizes) :])) for x in stacks
            ]
        return [*results[: len(kinds)], *stacks]

    def _cut(self, n: Node, x: Node) -> Node:
        """The turns of `n`, stacked; `x` is its value at rest."""
        if n not in self.stack:
            self.b.loc, self.b.scope = n.loc, n.scope
            self.stack[n] = cut(self.b, x, n.type)
        return self.stack[n]


def _combined(b: Builder, kind: str, total: Node, x: Node) -> Node:
    """`total` after one more turn with the value `x`."""
    if kind == "same":
        return x
    return b(combining(kind, x.type.dtype).name, total, x)


def _run(
    b: Builder, body: Graph, count: int, consts: Sequence[Node], kinds: Sequence[str],
    rows: Sequence[Node],
) -> list[Node]:  # fmt: skip
    """The results of `body` run `count` times, with new totals of these `kinds`."""
    starts = [
        b("full", dtype=o.type.dtype, shape=o.type.shape, layout=o.type,
          value=0 if kind == "same" else identity(kind, o.type.dtype.numpy))
        for o, kind in zip(body.outputs, kinds, strict=False)
    ]  # fmt: skip
    loop = b(
        "scan", *consts, *starts, *rows, body=body, length=count, consts=len(consts),
        carries=len(kinds), reverse=False, policy="recompute",
    )  # fmt: skip
    return [b("item", loop, index=i) for i in range(len(body.outputs))]
