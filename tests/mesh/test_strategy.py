"""Strategies: their layouts, and training under them.

The cost and traffic of ZeRO's stages are read off the compiled program.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import tessera as ts
from tessera import dist, nn, optim
from tessera.core.layout import parse_type, plain
from tessera.passes.simplify import simplify
from tests.cases import LONG

N = 4
SHAPES = {"up": (16, 32), "down": (32, 8), "bias": (8,)}
ELEMENTS = 16 * 32 + 32 * 8 + 8
DP = dist.strategy("data_parallel")
TP = dist.strategy("tensor_parallel")


def zero(stage: int) -> Any:
    """Data parallelism with ZeRO `stage`; stage 0 is data parallelism alone."""
    return DP + dist.strategy("zero_redundancy_optimizer", stage=stage) if stage else DP


@pytest.fixture(scope="module")
def line() -> dist.Mesh:
    return dist.Mesh(("dp",), devices=N)


def test_words_of_pytorch_are_the_strategies_of_the_same_layouts(line: dist.Mesh) -> None:
    assert dist.strategy("fsdp", "x") == dist.strategy("zero_redundancy_optimizer", "x", stage=3)
    assert dist.strategy("ddp", "x") == dist.strategy("data_parallel", "x")
    placed = dist.place({"w": dist.tensor((8, 4))}, "fsdp", line)
    assert placed["w"].layout == "[8@dp, 4]"
    with pytest.raises(ts.StrategyError, match="'fsdp': stage 2 does not exist"):
        dist.strategy("fsdp", stage=2)


# -- a training step on a mesh of data parallelism ------------------------------------------------
class Training:
    """A two-layer regression under ZeRO `stage`, with AdamW."""

    def __init__(self, mesh: dist.Mesh, stage: int, clip: float | None = None) -> None:
        rng = np.random.default_rng(0)
        plan = zero(stage)
        weights = {k: ts.tensor(rng.normal(size=s) * 0.1) for k, s in SHAPES.items()}
        self.params: dict[str, ts.Tensor] = dist.place(weights, plan, mesh)
        self.opt = optim.AdamW(0.01)
        self.state = self.opt.init(self.params, plan)
        self.x = ts.tensor(rng.normal(size=(64, 16)), mesh=mesh, layout="[64@dp, 16]")
        self.y = ts.tensor(rng.normal(size=(64, 8)), mesh=mesh, layout="[64@dp, 8]")

        @ts.jit
        def step(params: Any, state: Any, x: ts.Tensor, y: ts.Tensor) -> Any:
            out = ts.tanh(x @ params["up"]) @ params["down"] + params["bias"]
            loss = ts.mean((out - y) ** 2)
            goal = {k: plan.gradient(k, p.type) for k, p in params.items()}
            grads = ts.grad(loss, params, layout=goal)
            if clip is not None:
                grads, _ = optim.clip_by_global_norm(grads, clip)
            params, state = self.opt.update(params, grads, state)
            return params, state, loss

        self.step = step

    def losses(self, steps: int = 5) -> list[float]:
        out = []
        for _ in range(steps):
            self.params, self.state, loss = self.step(self.params, self.state, self.x, self.y)
            out.append(loss.item())
        return out

    def collectives(self) -> Counter[tuple[str, str]]:
        """Counts each collective of a step by (op, result type)."""
        graph = simplify(self.step.graph)
        return Counter((n.op, str(n.type)) for n, _ in graph.collectives())


LOSS = ("all_reduce", "f32[]")
WHOLE = ("f32[16, 32]", "f32[32, 8]", "f32[8]")
PARTS = ("f32[16, 32@dp]", "f32[32@dp, 8]", "f32[8@dp]")
SUMS = [("all_reduce", t) for t in WHOLE]
SCATTERS = [("reduce_scatter", t) for t in PARTS]
GATHERS = [("all_gather", t) for t in WHOLE]
STAGES = [
    (0, None, [*SUMS, LOSS]),
    # An all_reduce of which a device keeps only its block is a reduce_scatter ...
    (1, None, [*SCATTERS, *GATHERS, LOSS]),
    # ... unless the whole gradient is needed, for example for its norm.
    (1, 0.5, [*SUMS, *GATHERS, LOSS]),
    (2, None, [*SCATTERS, *GATHERS, LOSS]),
    # The norm of split gradients needs one more sum of one number.
    (2, 0.5, [*SCATTERS, *GATHERS, LOSS, LOSS]),
    # The gradient gathers the second matrix again, and does not need the first.
    (3, None, [*GATHERS, GATHERS[1], *SCATTERS, LOSS]),
    (3, 0.5, [*GATHERS, GATHERS[1], *SCATTERS, LOSS, LOSS]),
]


@pytest.mark.parametrize(("stage", "clip", "want"), STAGES)
def test_a_step_under_zero(
    stage: int, clip: float | None, want: list[tuple[str, str]], line: dist.Mesh
) -> None:
    """Compares the collectives with the expected ones, and the losses with those of the replicated
    run."""
    run = Training(line, stage, clip)
    np.testing.assert_allclose(run.losses(), replicated_losses(line, clip), rtol=0, atol=1e-5)
    assert run.collectives() == Counter(want)
    assert run.step._recordings == 1


_replicated: dict[float | None, list[float]] = {}


def replicated_losses(line: dist.Mesh, clip: float | None) -> list[float]:
    if clip not in _replicated:
        _replicated[clip] = Training(line, 0, clip).losses()
    return _replicated[clip]


def test_where_the_collectives_stand(line: dist.Mesh) -> None:
    """Stage 3 gathers weights before their use; stages 1 and 2 gather the updated weights."""
    for stage in (1, 2, 3):
        run = Training(line, stage)
        run.losses(1)
        for n, _ in simplify(run.step.graph).collectives():
            if n.op == "all_gather":
                updated = n.scope == "optimizer"
                assert updated is (stage < 3), (stage, n)
                assert bool(n.note) is (stage == 3), "what the user's plan says is not inserted"


@pytest.mark.parametrize(
    ("stage", "weights", "state"),
    [(0, 1, 1), (1, 1, N), (2, 1, N), (3, N, N)],
    ids=lambda v: str(v),
)
def test_bytes_that_stay_on_a_device(stage: int, weights: int, state: int, line: dist.Mesh) -> None:
    """Weights split over `weights` devices, two moments over `state`, and the step count."""
    run = Training(line, stage)
    for steps in (0, 1):
        run.losses(steps)
        kept = [*run.params.values(), *run.opt.state_dict(run.state).values()]
        want = 4 * ELEMENTS // weights + 2 * 4 * ELEMENTS // state + 4
        assert sum(t.type.local_bytes for t in kept) == want
        shards = [t.jax().addressable_shards[0].data.nbytes for t in kept]
        assert sum(shards) == want, "the arrays are as large as the types say"


def test_masters_of_narrow_weights_are_split_too(line: dist.Mesh) -> None:
    """Stage 1 with bf16 weights: f32 masters are split, and the updated bf16 weights are
    gathered."""
    plan = zero(1)
    w = dist.tensor((64, 16), mesh=line, dtype=ts.bf16, name="w")
    opt = optim.AdamW(0.01)
    state = opt.init({"w": w}, plan)
    assert {k: str(t.type) for k, t in opt.state_dict(state).items()} == {
        "step": "i32[]", "m.w": "f32[64@dp, 16]", "v.w": "f32[64@dp, 16]",
        "master.w": "f32[64@dp, 16]",
    }  # fmt: skip
    np.testing.assert_array_equal(state["master"]["w"].numpy(), w.numpy().astype(np.float32))

    @ts.jit
    def step(params: Any, state: Any) -> Any:
        return opt.update(params, {"w": params["w"] * 2.0}, state)

    new, _ = step({"w": w}, state)
    kinds = [(n.op, str(n.type)) for n, _ in simplify(step.graph).collectives()]
    assert kinds == [("all_gather", "bf16[64, 16]")]
    assert new["w"].type is w.type


@pytest.mark.parametrize("make", [optim.SGD, optim.Lion, optim.Adafactor], ids=lambda m: m.__name__)
def test_other_optimizers_under_zero(make: Callable[..., Any], line: dist.Mesh) -> None:
    """One device's state is smaller, but its values are those without a strategy."""
    rng = np.random.default_rng(1)
    host = {"w": rng.normal(size=(16, 8)), "b": rng.normal(size=(6,))}  # 6 over 4 is uneven
    opt = make(0.1, factor_from=8) if make is optim.Adafactor else make(0.1)
    results = []
    for stage in (0, 1, 2, 3):
        plan = zero(stage)
        params = dist.place({k: ts.tensor(v) for k, v in host.items()}, plan, line)
        state = opt.init(params, plan)
        step = ts.jit(lambda p, g, s: opt.update(p, g, s))
        for _ in range(3):
            grads = dist.place({k: t * 0.5 for k, t in params.items()}, plan, line, "gradient")
            params, state = step(params, grads, state)
        assert step._recordings == 1
        results.append({k: t.numpy() for k, t in params.items()})
    for other in results[1:]:
        for k, v in results[0].items():
            np.testing.assert_allclose(other[k], v, rtol=1e-6, atol=1e-7)


