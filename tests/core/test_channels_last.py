"""The pass that puts the channels of a convolution's neighbours last."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tessera as ts
from tessera import nn
from tessera.core.dtypes import f32
from tessera.core.layout import parse_type, plain
from tessera.core.mesh import Mesh
from tessera.ir.graph.build import Builder
from tessera.ir.graph.node import Graph, Node
from tessera.ir.graph.oracle import evaluate, evaluate_blocks
from tessera.ir.graph.verify import verify
from tessera.ops.reduce import keep_dims
from tessera.passes.channels_last import channels_last
from tessera.passes.differentiate import differentiate
from tessera.passes.simplify import simplify

MESH = Mesh(("dp", "tp"), shape={"dp": 2, "tp": 2})


def same(graph: Graph, seed: int) -> Graph:
    """Returns `graph` with its channels last. Checks that it computes the same, whole and in
    blocks."""
    now = channels_last(graph)
    verify(now, "channels last")
    assert now.inputs == graph.inputs
    assert [o.type for o in now.outputs] == [o.type for o in graph.outputs]
    rng = np.random.default_rng(seed)
    values = [rng.uniform(-1, 1, n.type.shape).astype(np.float32) for n in graph.inputs]
    for run in (evaluate, evaluate_blocks):
        for a, b in zip(run(graph, values), run(now, values), strict=True):
            np.testing.assert_allclose(b, a, rtol=1e-4, atol=1e-4)
    return now


class Net:
    """A graph drawn step by step."""

    def __init__(self, data: st.DataObject) -> None:
        self.b, self.data = Builder(), data
        self.spatial = data.draw(st.integers(1, 2))
        self.groups = data.draw(st.sampled_from((1, 1, 2)))
        self.inputs: list[Node] = []

    def input(self, *shape: int, split: str = "") -> Node:
        first, *rest = map(str, shape)
        text = f"f32[{', '.join([first + split, *rest])}]"
        self.inputs.append(self.b.input(parse_type(text, MESH)))
        return self.inputs[-1]

    def conv(self, x: Node) -> Node:
        outs = self.data.draw(st.integers(1, 3))
        stride = self.data.draw(st.sampled_from((1, 1, 2)))
        n, *_ = x.type.shape
        sizes = x.type.shape[-self.spatial :]
        channels = math.prod(x.type.shape[1 : -self.spatial])
        x = self.b("reshape", x, shape=(n, self.groups, channels // self.groups, *sizes))
        w = self.input(self.groups, outs, channels // self.groups, *[3] * self.spatial)
        every = {"stride": stride, "pads": (1, 1), "dilation": 1, "spread": 1}
        return self.b("conv", x, w, **{k: (v,) * self.spatial for k, v in every.items()})

    def joined(self, x: Node) -> Node:
        n, g, o, *sizes = x.type.shape
        return self.b("reshape", x, shape=(n, g * o, *sizes))

    def normed(self, x: Node) -> Node:
        """A simple normalization: sums over batch and spatial dims, then a scale and a bias per
        channel."""
        dims = (0, *range(x.type.rank - self.spatial, x.type.rank))
        total = self.b("sum", self.b("mul", x, x), dims=dims)
        x = self.b("sub", x, self.b("tanh", keep_dims(self.b, total, x.type, dims)))
        line = [1 if d in dims else n for d, n in enumerate(x.type.shape)]
        x = self.b("mul", x, self.b("broadcast_to", self.input(*line), shape=x.type.shape))
        return self.b("add", x, self.input(*line[1:]))

    def spread(self, x: Node) -> Node:
        """The sum of a value and its maximum or minimum over some dims."""
        some = st.lists(st.integers(0, x.type.rank - 1), min_size=1, unique=True)
        dims = tuple(sorted(self.data.draw(some)))
        best = self.b(self.data.draw(st.sampled_from(("max", "min"))), x, dims=dims)
        return self.b("add", x, keep_dims(self.b, best, x.type, dims))

    def turned(self, x: Node) -> Node:
        """A reshape of all dims but the first, which needs the written order of dims."""
        rows = x.type.shape[0]
        flat = self.b("reshape", x, shape=(rows, x.type.size // rows))
        return self.b("reshape", self.b("neg", flat), shape=x.type.shape)

    def past(self, x: Node) -> Node:
        """A residual sum: `x` plus an elementwise select between `x` and 0.5."""
        return self.b("add", x, self.b("where", self.b("gt", x, self.half(x)), x, self.half(x)))

    def joined_to(self, x: Node) -> Node:
        """A concatenation of a value and its tanh along the channel dim."""
        return self.b("concat", x, self.b("tanh", x), dim=x.type.rank - self.spatial - 1)

    def pooled(self, x: Node) -> Node:
        """Max or sum pooling."""
        low, high = self.data.draw(st.sampled_from(((0, 0), (1, 0), (1, 1))))
        every = {
            "size": self.data.draw(st.integers(2, 3)),
            "stride": self.data.draw(st.integers(1, 3)),
            "pads": (low, high),
        }
        if min(x.type.shape[-self.spatial :]) + low + high < every["size"]:
            return x
        kind = self.data.draw(st.sampled_from(("max", "sum")))
        return self.b("window", x, kind=kind, **{k: (v,) * self.spatial for k, v in every.items()})

    def half(self, x: Node) -> Node:
        return self.b("full", dtype=x.type.dtype, shape=x.type.shape, value=0.5)


@settings(max_examples=40)
@given(st.data())
def test_drawn_nets(data: st.DataObject) -> None:
    net = Net(data)
    split = data.draw(st.sampled_from(("", "@dp", "@(dp,tp)")))
    x = net.input(4, 2 * net.groups, *[5, 4][: net.spatial], split=split)
    for _ in range(data.draw(st.integers(1, 2))):
        x = net.conv(x)
        if data.draw(st.booleans()):
            x = net.joined(x)
        steps = (net.normed, net.spread, net.turned, net.past, net.joined_to, net.pooled)
        for step in data.draw(st.lists(st.sampled_from(steps), max_size=3)):
            x = step(x)
    loss = net.b("sum", net.b("tanh", x), dims=tuple(range(x.type.rank)))
    one = net.b("full", dtype=loss.type.dtype, shape=(), value=1.0)
    grads = differentiate(net.b, [(loss, one)], net.inputs)
    graph = net.b.graph([loss, x, *(g for g in grads if g is not None)])
    same(graph, 3)
    same(simplify(graph), 4)


def test_only_a_convolution_has_the_order_that_is_written() -> None:
    b = Builder()
    x, w, v = (
        b.input(parse_type(t, MESH)) for t in ("f32[8@dp, 1, 2, 5, 4]", *["f32[1, 2, 2, 3, 3]"] * 2)
    )
    every = {"stride": (1, 1), "pads": ((1, 1), (1, 1)), "dilation": (1, 1), "spread": (1, 1)}
    h = b("tanh", b("conv", x, w, **every))
    y = b("reshape", b("mul", h, h), shape=(8, 2, 5, 4))
    total = b("sum", y, dims=(0, 2, 3))
    back = b("reshape", b("neg", y), shape=(8, 1, 2, 5, 4))
    now = same(b.graph([b("conv", back, v, **every), total]), 1)
    shapes = {n.op: n.type.text for n in now.nodes}
    assert shapes["tanh"] == shapes["mul"] == "f32[8@dp, 5, 4, 1, 2]"
    assert shapes["neg"] == "f32[8@dp, 5, 4, 2]"
    assert [n.attrs["dims"] for n in now.nodes if n.op == "sum"] == [(0, 1, 2)]


def test_windows_have_one_place_of_each_channel() -> None:
    """Also for the gradient, up to its addition to a value that comes from no convolution."""
    b = Builder()
    x, w, split = (
        b.input(parse_type(t, MESH))
        for t in ("f32[8@dp, 1, 2, 6, 6]", "f32[1, 4, 2, 3, 3]", "f32[1, 4@tp, 2, 3, 3]")
    )
    every = {"stride": (1, 1), "pads": ((1, 1), (1, 1)), "dilation": (1, 1), "spread": (1, 1)}
    pool = {"kind": "max", "size": (2, 2), "stride": (2, 2), "pads": ((0, 0), (0, 0))}
    y = b("tanh", b("window", b("tanh", b("conv", x, w, **every)), **pool))
    loss = b("sum", y, dims=(0, 1, 2, 3, 4))
    (grad,) = differentiate(b, [(loss, b("full", dtype=f32, shape=(), value=1.0))], [w])
    now = same(b.graph([loss, grad]), 6)
    shapes = [n.type.shape for n in now.nodes if n.op in ("window", "where", "concat")]
    assert {s[-1] for s in shapes} == {4} and len(shapes) > 6

    b = Builder()
    x, split = (b.input(x.type), b.input(split.type))
    now = same(b.graph([b("window", b("conv", x, split, **every), **pool)]), 7)
    (kept,) = (n for n in now.nodes if n.op == "window")
    assert kept.attrs["size"] == (2, 2)  # otherwise the split channels would have to be gathered


def test_two_convolutions_may_differ_in_what_is_last() -> None:
    b = Builder()
    x, w, y, v = (
        b.input(parse_type(f"f32[{t}]", MESH))
        for t in ("4, 1, 3, 5", "1, 2, 3, 3", "4, 1, 3, 2, 5", "1, 1, 3, 3, 3")
    )
    one, two = (
        {"stride": (1,) * n, "pads": ((1, 1),) * n, "dilation": (1,) * n, "spread": (1,) * n}
        for n in (1, 2)
    )
    line = b("tanh", b("conv", x, w, **one))
    image = b("reshape", b("conv", y, v, **two), shape=line.type.shape)
    same(b.graph([b("add", line, image), b("add", image, line)]), 5)


def test_a_body_is_a_graph_of_its_own() -> None:
    def net(x: ts.Tensor, ws: ts.Tensor) -> ts.Tensor:
        y: ts.Tensor = ts.scan(lambda h, w: (ts.tanh(nn.conv2d(h, w, padding=1)), None), x, ws)[0]
        return y

    given = ts.zeros((2, 3, 5, 4)), ts.zeros((2, 3, 3, 3, 3))
    now = same(ts.graph.trace(net, *given), 2)
    (loop,) = (n for n in now.nodes if n.op == "scan")
    (tanh,) = (n for n in loop.attrs["body"].nodes if n.op == "tanh")
    assert tanh.type.shape == (2, 5, 4, 3)


@pytest.mark.parametrize("like", [(4, 3, 5), (4, 3, 5, 6)])
def test_without_a_convolution_nothing_changes(like: tuple[int, ...]) -> None:
    b = Builder()
    x = b.input(plain(f32, like))
    graph = b.graph([b("sum", b("tanh", x), dims=(0, 2))])
    assert channels_last(graph) is graph
