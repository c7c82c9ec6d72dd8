"""Guide 1, Distributed Execution: its snippets and its statements."""

from __future__ import annotations

import contextlib
import io
from typing import Any

import numpy as np
import pytest

import tessera as ts
from tessera import dist, graph, nn, op, pipeline, schedule
from tessera.core.layout import parse_type
from tests.cases import LONG
from tests.guide.reading import Space, guide_text, in_order
from tests.guide.runner import run, snippets


def normal(seed: int, *shape: int) -> Any:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def test_meshes_shards_collectives_and_overlap() -> None:
    small = dist.Mesh(("tp", "dp"), shape={"tp": 2, "dp": 4})
    w, x = normal(0, 8, 8), normal(1, 8, 8)
    supplied = {
        "schedule": schedule,  # the text uses it without importing it
        "W_local": ts.tensor(w, mesh=small, layout="[8, 8@dp]"),
        "X_local": ts.tensor(x, mesh=small, layout="[8@dp, 8]"),
    }
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        space = in_order(1, supplied, ("7.2", "7.3", "7.4", "7.7"))
    assert out.getvalue() == "tp × dp mesh, 4 × 4\n"
    chosen = schedule.current()
    assert chosen.overlap is True and chosen.microbatches == 8
    schedule.reset()
    assert str(space["W"].type) == "bf16[1024@tp, 1024@dp]" and space["mesh"].size == 16
    assert str(space["Y_local"].type) == "f32[8, 8] +dp"
    assert str(space["Y_global"].type) == "f32[8, 8]"
    np.testing.assert_allclose(space["Y_global"].numpy(), w @ x, atol=1e-5)


# -- 7.6: tensor × pipeline × data parallel on 72 devices ------------------------------------------
LAYERS, D, ROWS = 4, 100, 12


class Layers(nn.Module):
    """The layers of the reader's transformer."""

    def __init__(self) -> None:
        c = nn.GPTConfig(d=D, layers=LAYERS, heads=4, hidden=60)
        self.layers = [nn.TransformerBlock(c) for _ in range(LAYERS)]


def batch_of(mesh: dist.Mesh | None) -> Space:
    x = normal(2, ROWS, 6, D)
    y = np.random.default_rng(3).integers(0, D, (ROWS, 6)).astype(np.int32)
    if mesh is None:
        return {"input": x, "labels": y}
    rows = f"{ROWS}@dp, 6"
    return {
        "input": ts.tensor(x, mesh=mesh, layout=f"[{rows}, {D}]"),
        "labels": ts.tensor(y, mesh=mesh, layout=f"[{rows}]"),
    }


@LONG
def test_hybrid_parallel_training_on_72_devices() -> None:
    space = in_order(1, {"graph": graph, "op": op}, ("7.2", "7.6"))
    mesh, w = space["mesh"], space["W"]
    assert mesh.topology == "tp × pp × dp mesh, 6 × 4 × 3" and mesh.physical.size == 6
    # uneven: the last of 6 blocks of rows is shorter
    assert str(w.type) == "f32[100@tp, 100@pp]" and w.type.local_shape == (17, 25)

    ts.seed(0)
    model = Layers()
    names = list(model.parameters())
    values = {k: t.numpy() for k, t in model.named_parameters()}
    dist.place(model, dist.strategy("tensor_parallel"), mesh)
    stages = [graph.stage(f"layer{i}")(block) for i, block in enumerate(model.layers)]

    @graph.pipeline(stages=stages, axis="pp", microbatches=4)
    def transformer(x: ts.Tensor, weight: ts.Tensor) -> ts.Tensor:
        for layer in stages:
            x = layer(x)
        return op.matmul(x, weight)

    space["transformer"] = transformer
    step = space["step"]
    with pytest.warns(pipeline.PipelineWarning, match="4 microbatches"):
        grads, metrics = step(batch_of(mesh))
    loss, wanted = on_one_device(w.numpy(), values)
    assert metrics["loss"].item() == pytest.approx(loss, abs=1e-5)
    assert set(grads) == {"W", *names}
    for k, g in grads.items():
        np.testing.assert_allclose(g.numpy(), wanted[k], rtol=1e-4, atol=1e-6, err_msg=k)
    assert grads["W"].type == w.type  # in the layout of the text

    # "Tensor-parallel groups for sharded matmuls", "data-parallel groups for scaling batches":
    # each stage on its 18 devices. "Pipeline groups for sequential layers": what is sent.
    own = [set(mesh.slice(pp=p).device_ids) for p in range(4)]
    steps = transformer.schedule.steps
    moved = {(n.op, n.attrs["axes"]) for n, _ in transformer.schedule.collectives()}
    assert {("all_reduce", ("tp",)), ("all_reduce", ("dp",))} <= moved
    assert [set(m.device_ids) for m in transformer.program.state.slices] == own
    assert {s.stage for s in steps if s.kind == "send" and not s.note} == {0, 1, 2, 3}
    assert transformer.table.name == "1F1B" and transformer.table.stages == 4


