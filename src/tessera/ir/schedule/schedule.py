"""In which order, on which stream, with which buffers? A `Schedule` is the program as steps.

A step runs a small graph: on a compute stream one without collectives, on a communication stream
one of collectives only. Steps hand values to each other in buffers. What a step reads it waits for;
`after` names further steps that it must follow. Everything else may overlap.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property

from ...core.layout import TensorType
from ...core.mesh import Mesh
from ...core.options import PLAIN, ProgramOptions
from ..graph.node import Graph, Node

# Streams: work without collectives, collectives alone, work with its collectives inside (a stage of
# a pipeline), and values on their way to another mesh.
COMPUTE, COMM, FUSED, SEND = "compute", "comm", "fused", "send"


@dataclass(frozen=True, eq=False, slots=True)
class Step:
    """One step of a schedule: runs `graph` on the buffers `reads` and fills the buffers `writes`.

    There is one read per input of the graph. `after` names the steps that it waits for, `stage` the
    stage of a pipeline, `note` the purpose of the step.
    """

    graph: Graph
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    stream: str = COMPUTE
    stage: int = 0
    after: tuple[int, ...] = ()
    note: str = ""

    @property
    def nodes(self) -> list[Node]:
        """The nodes of its graph without the inputs."""
        return [n for n in self.graph.nodes if n.op != "input"]

    @property
    def collectives(self) -> list[Node]:
        """The collectives of its graph, without those in the bodies of loops."""
        return [n for n in self.graph.nodes if n.is_collective]

    @property
    def kind(self) -> str:
        """ "compute", "loop" (with collectives in its body), "send", "fused", or its collectives'
        names."""
        if self.stream in (FUSED, SEND):
            return self.stream
        own = dict.fromkeys(n.op for n in self.collectives)
        if own:
            return "+".join(own)
        return "loop" if any(True for _ in self.graph.collectives()) else "compute"

    @property
    def what(self) -> str:
        """What the step does, as text, e.g. "all_reduce over dp f32[8] +dp by ring"."""
        own = self.collectives if self.stream == COMM else []
        if not own:
            return self.kind
        first = own[0]
        text = f"{first.op} over {', '.join(first.attrs['axes'])} {first.args[0].type}"
        more = f" and {len(own) - 1} more" if len(own) > 1 else ""
        by = first.attrs.get("algorithm")
        return text + more + (f" by {by}" if by else "")

    @property
    def at(self) -> str:
        """The user's `file:line` of the first node that has one, or ""."""
        return next((n.loc for n in self.nodes if n.loc), "")


@dataclass(frozen=True, eq=False)
class Schedule:
    """The steps that a program runs, in order, and the buffers that they read and fill.

    `buffers` are types by number; the first ones hold the inputs, in order. `options` are those of
    the program and of the graph of each step. `donated` are inputs that the caller gives up: their
    memory is free after the last step that reads them. `table` names a pipeline's table and the
    number of its microbatches.
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
        """Whether it spans several meshes, so that no one program can be all of it: a pipeline."""
        return any(step.stream in (FUSED, SEND) for step in self.steps)

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
        """For each step, the buffers that no later step reads; inputs belong to the caller."""
        out: list[list[int]] = [[] for _ in self.steps]
        for b, (_, last) in enumerate(self.lifetimes):
            if b not in self.inputs and 0 <= last < len(self.steps):
                out[last].append(b)
        return tuple(map(tuple, out))

    @cached_property
    def held_bytes(self) -> tuple[int, ...]:
        """For each step, the bytes per device of the buffers that are alive while it runs.

        Inputs are included. The memory that a step needs for its own intermediates is not. A result
        that reuses the memory of a donated input counts like any other (cost/memory.py is more
        exact).
        """
        size = [t.local_bytes for t in self.buffers]
        given = sum(size[b] for b in self.inputs)
        change = [0] * (len(self.steps) + 1)
        for b, (first, last) in enumerate(self.lifetimes):
            if b not in self.inputs:
                change[first] += size[b]
                if last < len(self.steps):
                    change[last + 1] -= size[b]
        held, now = [], given
        for i in range(len(self.steps)):
            now += change[i]
            held.append(now)
        return tuple(held)

    @property
    def peak_bytes(self) -> int:
        """The largest of `held_bytes`, in bytes per device."""
        return max(self.held_bytes, default=sum(self.buffers[b].local_bytes for b in self.inputs))

    @cached_property
    def waits(self) -> tuple[frozenset[int], ...]:
        """Per step, all steps that are done before it begins, by buffers and `after`."""
        made = {b: i for i, s in enumerate(self.steps) for b in s.writes}
        out: list[frozenset[int]] = []
        for s in self.steps:
            direct = {made[b] for b in s.reads if b in made} | set(s.after)
            out.append(frozenset(direct).union(*(out[i] for i in direct)))
        return tuple(out)

    @cached_property
    def text(self) -> str:
        """The schedule as text, which `schedule.parse` reads back."""
        from .text import to_text

        return to_text(self)

    def __str__(self) -> str:
        return self.text

    @property
    def hash(self) -> str:
        """The hash of its text without the comments.

        Two processes with the same schedule have the same hash, wherever the user's lines are.
        """
        bare = "\n".join(line.partition("  # ")[0].rstrip() for line in self.text.split("\n"))
        return hashlib.sha256(bare.encode()).hexdigest()[:16]
