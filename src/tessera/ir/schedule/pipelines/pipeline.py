"""Schedule of a pipeline: the regions of each stage, once per microbatch, in the order of a table.

A value that one stage passes to another is sent, into a buffer on the other's mesh. Gradients and
losses are summed as the microbatches run. The graph after the microbatches (the optimizer) runs
once, with each node on the rank of its largest argument.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Generic, TypeVar

from ....core.layout import TensorType, plain
from ....core.mesh import Mesh, in_time
from ....core.reshard import gathered
from ...graph.build import Builder
from ...graph.node import Graph, Node
from ...graph.remat import free_nodes
from ...graph.time_axis import combined, cut, joined
from ..build import with_regions
from ..schedule import Compute, Schedule, Send
from .check import run_order
from .epilogue import by_rank, late_nodes, settle
from .merge import merged
from .stages import (
    Region,
    depends,
    moved_type,
    on_mesh,
    region_graph,
    regions,
    stage_numbers,
    whole_backward,
)
from .tables import Table


@dataclass(frozen=True)
class Recorded:
    """A program in microbatches, on the mesh of a stage: the graph of one microbatch and of the
    part after all of them.

    `rows` are inputs of which a microbatch has a part: each with the input that is the whole, and
    that one's type with its axis in time; with None, the input is the number of the microbatch.
    `sums` are inputs of the part after the microbatches: each with the value that is combined over
    the microbatches, and its type with the axis in time. `ahead` computes values of the whole batch
    before the first microbatch, for the inputs `early`.
    """

    graph: Graph
    rows: Mapping[Node, tuple[Node | None, TensorType]]
    sums: Mapping[Node, tuple[Node, TensorType]]
    marked: Mapping[Node, int]
    origins: Mapping[Node, Node]
    back: Mapping[Node, TensorType]  # outputs that come to the whole mesh, to lie so
    ahead: Graph | None = None
    early: tuple[Node, ...] = ()


@dataclass(frozen=True)
class Pipelined:
    """A pipeline's schedule, with its table and regions."""

    schedule: Schedule
    table: Table
    regions: dict[tuple[int, str], Region] = field(default_factory=dict)
    homes: dict[Node, int] = field(default_factory=dict)  # inputs to the ranks that use them first


def pipelined(
    recorded: Recorded,
    wholes: Sequence[TensorType],
    table: Table,
    meshes: Sequence[Mesh],
    mesh: Mesh,
) -> Pipelined:
    """The schedule of `recorded` by `table`. `wholes` are the types of the inputs as the caller
    passes them, `meshes` those of the ranks, all slices of `mesh`."""
    return _Pipeline(recorded, wholes, table, meshes, mesh).pipelined()


def spread(
    graph: Graph,
    wholes: Sequence[TensorType],
    back: Mapping[Node, TensorType],
    meshes: Sequence[Mesh],
    mesh: Mesh,
) -> Schedule:
    """The schedule of `graph`, recorded on the first of `meshes`: each node on the rank of its
    largest argument, like the part of a pipeline after the microbatches. `wholes` are the types of
    the inputs as the caller passes them; `back` is as in `Recorded`; `meshes` are slices of
    `mesh`."""
    made = Recorded(graph, {}, {}, {}, {}, back)
    none = Table(graph.name, ((),) * len(meshes), tuple(range(len(meshes))), 0)
    p = _Pipeline(made, wholes, none, meshes, mesh)
    return p.schedule(p.after({}))


