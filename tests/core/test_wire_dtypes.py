"""The dtype of communication inside `ts.autocast`.

Results of products are sent in the narrow dtype, even after a cast to f32; sums computed in f32 on
a device are sent in f32.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest

import tessera as ts
from tessera import dist, graph, nn, optim, pipeline
from tessera.core.context import replaced
from tessera.core.layout import parse_type
from tessera.core.options import ScheduleOptions
from tessera.ir.graph.node import Graph
from tessera.ir.graph.oracle import evaluate, evaluate_blocks
from tessera.ir.schedule.schedule import Send
from tessera.passes.simplify import simplify
from tessera.train import recipe
from tests.cases import LONG
from tests.core.numpy_engine import Oracle

MESH = dist.Mesh.parse("dp=2,tp=2")
BATCH, SEQ, WIDTH = 8, 16, 32
ACTIVATION = (BATCH, SEQ, WIDTH)
X = parse_type("bf16[8@dp, 16@tp]", MESH)
W = parse_type("bf16[16@tp, 32]", MESH)


def sent(g: Graph) -> list[str]:
    return [str(n.type) for n, _ in g.collectives()]


# -- what one sum is made of -----------------------------------------------------------------------
def traced(run: Any, *types: Any) -> list[str]:
    return sent(simplify(graph.trace(run, *types)))


def test_a_product_that_became_f32_and_was_scaled_is_sent_as_it_was_made() -> None:
    def run(x: ts.Tensor, w: ts.Tensor, scale: ts.Tensor) -> ts.Tensor:
        y = (x @ w).to(ts.f32) * scale
        return dist.all_reduce(y - y.mean(-1, keepdims=True), "tp")

    scale = parse_type("f32[32]", MESH)
    assert traced(run, X, W, scale) == ["bf16[8@dp, 32]"]
    g = graph.trace(run, X, W, scale)
    values = [np.random.default_rng(i).normal(size=t.shape).astype(t.dtype.numpy)
              for i, t in enumerate((X, W, scale))]  # fmt: skip
    (whole,), (blocks,) = evaluate(g, values), evaluate_blocks(g, values)
    y = values[0].astype("f4") @ values[1].astype("f4") * values[2]
    for found in (whole, blocks):
        np.testing.assert_allclose(found, y - y.mean(-1, keepdims=True), rtol=0.02, atol=0.15)


def wide_beside(x: ts.Tensor, w: ts.Tensor) -> ts.Tensor:
    y = (x @ w).to(ts.f32)
    return dist.all_reduce(y + x.to(ts.f32) @ w.to(ts.f32), "tp")


def rows_first(x: ts.Tensor, w: ts.Tensor) -> ts.Tensor:
    return dist.all_reduce(ts.sum((x @ w).to(ts.f32) * 2.0, 0))


def asked_to_be_wide(x: ts.Tensor, w: ts.Tensor) -> ts.Tensor:
    return dist.all_reduce(ts.sum(x.to(ts.f32), 1), "tp")


@pytest.mark.parametrize(
    ("run", "want"),
    [
        (wide_beside, ["f32[8@dp, 32]"]),
        (rows_first, ["f32[32]"]),
        (asked_to_be_wide, ["f32[8@dp]"]),
    ],
)
def test_other_terms_stay_wide(run: Any, want: list[str]) -> None:
    assert traced(run, X, W) == want


def test_a_loop_gives_what_its_body_made_narrow() -> None:
    def run(xs: ts.Tensor, w: ts.Tensor) -> ts.Tensor:
        _, ys = ts.scan(lambda c, x: (c, (x @ w).to(ts.f32) * 2.0), ts.zeros(()), xs)
        return dist.all_reduce(ys, "tp")

    assert traced(run, parse_type("bf16[4, 8@dp, 16@tp]", MESH), W) == ["bf16[4, 8@dp, 32]"]


@pytest.mark.parametrize("level", ["run_to_run", "mesh_invariant"])
def test_only_the_same_bits_on_every_mesh_need_wide_sums(level: str) -> None:
    def run(x: ts.Tensor, w: ts.Tensor) -> ts.Tensor:
        return dist.all_reduce((x @ w).to(ts.f32) * 2.0, "tp")

    with dist.deterministic(level=level):
        found = traced(run, X, W)
    assert found == ["f32[8@dp, 32]" if level == "mesh_invariant" else "bf16[8@dp, 32]"]


# -- a whole step ----------------------------------------------------------------------------------
def step(
    strategies: tuple[str, ...], narrow: bool, reduce_dtype: Any = None, embeddings: bool = False
) -> Graph:
    """A training step's forward and backward on dp=2 x tp=2."""
    parts = {
        "dp": dist.strategy("data_parallel"),
        "zero_3": dist.strategy("zero_redundancy_optimizer", stage=3),
        "tp": dist.strategy("tensor_parallel"),
    }
    first, *others = (parts[name] for name in strategies)
    plan = sum(others, start=first)
    config = nn.GPTConfig(vocab=64, seq=SEQ, d=WIDTH, layers=2, heads=4)
    model = dist.place(nn.GPT(config), plan, MESH)
    batch = dist.place((np.zeros((BATCH, SEQ), np.int32),) * 2, plan, MESH, kind="batch")

    def gradients(model: Any, x: Any, y: Any) -> Any:
        with ts.autocast(ts.bf16, narrow, embeddings):
            loss = model.loss(x, y)
        return loss, ts.grad(loss, model.parameters(), layout=plan, reduce_dtype=reduce_dtype)

    return simplify(graph.trace(gradients, model, *batch))


