"""Tensors without values yet: building, casting and placing a model changes their recipes."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import numpy as np
import optax
import pytest
from transformers import LlamaConfig

import tessera as ts
from tessera import dist, graph, nn, op, optim, pipeline
from tessera.compile import Engine
from tessera.lang.math import create
from tessera.lang.record.tree import flatten
from tessera.lang.value.deferred_values import MOST_STEPS
from tessera.train.recipe import initialize_model_weights

FAR = dist.Mesh(("dp", "tp"), shape=(128, 8))
NEAR = dist.Mesh(("dp", "tp"), shape=(2, 4))
ZERO = dist.strategy("zero_redundancy_optimizer", stage=3)
PLAN = ZERO + dist.strategy("tensor_parallel")
SIZES: dict[str, Any] = {
    "vocab": 128256, "seq": 8192, "d": 8192, "layers": 80, "heads": 64, "kv_heads": 8,
    "hidden": 28672, "norm": "rms", "activation": "swiglu", "positions": "rotary",
}  # fmt: skip
LARGE = nn.GPTConfig(**SIZES)  # 70 billion weights
APART = nn.GPTConfig(**SIZES, stacked=False)
THEIRS = LlamaConfig(
    vocab_size=128256, hidden_size=8192, intermediate_size=28672, num_hidden_layers=80,
    num_attention_heads=64, num_key_value_heads=8, dtype="bfloat16",
)  # fmt: skip
RECIPE = {
    "hidden_size": 8192, "num_layers": 80, "num_heads": 64, "vocab_size": 128256,
    "weight_dtype": "bf16",
}  # fmt: skip


class Own(nn.Module):
    """Weights and buffers of every kind of initialization."""

    def __init__(self) -> None:
        self.up = nn.Parameter(1 << 20, 1 << 20)
        self.down = nn.Parameter(ts.zeros((1 << 20, 1 << 20)))
        self.given = nn.Parameter(np.ones((64, 8), np.float32))
        self.tensor = nn.Parameter(dist.tensor((1 << 20, 1 << 20)) * 0.1)
        self.mask = ts.tensor(np.tril(np.ones((8, 8), np.float32)))
        self.sums = ts.zeros((1 << 20, 1 << 20))
        self.norm = nn.BatchNorm(8)


def on_far(make: Callable[[], Any]) -> Any:
    with FAR:
        return make()


def weight() -> nn.Parameter:
    return nn.Parameter(1 << 20, 1 << 20, name="w")


WAYS: dict[str, Callable[[], Any]] = {
    "placed": lambda: dist.place(nn.GPT(LARGE), PLAN, FAR),
    "cast, then placed": lambda: dist.place(nn.GPT(LARGE).to(ts.bf16), PLAN, FAR),
    "placed, then cast": lambda: dist.place(nn.GPT(LARGE), PLAN, FAR).to(ts.bf16),
    "cast on one device": lambda: nn.GPT(LARGE).to(ts.bf16),
    "on a mesh": lambda: on_far(lambda: nn.GPT(LARGE).to(ts.bf16)),
    "placed twice": lambda: dist.place(dist.place(nn.GPT(LARGE), ZERO, NEAR), PLAN, FAR),
    "moved": lambda: dist.resize(FAR, dist.place(nn.GPT(LARGE).to(ts.bf16), ZERO, NEAR)),
    "apart": lambda: dist.place(nn.GPT(APART).to(ts.bf16), PLAN, FAR),
    "copied": lambda: deepcopy(dist.place(nn.GPT(LARGE).to(ts.bf16), PLAN, FAR)),
    "frozen": lambda: dist.place(nn.GPT(LARGE).freeze().eval().to(ts.bf16), PLAN, FAR),
    "of a config": lambda: nn.load_hf(THEIRS, FAR, PLAN),
    "of a config, apart": lambda: nn.load_hf(THEIRS, FAR, PLAN, "f16", stacked=False),
    "of a recipe": lambda: initialize_model_weights(RECIPE),
    "of a recipe, placed": lambda: dist.place(initialize_model_weights(RECIPE), PLAN, FAR),
    "loaded": lambda: loaded(dist.place(nn.GPT(LARGE).to(ts.bf16), PLAN, FAR), nn.GPT(LARGE)),
    "of one's own": lambda: dist.place(Own().to(ts.bf16), ZERO, FAR),
    "of one's own, copied": lambda: deepcopy(dist.place(Own(), ZERO, FAR).to(ts.bf16)),
    "with an optimizer": lambda: optim.AdamW(1e-3).init(dist.place(nn.GPT(LARGE), PLAN, FAR)),
    "scaled": lambda: dist.place({"w": weight() * 2}, ZERO, FAR),
    "turned": lambda: dist.place([weight().T.to(ts.bf16), weight().reshape(-1)], ZERO, FAR),
    "cut": lambda: [weight()[:, 5:7], dist.place(ts.split(weight(), 2), ZERO, FAR)],
    "zeros": lambda: dist.place({"a": ts.zeros((1 << 20, 1 << 20))}, mesh=FAR),
    "ones": lambda: dist.redistribute(ts.ones((1 << 20, 1 << 20)), "[1048576@dp, 1048576]", FAR),
    "host": lambda: dist.place({"a": ts.tensor(np.ones((8, 8)))}, mesh=FAR),
    "another layout": lambda: dist.redistribute(
        dist.tensor((1 << 20, 8), layout="[1048576@dp, 8]", mesh=FAR), "[1048576, 8@tp]"
    ),
}  # fmt: skip


def loaded(model: nn.GPT, source: nn.GPT) -> nn.GPT:
    model.load_state_dict(source.state_dict())
    return model


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.filterwarnings("ignore::tessera.StrategyWarning")
def test_nothing_is_made_of_a_model_before_a_value_is_read(
    way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For more devices than this machine has, and a model too large for its memory."""

    def made(*_: object, **__: object) -> None:
        raise AssertionError("a value is made")

    with monkeypatch.context() as patch:
        for call in ("start", "compile", "step_by_step", "place", "place_blocks", "fetch"):
            patch.setattr(Engine, call, made)
        there = [t for t in flatten(WAYS[way]())[0] if isinstance(t, ts.Tensor)]
    assert there and all(t._data is None for t in there)
    wide = {t.dtype for t in there if t.dtype.is_float}
    if any(word in way for word in ("cast", "recipe", "a config", "moved", "apart", "copied")):
        assert wide <= {ts.bf16, ts.f16}


