"""Choice of collective algorithms: a pass that writes the algorithm into each node of a Schedule.

The choice is the user's (`schedule.algorithm`) or the cheapest on a topology. A collective that is
left to the engine has no attribute `algorithm`; any other names its table of rounds, so the text of
the schedule says which algorithm runs.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from typing import Any, assert_never, cast

from ..core.errors import UsageError
from ..core.layout import shard_count
from ..core.options import ProgramOptions
from ..core.topology import Topology
from ..cost.collectives import choose, nesting
from ..cost.schedule_collectives import links_of, whole_bytes
from ..ir.graph.node import Emit, Graph, Node
from ..ir.schedule.algorithms import table
from ..ir.schedule.algorithms.build import MOST_RANKS, PUTS, named, nest_size, puts_by
from ..ir.schedule.schedule import Collective, Compute, Loop, Region, Schedule, Send, Step
from ..ir.tile.node import mesh_kernel
from ..ops.op import OPS
from ..ops.redistribute import all_reduce

CHEAPEST = "cheapest"
SUMS = tuple(name for name in table.COLLECTIVES if OPS[name].mesh_invariance == "sums")


def _choices(o: ProgramOptions) -> dict[str, str]:
    """The chosen names by collective. At the level "mesh_invariant" sums have one fixed order:
    "cheapest" is then the engine's own, while collectives that only move data may use any table.
    Raises UsageError if a table is named for a sum."""
    given = dict(o.schedule.algorithm or ())
    if o.schedule.backend == "nvshmem" and not given:
        sums: dict[str, str] = dict.fromkeys(SUMS, "engine") if o.mesh_invariant else {}
        return {"": puts_by(o.schedule.epoch), **sums}
    if not o.mesh_invariant or not given:
        return given
    for kind in ("", *SUMS):
        name = given.get(kind, "engine")
        if name not in ("engine", CHEAPEST):
            raise UsageError(
                f"schedule: the algorithm {name} adds up in an order of its own",
                level="mesh_invariant",
                fix='name it for what only moves data ({"all_gather": ...}), or set '
                'level="run_to_run"',
            )
    return given | dict.fromkeys(SUMS, "engine")


def algorithms(s: Schedule) -> Schedule:
    """`s` with the algorithms that its options choose; `s` itself if they choose none.

    These are left to the engine: maxima and minima, sums in a fixed order, collectives on a folded
    mesh (a device joins its places first), "hierarchical" over one axis on one level of links, and
    collectives for which "cheapest" finds no cheaper table. The links are those of the options, or
    else of the mesh. Raises UsageError for a table that does not exist, and for "cheapest" without
    links.
    """
    choices, links = _choices(s.options), links_of(s)
    if not choices or s.mesh is None or s.mesh.onto is not None:
        return s
    if CHEAPEST in choices.values() and links is None:
        raise UsageError(
            "schedule: what is cheapest depends on the links",
            mesh=s.mesh.text(),
            fix='give topology="h100", or a Topology, or a mesh that has links: '
            'ts.mesh.preset("t3000")',
        )
    return _Chooser(choices, links).schedule(s)


@dataclass(frozen=True)
class _Chooser:
    choices: dict[str, str]
    topology: Topology | None
    rewritten: dict[object, Any] = field(default_factory=dict)  # shared graphs stay shared

    def schedule(self, s: Schedule) -> Schedule:
        return replace(s, steps=tuple(map(self.step, s.steps)))

    def step(self, step: Step) -> Step:
        """`step` with algorithms in its collectives; steps that share a graph or body still share
        it."""
        match step:
            case Collective():
                if step.graph not in self.rewritten:
                    self.rewritten[step.graph] = self.graph(step)
                return replace(step, graph=self.rewritten[step.graph])
            case Loop() | Region():
                if step.body not in self.rewritten:
                    self.rewritten[step.body] = self.schedule(step.body)
                return replace(step, body=self.rewritten[step.body])
            case Compute() | Send():
                return step
            case _:
                assert_never(step)

    def graph(self, step: Collective) -> Graph:
        """The graph of `step` with the algorithms of its collectives, which run together."""
        if step.op == mesh_kernel.name:
            return step.graph
        together = sum(map(whole_bytes, step.nodes))

        def named(was: Node, n: Node, emit: Emit) -> Node | None:
            if not n.is_collective:
                return None
            if n.attrs.get("algorithm") in PUTS:  # as a layer of experts asked
                return None
            attrs = {k: v for k, v in n.attrs.items() if k != "algorithm"}
            if name := self.name(n, together):
                attrs["algorithm"] = name
            return None if attrs == n.attrs else emit(replace(n, attrs=attrs))

        return step.graph.rewrite(named)

    def name(self, n: Node, size_bytes: int) -> str:
        """The table for `n`, which runs with `size_bytes` in all; "" for the engine's own."""
        want = self.choices.get(n.op, self.choices.get("", "engine"))
        t = n.args[0].type
        axes = n.attrs["axes"]
        count = shard_count(axes, t.sizes)
        kinds = {kind for a, kind in t.partial if a in axes}
        left = want == "engine" or n.op not in table.COLLECTIVES or not 1 < count <= MOST_RANKS
        left = left or "order" in n.attrs
        if left or kinds - {"sum"} or t.mesh is None:
            return ""
        groups = t.mesh.groups(axes)
        if want == "hierarchical":
            shape = nesting(self.topology, groups) if self.topology is not None else ()
            shape = shape if len(shape) > 1 else tuple(t.sizes[a] for a in axes if t.sizes[a] > 1)
            if len(shape) < 2:
                return ""
            want = f"hierarchical({' x '.join(f'{k}:ring' for k in shape)})"
        if "/" in want and n.op != all_reduce.name:
            want = re.sub(r"/\d+", "", want)  # only these are cut into segments, in a schedule
        if nest_size(want) not in (None, count):
            return ""
        if self.topology is None or "(" in want or "/" in want:
            return named(n.op, want, count).name
        chosen = choose(
            cast(table.Collective, n.op),
            size_bytes,
            self.topology,
            groups,
            algorithm=None if want == CHEAPEST else want,
        ).algorithm
        return "" if chosen.native else chosen.name