def test_the_72_device_step_is_recorded_at_its_full_width() -> None:
    """The unchanged text: 40 GB of weight on 72 devices can be planned with 8."""
    path, text = guide_text(1)
    space: Space = {"graph": graph, "op": op}
    for snippet in snippets(1, text):
        if snippet.section in ("7.2", "7.6"):
            run(snippet, space, path)
    mesh, w = space["mesh"], space["W"]
    assert mesh.size == 72 == mesh.physical.size and w.type.local_shape == (16_667, 25_000)
    space["transformer"] = lambda x, weight: op.matmul(op.transformer_block(x, heads=8), weight)
    batch = {
        "input": parse_type("f32[96@dp, 128, 100000]", mesh),
        "labels": parse_type("i32[96@dp, 128]", mesh),
    }
    recorded = graph.trace(space["step"], batch)
    assert w.type in {o.type for o in recorded.outputs} and w._data is None
    (summed,) = (n for n, _ in recorded.collectives() if n.type == w.type)
    assert summed.op == "all_reduce" and summed.attrs["axes"] == ("dp",)


def on_one_device(w: Any, values: Space) -> tuple[float, Space]:
    """Loss and gradients of the same program without a mesh."""
    model = Layers()
    weights = {**{k: ts.tensor(v) for k, v in values.items()}, "W": ts.tensor(w)}

    @ts.jit
    def alone(weights: Space, batch: Space) -> Any:
        x = batch["input"]
        model.load_parameters({k: v for k, v in weights.items() if k != "W"})
        for block in model.layers:
            x = block(x)
        loss = op.cross_entropy(op.matmul(x, weights["W"]), batch["labels"])
        return loss, ts.grad(loss, weights)

    loss, grads = alone(weights, batch_of(None))
    return loss.item(), {k: g.numpy() for k, g in grads.items()}


# -- 7.5: what each strategy splits, and what moves ------------------------------------------------
def weights_of(*shapes: tuple[int, ...]) -> Space:
    return {f"w{i}": normal(i, *s) * 0.3 for i, s in enumerate(shapes)}


def stepped(
    plan: Any, mesh: dist.Mesh | None, weights: Space, model: Any, x: Any
) -> tuple[float, Space, dict[str, set[tuple[str, ...]]]]:
    """Returns the loss, the gradients, and the axes of their collectives by kind."""
    placed = dist.place({k: ts.tensor(w) for k, w in weights.items()}, plan, mesh) if mesh else {
        k: ts.tensor(w) for k, w in weights.items()
    }  # fmt: skip
    batch = dist.place(x, plan, mesh, kind="batch") if mesh else ts.tensor(x)

    @ts.jit
    def step(w: Space, x: ts.Tensor) -> Any:
        y = model(w, x)
        loss = ts.mean(y * y)
        return loss, ts.grad(loss, w, layout=plan if mesh else None)

    loss, grads = step(placed, batch)
    moved: dict[str, set[tuple[str, ...]]] = {}
    for node, _ in step.graph.collectives():
        if node.type.rank:  # without the loss's own sums
            moved.setdefault(node.op, set()).add(node.attrs["axes"])
    return loss.item(), {k: (str(g.type), g.numpy()) for k, g in grads.items()}, moved


def mlp(w: Space, x: ts.Tensor) -> ts.Tensor:
    return op.matmul(ts.tanh(op.matmul(x, w["w0"])), w["w1"])