DEEP = {**SIZES, "layers": 6, "d": 16384, "hidden": 65536}
# Plans of models, states and batches that no machine could hold.
PIPES = dist.Mesh(("pp", "dp", "tp"), shape=(4, 32, 8))
EXPERTS = dist.Mesh(("dp", "ep"), shape=(16, 64))
BY_EXPERT = dist.strategy("data_parallel") + dist.strategy("expert_parallel")
MIXTRAL = {
    "model_type": "mixtral", "vocab_size": 32000, "hidden_size": 8192, "rms_norm_eps": 1e-5,
    "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64,
    "num_key_value_heads": 8, "num_local_experts": 8, "num_experts_per_tok": 2,
    "max_position_embeddings": 8192, "dtype": "bfloat16",
}  # fmt: skip


def batch_on(mesh: dist.Mesh, strategy: Any = PLAN) -> Any:
    """Token ids and labels without values: 64 Mi of each."""
    ids = [dist.tensor((8192, 8192), dtype=ts.int32) for _ in range(2)]
    return dist.place(ids, strategy, mesh, kind="batch")


def trained(
    model: Any, opt: Any = None, mesh: dist.Mesh = FAR, strategy: Any = PLAN, given: Any = None
) -> ts.schedule.Schedule:
    """The plan of a training step of `model`, which is placed if it has no mesh."""
    opt = opt or optim.AdamW(1e-3)
    if model.parameters()[next(iter(model.parameters()))].mesh != mesh:
        model = dist.place(model, strategy, mesh)
    state = opt.init(model.parameters(), strategy)

    @ts.jit(donate=("model", "state"))
    def step(model: Any, state: Any, ids: ts.Tensor, labels: ts.Tensor) -> ts.Tensor:
        loss: ts.Tensor = model.loss(ids, labels)
        weights = model.parameters()
        grads = ts.grad(loss, weights, layout=strategy)
        weights, new = opt.update(weights, grads, state)
        model.load_parameters(weights)
        state.update(new) if isinstance(state, dict) else None
        return loss

    return step.plan(model, state, *(given or batch_on(mesh, strategy)))


