"""What is computed: nodes in program order, each with its type. A node is data, nothing more."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import Any

from ...core.errors import UsageError, fail
from ...core.layout import TensorType, ways
from ...core.mesh import Mesh
from ...core.reshard import wire_bytes
from ...ops.op import OPS
from ...ops.redistribute import COLLECTIVES

NO_ATTRS: Mapping[str, Any] = MappingProxyType({})


@dataclass(frozen=True, eq=False, slots=True)
class Node:
    """One op applied to earlier nodes.

    `types` are the results' types (most ops have one result), `loc` the user's `file:line`,
    `scope` the path of module names, and `note` the reason of a collective that was inserted
    ("" where the user wrote it).
    """

    op: str
    args: tuple[Node, ...]
    types: tuple[TensorType, ...]
    attrs: Mapping[str, Any]
    loc: str = ""
    scope: str = ""
    note: str = ""

    @property
    def type(self) -> TensorType:
        return self.types[0]

    @property
    def is_collective(self) -> bool:
        return self.op in COLLECTIVES

    @property
    def wire_bytes(self) -> int:
        """Bytes that one device receives while this node runs, loops not counted."""
        if not self.is_collective:
            return 0
        t = self.args[0].type
        if "algorithm" in self.attrs:
            from ..schedule.algorithms.build import received_share

            name, n = self.attrs["algorithm"], ways(self.attrs["axes"], t.sizes)
            whole = self.type if self.op == "all_gather" else t
            return round(received_share(self.op, name, n) * whole.local_bytes)
        return wire_bytes(self.op, self.attrs["axes"], t, self.type)

    def __repr__(self) -> str:
        return f"<{self.op} : {', '.join(map(str, self.types))}>"


@dataclass(frozen=True, eq=False)
class Graph:
    """A recorded function: `nodes` in program order (inputs included), `inputs`, `outputs`."""

    name: str
    nodes: tuple[Node, ...]
    inputs: tuple[Node, ...]
    outputs: tuple[Node, ...]

    @cached_property
    def mesh(self) -> Mesh | None:
        for n in self.nodes:
            for t in n.types:
                if t.mesh is not None:
                    return t.mesh
        return None

    @cached_property
    def flops(self) -> int:
        """Floating-point operations of one run, over all devices, loops counted."""
        total = 0
        for n in self.nodes:
            if n.op != "input":
                ins = n.args[0].types if n.op == "item" else tuple(a.type for a in n.args)
                flops = OPS[n.op].flops(ins, n.types, n.attrs)
                total += flops * ways(n.type.per, n.type.sizes)
        return total

    @property
    def text(self) -> str:
        from .text import to_text

        return to_text(self)

    def __str__(self) -> str:
        return self.text

    def collectives(self) -> Iterator[tuple[Node, int]]:
        """Every collective with how often it runs."""
        yield from _collectives(self.nodes, 1)

    @property
    def wire_bytes(self) -> int:
        """Bytes that one device receives in one run."""
        return sum(n.wire_bytes * times for n, times in self.collectives())


def need_graph(name: str, value: object) -> Graph:
    """`value`, which must be a Graph. Raises UsageError."""
    if not isinstance(value, Graph):
        raise fail(
            UsageError,
            f"{name}: takes a Graph, not a {type(value).__name__}",
            fix="record one with graph.trace(fn, ...), or take the .graph of a compiled function",
        )
    return value


def _collectives(nodes: Iterable[Node], times: int) -> Iterator[tuple[Node, int]]:
    for n in nodes:
        if n.is_collective:
            yield n, times
        elif n.op == "scan":
            yield from _collectives(n.attrs["body"].nodes, times * n.attrs["length"])


def reachable(outputs: Iterable[Node]) -> set[Node]:
    """All nodes that `outputs` depend on, themselves included."""
    seen: set[Node] = set()
    todo = list(outputs)
    while todo:
        n = todo.pop()
        if n not in seen:
            seen.add(n)
            todo.extend(n.args)
    return seen
