"""Schedule IR: a program as steps and buffers, with all that is needed to run it.

There are five kinds of steps, and code that reads a schedule handles each of them. `Compute` and
`Collective` run a small graph, `Send` copies values to another mesh, and two run a schedule of
their own: `Loop` many times, `Region` once, as the program of a slice of the mesh (a stage of a
pipeline). Steps pass values in buffers. A step waits for the buffers that it reads; `after` names
further steps that it must follow. All other steps may overlap.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any, ClassVar, assert_never

from ...core.checks import taken
from ...core.layout import TensorType
from ...core.mesh import Mesh
from ...core.options import PLAIN, ProgramOptions
from ...ops.control import item, iterations, scan, stacked
from ..graph.node import Graph, Node, copied, input_node


@dataclass(frozen=True, eq=False)
class _Step:
    """The fields of every step: the buffers that it reads and fills, one for each input and output
    of its graph; its pipeline `stage`; the steps `after` which it runs; a `note` on its purpose."""

    reads: tuple[int, ...]
    writes: tuple[int, ...]
    stage: int = field(default=0, kw_only=True)
    after: tuple[int, ...] = field(default=(), kw_only=True)
    note: str = field(default="", kw_only=True)

    kind: ClassVar[str]

    if TYPE_CHECKING:

        @property
        def graph(self) -> Graph: ...

    @property
    def runs(self) -> object:
        """The graph or schedule that it runs. Steps that run the same one (microbatches of a stage)
        share a program."""
        return self.graph

    @property
    def mesh(self) -> Mesh | None:
        """The mesh that it runs on, from the types of its graph; None if they have none."""
        return self.graph.mesh

    @property
    def nodes(self) -> list[Node]:
        """The nodes of its graph without the inputs."""
        return [n for n in self.graph.nodes if n.op != "input"]

    @property
    def description(self) -> str:
        """A description of the step, e.g. "all_reduce over dp f32[8] +dp by ring"."""
        return self.kind

    @property
    def at(self) -> str:
        """The user's `file:line` of the first node that has one, or ""."""
        return next((n.loc for n in self.nodes if n.loc), "")


@dataclass(frozen=True, eq=False)
class Compute(_Step):
    """Runs a graph that has no collectives: some nodes, or a kernel."""

    graph: Graph
    kind = "compute"

    @property
    def description(self) -> str:
        kernel = self.nodes[0].attrs.get("kernel") if self.nodes else None
        return self.kind if kernel is None else kernel.title


@dataclass(frozen=True, eq=False)
class Collective(_Step):
    """Runs a graph of collectives only: all of one op, over the same axes, in one buffer."""

    graph: Graph
    kind = "collective"

    @property
    def nodes(self) -> list[Node]:
        """Its collectives, without the nodes that take a result of several."""
        return [n for n in self.graph.nodes if n.is_collective]

    @property
    def op(self) -> str:
        return self.nodes[0].op

    @property
    def name(self) -> str:
        """The op, or the name and sizes of a kernel that puts."""
        kernel = self.nodes[0].attrs.get("kernel")
        return self.op if kernel is None else str(kernel.title)

    @property
    def axes(self) -> tuple[str, ...]:
        return tuple(self.nodes[0].attrs["axes"])

    @property
    def description(self) -> str:
        first, *others = self.nodes
        text = f"{self.name} over {', '.join(first.attrs['axes'])} {first.args[0].type}"
        more = f" and {len(others)} more" if others else ""
        by = first.attrs.get("algorithm")
        return text + more + (f" by {by}" if by else "")


@dataclass(frozen=True, eq=False)
class Send(_Step):
    """Copies values to another mesh, where they have `types`. It computes nothing."""

    types: tuple[TensorType, ...]
    kind = "send"

    @cached_property
    def graph(self) -> Graph:
        """A graph that returns its inputs, on the mesh that the values are sent to."""
        xs = tuple(input_node(t, f"b{b}") for b, t in zip(self.reads, self.types, strict=True))
        return Graph("send", xs, xs, xs)


@dataclass(frozen=True, eq=False)
class Region(_Step):
    """Runs `body` as one program of a slice of the mesh."""

    body: Schedule
    kind = "region"

    @property
    def graph(self) -> Graph:
        """The steps of its body as one graph."""
        return self.body.graph

    @property
    def runs(self) -> object:
        return self.body