def of_step() -> Any:
    """The plan of a training step that makes its weights, their names and their state."""

    @graph.training_step(module="Large", strategy=PLAN)
    def step(batch: Any) -> Any:
        out = op.transformer_block(batch["x"], depth=80, heads=64)
        return graph.backward((out * out).mean()), {}

    batch = dist.place({"x": dist.tensor((1024, 2048, 8192))}, PLAN, FAR, kind="batch")
    plan = step.plan(batch)
    assert all(w._data is None for w in step.parameters.values())
    assert all(t._data is None for t in flatten(optim.Lion(1e-3).init(step.parameters, PLAN))[0])
    assert dist.inspect(step).schedule.hash == plan.hash
    return plan


def of_model_in_step() -> Any:
    model = dist.place(nn.GPT(LARGE), PLAN, FAR)

    @graph.training_step(module="Model", strategy=PLAN)
    def step(ids: ts.Tensor, labels: ts.Tensor) -> Any:
        return graph.backward(model.loss(ids, labels)), {}

    return step.plan(*batch_on(FAR))


def of_pipeline() -> Any:
    """Weights without a mesh, planned, then moved to their stages and planned again."""

    @pipeline.run(mesh_axes=("pp",), schedule="1F1B", microbatches=8, mesh=PIPES)
    def model(weights: Any, x: ts.Tensor) -> ts.Tensor:
        for i in range(8):
            x = ts.tanh(x @ weights[f"w{i}"])
        return x

    @ts.jit
    def step(weights: Any, x: ts.Tensor) -> Any:
        loss = model(weights, x).mean()
        return loss, ts.grad(loss, weights)

    weights = {f"w{i}": nn.Parameter(1 << 17, 1 << 17, name=f"w{i}") for i in range(8)}
    x = dist.place(dist.tensor((1 << 15, 1 << 17)), "data_parallel", PIPES, kind="batch")
    step.plan(weights, x)
    placed = model.place(weights)
    assert all(w._data is None for w in placed.values())
    plan = step.plan(placed, x)
    assert "4 stages" in pipeline.pipeline_text(model.table)
    assert dist.inspect(model).schedule.hash == dist.inspect(plan).schedule.hash == plan.hash
    return plan


def of_composed() -> Any:
    weights = [nn.Parameter(1 << 17, 1 << 17, name=f"w{i}") for i in range(4)]
    stages = [lambda h, i=i: ts.tanh(h @ weights[i]) for i in range(4)]
    pipe = pipeline.compose(4, stages, mesh=PIPES, schedule="GPipe", microbatches=8)
    x = dist.place(dist.tensor((1 << 15, 1 << 17)), "data_parallel", PIPES, kind="batch")
    ts.jit(lambda x: pipe(x).mean()).plan(x)
    return pipe.schedule


def of_given_arrays() -> Any:
    ids = np.zeros((1024, 8192), np.int32)
    placed = dist.place((ids, ids), PLAN, FAR, kind="batch")
    return trained(nn.GPT(LARGE).to(ts.bf16), given=placed)


def under_a_mesh() -> Any:
    with FAR:
        model, opt = nn.GPT(LARGE).to(ts.bf16), optim.AdamW(1e-3)
        ids = ts.zeros((8192, 8192), dtype=ts.int32)
        return trained(model, opt, given=(ids, ids))


