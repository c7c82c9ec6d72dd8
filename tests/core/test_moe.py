"""Mixtures of experts against loops over tokens, by the oracle: routing, capacity, dropless blocks,
placements, errors."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import numpy as np
import pytest

import tessera as ts
from tessera import dist, graph, nn, op
from tessera.core.layout import parse_type
from tessera.core.reshard import wire_bytes
from tessera.ir.graph.oracle import evaluate, evaluate_blocks
from tessera.nn.experts.packing import BLOCK, pack, unpack
from tessera.nn.experts.routing import Router, choose
from tessera.nn.experts.transport import TRANSPORTS
from tessera.nn.stack import Stack
from tests.core.moe_reference import EXPERTS, HIDDEN, D, K, X, by_loops, drawn
from tests.core.numpy_engine import Oracle

W = drawn()
PLAIN = drawn(gated=False, shared=False)


def close(found: ts.Tensor, expected: Any) -> None:
    np.testing.assert_allclose(found.numpy(), expected, rtol=2e-5, atol=2e-5)


# -- values ---------------------------------------------------------------------------------------
@pytest.mark.parametrize("router", ["topk", "sigmoid"])
@pytest.mark.parametrize("k", [1, 2, 8])
@pytest.mark.parametrize("weights", [W, PLAIN], ids=["gated, shared", "plain"])
def test_dropless_serves_every_choice(
    weights: dict[str, Any], k: int, router: str, oracle: Oracle
) -> None:
    y, routing = op.moe(X, weights, router, k, activation="relu", stats=True)
    expected, load, _ = by_loops(X, weights, k, router)
    close(y, expected)
    close(routing.load, load)
    assert routing.dropped.item() == 0.0


@pytest.mark.parametrize("block", [1, 5, 1000])
def test_the_block_changes_no_result(block: int, oracle: Oracle) -> None:
    close(op.moe(X, W, activation="relu", block=block), by_loops(X, W)[0])


@pytest.mark.parametrize("groups", [None, 1, 2, 24])
@pytest.mark.parametrize("capacity", [0.1, 0.7, 1.25, 100.0])
def test_an_expert_takes_the_first_of_a_group(
    capacity: float, groups: int | None, oracle: Oracle
) -> None:
    n = len(X) if groups is None else groups
    each = X.size // D // n
    room = min(each, math.ceil(capacity * K * each / EXPERTS))
    expected, load, dropped = by_loops(X, W, room=room, groups=n)
    y, routing = op.moe(
        X, W, activation="relu", capacity=capacity, groups=groups, stats=True
    )  # fmt: skip
    close(y, expected)
    close(routing.load, load)
    assert routing.dropped.item() == dropped
    assert dropped == 0 if capacity == 100.0 else dropped > 0 or capacity > 1


def test_equal_scores_go_to_the_lower_id(oracle: Oracle) -> None:
    even = {**PLAIN, "router": np.zeros((D, EXPERTS), np.float32)}
    for sort in (False, True):
        _, routing = op.moe(X, even, k=3, deterministic=sort, stats=True)
        assert routing.load.numpy().tolist() == [96.0] * 3 + [0.0] * 5


def test_deterministic_takes_experts_in_the_order_of_ids(oracle: Oracle) -> None:
    x, w = ts.tensor(X.reshape(-1, D)), ts.tensor(PLAIN["router"])
    by_score = choose(x, w, Router("topk", 3, True))
    by_id = choose(x, w, Router("topk", 3, True, sort=True))
    assert (np.diff(by_score.gates.numpy()) <= 0).all()
    ids = by_id.ids.numpy()
    assert (np.diff(ids) > 0).all() and (ids != by_score.ids.numpy()).any()
    assert (ids == np.sort(by_score.ids.numpy())).all()
    close(op.moe(X, W, activation="relu", deterministic=True), by_loops(X, W)[0])


def test_the_numbers_of_a_routing(oracle: Oracle) -> None:
    _, routing = op.moe(X, PLAIN, stats=True)
    logits = X.reshape(-1, D) @ PLAIN["router"]
    scores = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    share = by_loops(X, PLAIN)[1] / (96 * K)
    close(routing.aux_loss, EXPERTS * (share * scores.mean(0)).sum())
    close(routing.z_loss, (np.log(np.exp(logits).sum(-1)) ** 2).mean())


def test_a_bias_moves_choices_and_no_gate(oracle: Oracle) -> None:
    bias = np.zeros(EXPERTS, np.float32)
    bias[5] = 10.0
    y, routing = op.moe(X, {**PLAIN, "bias": bias}, activation="relu", stats=True)
    expected, load, _ = by_loops(X, PLAIN, bias=bias)
    close(y, expected)
    assert routing.load.numpy()[5] == 96.0 == load[5]


def test_balancing_by_bias_evens_the_load(oracle: Oracle) -> None:
    ts.seed(0)
    layer = nn.MoE(D, HIDDEN, EXPERTS, balance="bias", rate=0.005)
    loads = [layer.routed(ts.tensor(X))[1].load.numpy() for _ in range(60)]
    # Once balanced, the load oscillates by a token or two, so the mean over some steps is compared.
    assert np.ptp(np.mean(loads[-20:], 0)) < 0.25 * np.ptp(loads[0])
    layer.train(False)
    before = layer.bias.numpy()
    layer(ts.tensor(X))
    assert (layer.bias.numpy() == before).all()
    assert "bias" in layer.state_dict() and "bias" not in layer.parameters()


class Layer(nn.Module):
    def __init__(self) -> None:
        self.moe = nn.MoE(D, HIDDEN, EXPERTS, K, router="sigmoid", gated=True, activation="relu",
                          balance="bias", rate=0.02)  # fmt: skip

    def __call__(self, x: ts.Tensor) -> ts.Tensor:
        return x + self.moe(x)


@pytest.mark.parametrize("how", [{"loop": True}, {"loop": False}, {"remat": True},
                                 {"stacked": False}], ids=str)  # fmt: skip
def test_layers_of_a_stack_are_balanced_each_by_its_own_load(
    how: dict[str, Any], oracle: Oracle
) -> None:
    """Compares the values, loads and biases of three steps with loops over tokens."""
    ts.seed(3)
    stack = Stack(Layer(), 2, **how)
    names = ("router", "up", "gate", "down", "bias")
    apart = "stacked" in how

    def now(layer: int) -> dict[str, Any]:
        moe = (stack.layers[layer] if apart else stack.block).moe
        found = {n: getattr(moe, n).numpy() for n in names}
        return found if apart else {n: v[layer] for n, v in found.items()}

    biases = [np.zeros(EXPERTS) for _ in range(2)]
    for _ in range(3):
        y, want = stack(ts.tensor(X)), X.astype(np.float64)
        for layer, bias in enumerate(biases):
            w = now(layer)
            made, load, _ = by_loops(want, w, K, "sigmoid", bias)
            want = want + made
            biases[layer] = bias + 0.02 * np.sign(load.mean() - load)
            np.testing.assert_allclose(w["bias"], biases[layer], atol=1e-6)
        np.testing.assert_allclose(y.numpy(), want, rtol=1e-4, atol=1e-4)
    assert any(b.any() for b in biases)


@pytest.mark.parametrize("capacity", [None, 1.0])
def test_gradients_are_those_of_finite_differences(capacity: float | None, oracle: Oracle) -> None:
    x = ts.tensor(X[:2, :4])
    w = {n: ts.tensor(v) for n, v in PLAIN.items()}
    c = ts.tensor(np.cos(np.arange(x.size, dtype=np.float32)).reshape(x.shape))

    def loss(x: ts.Tensor, w: dict[str, ts.Tensor]) -> ts.Tensor:
        return ts.sum(op.moe(x, w, activation="gelu", capacity=capacity) * c)

    gx, gw = ts.grad(loss(x, w), (x, w))
    rng = np.random.default_rng(0)
    for name, value, g in [("x", x, gx), *((n, w[n], gw[n]) for n in w)]:
        to = rng.normal(size=value.shape).astype(np.float32)
        h = 2e-3
        ends = []
        for sign in (1, -1):
            moved = ts.tensor(value.numpy() + sign * h * to)
            args = (moved, w) if name == "x" else (x, {**w, name: moved})
            ends.append(loss(*args).item())
        expected = (ends[0] - ends[1]) / (2 * h)
        np.testing.assert_allclose((g.numpy() * to).sum(), expected, rtol=2e-2, atol=2e-2)


# -- layouts --------------------------------------------------------------------------------------
def traced(mesh: dist.Mesh, layout: str, rows: str, **how: Any) -> graph.Graph:
    """The graph of the experts of `PLAIN` on tokens of `layout`; `rows` lays out the weights."""

    def f(x: Any, router: Any, up: Any, down: Any) -> Any:
        return op.moe(x, {"router": router, "up": up, "down": down}, activation="relu", **how)

    names = [layout, f"f32[{D}, {EXPERTS}]", f"f32[{rows}, {D}, {HIDDEN}]",
             f"f32[{rows}, {HIDDEN}, {D}]"]  # fmt: skip
    return graph.trace(f, *(parse_type(n, mesh) for n in names))


@pytest.mark.parametrize("capacity", [None, 1.0])
@pytest.mark.parametrize(
    ("sizes", "layout", "rows", "hops"),
    [
        ({"ep": 4}, "f32[8@ep, 12, 16]", "8@ep", 1),
        ({"dp": 2, "ep": 4}, "f32[8@(dp,ep), 12, 16]", "8@ep", 1),
        ({"ep": 2, "dp": 4}, "f32[8@(ep,dp), 12, 16]", "8@ep", 1),
        ({"dp": 2, "ep": 4}, "f32[8@dp, 12@ep, 16]", "8@ep", 1),
        ({"dp": 2, "node": 2, "gpu": 2}, "f32[8@(dp,node,gpu), 12, 16]", "8@(node,gpu)", 2),
        ({"dp": 4}, "f32[8@dp, 12, 16]", "8@dp", 1),
    ],
)
def test_two_exchanges_a_hop_and_nothing_else_moves(
    sizes: dict[str, int], layout: str, rows: str, hops: int, capacity: float | None
) -> None:
    mesh = dist.Mesh(tuple(sizes), shape=sizes)
    g = traced(mesh, layout, rows, capacity=capacity)
    found = [(n.op, n.type) for n, _ in g.collectives()]
    payload = [t for name, t in found if t.dtype is ts.f32]
    # Dropless rows travel with the expert's number. If a group is split, counts give the places
    # that the group's earlier parts have taken.
    ids = 0 if capacity is not None else hops
    counts = capacity is not None and "12@" in layout
    assert Counter(name for name, _ in found) == Counter(
        all_to_all=2 * hops + ids, **({"all_gather": 1} if counts else {})
    )
    assert len(payload) == 2 * hops
    for name, t in found:
        assert name == "all_to_all" or t.nbytes <= 8 * 4 * EXPERTS * 4
    args = [X, *(PLAIN[n] for n in ("router", "up", "down"))]
    room = None if capacity is None else math.ceil(K * 12 / EXPERTS)
    expected = by_loops(X, PLAIN, room=room, groups=8)[0]
    for how in (evaluate, evaluate_blocks):
        (y,) = how(g, args)
        np.testing.assert_allclose(y, expected, rtol=2e-5, atol=2e-5)


def test_a_weight_that_is_split_elsewhere_over_the_axis_of_the_experts() -> None:
    """A layout of user-defined rules: `up` is split by experts, `down` by its last dim."""

    def f(x: Any, router: Any, up: Any, down: Any) -> Any:
        return op.moe(x, {"router": router, "up": up, "down": down}, activation="relu")

    names = ["f32[8, 12, 16]", f"f32[{D}, {EXPERTS}@ep]", f"f32[{EXPERTS}@ep, {D}, {HIDDEN}]",
             f"f32[{EXPERTS}, {HIDDEN}, {D}@ep]"]  # fmt: skip
    g = graph.trace(f, *(parse_type(n, dist.Mesh(("ep",), shape={"ep": 4})) for n in names))
    for how in (evaluate, evaluate_blocks):
        (y,) = how(g, [X, *(PLAIN[n] for n in ("router", "up", "down"))])
        np.testing.assert_allclose(y, by_loops(X, PLAIN)[0], rtol=2e-5, atol=2e-5)


def test_a_group_over_devices_has_one_order(oracle: Oracle) -> None:
    mesh = dist.Mesh(("cp",), shape={"cp": 4})
    g = traced(mesh, "f32[8, 12@cp, 16]", "8", capacity=0.5, groups=8)
    args = [X, *(PLAIN[n] for n in ("router", "up", "down"))]
    room = math.ceil(0.5 * K * 12 / EXPERTS)
    (y,) = evaluate_blocks(g, args)
    np.testing.assert_allclose(
        y, by_loops(X, PLAIN, room=room, groups=8)[0], rtol=2e-5, atol=2e-5
    )  # fmt: skip
    assert [n.op for n, _ in g.collectives()] == ["all_gather"]  # of the counts


# -- packing --------------------------------------------------------------------------------------
@pytest.mark.parametrize("channels", [3, 128, 200])
def test_packed_rows_are_as_near_as_eight_bits(channels: int, oracle: Oracle) -> None:
    rng = np.random.default_rng(1)
    x = (rng.normal(size=(5, channels)) * 10.0 ** rng.integers(-6, 6, (5, 1))).astype(np.float32)
    x[2] = 0.0
    packed, scale = pack(ts.tensor(x))
    blocks = -(-channels // BLOCK)
    assert packed.shape == (5, blocks, BLOCK) and scale.shape == (5, blocks, 1)
    assert str(packed.dtype) == "f8e4m3" and str(scale.dtype) == "f32"
    back = unpack(packed, scale, channels, "f32").numpy()
    top = np.abs(x).max(-1, keepdims=True)
    assert np.isfinite(back).all()
    assert (np.abs(back - x) <= np.abs(x) / 16 + top * 2.0**-10 / 448 * 1.01).all()


# -- placements -----------------------------------------------------------------------------------
def test_a_placement_moves_only_what_must_move() -> None:
    old = nn.place_experts(64, 8)
    assert old == nn.place_experts(64, 8)
    assert all(len(e) == 8 for e in old.held.values())
    fewer = nn.rehash_experts(old, ["0", "1", "2", "3"])
    assert len(fewer.moves(old)) == 32  # the slots of the four removed devices
    more = nn.rehash_experts(fewer, 8)
    assert len(more.moves(fewer)) == 32  # the slots of the four new devices
    assert nn.rehash_experts(old, 8) == old
    assert nn.rehash_experts(old, [f"{i}" for i in range(8)][::-1]).moves(old) == []


def test_replicas_live_on_different_owners() -> None:
    for experts, owners, more in ((8, 4, 4), (6, 3, 3), (5, 3, 1)):
        p = nn.place_experts(experts, owners, more)
        assert sum(p.replicas) == experts + more
        assert all(len(set(es)) == len(es) for es in p.held.values())


def test_loads_are_balanced_as_the_published_example() -> None:
    # The example of DeepSeek's EPLB, both layers.
    loads = (
        [90, 132, 40, 61, 104, 165, 39, 4, 73, 56, 183, 86],
        [20, 107, 104, 64, 19, 197, 187, 157, 172, 86, 16, 27],
    )
    rows = (
        (5, 6, 5, 7, 8, 4, 3, 4, 10, 9, 10, 2, 0, 1, 11, 1),
        (7, 10, 6, 8, 6, 11, 8, 9, 2, 4, 5, 1, 5, 0, 3, 1),
    )
    for load, expected in zip(loads, rows, strict=True):
        assert nn.balance_experts(load, 8, 4, nodes=2, groups=4).rows == expected


def test_a_rehashed_layer_computes_the_same(oracle: Oracle) -> None:
    layer = nn.MoE(D, HIDDEN, EXPERTS, gated=True)
    x = ts.tensor(X)
    before = layer(x).numpy()
    for p in (
        nn.place_experts(EXPERTS, 4),
        nn.place_experts(EXPERTS, 4, replicas=4),
        nn.balance_experts(layer.routed(x)[1].load.numpy(), 4, 4),
        nn.place_experts(EXPERTS, 2),
    ):
        layer.rehash(p)
        assert layer.up.shape[0] == len(p.rows)
        np.testing.assert_allclose(layer(x).numpy(), before, rtol=1e-5, atol=1e-5)


def test_experts_in_another_order_are_not_loaded(oracle: Oracle) -> None:
    x, one, two = ts.tensor(X), nn.MoE(D, HIDDEN, EXPERTS), nn.MoE(D, HIDDEN, EXPERTS)
    plain, p = one.state_dict(), nn.place_experts(EXPERTS, 4)
    before = one(x).numpy()
    one.rehash(p)
    for place in (None, nn.place_experts(EXPERTS, 2)):
        if place is not None:
            two.rehash(place)
        with pytest.raises(ts.UsageError, match=r"extra   : placed\.rows_"):
            two.load_state_dict(one.state_dict())
    with pytest.raises(ts.UsageError, match=r"missing : placed\.rows_"):
        two.load_state_dict(plain)
    two.rehash(p)
    two.load_state_dict(one.state_dict())
    np.testing.assert_allclose(two(x).numpy(), before, rtol=1e-5, atol=1e-5)
    two.rehash(nn.place_experts(EXPERTS, 1))
    assert set(two.state_dict()) == set(plain)
    two.load_state_dict(plain)


def test_replicas_share_their_gradient(oracle: Oracle) -> None:
    p = nn.place_experts(EXPERTS, 4, replicas=4)
    rows = np.array(p.rows)
    w = {n: ts.tensor(v) for n, v in PLAIN.items()}
    more = {n: ts.tensor(v if n == "router" else v[rows]) for n, v in PLAIN.items()}
    x = ts.tensor(X)
    grads = ts.grad(ts.sum(op.moe(x, w) ** 2), w)
    found = ts.grad(ts.sum(op.moe(x, more, placement=p) ** 2), more)
    close(found["router"], grads["router"].numpy())
    for n in ("up", "down"):
        np.testing.assert_allclose(
            found[n].numpy(), grads[n].numpy()[rows], rtol=1e-4, atol=1e-4
        )  # fmt: skip


# -- transports -----------------------------------------------------------------------------------
@pytest.mark.parametrize("name", [*TRANSPORTS])
def test_every_transport_is_a_preference(name: str, oracle: Oracle) -> None:
    close(op.moe(X, W, activation="relu", transport=name), by_loops(X, W)[0])
    mesh = dist.Mesh(("ep", "dp"), devices=range(64))
    layer = nn.MoE(256, 64, 64, transport=name, mesh=mesh)
    x = dist.tensor((64, 32, 256), "[64@(ep,dp), 32, 256]", mesh)
    report = nn.moe_inspection(layer, x)
    assert f"requested {name}: {TRANSPORTS[name]}" in str(report)
    assert ("puts" if name == "nvshmem" else "XLA's all_to_all") in report.served_by


def test_an_inspection_counts_the_bytes_of_the_graph() -> None:
    for sizes, layout, rows, capacity in (
        ({"dp": 2, "ep": 4}, "f32[8@(dp,ep), 12, 16]", "8@ep", 1.0),
        ({"dp": 2, "node": 2, "gpu": 2}, "f32[8@(dp,node,gpu), 12, 16]", "8@(node,gpu)", 1.25),
        ({"dp": 2, "ep": 4}, "f32[8@dp, 12@ep, 16]", "8@ep", None),
    ):
        mesh = dist.Mesh(tuple(sizes), shape=sizes)
        g = traced(mesh, layout, rows, capacity=capacity)
        w = {n: dist.tensor(PLAIN[n].shape, f"[{rows}, {b}, {c}]", mesh)
             for n, b, c in (("up", D, HIDDEN), ("down", HIDDEN, D))}  # fmt: skip
        w["router"] = ts.tensor(PLAIN["router"])
        seen = nn.moe_inspection(w, parse_type(layout, mesh), capacity=capacity)
        moved = [
            wire_bytes(n.op, n.attrs["axes"], n.args[0].type, n.type)
            for n, _ in g.collectives()
            if n.type.dtype is ts.f32
        ]
        assert [h.wire_bytes for h in (*seen.dispatch, *seen.combine)] == moved


# -- errors ---------------------------------------------------------------------------------------
def zigzagged(n: int) -> np.ndarray[Any, Any]:
    """The order of 12 tokens in ring attention over `n` devices."""
    chunks = np.arange(12).reshape(2 * n, -1)
    return np.concatenate([c for i in range(n) for c in (chunks[i], chunks[-1 - i])])


@pytest.mark.parametrize("capacity", [0.3, 1.0])
@pytest.mark.parametrize(
    ("sizes", "layout", "n", "groups"),
    [
        ("cp=2", "[8, 12@cp, 16]", 2, None),
        ("cp=3", "[8, 12@cp, 16]", 3, None),
        ("cp=2 ep=2", "[8@ep, 12@cp, 16]", 2, None),
        ("cp=2 ep=2", "[8, 12@(cp,ep), 16]", 2, None),
        ("cp=3 ep=4", "[8, 12@(cp,ep), 16]", 3, None),
        ("cp=2", "[8, 12@cp, 16]", 2, 4),
        ("dp=2 cp=2", "[8@dp, 12, 16]", 2, None),
    ],
)
def test_room_is_given_out_in_the_order_of_the_sequence(
    sizes: str, layout: str, n: int, groups: int | None, capacity: float
) -> None:
    mesh, order = dist.Mesh.parse(sizes), zigzagged(n)
    t = parse_type(f"f32{layout}", mesh)
    w = {name: v for name, v in PLAIN.items() if v is not None}

    def call(x: Any, zigzag: int = 1) -> Any:
        y, routing = op.moe(
            x, w, k=K, activation="relu", capacity=capacity, groups=groups, zigzag=zigzag,
            stats=True,
        )  # fmt: skip
        return y, routing.dropped

    held = {PLAIN[name].shape: PLAIN[name] for name in ("router", "up", "down")}

    def of(how: Any, g: graph.Graph, x: Any) -> Any:
        return how(g, [held.get(n.type.shape, x) for n in g.inputs])

    want, dropped = of(evaluate, graph.trace(call, X), X)
    found = of(evaluate_blocks, graph.trace(lambda x: call(x, n), t), X[:, order])
    np.testing.assert_array_equal(found[1], dropped)
    np.testing.assert_allclose(found[0], want[:, order], rtol=2e-5, atol=2e-5)


def bad(message: str, error: type = ts.UsageError, **change: Any) -> Any:
    return pytest.param(message, error, change, id=message[:40])


@pytest.mark.parametrize(
    ("message", "error", "change"),
    [
        bad("k cannot be 9", k=9),
        bad("transport: type cannot be 'carrier pigeon'", transport="carrier pigeon"),
        bad("transport: an option cannot be 'qps'", transport={"type": "nccl", "qps": 3}),
        bad("groups without a capacity", groups=2),
        bad("96 tokens do not divide into 7 groups", capacity=1.0, groups=7),
        bad("groups of parts of a sequence that lies in zig-zag order", capacity=1.0, groups=16,
            zigzag=2),
        bad("experts cannot be", experts={"up": PLAIN["up"]}),
        bad("a name in experts cannot be 'sideways'", experts={**PLAIN, "sideways": 0}),
        bad("down is not of floats [8, 24, 16]", ts.ShapeError,
            experts={**PLAIN, "down": PLAIN["up"]}),
        bad("router is not of floats [16, 8]", ts.ShapeError,
            experts={**PLAIN, "router": PLAIN["router"].astype(np.int32)}),
        bad("the router has 7 experts, the weights 8 rows", ts.ShapeError,
            experts={**PLAIN, "router": PLAIN["router"][:, :7]}),
        bad("axis 'ep' is not an axis", ts.LayoutError, axis="ep", mesh=dist.Mesh(("dp",), 8)),
        bad("8 rows of experts cannot be divided over ep of 3", mesh=dist.Mesh(("ep",), 3)),
        bad("1 row of experts cannot be divided over ep of 2", mesh=dist.Mesh(("ep",), 2),
            experts={"router": PLAIN["router"][:, :1], "up": PLAIN["up"][:1],
                     "down": PLAIN["down"][:1]}, k=1),
        bad("x must be floats", ts.DTypeError, x=np.ones((4, D), np.int32)),
        bad("x has 1 dim, not 2 or more", ts.ShapeError, x=np.ones(D, np.float32)),
    ],
)  # fmt: skip
def test_errors_come_before_anything_runs(
    message: str, error: type[Exception], change: dict[str, Any], oracle: Oracle
) -> None:
    call: dict[str, Any] = {"x": X, "experts": PLAIN, **change}
    with pytest.raises(error) as caught:
        op.moe(**call)
    assert message in str(caught.value) and "  fix" in str(caught.value)
    assert oracle.compiled == 0


def test_a_layer_and_a_placement_that_cannot_be() -> None:
    with pytest.raises(ts.UsageError, match="6 experts do not divide over ep"):
        nn.MoE(4, 4, 6, mesh=dist.Mesh(("ep",), 4))
    with pytest.raises(ts.UsageError, match="k cannot be 3"):
        nn.MoE(4, 4, 2, k=3)
    with pytest.raises(ts.UsageError, match="add 2 replicas"):
        nn.place_experts(6, 4)
    with pytest.raises(ts.UsageError, match="is no placement"):
        nn.Placement((0, 2), ("a", "b"))