def received(g: Graph) -> int:
    return sum(n.wire_bytes * times for n, times in g.collectives())


@pytest.mark.parametrize("strategies", [("dp", "tp"), ("zero_3", "tp")], ids=" ".join)
def test_activations_of_tensor_parallelism_are_sent_narrow(strategies: tuple[str, ...]) -> None:
    plain, narrow = (step(strategies, on) for on in (False, True))
    found = Counter[str]()
    for n, times in narrow.collectives():
        if n.type.shape == ACTIVATION and "tp" in n.attrs["axes"]:
            found[str(n.type.dtype)] += times
    # Two layers: two results and two gradients each; the head's gradient. The embedding is f32.
    assert found == {"bf16": 9, "f32": 1}
    assert received(narrow) < 0.66 * received(plain)


@pytest.mark.parametrize("strategies", [("dp", "tp"), ("zero_3", "tp")], ids=" ".join)
@pytest.mark.parametrize(
    ("asked", "want", "most"), [(ts.bf16, {"bf16"}, 0.55), ("f32", {"f32"}, 0.75)]
)
def test_sums_of_gradients_are_sent_in_the_dtype_that_is_asked_for(
    strategies: tuple[str, ...], asked: Any, want: set[str], most: float
) -> None:
    g = step(strategies, True, asked)
    sums = [n for n, _ in g.collectives() if n.op in ("all_reduce", "reduce_scatter")]
    # The single numbers are the loss and the count of labels.
    assert {str(n.type.dtype) for n in sums if "dp" in n.attrs["axes"] and n.type.rank} == want
    activations = {str(n.type.dtype) for n in sums if n.type.shape == ACTIVATION}
    assert activations == {"bf16", "f32"}  # autocast does not change the embedding, which is f32
    assert received(g) < most * received(step(strategies, False))
    assert all(o.type.dtype is ts.f32 for o in g.outputs)


