"""`Node` and `Graph`: the ops of a program in program order, each with its type, as plain data."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from types import MappingProxyType
from typing import Any

from ...core.checks import taken, unfit
from ...core.errors import UsageError
from ...core.layout import TensorType, shard_count
from ...core.mesh import Mesh
from ...core.options import PLAIN, ProgramOptions
from ...core.reshard import device_wire_bytes
from ...ops.control import iterations
from ...ops.op import BODIES, INPUT, OPS, Op, op_named
from ...ops.redistribute import COLLECTIVES, all_gather, reduce_scatter
from ..tile.node import mesh_kernel, put_bytes

NO_ATTRS: Mapping[str, Any] = MappingProxyType({})
NO_SWAP: Mapping[Node, Node] = MappingProxyType({})


_VISITS = itertools.count()


class Scope(str):
    """The path of the modules in which a node is recorded, outermost first: `gpt/blocks.3.up` is
    inside of the module `blocks[3].up` of a GPT. Attributes are joined by dots, all else by `/`.

    `visits` has a number for each part of the path; each entry of a module gets a new one, for all
    parts that it adds. Nodes of a gradient have the path alone.
    """

    visits: tuple[int, ...] = ()


def entered(scope: str, name: str, separator: str = "/") -> Scope:
    """The scope `name` inside of `scope`."""
    made = Scope(f"{scope}{separator}{name}" if scope else name)
    visits = scope.visits if isinstance(scope, Scope) else ()
    made.visits = (*visits, *[next(_VISITS)] * len(scope_prefixes(name)))
    return made


def scope_prefixes(scope: str) -> list[str]:
    """The scopes around `scope`, outermost first, and itself.

    >>> scope_prefixes("gpt/blocks.3.up")
    ['gpt', 'gpt/blocks', 'gpt/blocks.3', 'gpt/blocks.3.up']
    """
    ends = [m.start() for m in re.finditer("[/.]", scope)]
    return [scope[:end] for end in ends] + [scope] if scope else []


def scope_family(scope: str) -> str:
    """`scope` with a star for each number: the same for all layers of a list.

    >>> scope_family("gpt/blocks.3.up")
    'gpt/blocks.*.up'
    """
    return re.sub(r"(?<![^/.])\d+(?![^/.])", "*", scope)


def is_in(scope: str, path: str) -> bool:
    """Returns whether `scope` is that of a module whose path ends in `path`, or is inside of it.

    >>> is_in("llama/model.layers.1.mlp", "layers.1"), is_in("llama/model.layers.12", "layers.1")
    (True, False)
    """
    return re.search(rf"(^|[/.]){re.escape(path)}($|[/.])", scope) is not None


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
    def kind(self) -> Op:
        """The `Op` of this node, with its rules. Raises GraphError if no op has the node's name, as
        may happen in a text."""
        return OPS.get(self.op) or (INPUT if self.op == "input" else op_named(self.op))

    @property
    def is_collective(self) -> bool:
        return self.op in COLLECTIVES

    @property
    def wire_bytes(self) -> int:
        """Bytes that one device receives in one run of this node. On a folded mesh: the bytes from
        other devices, for all places of the device."""
        if not self.is_collective:
            return 0
        if self.op == mesh_kernel.name:
            return put_bytes(self.attrs["kernel"], [a.type for a in self.args])
        t = self.args[0].type
        if "algorithm" in self.attrs:
            from ..schedule.algorithms.build import received_share

            name, n = self.attrs["algorithm"], shard_count(self.attrs["axes"], t.sizes)
            whole = {all_gather.name: n * t.local_bytes,
                     reduce_scatter.name: n * self.type.local_bytes}  # fmt: skip
            return round(received_share(self.op, name, n) * whole.get(self.op, t.local_bytes))
        return device_wire_bytes(self.op, self.attrs["axes"], t, self.type)

    @property
    def ins(self) -> tuple[TensorType, ...]:
        """The types of its arguments; for an `item`, the types of all results of its argument."""
        return self.args[0].types if self.op == "item" else tuple([a.type for a in self.args])

    @property
    def flops(self) -> int:
        """Floating-point operations of one run, over all devices. Work that several devices repeat
        counts once."""
        flops = self.kind.flops(self.ins, self.types, self.attrs)
        # A graph in the attributes already counts its nodes on all devices.
        return flops * (1 if self.kind.bodies else shard_count(self.type.varying, self.type.sizes))

    def with_args(self, args: tuple[Node, ...]) -> Node:
        """This node applied to `args`; the node itself if these are its arguments already."""
        if args == self.args:
            return self
        # Not `replace`, which takes three times as long: passes do this for every second node.
        return Node(self.op, args, self.types, self.attrs, self.loc, self.scope, self.note)

    def __repr__(self) -> str:
        return f"<{self.op} : {', '.join(map(str, self.types))}>"


Emit = Callable[[Node], Node]  # puts a new node before the one that is looked at
# Called with a node as it was, and as it is with its new arguments. Returns the replacement, or
# None to keep the node.
Rule = Callable[[Node, Node, Emit], "Node | None"]


def input_node(type: TensorType, name: str) -> Node:
    """An input node of type `type` and name `name`."""
    return Node("input", (), (type,), {"name": name})


@dataclass(frozen=True, eq=False)
class Graph:
    """A recorded function: nodes in program order, inputs, outputs, and options.

    `nodes` include the inputs. `options` are those of the recording.
    """

    name: str
    nodes: tuple[Node, ...]
    inputs: tuple[Node, ...]
    outputs: tuple[Node, ...]
    options: ProgramOptions = PLAIN

    @cached_property
    def mesh(self) -> Mesh | None:
        """The mesh of the first node that has one, or None."""
        for n in self.nodes:
            for t in n.types:
                if t.mesh is not None:
                    return t.mesh
        return None

    @cached_property
    def is_wide(self) -> bool:
        """Returns whether a value of the graph, or of a body in it, has numbers of 64 bits."""
        bodies = (v for n in self.nodes for v in n.attrs.values() if isinstance(v, Graph))
        return any(t.dtype.is_wide for n in self.nodes for t in n.types) or any(
            body.is_wide for body in bodies
        )

    @cached_property
    def flops(self) -> int:
        """Floating-point operations of one run, over all devices and all iterations of loops. Work
        that several devices repeat counts once."""
        return sum(n.flops for n in self.nodes if n.op != "input")

    @cached_property
    def key(self) -> object:
        """A hashable key, equal for graphs that compute the same under the same options, regardless
        of names and source lines. None if an attribute cannot be hashed."""
        place = {n: i for i, n in enumerate(self.nodes)}
        nodes = tuple(
            [
                (
                    n.op,
                    tuple([place[a] for a in n.args]),
                    n.types,
                    tuple([(k, _keyed(v)) for k, v in n.attrs.items() if n.op != "input"]),
                )
                for n in self.nodes
            ]
        )
        ends = tuple([place[n] for n in (*self.inputs, *self.outputs)]), len(self.inputs)
        key = (self.options, nodes, ends)
        try:
            hash(key)
        except TypeError:
            return None
        return key

    @property
    def text(self) -> str:
        """The graph as text, which `graph.parse` reads back."""
        from .text import to_text  # a circle, as its parser makes these values

        return to_text(self)

    def __str__(self) -> str:
        return self.text

    __repr__ = __str__

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return self  # it never changes

    def __reduce__(self) -> tuple[Any, ...]:
        from .text import parse

        return parse, (self.text,)

    def collectives(self) -> Iterator[tuple[Node, int]]:
        """Yields (node, number of runs) for each collective, including those in loops and in both
        bodies of branches."""
        yield from _collectives(self.nodes, 1)

    @property
    def wire_bytes(self) -> int:
        """The bytes that one device receives from other devices in one run."""
        return sum(n.wire_bytes * times for n, times in self.collectives())

    def rewrite(self, rule: Rule | None, bodies: Callable[[Graph], Graph] | None = None) -> Graph:
        """The graph with each node (inputs included) replaced by the result of `rule`.

        `rule(was, now, emit)` gets a node as it was, and as it is with its new arguments and
        bodies. It returns the replacement: None for `now`, an earlier node, or a new one that it
        added by `emit`. `bodies` rewrites the bodies of loops and branches; None: by the same rule.
        Returns the graph itself if nothing changes.
        """
        if rule is None and not any(n.op in BODIES for n in self.nodes):
            return self
        new: dict[Node, Node] = {}  # only what changed
        nodes: list[Node] = []
        done: dict[Graph, Graph] = {}  # one body may be run by several loops, and stays one

        def emit(n: Node) -> Node:
            nodes.append(n)
            return n

        for was in self.nodes:
            n = was
            if not new.keys().isdisjoint(n.args):
                n = n.with_args(tuple([new.get(a, a) for a in n.args]))
            if n.op in BODIES:
                inner = {k: v for k, v in was.attrs.items() if isinstance(v, Graph)}
                for body in inner.values():
                    if body not in done:
                        done[body] = bodies(body) if bodies else body.rewrite(rule)
                if any(done[body] is not body for body in inner.values()):
                    attrs = {**was.attrs, **{k: done[body] for k, body in inner.items()}}
                    n = replace(n, attrs=attrs)
            made = None if rule is None else rule(was, n, emit)
            if made is None or made is n:
                nodes.append(n)
                made = n
            if made is not was:
                new[was] = made
        if not new:
            return self
        inputs, outputs = (tuple([new.get(n, n) for n in e]) for e in (self.inputs, self.outputs))
        return replace(self, nodes=tuple(nodes), inputs=inputs, outputs=outputs)

    def part(
        self,
        inputs: Sequence[Node],
        outputs: Sequence[Node],
        swap: Mapping[Node, Node] = NO_SWAP,
    ) -> Graph:
        """The part of this graph that computes `outputs` from `inputs`.

        An inner node of this graph may be one of `inputs`. `swap` maps a node to the one of
        `inputs` that replaces it. Raises UsageError if `outputs` depend on other inputs.
        """
        for what, given in (("inputs", inputs), ("outputs", outputs)):
            if not isinstance(given, Sequence) or not all(isinstance(n, Node) for n in given):
                raise unfit("part", what, given, "give a list of nodes of graph.nodes")
        stands = {
            n: n if n.op == "input" else input_node(n.type, f"input{i}")
            for i, n in enumerate(inputs)
        }
        new = stands | {n: stands[value] for n, value in swap.items()}
        need = reachable(outputs, new)
        here = [n for n in self.nodes if n in need]
        more = [n for n in here if n.op == "input"] or [*need.difference(here)]
        if more:
            raise UsageError(
                "part: the outputs need a node that is none of the inputs",
                node=more[0].attrs.get("name", more[0]),
                fix="name it among the inputs, or other inputs from which they follow",
            )
        nodes = (*stands.values(), *copied(here, new))
        ends = tuple(stands.values()), tuple([new[o] for o in outputs])
        return replace(self, nodes=nodes, inputs=ends[0], outputs=ends[1])


def _keyed(value: object) -> object:
    """An attribute as a hashable part of a key: 0.0 and -0.0 differ, and so do 1 and True."""
    if isinstance(value, Graph):
        return value.key if value.key is not None else []  # unhashable: the outer key is None too
    if isinstance(value, tuple):
        return tuple(map(_keyed, value))
    return repr(value) if isinstance(value, (float, bool)) else value


def need_graph(name: str, value: object) -> Graph:
    """`value` as a Graph. Raises UsageError if it is anything else."""
    fix = "record one with graph.trace(fn, ...), or take the .graph of a compiled function"
    return taken(name, value, Graph, fix)


def _collectives(nodes: Iterable[Node], times: int) -> Iterator[tuple[Node, int]]:
    for n in nodes:
        if n.is_collective:
            yield n, times
        elif n.op == "scan":
            yield from _collectives(n.attrs["body"].nodes, times * iterations(n.attrs["length"]))
        elif n.op == "cond":  # both branches, of which one runs
            for branch in ("yes", "no"):
                yield from _collectives(n.attrs[branch].nodes, times)


def reachable(outputs: Iterable[Node], stop: Container[Node] = ()) -> set[Node]:
    """All nodes that `outputs` depend on, including themselves. The search stops at the nodes in
    `stop`, which are not included."""
    seen: set[Node] = set()
    todo = list(outputs)
    while todo:
        n = todo.pop()
        if n not in seen and n not in stop:
            seen.add(n)
            todo.extend(n.args)
    return seen


def copied(
    roots: Iterable[Node],
    new: dict[Node, Node],
    swap: Mapping[Node, Node] = NO_SWAP,
    among: Container[Node] | None = None,
) -> list[Node]:
    """Copies of `roots` with new arguments, each preceded by copies of the nodes that it needs.

    `new` maps nodes to their copies: nodes that it has are not copied again, and new copies are
    added to it. An argument that is a key of `swap` is replaced by its value. With `among`, only
    nodes of `among` are copied besides the roots; a KeyError is raised for any other missing node.
    """
    nodes: list[Node] = []
    for root in roots:
        todo = [root]
        while todo:
            n = todo[-1]
            if n in new:
                todo.pop()
                continue
            args = [swap.get(a, a) for a in n.args]
            if late := [a for a in args if a not in new and (among is None or a in among)]:
                todo.extend(late)
                continue
            new[n] = n.with_args(tuple([new[a] for a in args]))
            nodes.append(new[n])
            todo.pop()
    return nodes