# -- a GPT on several meshes ----------------------------------------------------------------------
CONFIG = nn.GPTConfig(vocab=64, seq=16, d=32, layers=2, heads=4)


def gpt_losses(mesh: dist.Mesh | None, plan: Any) -> Iterator[Any]:
    """Yields the losses of 5 steps, then (weights, state) after them."""
    ts.seed(0)
    model = nn.GPT(CONFIG)
    if mesh is not None:
        dist.place(model, plan, mesh)
    opt = optim.AdamW(optim.warmup_cosine(3e-3, 2, 10))
    state = opt.init(model.parameters(), plan)

    @ts.jit
    def step(model: nn.GPT, state: Any, ids: ts.Tensor, labels: ts.Tensor) -> Any:
        loss = model.loss(ids, labels)
        params = model.parameters()
        goal = {k: plan.gradient(k, p.type) if plan else p for k, p in params.items()}
        grads, _ = optim.clip_by_global_norm(ts.grad(loss, params, layout=goal), 1.0)
        params, state = opt.update(params, grads, state)
        model.load_parameters(params)
        return loss, state

    ids = np.random.default_rng(0).integers(0, 64, (8, 17)).astype(np.int32)
    batch = []
    for part in (ids[:, :-1], ids[:, 1:]):
        t = plain(ts.int32, part.shape, mesh)
        batch.append(ts.tensor(part, mesh=mesh, layout=plan.batch(t) if plan else None))
    for _ in range(5):
        loss, state = step(model, state, *batch)
        yield loss.item()
    assert step._recordings == 1
    yield model.parameters(), opt.state_dict(state)


