"""A pipeline as a schedule: the regions of each stage, once a microbatch, in the order of a table.

What one stage gives to another is sent, and is a buffer on the other's mesh. Gradients and losses
are added up as the microbatches go by. What comes after them (the optimizer) is a graph of its own,
whose nodes go where their largest argument is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ...core.layout import TensorType
from ...core.mesh import Mesh
from ..graph.build import Builder
from ..graph.node import Graph, Node
from .build import FREE
from .check_table import run_order
from .schedule import COMPUTE, FUSED, SEND, Schedule, Step
from .stages import Region, moved_type, on_mesh, region_graph, regions, stage_numbers
from .tables import Table


@dataclass(frozen=True)
class Recorded:
    """One microbatch as it was recorded, on the mesh of a stage, and what comes after all of them.

    `batch` are inputs that a microbatch has a part of, with the types of their wholes; `sums` maps
    inputs of what comes after to the values that are added up for them, over all microbatches;
    `means` are the outputs that are averaged, `rows` those whose rows are put together.
    """

    graph: Graph
    batch: Mapping[Node, TensorType]
    sums: Mapping[Node, Node]
    means: frozenset[Node]
    rows: frozenset[Node]
    marked: Mapping[Node, int]
    origins: Mapping[Node, Node]
    homes: Mapping[Node, int]  # inputs that lie on a stage's mesh already
    back: frozenset[Node]  # outputs that come back on the whole mesh
    key: Node | None = None


@dataclass
class Plan:
    """A pipeline's schedule and what it was made of."""

    schedule: Schedule
    table: Table
    regions: dict[tuple[int, str], Region] = field(default_factory=dict)


def pipeline_schedule(
    made: Recorded, wholes: Sequence[TensorType], table: Table, meshes: Sequence[Mesh], mesh: Mesh
) -> Plan:
    """The schedule of `made` by `table`. `wholes` are the types of the inputs as they are given,
    `meshes` those of the ranks, `mesh` the one that they are slices of."""
    return _Pipeline(made, wholes, table, meshes, mesh).plan()


