"""Mixtures of experts on a mesh against one device: values and gradients on the engine.

In every combination with data, tensor and sequence parallelism, packed and in buckets.
"""

from __future__ import annotations

import functools
from collections import Counter
from typing import Any

import numpy as np
import pytest

import tessera as ts
from tessera import dist, nn, op
from tessera.interop import save_hf
from tessera.nn.stack import Stack
from tests.cases import LONG, grid
from tests.core.moe_reference import COTANGENT, EXPERTS, HIDDEN, D, K, X, by_loops, drawn

W = drawn()


def laid(axes: str, tp: str = "") -> dict[str, Any]:
    """Layouts of the weights: experts over `axes`, their hidden dims over `tp`."""
    h = f"{HIDDEN}@{tp}" if tp else str(HIDDEN)
    up, down = f"[{EXPERTS}@{axes}, {D}, {h}]", f"[{EXPERTS}@{axes}, {h}, {D}]"
    shared = {"up": f"[{D}, {h}]", "down": f"[{h}, {D}]"}
    return {"router": None, "up": up, "gate": up, "down": down, "shared": shared}


def tensors(w: dict[str, Any], layouts: Any, mesh: dist.Mesh | None) -> dict[str, Any]:
    return {
        n: tensors(v, layouts[n], mesh)
        if isinstance(v, dict)
        else ts.tensor(v, mesh=mesh, layout=layouts[n])
        for n, v in w.items()
    }


def program(**how: Any) -> Any:
    @ts.jit
    def step(x: ts.Tensor, w: dict[str, Any]) -> Any:
        y, routing = op.moe(x, w, k=K, stats=True, **how)
        loss = (y * COTANGENT).sum() + 0.1 * routing.aux_loss + 0.01 * routing.z_loss
        return y, routing.dropped, ts.grad(loss, (x, w))

    return step


def arrays(tree: Any) -> Any:
    if isinstance(tree, dict):
        return {n: arrays(v) for n, v in tree.items()}
    return [arrays(v) for v in tree] if isinstance(tree, (tuple, list)) else tree.numpy()


@functools.cache
def alone(capacity: float | None, groups: int | None = None) -> Any:
    """The results of one device."""
    empty = laid("ep")
    bare = {n: dict.fromkeys(v) if isinstance(v, dict) else None for n, v in empty.items()}
    step = program(capacity=capacity, groups=groups)
    return arrays(step(ts.tensor(X), tensors(W, bare, None)))


def compare(found: Any, expected: Any, rtol: float = 1e-4) -> None:
    """Asserts that each array is within `rtol` of its largest value."""
    if isinstance(expected, dict):
        assert found.keys() == expected.keys()
        found, expected = list(found.values()), list(expected.values())
    if isinstance(expected, list):
        for a, b in zip(found, expected, strict=True):
            compare(a, b, rtol)
        return
    np.testing.assert_allclose(
        found, expected, rtol=0, atol=rtol * max(1.0, np.abs(expected).max())
    )


CASES: list[Any] = [
    ("ep=8", "[8@ep, 12, 16]", laid("ep"), None),
    ("dp=2 ep=4", "[8@(dp,ep), 12, 16]", laid("ep"), None),
    ("ep=2 dp=4", "[8@(ep,dp), 12, 16]", laid("ep"), None),
    ("dp=2 ep=2 tp=2", "[8@(dp,ep), 12, 16]", laid("ep", "tp"), None),
    ("dp=2 ep=2 tp=2", "[8@(dp,ep), 12@tp, 16]", laid("ep", "tp"), None),
    ("dp=2 node=2 gpu=2", "[8@(dp,node,gpu), 12, 16]", laid("(node,gpu)"), None),
    ("dp=2 ep=4", "[8@dp, 12@ep, 16]", laid("ep"), None),
    ("dp=2 ep=4", "[8@dp, 12@ep, 16]", laid("ep"), 1),
    ("dp=2 ep=4", "[8@dp, 12, 16]", laid("ep"), None),  # the tokens are replicated over ep
    ("dp=2 ep=4", "[8@dp, 12, 16@ep]", laid("ep"), None),
    ("dp=8", "[8@dp, 12, 16]", laid("dp"), None),
    ("cp=5 ep=1", "[8@cp, 12, 16]", laid("ep"), None),  # uneven
    # Weights stored split over dp too, as by ZeRO-3.
    ("dp=4 ep=2", "[8@(dp,ep), 12, 16]",
     {**laid("ep"), "up": f"[8@ep, {D}@dp, {HIDDEN}]", "down": f"[8@ep, {HIDDEN}@dp, {D}]"}, None),
]  # fmt: skip


