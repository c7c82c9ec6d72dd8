"""What happens when a recorded function reads a value? It is cut there into a tree of programs.

A `Segment` is the piece of program up to the next read (or to the end). After a read, the value
read chooses the next segment; a value never seen before means recording the function once more,
with the known values given, to learn what follows. Pieces are cut by need: a segment computes what
its read (or the function's results) depend on and earlier segments have not computed already.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..core.layout import TensorType
from ..core.options import ProgramOptions
from ..ir.graph.node import Graph, Node, copied, input_node
from ..ops.index_string import common_mesh
from . import random
from .eager import program_of, run_graph
from .engine import Program, engine
from .record import KEY_TYPE, Recorder, outside
from .tensor import Tensor

# Where an input's value comes from: an argument's number, a tensor from outside, or the key.
Source = int | Tensor | None
MOST_CHILDREN = 64


@dataclass
class Recording:
    """What one recording gave: its nodes, its inputs' sources, and what stands for what."""

    name: str
    options: ProgramOptions
    nodes: list[Node]
    sources: dict[Node, Source]
    place: dict[Node, int] = field(init=False)

    def __post_init__(self) -> None:
        self.place = {n: i for i, n in enumerate(self.nodes)}


class Segment:
    """One piece: `imports` and `exports` are places of values it takes and hands on."""

    def __init__(self) -> None:
        self.computed: set[int] = set()
        self.imports: list[int] = []
        self.exports: list[int] = []
        self.targets: list[int] = []
        self.sources: dict[int, Source] = {}
        self.recording: Recording | None = None
        self.replaced: dict[Node, Node] = {}
        self.children: dict[object, Segment] = {}
        self.written: Any = None  # what the call gives back; set where the function ends here
        self.donate: frozenset[int] = frozenset()
        self.after = False  # a read
        self._program: Program | None = None

    def define(
        self,
        recording: Recording,
        replaced: dict[Node, Node],
        targets: Iterable[Node],
        before: Sequence[Segment],
    ) -> None:
        """Settles what this segment computes for `targets`, after the segments `before`. Raises
        MeshError if these are on several meshes, of which a program has one."""
        self.recording, self.replaced, self.after = recording, dict(replaced), bool(before)
        owner = {i: b for b in before for i in b.computed}
        imports: dict[int, None] = {}
        roots = [replaced.get(t, t) for t in targets]
        common_mesh(recording.name, [r.type for r in roots], "result")
        todo = list(roots)
        while todo:
            n = todo.pop()
            i = recording.place[n]
            if i in self.computed or i in imports:
                continue
            holder = owner.get(i)
            if n.op == "item" and holder is None:
                # A result of a node of several that ran before: that segment picks it out.
                holder = owner.get(recording.place[replaced.get(n.args[0], n.args[0])])
                if holder is not None:
                    holder.computed.add(i)
            if n.op == "input":
                imports[i] = None
                self.sources[i] = recording.sources[n]
            elif holder is not None:
                imports[i] = None
                holder.hand_on(i)
            else:
                self.computed.add(i)
                todo.extend(replaced.get(a, a) for a in n.args)
        self.imports = sorted(imports)
        self.targets = [recording.place[r] for r in roots]

    def hand_on(self, place: int) -> None:
        if place not in self.exports:
            self.exports.append(place)
            self._program = None

    @property
    def graph(self) -> Graph:
        """The graph of this segment alone."""
        rec = self.recording
        assert rec is not None
        new: dict[Node, Node] = {}
        for i in self.imports:
            n = rec.nodes[i]
            new[n] = n if n.op == "input" else input_node(n.type, f"v{i}")
        inputs = tuple(new.values())
        nodes = copied([rec.nodes[i] for i in sorted(self.computed)], new, self.replaced)
        outs = tuple(new[rec.nodes[i]] for i in (*self.targets, *self.exports))
        return Graph(rec.name, (*inputs, *nodes), inputs, outs, rec.options)

    def stand_in(
        self, recording: Recording, given: Sequence[Node], results: Sequence[Node], program: Program
    ) -> None:
        """Takes `program`, which gives `results` from `given`, for what was recorded."""
        place = recording.place
        self.recording, self.imports = recording, [place[n] for n in given]
        self.sources = {place[n]: recording.sources[n] for n in given}
        self.targets = [place.get(n, 0) for n in results]
        self._program = program

    def program(self) -> Program:
        if self._program is None:
            donate = [k for k, i in enumerate(self.imports) if i in self.donate]
            # What comes before a read ran while it was recorded; what comes after it is recorded
            # for each value, and is mostly the same.
            if self.after or self.written is None:
                self._program = program_of(self.graph, donate)
            else:
                self._program = engine().compile(self.graph, donate, measure=True)
        return self._program


def value_key(value: np.ndarray[Any, Any]) -> object:
    return (value.dtype.name, value.shape, value.tobytes())