@dataclass(frozen=True, eq=False)
class Loop(_Step):
    """Runs `body`, which has collectives, `length` times; if that is None, while the first carry is
    true.

    The body takes `consts` loop-invariant values, `carries` values that it returns updated, and a
    row of each other value, from the last row if it runs in `reverse`. The results are the final
    carries and the stacked other outputs of the body; `gives` are the indices of the results that
    are written.
    """

    body: Schedule
    length: int | None
    consts: int
    carries: int
    reverse: bool
    gives: tuple[int, ...]
    loc: str = ""
    scope: str = ""
    kind = "loop"

    @property
    def times(self) -> int:
        """The number of iterations; 1 for a loop without a length, whose number is not known."""
        return iterations(self.length)

    @cached_property
    def graph(self) -> Graph:
        """The loop as one node of a graph, and the results in `gives` as its outputs."""
        body, own = self.body.graph, self.consts + self.carries
        types = [n.type for n in body.inputs]
        types[own:] = [stacked(t, self.length) for t in types[own:]]
        xs = tuple(input_node(t, f"b{b}") for b, t in zip(self.reads, types, strict=True))
        ends = [n.type for n in body.outputs]
        ends[self.carries :] = [stacked(t, self.length) for t in ends[self.carries :]]
        attrs = {
            "body": body, "length": self.length, "consts": self.consts, "carries": self.carries,
            "reverse": self.reverse, "policy": "recompute",
        }  # fmt: skip
        loop = Node(scan.name, xs, tuple(ends), attrs, self.loc, self.scope)
        picks = tuple(
            Node(item.name, (loop,), (ends[k],), {"index": k}, self.loc, self.scope)
            for k in self.gives
        )
        return Graph(body.name, (*xs, loop, *picks), xs, picks, body.options)


Step = Compute | Collective | Send | Loop | Region


