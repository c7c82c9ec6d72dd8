"""Pipelines against one device, with every schedule, mesh, kind of stages and state."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import tessera as ts
from tessera import dist, graph, nn, op, optim, pipeline
from tessera.core.layout import parse_type
from tessera.ir.schedule.donation import donation_aliases
from tessera.ir.schedule.pipelines.formulas import peak_activations
from tessera.observe import profile as profiles
from tessera.runtime.arrays import fetch, place, sharding
from tessera.runtime.program_cache import Book
from tessera.runtime.send import sender
from tessera.runtime.stepped_executor import Stepped
from tessera.show.plan_view import traffic
from tests.cases import LONG, grid
from tests.core.test_pipeline import reduced

RNG = np.random.default_rng(11)
V, D, H, B, S, LAYERS = 12, 8, 24, 16, 3, 4
Weights = dict[str, Any]


def made(*shape: int) -> Any:
    return (RNG.normal(size=shape) * 0.4).astype(np.float32)


WEIGHTS: Weights = {"embed": made(V, D), "gain": made(D)}
for i in range(LAYERS):
    WEIGHTS |= {f"up{i}": made(D, H + 8 * i), f"down{i}": made(H + 8 * i, D)}
TOKENS = RNG.integers(0, V, (B, S)).astype(np.int32)
LABELS = RNG.integers(0, V, (B, S)).astype(np.int32)
LABELS[:5] = -100  # microbatches in which all labels are ignored
LABELS[9, 1:] = -100


def first(w: Weights, t: Any) -> Any:
    return w, ts.take(w["embed"], t, 0)


def layer(k: int) -> Callable[..., Any]:
    return lambda w, x: (w, x + ts.tanh(x @ w[f"up{k}"]) @ w[f"down{k}"])


def last(w: Weights, x: Any) -> Any:
    return (x * w["gain"]) @ w["embed"].T  # tied to the first


PARTS = [first, *map(layer, range(LAYERS)), last]


def plain(w: Weights, t: Any) -> Any:
    out: Any = (w, t)
    for part in PARTS:
        out = part(*out)
    return out


def training(model: Callable[..., Any]) -> Callable[..., Any]:
    """Returns an Adam step that also gives the norm of all gradients."""

    def step(weights: Weights, state: Weights, batch: Weights) -> Any:
        logits = model(weights, batch["x"])
        loss = nn.cross_entropy(logits, batch["y"])
        grads = ts.grad(loss, weights)
        norm = ts.sqrt(sum((g * g).sum() for g in grads.values()))
        m = {k: 0.9 * state["m"][k] + 0.1 * g for k, g in grads.items()}
        v = {k: 0.9 * state["v"][k] + 0.1 * g * g for k, g in grads.items()}
        scale = ts.minimum(1.0 / norm, 1.0) * 0.1
        new = {k: w - scale * m[k] / (ts.sqrt(v[k]) + 0.1) for k, w in weights.items()}
        return loss, grads, new, {"m": m, "v": v}, logits

    return step


def zeros() -> Weights:
    return {k: {n: np.zeros_like(w) for n, w in WEIGHTS.items()} for k in "mv"}


def close(got: Any, want: Any, rtol: float = 2e-5, atol: float = 2e-6) -> None:
    a, b = leaves(got), leaves(want)
    assert len(a) == len(b)
    for x, y in zip(a, b, strict=True):
        np.testing.assert_allclose(x.numpy(), y.numpy(), rtol=rtol, atol=atol)


def leaves(tree: Any) -> list[Any]:
    if isinstance(tree, dict):
        return [x for k in tree for x in leaves(tree[k])]
    if isinstance(tree, (list, tuple)):
        return [x for v in tree for x in leaves(v)]
    return [tree]


@pytest.fixture(scope="module")
def steps() -> list[Any]:
    """Three steps on one device."""
    f = ts.jit(training(plain))
    out, found = (None, None, WEIGHTS, zeros()), []
    for _ in range(3):
        out = f(out[2], out[3], {"x": TOKENS, "y": LABELS})
        found.append(out)
    return found


MESHES = {
    "dp pp": ("dp=2 pp=2", lambda k: "[{0}, {1}]", "[{0}@dp, {1}]"),
    "tp pp": ("pp=2 tp=2", lambda k: SPLIT.get(k[:-1], ""), ""),
    "dp tp pp": ("dp=2 tp=2 pp=2", lambda k: SPLIT.get(k[:-1], ""), "[{0}@dp, {1}]"),
}
SPLIT = {"up": "[{0}, {1}@tp]", "down": "[{0}@tp, {1}]"}


def on(x: Any, mesh: Any, text: str) -> Any:
    plain = "[" + ", ".join(map(str, x.shape)) + "]"
    return ts.tensor(x, mesh=mesh, layout=text.format(*x.shape) if text and x.ndim > 1 else plain)


def data(mesh: Any, how: str = "") -> Weights:
    return {"x": on(TOKENS, mesh, how), "y": on(LABELS, mesh, how)}


def reverse_rows(rank: int, ranks: int, microbatches: int) -> list[str]:
    """GPipe with a backward through the microbatches in reverse order."""
    many = range(microbatches)
    return [f"{rank}F{m}" for m in many] + [f"{rank}B{m}" for m in reversed(many)]


@pytest.mark.parametrize(
    ("schedule", "where"),
    grid([*pipeline.SCHEDULES, reverse_rows, "csv"], list(MESHES),
         lambda x: x if isinstance(x, str) else x.__name__),
)  # fmt: skip
def test_training_as_on_one_device(
    schedule: Any, where: str, steps: list[Any], tmp_path: Path
) -> None:
    text, of, batch = MESHES[where]
    mesh = dist.Mesh.parse(text)
    if schedule == "csv":
        path = tmp_path / "own.csv"
        path.write_text(pipeline.pipeline_table("1F1B", 2, 4).to_csv())
        schedule = str(path)
    model = pipeline.compose(stages=2, assign=PARTS, mesh=mesh, schedule=schedule, microbatches=4)
    f = ts.jit(training(model))
    w = {k: on(v, mesh, of(k)) for k, v in WEIGHTS.items()}
    state = {n: {k: on(v, mesh, of(k)) for k, v in s.items()} for n, s in zeros().items()}
    out: Any = (None, None, w, state)
    for want in steps:  # weights lie on the whole mesh in the first call, on slices in the second
        out = f(out[2], out[3], data(mesh, batch))
        close(out, want)
    assert f._recordings == 2
    assert len(model.balance) == model.table.stages


@pytest.mark.parametrize("onto", ["dp=2,pp=2", "dp=1,pp=2"])
def test_weights_and_state_given_up_are_built_anew_in_their_place(
    onto: str, steps: list[Any]
) -> None:
    mesh = dist.Mesh.parse("dp=2 pp=2").fold(onto)
    model = pipeline.compose(stages=2, assign=PARTS, mesh=mesh, schedule="1F1B", microbatches=4)
    f = ts.jit(training(model), donate=("weights", "state"))
    weights: Any = {k: on(v, mesh, "") for k, v in WEIGHTS.items()}
    state: Any = {m: {k: on(v, mesh, "") for k, v in x.items()} for m, x in zeros().items()}
    for n, want in enumerate(steps):
        old = weights["up1"]
        loss, _, weights, state, _ = f(weights, state, data(mesh, "[{0}@dp, {1}]"))
        close([loss, weights, state], [want[0], want[2], want[3]])
        if n and onto == "dp=2,pp=2" and jax.__version_info__ >= (0, 11):
            close(old, steps[n - 1][2]["up1"])  # the engine caches reads of several devices
            continue
        with pytest.raises(ts.DonatedError, match="was donated to a function"):
            old.numpy()
    made = sum(map(len, donation_aliases(f.schedule)))
    assert made == 3 * len(WEIGHTS)


def test_gradients_come_back_where_the_weights_were() -> None:
    mesh = dist.Mesh.parse("dp=2 pp=2")
    model = pipeline.compose(stages=2, assign=PARTS, mesh=mesh, microbatches=4)
    f = ts.jit(training(model))
    w = {k: on(v, mesh, "") for k, v in WEIGHTS.items()}
    _, grads, new, state, _ = f(w, zeros(), data(mesh))
    assert {g.mesh for g in grads.values()} == {mesh}
    slices = [mesh.slice(pp=0), mesh.slice(pp=1)]
    assert new["up0"].mesh == slices[0] and new["up3"].mesh == slices[1]
    _, grads, _, _, _ = f(new, state, data(mesh))
    assert grads["up0"].mesh == slices[0] and grads["up3"].mesh == slices[1]


@pytest.mark.parametrize(
    "onto", ["", *(pytest.param(m, marks=LONG) for m in ("pp=1", "dp=1,pp=2,tp=1"))]
)
def test_weights_may_rest_split_over_the_stages_axis(steps: list[Any], onto: str) -> None:
    """Split as in section 7.6 of guide 1, unevenly too: a step gathers the weights that a stage
    uses."""
    mesh = dist.Mesh.parse("dp=2 pp=2 tp=2")
    mesh = mesh.fold(onto) if onto else mesh
    how = {"embed": "[{0}@(tp,pp), {1}]", "up": "[{0}@pp, {1}@tp]", "down": "[{0}@tp, {1}@pp]"}
    how |= {"up1": "[{0}, {1}@(tp,pp)]", "down0": "[{0}@(pp,tp), {1}]"}
    model = pipeline.compose(stages=2, assign=PARTS, mesh=mesh, microbatches=4)
    f = ts.jit(training(model))

    def laid(tree: Weights) -> Weights:
        return {k: on(v, mesh, how.get(k, how.get(k[:-1], ""))) for k, v in tree.items()}

    out: Any = (None, None, laid(WEIGHTS), {k: laid(v) for k, v in zeros().items()})
    for i, want in enumerate(steps):
        before = out[2]
        out = f(out[2], out[3], data(mesh, "[{0}@dp, {1}]"))
        close(out, want)
        if i == 0:  # gradients keep the weights' layout; new weights stay on their stages
            assert {k: g.type for k, g in out[1].items()} == {k: w.type for k, w in before.items()}
            assert all("pp" not in w.mesh for w in out[2].values())
    placed = model.place(laid(WEIGHTS))
    for k, w in placed.items():
        np.testing.assert_array_equal(w.numpy(), WEIGHTS[k])
        assert w.mesh in (mesh.slice(pp=0), mesh.slice(pp=1))


def test_placed_weights_are_not_sent(steps: list[Any]) -> None:
    mesh = dist.Mesh.parse("dp=2 pp=2")
    model = pipeline.compose(stages=2, assign=PARTS, mesh=mesh, microbatches=4)
    f = ts.jit(training(model))
    batch = data(mesh)
    f(WEIGHTS, zeros(), batch)
    w, state = model.place(WEIGHTS), {k: model.place(v) for k, v in zeros().items()}
    for k, t in w.items():
        np.testing.assert_array_equal(t.numpy(), WEIGHTS[k])
        assert t.mesh in (mesh.slice(pp=0), mesh.slice(pp=1))
    assert model.place(w) is w
    for want in steps:
        out = f(w, state, batch)
        close(out, want)
        w, state = out[2], out[3]
    assert f._recordings == 2
    s = model.schedule
    sent = [step.reads[0] for step in s.steps if step.kind == "send"]
    # Each half of the batch to the one stage that reads it, and the tied weight alone.
    assert [s.buffers[b].shape for b in sent if b in s.inputs] == [(B, S), (B, S), (V, D)]


@pytest.mark.parametrize("schedule", ["1F1B", "ZBV"])
def test_one_function_is_cut_by_cost(schedule: str, steps: list[Any]) -> None:
    mesh = dist.Mesh.parse("pp=2")

    @pipeline.run(mesh_axes=("pp",), schedule=schedule, microbatches=8, mesh=mesh)
    def model(weights: Weights, x: Any) -> Any:
        return plain(weights, x)

    out = ts.jit(training(model))(WEIGHTS, zeros(), {"x": TOKENS, "y": LABELS})
    close(out, steps[0])
    assert sum(model.sizes) > 4 and max(model.balance) < sum(model.balance)
    assert model.plan_text().count("FLOP") == model.table.stages


def test_stages_by_name_and_the_training_step() -> None:
    """Guide 3, 4.4 and 4.5: modules in named stages; the step finds their weights."""
    mesh = dist.Mesh.parse("dp=2 pp=2")

    def build() -> tuple[Any, Any]:
        encoder = graph.stage("encoder")(lambda x: op.transformer_block(x, heads=2))
        decoder = graph.stage("decoder")(lambda x: op.transformer_block(x, depth=2, heads=2))
        return encoder, decoder

    x, y = made(B, S, D), made(B, S, D)

    def trained(model: Any) -> Any:
        ts.seed(3)

        @graph.training_step(module="M")
        def step(batch: Weights) -> Any:
            loss = ((model(batch["input"]) - batch["labels"]) ** 2).mean()
            return graph.backward(loss), loss

        found = []
        for _ in range(3):
            grads, loss = step({"input": x, "labels": y})
            step.update({k: step.parameters[k] - 0.1 * g for k, g in grads.items()})
            found.append((grads, loss))
        return found

    encoder, decoder = build()
    want = trained(lambda x: decoder(encoder(x)))
    encoder, decoder = build()

    @graph.pipeline(stages=[encoder, decoder], mesh=mesh, axis="pp")
    def model(x: Any) -> Any:
        return decoder(encoder(x)) * 1.0

    with pytest.warns(ts.StrategyWarning, match="along 'dp' compute the same"):
        got = trained(model)
    for (a, loss), (b, same) in zip(got, want, strict=True):
        np.testing.assert_allclose(loss.numpy(), same.numpy(), rtol=1e-5)
        assert a.keys() == b.keys()
        for k in a:
            np.testing.assert_allclose(a[k].numpy(), b[k].numpy(), rtol=1e-4, atol=1e-5)
    assert model.table.name == "1F1B" and model.table.microbatches == 4


def test_stages_of_other_layouts() -> None:
    """One stage splits its hidden dim over tp, the other its rows."""
    mesh = dist.Mesh.parse("tp=2 pp=2")
    w = {"a": made(D, H), "b": made(H, D), "c": made(D, V)}
    x, y = made(B, D), LABELS[:, 0]

    def one(weights: Weights, x: Any) -> Any:
        return weights, ts.tanh(x @ weights["a"]) @ weights["b"]

    def two(weights: Weights, x: Any) -> Any:
        if x.mesh is not None:
            x = dist.shard(dist.all_reduce(x, "tp"), "tp", 0)
        return x @ weights["c"]

    def step(model: Any) -> Any:
        def run(weights: Weights, x: Any, y: Any) -> Any:
            loss = nn.cross_entropy(model(weights, x), y)
            return loss, ts.grad(loss, weights)

        return ts.jit(run)

    want = step(lambda w, x: two(*one(w, x)))(w, x, y)
    model = pipeline.compose(stages=2, assign=[one, two], mesh=mesh, microbatches=4)
    laid = {"a": on(w["a"], mesh, "[{0}, {1}@tp]"), "b": on(w["b"], mesh, "[{0}@tp, {1}]")}
    close(step(model)({**laid, "c": on(w["c"], mesh, "")}, x, y), want)


def test_forward_only_and_rows() -> None:
    mesh = dist.Mesh.parse("dp=2 pp=2")
    model = pipeline.compose(stages=2, assign=PARTS, mesh=mesh, microbatches=4)
    want = ts.jit(plain)(WEIGHTS, TOKENS)
    close(model(WEIGHTS, on(TOKENS, mesh, "[{0}@dp, {1}]")), want)  # called directly

    @ts.jit
    def scored(weights: Weights, x: Any) -> Any:
        out = model(weights, x)
        return ts.argmax(out, -1), (out * out).mean(), weights["gain"] * 2

    best, mean, twice = scored(WEIGHTS, TOKENS)
    np.testing.assert_array_equal(best.numpy(), want.numpy().argmax(-1))
    np.testing.assert_allclose(mean.numpy(), (want.numpy() ** 2).mean(), rtol=1e-5)
    np.testing.assert_allclose(twice.numpy(), WEIGHTS["gain"] * 2)
    assert not any(s.note[1:2] in "IW" for s in model.schedule.steps if s.note[:1].isdigit())


def test_what_does_not_depend_on_the_batch() -> None:
    """A penalty on the weights, an unused weight, and a table created in the first stage."""
    mesh = dist.Mesh.parse("dp=2 pp=2")
    w = {"a": made(D, D), "b": made(D, D), "unused": made(3)}
    x = made(B, D)

    def model(weights: Weights, x: Any) -> Any:
        angles = ts.cos(ts.arange(D).to(ts.f32))
        x = ts.tanh(x @ weights["a"]) * angles
        return ts.tanh(x @ weights["b"]) * angles

    def step(model: Any) -> Any:
        def run(weights: Weights, x: Any) -> Any:
            penalty = sum((v * v).sum() for v in weights.values()) * 0.1
            loss = model(weights, x).mean() + penalty
            return loss, ts.grad(loss, weights), penalty

        return ts.jit(run)

    piped = pipeline.run(("pp",), microbatches=4, mesh=mesh)(model)
    close(step(piped)(w, x), step(model)(w, x))


def test_dropout_draws_anew_for_each_microbatch() -> None:
    mesh = dist.Mesh.parse("dp=2 pp=2")

    def one(x: Any) -> Any:
        return nn.dropout(x, 0.5)

    def two(x: Any) -> Any:
        return x * 1.0

    model = pipeline.compose(stages=2, assign=[one, two], mesh=mesh, microbatches=4)
    x = np.ones((16, 64), np.float32)
    ts.seed(5)
    a, b = model(x).numpy(), model(x).numpy()
    ts.seed(5)
    np.testing.assert_array_equal(model(x).numpy(), a)
    assert (a != b).any() and set(np.unique(a)) == {0.0, 2.0}
    parts = {a[k].tobytes() for k in range(16)}
    assert len(parts) == 16 and 0.4 < (a == 0).mean() < 0.6


@pytest.mark.parametrize("name", ["GPipe", "1F1B", "ZB-H1", "ZBV"])
def test_buffers_live_as_the_formulas_say(name: str) -> None:
    mesh, count = dist.Mesh.parse("pp=2"), 8
    model = pipeline.compose(stages=2, assign=PARTS, mesh=mesh, microbatches=count, schedule=name)
    ts.jit(training(model))(WEIGHTS, zeros(), {"x": TOKENS, "y": LABELS})
    s, table = model.schedule, model.table
    kept: dict[tuple[int, int], int] = {}  # the last step that needs each (stage, microbatch)
    began: dict[tuple[int, int], int] = {}
    for i, step in enumerate(s.steps):
        own, _, more = step.note.partition(" ")
        at, kind, m = own[:1], own[1:2], own[2:]
        if at.isdigit() and kind == "F":
            # With its backward in one step, its result is live there. A gradient is not counted.
            began[int(at), int(m)] = i - 1 if more else i
            ends = [s.lifetimes[b][1] for b in step.writes if b not in totals(s)]
            ends = [k for k in ends if not (more and s.steps[k].kind == "send")]
            kept[int(at), int(m)] = max(ends, default=i)
    live = max(
        sum(began[k] < i <= kept[k] for k in began if table.placement[k[0]] == 0)
        for i in range(len(s.steps))
    )
    assert live == peak_activations(name, 2, count)


def totals(s: Any) -> set[int]:
    """The buffers summed over the microbatches, and the results."""
    read = {b for step in s.steps if step.note[:4] in ("mean", "rows") for b in step.reads}
    read |= set(s.outputs)
    for step in reversed(s.steps):
        if set(step.writes) & read and step.note[1:2] in "FIW":
            read |= {b for b in step.reads if s.buffers[b].rank == 0}
    return read


def test_the_picture(capsys: pytest.CaptureFixture[str]) -> None:
    mesh = dist.Mesh.parse("dp=2 pp=2")
    model = pipeline.compose(stages=2, assign=PARTS, mesh=mesh, microbatches=4)
    model(WEIGHTS, TOKENS)
    pipeline.show(model)
    shown = capsys.readouterr().out
    assert "stage 1 on devices 1, 3" in shown and "rank 0 │ F0 F1" in shown
    assert pipeline.pipeline_svg(model.table).startswith("<svg")


def test_inspect_says_what_is_sent() -> None:
    mesh = dist.Mesh(("pp",), devices=2)
    stages = [lambda x: ts.tanh(x), lambda x: x * 2.0]
    pipe = pipeline.compose(2, stages, mesh=mesh, microbatches=4)
    with pytest.raises(ts.UsageError, match="the pipeline has not been called yet"):
        dist.inspect(pipe)
    pipe(made(8, 4))
    # 4 microbatches of 2 x 4 to the second stage; the first holds the batch, as the whole mesh does
    assert dist.inspect(pipe).sent == (4, 8 * 4 * 4)
    assert "4 values go from mesh to mesh, 128 B to a device" in str(dist.inspect(pipe))


def test_a_gradient_goes_to_those_who_do_not_have_it() -> None:
    mesh = dist.Mesh.parse("pp=2 dp=2")
    now: list[ts.Tensor] = []
    stages = [lambda x: ts.tanh(x @ now[0]), lambda x: ts.tanh(x @ now[1])]
    pipe = pipeline.compose(2, stages, mesh=mesh, microbatches=4)

    @ts.jit
    def step(weights: list[ts.Tensor], x: ts.Tensor) -> list[ts.Tensor]:
        now[:] = weights
        y = pipe(x)
        now.clear()
        return ts.grad((y**2).mean(), weights)  # type: ignore[no-any-return]

    weights = [ts.tensor(np.eye(8, dtype=np.float32), mesh=mesh) for _ in range(2)]
    step(weights, ts.tensor(np.ones((16, 8), np.float32), mesh=mesh, layout="[16@dp, 8]"))
    # Of 2 rows of 8 per microbatch, every second device gets the values or their gradients. The
    # gradient of each weight is sent from the two devices of one stage to those of the other.
    sends = [row for row in traffic(step.schedule) if row.kind == "send"]
    assert sorted((row.times, row.wire_bytes) for row in sends) == [
        (2, 2 * 8 * 8 * 4 // 2),
        (8, 8 * 2 * 8 * 4 // 2),
    ]
    assert dist.inspect(step).sent == (10, 4 * 2 * 8 * 4 + 8 * 8 * 4)


@pytest.mark.parametrize("text", ["[8@dp, 6]", "[8, 6@dp] ", "[8, 6] +dp", "[(2·4@dp), 6]"])
@pytest.mark.parametrize("shape", ["pp=2 dp=1", "pp=2 dp=2", "pp=2 dp=2 fold"])
def test_values_reach_another_slice_as_by_device_put(shape: str, text: str) -> None:
    mesh = dist.Mesh.parse(shape.removesuffix(" fold"))
    mesh = mesh.fold(onto="pp=2,dp=1") if shape.endswith("fold") else mesh
    slices = [mesh.slice(pp=k) for k in range(2)]
    here, there = (parse_type(f"f32{text}", m) for m in slices)
    xs = [place(made(8, 6), here) for _ in range(2)]
    want = jax.device_put(xs, [sharding(there)] * 2)
    copied = sender([here, here], [there, there])
    assert "device_put" not in str(copied.__closure__[0].cell_contents)  # type: ignore[index]
    for x, y, z in zip(xs, want, copied(*xs), strict=True):
        assert (z.aval, z.sharding, z.committed) == (y.aval, y.sharding, y.committed)
        x.delete()
        np.testing.assert_array_equal(fetch(z, there), fetch(y, there))
    # Some blocks of the mesh already lie on its slice.
    both = parse_type("f32[8, 6]", mesh)
    whole = sender([both], [parse_type("f32[8, 6]", slices[1])])
    assert whole.__closure__[0].cell_contents is jax.device_put  # type: ignore[index]


def test_a_profile_says_when_a_pipeline_waits_for_its_launches(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    mesh = dist.Mesh(("pp",), devices=2)
    model = pipeline.compose(2, [lambda x: ts.tanh(x)] * 2, mesh=mesh, microbatches=4)
    found = dist.profile(model, made(8, 4), runs=2)
    steps = len(model.schedule.steps)
    monkeypatch.setattr(profiles, "LAUNCH_S", 100.0)  # longer than the work of any stage
    (line,) = [x for x in str(found).splitlines() if "to launch" in x]
    assert f"its {steps} steps take about {steps * 1e5:.2f} ms to launch" in line
    monkeypatch.setattr(profiles, "LAUNCH_S", 0.0)
    assert "to launch" not in str(found)
    assert model.plan_text().splitlines()[-1].startswith(f"  {steps} steps")


@pytest.mark.filterwarnings("ignore::tessera.pipeline.PipelineWarning")
def test_weights_that_were_not_placed_cost_one_compilation(monkeypatch: pytest.MonkeyPatch) -> None:
    """From the second step on, weights and state lie on their stages: the step is recorded again,
    but the stages' programs were compiled in the first, loop bodies included."""
    ts.seed(0)
    compiled: list[int] = []
    inner = Book.compile
    monkeypatch.setattr(Book, "compile", lambda *a: (compiled.append(1), inner(*a))[1])
    mesh, optimizer = dist.Mesh.parse("dp=2 pp=2"), optim.AdamW(1e-3)

    def stage(w: ts.Tensor, x: ts.Tensor) -> ts.Tensor:
        return ts.scan(lambda x, w: (ts.tanh(x @ w), None), x, w)[0]

    @pipeline.run(mesh=mesh, microbatches=2)
    def model(weights: dict[str, ts.Tensor], x: ts.Tensor) -> ts.Tensor:
        return stage(weights["b"], stage(weights["a"], x))

    @ts.jit(donate=("weights", "state"))
    def step(weights: dict[str, ts.Tensor], state: dict[str, Any], x: ts.Tensor) -> Any:
        loss = ts.mean(model(weights, x) ** 2)
        weights, state = optimizer.update(weights, ts.grad(loss, weights), state)
        return loss, weights, state

    weights = {k: dist.tensor((3, 8, 8), mesh=mesh, name=k) for k in ("a", "b")}
    state = optimizer.init(weights)
    x = ts.tensor(np.ones((8, 8), np.float32), mesh=mesh, layout="[8@dp, 8]")
    counts, losses = [], []
    for _ in range(3):
        loss, weights, state = step(weights, state, x)
        losses.append(loss.item())
        counts.append(len(compiled))
    # A stage's last sum and its update may be one step if there is no send between.
    assert counts[0] > 0 and counts[1] - counts[0] <= 1 and counts[2] == counts[1]
    assert losses[0] > losses[1] > losses[2]
    assert [w.mesh for w in weights.values()] == [mesh.slice(pp=0), mesh.slice(pp=1)]


