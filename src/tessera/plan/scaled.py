"""Prices of one recorded schedule on many meshes of other sizes, all at once.

A layout names axes, not sizes. So the schedule of a step on one mesh has the steps of every mesh
with these axes: blocks, bytes and FLOPs change by the sizes of the axes that split them. The step
is simulated as in simulate.py, where each time is an array with an element for each mesh. Memory
scales in the same way: the values that are alive at the recorded peak, each by its own axes.

What this leaves out, and a full recording has: padding of uneven blocks, other numbers of blocks in
a loop over rows, and the steps of a pipeline. Its stages are taken as equal, each computes the
parts of a step that have rows for each microbatch, and the rest, such as the optimizer, once.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, assert_never

import numpy as np
from numpy.typing import NDArray

from ..core.layout import TensorType
from ..core.machine.machine import Machine
from ..core.mesh import Mesh
from ..cost.collective_time import collective_time
from ..cost.liveness import Liveness
from ..cost.program import of_schedule
from ..cost.schedule_collectives import priced_as, whole_bytes
from ..cost.step_time import Kernel, kernels
from ..ir.graph.node import Graph, Node
from ..ir.schedule.schedule import Collective, Compute, Loop, Region, Schedule, Send
from ..ops.redistribute import all_gather
from .simulate import groups_of

Array = NDArray[np.float64]
BATCH = "dp"


@dataclass(frozen=True, slots=True)
class Parts:
    """The times of a step on each mesh: simulated (`span_s`), and the sums over its steps for one
    microbatch (`rows_s`) and once (`once_s`). `compute_s` is the part of `span_s` that computes."""

    span_s: Array
    compute_s: Array
    rows_s: Array
    once_s: Array


class Scaled:
    """The prices of `schedule`, recorded on one mesh, for meshes of the sizes `sizes` (an array for
    each axis). `microbatches` divides what has rows of the batch, `stages` what is in a stage."""

    def __init__(
        self, schedule: Schedule, machine: Machine, sizes: dict[str, Array],
        microbatches: Array | None = None,
    ) -> None:  # fmt: skip
        assert machine.chip is not None and schedule.mesh is not None
        self.schedule, self.machine, self.chip = schedule, machine, machine.chip
        self.sizes, self.own = sizes, schedule.mesh.sizes
        one = np.ones(len(next(iter(sizes.values()))))
        self.microbatches = one if microbatches is None else microbatches
        self.stages = sizes.get("pp", one)
        self._factors: dict[tuple[bool, frozenset[str]], Array] = {}
        self._computed: dict[Graph, tuple[Array, Array]] = {}

    def factor(self, axes: Iterable[str], rows: bool = False) -> Array:
        """Returns how much of a recorded block that is split over `axes` a block has; of one
        microbatch, if it has `rows`."""
        key = rows, frozenset(axes)
        if key not in self._factors:
            made = 1 / self.microbatches if rows else np.ones_like(self.microbatches)
            for a in key[1]:
                made = made * (self.own[a] / self.sizes[a])
            self._factors[key] = made
        return self._factors[key]

    def of_type(self, t: TensorType) -> Array:
        """Returns `factor` of a value of type `t`."""
        return self.factor(t.split_axes, has_rows(t))

    # -- memory -----------------------------------------------------------------------------------
    def memory_bytes(self) -> Array:
        """Returns an estimate of the peak of a device of the fullest stage."""
        held = [self.schedule.buffers[b] for b in self.schedule.inputs]
        total: Array = sum(t.local_bytes * self.of_type(t) for t in held) / self.stages
        live = Liveness(of_schedule(self.schedule), False, gpu=not self.chip.shared)
        # 1F1B: a stage holds as many microbatches as there are stages after it
        several = np.minimum(self.microbatches, self.stages) / self.stages
        rest = live.peak
        for t, size, _ in live.waiting():
            rest -= size
            part = several if has_rows(t) else 1 / self.stages
            total = total + size * self.of_type(t) * part
        axes = {a for n in _running(live) for t in n.types for a in t.split_axes}
        return total + max(0, rest) * self.factor(axes, rows=True)

    # -- times ------------------------------------------------------------------------------------
    def least_s(self) -> Array:
        """Returns a lower bound of the step: its computation, without communication."""
        return self._in_stages(self.parts(None))

    def step_s(self, meshes: Sequence[Mesh]) -> Array:
        """Returns the time of the step on each of `meshes`, which have the sizes in their order."""
        return self._in_stages(self.parts(meshes))

    def _in_stages(self, p: Parts) -> Array:
        turns = self.microbatches + self.stages - 1
        staged = p.rows_s / self.stages * turns + p.once_s / self.stages
        staged = staged + 2 * turns * self.chip.program_s
        return np.where(self.stages > 1, staged, p.span_s + self.chip.program_s)

    def parts(self, meshes: Sequence[Mesh] | None) -> Parts:
        """Returns the times of the schedule on `meshes`; None: without communication."""
        return self._run(self.schedule, meshes)[0]

    def _run(self, s: Schedule, meshes: Sequence[Mesh] | None) -> tuple[Parts, Array]:
        """Returns the times of one run of `s`, and which streams it uses: a row for computation
        and for each level of links."""
        zero = np.zeros_like(self.microbatches)
        streams = 1 + len(self.machine.topology.levels)
        free, every = np.zeros((streams, len(zero))), np.zeros((streams, len(zero)), bool)
        ready: dict[int, Array] = {}
        ends: list[Array] = []
        span = compute_s = rows_s = once_s = zero
        for step in s.steps:
            used = np.zeros_like(every)
            match step:
                case Compute():
                    rows, once = self._compute(step.graph)
                    took, own_s = rows + once, rows + once
                    used[0] = True
                case Collective():
                    took, own_s = zero, zero
                    rows = once = zero
                    if meshes is not None:
                        took, used[1:] = self._collective(step.graph, step, meshes)
                        rows, once = (took, zero) if has_rows(step.nodes[0].type) else (zero, took)
                case Loop() | Region():
                    inner, used = self._run(step.body, meshes)
                    times = step.times if isinstance(step, Loop) else 1
                    took, own_s = times * inner.span_s, times * inner.compute_s
                    rows, once = times * inner.rows_s, times * inner.once_s
                    used[0] = True
                case Send():
                    took = own_s = rows = once = zero
                case _:
                    assert_never(step)
            used = used & (took > 0)  # what takes no time waits for no stream
            every |= used
            if self.chip.shared:  # one thing at a time
                used = np.vstack([took[None] > 0, np.zeros_like(used[1:])])
            start = zero
            waits = [ready[b] for b in step.reads if b in ready]
            for x in [*waits, *(ends[i] for i in step.after)]:
                start = np.maximum(start, x)
            start = np.maximum(start, np.where(used, free, 0.0).max(axis=0))
            end = start + took
            free = np.where(used, end, free)
            ready.update(dict.fromkeys(step.writes, end))
            ends.append(end)
            span, compute_s = np.maximum(span, end), compute_s + own_s
            rows_s, once_s = rows_s + rows, once_s + once
        return Parts(span, compute_s, rows_s, once_s), every

    def _compute(self, graph: Graph) -> tuple[Array, Array]:
        """Returns the time of the kernels of `graph` with rows of the batch, and of the others."""
        if graph not in self._computed:
            rows = once = np.zeros_like(self.microbatches)
            for k in kernels(graph, self.chip):
                took_s = self._kernel_s(k)
                if BATCH in k.work.axes and not k.scope.startswith("optim"):
                    rows = rows + took_s
                else:
                    once = once + took_s
            self._computed[graph] = rows, once
        return self._computed[graph]

    def _kernel_s(self, k: Kernel) -> Array:
        """Returns the time of a kernel as cost/step_time.py computes it."""
        w, chip = k.work, self.chip
        has = BATCH in w.axes
        share = self.factor(w.axes, has)
        moved = sum(size * self.factor(a, has and BATCH in a) for size, a in w.moved)
        time_s = np.maximum(chip.memory_s(1.0) * moved, w.ops * share / chip.ops_per_s)
        if w.dense:
            p, dense = chip.rate(k.dtype), w.dense * share
            elements = w.elements * self.factor(w.element_axes, BATCH in w.element_axes)
            depth = np.maximum(1.0, dense / (2 * elements))
            part = p.most * (elements / (elements + p.area)) * (depth / (depth + p.depth))
            if w.is_attention:
                part = np.full_like(part, chip.attention)
            time_s = np.maximum(time_s, dense / (p.peak_flops_per_s * part))
        return k.times * (time_s + chip.kernel_s)

    def _collective(
        self, graph: Graph, step: Collective, meshes: Sequence[Mesh]
    ) -> tuple[Array, NDArray[np.bool_]]:
        """Returns the time of a collective on each mesh, and whether it uses each level."""
        nodes, links = step.nodes, self.machine.topology
        size = np.zeros(len(meshes))
        for n in nodes:
            size += whole_bytes(n) * self.of_type(_whole_type(n))
        by = nodes[0].attrs.get("algorithm", "engine")
        times = np.zeros(len(meshes))
        used = np.zeros((len(links.levels), len(meshes)), bool)
        for i, mesh in enumerate(meshes):
            if shards := [a for a in step.axes if mesh.sizes[a] > 1]:
                groups = groups_of(mesh, tuple(shards))
                found = collective_time(priced_as(nodes[0]), float(size[i]), groups, links, by)
                times[i] = found.time_s
                used[list(found.levels), i] = True
        return times, used


def has_rows(t: TensorType) -> bool:
    """Returns whether a value of type `t` has rows of the batch, so that a microbatch has a part of
    it: it is split over the batch's axis, and not only at rest."""
    return BATCH in t.split_axes and BATCH not in t.rest_axes


def _whole_type(n: Node) -> TensorType:
    """The type whose block is what `whole_bytes` of the collective `n` counts."""
    return n.type if n.op == all_gather.name else n.args[0].type


def _running(live: Liveness) -> list[Node]:
    """The nodes that run at the peak: with a loop, those of its body."""
    if not live.held:
        return []
    n = live.held[live.needs.index(live.peak)]
    bodies: list[Any] = [v for v in n.attrs.values() if isinstance(v, Graph)]
    return [n, *(x for body in bodies for x in body.nodes)]


__all__ = ["Scaled", "has_rows"]