@dataclass(frozen=True, eq=False)
class Schedule:
    """The steps that a program runs, in order, and the buffers that they read and fill.

    `buffers` are types by number; the first ones hold the inputs, in order. `options` are those of
    the program and of the graph of each step. `donated` are inputs that the caller gives up: their
    memory is free after the last step that reads them. `table` is a pipeline's table and number of
    microbatches as text.
    """

    name: str
    mesh: Mesh | None
    buffers: tuple[TensorType, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    steps: tuple[Step, ...]
    options: ProgramOptions = PLAIN
    donated: tuple[int, ...] = ()
    table: str = ""

    @property
    def is_staged(self) -> bool:
        """Returns whether it spans several meshes, so that it cannot be one program: a pipeline."""
        own = (None, self.mesh)
        return bool(self.table) or any(
            isinstance(step, Send | Region)
            or any(self.buffers[b].mesh not in own for b in step.writes)
            for step in self.steps
        )

    def collectives(self) -> Iterator[tuple[Node, int]]:
        """Yields (node, number of runs) for each collective, also in loops and regions."""
        for step in self.steps:
            match step:
                case Collective():
                    yield from ((n, 1) for n in step.nodes)
                case Loop():
                    yield from ((n, times * step.times) for n, times in step.body.collectives())
                case Region():
                    yield from step.body.collectives()
                case Compute() | Send():
                    pass
                case _:
                    assert_never(step)

    def along(self, step: Send) -> tuple[str, ...]:
        """The axes of the mesh that `step` sends along: those that its source or target slice
        lacks."""
        ends = [t.mesh for t in (*step.types, *(self.buffers[b] for b in step.reads)) if t.mesh]
        return tuple(
            a for a in (self.mesh.axes if self.mesh else ()) if any(a not in m for m in ends)
        )

    def arrivals(self, step: Send) -> tuple[tuple[int, tuple[int, ...]], ...]:
        """For each value that `step` sends: (bytes that a device receives, devices that do not
        already hold their block)."""
        ends = zip((self.buffers[b].mesh for b in step.reads), step.types, strict=True)
        return tuple([(t.device_bytes, _lacking(mesh, t.mesh)) for mesh, t in ends])

    def received(self, step: Send) -> tuple[int, ...]:
        """The bytes that a device receives of each value that `step` sends; 0 if every target
        device already holds its block."""
        return tuple([size if devices else 0 for size, devices in self.arrivals(step)])

    @cached_property
    def graph(self) -> Graph:
        """The steps as one graph, in their order. The schedule must be on one mesh."""
        made = {b: input_node(self.buffers[b], f"b{b}") for b in self.inputs}
        inputs, nodes = tuple(made.values()), dict[Node, None]()
        for step in self.steps:
            new = dict(zip(step.graph.inputs, (made[b] for b in step.reads), strict=True))
            own = [n for n in step.graph.nodes if n.op != "input"]
            nodes.update(dict.fromkeys(copied(own, new)))
            made.update(zip(step.writes, (new[o] for o in step.graph.outputs), strict=True))
        outputs = tuple(made[b] for b in self.outputs)
        return Graph(self.name, (*inputs, *nodes), inputs, outputs, self.options)

    @cached_property
    def lifetimes(self) -> tuple[tuple[int, int], ...]:
        """For each buffer, (the step that fills it, the last step that reads it).

        An input has -1 as the first number. A buffer that is returned is alive to the end: its last
        step is the number of steps.
        """
        first = dict.fromkeys(range(len(self.buffers)), -1)
        last = dict.fromkeys(range(len(self.buffers)), -1)
        for i, step in enumerate(self.steps):
            first.update((b, i) for b in step.writes)
            last.update((b, i) for b in (*step.writes, *step.reads))
        last.update((b, len(self.steps)) for b in self.outputs)
        return tuple((first[b], last[b]) for b in range(len(self.buffers)))

    @cached_property
    def freed(self) -> tuple[tuple[int, ...], ...]:
        """For each step, the buffers that no later step reads, except inputs, which the caller
        owns."""
        out: list[list[int]] = [[] for _ in self.steps]
        for b, (_, last) in enumerate(self.lifetimes):
            if b not in self.inputs and 0 <= last < len(self.steps):
                out[last].append(b)
        return tuple(map(tuple, out))

    @cached_property
    def held_bytes(self) -> tuple[int, ...]:
        """For each step, the bytes per device of the buffers that are alive while it runs.

        Inputs are included; temporaries within a step are not. A result that reuses the memory of a
        donated input counts like any other (cost/memory.py is more exact).
        """
        size = [t.device_bytes for t in self.buffers]
        input_bytes = sum(size[b] for b in self.inputs)
        change = [0] * (len(self.steps) + 1)
        for b, (first, last) in enumerate(self.lifetimes):
            if b not in self.inputs:
                change[first] += size[b]
                if last < len(self.steps):
                    change[last + 1] -= size[b]
        held, now = [], input_bytes
        for i in range(len(self.steps)):
            now += change[i]
            held.append(now)
        return tuple(held)

    @property
    def peak_bytes(self) -> int:
        """The largest of `held_bytes`, in bytes per device."""
        return max(self.held_bytes, default=sum(self.buffers[b].device_bytes for b in self.inputs))

    @cached_property
    def waits(self) -> tuple[frozenset[int], ...]:
        """For each step, all steps that are complete before it begins, by buffers and `after`."""
        made = {b: i for i, s in enumerate(self.steps) for b in s.writes}
        out: list[frozenset[int]] = []
        for s in self.steps:
            direct = {made[b] for b in s.reads if b in made} | set(s.after)
            out.append(frozenset(direct).union(*(out[i] for i in direct)))
        return tuple(out)

    @cached_property
    def text(self) -> str:
        """The schedule as text, which `schedule.parse` reads back."""
        from .text import to_text  # a circle, as its parser makes these values

        return to_text(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return self  # it never changes

    def __reduce__(self) -> tuple[Any, ...]:
        from .text import parse

        return parse, (self.text,)

    def __str__(self) -> str:
        return self.text

    __repr__ = __str__

    @property
    def hash(self) -> str:
        """The hash of the text without its comments.

        Two processes with the same schedule have the same hash, even if the user's lines differ.
        """
        return hashlib.sha256("\n".join(self.lines).encode()).hexdigest()[:16]

    @property
    def lines(self) -> list[str]:
        """The lines of the text without comments; the first has the name and the options."""
        return [line.partition("  # ")[0].rstrip() for line in self.text.split("\n")]


@lru_cache(maxsize=1024)
def _lacking(a: Mesh | None, b: Mesh | None) -> tuple[int, ...]:
    """The devices of `b` that do not already hold their block of a value that has the same layout
    on `a`."""
    if a is None or b is None:
        one = b or a
        return tuple(one.ids) if one is not None else ()
    there = set(a.ids)

    def holds(device: int) -> bool:
        if device not in there:
            return False
        before, after = a.coords(device), b.coords(device)
        return all(before[axis] == after[axis] for axis in before.keys() & after.keys())

    return tuple(d for d in b.ids if not holds(d))


def need_schedule(name: str, value: object) -> Schedule:
    """`value` as a Schedule. Raises UsageError if it is anything else."""
    fix = "take the .schedule of a compiled function, or read a text: schedule.parse(text)"
    return taken(name, value, Schedule, fix)
