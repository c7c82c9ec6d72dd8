"""Division of a pipeline's nodes into stages.

The parts of the pipeline are grouped, or its one function is cut, so that all stages compute about
as much.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ....core.errors import UsageError
from ....ir.graph.node import Node
from ....ir.schedule.pipelines.stages import balanced
from .microbatch import Microbatch


@dataclass(frozen=True)
class Division:
    """A pipelined function in stages; every list has an entry for each stage."""

    nodes: list[list[Node]]  # the nodes of the forward pass
    parts: list[int]  # the number of parts
    flops: list[float]  # the FLOPs of a microbatch, forward and backward
    weight_bytes: list[int]  # the bytes of weights on a device


def divided(m: Microbatch, count: int) -> Division:
    """Divides `m` into `count` stages. Raises UsageError if it has fewer parts."""
    parts = m.parts
    if len(parts) == 1:
        parts = _pieces(parts[0])
    if len(parts) < count:
        pipe = m.state.pipe
        raise UsageError(
            f"{pipe.name}: {len(parts)} parts for a pipeline of {count} stages",
            axis=f"{pipe.axis} of {m.state.mesh.text()}",
            fix="give a part for each stage, or a smaller axis; one function is cut where one"
            " value passes",
        )
    shares = m.shares(parts)
    starts = balanced(list(map(_flops, shares)), count)
    spans = [slice(a, b) for a, b in zip(starts, [*starts[1:], len(parts)], strict=True)]
    work = [_joined(shares[s]) for s in spans]
    other = {*m.rows, *m.sums, *m.early}
    return Division(
        [_joined(parts[s]) for s in spans],
        [s.stop - s.start for s in spans],
        list(map(_flops, work)),
        [_weight_bytes(nodes, other) for nodes in work],
    )


def _joined(parts: Sequence[Sequence[Node]]) -> list[Node]:
    return [n for part in parts for n in part]


def _flops(nodes: Sequence[Node]) -> float:
    return float(sum(n.flops for n in nodes))


def _weight_bytes(nodes: Sequence[Node], other: set[Node]) -> int:
    """The bytes of the float inputs of `nodes` that are not among `other`."""
    inputs = {a for n in nodes for a in n.args if a.op == "input"} - other
    return sum(a.type.local_bytes for a in inputs if a.type.dtype.is_float)


def _pieces(nodes: list[Node]) -> list[list[Node]]:
    """Cuts `nodes` wherever only one value other than scalars crosses, of two dims or more."""
    last_use = {a: i for i, n in enumerate(nodes) for a in n.args}
    alive: set[Node] = set()
    here = set(nodes)
    cuts = [0]
    for i, n in enumerate(nodes):
        alive.add(n)
        alive = {a for a in alive if last_use.get(a, -1) > i and a in here}
        large = [a for a in alive if a.type.rank]
        if len(large) == 1 and large[0].type.rank > 1:
            cuts.append(i + 1)
    pairs = zip(cuts, [*cuts[1:], len(nodes)], strict=True)
    return [nodes[a:b] for a, b in pairs if b > a]
