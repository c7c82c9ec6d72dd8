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
    """Runs `graph` on the buffers `reads` (one per input) and fills the buffers `writes`.

    `stage` is the stage of a pipeline, `note` what the step is there for.
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
        """What it runs, inputs left out."""
        return [n for n in self.graph.nodes if n.op != "input"]

    @property
    def collectives(self) -> list[Node]:
        """The collectives it runs itself, those in loops left out."""
        return [n for n in self.graph.nodes if n.is_collective]

    @property
    def kind(self) -> str:
        """compute, loop (with collectives in its body), send, fused, or its collectives' names."""
        if self.stream in (FUSED, SEND):
            return self.stream
        own = dict.fromkeys(n.op for n in self.collectives)
        if own:
            return "+".join(own)
        return "loop" if any(True for _ in self.graph.collectives()) else "compute"

    @property
    def what(self) -> str:
        """What it does, in words: all_reduce over dp f32[8] +dp by ring."""
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
        """The user's line of the first node that has one."""
        return next((n.loc for n in self.nodes if n.loc), "")


@dataclass(frozen=True, eq=False)
class Schedule:
    """`buffers` are types by number; the first hold the inputs, in order. `options` are those of
    the program, and of the graph of each step. `donated` are inputs that the caller gives up: their
    memory is free after the last step that reads them. `table` names a pipeline's table and the
    number of its microbatches."""

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
        """Per buffer (the step that fills it, -1 for inputs; the last step that reads it).

        What is given back is alive to the end: its last step is the number of steps.
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
        """Per step, the buffers that nobody reads after it; inputs are the caller's."""
        out: list[list[int]] = [[] for _ in self.steps]
        for b, (_, last) in enumerate(self.lifetimes):
            if b not in self.inputs and 0 <= last < len(self.steps):
                out[last].append(b)
        return tuple(map(tuple, out))

    @cached_property
    def held_bytes(self) -> tuple[int, ...]:
        """Per step, the bytes that buffers hold on a device while it runs, inputs included. What a
        step needs inside itself comes on top; what takes the memory of an argument that the caller
        gave up counts like any other (cost/memory.py knows better)."""
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
        """The most that `held_bytes` comes to."""
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
        from .text import to_text

        return to_text(self)

    def __str__(self) -> str:
        return self.text

    @property
    def hash(self) -> str:
        """Of its text without the comments: two processes that hold the same schedule have the
        same, wherever their lines stand."""
        bare = "\n".join(line.partition("  # ")[0].rstrip() for line in self.text.split("\n"))
        return hashlib.sha256(bare.encode()).hexdigest()[:16]