PLANS: dict[str, Callable[[], Any]] = {
    "GPT": lambda: trained(nn.GPT(LARGE)),
    "GPT, bf16": lambda: trained(nn.GPT(LARGE).to(ts.bf16)),
    "under a mesh": under_a_mesh,
    "arrays as the batch": of_given_arrays,
    "layers apart": lambda: trained(nn.GPT(nn.GPTConfig(**DEEP, stacked=False))),
    "recomputed": lambda: trained(nn.GPT(nn.GPTConfig(**SIZES, remat=True))),
    "dropout": lambda: trained(nn.GPT(nn.GPTConfig(**SIZES, dropout=0.1))),
    "folded": lambda: trained(nn.GPT(LARGE), mesh=FAR.fold(onto=8)),
    "Llama": lambda: trained(nn.load_hf(THEIRS, FAR, PLAN, seq=8192)),
    "Mixtral": lambda: trained(nn.load_hf(MIXTRAL, FAR, PLAN)),
    "experts": lambda: trained(
        nn.GPT(nn.GPTConfig(**SIZES, experts=64)).to(ts.bf16), mesh=EXPERTS, strategy=BY_EXPERT
    ),
    "Momentum": lambda: trained(nn.GPT(LARGE), optim.Momentum(1e-3)),
    "Adafactor": lambda: trained(nn.GPT(LARGE), optim.Adafactor(1e-3)),
    "optax": lambda: trained(nn.GPT(LARGE), optim.from_optax(optax.adamw(1e-3))),
    "a step's own weights": of_step,
    "a model in a step": of_model_in_step,
    "a pipeline": of_pipeline,
    "a composed pipeline": of_composed,
}  # fmt: skip


