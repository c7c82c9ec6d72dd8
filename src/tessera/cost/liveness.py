"""Lifetimes of a program's buffers, and the peak of their bytes.

A buffer is live from the node that fills it until its last reader has run. The rules are those of
XLA's buffer assignment on a CPU, as far as they affect large buffers; where a GPU's differ, an
argument says so.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Container, Iterable, Mapping, Sequence
from functools import cached_property, reduce
from operator import or_
from typing import NamedTuple

from ..core.layout import TensorType
from ..ir.graph.node import Graph, Node
from ..ops.control import after, in_memory
from ..ops.redistribute import all_reduce
from .program import Program, of_graph

WORKSPACE = 32 << 20  # of a GPU's library of products (cuBLAS on Hopper), in bytes


class Liveness:
    """The buffers of one program, or of the body of a loop.

    `held` are the nodes with a buffer, in order; `spans` has the first and last live index (into
    `held`) of each, `bytes_of` its size. `widens`: products of narrow floats widen their operands
    to f32. `fresh`: results have their own buffers, which may hold other values before; except
    those in `reuse`, which take the memory of an argument. `gpu`: elementwise values are computed
    again in each reader, also expensive ones and in sums, and a product has a WORKSPACE.
    """

    def __init__(
        self, program: Program, widens: bool = True, fresh: bool = False, body: bool = False,
        reuse: Container[Node] = (), gpu: bool = False,
    ) -> None:  # fmt: skip
        self.program, self.widens, self.fresh, self.body = program, widens, fresh, body
        self.reuse, self.gpu = reuse, gpu
        self.held = buffered(program, gpu)
        self._place = {n: i for i, n in enumerate(self.held)}
        self._reads = [self._sources(program.args[n]) for n in self.held]

    def _sources(self, args: Iterable[Node]) -> set[Node]:
        """Returns the buffers that are read when `args` are computed in their reader."""
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

    @cached_property
    def returned(self) -> set[Node]:
        """The buffers of the results."""
        return self._sources(self.program.results)

    # -- sizes ------------------------------------------------------------------------------------
    @cached_property
    def bytes_of(self) -> dict[Node, int]:
        """The bytes of each buffer on a device; those of the results are counted elsewhere."""
        if self.body:
            return {n: self._size(n) for n in self.held}
        sizes = {n: 0 if n in self.returned else self._size(n) for n in self.held}
        if self.fresh:
            sizes.update(dict.fromkeys(self._in_results(sizes), 0))
        return sizes

    def _size(self, n: Node) -> int:
        size = 0 if n.op == in_memory.name and n.attrs["space"] == "host" else _bytes(n)
        return size * 2 if size and self._is_widened(n) else size

    def _is_widened(self, n: Node) -> bool:
        if not self.widens or not _is_narrow(n.type):
            return False
        if n.kind.memory == "product":
            return True
        items = (r for r in self.program.readers.get(n, ()) if r.op == "item")
        readers = (u for m in (n, *items) for u in self.program.uses(m)[0])
        return any(u.kind.memory == "product" for u in readers)

    def _in_results(self, sizes: Mapping[Node, int]) -> set[Node]:
        """Returns the nodes that are stored in the buffers of results."""
        results = [
            Buffer(n, _bytes(n), i, len(self.held))
            for i, n in enumerate(self.held)
            if n in self.returned and n not in self.reuse
        ]
        values = [Buffer(n, size, *self.spans[n]) for n, size in sizes.items() if size]
        return lent(results, values, len(self.held))

    # -- lifetimes --------------------------------------------------------------------------------
    @cached_property
    def spans(self) -> dict[Node, tuple[int, int]]:
        """The first and the last index in `held` at which each buffer is live."""
        first = dict(self._place)
        last = dict(self._place)
        for i, reads in enumerate(self._reads):
            last.update(dict.fromkeys(reads, i))
        for n in self.held:
            if n.op == "scan":
                first[n] = 0  # a loop's stacks are allocated at the beginning
            if n in self.returned and self.body:
                last[n] = len(self.held)
        for group in self._combined_sums():
            end = self._place[group[-1]]
            for n in group:
                first[n], last[n] = end, max(last[n], end)
                for a in self._reads[self._place[n]]:
                    last[a] = max(last[a], end)
        return {n: (first[n], last[n]) for n in self.held}

    def _combined_sums(self) -> list[list[Node]]:
        """Returns groups of sums over the same axes that the compiler combines: they are
        independent, and no reader runs before the last of them."""
        open_: dict[object, list[Node]] = {}
        done: list[list[Node]] = []
        first_reader: dict[Node, int] = {}
        for i, reads in enumerate(self._reads):
            for a in reads:
                first_reader.setdefault(a, i)
        for n in self.held:
            if n.op != all_reduce.name:
                continue
            key = n.attrs["axes"]
            group = open_.setdefault(key, [])
            if any(first_reader.get(m, len(self.held)) <= self._place[n] for m in group):
                done.append(group)
                group = open_[key] = []
            group.append(n)
        return [g for g in (*done, *open_.values()) if len(g) > 1]

    # -- the peak ---------------------------------------------------------------------------------
    @cached_property
    def needs(self) -> list[int]:
        """The live bytes at each index in `held`, while that node is computed."""
        change = [0] * (len(self.held) + 2)
        for n, (first, last) in self.spans.items():
            change[first] += self.bytes_of[n]
            change[last + 1] -= self.bytes_of[n]
        out, now = [], 0
        for i, n in enumerate(self.held):
            now += change[i]
            out.append(now + self._inside(i, n) - self._taken_over(i, n))
        return out

    def _inside(self, i: int, n: Node) -> int:
        """Returns the bytes that `n` needs while it runs, besides its operands and results."""
        if n.kind.bodies:
            bodies = [v for v in n.attrs.values() if isinstance(v, Graph)]
            return max((body_bytes(b, self.widens, self.gpu) for b in bodies), default=0)
        own = n.kind.scratch(tuple(a.type for a in n.args), n.types, n.attrs)
        if self.gpu and n.kind.memory == "product":
            return own + WORKSPACE
        if not own:
            return 0
        # The scratch copy is made first; the result may then reuse memory of operands read last.
        gone = sum(self.bytes_of[a] for a in self._reads[i] if self.spans[a][1] == i)
        return own - min(own, gone, self.bytes_of[n])

    def _taken_over(self, i: int, n: Node) -> int:
        """Returns the bytes of an operand without later readers whose buffer `n` is written
        into."""
        size = self.bytes_of[n]
        if not n.kind.fuses or not size:
            return 0
        ends = (a for a in self._reads[i] if self.spans[a][1] == i and self.bytes_of[a] == size)
        return size if next(ends, None) is not None else 0

    @property
    def peak(self) -> int:
        return max(self.needs, default=0)

    def waiting(self) -> list[tuple[TensorType, int, bool]]:
        """Returns (type, bytes, whether a loop made it) of the values that wait for a later reader
        at the peak. This includes values that the loop running then reads or stacks row by row, and
        the stacks of later loops."""
        if not self.held:
            return []
        i = self.needs.index(self.peak)
        running, busy = self.held[i], {self.held[i], *self._reads[i]}
        stacks: tuple[TensorType, ...] = ()
        if running.op == "scan":
            operands = running.attrs["consts"] + running.attrs["carries"]
            args = self.program.args[running]
            busy -= self._sources(args[operands:]) - self._sources(args[:operands])
            stacks = running.types[running.attrs["carries"] :]
        rows: list[tuple[TensorType, int, bool]] = []
        for n, (first, last) in self.spans.items():
            if first <= i <= last and self.bytes_of[n]:
                types = n.types if n not in busy else stacks if n is running else ()
                wide = self.bytes_of[n] // _bytes(n)
                rows += [(t, t.local_bytes * wide, n.op == "scan") for t in types]
        return rows


def by_rows(graph: Graph) -> set[Node]:
    """Returns the inputs and outputs of `graph` that a loop reads or stacks row by row."""
    found: set[Node] = set()
    for n in graph.nodes:
        if n.op == "scan":
            found.update(map(_viewed_node, n.args[n.attrs["consts"] + n.attrs["carries"] :]))
    for n in graph.outputs:
        item = _viewed_node(n)
        loop = item.args[0] if item.op == "item" else item
        if loop.op == "scan" and item.attrs["index"] >= loop.attrs["carries"]:
            found.add(n)
    return found


def _viewed_node(n: Node) -> Node:
    """Returns the node that `n` is a view of."""
    while n.op != "item" and n.kind.memory == "view":
        n = n.args[0]
    return n


def body_bytes(body: Graph, widens: bool, gpu: bool) -> int:
    """Returns the peak of one iteration of `body`."""
    return Liveness(of_graph(body), widens, body=True, gpu=gpu).peak


def _bytes(n: Node) -> int:
    return sum(t.local_bytes for t in n.types)


def _is_narrow(t: TensorType) -> bool:
    return t.dtype.is_float and t.dtype.bytes < 4


# Buffers after the compiler's fusion: the values of a program that are stored in memory.
#
# An elementwise value is computed in its readers and has no buffer, unless that repeats expensive
# work. The rules are those of XLA on a CPU, as far as they affect large buffers. The attribute
# `memory` of an op (ops/op.py) is its class in these rules.


def buffered(program: Program, gpu: bool = False) -> list[Node]:
    """Returns the nodes of `program` whose values get a buffer, in order."""
    fusion = _Fusion(program, gpu)
    return [n for n in program.nodes if fusion.has_buffer(n)]


class _Fusion:
    def __init__(self, program: Program, gpu: bool) -> None:
        self.program, self.gpu = program, gpu
        self._conv: dict[Node, bool] = {}

    def has_buffer(self, n: Node) -> bool:
        if self.gpu and n.op in (in_memory.name, after.name):
            return n.op == in_memory.name  # a copy; a barrier on a GPU copies nothing
        if n.kind.memory == "view":
            return False
        if not n.kind.fuses:
            return True
        readers, is_result = self.program.uses(n)
        if is_result or not all(_fuses_into(n, r, self.gpu) for r in readers):
            return True
        return len(readers) > 1 and self._is_expensive(n)

    def _is_expensive(self, n: Node) -> bool:
        """Returns whether `n` is stored rather than recomputed for each reader."""
        match n.kind.memory:
            case "expensive":
                return not self.gpu
            case "cheap":
                size = n.type.local_bytes
                as_large = sum(a.type.local_bytes >= size for a in {*self.program.args[n]})
                return as_large > 1 or self._of_conv(n)
            case _:
                return False

    def _of_conv(self, n: Node) -> bool:
        """Returns whether `n` is computed from a convolution's result, which has another order of
        dims."""
        known = self._conv.get(n)
        if known is None:
            cheap = n.kind.memory in ("view", "cheap")
            args = self.program.args.get(n, ())
            known = n.kind.memory == "conv" or (cheap and any(map(self._of_conv, args)))
            self._conv[n] = known
        return known


WINDOW = 32  # largest dim that is reduced at once; a larger one is read in windows from a buffer


def _fuses_into(n: Node, reader: Node, gpu: bool) -> bool:
    """Returns whether `reader` computes `n` element by element. A product does so for values
    without operands, and reads a transposed operand in the other order of dims. On a GPU every sum
    does so."""
    if gpu and reader.op == after.name:
        return False
    match reader.kind.memory:
        case "product":
            return n.kind.memory in ("created", "transposed")
        case "reduced":
            if gpu:
                return True
            size = reader.args[0].type.local_shape
            return all(size[d] <= WINDOW for d in reader.attrs["dims"])
    return reader.kind.fuses


# Reuse of results' buffers for temporary values, before the results are written.
#
# Results that reuse no argument have their own buffers, which are free until they are written.
# Values are placed largest first, each in the first result that is large enough, and free during
# the value's lifetime.


class Buffer(NamedTuple):
    """The buffer of a node, with the first and the last time at which it is in use."""

    node: Node
    size: int
    first: int
    last: int


def lent(results: Sequence[Buffer], values: Iterable[Buffer], times: int) -> set[Node]:
    """Returns the nodes of `values` that are stored in the buffer of one of `results`.

    The results come in the order in which they are written, which is their first use. No value is
    empty, and all times are below `times`.
    """
    lent_nodes: set[Node] = set()
    written = [r.first for r in results]
    by_size = sorted(range(len(results)), key=lambda i: results[i].size)
    large = 0  # the results whose buffers are large enough, a bit each
    taken = Occupied(times)
    for node, size, first, last in sorted(values, key=lambda v: -v.size):
        while by_size and results[by_size[-1]].size >= size:
            large |= 1 << by_size.pop()
        i = bisect_left(written, last)
        # A result written at the value's last read is written in place, or too early.
        if i < len(results) and written[i] == last:
            result = results[i].node
            # A partial result's array has one more dim, so it is not written in place.
            over = result.kind.fuses and not result.type.partial
            i += not over or results[i].size != size
        free = (large & ~taken.at(first, last)) >> i
        if free:
            taken.take(first, last, (free & -free) << i)
            lent_nodes.add(node)
    return lent_nodes


class Occupied:
    """The buffers, a bit each, that are taken at each of `n` times: a segment tree."""

    def __init__(self, n: int) -> None:
        self.n = n
        self._whole = [0] * (2 * n)  # taken at all times below a node
        self._partly = [0] * (2 * n)  # taken at some of these times

    def at(self, first: int, last: int) -> int:
        """Returns the buffers that are taken at some time from `first` to `last`."""
        inside, above = self._nodes(first, last)
        return reduce(or_, [*(self._partly[m] for m in inside), *(self._whole[m] for m in above)])

    def take(self, first: int, last: int, buffers: int) -> None:
        """Takes `buffers` from `first` to `last`."""
        inside, above = self._nodes(first, last)
        for m in inside:
            self._whole[m] |= buffers
        for m in (*inside, *above):
            self._partly[m] |= buffers

    def _nodes(self, first: int, last: int) -> tuple[list[int], set[int]]:
        """Returns (the tree nodes that make up the times from `first` to `last`, the nodes above
        them)."""
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
