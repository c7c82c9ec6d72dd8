"""Prices of one recorded schedule on many meshes of other sizes, all at once.

A layout names axes, not sizes. So the schedule of a step on one mesh has the steps of every mesh
with these axes: blocks, bytes and FLOPs change by the sizes of the axes that split them. The step
is simulated as in simulate.py, where each time is an array with an element for each mesh. Memory
scales in the same way: the values that are alive at the recorded peak, each by its own axes.

What this leaves out, and a full recording has: padding of uneven blocks, other numbers of blocks in
a loop over rows, and the single actions of a pipeline. Its stages have whole halves of layers, cut
by FLOPs as the recording cuts them, and the last one also the work outside of layers. Each computes
the parts of a step that have rows for each microbatch, and the rest, such as the optimizer, once.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, lru_cache
from typing import Any, assert_never

import numpy as np
from numpy.typing import NDArray

from ..core.layout import TensorType
from ..core.machine.machine import Machine
from ..core.mesh import Mesh
from ..core.topology import Link, Topology
from ..cost.collective_time import collective_time
from ..cost.liveness import Liveness
from ..cost.program import of_schedule
from ..cost.schedule_collectives import priced_as, whole_bytes
from ..cost.step_time import Kernel, kernels
from ..ir.graph.node import Graph, Node, scope_family
from ..ir.schedule.schedule import Collective, Compute, Loop, Region, Schedule, Send
from ..ops.redistribute import all_gather, reduce_scatter
from .simulate import groups_of

Array = NDArray[np.float64]
BATCH = "dp"


@dataclass(frozen=True, slots=True)
class Parts:
    """The times of a step of one microbatch on each mesh: simulated (`span_s`), and the sums over
    its steps, [2, 3, meshes]: computation and communication, each of the layers, of other work for
    a microbatch, and of what is done once."""

    span_s: Array
    sums_s: Array


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
        self._computed: dict[Graph, Array] = {}
        self._kernels: dict[Graph, list[Kernel]] = {}

    def part(self, chosen: Sequence[int]) -> Scaled:
        """Returns the prices for the meshes of these indices, which may repeat."""
        index = np.array(chosen)
        sizes = {a: x[index] for a, x in self.sizes.items()}
        made = Scaled(self.schedule, self.machine, sizes, self.microbatches[index])
        made._kernels = self._kernels
        made.__dict__["_layers"] = self._layers
        return made

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
        waiting, size = self._waiting()
        rest = max(0, self._live.peak - size)
        axes = {a for n in _running(self._live) for t in n.types for a in t.split_axes}
        return self._held({}) + waiting + rest * self.factor(axes, rows=True)

    def least_bytes(self, zero: int, weights: Iterable[TensorType]) -> Array:
        """Returns a lower bound of the peak with another stage of ZeRO, for a schedule of stage 3:
        arguments and kept activations. Below stage 3 the `weights` are whole, at 0 all state."""
        whole = Counter(self.schedule.buffers[b] for b in self.schedule.inputs)
        chosen = whole if zero == 0 else Counter(weights) if zero < 3 else {}
        return self._held(chosen) + self._waiting()[0]

    @cached_property
    def _live(self) -> Liveness:
        return Liveness(of_schedule(self.schedule), False, gpu=not self.chip.shared)

    def _held(self, whole: Mapping[TensorType, int]) -> Array:
        """Returns the bytes of the arguments, of which so many of a type are not split at rest."""
        total = np.zeros_like(self.microbatches)
        for t, n in Counter(self.schedule.buffers[b] for b in self.schedule.inputs).items():
            times = n + np.zeros_like(total)
            if BATCH in t.rest_axes:
                times += whole.get(t, 0) * (self.sizes[BATCH] - 1)
            total = total + t.local_bytes * self.of_type(t) * times
        return total / self.stages

    def _waiting(self) -> tuple[Array, int]:
        """Returns the bytes of what is kept at the recorded peak, and those as recorded."""
        # 1F1B: a stage holds as many microbatches as there are stages after it
        several = np.minimum(self.microbatches, self.stages) / self.stages
        total, recorded = np.zeros_like(self.stages), 0
        for t, size, _ in self._live.waiting():
            recorded += size
            total = total + size * self.of_type(t) * (several if has_rows(t) else 1 / self.stages)
        return total, recorded

    # -- times ------------------------------------------------------------------------------------
    def least_s(self, meshes: Sequence[Mesh]) -> Array:
        """Returns a lower bound of the step under all stages of ZeRO: without communication over
        the batch's axis."""
        return self._in_stages(self._run(self.schedule, meshes, True)[0], self._sends_s(meshes))

    def step_s(self, meshes: Sequence[Mesh]) -> Array:
        """Returns the time of the step on each of `meshes`, which have the sizes in their order."""
        return self._in_stages(self._run(self.schedule, meshes)[0], self._sends_s(meshes))

    def _in_stages(self, p: Parts, sends_s: Array) -> Array:
        """Returns the time of the step. A stage waits for the slowest one, or for its oldest
        microbatch to return: 1F1B holds as many as there are stages."""
        done_s, wires_s = p.sums_s
        hidden_s = np.maximum(0.0, p.sums_s.sum((0, 1)) - p.span_s)
        shown = 1 - hidden_s / np.maximum(wires_s.sum(0), 1e-12)
        layers_s, others_s, once_s = done_s + wires_s * shown
        usual, last = self._halves()
        launch_s = 2 * self.chip.program_s
        trip_s = layers_s + others_s + 2 * sends_s + self.stages * launch_s
        slowest_s = launch_s + np.maximum(usual * layers_s, last * layers_s + others_s)
        turn_s = np.maximum(slowest_s, trip_s / self.stages)
        staged = trip_s + (self.microbatches - 1) * turn_s + once_s / self.stages
        step_s = np.where(self.stages > 1, staged, p.span_s + self.chip.program_s)
        copies_s = self._copies_s() / 2 / self.stages
        # Copies to the host run beside the forward pass, a third of the step, those back beside the
        # rest.
        return step_s + sum(np.maximum(0.0, copies_s - step_s * part) for part in (1 / 3, 2 / 3))

    def _copies_s(self) -> Array:
        """Returns the time of the copies to the host's memory and back."""
        found = np.zeros(len(self.microbatches))
        for k, times in self._every(self.schedule, 1):
            if k.is_copy:
                found += self._kernel_s(k) * (times / k.times)
        return found

    def _halves(self) -> tuple[Array, Array]:
        """Returns the part of the layers in the fullest of the first stages, and in the last one,
        when halves of layers are cut so that the most FLOPs of a stage are few."""
        _, depth, part = self._layers
        last = np.arange(2 * depth + 1)[:, None]
        usual = np.ceil((2 * depth - last) / np.maximum(1, self.stages - 1))
        most = np.maximum(usual, last + 2 * depth * (1 - part) / part)
        best = most.argmin(0)
        chosen = np.take_along_axis(usual, best[None], 0)[0]
        return chosen / (2 * depth), best / (2 * depth)

    @cached_property
    def _layers(self) -> tuple[str, int, float]:
        """The list of layers in scopes, which is that with most FLOPs; the number of its layers, by
        which the counts of their products divide; and their part of all FLOPs."""
        counts, flops = Counter[tuple[str, float]](), Counter[str]()
        for k, times in self._every(self.schedule, 1):
            if k.work.dense:
                flops[_list_of(k.scope)] += k.work.dense * times
                counts[scope_family(k.scope), k.work.dense] += times
        name = max((n for n in flops if n), key=flops.__getitem__, default="")
        depth = math.gcd(*(n for (at, _), n in counts.items() if _list_of(at) == name))
        return name, max(1, depth), flops[name] / flops.total() if flops else 1.0

    def _every(self, s: Schedule, times: int) -> Iterator[tuple[Kernel, int]]:
        """Yields the kernels of `s`, with how often each runs."""
        for step in s.steps:
            if isinstance(step, Loop | Region):
                more = step.times if isinstance(step, Loop) else 1
                yield from self._every(step.body, times * more)
            elif isinstance(step, Compute):
                yield from ((k, times * k.times) for k in self._kernels_of(step.graph))

    def _sends_s(self, meshes: Sequence[Mesh]) -> Array:
        """Returns the time in which a microbatch passes from each stage to the next."""
        found, links = np.zeros(len(meshes)), self.machine.topology
        if not (self.stages > 1).any():
            return found
        size = self._row_bytes()
        for i, mesh in enumerate(meshes):
            if mesh.sizes.get("pp", 1) > 1:
                found[i] = sum(
                    link.latency_s + size[i] * sharing / link.bytes_per_s
                    for link, sharing in _hops(mesh, links)
                )
        return found

    def _row_bytes(self) -> Array:
        """Returns the bytes of a device of the value between two layers: of those with rows that
        their kernels read, the one that most of them read."""
        name, _, _ = self._layers
        read = Counter[tuple[int, tuple[str, ...]]]()
        for k, times in self._every(self.schedule, 1):
            if _list_of(k.scope) == name and k.work.dense:
                read[k.work.moved[0]] += times
        size, axes = max(read, key=read.__getitem__, default=(0, ()))
        return size * self.factor(axes, BATCH in axes)

    def _run(
        self, s: Schedule, meshes: Sequence[Mesh], least: bool = False
    ) -> tuple[Parts, NDArray[np.bool_]]:
        """Returns the times of one run of `s`, and which streams it uses: a row for computation
        and for each level of links. With `least` nothing is sent over the batch's axis."""
        n, streams = len(self.microbatches), 1 + len(self.machine.topology.levels)
        free, every = np.zeros((streams, n)), np.zeros((streams, n), bool)
        ready: dict[int, Array] = {}
        ends: list[Array] = []
        span, sums = np.zeros(n), np.zeros((2, 3, n))
        for step in s.steps:
            used = np.zeros_like(every)
            took = np.zeros(n)
            match step:
                case Compute():
                    own = self._compute(step.graph)
                    took, used[0] = own.sum(0), True
                    sums[0] += own
                case Collective():
                    if not (least and BATCH in step.axes):
                        took, used[1:] = self._collective(step.graph, step, meshes)
                        sums[1, self._place(step.nodes[0].scope, _each(step))] += took
                case Loop() | Region():
                    inner, used = self._run(step.body, meshes, least)
                    times = step.times if isinstance(step, Loop) else 1
                    took, used[0] = times * inner.span_s, True
                    sums += times * inner.sums_s
                case Send():
                    pass
                case _:
                    assert_never(step)
            used = used & (took > 0)  # what takes no time waits for no stream
            every |= used
            if self.chip.shared:  # one thing at a time
                used = np.vstack([took[None] > 0, np.zeros_like(used[1:])])
            start = np.zeros(n)
            waits = [ready[b] for b in step.reads if b in ready]
            for x in [*waits, *(ends[i] for i in step.after)]:
                start = np.maximum(start, x)
            start = np.maximum(start, np.where(used, free, 0.0).max(axis=0))
            end = start + took
            free = np.where(used, end, free)
            ready.update(dict.fromkeys(step.writes, end))
            ends.append(end)
            span = np.maximum(span, end)
        return Parts(span, sums), every

    def _place(self, scope: str, each: bool) -> int:
        """The row of `Parts.sums_s` of work in `scope`, done for each microbatch if `each`."""
        return 2 if not each else int(_list_of(scope) != self._layers[0])

    def _kernels_of(self, graph: Graph) -> list[Kernel]:
        if graph not in self._kernels:
            self._kernels[graph] = kernels(graph, self.chip)
        return self._kernels[graph]

    def _compute(self, graph: Graph) -> Array:
        """Returns the time of the kernels of `graph`: of layers, other ones with rows, the rest."""
        if graph not in self._computed:
            times = np.zeros((3, len(self.microbatches)))
            for k in self._kernels_of(graph):
                if k.is_copy:
                    continue
                each = BATCH in k.work.axes and not k.scope.startswith("optim")
                times[self._place(k.scope, each)] += self._kernel_s(k)
            self._computed[graph] = times
        return self._computed[graph]

    def _kernel_s(self, k: Kernel) -> Array:
        """Returns the time of a kernel as cost/step_time.py computes it."""
        w, chip = k.work, self.chip
        has = BATCH in w.axes
        share = self.factor(w.axes, has)
        moved = np.zeros_like(share)
        for size, axes in w.moved:
            moved += size * self.factor(axes, has and BATCH in axes)
        if k.is_copy:
            return np.asarray(k.times * (moved / chip.host_bytes_per_s + chip.kernel_s))
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