STRATEGIES: dict[str, tuple[Any, dict[str, set[tuple[str, ...]]], str]] = {
    "the model replicated, gradients reduced via all-reduce": (
        dist.strategy("data_parallel", "dp"), {"all_reduce": {("dp",)}}, "f32[8, 12]",
    ),
    "weight matrices split": (
        dist.strategy("tensor_parallel", "tp", rules=[("w0", -1), ("w1", -2)]),
        {"all_reduce": {("tp",)}}, "f32[8, 12@tp]",
    ),
    "reduce-scatter to a split optimizer (guide 2, 3.1)": (
        dist.strategy("data_parallel", "dp")
        + dist.strategy("zero_redundancy_optimizer", "dp", stage=2),
        {"reduce_scatter": {("dp",)}}, "f32[8, 12@dp]",
    ),
    "all of these": (
        dist.strategy("tensor_parallel", "tp", rules=[("w0", -1), ("w1", -2)])
        + dist.strategy("data_parallel", "dp")
        + dist.strategy("zero_redundancy_optimizer", "dp", stage=3),
        {"all_reduce": {("tp",)}, "all_gather": {("dp",)}, "reduce_scatter": {("dp",)}},
        "f32[8@dp, 12@tp]",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", STRATEGIES)
def test_strategies_move_what_the_text_says(name: str) -> None:
    plan, moves, gradient = STRATEGIES[name]
    weights, x = weights_of((8, 12), (12, 8)), normal(9, 16, 8)
    mesh = dist.Mesh(("dp", "tp"), shape={"dp": 4, "tp": 2})
    loss, grads, moved = stepped(plan, mesh, weights, mlp, x)
    want, wanted, _ = stepped(None, None, weights, mlp, x)
    assert loss == pytest.approx(want, abs=1e-5)
    for k, (_, g) in grads.items():
        np.testing.assert_allclose(g, wanted[k][1], rtol=1e-4, atol=1e-6)
    assert moved == moves and grads["w0"][0] == gradient


def test_reduce_scatter_and_all_gather_around_matmuls() -> None:
    """Tensor parallelism with a sequence split between the matrices."""
    mesh = dist.Mesh(("tp",), devices=4)
    weights, x = weights_of((8, 12), (12, 8)), normal(9, 4, 8, 8)
    w0 = ts.tensor(weights["w0"], mesh=mesh, layout="[8, 12@tp]")
    w1 = ts.tensor(weights["w1"], mesh=mesh, layout="[12@tp, 8]")

    @ts.jit
    def run(x: ts.Tensor) -> ts.Tensor:
        x = dist.all_gather(x, axis="tp")
        return dist.redistribute(mlp({"w0": w0, "w1": w1}, x), "[4, 8@tp, 8]")

    y = run(ts.tensor(x, mesh=mesh, layout="[4, 8@tp, 8]"))
    np.testing.assert_allclose(y.numpy(), np.tanh(x @ weights["w0"]) @ weights["w1"], atol=1e-5)
    assert [n.op for n, _ in run.graph.collectives()] == ["all_gather", "reduce_scatter"]


def test_experts_over_hierarchical_meshes() -> None:
    """Expert parallelism, its router, and communication in two hops: over nodes, then inside."""
    mesh = dist.Mesh(("node", "gpu"), shape={"node": 2, "gpu": 4})
    weights = {"router": normal(4, 16, 8), "up": normal(5, 8, 16, 8), "down": normal(6, 8, 8, 16)}
    x = normal(7, 16, 4, 16)
    placed = ts.tensor(x, mesh=mesh, layout="[16@(node,gpu), 4, 16]")

    @ts.jit
    def layer(x: ts.Tensor) -> ts.Tensor:
        return op.moe(x, weights, k=1, capacity=2.0, axis=("node", "gpu"))

    np.testing.assert_allclose(
        layer(placed).numpy(), op.moe(ts.tensor(x), weights, k=1, capacity=2.0).numpy(), atol=1e-4
    )
    (did,) = dist.inspect(layer).experts
    assert [(h.axis, h.devices) for h in did.dispatch] == [("node", 2), ("gpu", 4)]
    assert did.combine == did.dispatch


# -- 7.8: deterministic execution (the same bits on other devices: test_guide_2.py) ----------------
def test_the_policy_is_global_and_runs_repeat() -> None:
    mesh = dist.Mesh(("dp",), devices=8)
    x, w = normal(1, 32, 8), normal(2, 8, 8)

    def trained() -> bytes:
        @ts.jit
        def step(w: ts.Tensor, x: ts.Tensor) -> ts.Tensor:
            y = ts.tanh(x @ w)
            return w - 0.1 * ts.grad(ts.mean(y * y), w)

        now = ts.tensor(w, mesh=mesh)
        for _ in range(3):
            now = step(now, ts.tensor(x, mesh=mesh, layout="[32@dp, 8]"))
        return now.numpy().tobytes()

    with dist.deterministic(level="run_to_run"):
        assert trained() == trained()
    with (
        pytest.raises(ts.UsageError, match="level cannot be 'most'"),
        dist.deterministic(level="most"),
    ):
        pass


# -- 7.9: best practices ---------------------------------------------------------------------------
@pytest.mark.parametrize("count", [2, 4, 8, 16])
def test_more_microbatches_than_stages_idle_less(count: int) -> None:
    """The reason of the warning in `test_hybrid_parallel_training_on_72_devices`."""
    line = pipeline.simulate(pipeline.pipeline_table("1F1B", 4, count))
    assert line.idle_fraction == pytest.approx((3 / (count + 3),) * 4)


def test_collectives_in_levels_for_many_racks() -> None:
    """Hierarchical collectives, intra-node and inter-node: fewer rounds between nodes, one sum."""
    mesh, x = dist.Mesh(("dp",), devices=8), normal(1, 8, 64)

    def total(**choices: Any) -> tuple[Any, str]:
        @ts.schedule(**choices)
        def f(x: ts.Tensor) -> ts.Tensor:
            return ts.sum(x, dim=0)

        y = f(ts.tensor(x, mesh=mesh, layout="[8@dp, 64]"))
        return y.numpy(), dist.inspect(f).rows[0].algorithm

    levels = "hierarchical(2:ring x 4:halving)"
    got, by = total(algorithm=levels)
    assert by == levels
    np.testing.assert_allclose(got, total()[0], rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(got, x.sum(0), rtol=1e-5, atol=1e-5)