@pytest.mark.parametrize(
    ("sizes", "layout", "weights", "groups", "capacity"),
    [
        pytest.param(*case, c, marks=[LONG] * (i % 2 != (c is None) and case[3] is None))
        for i, case in enumerate(CASES) for c in (None, 1.0) if c is not None or case[3] is None
    ],
)  # fmt: skip
def test_a_mesh_gives_what_one_device_gives(
    sizes: str, layout: str, weights: dict[str, Any], groups: int | None, capacity: float | None
) -> None:
    mesh = dist.Mesh.parse(sizes)
    step = program(capacity=capacity, groups=groups)
    x = ts.tensor(X, mesh=mesh, layout=layout)
    y, dropped, grads = step(x, tensors(W, weights, mesh))
    compare(arrays((y, dropped, grads)), alone(capacity, groups))
    assert y.type is x.type
    flat = [grads[0].type, *(g.type for n, g in grads[1].items() if n != "shared")]
    have = [x.type, *(t.type for n, t in tensors(W, weights, mesh).items() if n != "shared")]
    assert flat == have


def test_forward_and_backward_are_two_exchanges_each() -> None:
    mesh = dist.Mesh.parse("dp=2 ep=4")
    step = program(capacity=1.0)
    step(ts.tensor(X, mesh=mesh, layout="[8@(dp,ep), 12, 16]"), tensors(W, laid("ep"), mesh))
    found = [(n.op, n.type) for n, _ in step.graph.collectives()]
    counts = Counter(name for name, _ in found)
    assert set(counts) == {"all_to_all", "all_reduce"} and counts["all_to_all"] == 4
    # Only gradients of weights and statistics of the router are reduced, never tokens.
    weights = {W[n].shape for n in ("router", "up", "down")} | {(D, HIDDEN), (HIDDEN, D)}
    assert {t.shape for name, t in found if name == "all_reduce"} <= weights | {(EXPERTS,), ()}
    loose = {t.shape for name, t in found if name == "all_reduce" and t.split_axes}
    assert loose == {W["up"].shape, W["down"].shape}  # over dp only


@pytest.mark.parametrize(("capacity", "epoch"), grid([None, 1.0], ["soft", "hard"]))
def test_buckets_change_no_result(capacity: float | None, epoch: str) -> None:
    mesh = dist.Mesh.parse("dp=2 ep=4")
    how = {"capacity": capacity, "transport": {"bucket_bytes": 700, "epoch": epoch}}
    step = program(**how)
    x = ts.tensor(X, mesh=mesh, layout="[8@(dp,ep), 12, 16]")
    w = tensors(W, laid("ep"), mesh)
    compare(arrays(step(x, w)), alone(capacity))
    buckets = nn.moe_inspection(w, x, K, **how).buckets
    there = [n for n, _ in step.graph.collectives() if n.op == "all_to_all"]
    assert buckets > 1 and (len(there) > 2 * buckets) == (epoch == "soft")


@pytest.mark.parametrize(("capacity", "packing"), grid([1.0, None], ["fp8_e4m3", "bf16"]))
def test_packed_payloads_are_as_near_as_stated(packing: str, capacity: float | None) -> None:
    rtol = {"fp8_e4m3": 0.08, "bf16": 0.01}[packing]
    mesh = dist.Mesh.parse("dp=2 ep=4")
    step = program(capacity=capacity, transport={"pack_dtype": packing})
    x = ts.tensor(X, mesh=mesh, layout="[8@(dp,ep), 12, 16]")
    found = arrays(step(x, tensors(W, laid("ep"), mesh)))
    compare(found, alone(capacity), rtol)
    assert np.abs(found[0] - alone(capacity)[0]).max() > 1e-4  # shows that the payload was packed
    wire = [n.type.dtype.name for n, _ in step.graph.collectives() if n.op == "all_to_all"]
    assert ("f8e4m3" if packing == "fp8_e4m3" else "bf16") in wire