MESHES: list[tuple[str, dict[str, int], Any]] = [
    ("dp=4, stage 1", {"dp": 4}, zero(1)),
    ("dp=4, stage 3", {"dp": 4}, zero(3)),
    ("dp=2 tp=4, stage 2", {"dp": 2, "tp": 4}, zero(2) + TP),
]


@pytest.mark.parametrize(
    ("shape", "plan"),
    [pytest.param(*m[1:], id=m[0], marks=[LONG] * (m[0] == "dp=4, stage 1")) for m in MESHES],
)
def test_a_gpt_trains_the_same_on_any_mesh(shape: dict[str, int], plan: Any) -> None:
    if not _alone:
        _alone.extend(gpt_losses(None, None))
    mesh = dist.Mesh(tuple(shape), shape=shape)
    *losses, (params, state) = gpt_losses(mesh, plan)
    np.testing.assert_allclose(losses, _alone[:5], rtol=0, atol=1e-5)
    assert losses[-1] < losses[1] - 0.05, "it learns"
    for name, t in params.items():
        base = plain(t.dtype, t.shape, mesh)
        assert t.type is plan.weight(name, base), name
        assert state[f"m.{name}"].type is plan.optimizer(name, base), name


_alone: list[Any] = []


# -- layouts --------------------------------------------------------------------------------------
GRID = dist.Mesh(("dp", "tp"), shape={"dp": 2, "tp": 4})
PLACES = [
    ("attention.qkv", "f32[64, 3, 8, 8]", "f32[64, 3, 8@tp, 8]", "f32[64@dp, 3, 8@tp, 8]"),
    ("blocks.0.attention.out", "f32[8, 8, 64]", "f32[8@tp, 8, 64]", "f32[8@tp, 8, 64@dp]"),
    ("mlp.up", "f32[64, 256]", "f32[64, 256@tp]", "f32[64@dp, 256@tp]"),
    ("mlp.down", "f32[256, 64]", "f32[256@tp, 64]", "f32[256@(tp,dp), 64]"),
    ("embed.weight", "f32[1000, 64]", "f32[1000@tp, 64]", "f32[1000@(tp,dp), 64]"),
    ("norm.weight", "f32[64]", "f32[64]", "f32[64@dp]"),
    ("scale", "f32[]", "f32[]", "f32[]"),
    ("odd", "f32[5]", "f32[5]", "f32[5@dp]"),
]


