"""Programs on a GPU. Without one they are lowered for it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import partial
from typing import Any

import jax
import numpy as np
import pytest

import tessera as ts
from tessera import dist, graph, op
from tessera.compile import determinism_of
from tessera.core.context import settings
from tessera.core.layout import parse_type, plain
from tessera.ir.graph.node import Graph
from tessera.ir.schedule.build import build_schedule
from tessera.passes.simplify import simplify
from tessera.runtime.arrays import array_shape, sharding
from tessera.runtime.devices import start
from tessera.runtime.lower import lower

CONFIG = ts.nn.GPTConfig(vocab=64, seq=16, d=32, layers=2, heads=4)


def has_gpu() -> bool:
    start()
    return jax.default_backend() == "gpu"


needs_gpu = pytest.mark.skipif(not has_gpu(), reason="there is no GPU")
needs_eight = pytest.mark.skipif(len(jax.devices()) < 8, reason="there are no eight devices")


@pytest.fixture
def exact() -> Iterator[None]:
    """Sets full f32 precision, since a GPU rounds the factors of products to 10 bits by default."""
    with jax.default_matmul_precision("highest"):
        yield


def for_cuda(g: Graph) -> str:
    """The text of the program of `g`, lowered for an NVIDIA GPU."""
    types = [n.type.on(g.mesh) for n in g.inputs]
    given = [
        jax.ShapeDtypeStruct(array_shape(t), t.dtype.numpy, sharding=sharding(t)) for t in types
    ]
    traced = lower(build_schedule(g)).trace(*given)
    return str(traced.lower(lowering_platforms=("cuda",)).as_text())


def step(model: Any, ids: ts.Tensor, labels: ts.Tensor) -> Any:
    loss = model.loss(ids, labels)
    weights = model.parameters()
    grads = ts.grad(loss, weights)
    return loss, {k: w - 0.5 * grads[k] for k, w in weights.items()}


@needs_eight
def test_a_step_on_a_mesh_lowers_for_cuda_with_the_collectives_of_its_graph() -> None:
    start(8)
    mesh = dist.Mesh(("dp", "tp"), shape={"dp": 2, "tp": 4})
    plan = dist.strategy("data_parallel") + dist.strategy("tensor_parallel")
    batch = plan.batch(plain(ts.int32, (8, 16), mesh))
    recorded = simplify(graph.trace(step, dist.place(ts.nn.GPT(CONFIG), plan, mesh), batch, batch))
    assert for_cuda(recorded).count("stablehlo.all_reduce") == sum(
        1 for _ in recorded.collectives()
    )


@needs_eight
def test_a_broadcast_is_the_one_of_the_hardware() -> None:
    start(8)
    mesh = dist.Mesh(("a", "b"), shape={"a": 2, "b": 4})
    sent = op.kernel(lambda x: dist.broadcast(x, ("a", "b"), root=5))
    x = parse_type("f32[16@(a,b)]", mesh)
    text = for_cuda(simplify(graph.trace(sent, x)))
    (line,) = (x for x in text.splitlines() if "stablehlo.collective_" in x)
    assert "collective_broadcast" in line and "[5, 0, 1, 2, 3, 4, 6, 7]" in text


# -- convolutions ----------------------------------------------------------------------------------
def gradients(*how: int) -> Any:
    """A convolution's result and gradients; `how` is its stride, pads, dilation and groups."""
    return lambda x, w: (y := ts.nn.conv2d(x, w, None, *how), *ts.grad(ts.sin(y).sum(), [x, w]))


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_the_library_of_a_gpu_is_asked_for_gradients_of_convolutions(
    dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The library recognizes these patterns: batch groups, and a reverse directly before the
    convolution."""
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")

    def text(w: tuple[int, ...], *how: int) -> str:
        given = [ts.ones(s, getattr(ts, dtype)) for s in ((32, 8, 16, 16), w)]
        return for_cuda(simplify(graph.trace(gradients(*how), *given)))

    depthwise = text((8, 1, 3, 3), 1, 1, 1, 8)
    assert "batch_group_count = 8" in depthwise and "optimization_barrier" not in depthwise
    assert text((4, 8, 1, 1)).count("stablehlo.convolution") == 3  # not by the forms for a CPU
    strided = text((4, 8, 3, 3), 2, 1)
    assert re.search(r"(%\d+) = stablehlo.reverse.*\n.*stablehlo.convolution\(%\d+, \1\)", strided)


@needs_gpu
@pytest.mark.usefixtures("exact")
@pytest.mark.parametrize("groups", [1, 2, 8])
@pytest.mark.parametrize(
    "stride, pads, places", [(1, 1, 3), (2, 1, 3), (2, 0, 2), (3, 2, 5), (2, 0, 1)]
)
def test_gradients_of_convolutions_on_the_gpu_equal_the_oracle(
    stride: int, pads: int, places: int, groups: int
) -> None:
    rng = np.random.default_rng(0)
    shapes = (3, 8, 19, 19), (16, 8 // groups, places, places)
    given = [rng.standard_normal(s, np.float32) for s in shapes]
    run = gradients(stride, pads, 1, groups)
    want = graph.evaluate(graph.trace(run, *map(ts.tensor, given)), given)
    for got, expected in zip(ts.jit(run)(*map(ts.tensor, given)), want, strict=True):
        np.testing.assert_allclose(got.numpy(), expected, atol=1e-3)


@needs_gpu
@pytest.mark.usefixtures("exact")
def test_a_step_on_the_gpu_equals_the_oracle() -> None:
    ts.seed(0)
    model = ts.nn.GPT(CONFIG)
    rng = np.random.default_rng(0)
    ids, labels = (rng.integers(0, 64, (8, 16)).astype(np.int32) for _ in range(2))
    weights = {k: t.numpy() for k, t in model.parameters().items()}
    loss, new = ts.jit(step)(model, ts.tensor(ids), ts.tensor(labels))
    recorded = graph.trace(step, model, ts.tensor(ids), ts.tensor(labels))
    want = graph.evaluate(recorded, [*weights.values(), ids, labels])
    np.testing.assert_allclose(loss.item(), want[0], rtol=1e-4)
    for (name, got), expected in zip(new.items(), want[1:], strict=True):
        np.testing.assert_allclose(got.numpy(), expected, atol=2e-3, err_msg=name)


@needs_gpu
@pytest.mark.usefixtures("exact")
def test_a_mesh_of_eight_folded_onto_one_gpu_takes_the_step_of_one_device() -> None:
    rng = np.random.default_rng(0)
    ids, labels = (rng.integers(0, 64, (8, 16)).astype(np.int32) for _ in range(2))
    mesh = dist.Mesh(("dp", "tp"), shape={"dp": 2, "tp": 4}, devices=range(8)).fold(onto=1)
    plan = dist.strategy("data_parallel") + dist.strategy("tensor_parallel")
    results = []
    for where in (None, mesh):
        ts.seed(0)
        model = ts.nn.GPT(CONFIG)
        batch = [ts.tensor(x) for x in (ids, labels)]
        if where is not None:
            model = dist.place(model, plan, where)
            batch = [ts.tensor(x, mesh=where, layout="[8@dp, 16]") for x in (ids, labels)]
        loss, new = ts.jit(step)(model, *batch)
        results.append((loss.item(), {k: t.numpy() for k, t in new.items()}))
    (one, alone), (many, spread) = results
    np.testing.assert_allclose(many, one, rtol=1e-5)
    for name, value in alone.items():
        np.testing.assert_allclose(spread[name], value, atol=1e-4, err_msg=name)


# -- attention by a kernel of cuDNN ----------------------------------------------------------------
@needs_gpu
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("groups", [4, 2, 1])
@pytest.mark.parametrize("dtype", ["bf16", "f16"])
def test_attention_of_cudnn_is_that_of_tiles(dtype: str, groups: int, causal: bool) -> None:
    rng = np.random.default_rng(0)
    shapes = {"q": 4, "k": groups, "v": groups}
    given = {k: rng.standard_normal((2, n, 128, 64), np.float32) for k, n in shapes.items()}

    def both(given: Any, how: str | None) -> Any:
        q, k, v = given["q"], given["k"], given["v"]
        out = ts.nn.flash_attention(q, k, v, causal=causal, implementation=how)
        loss = (out.to(ts.f32) * ts.cos(ts.arange(64).to(ts.f32))).sum()
        return out, ts.grad(loss, [q, k, v])

    narrow = {k: ts.tensor(x).to(getattr(ts, dtype)) for k, x in given.items()}
    wide = {k: t.to(ts.f32) for k, t in narrow.items()}
    recorded = graph.trace(lambda x: both(x, None), narrow)
    assert " = attention " in recorded.text  # the default implementation
    with jax.default_matmul_precision("highest"):
        want, wants = ts.jit(both)(wide, "tiles")
    for how in ("cudnn", "tiles"):
        out, grads = ts.jit(both)(narrow, how)
        for name, x, y in zip(("out", *shapes), (out, *grads), (want, *wants), strict=True):
            x, y = x.to(ts.f32).numpy(), y.numpy()
            off = np.linalg.norm(x - y) / np.linalg.norm(y)
            assert off < 1e-2, (how, name, off)


@needs_gpu
def test_attention_of_cudnn_on_a_mesh_keeps_batch_and_heads_where_they_are() -> None:
    mesh = dist.Mesh(("dp", "tp"), shape={"dp": 2, "tp": 2}, devices=range(4)).fold(onto=1)
    rng = np.random.default_rng(0)
    x = rng.standard_normal((2, 4, 128, 64), np.float32)
    q = ts.tensor(x, mesh=mesh, layout="[2@dp, 4@tp, 128, 64]").to(ts.bf16)
    attend = partial(ts.nn.flash_attention, causal=True, implementation="cudnn")
    recorded = graph.trace(lambda q: attend(q, q, q), q)
    assert not list(recorded.collectives())
    alone = ts.tensor(x).to(ts.bf16)
    got, want = attend(q, q, q).to(ts.f32), attend(alone, alone, alone).to(ts.f32)
    np.testing.assert_allclose(got.numpy(), want.numpy(), atol=1e-2)


@needs_gpu
@pytest.mark.parametrize("level", ["run_to_run", None])
@pytest.mark.filterwarnings("ignore:deterministic")
@pytest.mark.parametrize("autocast", [None, "bf16"])
def test_a_level_gives_the_same_bits_again(autocast: str | None, level: Any) -> None:
    config = ts.nn.GPTConfig(vocab=64, seq=128, d=128, layers=2, heads=2)
    rng = np.random.default_rng(0)
    ids, labels = (rng.integers(0, 64, (8, 128)).astype(np.int32) for _ in range(2))

    def bits() -> list[bytes]:
        ts.seed(0)
        with dist.deterministic(level=level), ts.autocast(autocast or "f32"):
            loss, new = ts.jit(step)(ts.nn.GPT(config), ts.tensor(ids), ts.tensor(labels))
        return [loss.numpy().tobytes(), *(t.numpy().tobytes() for t in new.values())]

    assert bits() == bits() == bits()


@pytest.mark.skipif(has_gpu(), reason="here is a GPU")
def test_attention_of_cudnn_says_why_it_is_not_here() -> None:
    x = ts.ones((1, 1, 8, 16), ts.bf16)
    with pytest.raises(ts.BackendError, match="it runs on a GPU, not on a cpu"):
        ts.nn.flash_attention(x, x, x, implementation="cudnn")
    with pytest.raises(ts.BackendError, match="it takes no bias, mask or cap"):
        ts.nn.flash_attention(x, x, x, cap=3.0, implementation="cudnn")
    with (
        dist.deterministic(level="run_to_run"),
        pytest.raises(ts.BackendError, match='at level="run_to_run" it has no gradient'),
    ):
        ts.nn.flash_attention(x, x, x, implementation="cudnn")


def test_blocks_are_large_where_devices_are_no_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    def loops() -> int:
        x, w = ts.ones((4096, 8)), ts.ones((8, 1000))
        ids = ts.zeros((4096,), ts.int32)
        recorded = graph.trace(ts.nn.linear_cross_entropy, x, w, ids)
        return recorded.text.count("8, 512") + recorded.text.count("[512, 8]")

    monkeypatch.setattr("tessera.nn.block_size.platform", lambda: "cpu")
    assert loops()
    monkeypatch.setattr("tessera.nn.block_size.platform", lambda: "gpu")
    assert not loops()


def test_tiles_of_attention_are_counted_by_the_scores_that_exist_together(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A causal chunk of queries sees only some of the scores, a quarter here."""
    for module in ("block_size", "flash"):
        monkeypatch.setattr(f"tessera.nn.{module}.platform", lambda: "gpu")
    q = parse_type("f32[8, 12, 1024, 64]", None)
    for causal in (True, False):
        attend = partial(ts.nn.flash_attention, causal=causal, implementation="tiles")
        text = graph.trace(lambda q, f=attend: f(q, q, q), q).text
        assert (" = scan " in text) is not causal


# -- which level of determinism a GPU keeps --------------------------------------------------------
ON_A_GPU = {"xla_gpu_deterministic_ops": True}


def test_a_gpu_is_offered_run_to_run_with_the_order_of_sums(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    with dist.deterministic("ring"), pytest.warns(ts.EngineWarning) as said:
        options, under = determinism_of(settings().program)
    assert (options, under.determinism, under.sum_order) == (ON_A_GPU, "run_to_run", "ring")
    assert re.sub(r"\(\S+\)", "(AT)", str(said[0].message)) == (
        'deterministic: on a gpu the level is "run_to_run" (AT): the same devices give the same'
        ' bits, and sums over devices are added in the order "ring"; a folded mesh may give others.'
        ' level="run_to_run" asks for that without a warning, level="mesh_invariant" refuses it'
    )
    with dist.deterministic("ring", level="run_to_run"):  # a warning would be an error
        assert determinism_of(settings().program) == (ON_A_GPU, settings().program)
    assert determinism_of(settings().program) == (None, settings().program)


def test_a_gpu_refuses_a_level_that_is_asked_for_and_not_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    with dist.deterministic(level="mesh_invariant"), pytest.raises(ts.BackendError) as refused:
        determinism_of(settings().program)
    assert [line for line in str(refused.value).splitlines() if "  at " not in line] == [
        "mesh_invariant: bits that no mesh changes are kept on a CPU only",
        "  backend : gpu",
        '  fix     : ask for less: level="run_to_run"; dist.deterministic() without a level takes'
        " what the backend keeps",
    ]
