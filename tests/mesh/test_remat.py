"""`ts.remat`: the same values, gradients and bits in less memory."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from io import StringIO
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rich.console import Console

import tessera as ts
from tessera import dist, nn, op
from tessera.cost.flops import device_flops
from tessera.cost.memory import memory_plan
from tessera.plan.changes import model_flops, recomputed
from tessera.show.plan_view import planned, recomputation, render_plan
from tessera.train.memory import program_bytes

RNG = np.random.default_rng(0)
LAYERS, WIDTH = 12, 64
POLICIES: dict[str, Any] = {
    "nothing": "nothing", "dots": "dots", "everything": "everything",
    "of tanh": lambda n: n.op == "tanh", "offload": "offload",
}  # fmt: skip
every_policy = pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)


class Block(nn.Module):
    def __init__(self) -> None:
        self.up, self.down = nn.Parameter(WIDTH, 4 * WIDTH), nn.Parameter(4 * WIDTH, WIDTH)
        self.norm = nn.Parameter(WIDTH, init="ones")

    def __call__(self, x: ts.Tensor) -> ts.Tensor:
        h = nn.rms_norm(x) * self.norm
        return x + nn.dropout(nn.gelu(h @ self.up), 0.1) @ self.down


class Model(nn.Module):
    """Layers that are written out, each with its own weights."""

    def __init__(self, wrap: Callable[[Any], Any], layers: int = LAYERS) -> None:
        self.blocks = [wrap(Block()) for _ in range(layers)]

    def __call__(self, x: ts.Tensor) -> ts.Tensor:
        for block in self.blocks:
            x = block(x)
        return (x * x).mean()


def stepped(model: Model, rows: int = 512, **how: Any) -> tuple[Any, Any, dict[str, Any]]:
    """(The compiled step, its loss, its gradients) of a model with fixed weights."""
    rng = np.random.default_rng(1)
    model.load_state_dict(
        {
            k: 0.1 * rng.normal(size=t.shape).astype(np.float32)
            for k, t in model.state_dict().items()
        }
    )
    x = ts.tensor(rng.normal(size=(rows, WIDTH)).astype(np.float32), **how)

    @ts.jit
    def step(x: ts.Tensor) -> Any:
        loss = model(x)
        return loss, ts.grad(loss, model)

    ts.seed(0)
    loss, grads = step(x)
    return step, loss.item(), {k: g.numpy() for k, g in grads.items()}


def kept(policy: Any = None) -> Callable[[Any], Any]:
    return lambda block: block if policy is None else ts.remat(block, policy=policy)


# -- memory ---------------------------------------------------------------------------------------
def test_layers_written_out_need_a_third_of_the_memory() -> None:
    plain, loss, grads = stepped(Model(kept()))
    small, again, others = stepped(Model(kept("nothing")))
    assert program_bytes(small).temporary < program_bytes(plain).temporary / 3
    assert loss == again
    for name, g in grads.items():
        np.testing.assert_allclose(others[name], g, rtol=1e-5, atol=1e-8)


@every_policy
def test_the_plan_knows_the_memory_of_each_policy(policy: Any) -> None:
    step, *_ = stepped(Model(kept(policy)))
    planned = memory_plan(step.graph).temporary
    assert abs(program_bytes(step).temporary - planned) < 0.2 * planned
    assert memory_plan(stepped(Model(kept()))[0].graph).temporary > 1.4 * planned


@every_policy
def test_the_plan_shows_what_recomputation_saves_and_costs(policy: Any) -> None:
    plain, step = (stepped(Model(kept(p)))[0] for p in (None, policy))
    r = recomputation(step.graph)
    assert r.temporary == memory_plan(step.graph).temporary < r.temporary_kept
    assert r.temporary_kept == memory_plan(plain.graph).temporary
    assert r.flops == device_flops(step.graph) > r.flops_kept
    assert r.flops_kept == pytest.approx(device_flops(plain.graph))
    up_bytes = 512 * 4 * WIDTH * 4  # of h @ up in a layer
    away = LAYERS * up_bytes if policy == "offload" else 0
    assert r.on_host == 0 and recomputation(step.graph, on="gpu").on_host == away
    first, other = (s.programs[0].schedule for s in (plain, step))
    assert model_flops(first) == model_flops(other)
    assert not recomputed(first).all


def test_the_line_of_the_plan() -> None:
    mesh = dist.Mesh(("dp",), devices=1)
    texts = []
    for policy in (None, "offload"):
        model = dist.place(Model(kept(policy)), dist.strategy("data_parallel"), mesh)
        x = dist.tensor((512, WIDTH), mesh=mesh)
        graph = planned(lambda m, x: ts.grad(m(x), m), model, x)
        weights = model.parameters()
        console = Console(record=True, file=StringIO(), width=200)
        console.print(render_plan(mesh, graph, weights, {"weights": weights}))
        texts.append(console.export_text())
    line = "recomputation: temporaries 9.2 MiB instead of 21.5 MiB; 144.7 MFLOP more"
    assert line in texts[1] and "recomputation" not in texts[0]


# -- values ---------------------------------------------------------------------------------------
STRATEGIES = {
    "data_parallel": dist.strategy("data_parallel"),
    "zero3": dist.strategy("zero_redundancy_optimizer", stage=3),
}


@pytest.mark.parametrize("strategy", STRATEGIES.values(), ids=STRATEGIES)
@every_policy
def test_gradients_have_the_same_bits_on_a_mesh(policy: Any, strategy: Any) -> None:
    mesh = dist.Mesh(("dp", "tp"), shape={"dp": 2, "tp": 4})
    found = []
    with dist.deterministic(level="mesh_invariant"):
        for wrap in (kept(), kept(policy)):
            model = dist.place(Model(wrap, 2), strategy, mesh)
            found.append(stepped(model, 16, mesh=mesh, layout="[16@dp, 64]")[1:])
    (loss, grads), (again, others) = found
    assert loss == again
    for name, g in grads.items():
        np.testing.assert_array_equal(others[name], g, err_msg=name)


def function(x: Any, w: Any, np_: Any) -> Any:
    """A function of tensors and of arrays of jax."""
    h = np_.tanh(x @ w)
    return np_.sum(np_.exp(h) * h, -1)


LAYOUTS = [("[8, 4]", "[4, 6]"), ("[8@dp, 4]", "[4, 6@tp]"), ("[8@tp, 4@dp]", "[4@dp, 6]")]


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("layouts", LAYOUTS, ids=str)
@every_policy
def test_values_and_gradients_are_those_of_jax(
    policy: Any, layouts: tuple[str, str], compiled: bool, mesh: dist.Mesh
) -> None:
    x, w = RNG.normal(size=(8, 4)).astype(np.float32), RNG.normal(size=(4, 6)).astype(np.float32)

    def loss(x: Any, w: Any) -> Any:
        inner = ts.remat(lambda y: function(y, w, ts), policy=policy)  # w is a value from outside
        return ts.sum(inner(x * 2.0) ** 2)

    def slopes(x: Any, w: Any) -> Any:
        value = loss(x, w)
        dx, dw = ts.grad(value, [x, w])
        return value, dx, dw, ts.grad(ts.sum(dx * dx), w)  # and a second derivative

    args = [ts.tensor(a, mesh, t) for a, t in zip((x, w), layouts, strict=True)]
    found = (ts.jit(slopes) if compiled else slopes)(*args)

    def theirs(x: Any, w: Any) -> Any:
        return jnp.sum(jax.checkpoint(lambda y: function(y, w, jnp))(x * 2.0) ** 2)

    dx, dw = jax.grad(theirs, (0, 1))(x, w)
    second = jax.grad(lambda w: jnp.sum(jax.grad(theirs)(x, w) ** 2))(w)
    for mine, want in zip(found, (theirs(x, w), dx, dw, second), strict=True):
        np.testing.assert_allclose(mine.numpy(), want, rtol=2e-4, atol=2e-4 * np.abs(want).max())


def test_a_region_inside_of_loops_vmap_and_local_bodies(mesh: dist.Mesh) -> None:
    x = RNG.normal(size=(8, 4)).astype(np.float32)
    part = ts.remat(lambda h, r: ts.tanh(h * r) + r)
    plain = lambda h, r: jnp.tanh(h * r) + r  # noqa: E731

    def looped(x: Any) -> Any:
        end, rows = ts.scan(lambda h, r: (part(h, r), h), x[0], x)
        return ts.sum(end) + ts.sum(rows**2)

    def theirs(x: Any) -> Any:
        end, rows = jax.lax.scan(lambda h, r: (plain(h, r), h), x[0], x)
        return jnp.sum(end) + jnp.sum(rows**2)

    mine = ts.jit(lambda x: ts.grad(looped(x), x))(ts.tensor(x, mesh, "[8@dp, 4@tp]"))
    np.testing.assert_allclose(mine.numpy(), jax.grad(theirs)(x), rtol=1e-4, atol=1e-5)
    each = ts.vmap(lambda r: ts.grad(ts.sum(part(r, r) ** 2), r))
    want = jax.vmap(jax.grad(lambda r: jnp.sum(plain(r, r) ** 2)))(x)
    np.testing.assert_allclose(each(ts.tensor(x)).numpy(), want, rtol=1e-4, atol=1e-5)

    @op.kernel
    def local(x: Any) -> Any:
        y = dist.all_reduce(part(x, x), axis="tp") / 4.0
        return ts.grad(ts.sum(y**2), x)

    got = local(ts.tensor(x, mesh, "[8@dp, 4]")).numpy()
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


def test_regions_nest() -> None:
    inner = ts.remat(lambda h: ts.exp(ts.sin(h)))
    outer = ts.remat(lambda h: inner(inner(h)) * h)
    x = ts.tensor(np.linspace(-1, 1, 7).astype(np.float32))
    got = ts.jit(lambda x: ts.grad(ts.sum(outer(x)), x))(x).numpy()
    want = jax.grad(lambda h: jnp.sum(jnp.exp(jnp.sin(jnp.exp(jnp.sin(h)))) * h))(x.numpy())
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


def test_a_slope_passes_through_a_region() -> None:
    f = ts.remat(lambda x: ts.tanh(x) * x)
    x, along = ts.tensor([0.3, -1.2]), ts.tensor([1.0, 0.5])
    y, slope = ts.jvp(f, (x,), (along,))
    want = jax.jvp(lambda x: jnp.tanh(x) * x, (x.numpy(),), (along.numpy(),))
    np.testing.assert_allclose(y.numpy(), want[0], rtol=1e-5)
    np.testing.assert_allclose(slope.numpy(), want[1], rtol=1e-5)


# -- modules --------------------------------------------------------------------------------------
class Counts(nn.Module):
    """A layer with state: a running mean and the number of calls."""

    def __init__(self) -> None:
        self.weight = nn.Parameter(4)
        self.mean, self.calls = ts.zeros(4), ts.tensor(0)

    def __call__(self, x: ts.Tensor) -> ts.Tensor:
        self.mean = 0.5 * self.mean + 0.5 * x.mean(0)
        self.calls = self.calls + 1
        return ts.tanh(x * self.weight) - self.mean


@pytest.mark.parametrize("compiled", [False, True])
def test_a_module_keeps_its_class_its_names_and_its_state(compiled: bool) -> None:
    plain, again = Counts(), ts.remat(Counts())
    assert type(again).__name__ == "Counts" and isinstance(again, Counts)
    assert list(again.state_dict()) == list(plain.state_dict())
    again.load_state_dict(plain.state_dict())
    x = ts.tensor(RNG.normal(size=(3, 4)).astype(np.float32))
    results = []
    for module in (plain, again):

        def step(x: ts.Tensor, module: Any = module) -> Any:
            y = module(x) + module(x)
            return y, ts.grad(ts.sum(y * y), module)["weight"]

        run = ts.jit(step) if compiled else step
        results.append([t.numpy() for t in (*run(x), *module.state_dict().values())])
        assert module.calls.item() == 2
    for a, b in zip(*results, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6)


def test_a_module_is_copied_and_pickled() -> None:
    module = ts.remat(Counts(), policy="dots")
    x = ts.ones((2, 4))
    want = module(x).numpy()
    module.mean = ts.zeros(4)
    for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert type(other) is type(module)
        np.testing.assert_array_equal(other(x).numpy(), want)


def test_values_shown_in_a_region_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    @ts.remat
    def f(x: Any) -> Any:
        ts.debug.print(ts.sum(x))
        return x * 2.0

    ts.jit(f)(ts.ones(3))
    assert "3.0" in capsys.readouterr().out


def test_another_policy_is_an_error() -> None:
    with pytest.raises(ts.UsageError, match="policy"):
        ts.remat(lambda x: x, policy="some")


@pytest.mark.parametrize("policy", ["nothing", "offload"])
def test_second_derivatives_of_nested_regions(policy: str) -> None:
    w = ts.tensor(RNG.normal(size=(4, 4)).astype(np.float32))
    inner = lambda x: ts.sin(x @ w)  # noqa: E731
    outer = ts.remat(inner, policy=policy)
    x = ts.ones(4)
    got, want = (
        ts.hessian(lambda x, f=f: ts.sum(f(f(x[None])) ** 2))(x).numpy() for f in (outer, inner)
    )
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-4)


@pytest.mark.parametrize("remat", ["offload", 1, 3])
def test_layers_of_a_gpt_by_number_and_on_the_host(remat: Any) -> None:
    ids = RNG.integers(0, 64, (4, 16)).astype(np.int32)

    def computed(remat: Any) -> tuple[Any, Any]:
        ts.seed(0)
        config = nn.GPTConfig(vocab=64, seq=16, d=32, layers=3, heads=4, dropout=0.1, remat=remat)
        step = ts.jit(lambda m, ids: ts.value_and_grad(lambda m: m.loss(ids, ids))(m))
        loss, grads = step(nn.GPT(config), ts.tensor(ids))
        return step.graph.flops, [loss.numpy(), *(g.numpy() for g in grads.values())]

    flops, values = computed(remat)
    kept, want = computed(False)
    for a, b in zip(values, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-6)
    again = computed("products" if remat == "offload" else True)[0] - kept
    part = 1 if remat == "offload" else remat / 3
    assert flops - kept == pytest.approx(part * again, rel=0.02)
    with pytest.raises(ts.UsageError, match="a loop over layers cannot have remat="):
        nn.GPT(nn.GPTConfig(layers=4, remat=remat, loop=True))
    with pytest.raises(ts.UsageError, match="remat cannot be 5"):
        nn.GPTConfig(layers=4, remat=5)