def test_few_microbatches_warn() -> None:
    mesh = dist.Mesh.parse("pp=4")
    model = pipeline.compose(stages=4, assign=PARTS, mesh=mesh, microbatches=4)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        model(WEIGHTS, TOKENS)
    (one,) = [w for w in found if issubclass(w.category, pipeline.PipelineWarning)]
    assert Path(one.filename).name == "test_pipeline.py"
    assert str(one.message).startswith("1F1B: with 4 microbatches on 4 ranks each rank idles 43%")


def test_few_microbatches_warn_once_for_all_recordings() -> None:
    """The new weights lie on their stages, so the second step is recorded again."""
    mesh, recorded = dist.Mesh.parse("pp=2"), list[int]()
    note = recorded.append

    @pipeline.run(mesh=mesh, microbatches=2)
    def model(w: dict[str, ts.Tensor], x: ts.Tensor) -> ts.Tensor:
        note(1)
        return ts.tanh(x @ w["a"]) @ w["b"]

    @ts.jit
    def step(w: dict[str, ts.Tensor], x: ts.Tensor) -> Any:
        grads = ts.grad(ts.mean(model(w, x) ** 2), w)
        return {n: v - grads[n] for n, v in w.items()}

    w: Any = {n: ts.ones((4, 4)) for n in "ab"}
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        w = step(w, np.ones((4, 4), np.float32))
        first = len(recorded)
        step(w, np.ones((4, 4), np.float32))
    assert len(recorded) > first > 0
    assert len([w for w in found if issubclass(w.category, pipeline.PipelineWarning)]) == 1


def test_one_array_given_up_under_two_names_is_taken_over_once(steps: list[Any]) -> None:
    mesh = dist.Mesh.parse("dp=2 pp=2")
    model = pipeline.compose(stages=2, assign=PARTS, mesh=mesh, schedule="1F1B", microbatches=4)
    f = ts.jit(training(model), donate=("weights", "state"))
    weights: Any = {k: on(v, mesh, "") for k, v in WEIGHTS.items()}
    nothing = {k: on(v, mesh, "") for k, v in zeros()["m"].items()}
    state: Any = {"m": nothing, "v": nothing}
    for want in steps:
        loss, _, weights, state, _ = f(weights, state, data(mesh, "[{0}@dp, {1}]"))
        close([loss, weights, state], [want[0], want[2], want[3]])


def test_steps_are_launched_in_the_order_of_the_schedule() -> None:
    s = reduced("1F1B", None)
    assert [step for step, *_ in Stepped(s).launches] == list(s.steps)