@LONG
def test_plain_tokens_go_over_dp_and_ep_of_the_mesh() -> None:
    mesh = dist.Mesh(axes=["ep", "dp"], devices=range(8))
    y = op.moe(
        X,
        experts=W,
        router="topk",
        k=2,
        transport={"type": "nvshmem", "pack_dtype": "fp8_e4m3"},
        deterministic=True,
        mesh=mesh,
    )
    assert str(y.type) == "f32[8@(ep,dp), 12, 16]"
    compare(y.numpy(), alone(None)[0], 0.08)


def test_a_number_of_experts_makes_its_own() -> None:
    @ts.jit
    def run(x: ts.Tensor) -> ts.Tensor:
        out: ts.Tensor = op.moe(x, 4, k=2, hidden=8)
        return out

    first, again = run(ts.tensor(X)), run(ts.tensor(X))
    assert first.shape == X.shape and (first.numpy() == again.numpy()).all()


@LONG
def test_a_layer_learns_on_a_mesh_with_replicas() -> None:
    mesh = dist.Mesh.parse("dp=2 ep=4")
    placement = nn.place_experts(EXPERTS, 4, replicas=4)
    ts.seed(0)
    layer = nn.MoE(D, HIDDEN, EXPERTS, gated=True, shared=1, balance="bias", mesh=mesh,
                   placement=placement)  # fmt: skip
    assert str(layer.up.type) == f"f32[12@ep, {D}, {HIDDEN}]"
    x = ts.tensor(X, mesh=mesh, layout="[8@(dp,ep), 12, 16]")

    @ts.jit
    def step(layer: nn.MoE, x: ts.Tensor) -> ts.Tensor:
        weights = layer.parameters()
        y, routing = layer.routed(x)
        loss = ((y - COTANGENT) ** 2).mean() + 0.01 * routing.aux_loss
        grads = ts.grad(loss, weights)
        layer.load_parameters({n: w - 0.3 * grads[n] for n, w in weights.items()})
        return loss

    losses = [step(layer, x).item() for _ in range(8)]
    assert losses[-1] < 0.9 * losses[0]
    up, rows = layer.up.numpy(), np.array(placement.rows)
    for e in range(EXPERTS):
        copies = up[rows == e]
        assert (copies == copies[0]).all()  # bit for bit
    assert np.abs(layer.bias.numpy()).max() > 0
    before = layer.train(False)(x).numpy()
    layer.rehash(nn.rehash_experts(placement, 2))
    compare(layer(x).numpy(), before)


def test_experts_inside_a_data_parallel_body() -> None:
    mesh = dist.Mesh.parse("dp=2 ep=4")

    @ts.distribute(strategy="data_parallel", mesh=mesh)
    def loss(batch: ts.Tensor, weights: dict[str, ts.Tensor]) -> ts.Tensor:
        return (op.moe(batch, weights, activation="relu") ** 2).mean()

    w = {n: v for n, v in W.items() if n not in ("shared", "gate")}
    expected = (by_loops(X, w)[0] ** 2).mean()
    np.testing.assert_allclose(loss(X, w).item(), expected, rtol=1e-4)


@pytest.mark.parametrize("capacity", [None, 1.25])
def test_slopes_along_a_direction_are_those_of_the_gradients(capacity: float | None) -> None:
    mesh = dist.Mesh.parse("dp=2 ep=4")
    w = tensors(W, laid("ep"), mesh)
    x, along = (ts.tensor(v, mesh=mesh, layout="[8@(dp,ep), 12, 16]") for v in (X, COTANGENT))

    @ts.jit
    def both(x: ts.Tensor, w: Any, along: ts.Tensor) -> Any:
        y, slope = ts.jvp(lambda x: op.moe(x, w, k=K, capacity=capacity), (x,), (along,))
        return (slope * x).sum(), (ts.grad((y * x.detach()).sum(), x) * along).sum()

    slope, product = both(x, w, along)
    np.testing.assert_allclose(slope.item(), product.item(), rtol=1e-3)