@pytest.mark.parametrize("strategies", [("dp", "tp"), ("zero_3", "tp")], ids=" ".join)
def test_with_both_half_of_the_bytes_are_sent(strategies: tuple[str, ...]) -> None:
    g, plain = step(strategies, True, ts.bf16, embeddings=True), step(strategies, False)
    wide = [n for n, _ in g.collectives() if n.type.dtype is ts.f32 and n.type.rank > 1]
    assert {n.op for n in wide} <= {"all_reduce", "all_gather"}
    assert max(n.type.size for n in wide) < WIDTH * SEQ + 1  # positions, and maxima of logits
    assert received(g) < 0.52 * received(plain)


@pytest.mark.parametrize("stage", [1, 3])
def test_weights_stored_narrow_are_gathered_narrow_and_their_masters_not_at_all(stage: int) -> None:
    """A training step of ZeRO: half of the bytes of f32, with split f32 master weights."""
    plan = dist.strategy("zero_redundancy_optimizer", stage=stage)
    found = {}
    for dtype in ("f32", "bf16"):
        config = {
            "vocab_size": 64, "hidden_size": WIDTH, "num_layers": 2, "num_heads": 4,
            "sequence_length": SEQ, "batch_size": BATCH, "weight_dtype": dtype,
            "mixed_precision": dtype == "bf16",
        }  # fmt: skip
        weights = dist.place(recipe.initialize_model_weights(config), plan, MESH)
        state = recipe.initialize_optimizer_state(weights, config, plan)
        batch = dist.place((np.zeros((BATCH, SEQ), np.int32),) * 2, plan, MESH, kind="batch")
        model = recipe.make_model(config)

        def trained(w: Any, state: Any, x: Any, y: Any, model: Any = model, c: Any = config) -> Any:
            loss = recipe.compute_loss(model, {"input_ids": x, "labels": y}, w)
            return loss, recipe.optimizer_step(w, ts.grad(loss, w, layout=plan), state, c)

        found[dtype] = simplify(graph.trace(trained, weights, state, *batch))
    masters = [o.type for o in found["bf16"].outputs if o.type.dtype is ts.f32 and o.type.rank > 1]
    assert masters and all("dp" in t.split_axes for t in masters)
    assert received(found["bf16"]) < 0.52 * received(found["f32"])


def test_rows_of_a_table_are_rounded_as_they_are_looked_up(oracle: Oracle) -> None:
    table = ts.tensor(np.random.default_rng(0).normal(size=(4, 8)))
    ids = np.array([2, 0], np.int32)
    with ts.autocast(ts.bf16):
        plain = nn.embedding(ids, table)
    with ts.autocast(ts.bf16, embeddings=True):
        narrow = nn.embedding(ids, table)
    assert plain.dtype is narrow.dtype is ts.f32
    np.testing.assert_array_equal(plain.numpy(), table.numpy()[ids])
    np.testing.assert_array_equal(narrow.numpy(), table.to(ts.bf16).to(ts.f32).numpy()[ids])
    with ts.autocast(ts.bf16, False, embeddings=True), ts.autocast(ts.f32, embeddings=True):
        np.testing.assert_array_equal(nn.embedding(ids, table).numpy(), plain.numpy())


def weight_gradient(reduce_dtype: Any, layout: str, narrow: bool = True) -> Any:
    rng = np.random.default_rng(0)
    x = ts.tensor(rng.normal(size=(8, 16)), mesh=MESH, layout="[8@dp, 16]")
    w = ts.tensor(rng.normal(size=(16, 4)), mesh=MESH, layout=layout)

    def run(w: ts.Tensor, x: ts.Tensor) -> Any:
        with ts.autocast(enabled=narrow):
            loss = (x @ w).sum()
        return ts.grad(loss, w, reduce_dtype=reduce_dtype)

    g = graph.trace(run, w.type, x.type)
    (found,) = evaluate_blocks(g, [w.numpy(), x.numpy()])
    with replaced(autocast="bf16" if narrow else None):
        at_once = ts.grad((x @ w).sum(), w, reduce_dtype=reduce_dtype).numpy()
    return found, at_once, sent(g)