@pytest.mark.parametrize(("name", "whole", "weight", "state"), PLACES, ids=[p[0] for p in PLACES])
def test_what_a_hybrid_plan_splits(name: str, whole: str, weight: str, state: str) -> None:
    plan = dist.strategy("zero_redundancy_optimizer", stage=2) + TP
    t = parse_type(whole, GRID)
    assert str(plan.weight(name, t)) == weight
    assert str(plan.gradient(name, t)) == str(plan.optimizer(name, t)) == state
    # A strategy keeps the splits of tensors that are already split.
    for get in (plan.weight, plan.gradient, plan.optimizer):
        assert get(name, get(name, t)) is get(name, t)
    assert plan.optimizer(name, plan.weight(name, t)) is plan.optimizer(name, t)


def test_stages_nest() -> None:
    t = parse_type("f32[64, 8]", GRID)
    splits = [
        [bool(get("w", t).split_axes) for get in (p.optimizer, p.gradient, p.weight)]
        for p in (dist.strategy("zero_redundancy_optimizer", stage=s) for s in (1, 2, 3))
    ]
    assert splits == [[True, False, False], [True, True, False], [True, True, True]]


def test_rules_and_axes_can_be_named() -> None:
    mesh = dist.Mesh(("x", "y"), shape={"x": 2, "y": 4})
    plan = dist.strategy("tensor_parallel", "y", rules=[("kernel$", -1)])
    plan += dist.strategy("data_parallel", "x")
    t = plain(ts.f32, (8, 8), mesh)
    assert str(plan.weight("a.kernel", t)) == "f32[8, 8@y]"
    assert str(plan.weight("a.up", t)) == "f32[8, 8]"
    assert str(plan.batch(t)) == "f32[8@x, 8]"


def test_place_moves_what_is_made_and_makes_the_rest_in_place(line: dist.Mesh) -> None:
    plan = zero(3)
    made, waits = ts.tensor(np.arange(8.0)), dist.tensor((8, 4), name="waits")
    placed = dist.place({"made": made, "waits": waits}, plan, line)
    assert {k: str(t.type) for k, t in placed.items()} == {
        "made": "f32[8@dp]",
        "waits": "f32[8@dp, 4]",
    }
    assert placed["made"].numpy().tolist() == list(range(8))
    assert placed["waits"] is waits