class Block(nn.Module):
    """A residual layer of experts."""

    def __init__(self, capacity: float | None):
        self.norm = nn.RMSNorm(D)
        self.moe = nn.MoE(D, HIDDEN, EXPERTS, gated=True, capacity=capacity)

    def __call__(self, x: ts.Tensor) -> ts.Tensor:
        return x + self.moe(self.norm(x))


@pytest.mark.parametrize(
    ("capacity", "loop", "remat"),
    [
        (1.25, True, False),
        pytest.param(None, True, True, marks=LONG),
        pytest.param(1.25, False, False, marks=LONG),
    ],
)
def test_layers_of_experts_repeat(capacity: float | None, loop: bool, remat: bool) -> None:
    """Looped, unrolled or recomputed: with the experts' axis given by a strategy."""
    experts = dist.strategy("expert_parallel")
    found = []
    for mesh in (None, dist.Mesh.parse("dp=2 ep=4")):
        ts.seed(3)
        layers = Stack(Block(capacity), 2, loop, remat)
        layers.parameters()
        x = ts.tensor(X)
        if mesh is not None:
            layers = dist.place(layers, dist.strategy("data_parallel") + experts, mesh)
            x = ts.tensor(X, mesh=mesh, layout="[8@(dp,ep), 12, 16]")

        @ts.jit
        def step(layers: Stack, x: ts.Tensor) -> Any:
            loss = (layers(x) * COTANGENT).sum()
            return loss, ts.grad(loss, layers.parameters())

        found.append(arrays(step(layers, x)))
    compare(found[1], found[0])
    assert str(layers.block.moe.up.type) == f"f32[2, 8@ep, {D}, {HIDDEN}]"
    assert "all_gather" not in [n.op for n, _ in step.graph.collectives()]


def small(**how: Any) -> nn.GPT:
    ts.seed(0)
    sizes: dict[str, Any] = {"vocab": 64, "seq": 16, "d": 16, "layers": 2, "heads": 4, "experts": 4}
    return nn.GPT(nn.GPTConfig(**{**sizes, "capacity": None, **how}))


IDS = np.arange(32).reshape(2, 16)


@pytest.mark.parametrize("stacked", [True, False])
def test_one_layer_keeps_the_shape_of_what_it_sets(stacked: bool) -> None:
    model = small(layers=1, balance="bias", stacked=stacked)
    shapes = {n: t.shape for n, t in model.named_buffers()}
    for _ in range(2):
        model(IDS)
        assert {n: t.shape for n, t in model.named_buffers()} == shapes


def test_a_layer_of_its_own_tensors_has_settings_of_its_own() -> None:
    model = small(stacked=False)
    before = model(IDS).numpy()
    for moe in [m for m in model.modules() if isinstance(m, nn.MoE)][::-1]:
        moe.k = 1
        after = model(IDS).numpy()
        assert np.abs(after - before).max() > 1e-3
        before = after


@pytest.mark.parametrize(  # 16 is d as well
    ("how", "experts"), grid([{"stacked": False}, {}, {"loop": True}], [4, 16])
)
def test_experts_of_many_layers_are_rehashed(how: Any, experts: int) -> None:
    model = small(experts=experts, **how)
    before = model(IDS).numpy()
    for i, moe in enumerate(m for m in model.modules() if isinstance(m, nn.MoE)):
        moe.rehash(nn.place_experts(experts, [f"{i} a", f"{i} b"], replicas=2))
        compare(model(IDS).numpy(), before)
    model.load_state_dict(model.state_dict())
    slopes = ts.jit(lambda model: ts.grad(model.loss(IDS, IDS), model.parameters()))(model)
    assert all(np.isfinite(g.numpy()).all() for g in slopes.values())
    with pytest.raises(ts.UsageError, match="experts lie in the order of a placement"):
        save_hf(model, "nowhere")