class Run:
    """One call on its way through the tree."""

    def __init__(self, root: Segment, source: Callable[[Source], tuple[Any, TensorType]]) -> None:
        self.segment: Segment | None = root
        self.path: list[Segment] = []
        self.values: list[np.ndarray[Any, Any]] = []
        self.env: dict[int, tuple[Any, TensorType]] = {}
        self.source = source
        # (what was written down, results, their types), once the function's end was reached.
        self.done: list[tuple[Any, list[Any], tuple[TensorType, ...]]] = []

    def go(self) -> None:
        """Runs to the end, or to where the way is not known."""
        while self.segment is not None and self.segment.recording is not None:
            b = self.segment
            program = b.program()
            given = [self.env[i] if i in self.env else self.source(b.sources[i]) for i in b.imports]
            have, k = tuple(t for _, t in given), len(b.targets)
            ends: list[list[Any]] = []
            try:
                outs = program([d for d, _ in given], have, ends)
            finally:
                if b.written is not None:
                    self.done += [(b.written, x[:k], program.types[:k]) for x in ends]
            if self.done:
                return
            self.env.update(
                (i, (d, t)) for i, d, t in zip(b.exports, outs[k:], program.types[k:], strict=True)
            )
            value = engine().fetch(outs[0], program.types[0])
            self.path.append(b)
            self.values.append(value)
            self.segment = b.children.get(value_key(value))


def grow(root: Segment, values: Sequence[np.ndarray[Any, Any]]) -> tuple[list[Segment], Segment]:
    """The segments along `values`, made where they are new, and the one after the last value."""
    path, at = [], root
    for v in values:
        path.append(at)
        if len(at.children) >= MOST_CHILDREN and value_key(v) not in at.children:
            at.children.pop(next(iter(at.children)))  # the oldest way
        at = at.children.setdefault(value_key(v), Segment())
    return path, at


def define(
    root: Segment, reads: Reads, rec: Recording, replaced: dict[Node, Node], results: Sequence[Node]
) -> Segment:
    """Settles the segments along what was read, of a recording that ended with `results`, in which
    nodes are `replaced`. Gives the last."""
    way, last = grow(root, reads.values[: len(reads.nodes)])
    for k, (segment, (node, by_then)) in enumerate(zip(way, reads.nodes, strict=True)):
        if segment.recording is None:
            segment.define(rec, by_then, [node], way[:k])
    last.define(rec, replaced, results, way)
    return last


# -- values ---------------------------------------------------------------------------------------
def held(where: Source, tensors: Sequence[Any]) -> Any:
    """The tensor that `where` means among these arguments; None is the key."""
    return tensors[where] if isinstance(where, int) else where


def source_of(tensors: Sequence[Any]) -> Callable[[Source], tuple[Any, TensorType]]:
    """What gives (array, type) of a source, for a call with these tensors."""
    key: list[Any] = []

    def source(where: Source) -> tuple[Any, TensorType]:
        if where is None:
            if not key:
                key.append(engine().place(random.next_key(), KEY_TYPE))
            return key[0], KEY_TYPE
        t = held(where, tensors)
        return t.stored, t.type

    return source


@dataclass(eq=False)
class Reads:
    """What a recorded function reads on the way: the `values` that are known of earlier calls, then
    those of the call with the tensors that `given` gives."""

    values: list[np.ndarray[Any, Any]] = field(default_factory=list)
    given: Callable[[], Sequence[Tensor]] = tuple
    # What was read, and what stood for what by then.
    nodes: list[tuple[Node, dict[Node, Node]]] = field(default_factory=list)
    sources: dict[Node, Source] = field(default_factory=dict)  # of the inputs

    def begin(self) -> None:
        """Forgets what a recording has left in it."""
        self.nodes.clear()
        self.sources.clear()

    def __call__(self, r: Recorder, node: Node) -> np.ndarray[Any, Any]:
        whole = r.builder.redistribute(node, node.type.replicated(), "to be read")
        self.nodes.append((whole, dict(r.builder.replaced)))
        if len(self.nodes) > len(self.values):
            self.values.append(self._now(r, whole))
        return self.values[len(self.nodes) - 1]

    def _now(self, r: Recorder, node: Node) -> np.ndarray[Any, Any]:
        """The value of `node`, by running everything it depends on, while recording goes on."""
        known = {**self.sources, **{n: t for t, n in r.captured}}
        if r.key is not None:
            known[r.key] = None
        segment = Segment()
        rec = Recording(r.builder.name, r.options, list(r.builder.nodes), known)
        segment.define(rec, r.builder.replaced, [node], [])
        source = source_of(self.given())
        values = [Tensor(*source(segment.sources[i])) for i in segment.imports]
        with outside(r):  # the program may call what the user has on the host
            return run_graph(segment.graph, values)[0].numpy()