@cache
def _list_of(scope: str) -> str:
    """The path of the list of layers that `scope` is in: "gpt/blocks" for "gpt/blocks.3.mlp", and
    for the "gpt/blocks.layers.mlp" of a loop."""
    found = re.split(r"[/.](?:\d+|\*)(?![^/.])", scope, maxsplit=1)
    return found[0] if found[1:] else scope.partition(".")[0]


def _each(step: Collective) -> bool:
    """Returns whether each microbatch runs `step`: it moves rows, or a weight at rest that is
    gathered where it is used, or the gradient of one."""
    n = step.nodes[0]
    weights = n.op in (all_gather.name, reduce_scatter.name)
    return has_rows(n.type) or (weights and not n.scope.startswith(("optim", "grad")))


@lru_cache(maxsize=4096)
def _hops(mesh: Mesh, links: Topology) -> list[tuple[Link, int]]:
    """Returns the link between each stage and the next, and how many devices share it."""
    inner, size = math.prod(mesh.shape[mesh.axes.index("pp") + 1 :]), mesh.sizes["pp"]
    found = []
    for stage in range(size - 1):
        a, z = links.coords(stage * inner), links.coords((stage + 1) * inner)
        at = next(i for i in range(len(a)) if a[i] != z[i])
        level = links.levels[at]
        among = min(mesh.size // size, math.prod(links.shape[at + 1 :]))
        found.append((level.link, among if level.shared else 1))
    return found


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