@pytest.mark.parametrize("layout", ["[16, 4]", "[16@dp, 4]"])
def test_what_was_added_up_in_f32_is_not_rounded_after(layout: str, oracle: Oracle) -> None:
    (wide, *_), (narrow, *_) = (weight_gradient(d, layout) for d in ("f32", ts.bf16))
    rounded = ts.tensor(wide).to(ts.bf16).to(ts.f32).numpy()
    assert not np.array_equal(wide, rounded)
    np.testing.assert_allclose(narrow, wide, rtol=0.02)
    np.testing.assert_array_equal(narrow, ts.tensor(narrow).to(ts.bf16).to(ts.f32).numpy())


def test_it_holds_without_autocast_and_at_once(oracle: Oracle) -> None:
    plain, narrow = (weight_gradient(d, "[16, 4]", narrow=False) for d in (None, "bf16"))
    assert plain[2] == ["f32[16, 4]"] and narrow[2] == ["bf16[16, 4]"]
    for found in narrow[:2]:
        np.testing.assert_array_equal(found, ts.tensor(found).to(ts.bf16).to(ts.f32).numpy())
        assert not np.array_equal(found, plain[0])


def test_a_pipeline_and_microbatches_send_in_it_too() -> None:
    mesh = dist.Mesh(("dp", "pp"), shape={"dp": 2, "pp": 2})
    rng = np.random.default_rng(0)
    w1, w2 = (ts.tensor(rng.normal(size=(8, 8)), mesh=mesh) for _ in range(2))
    x = ts.tensor(rng.normal(size=(16, 8)), mesh=mesh, layout="[16@dp, 8]")

    def made(dtype: Any) -> set[str]:
        stages = [lambda h, w1, w2: (ts.tanh(h @ w1), w2), lambda h, w2: h @ w2]

        @pipeline.run(mesh_axes=("pp",), schedule="GPipe", microbatches=4, mesh=mesh)
        def piped(w1: Any, w2: Any, x: Any) -> Any:
            loss = (stages[1](*stages[0](x, w1, w2)) ** 2).mean()
            return ts.grad(loss, (w1, w2), reduce_dtype=dtype)

        nodes = [n for n, _ in ts.jit(piped).plan(w1, w2, x).collectives()]
        return {str(n.type.dtype) for n in nodes if n.type.shape == (8, 8)}

    assert made(None) == {"f32"} and made("bf16") == {"bf16"}


def test_a_dtype_that_no_sum_is_made_in_is_refused() -> None:
    w = ts.ones(4)
    with pytest.raises(ts.DTypeError, match="grad: gradients cannot be summed in i32"):
        ts.grad((w * w).sum(), w, reduce_dtype=ts.int32)
    with pytest.raises(ts.UsageError, match="no sum over devices is made, in bf16 neither"):
        ts.grad((w * w).sum(), w, reduce_dtype="bf16", reduce_partial=False)


# -- everything in bf16 ----------------------------------------------------------------------------
STRATEGIES = {
    "dp": dist.strategy("data_parallel"),
    "tp": dist.strategy("tensor_parallel"),
    "ep": dist.strategy("expert_parallel"),
    **{f"zero_{n}": dist.strategy("zero_redundancy_optimizer", stage=n) for n in (1, 2, 3)},
}
# For each way to split a model: the mesh, the strategies, model options, and whether autocast
# halves the bytes too with f32 weights. If not, f32 weights are gathered for the next step, or
# f32 activations are sent from stage to stage.
WAYS: dict[str, tuple[str, str, dict[str, Any], bool]] = {
    "data": ("dp=2", "dp", {}, True),
    "zero 1": ("dp=2", "zero_1", {}, False),
    "zero 2": ("dp=2", "zero_2", {}, False),
    "zero 3": ("dp=2", "zero_3", {}, True),
    "zero 3, tensor": ("dp=2 tp=2", "zero_3 tp", {}, True),
    "tensor": ("tp=2", "tp", {}, True),
    "sequence": ("dp=2 tp=2", "dp tp", {"sequence_parallel": "tp"}, True),
    "ring": ("dp=2 cp=2", "dp", {"context": "ring"}, True),
    "all_to_all": ("dp=2 cp=2", "dp", {"context": "all_to_all"}, True),
    "experts": ("dp=2 ep=2", "dp ep", {"experts": 4}, True),
    "dropless experts, tensor": ("ep=2 tp=2", "ep tp", {"experts": 4, "capacity": None}, True),
    "pipeline": ("dp=2 tp=2 pp=2", "dp tp", {"stacked": False}, False),
}
LESS = {"zero 2", "tensor", "all_to_all", "experts"}  # only with --long: another case is similar


