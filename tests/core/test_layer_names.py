"""Scopes of modules: their paths of attributes, in graphs, gradients, loops and sums by layer."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import tessera as ts
from tessera import nn
from tessera.ir.graph.node import Graph, scope_family, scope_prefixes
from tessera.nn.stack import Stack


class Block(nn.Module):
    def __init__(self, act: Any = None) -> None:
        self.up, self.down, self.act = nn.Linear(4, 8), nn.Linear(8, 4), act or Act()

    def __call__(self, x: ts.Tensor) -> ts.Tensor:
        with ts.named_scope("wide"):
            h = self.up(x)
        return self.squeezed(self.act(h))

    def squeezed(self, h: ts.Tensor) -> ts.Tensor:
        return self.down(h) + 1.0


class Act(nn.Module):
    def __call__(self, x: ts.Tensor) -> ts.Tensor:
        return ts.tanh(x)


class Net(nn.Module):
    def __init__(self, parts: Any) -> None:
        self.parts = parts

    def __call__(self, x: ts.Tensor) -> ts.Tensor:
        for part in self.parts.values() if isinstance(self.parts, dict) else self.parts:
            x = part(x)
        return x

    def method(self, x: ts.Tensor) -> ts.Tensor:
        return self(x)


def graphs(graph: Graph) -> list[Graph]:
    bodies = [v for n in graph.nodes for v in n.attrs.values() if isinstance(v, Graph)]
    return [graph, *(g for body in bodies for g in graphs(body))]


def scopes(fn: Any, *args: Any, op: str = "") -> list[str]:
    """The scopes of the nodes (with the op `op`), each once, in order."""
    found = [n for g in graphs(ts.graph.trace(fn, *args)) for n in g.nodes if n.op != "input"]
    return list(dict.fromkeys(n.scope for n in found if op in ("", n.op)))


X = np.ones((3, 4), np.float32)


def test_a_scope_is_the_path_of_attributes() -> None:
    net = Net([Block(), Block()])
    assert scopes(lambda x: net(x), X) == [
        "net/parts.0/wide/up", "net/parts.0.act", "net/parts.0.down", "net/parts.0",
        "net/parts.1/wide/up", "net/parts.1.act", "net/parts.1.down", "net/parts.1",
    ]  # fmt: skip
    assert "net/parts.first.down" in scopes(lambda x: Net({"first": Block()})(x), X)


def test_no_two_products_of_different_layers_share_a_scope() -> None:
    net = Net([Block() for _ in range(6)])
    found = scopes(lambda x: net(x), X, op="contract")
    assert len(found) == 12 and all(f"parts.{i}" in " ".join(found) for i in range(6))


def test_gradients_have_the_layer_of_their_forward_nodes() -> None:
    net = Net([Block(), Block()])

    def loss(x: ts.Tensor) -> Any:
        return ts.grad(net(x).sum(), net.trainable_parameters())

    graph = ts.graph.trace(loss, X)
    products = [n.scope for n in graph.nodes if n.op == "contract"]
    for layer in ("net/parts.0.down", "net/parts.1/wide/up"):
        assert products.count(layer) >= 2, products


def test_a_shared_module_is_named_where_it_is_called_and_by_its_first_path() -> None:
    act = Act()
    net = Net([Block(act), Block(act)])
    assert scopes(lambda x: net(x), X, op="tanh") == ["net/parts.0.act", "net/parts.1.act"]
    twice = Net([one := nn.Linear(4, 4), one])
    assert scopes(lambda x: twice(x), X, op="contract") == ["net/parts.0"]


def test_a_module_of_another_one_is_named_from_the_root() -> None:
    outer = nn.Linear(4, 4)

    class Borrows(nn.Module):
        def __init__(self) -> None:
            self.hidden = lambda x: outer(x)

        def __call__(self, x: ts.Tensor) -> ts.Tensor:
            return self.hidden(x)

    inside = Net([Borrows(), outer])
    assert scopes(lambda x: inside(x), X, op="contract") == ["net/parts.1"]
    alone = Net([Borrows()])
    assert scopes(lambda x: alone(x), X, op="contract") == ["net/parts.0/linear"]


def test_a_method_gives_paths_without_a_name_of_the_root() -> None:
    block, wide = Block(), np.ones((3, 8), np.float32)
    assert scopes(lambda x: block.squeezed(x), wide) == ["down", ""]
    net = Net([block])  # a method's call of the module itself is no second root
    assert scopes(lambda x: net.method(x), X, op="contract") == ["parts.0/wide/up", "parts.0.down"]


@pytest.mark.parametrize("loop", [True, False])
def test_layers_of_a_stack(loop: bool) -> None:
    net = Net([Stack(Block(), 3, loop=loop)])
    found = scopes(lambda x: net(x), X, op="contract")
    names = ["layers"] if loop else ["0", "1", "2"]
    assert found == [f"net/parts.0.{i}{end}" for i in names for end in ("/wide/up", ".down")]


def test_functions_between_keep_the_path() -> None:
    net = Net([Block()])
    mapped = ts.vmap(lambda x: net(x))
    assert "net/parts.0.down" in scopes(lambda x: mapped(x), np.ones((2, 3, 4), "f4"))


def test_prefixes_and_families() -> None:
    assert scope_prefixes("a/b.0.c/d")[1:4] == ["a/b", "a/b.0", "a/b.0.c"]
    assert scope_prefixes("") == []
    assert scope_family("a/b.10.c2/3") == "a/b.*.c2/*"


def test_activations_have_a_row_for_each_call_and_none_for_a_list() -> None:
    net = Net([Block(), Block()])
    names = ts.debug.activations(lambda x: net(x), X).names
    assert "net/parts.1.down" in names and "net/parts.1" in names and "net" in names
    assert "net/parts" not in names and not any("#" in n for n in names)