class _Pipeline:
    def __init__(
        self,
        recorded: Recorded,
        wholes: Sequence[TensorType],
        table: Table,
        meshes: Sequence[Mesh],
        mesh: Mesh,
    ) -> None:
        self.recorded, self.table, self.mesh = recorded, table, mesh
        self.name, self.count = recorded.graph.name, table.microbatches
        self.options = recorded.graph.options
        self.stage_mesh = [meshes[r] for r in table.placement]
        self.types: list[TensorType] = list(wholes)
        inner = {*recorded.rows, *recorded.sums, *recorded.early}
        real = [n for n in recorded.graph.inputs if n not in inner]
        self.free = free_nodes(recorded.graph.nodes)
        self.input_buffers = {n: i for i, n in enumerate(real)}
        self.inputs = len(real)
        self.steps: list[Compute | Send] = []  # collectives are within, until all is merged
        self.sent: dict[tuple[int, int], int] = {}  # (buffer, rank) to the buffer there
        self.lies: dict[tuple[int, TensorType], int] = {}  # (buffer, layout) to the buffer so laid
        self.rank_of = list(table.placement)
        self.meshes = list(meshes)
        self.rank_of_buffer: dict[int, int] = {}  # buffer to the rank that filled it
        self.rank: dict[Node, int] = {}  # inputs and later nodes → rank
        self.micro: dict[tuple[Node, int], list[int]] = {}  # (input, rank) to its microbatches
        self.totals: dict[Node, int] = {}  # node → buffer of its sum so far
        self.parts: dict[Node, list[int]] = {}  # rows, microbatch by microbatch
        # For each input of the part after the microbatches: the value that is summed, or that is
        # concatenated; and the buffers of the sums, complete over the devices of their stage.
        self.total_of = {
            n: x for n, (x, t) in recorded.sums.items() if combined(t) not in ("", "same")
        }
        self.part_of = {n: x for n, (x, t) in recorded.sums.items() if combined(t) in ("", "same")}
        self.complete: dict[Node, int] = {}
        self.users: dict[Node, list[Node]] = {}
        for n in recorded.graph.nodes:
            for a in n.args:
                self.users.setdefault(a, []).append(n)

    # -- buffers ----------------------------------------------------------------------------------
    def buffer(self, t: TensorType) -> int:
        self.types.append(t)
        return len(self.types) - 1

    def on(self, buffer: int, rank: int) -> int:
        """The copy of `buffer` on the mesh of `rank`, sent there at most once."""
        return self.all_on([buffer], rank)[0]

    def all_on(self, buffers: Sequence[int], rank: int) -> list[int]:
        """The copies of `buffers` on the mesh of `rank`, sent there at most once; buffers from one
        source share a step."""
        mesh, on_rank, away = self.meshes[rank], list[int](), dict[Any, dict[int, None]]()
        for b in buffers:
            missing_axes = set(self.types[b].split_axes) - set(mesh.axes)
            if missing_axes:  # it rests split over the stages' axis
                b = self.laid(b, gathered(self.types[b], missing_axes))
            t, source = self.types[b], self.rank_of_buffer.get(b)
            if t.mesh == mesh or (t.mesh is None and source == rank):
                self.sent[b, rank] = b
            elif (b, rank) not in self.sent:
                away.setdefault((t.mesh, source), {})[b] = None
            on_rank.append(b)
        for (_, source), group in away.items():
            types = [self.types[b].on(mesh) for b in group]
            self.sent.update(((b, rank), self.buffer(t)) for b, t in zip(group, types, strict=True))
            writes = tuple(self.sent[b, rank] for b in group)
            self.rank_of_buffer.update(dict.fromkeys(writes, rank))
            self.steps.append(Send(tuple(group), writes, tuple(types), stage=source or 0))
        return [self.sent[b, rank] for b in on_rank]

    def laid(self, buffer: int, to: TensorType) -> int:
        """`buffer`, which is on the whole mesh, in the layout `to`; it is redistributed at most
        once."""
        if self.types[buffer] == to:
            return buffer
        known = self.lies.get((buffer, to))
        if known is None:
            b = Builder("rest", self.options)
            b.loc = ""
            x = b.redistribute(b.input(self.types[buffer], f"b{buffer}"), to)
            known = self.lies[buffer, to] = self.run(b.graph([x]), [buffer], None, "rest")[0]
        return known

    def run(self, graph: Graph, reads: Sequence[int], rank: int | None, note: str) -> list[int]:
        """Adds a step on the mesh of `rank` (None: the whole mesh) and returns the buffers that it
        fills."""
        writes = [self.buffer(n.type) for n in graph.outputs]
        if rank is not None:
            self.rank_of_buffer.update(dict.fromkeys(writes, rank))
        step = Compute(tuple(reads), tuple(writes), graph, stage=rank or 0, note=note)
        self.steps.append(step)
        return writes

    # -- the whole --------------------------------------------------------------------------------
    def pipelined(self) -> Pipelined:
        """The schedule. The nodes of one microbatch are split into regions (stage, forward or
        backward), the actions of the table run them, and the part after the gradients runs once."""
        made = self.recorded
        last = len(self.stage_mesh) - 1
        stage = stage_numbers(made.graph.nodes, made.marked, made.origins, last, self.free)
        wanted = list(dict.fromkeys(x for x, _ in made.sums.values()))
        behind = depends(made.graph.nodes, made.origins)
        results = [x for x in wanted if x not in behind]
        found = regions(made.graph, wanted, results, stage, self.free, made.origins)
        found |= whole_backward(found, wanted)
        self.compute_ahead()
        self.play(found, wanted)
        table = f"pipeline={self.table.name} microbatches={self.count}"
        schedule = self.schedule(self.after(found), table)
        homes = {n: r for n, r in self.rank.items() if n.op == "input"}
        return Pipelined(schedule, self.table, found, homes)

    def schedule(self, results: Sequence[int], table: str = "") -> Schedule:
        """The schedule of all steps so far, with the buffers `results` as outputs."""
        return with_regions(merged(Schedule(
            self.name,
            self.mesh,
            tuple(self.types),
            tuple(range(self.inputs)),
            tuple(results),
            tuple(self.steps),
            self.options,
            table=table,
        )))  # fmt: skip

    def cut(self, n: Node, rank: int) -> list[int]:
        """The buffers of the microbatches of the input `n`, or of their numbers, on the mesh of
        `rank`."""
        buffer = self.micro.get((n, rank))
        if buffer is not None:
            return buffer
        b = Builder("cut", self.options)
        b.loc = ""
        source, t = self.recorded.rows[n]
        reads: list[int] = []
        if source is None:
            line = plain(t.dtype, (self.count,), self.meshes[rank])
            x = b("iota", dtype=t.dtype, shape=(self.count,), dim=0, layout=line)
        else:
            reads = [self.on(self.input_buffers[source], rank)]
            x = cut(b, b.input(self.types[reads[0]], "whole"), _on_devices(t, self.meshes[rank]))
        parts = b("unstack", x)
        outs = [b("item", parts, index=i) for i in range(self.count)]
        found = self.micro[n, rank] = self.run(b.graph(outs), reads, rank, "microbatches")
        return found

    def region(self, name: str, region: Region, sums: Mapping[Node, tuple[int, str]]) -> Graph:
        return region_graph(f"{self.name}_{name}", region, sums, self.free, self.options)

    def compute_ahead(self) -> None:
        """Adds the step that computes values of all microbatches before the first begins, such as
        the number of labels in the loss. It runs on the rank of the loss."""
        graph, rank = self.recorded.ahead, self.rank_of[-1]
        if graph is not None:
            by_name = {n.attrs["name"]: i for n, i in self.input_buffers.items()}
            reads = self.all_on([by_name[n.attrs["name"]] for n in graph.inputs], rank)
            ids = self.run(on_mesh(graph, self.meshes[rank]), reads, rank, "ahead")
            self.input_buffers.update(zip(self.recorded.early, ids, strict=True))

    def play(self, regions: dict[tuple[int, str], Region], wanted: Sequence[Node]) -> None:
        """Adds the steps of all microbatches, in an order that every rank can follow.

        Microbatches that add to the same number of earlier sums share a region's graph. A stage's
        gradients are reduced after its last region, while other stages work; with `overlap=False`
        after all regions.
        """
        sums, rows = set(self.total_of.values()), set(self.part_of.values())
        kinds = {x: combined(t) for x, t in self.recorded.sums.values()}
        values: dict[tuple[Node, int], int] = {}
        # A summed value is no output of its region, unless another region reads it.
        parts = rows.union(*(r.takes for r in regions.values()))
        regions = {
            k: replace(r, gives=tuple(n for n in r.gives if n in parts)) for k, r in regions.items()
        }
        graphs: dict[tuple[int, str, tuple[int, ...]], Graph] = {}
        totals: Totals[int] = Totals(self.count, self.options.mesh_invariant)
        units = [
            a
            for rank, slot in run_order(self.table)
            for row in [self.table.rows[rank]]
            for a in [row[slot], *(a for a in row[slot + 1 : slot + 2] if a.joined)]
        ]
        left = Counter(a.stage for a in units if (a.stage, a.kind) in regions)
        takers: dict[int, set[Node]] = {}
        for (stage, _), taker in regions.items():
            takers.setdefault(self.rank_of[stage], set()).update(taker.takes)
        done: dict[int, set[Node]] = {}  # stage → sums that it has yet to reduce

        def region(s: int, kind: str, m: int) -> None:
            r = regions.get((s, kind))
            if r is None:
                return
            rank = self.rank_of[s]
            here = set(r.nodes)
            added = {n: totals.earlier(n, m) for n in wanted if n in sums and n in here}
            counts = {n: len(earlier) for n, (earlier, _) in added.items()}
            key = s, kind, tuple(counts.values())
            if key not in graphs:
                terms = {n: (count, kinds[n]) for n, count in counts.items()}
                graph = self.region(f"{s}{kind}", r, terms)
                graphs[key] = on_mesh(graph, self.meshes[rank])
            reads = self.all_on([self._value(values, a, m, rank) for a in r.takes], rank)
            reads += [b for earlier, _ in added.values() for b in earlier]
            ids = self.run(graphs[key], reads, rank, f"{s}{kind}{m}")
            values.update(((n, m), i) for n, i in zip(r.gives, ids))
            for (n, (_, place)), total in zip(added.items(), ids[len(r.gives) :], strict=True):
                totals.waiting[place] = self.totals[n] = total
            for n in r.gives:
                if n in rows:
                    self.parts.setdefault(n, []).append(values[n, m])
            left[s] -= 1
            if left[s]:
                return
            done[s] = {n for (k, _), x in regions.items() if k == s for n in x.nodes if n in sums}
            if self.options.schedule.overlap is not False:
                for k, waits in takers.items():  # other ranks' values first, as they wait for them
                    if k != rank:
                        self.all_on([values[n, m] for n in r.gives if n in waits], k)
                self.reduce(done.pop(s))

        for a in units:
            region(a.stage, a.kind, a.microbatch)
        for mine in done.values():
            self.reduce(mine)

    def _value(self, values: Mapping[tuple[Node, int], int], n: Node, m: int, rank: int) -> int:
        """The buffer of `n` for microbatch `m`; an input's part of the batch is on the mesh of
        `rank`."""
        if n in self.recorded.rows:
            return self.cut(n, rank)[m]
        return self.input_buffers[n] if n.op == "input" else values[n, m]

    # -- after the microbatches -------------------------------------------------------------------
    def after(self, regions: Mapping[tuple[int, str], Region]) -> list[int]:
        """The buffers of the results: sums, concatenated rows, and the nodes after the
        microbatches, each on the rank of its largest argument."""
        recorded = self.recorded
        env: dict[Node, int] = {**self.input_buffers}
        rank = self.rank = {}
        for (s, _), r in regions.items():
            for a in r.takes:
                if a.op == "input" and a not in recorded.rows and a not in recorded.early:
                    rank.setdefault(a, self.rank_of[s])
        for n, i in env.items():
            where = self.types[i].mesh
            if where is not None and where in self.meshes:
                rank[n] = self.meshes.index(where)
        env.update(self.complete)
        for n in self.part_of:
            env[n] = self.joined(n)
        late = late_nodes(recorded.graph, env)
        filled = {n: self.rank_of_buffer[i] for n, i in env.items() if i in self.rank_of_buffer}
        settle(late, self.free, filled, recorded.sums, rank)
        for group in by_rank(late, self.free, {*recorded.graph.outputs}, rank):
            self._compute(group, env, rank)
        return [self._result(o, env) for o in recorded.graph.outputs]

    def _result(self, o: Node, env: Mapping[Node, int]) -> int:
        made = self.recorded
        found = env[o] if o in env else self.input_buffers[o]
        t, rests = self.types[found], made.back.get(o)
        # Losses, norms and other scalars go to the whole mesh: otherwise only the processes of one
        # stage could read them.
        number = not t.rank and t.dtype.is_float
        number = number and self.options.processes > 1 and not t.partial
        home = self.mesh if rests is None else rests.mesh
        if (rests is None and not number) or t.mesh == home or home is None:
            return found
        to = t.on(home)
        back = self.buffer(to)
        stage = self.rank_of_buffer.get(found, 0)
        self.steps.append(Send((found,), (back,), (to,), stage=stage, note="back"))
        if rests is None:
            return back
        return self.laid(back, rests) if set(rests.split_axes) - set(t.split_axes) else back

    def _rank(self, buffer: int) -> int:
        return self.rank_of_buffer.get(buffer, 0)

    def reduce(self, mine: Container[Node]) -> None:
        """Adds the step that runs the collectives of a stage that wait for the totals of `mine`."""
        totals: dict[int, list[Node]] = {}
        for n, source in self.total_of.items():
            if source in mine:
                totals.setdefault(self.totals[source], []).append(n)
        if not totals:
            return
        rank = self._rank(next(iter(totals)))
        b = Builder("sum", self.options)
        b.loc = ""
        outs: dict[Node, Node] = {}
        ids: dict[Node, int] = {}
        for total, ns in totals.items():
            x = b.input(self.types[total], f"b{total}")
            ids[x] = total
            for n in ns:
                outs.update(self._collected(b, n, x, self.meshes[rank]))
        if ends := [o for o in dict.fromkeys(outs.values()) if o not in ids]:
            ids.update(zip(ends, self.run(b.graph(ends), list(totals), rank, "sum"), strict=True))
        self.complete.update((n, ids[o]) for n, o in outs.items())

    def _collected(self, b: Builder, n: Node, x: Node, mesh: Mesh) -> Iterator[tuple[Node, Node]]:
        """Yields (node, value) for `n`, whose value is `x`, and for the collectives of it, if
        others read them."""
        users = self.users.get(n, [])
        moves = [u for u in users if u.is_collective]
        if len(moves) < len(users) or not users or n in self.recorded.graph.outputs:
            yield n, x
        for u in moves:
            made = b._add(replace(u, args=(x,), types=(moved_type(u.type, mesh),)))
            yield from self._collected(b, u, made, mesh)

    def joined(self, n: Node) -> int:
        """The buffer of the rows of all microbatches for `n`; one microbatch's if they are the same
        for each."""
        parts, (_, t) = self.parts[self.part_of[n]], self.recorded.sums[n]
        if combined(t) == "same":
            return parts[0]
        b, rank = Builder("rows", self.options), self._rank(parts[0])
        b.loc = ""
        xs = [b.input(self.types[p], f"m{i}") for i, p in enumerate(parts)]
        each = [b("reshape", x, shape=(1, *x.type.shape)) for x in xs]
        rows = b("concat", *each, dim=0) if len(each) > 1 else each[0]
        whole = joined(b, rows, _on_devices(t, self.meshes[rank]))
        return self.run(b.graph([whole]), parts, rank, "rows")[0]

    def _compute(
        self, group: Sequence[Node], env: dict[Node, int], rank: Mapping[Node, int]
    ) -> None:
        """Adds the step that runs `group`, nodes after the microbatches, all on one rank."""
        here = rank[group[0]]
        mine = set(group)
        every = self.recorded.graph
        outside = {o for o in every.outputs if o in mine}
        used = {a for n in every.nodes if n not in mine for a in n.args if a in mine}
        takes = dict.fromkeys(
            a for n in group for a in n.args if a not in mine and a not in self.free
        )
        gives = [n for n in group if (n in outside or n in used) and len(n.types) == 1]
        region = Region(here, "P", tuple(group), tuple(takes), tuple(gives))
        graph = on_mesh(self.region("after", region, {}), self.meshes[here])
        reads = self.all_on([env[a] for a in takes], here)
        env.update(zip(gives, self.run(graph, reads, here, "after"), strict=True))