@pytest.mark.parametrize("way", PLANS)
@pytest.mark.filterwarnings(
    "ignore::tessera.StrategyWarning", "ignore::tessera.pipeline.PipelineWarning"
)
def test_nothing_is_allocated_while_planning(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans of more than 200 GB on 1,024 devices that are not here: no array, no program."""

    def made(*_: object, **__: object) -> None:
        raise AssertionError("a value is made")

    with monkeypatch.context() as patch:
        for call in ("start", "compile", "place", "place_blocks", "fetch"):
            patch.setattr(Engine, call, made)
        plan = PLANS[way]()
    assert sum(plan.buffers[i].nbytes for i in plan.inputs) > 200e9
    assert dist.inspect(plan).total.sent_bytes > 0


def test_a_plan_does_not_start_the_engine() -> None:
    """Not with a batch of arrays either: the engine would start 1,024 virtual devices."""
    program = (
        "import numpy as np, tessera as ts\n"
        "from tessera import dist, nn\n"
        "from tessera.core.flags import engine_runs\n"
        "mesh = dist.Mesh(('dp',), devices=1024)\n"
        "plan = dist.strategy('zero_redundancy_optimizer', stage=3)\n"
        "model = dist.place(nn.GPT(nn.GPTConfig(vocab=128256, seq=128, d=8192, layers=80,"
        " heads=64)), plan, mesh)\n"
        "ids = dist.place((np.zeros((1024, 128), np.int32),) * 2, plan, mesh, kind='batch')\n"
        "step = ts.jit(lambda m, x, y: ts.grad(m.loss(x, y), m.parameters(), layout=plan))\n"
        "print(dist.inspect(step.plan(model, *ids)).total.count > 0, engine_runs())\n"
    )
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert ran.stdout.split() == ["True", "False"], ran.stderr


STEPS: dict[str, Callable[[Any], Any]] = {
    "cast": lambda w: w.astype("bfloat16") if isinstance(w, np.ndarray) else w.to(ts.bf16),
    "scaled": lambda w: w * 2.0,
    "turned": lambda w: w.T,
    "all three": lambda w: (w * 0.5 + 1.0).T,
    "reshaped": lambda w: w.reshape(-1),
    "cut": lambda w: w[1],
    "added": lambda w: w + w.reshape(-1)[:12],
}


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("init", ["normal", np.arange(96, dtype=np.float32).reshape(8, 12)])
def test_values_are_those_of_a_weight_that_was_made_before(step: str, init: Any) -> None:
    """As NumPy computes them, in each layout, from a parameter and from an intermediate value."""

    def new() -> nn.Parameter:
        ts.seed(3)
        if isinstance(init, str):
            return nn.Parameter(8, 12, init=init, name="w")
        return nn.Parameter(init)

    run, before = STEPS[step], new().numpy()
    want = np.asarray(run(before) if step != "cast" else before).astype(np.float32)
    tolerance = 2**-8 if step == "cast" else 1e-6
    placed = dist.place({"w": new()}, ZERO, NEAR)["w"]
    for got in (
        run(new()),
        run(placed),
        dist.place({"w": run(new())}, ZERO, NEAR)["w"],
        dist.place({"w": nn.Parameter(run(new()))}, ZERO, NEAR)["w"],
        deepcopy(nn.Parameter(run(new()))),
        dist.resize(NEAR, dist.redistribute(run(new()), None, dist.Mesh(("dp",), shape=(2,)))),
    ):
        np.testing.assert_allclose(got.to(ts.f32).numpy(), want, rtol=tolerance)


def test_each_device_makes_its_own_block_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    plain = create._initial

    def noted(t: Any, *more: Any) -> Any:
        asked.append(t.text)
        return plain(t, *more)

    monkeypatch.setattr(create, "_initial", noted)
    rows = dist.strategy("tensor_parallel", rules=[("w", 0)])
    w = dist.place({"w": (nn.Parameter(512, 256).to(ts.bf16) * 2).T}, rows, NEAR)["w"]
    model = dist.place(nn.Linear(512, 256).to(ts.bf16), ZERO, NEAR)
    assert asked == [] and w.layout == "[256@tp, 512]"
    w.numpy(), model.weight.numpy()
    assert asked == ["f32[512, 256@tp]", "f32[512@dp, 256]"]


def test_a_recipe_stays_when_the_weight_that_it_is_of_changes() -> None:
    ts.seed(0)
    w = nn.Parameter(4, 8, name="w")
    given = dist.tensor((4, 8), name="w")
    want = nn.Parameter(4, 8, name="w").numpy()
    twice, turned, more = w * 2, w.T, given * 2
    w.data = ts.ones((4, 8))
    np.testing.assert_array_equal(twice.numpy(), want * 2)
    ts.jit(lambda x: x + 1, donate="x")(given).numpy()
    np.testing.assert_array_equal(more.numpy(), want * 2)
    np.testing.assert_array_equal(turned.numpy(), want.T)
    np.testing.assert_array_equal(w.numpy(), np.ones((4, 8)))


def test_host_values_are_those_of_when_they_were_given() -> None:
    x = np.arange(64, dtype=np.float32).reshape(16, 4)
    want = x.copy()
    t = ts.tensor(x)
    a, b = nn.Parameter(t), dist.place({"t": t}, ZERO, NEAR)["t"]
    x[:] = 0
    ts.jit(lambda x: x * 0, donate="x")(t).numpy()  # may reuse the memory of `t`
    np.testing.assert_array_equal(a.numpy(), want)
    np.testing.assert_array_equal(b.numpy(), want)


def test_what_was_given_up_is_an_error_whatever_it_was_made_of() -> None:
    for make in (
        lambda: ts.ones((64,)),
        lambda: dist.tensor((64,)),
        lambda: ts.tensor(np.ones(64)),
    ):
        t = make()
        ts.jit(lambda x: x * 2.0, donate=0)(t)
        with pytest.raises(ts.DonatedError):
            t + 1.0
        with pytest.raises(ts.DonatedError):
            dist.place([t], ZERO, NEAR)[0].numpy()


def test_what_adds_up_runs_at_once_and_long_recipes_end() -> None:
    w = nn.Parameter(8, 8, init="ones")
    assert (w * w).sum()._data is not None  # a collective must run at a known time
    with ts.no_grad():
        x = w * 1.0
        for _ in range(100):
            x = x + x * 0.5
            assert x._data is not None or x._recipe.steps <= MOST_STEPS
    np.testing.assert_allclose(x.numpy(), np.full((8, 8), 1.5**100), rtol=1e-4)


def test_gradients_flow_through_what_is_not_made_yet() -> None:
    w = nn.Parameter(4, 8, name="w")
    loss = ((w * 3.0).T.to(ts.bf16).to(ts.f32) * 2.0).sum()
    np.testing.assert_array_equal(ts.grad(loss, w).numpy(), np.full((4, 8), 6.0))


def test_a_batch_without_values_is_laid_on_devices_that_are_not_here() -> None:
    ts.ones(2).numpy()  # the engine has started with its number of devices
    x = dist.place(dist.tensor((512, 64)), "data_parallel", FAR, kind="batch")
    assert str(x.type) == "f32[512@dp, 64]" and x.mesh is FAR and x._data is None