class _Pipeline:
    def __init__(
        self,
        made: Recorded,
        wholes: Sequence[TensorType],
        table: Table,
        meshes: Sequence[Mesh],
        mesh: Mesh,
    ) -> None:
        self.made, self.table, self.mesh = made, table, mesh
        self.name, self.count = made.graph.name, table.microbatches
        self.stage_mesh = [meshes[r] for r in table.placement]
        self.types: list[TensorType] = list(wholes)
        real = [n for n in made.graph.inputs if n not in made.sums]
        self.given = {n: i for i, n in enumerate(real)}
        self.steps: list[Step] = []
        self.sent: dict[tuple[int, int], int] = {}  # (buffer, rank) to the buffer there
        self.rank_of = list(table.placement)
        self.meshes = list(meshes)
        self.made_on: dict[int, int] = {}  # buffer to the rank that filled it
        self.totals: dict[Node, int] = {}  # what is added up so far
        self.parts: dict[Node, list[int]] = {}  # rows, microbatch by microbatch

    # -- buffers ----------------------------------------------------------------------------------
    def buffer(self, t: TensorType) -> int:
        self.types.append(t)
        return len(self.types) - 1

    def on(self, buffer: int, rank: int) -> int:
        """`buffer` on the mesh of `rank`: sent there, once."""
        t = self.types[buffer]
        here = self.made_on.get(buffer)
        if t.mesh == self.meshes[rank] or (t.mesh is None and here == rank):
            return buffer
        known = self.sent.get((buffer, rank))
        if known is None:
            to = t.on(self.meshes[rank])
            known = self.sent[buffer, rank] = self.buffer(to)
            self.made_on[known] = rank
            x = Node("input", (), (to,), {"name": f"b{buffer}"})
            self.steps.append(Step(
                Graph("send", (x,), (x,), (x,)), (buffer,), (known,), SEND, here or 0
            ))  # fmt: skip
        return known

    def run(
        self, graph: Graph, reads: Sequence[int], stream: str, rank: int | None, note: str
    ) -> list[int]:
        """A step on the mesh of `rank`, None for the whole; the buffers that it fills."""
        writes = [self.buffer(n.type) for n in graph.outputs]
        if rank is not None:
            self.made_on.update(dict.fromkeys(writes, rank))
        self.steps.append(Step(graph, tuple(reads), tuple(writes), stream, rank or 0, (), note))
        return writes

    # -- the plan ---------------------------------------------------------------------------------
    def plan(self) -> Plan:
        made = self.made
        last = len(self.stage_mesh) - 1
        stage = stage_numbers(made.graph.nodes, made.marked, made.origins, last)
        outputs = [o for o in made.graph.outputs if o in made.means or o in made.rows]
        wanted = list(dict.fromkeys([*made.sums.values(), *outputs]))
        gradients = {n for n in made.sums.values() if n in made.origins}
        found = regions(made.graph, wanted, gradients, stage)
        self.cut_batch()
        self.play(found, wanted)
        results = self.after(stage, found)
        schedule = Schedule(
            self.name,
            self.mesh,
            tuple(self.types),
            tuple(range(len(self.given))),
            tuple(results),
            tuple(self.steps),
            f"pipeline={self.table.name} microbatches={self.count}",
        )
        return Plan(schedule, self.table, found)

    def cut_batch(self) -> None:
        """The microbatches of the inputs that have parts, and a key of its own for each."""
        self.micro: dict[tuple[Node, int], int] = {}
        for n, whole in self.made.batch.items():
            b = Builder("cut")
            b.loc = ""
            x = b.input(whole, "whole")
            parts = microbatches(b, x, self.count)
            to = moved_type(n.type, self.mesh)
            outs = [b.redistribute(p, p.type if to.mesh is None else to) for p in parts]
            ids = self.run(b.graph(outs), [self.given[n]], FUSED, None, "microbatches")
            self.micro.update(((n, m), i) for m, i in enumerate(ids))
        key = self.made.key
        if key is not None:
            b = Builder("keys")
            b.loc = ""
            k = b.input(key.type, "key")
            outs = [_key(b, k, m) for m in range(self.count)]
            ids = self.run(b.graph(outs), [self.given[key]], FUSED, None, "keys")
            self.micro.update(((key, m), i) for m, i in enumerate(ids))

    def play(self, found: dict[tuple[int, str], Region], wanted: Sequence[Node]) -> None:
        sums = set(self.made.sums.values()) | self.made.means
        values: dict[tuple[Node, int], int] = {}
        graphs: dict[tuple[int, str, bool], Graph] = {}
        done: set[tuple[int, str, int]] = set()

        def region(s: int, kind: str, m: int) -> None:
            r = found.get((s, kind))
            if r is None or (s, kind, m) in done:
                return
            done.add((s, kind, m))
            rank = self.rank_of[s]
            added = [n for n in wanted if n in sums and n in set(r.nodes)]
            first = not added or added[0] not in self.totals
            if (s, kind, first) not in graphs:
                graph = region_graph(f"{self.name}_{s}{kind}", r, added, first)
                graphs[s, kind, first] = on_mesh(graph, self.meshes[rank])
            reads = [self.on(self._value(values, a, m), rank) for a in r.takes]
            if not first:
                reads += [self.totals[n] for n in added]
            graph = graphs[s, kind, first]
            ids = self.run(graph, reads, FUSED, rank, f"{s}{kind}{m}")
            values.update(((n, m), i) for n, i in zip(r.gives, ids))
            self.totals.update(zip(added, ids[len(r.gives) :], strict=True))
            for n in r.gives:
                if n in self.made.rows:
                    self.parts.setdefault(n, []).append(values[n, m])

        for rank, slot in run_order(self.table):
            row = self.table.rows[rank]
            unit = [row[slot], *(a for a in row[slot + 1 : slot + 2] if a.joined)]
            for a in unit:
                for kind in {"F": "F", "B": "IW", "I": "I", "W": "W"}[a.kind]:
                    region(a.stage, kind, a.microbatch)

    def _value(self, values: Mapping[tuple[Node, int], int], n: Node, m: int) -> int:
        if n.op != "input":
            return values[n, m]
        return self.micro[n, m] if (n, m) in self.micro else self.given[n]

    # -- what comes after -------------------------------------------------------------------------
    def after(
        self, stage: Mapping[Node, int], found: Mapping[tuple[int, str], Region]
    ) -> list[int]:
        """The buffers of the results: sums and means scaled, rows put together, and the rest of the
        graph, node by node where its largest argument is."""
        made = self.made
        env: dict[Node, int] = {n: i for n, i in self.given.items() if n not in made.batch}
        rank: dict[Node, int] = {}
        for (s, _), r in found.items():
            for a in r.takes:
                if a.op == "input" and a not in made.batch:
                    rank.setdefault(a, self.rank_of[s])
        rank.update(made.homes)
        for n, source in made.sums.items():
            env[n] = self.scaled(self.totals[source], self._rank(self.totals[source]))
        for n in made.means:
            env[n] = self.scaled(self.totals[n], self._rank(self.totals[n]))
        for n in made.rows:
            env[n] = self.joined(n)
        late = self._late(env)
        for group in self._groups(late, env, rank):
            self._compute(group, env, rank)
        return [self._result(o, env) for o in made.graph.outputs]

    def _result(self, o: Node, env: Mapping[Node, int]) -> int:
        found = env[o] if o in env else self.given[o]
        t = self.types[found]
        if o not in self.made.back or t.mesh == self.mesh:
            return found
        to = t.on(self.mesh)
        x = Node("input", (), (to,), {"name": f"b{found}"})
        back = self.buffer(to)
        stage = self.made_on.get(found, 0)
        graph = Graph("send", (x,), (x,), (x,))
        self.steps.append(Step(graph, (found,), (back,), SEND, stage, (), "back"))
        return back

    def _rank(self, buffer: int) -> int:
        return self.made_on.get(buffer, 0)

    def scaled(self, buffer: int, rank: int) -> int:
        t = self.types[buffer]
        b = Builder("mean")
        b.loc = ""
        x = b.input(t, "total")
        y = b("mul", x, b("full", dtype=t.dtype, shape=(), value=1.0 / self.count))
        return self.run(b.graph([y]), [buffer], COMPUTE, rank, "mean")[0]

    def joined(self, n: Node) -> int:
        parts = self.parts[n]
        b = Builder("rows")
        b.loc = ""
        xs = [b.input(self.types[p], f"m{i}") for i, p in enumerate(parts)]
        return self.run(b.graph([together(b, xs)]), parts, FUSED, self._rank(parts[0]), "rows")[0]

    def _late(self, env: Mapping[Node, int]) -> list[Node]:
        """The nodes that are computed once, after the microbatches, in order."""
        needed: set[Node] = set()
        todo = [o for o in self.made.graph.outputs if o not in env]
        while todo:
            n = todo.pop()
            if n in needed or n in env or n.op == "input":
                continue
            needed.add(n)
            todo.extend(n.args)
        return [n for n in self.made.graph.nodes if n in needed]

    def _groups(
        self, nodes: Sequence[Node], env: Mapping[Node, int], rank: dict[Node, int]
    ) -> list[list[Node]]:
        """Neighbours on one rank together, each node where its largest argument is."""
        groups: list[list[Node]] = []
        pending: dict[int, list[Node]] = {}
        for n in nodes:
            if n.op in FREE:
                continue
            known = [(a.type.size, rank[a]) for a in n.args if a in rank]
            known += [
                (a.type.size, self._rank(env[a])) for a in n.args
                if a in env and a not in rank and env[a] in self.made_on
            ]  # fmt: skip
            rank[n] = max(known, key=lambda k: k[0])[1] if known else 0
            for a in n.args:
                if a.op == "input" and a.type.rank:
                    rank.setdefault(a, rank[n])
            # A node may join its rank's open group unless it needs another rank's open group.
            for other in [r for r in pending if r != rank[n]]:
                if any(a in pending[other] for a in n.args):
                    groups.append(pending.pop(other))
            pending.setdefault(rank[n], []).append(n)
        return [*groups, *pending.values()]

    def _compute(
        self, group: Sequence[Node], env: dict[Node, int], rank: Mapping[Node, int]
    ) -> None:
        here = rank[group[0]]
        mine = set(group)
        every = self.made.graph
        outside = {o for o in every.outputs if o in mine}
        used = {a for n in every.nodes if n not in mine for a in n.args if a in mine}
        takes = dict.fromkeys(
            a for n in group for a in n.args if a not in mine and a.op not in FREE
        )
        gives = [n for n in group if (n in outside or n in used) and len(n.types) == 1]
        region = Region(here, "P", tuple(group), tuple(takes), tuple(gives))
        graph = on_mesh(region_graph(f"{self.name}_after", region, [], True), self.meshes[here])
        reads = [self.on(env[a], here) for a in takes]
        env.update(zip(gives, self.run(graph, reads, FUSED, here, "after"), strict=True))


