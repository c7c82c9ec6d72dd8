"""Programs of functions that read values: a tree of segments, split at each read.

A `Segment` is the piece of program up to the next read (or to the end). After a read, the value
selects the next segment. For a value never seen before the function is recorded once more, with the
known values given, to find the rest. A segment computes only the nodes that its read (or the
function's results) depend on and that earlier segments have not computed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ...core.layout import TensorType
from ...core.options import ProgramOptions
from ...ir.graph.node import Graph, Node, copied, input_node
from ...ops.index_string import common_mesh
from ..math import random
from ..record.recorder import KEY_TYPE, Recorder, outside
from ..value.eager import program_of, run_graph
from ..value.engine import Program, engine
from ..value.tensor import Tensor

# The source of an input: the number of an argument, a tensor from outside, or the key (None).
Source = int | Tensor | None
MOST_CHILDREN = 64


@dataclass
class Recording:
    """A recording: its nodes, the source of each input, and the index of each node (`place`)."""

    name: str
    options: ProgramOptions
    nodes: list[Node]
    sources: dict[Node, Source]
    place: dict[Node, int] = field(init=False)

    def __post_init__(self) -> None:
        self.place = {n: i for i, n in enumerate(self.nodes)}


class Segment:
    """A piece of the program. `imports` and `exports` are indices of the values that it takes from
    earlier segments and gives to later ones."""

    def __init__(self) -> None:
        self.computed: set[int] = set()
        self.imports: list[int] = []
        self.exports: list[int] = []
        self.targets: list[int] = []
        self.sources: dict[int, Source] = {}
        self.recording: Recording | None = None
        self.replaced: dict[Node, Node] = {}
        self.children: dict[object, Segment] = {}
        self.written: Any = None  # the results of the call, if the function ends here
        self.donate: frozenset[int] = frozenset()
        self.after = False  # whether a read comes before it
        self._program: Program | None = None

    def define(
        self,
        recording: Recording,
        replaced: dict[Node, Node],
        targets: Iterable[Node],
        before: Sequence[Segment],
    ) -> None:
        """Sets the nodes that this segment computes for `targets`, after the segments `before`.
        Raises MeshError if the targets are on several meshes."""
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
                # One result of a node in an earlier segment: that segment extracts the item.
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

    def use_program(
        self,
        recording: Recording,
        inputs: Sequence[Node],
        results: Sequence[Node],
        program: Program,
    ) -> None:
        """Makes `program`, which computes `results` from `inputs`, the program of this segment."""
        place = recording.place
        self.recording, self.imports = recording, [place[n] for n in inputs]
        self.sources = {place[n]: recording.sources[n] for n in inputs}
        self.targets = [place.get(n, 0) for n in results]
        self._program = program

    def program(self) -> Program:
        if self._program is None:
            donate = [k for k, i in enumerate(self.imports) if i in self.donate]
            # A segment before a read ran while it was recorded; one after a read is recorded for
            # each value, and is mostly the same: both are cached by graph.
            if self.after or self.written is None:
                self._program = program_of(self.graph, donate)
            else:
                self._program = engine().compile(self.graph, donate)
        return self._program


def value_key(value: np.ndarray[Any, Any]) -> object:
    return (value.dtype.name, value.shape, value.tobytes())


class Run:
    """One call on its path through the tree of segments."""

    def __init__(self, root: Segment, source: Callable[[Source], tuple[Any, TensorType]]) -> None:
        self.segment: Segment | None = root
        self.path: list[Segment] = []
        self.values: list[np.ndarray[Any, Any]] = []
        self.env: dict[int, tuple[Any, TensorType]] = {}
        self.source = source
        # (written, results, their types), once the end of the function is reached.
        self.done: list[tuple[Any, list[Any], tuple[TensorType, ...]]] = []

    def go(self) -> None:
        """Runs to the end, or to a value that has no segment yet."""
        while self.segment is not None and self.segment.recording is not None:
            b = self.segment
            program = b.program()
            args = [self.env[i] if i in self.env else self.source(b.sources[i]) for i in b.imports]
            arg_types, k = tuple(t for _, t in args), len(b.targets)
            ends: list[list[Any]] = []
            try:
                outs = program([d for d, _ in args], arg_types, ends)
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
    """Returns (the segments along `values`, the segment after the last value); new ones are
    created."""
    path, at = [], root
    for v in values:
        path.append(at)
        if len(at.children) >= MOST_CHILDREN and value_key(v) not in at.children:
            at.children.pop(next(iter(at.children)))  # the oldest child
        at = at.children.setdefault(value_key(v), Segment())
    return path, at


def define(
    root: Segment, reads: Reads, rec: Recording, replaced: dict[Node, Node], results: Sequence[Node]
) -> Segment:
    """Defines the segments along the reads of a recording that ended with `results`; its nodes are
    `replaced`. Returns the last segment."""
    way, last = grow(root, reads.values[: len(reads.nodes)])
    for k, (segment, (node, by_then)) in enumerate(zip(way, reads.nodes, strict=True)):
        if segment.recording is None:
            segment.define(rec, by_then, [node], way[:k])
    last.define(rec, replaced, results, way)
    return last


# -- values ---------------------------------------------------------------------------------------
def held(where: Source, tensors: Sequence[Any]) -> Any:
    """Returns the tensor of the source `where` among these arguments; None for the key."""
    return tensors[where] if isinstance(where, int) else where


def source_of(tensors: Sequence[Any]) -> Callable[[Source], tuple[Any, TensorType]]:
    """Returns a function from a source to its (array, type), for a call with these tensors."""
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
    """The reads of a recorded function: the `values` known from earlier calls, then new values,
    computed from the tensors of `arguments()`."""

    values: list[np.ndarray[Any, Any]] = field(default_factory=list)
    arguments: Callable[[], Sequence[Tensor]] = tuple
    # (node read, the nodes replaced by then).
    nodes: list[tuple[Node, dict[Node, Node]]] = field(default_factory=list)
    sources: dict[Node, Source] = field(default_factory=dict)  # of the inputs

    def begin(self) -> None:
        """Clears the state of an earlier recording."""
        self.nodes.clear()
        self.sources.clear()

    def __call__(self, r: Recorder, node: Node) -> np.ndarray[Any, Any]:
        whole = r.builder.redistribute(node, node.type.replicated(), "to be read")
        self.nodes.append((whole, dict(r.builder.replaced)))
        if len(self.nodes) > len(self.values):
            self.values.append(self._now(r, whole))
        return self.values[len(self.nodes) - 1]

    def _now(self, r: Recorder, node: Node) -> np.ndarray[Any, Any]:
        """Computes the value of `node`, by running all nodes that it depends on, in the middle of
        the recording."""
        known = {**self.sources, **{n: t for t, n in r.captured}}
        if r.key is not None:
            known[r.key] = None
        segment = Segment()
        rec = Recording(r.builder.name, r.options, list(r.builder.nodes), known)
        segment.define(rec, r.builder.replaced, [node], [])
        source = source_of(self.arguments())
        values = [Tensor(*source(segment.sources[i])) for i in segment.imports]
        with outside(r):  # the program may call the user's code on the host
            return run_graph(segment.graph, values)[0].numpy()