def test_place_lays_out_weights_that_were_looked_at_before(line: dist.Mesh) -> None:
    layer, x = nn.Linear(6, 6), np.ones((8, 6), np.float32)
    before = layer.state_dict()
    dist.place(layer, dist.strategy("zero_redundancy_optimizer", stage=3), line)
    after = layer.state_dict()
    assert {n: t.type for n, t in after.items()} == {
        n: w.type for n, w in layer.parameters().items()
    }

    @ts.jit
    def read(layer: nn.Linear, x: ts.Tensor) -> float:
        return float(layer(x).mean().item())  # a value read, after which another program begins

    want = (x @ before["weight"].numpy() + before["bias"].numpy()).mean()
    assert read(layer, ts.tensor(x)) == pytest.approx(want, abs=1e-6)
    np.testing.assert_array_equal(after["weight"].numpy(), before["weight"].numpy())


def test_place_moves_state_that_waits(line: dist.Mesh) -> None:
    """State created without a strategy and placed by one later, before and after its first use."""
    opt = optim.Adam()
    state = opt.init({"w": dist.tensor((8, 4), mesh=line, dtype=ts.bf16, name="w")})
    before = dist.place(state["v"], zero(1), line, "optimizer")["w"]
    assert state["step"].item() == 0  # computed, and all other zeros with it
    after = dist.place(state["m"], zero(1), line, "optimizer")["w"]
    master = dist.place(state["master"], zero(1), line, "optimizer")["w"]
    for part in (before, after, master):
        assert str(part.type) == "f32[8@dp, 4]"
        assert part.jax().addressable_shards[0].data.shape == (2, 4)


# -- strategies that a user writes ----------------------------------------------------------------
class Columns(dist.AxisStrategy):
    """A strategy that splits the columns of each matrix over the axis."""

    splits_batch = False

    def lay_weight(self, name: str, t: ts.TensorType) -> ts.TensorType:
        return self.split(t, -1) if t.rank == 2 else t


class Sharded(dist.AxisStrategy):
    """A strategy that splits rows over the axis, and dim 0 of the persistent values in `kinds`."""

    def __init__(self, axis: str, *kinds: str) -> None:
        super().__init__(axis)
        self.kinds = kinds

    def lay_at_rest(self, kind: str, name: str, t: ts.TensorType) -> ts.TensorType:
        return self.split_at_rest(t, 0) if kind in self.kinds and t.rank else t


class Sequences(dist.AxisStrategy):
    """A strategy that splits dim 1 of each batch over the axis."""

    splits_batch = False

    def lay_batch(self, t: ts.TensorType) -> ts.TensorType:
        return self.split(t, 1)


def trained(strategy: dist.Strategy | None, mesh: dist.Mesh | None) -> tuple[Any, Any, Any]:
    """Returns (weights, state, the step's collectives) after three steps of AdamW."""
    rng = np.random.default_rng(5)
    w: Any = {k: ts.tensor(rng.normal(size=s).astype(np.float32) / 4) for k, s in SHAPES.items()}
    batch: Any = ts.tensor(rng.normal(size=(8, 4, 16)).astype(np.float32))
    if mesh is not None:
        w, batch = dist.place(w, strategy, mesh), dist.place(batch, strategy, mesh, kind="batch")
    opt = optim.AdamW(1e-2)
    state = opt.init(w, strategy)

    @ts.jit
    def step(w: Any, state: Any, x: ts.Tensor) -> Any:
        out = ts.tanh(x @ w["up"]) @ w["down"] + w["bias"]
        grads = ts.grad((out * out).mean(), w, layout=strategy)
        return opt.update(w, grads, state)

    for _ in range(3):
        w, state = step(w, state, batch)
    return w, state, {n.op for n, _ in step.graph.collectives()}