# -- microbatches ---------------------------------------------------------------------------------
def microbatches(b: Builder, x: Node, count: int) -> list[Node]:
    """Dim 0 of `x` in `count` parts, each device's rows cut where they are."""
    shape = x.type.shape
    run = x.type.digits(0)
    devices = 1
    for d in run:
        if not d.axes:
            break
        devices *= d.size
    rows = shape[0] // (devices * count)
    y = b("reshape", x, shape=(devices, count, rows, *shape[1:]))
    y = b("transpose", y, perm=(1, 0, *range(2, len(shape) + 2)))
    y = b("reshape", y, shape=(count, devices * rows, *shape[1:]))
    parts = b("unstack", y)
    return [b("item", parts, index=i) for i in range(count)]


def together(b: Builder, parts: Sequence[Node]) -> Node:
    """The inverse of `microbatches`."""
    t = parts[0].type
    devices = 1
    for d in t.digits(0):
        if not d.axes:
            break
        devices *= d.size
    rows = t.shape[0] // devices
    rest = t.shape[1:]
    split = [b("reshape", p, shape=(devices, 1, rows, *rest)) for p in parts]
    y = b("concat", *split, dim=1) if len(split) > 1 else split[0]
    return b("reshape", y, shape=(devices * len(parts) * rows, *rest))


def _key(b: Builder, key: Node, m: int) -> Node:
    """The key of microbatch `m`: the call's, its second word moved on."""
    if m == 0:
        return key
    one = b("slice", key, starts=(0,), stops=(1,), steps=(1,))
    two = b("slice", key, starts=(1,), stops=(2,), steps=(1,))
    step = b("full", dtype=key.type.dtype, shape=(), value=(0x9E3779B9 * m) & 0xFFFFFFFF)
    return b("concat", one, b("add", two, step), dim=0)