def step_bytes(way: str, how: str) -> int:
    """The bytes that a device receives in a training step, with pipeline transfers."""
    sizes, names, more, _ = WAYS[way]
    mesh, plans = dist.Mesh.parse(sizes), [STRATEGIES[n] for n in names.split()]
    plan = sum(plans[1:], start=plans[0])
    config = nn.GPTConfig(vocab=256, seq=32, d=64, layers=2, heads=4, **more)
    model, optimizer = nn.GPT(config), optim.AdamW(1e-3)
    if how == "stored":
        model.to(ts.bf16)
    model = dist.place(model, plan, mesh)
    batch = dist.place((np.zeros((8, 32), np.int32),) * 2, plan, mesh, kind="batch")
    piped = "pp" in mesh
    run = lambda model, x: model(x)  # noqa: E731
    if piped:
        run = pipeline.run(("pp",), schedule="1F1B", microbatches=4, mesh=mesh)(run)

    def trained(model: Any, state: Any, x: Any, y: Any) -> Any:
        with ts.autocast(ts.bf16, how == "autocast", embeddings=True):
            if piped:
                loss = nn.cross_entropy(run(model, x).reshape(-1, 256), y.reshape(-1))
            else:
                loss = model.loss(x, y)
        sent = None if how == "f32" else ts.bf16
        grads = ts.grad(loss, model, layout=plan, reduce_dtype=sent)
        # In a pipeline each weight is updated on its stage, and no update is sent.
        return loss, grads if piped else optimizer.update(model, grads, state)

    made = ts.jit(trained).plan(model, optimizer.init(model, plan), *batch)
    return sum(n.wire_bytes * times for n, times in made.collectives()) + sum(
        t.local_bytes for step in made.steps if isinstance(step, Send) for t in step.types
    )


@pytest.mark.parametrize("way", [pytest.param(w, marks=LONG if w in LESS else ()) for w in WAYS])
def test_everything_in_bf16_sends_half_of_the_bytes_of_f32(way: str, oracle: Oracle) -> None:
    """With any split of the model: with bf16 weights, and with f32 weights and autocast in the
    cases of the precision page."""
    plain = step_bytes(way, "f32")
    assert plain > 0 and step_bytes(way, "stored") <= 0.505 * plain
    if WAYS[way][-1]:
        assert step_bytes(way, "autocast") <= 0.507 * plain


def test_stage_3_with_f32_weights_sends_half_of_what_stage_1_sends(oracle: Oracle) -> None:
    """Stage 1 cannot, since each device holds its whole f32 weights after a step. Stage 3 sends
    half if it keeps the gathered weights; otherwise it gathers them again for the gradient."""
    with replaced(schedule=ScheduleOptions(reshard_after_forward=False)):
        assert step_bytes("zero 3", "autocast") <= 0.506 * step_bytes("zero 1", "f32")
    assert step_bytes("zero 3", "autocast") <= 0.75 * step_bytes("zero 1", "f32")
    assert step_bytes("zero 1", "autocast") > 0.7 * step_bytes("zero 1", "f32")
