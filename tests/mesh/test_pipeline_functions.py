"""Pipelined functions with results beside the loss, and their errors."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import tessera as ts
from tessera import dist, nn, pipeline

MEETS = "needs all microbatches of a stage"
TABLE = np.random.default_rng(5).normal(size=(4, 4)).astype(np.float32)


def test_labels_that_the_model_chooses_cannot_be_counted_ahead() -> None:
    def step(w: Any, x: Any) -> Any:
        out = piped(w, x)
        sure = ts.max(ts.stop_gradient(out), -1) > 0.1
        return nn.cross_entropy(out, ts.where(sure, ts.argmax(out, -1), -100))

    piped = pipeline.run(mesh_axes=("pp",), schedule="GPipe", microbatches=4,
                         mesh=dist.Mesh.parse("pp=2"))(lambda w, x: ts.tanh(x @ w) @ w)  # fmt: skip

    def trained(w: Any, x: Any) -> Any:
        return ts.grad(step(w, x), w)

    with pytest.raises(ts.GraphError, match=MEETS):
        ts.jit(trained)(ts.tensor(TABLE, name="w"), ts.ones((8, 4)))


@pytest.mark.parametrize("schedule", ["1F1B", "Interleaved1F1B", "ZBV", "DualPipeV"])
def test_a_stage_may_do_nothing_but_multiply_by_what_it_draws(schedule: str) -> None:
    def net(w: Any, x: Any) -> Any:
        return (x @ w * ts.random.uniform((8,))) @ w * ts.random.uniform((1,))

    piped = pipeline.run(mesh_axes=("pp",), schedule=schedule, microbatches=4,
                         mesh=dist.Mesh.parse("pp=2"))(net)  # fmt: skip
    step = ts.jit(lambda w, x: (loss := piped(w, x).mean(), ts.grad(loss, w)))
    loss, grad = step(ts.tensor(np.eye(8, dtype=np.float32), name="w"), ts.ones((16, 8)))
    # The product is of degree 2 in its weight.
    assert (grad.numpy() * np.eye(8)).sum() == pytest.approx(2 * loss.item(), rel=1e-5)


@pytest.mark.parametrize(
    "across",
    [
        lambda h: ts.flip(h, 0), lambda h: ts.cumsum(h, 0), lambda h: ts.sort(h, 0)[0],
        lambda h: ts.roll(h, 1, 0), lambda h: nn.softmax(h, 0), lambda h: h - h.mean(0),
        lambda h: nn.batch_norm(h, (ts.zeros(4), ts.ones(4)))[0],
    ],
    ids=["flip", "cumsum", "sort", "roll", "softmax", "mean", "batch norm"],
)  # fmt: skip
def test_what_goes_across_rows_in_a_stage_names_its_line(across: Any) -> None:
    w = np.eye(4, dtype=np.float32)

    @pipeline.run(("pp",), "GPipe", 4, mesh=dist.Mesh(("pp",), devices=2))
    def model(x: ts.Tensor, w: ts.Tensor) -> ts.Tensor:
        return across(ts.tanh(x @ w)) @ w

    x = np.random.default_rng(0).normal(size=(8, 4)).astype(np.float32)
    step = ts.jit(lambda x, w: (loss := (model(x, w) ** 2).mean(), ts.grad(loss, w)))
    with pytest.raises(
        ts.GraphError, match=rf"model: .* {MEETS}[\s\S]*at *: test_pipeline_functions"
    ):
        step(x, ts.tensor(w, name="w"))


# -- what a function does with its pipeline -------------------------------------------------------
def two_stages() -> Any:
    return pipeline.run(("pp",), "GPipe", 4, mesh=dist.Mesh(("pp",), devices=2))(
        lambda x, w: ts.tanh(x @ w) @ w
    )


ROWS = np.random.default_rng(0).normal(size=(8, 4)).astype(np.float32)


def test_a_gradient_of_a_gradient_is_right_without_stages() -> None:
    model, w = two_stages(), ts.tensor(TABLE, name="w")

    def twice(x: ts.Tensor, w: ts.Tensor) -> ts.Tensor:
        first = ts.grad((model(x, w) ** 2).mean(), w)
        return ts.grad((first**2).sum(), w)

    def decayed(x: ts.Tensor, w: ts.Tensor) -> ts.Tensor:  # also reads the weight outside of it
        first = ts.grad((model(x, w) ** 2).mean(), w)
        return ts.grad((first**2).sum() + 0.1 * (w**2).sum(), w)

    for step in (twice, decayed):
        with pytest.raises(ts.GraphError, match=MEETS):
            ts.jit(step)(ROWS, w)

    def plain(x: ts.Tensor, w: ts.Tensor) -> ts.Tensor:
        first = ts.grad(((ts.tanh(x @ w) @ w) ** 2).mean(), w)
        return ts.grad((first**2).sum(), w)

    got = ts.jit(ts.schedule(pipeline=False)(twice))(ROWS, w)
    np.testing.assert_allclose(got.numpy(), ts.jit(plain)(ROWS, w).numpy(), rtol=1e-5)


def test_a_pipeline_that_a_function_makes_is_one_pipeline() -> None:
    def step(x: ts.Tensor, w: ts.Tensor, make: Any) -> Any:
        loss = (make()(x, w) ** 2).mean()
        return loss, ts.grad(loss, w)

    w, made = ts.tensor(TABLE, name="w"), two_stages()
    got = ts.jit(lambda x, w: step(x, w, two_stages))(ROWS, w)
    want = ts.jit(lambda x, w: step(x, w, lambda: made))(ROWS, w)
    for a, b in zip(got, want, strict=True):
        np.testing.assert_array_equal(a.numpy(), b.numpy())
    with pytest.raises(ts.UsageError, match="a function calls pipelines twice"):
        ts.jit(lambda x, w: two_stages()(two_stages()(x, w), w))(ROWS, w)


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("remat", [True, "products"])
def test_narrow_weights_of_recomputed_layers(remat: bool | str, stage: int) -> None:
    """The gradients of bf16 weights, whose sums in f32 are rounded once, after all microbatches."""
    plan = (
        dist.strategy("zero_redundancy_optimizer", stage=stage)
        if stage
        else dist.strategy("data_parallel")
    )
    config = nn.GPTConfig(
        vocab=32, seq=8, d=16, layers=4, heads=2, norm="rms", remat=remat, stacked=False
    )
    ids = np.random.default_rng(0).integers(0, 32, (16, 8)).astype(np.int32)

    def grads_on(where: str, microbatches: int) -> dict[str, Any]:
        ts.seed(1)
        mesh = dist.Mesh.parse(where)
        model = dist.place(nn.GPT(config).to(ts.bf16), plan, mesh)
        loss_of: Any = nn.GPT.loss
        if "pp" in mesh:
            loss_of = pipeline.run(("pp",), "1F1B", microbatches, mesh=mesh)(loss_of)

        @ts.jit
        def grads(model: Any, ids: Any) -> Any:
            return ts.grad(loss_of(model, ids, ids), model.parameters(), layout=plan)

        found = grads(model, dist.place(ids, plan, mesh, kind="batch"))
        return {k: v.numpy().astype(np.float32) for k, v in found.items()}

    whole, staged = grads_on("dp=2", 1), grads_on("pp=2,dp=2", 4)
    for name, g in whole.items():
        assert np.abs(staged[name] - g).max() < 0.02 * np.abs(g).max(), name
