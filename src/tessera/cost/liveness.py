"""Which values inside a program hold a buffer, and for how long? A walk over its nodes.

What is computed element by element is computed where it is read and holds nothing, as long as that
repeats no dear work; everything else holds a buffer until its last reader is done. The rules are
those by which XLA fuses and plans buffers on a CPU, as far as they decide large ones.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, reduce
from operator import or_

from ..core.layout import TensorType
from ..ir.graph.node import Graph, Node, input_node
from ..ir.schedule.schedule import Schedule
from ..ops.redistribute import all_reduce

# Computed where they are read: what only makes or moves elements always, what is dear if it is read
# once.
MOVES = ("made", "turned", "moves")
FUSED = (*MOVES, "cheap", "dear")
# They take their operands element by element.
READERS = (*FUSED, "folds")
# A product takes these as they are made, or reads its operand in another order.
INTO_PRODUCTS = ("made", "turned")


@dataclass(frozen=True)
class Program:
    """Nodes in order, with what each reads; `given` are inputs, `results` what is handed back."""

    nodes: tuple[Node, ...]
    args: Mapping[Node, tuple[Node, ...]]
    given: tuple[Node, ...]
    results: tuple[Node, ...]


def of_graph(graph: Graph) -> Program:
    """The nodes of `graph`."""
    nodes: list[Node] = []
    args: dict[Node, tuple[Node, ...]] = {}
    stands: dict[Node, Node] = {}
    _add(graph, stands, nodes, args)
    results = tuple(stands.get(o, o) for o in graph.outputs)
    return Program(tuple(nodes), args, graph.inputs, results)


def of_schedule(schedule: Schedule) -> Program:
    """The steps of `schedule`, one after the other."""
    made: dict[int, Node] = {}
    for b in schedule.inputs:
        made[b] = input_node(schedule.buffers[b], f"b{b}")
    given = tuple(made.values())
    nodes: list[Node] = []
    args: dict[Node, tuple[Node, ...]] = {}
    for step in schedule.steps:
        stands = dict(zip(step.graph.inputs, (made[b] for b in step.reads), strict=True))
        _add(step.graph, stands, nodes, args)
        outs = [stands.get(o, o) for o in step.graph.outputs]
        made.update(zip(step.writes, outs, strict=True))
    return Program(tuple(nodes), args, given, tuple(made[b] for b in schedule.outputs))


def _add(
    graph: Graph,
    stands: dict[Node, Node],
    nodes: list[Node],
    args: dict[Node, tuple[Node, ...]],
) -> None:
    """Adds the nodes of `graph`; `stands` says what stands for a node of it."""
    for n in graph.nodes:
        if n.op != "input" and n not in args:
            nodes.append(n)
            args[n] = tuple(stands.get(a, a) for a in n.args)


class Liveness:
    """The buffers of one program, or of the body of a loop.

    `held` are the nodes with a buffer, in order; `spans` from when to when (indices into `held`),
    `bytes_of` how much. `widens`: products of narrow floats are made of operands widened to f32.
    `fresh`: results have buffers of their own, which hold other values before; but for `reuse`,
    which take the memory of an argument.
    """

    def __init__(
        self, program: Program, widens: bool = True, fresh: bool = False, body: bool = False,
        reuse: Container[Node] = (),
    ) -> None:  # fmt: skip
        self.program, self.widens, self.fresh, self.body = program, widens, fresh, body
        self.reuse = reuse
        self._readers: dict[Node, list[Node]] = {}
        for n in program.nodes:
            for a in program.args[n]:
                self._readers.setdefault(a, []).append(n)
        self._out = set(program.results)
        self._conv: dict[Node, bool] = {}
        self.held = [n for n in program.nodes if self._holds(n)]
        self._place = {n: i for i, n in enumerate(self.held)}
        self._reads = [self._sources(program.args[n]) for n in self.held]

    # -- which values have a buffer ---------------------------------------------------------------
    def _uses(self, n: Node) -> tuple[set[Node], bool]:
        """(who reads `n`, or a view of it; whether one of them is a result)."""
        found: set[Node] = set()
        todo, out = [n], False
        while todo:
            m = todo.pop()
            out = out or m in self._out
            for r in self._readers.get(m, ()):
                (todo.append if r.kind.memory == "view" else found.add)(r)
        return found, out

    def _holds(self, n: Node) -> bool:
        memory = n.kind.memory
        if memory == "view":
            return False
        if memory not in FUSED:
            return True
        uses, handed = self._uses(n)
        taken = (*READERS, "product") if memory in INTO_PRODUCTS else READERS
        if handed or any(u.kind.memory not in taken for u in uses):
            return True
        if memory in MOVES or len(uses) < 2:
            return False
        if memory == "dear" or self._of_conv(n):
            return True
        size = n.type.local_bytes
        return sum(a.type.local_bytes >= size for a in self.program.args[n]) > 1

    def _of_conv(self, n: Node) -> bool:
        """Whether `n` is made of a convolution's result, which comes in another order of dims."""
        known = self._conv.get(n)
        if known is None:
            args = self.program.args.get(n, ())
            cheap = n.kind.memory in ("view", "cheap")
            known = n.kind.memory == "conv" or (cheap and any(map(self._of_conv, args)))
            self._conv[n] = known
        return known

    def _sources(self, args: Sequence[Node]) -> set[Node]:
        """The buffers that are read where `args` are computed on the spot."""
        out: set[Node] = set()
        todo, seen = list(args), set[Node]()
        while todo:
            a = todo.pop()
            if a in seen:
                continue
            seen.add(a)
            if a in self._place:
                out.add(a)
            else:
                todo += self.program.args.get(a, ())
        return out

    # -- how large, how long ----------------------------------------------------------------------
    @cached_property
    def returned(self) -> set[Node]:
        """The buffers that are handed back."""
        return self._sources(self.program.results)

    @cached_property
    def bytes_of(self) -> dict[Node, int]:
        """A device's bytes of each buffer; those of the results are counted elsewhere."""
        out = {}
        for n in self.held:
            at = 0 if n in self.returned and not self.body else sum(map(_bytes, n.types))
            out[n] = at * 2 if at and self._widened(n) else at
        if self.fresh and not self.body:
            self._into_results(out)
        return out

    def _into_results(self, out: dict[Node, int]) -> None:
        """Takes out of `out` what lies in the buffers of results before those are written: the
        largest first, each in the first result that is large enough and free until then."""
        rooms = sorted(
            (n for n in self.returned if n not in self.reuse), key=self._place.__getitem__
        )
        ends = [self._place[n] for n in rooms]  # when each is written
        sizes = [sum(map(_bytes, n.types)) for n in rooms]
        by_size = sorted(range(len(rooms)), key=sizes.__getitem__)
        large = 0  # the rooms that are large enough, a bit each
        taken = _Rooms(len(self.held))
        for a in sorted(filter(out.__getitem__, self.held), key=lambda n: -out[n]):
            while by_size and sizes[by_size[-1]] >= out[a]:
                large |= 1 << by_size.pop()
            first, last = self.spans[a]
            i = bisect_left(ends, last)
            if i < len(ends) and ends[i] == last:  # it is written over `a`, or too early
                # The array of a partial result has a dim more: it is not written in place.
                over = rooms[i].kind.memory in FUSED and not rooms[i].type.partial
                i += not over or sizes[i] != out[a]
            free = (large & ~taken.at(first, last)) >> i
            if free:
                taken.take(first, last, (free & -free) << i)
                out[a] = 0

    def _widened(self, n: Node) -> bool:
        if not self.widens or not _narrow(n.type):
            return False
        if n.kind.memory == "product":
            return True
        readers = (u for m in (n, *self._items(n)) for u in self._uses(m)[0])
        return any(u.kind.memory == "product" or u.op == "scan" for u in readers)

    def _items(self, n: Node) -> list[Node]:
        return [r for r in self._readers.get(n, ()) if r.op == "item"]

    @cached_property
    def spans(self) -> dict[Node, tuple[int, int]]:
        """Per buffer the first and the last place in `held` at which it is there."""
        first = dict(self._place)
        last = dict(self._place)
        for i, reads in enumerate(self._reads):
            for a in reads:
                last[a] = i
        for n in self.held:
            if n.op == "scan":
                first[n] = 0  # what a loop stacks up is made ready at the beginning
            if n in self.returned and self.body:
                last[n] = len(self.held)
        for group in self._groups(last):
            end = self._place[group[-1]]
            for n in group:
                first[n], last[n] = end, max(last[n], end)
                for a in self._reads[self._place[n]]:
                    last[a] = max(last[a], end)
        return {n: (first[n], last[n]) for n in self.held}

    def _groups(self, last: Mapping[Node, int]) -> list[list[Node]]:
        """Sums over the same axes that the compiler makes one: they need nothing of each other,
        and nobody reads one of them before the last."""
        open_: dict[object, list[Node]] = {}
        done: list[list[Node]] = []
        readers: dict[Node, int] = {}
        for i, reads in enumerate(self._reads):
            for a in reads:
                readers.setdefault(a, i)
        for n in self.held:
            if n.op != all_reduce.name:
                continue
            key = n.attrs["axes"]
            group = open_.setdefault(key, [])
            if any(readers.get(m, len(self.held)) <= self._place[n] for m in group):
                done.append(group)
                group = open_[key] = []
            group.append(n)
        return [g for g in (*done, *open_.values()) if len(g) > 1]

    @cached_property
    def needs(self) -> list[int]:
        """Per place in `held`, the bytes that are there while it is computed."""
        change = [0] * (len(self.held) + 2)
        for n, (first, last) in self.spans.items():
            change[first] += self.bytes_of[n]
            change[last + 1] -= self.bytes_of[n]
        out, now = [], 0
        for i, n in enumerate(self.held):
            now += change[i]
            out.append(now + self._inside(n) - self._taken_over(i, n))
        return out

    def _inside(self, n: Node) -> int:
        """What `n` needs while it runs, besides its operands and results."""
        if n.kind.memory == "conv":  # its operands in another order
            return sum(a.type.local_bytes for a in self.program.args[n])
        bodies = [v for v in n.attrs.values() if isinstance(v, Graph)] if n.kind.bodies else []
        return max((body_bytes(b, self.widens) for b in bodies), default=0)

    def _taken_over(self, i: int, n: Node) -> int:
        """The bytes of an operand that nobody needs any more, into which `n` is written."""
        size = self.bytes_of[n]
        if n.kind.memory not in FUSED or not size:
            return 0
        ends = (a for a in self._reads[i] if self.spans[a][1] == i and self.bytes_of[a] == size)
        return size if next(ends, None) is not None else 0

    @property
    def peak(self) -> int:
        return max(self.needs, default=0)

    def at_peak(self) -> tuple[list[Node], list[Node]]:
        """The buffers that are there at the peak: (those that wait, those that are worked on)."""
        if not self.held:
            return [], []
        i = self.needs.index(self.peak)
        here = [n for n, (a, b) in self.spans.items() if a <= i <= b and self.bytes_of[n]]
        busy = {self.held[i], *self._reads[i]}
        # What a loop will stack up is not worked on before the loop.
        return [n for n in here if n not in busy], [n for n in here if n in busy]


