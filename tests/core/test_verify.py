"""The verifier: each kind of invalid graph, with the pass and the node in the message.

Each check has one graph that this check alone rejects: `MUTATIONS` maps a check's message to it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from tessera.core.dtypes import f32, int32
from tessera.core.errors import GraphError
from tessera.core.layout import parse_type, plain
from tessera.core.mesh import Mesh
from tessera.core.options import ProgramOptions
from tessera.ir.graph.build import Builder
from tessera.ir.graph.node import Graph, Node
from tessera.ir.graph.verify import verify
from tests.messages import Golden

MESH = Mesh(("dp", "tp"), shape={"dp": 2, "tp": 4})
OTHER = Mesh(("q",), shape={"q": 2})


def good() -> Graph:
    b = Builder("step")
    b.loc = "model.py:3"
    x, y = b.input(parse_type("f32[8@dp, 4]", MESH), "x"), b.input(plain(f32, (4,), MESH), "y")
    z = b("add", x, y)
    top = b("top_k", z, k=2)
    return b.graph([b("reshape", z, shape=(32,)), b("item", top, index=1)])


def looped() -> Graph:
    inner = Builder("body")
    carry, row = inner.input(plain(f32, (4,), MESH), "c"), inner.input(plain(f32, (4,), MESH), "r")
    body = inner.graph([inner("add", carry, row)])
    b = Builder("loop")
    start, rows = b.input(plain(f32, (4,), MESH)), b.input(plain(f32, (3, 4), MESH))
    run = b("scan", start, rows, body=body, length=3, consts=0, carries=1, reverse=False,
            policy="save")  # fmt: skip
    return b.graph([b("item", run, index=0)])


def swapped(graph: Graph, old: Node, **change: Any) -> Graph:
    """Returns `graph` with `old` changed, and all later nodes rebuilt on it."""
    new: dict[Node, Node] = {old: replace(old, **change)}
    for n in graph.nodes:
        args = tuple(new.get(a, a) for a in n.args)
        if n is not old and args != n.args:
            new[n] = replace(n, args=args)
    pick = lambda ns: tuple(new.get(n, n) for n in ns)  # noqa: E731
    return Graph(graph.name, pick(graph.nodes), pick(graph.inputs), pick(graph.outputs))


def of(graph: Graph, op: str) -> Node:
    return next(n for n in graph.nodes if n.op == op)


def changed(op: str, **change: Any) -> Graph:
    graph = good()
    return swapped(graph, of(graph, op), **change)


def reordered() -> Graph:
    g = good()
    x, y, z, *rest = g.nodes
    return replace(g, nodes=(x, z, y, *rest))


def doubled() -> Graph:
    g = good()
    return replace(g, nodes=(*g.nodes, of(g, "add")))


def stranger() -> Graph:
    g = good()
    return replace(g, outputs=(*g.outputs, of(good(), "add")))


def in_body(change: Callable[[Graph], Graph]) -> Graph:
    g = looped()
    scan = of(g, "scan")
    return swapped(g, scan, attrs={**scan.attrs, "body": change(scan.attrs["body"])})


def effectless(body: Graph) -> Graph:
    """A body with an invalid node that no result needs, so that only a walk through the body finds
    it."""
    bad = Node("neg", (body.inputs[0],), (plain(f32, (5,), MESH),), {})
    return replace(body, nodes=(*body.nodes, bad))


def with_node(make: Callable[[Graph], Node]) -> Graph:
    g = good()
    return replace(g, nodes=(*g.nodes, make(g)))


def dropped_input() -> Graph:
    g = good()
    extra = Node("input", (), (plain(f32, (), MESH),), {"name": "late"})
    return replace(g, nodes=(*g.nodes, extra))


def listed_twice() -> Graph:
    g = good()
    return replace(g, inputs=(*g.inputs, g.inputs[0]))


def listed_stranger() -> Graph:
    g = good()
    return replace(g, inputs=(*g.inputs, Node("input", (), (plain(f32, ()),), {"name": "z"})))


def bare_output() -> Graph:
    g = good()
    return replace(g, outputs=(of(g, "top_k"),))


def wrong_layout() -> Graph:
    """A graph with an argument in a layout that the rule does not accept; all types are right."""
    b = Builder()
    x = b.input(parse_type("f32[8@dp, 4]", MESH))
    y = b.input(parse_type("f32[8@tp, 4]", MESH))
    z = Node("add", (x, y), (parse_type("f32[8@tp, 4]", MESH),), {})
    return Graph("g", (x, y, z), (x, y), (z,))


def attrs(op: str, **change: Any) -> Graph:
    """The good graph with attributes of `op` changed; None removes one."""
    g = good()
    node = of(g, op)
    new = {k: v for k, v in {**node.attrs, **change}.items() if v is not None}
    return swapped(g, node, attrs=new)


MUTATIONS: dict[str, Callable[[], Graph]] = {
    "a node stands twice": doubled,
    "an argument is not defined before it is used": reordered,
    "an input is listed twice": listed_twice,
    "an input of the graph is not one of its input nodes": listed_stranger,
    "an input node is not listed among the graph's inputs": dropped_input,
    "an output is not a node of the graph": stranger,
    "an output has several results; `item` picks one": bare_output,
    "mesh q=2 in a graph on mesh dp=2 tp=4": lambda: with_node(
        lambda g: Node("full", (), (plain(f32, (), OTHER),),
                       {"dtype": f32, "shape": (), "value": 0.0})),
    "an input takes no arguments and has one type": lambda: changed(
        "input", types=(plain(f32, (8, 4), MESH),) * 2),
    "op 'input' has the attribute name, not none": lambda: attrs("input", name=None),
    "op 'nope' does not exist": lambda: with_node(
        lambda g: Node("nope", (), (plain(f32, ()),), {})),
    "op 'add' has no attribute 'q'": lambda: attrs("add", q=1),
    "op 'full' lacks its attribute 'value'": lambda: with_node(
        lambda g: Node("full", (), (plain(f32, ()),), {"dtype": f32, "shape": ()})),
    "an argument has several results; `item` picks one": lambda: with_node(
        lambda g: Node("neg", (of(g, "top_k"),), (of(g, "top_k").types[0],), {})),
    "its rule does not hold: reshape: 32 elements do not fit shape (31,)": lambda: attrs(
        "reshape", shape=(31,)),
    "its rule cannot read it: TypeError": lambda: attrs("reshape", shape=32),
    "it has 1 results where its rule gives 2": lambda: with_node(
        lambda g: Node("top_k", (of(g, "add"),), of(g, "top_k").types[:1], {"k": 2})),
    "argument 0 is f32[8@dp, 4] where its rule wants f32[8@tp, 4]": wrong_layout,
    "its type is f32[8, 4] where its rule gives f32[8@dp, 4]": lambda: with_node(
        lambda g: Node("add", of(g, "add").args, (plain(f32, (8, 4), MESH),), {})),
    "`item` takes one node and the number of a result": lambda: attrs("item", index="1"),
    "there is no result 2 among 2": lambda: attrs("item", index=2),
    "its type is i32[8, 2] where result 1 is i32[8@dp, 2]": lambda: changed(
        "item", types=(plain(int32, (8, 2), MESH),)),
    "its type is f32[5] where its rule gives f32[4]": lambda: in_body(effectless),
    "its body was recorded under other options: executor=stepped": lambda: in_body(
        lambda body: replace(body, options=ProgramOptions(executor="stepped"))
    ),
}  # fmt: skip


def test_good_graphs_pass() -> None:
    verify(good())
    verify(looped(), "build")


@pytest.mark.parametrize("message", MUTATIONS)
def test_each_check_rejects_its_mutation(message: str) -> None:
    with pytest.raises(GraphError) as error:
        verify(MUTATIONS[message](), "some_pass")
    first = str(error.value).splitlines()[0]
    assert first.startswith(f"verify: pass 'some_pass' broke the graph: {message}")


def test_every_check_has_a_mutation(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each mutation is rejected by one check alone: the others accept it."""
    from tessera.ir.graph import verify as module

    original = module._Verifier.wrong
    for message, make in MUTATIONS.items():
        if message.startswith(("an input takes", "an argument has", "its rule", "op ", "there is",
                               "it has", "`item`", "an input of")):  # fmt: skip
            continue  # later checks need this one to hold
        seen: list[str] = []

        def silent(self: Any, what: str, *rest: Any, seen: list[str] = seen) -> None:
            seen.append(what)

        monkeypatch.setattr(module._Verifier, "wrong", silent)
        verify(make())
        monkeypatch.setattr(module._Verifier, "wrong", original)
        assert seen and all(what.startswith(message) for what in seen), (message, seen)


def test_the_message_shows_the_node_and_its_line(golden: Golden) -> None:
    with pytest.raises(GraphError) as error:
        verify(attrs("add", q=1), "fold")
    golden(error.value)
    with pytest.raises(GraphError, match="verify: the graph is not valid: a node stands twice"):
        verify(doubled())


def test_a_body_on_another_mesh_is_found() -> None:
    def moved(body: Graph) -> Graph:
        bad = Node("full", (), (plain(f32, (), OTHER),), {"dtype": f32, "shape": (), "value": 0.0})
        return replace(body, nodes=(*body.nodes, bad))

    with pytest.raises(GraphError, match="mesh q=2 in a graph on mesh dp=2 tp=4"):
        verify(in_body(moved))