def _on_devices(t: TensorType, mesh: Mesh) -> TensorType:
    """`t`, which has an axis in time, on the devices of `mesh`."""
    assert t.mesh is not None
    return t.on(in_time(mesh, {a: t.sizes[a] for a in t.mesh.time}))


# Order of additions over microbatches.

T = TypeVar("T")
Place = tuple[Hashable, int, int]  # (owner of the total, level of pairs, index in it)


class Totals(Generic[T]):
    """Partial sums over `count` microbatches: added as they come or, if `paired`, in adjacent pairs
    and pairs of these. Then the bits do not depend on the order of execution.

    >>> totals = Totals(3, paired=True)
    >>> for m in (2, 1, 0):
    ...     earlier, place = totals.earlier("loss", m)
    ...     total = f"{m}"
    ...     for other in earlier:
    ...         total = f"({other} + {total})"
    ...     totals.waiting[place] = total
    >>> totals.waiting
    {('loss', 2, 0): '(2 + (1 + 0))'}
    """

    def __init__(self, count: int, paired: bool) -> None:
        self.count, self.paired = count, paired
        self.waiting: dict[Place, T] = {}

    def earlier(self, of: Hashable, m: int) -> tuple[list[T], Place]:
        """(values to add to the part of microbatch `m`, one after the other; key in `waiting` for
        the total)."""
        found: list[T] = []
        level, count = 0, self.count
        while self.paired and count > 1:
            if m ^ 1 < count:  # else the last of an odd number
                if (of, level, m ^ 1) not in self.waiting:
                    return found, (of, level, m)
                found.append(self.waiting.pop((of, level, m ^ 1)))
            level, m, count = level + 1, m // 2, -(-count // 2)
        last = (of, level, 0)
        if last in self.waiting:
            found.append(self.waiting.pop(last))
        return found, last