class _Rooms:
    """Which rooms, a bit each, are taken at which of `n` times: a segment tree."""

    def __init__(self, n: int) -> None:
        self.n = n
        self.whole = [0] * (2 * n)  # taken at all times below a node
        self.some = [0] * (2 * n)  # at some

    def _nodes(self, first: int, last: int) -> tuple[list[int], set[int]]:
        """(those that make up the times from `first` to `last`, those above them)."""
        inside, above = list[int](), set[int]()
        low, high = first + self.n, last + self.n + 1
        while low < high:
            if low & 1:
                inside.append(low)
                low += 1
            if high & 1:
                high -= 1
                inside.append(high)
            low, high = low >> 1, high >> 1
        for m in inside:
            while (m := m >> 1) and m not in above:
                above.add(m)
        return inside, above

    def at(self, first: int, last: int) -> int:
        inside, above = self._nodes(first, last)
        return reduce(or_, [*(self.some[m] for m in inside), *(self.whole[m] for m in above)])

    def take(self, first: int, last: int, room: int) -> None:
        inside, above = self._nodes(first, last)
        for m in inside:
            self.whole[m] |= room
        for m in (*inside, *above):
            self.some[m] |= room


def body_bytes(body: Graph, widens: bool) -> int:
    """The peak of one turn of `body`."""
    return Liveness(of_graph(body), widens, body=True).peak


def _bytes(t: TensorType) -> int:
    return t.local_bytes


def _narrow(t: TensorType) -> bool:
    return t.dtype.is_float and t.dtype.bytes < 4
