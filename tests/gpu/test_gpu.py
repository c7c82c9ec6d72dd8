"""The same programs on a GPU. Where there is none, they are at least lowered for one."""

from __future__ import annotations

import re
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
    start(8)
    return jax.devices()[0].platform == "gpu"


def for_cuda(g: Graph) -> str:
    """The text of the program of `g` for an NVIDIA GPU."""
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


def test_a_step_on_a_mesh_lowers_for_cuda_with_the_collectives_of_its_graph() -> None:
    start(8)
    mesh = dist.Mesh(("dp", "tp"), shape={"dp": 2, "tp": 4})
    plan = dist.strategy("data_parallel") + dist.strategy("tensor_parallel")
    batch = plan.batch(plain(ts.int32, (8, 16), mesh))
    recorded = simplify(graph.trace(step, dist.place(ts.nn.GPT(CONFIG), plan, mesh), batch, batch))
    assert for_cuda(recorded).count("stablehlo.all_reduce") == sum(
        1 for _ in recorded.collectives()
    )


def test_a_broadcast_is_the_one_of_the_hardware() -> None:
    start(8)
    mesh = dist.Mesh(("a", "b"), shape={"a": 2, "b": 4})
    sent = op.kernel(lambda x: dist.broadcast(x, ("a", "b"), root=5))
    x = parse_type("f32[16@(a,b)]", mesh)
    text = for_cuda(simplify(graph.trace(sent, x)))
    (line,) = (x for x in text.splitlines() if "stablehlo.collective_" in x)
    assert "collective_broadcast" in line and "[5, 0, 1, 2, 3, 4, 6, 7]" in text


@pytest.mark.skipif(not has_gpu(), reason="there is no GPU")
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
    with dist.deterministic("ring", level="run_to_run"):  # without a warning, which is an error
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
