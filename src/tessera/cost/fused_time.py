"""Time of a compute step whose elementwise kernels are written by hand, or fused as if they were.

Libraries compute a norm, a softmax or an activation in one kernel, which reads and writes each
value once. So kernels between the same products that read each other's results count as one: with
the bytes that it exchanges with others, and all of its operations.

>>> from tessera.core.layout import parse_type
>>> from tessera.core.machine.chip import CHIPS
>>> from tessera.ir.graph.build import Builder
>>> b = Builder("softmax")
>>> x = b.input(parse_type("f32[4096, 4096]"))
>>> e = b("exp", x)
>>> graph = b.graph([b("div", e, b("reshape", b("sum", e, dims=(1,)), shape=(4096, 1)))])
>>> fused_time(graph, CHIPS["h100"]).moved_bytes >> 20
128
"""

from __future__ import annotations

from ..core.machine.chip import Chip
from ..ir.graph.node import Graph, Node
from .flops import on_a_device
from .liveness import buffered
from .program import of_graph
from .step_time import EXPENSIVE, StepTime, is_slow, kernels_of, reads_of, summed


def fused_time(graph: Graph, chip: Chip) -> StepTime:
    """Returns the time of one run of `graph` on `chip`, with its operations and bytes."""
    program = of_graph(graph)
    held = buffered(program, gpu=not chip.shared)
    buffers = {*held, *program.inputs}
    made, level, group = [], dict[Node, int](), dict[Node, Node]()
    reads: dict[Node, dict[Node, int]] = {}
    work: dict[Node, dict[Node, None]] = {}

    def root(n: Node) -> Node:
        while group[n] is not n:
            n = group[n]
        return n

    for n in held:
        found = [*kernels_of(n, program, buffers, chip)]
        alone = len(found) != 1 or bool(found[0].dtype)
        if alone:
            made += found
        fused, reads[n] = reads_of(n, program, buffers)
        level[n] = max((level.get(b, 0) + (alone or b not in group) for b in reads[n]), default=0)
        if not alone:
            group[n], work[n] = n, dict.fromkeys([*fused, n])
            for b in reads[n]:
                if b in group and level[b] == level[n]:
                    group[root(b)] = n
    members: dict[Node, list[Node]] = {}
    for n in group:
        members.setdefault(root(n), []).append(n)
    time_s, flops, moved = 0.0, 0, 0
    for those in members.values():
        inside = {*those}
        outside: dict[Node, int] = {}
        for n in those:
            for b, size in reads[n].items():
                if b not in inside:
                    outside[b] = max(outside.get(b, 0), size)
        size = sum(outside.values())
        for n in those:
            outer = (r for r in held if r not in inside and n in reads[r])
            if program.uses(n)[1] or any(outer):
                size += sum(t.local_bytes for t in n.types)
        nodes = {x: None for n in those for x in work[n]}
        ops = sum(on_a_device(x) * (EXPENSIVE if is_slow(x) else 1) for x in nodes)
        time_s += max(chip.memory_s(size), ops / chip.ops_per_s) + (chip.kernel_s if size else 0.0)
        flops += sum(map(on_a_device, nodes))
        moved += size
    one = summed(made)
    return StepTime(
        one.time_s + time_s, one.flops + flops, one.moved_bytes + moved,
        one.kernels + len(members), one.dtype,
    )  # fmt: skip