@pytest.mark.parametrize(
    ("strategy", "moves"),
    [
        (Sharded("dp"), {"all_reduce"}),
        (Sharded("dp", "optimizer", "gradient"), {"reduce_scatter", "all_gather"}),
        (Columns("tp") + DP, {"all_reduce"}),
        (DP + Columns("tp") + Sharded("dp", "optimizer", "gradient", "weight"), {"all_gather"}),
        (DP + Sequences("tp"), {"all_reduce"}),
    ],
    ids=lambda x: "+".join(f"{p.kind}" for p in x.parts) if isinstance(x, dist.Strategy) else "",
)
def test_a_strategy_of_a_users_own_trains_the_same(
    strategy: dist.Strategy, moves: set[str]
) -> None:
    alone, _, none = trained(None, None)
    w, state, collectives = trained(strategy, dist.Mesh.parse("dp=2 tp=2"))
    assert not none and moves <= collectives
    for name, t in w.items():
        np.testing.assert_allclose(t.numpy(), alone[name].numpy(), rtol=2e-4, atol=2e-5)
        assert t.layout == plain_layout(strategy, name, "weight")
        assert state["m"][name].layout == plain_layout(strategy, name, "optimizer")


def plain_layout(strategy: dist.Strategy, name: str, kind: str) -> str:
    """The layout by the strategies above, written by hand."""
    dims = [str(n) for n in SHAPES[name]]
    for p in strategy.parts:
        if isinstance(p, Columns) and len(dims) == 2:
            dims[-1] += "@tp"
    for p in strategy.parts:
        if isinstance(p, Sharded) and kind in p.kinds:
            dims[0] = f"{SHAPES[name][0]}@" + ("(tp,dp)" if "@tp" in dims[0] else "dp")
    return f"[{', '.join(dims)}]"


def test_a_strategy_of_a_users_own_cuts_the_weights_of_a_local_body() -> None:
    seen: list[Any] = []
    note = seen.append

    @ts.distribute(strategy=Columns("tp"), mesh=dist.Mesh.parse("tp=4"))
    def product(x: ts.Tensor, weights: ts.Tensor) -> ts.Tensor:
        note((x.shape, weights.shape))
        return x @ weights

    rng = np.random.default_rng(6)
    x, w = (rng.normal(size=s).astype(np.float32) for s in ((3, 8), (8, 12)))
    out = product(ts.tensor(x).reshape(1, 3, 8), ts.tensor(w))
    assert seen[-1] == ((1, 3, 8), (8, 3)) and out.shape == (1, 3, 12)
    np.testing.assert_allclose(out.numpy()[0], x @ w, rtol=1e-5)


def test_a_dim_that_is_not_there_is_not_split(line: dist.Mesh) -> None:
    class Third(dist.AxisStrategy):
        def lay_weight(self, name: str, t: ts.TensorType) -> ts.TensorType:
            return self.split(t, 2)

    with pytest.raises(ts.StrategyError, match="there is no dim 2 to split over 'dp'"):
        dist.place({"w": ts.ones((8, 4))}, Third("dp"), line)


def test_momentum_of_ones_own_rests_as_its_weight_does() -> None:
    """ZeRO-3 weights stay split, so that one recording serves all steps."""
    mesh = dist.Mesh(("dp",), devices=4)
    plan = dist.strategy("zero_redundancy_optimizer", stage=3)
    model = dist.place(nn.Linear(8, 8), plan, mesh)
    speed = {n: ts.zeros_like(p) for n, p in model.named_parameters()}

    @ts.jit
    def step(model: Any, speed: Any, x: ts.Tensor) -> Any:
        _, grads = ts.value_and_grad(lambda m: (m(x) ** 2).mean())(model)
        new = {n: speed[n] * 0.9 + g for n, g in grads.items()}
        for n, p in model.named_parameters():
            p.data = p.data - 0.1 * new[n]
        return new

    x = dist.place(np.ones((8, 8), np.float32), plan, mesh, kind="batch")
    for _ in range(3):
        speed = step(model, speed, x)
        assert model.weight.type.rest_axes == speed["weight"].type.rest_axes == ("dp",)
    assert sum(map(len, step._entries.values())) == 1
