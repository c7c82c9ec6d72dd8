"""Losses outside of a pipeline's stages: each is that of one device, or the one error."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest

import tessera as ts
from tessera import dist, nn, pipeline

LOSSES: dict[str, Callable[..., Any]] = {
    "mixed with others": lambda m, x, t, s: nn.mse_loss(m(0.7 * x + 0.3 * ts.flip(x, 0)), t),
    "the next one": lambda m, x, t, s: nn.mse_loss(m(x), ts.roll(t, 1, 0)),
    "weights of sum 1": lambda m, x, t, s: (((m(x) - t) ** 2).mean(-1) * (s / s.sum())).sum(),
    "a softmax": lambda m, x, t, s: (((m(x) - t) ** 2).mean(-1) * nn.softmax(s, 0)).mean(),
    "a running sum": lambda m, x, t, s: ts.cumsum(m(x), 0).mean(),
    "places": lambda m, x, t, s: (ts.arange(x.shape[0])[:, None] * m(x)).mean(),
    "advantages": lambda m, x, t, s: (((s - s.mean()) / ts.std(s))[:, None] * m(x)).mean(),
    "a running product": lambda m, x, t, s: (ts.cumprod(m(x), 0) * t).mean(),
    "from row to row": lambda m, x, t, s: ts.scan(
        lambda c, r: (ts.tanh(c + r), c * r), ts.zeros(4), m(x)
    )[1].mean(),
    "in blocks of rows": lambda m, x, t, s: (
        nn.mlp(ts.repeat_interleave(m(x), 100, 1).reshape(-1, 4), TABLE, TABLE).mean() ** 2
    ),
    "a variance": lambda m, x, t, s: ts.var(m(x) - t),
    "cross entropy and a sum": lambda m, x, t, s: _two_losses(m(x), ts.argmax(t, -1)),
    "cross entropy of all rows": lambda m, x, t, s: (
        nn.cross_entropy(m(x), ts.argmax(t, -1)) * x.shape[0]
    ),
    "rows that are chosen": lambda m, x, t, s: nn.mse_loss(m(x), ts.take(t, ts.argsort(s), 0)),
    "the hardest": lambda m, x, t, s: ts.topk(((m(x) - t) ** 2).mean(-1), len(x) // 2)[0].mean(),
    "two halves": lambda m, x, t, s: (lambda p: (p[0] * p[1]).mean())(m(x).reshape(2, -1, 4)),
    "columns in halves": lambda m, x, t, s: (m(x).T.reshape(4, 2, -1).mean(1) ** 2).mean(),
    "back to front": lambda m, x, t, s: nn.mse_loss(m(x), t[ts.arange(len(x) - 1, -1, -1)]),
    "a row of a table each": lambda m, x, t, s: nn.mse_loss(m(x), LONG_TABLE[ts.arange(len(x))]),
    "the largest in turn": lambda m, x, t, s: ts.scan(
        lambda c, r: (ts.maximum(c, r), ()), ts.tensor(-9.0), m(x).mean(-1)
    )[0],
    "a sum in turn": lambda m, x, t, s: _in_turn(m(x).mean(-1)),
    "neighbours": lambda m, x, t, s: (
        nn.conv1d(m(x).T[None], ts.ones((4, 4, 3)), padding=1) ** 2
    ).mean(),
    "tiles": lambda m, x, t, s: (ts.tile(m(x), (2, 1)) * ts.repeat_interleave(t, 2, 0)).mean(),
    "two views of other rows": lambda m, x, t, s: (
        ts.concat([m(x), t], 0) * ts.repeat_interleave(t, 2, 0)
    ).mean(),
    "another order": lambda m, x, t, s: (m(x).reshape(4, -1) * t.T).mean(),
    "groups of more rows": lambda m, x, t, s: (m(x).reshape(-1, 4, 4).mean(1) ** 2).mean(),
    "scaled by their number": lambda m, x, t, s: ts.tanh(m(x) * len(x)).mean(),
    "logits by their number": lambda m, x, t, s: nn.cross_entropy(
        m(x) * len(x) ** 0.5, ts.argmax(t, -1)
    ),
    "a sum of some": lambda m, x, t, s: (lambda h: ts.where(h > 0, h * len(x), h))(m(x)).sum(),
    "times their number in blocks": lambda m, x, t, s: (
        nn.linear_cross_entropy(m(x), TABLE, ts.argmax(t, -1), rows=2) * len(x)
    ),
    "a mean": lambda m, x, t, s: nn.mse_loss(m(x), t),
    "a mean in blocks of rows": lambda m, x, t, s: nn.mlp(
        ts.repeat_interleave(m(x), 100, 1).reshape(-1, 4), TABLE, TABLE
    ).mean(),
    "row by row": lambda m, x, t, s: ts.map_chunks(ts.tanh, m(x), rows=2).mean(),
    "weights of rows": lambda m, x, t, s: (((m(x) - t) ** 2).mean(-1) * s).mean(),
    "a term of the batch": lambda m, x, t, s: (((m(x) - t) ** 2).mean(-1) + s.mean()).mean(),
    "a table": lambda m, x, t, s: nn.mse_loss(m(x + ts.take(TABLE, (s * 4).to(ts.int32), 0)), t),
    "the next token": lambda m, x, t, s: nn.mse_loss(m(x)[:, :-1], t[:, 1:]),
    "two views": lambda m, x, t, s: _halves(ts.concat([m(x), t], 0), x.shape[0]),
    "two views of the same rows": lambda m, x, t, s: (
        ts.concat([m(x), t], 0) * ts.tile(t, (2, 1))
    ).mean(),
    "contrast": lambda m, x, t, s: ts.logsumexp(m(x) @ t.transpose(), -1).mean(),
    "distances": lambda m, x, t, s: ((m(x)[:, None] - t[None]) ** 2).mean(),
    "pairs in a row": lambda m, x, t, s: ((m(x)[:, :, None] - t[:, None]) ** 2).mean(),
    "a sum in turn, divided": lambda m, x, t, s: _in_turn(m(x).mean(-1)) / len(x),
    "groups of a microbatch's rows": lambda m, x, t, s: (
        m(x).reshape(-1, 2, 4).mean(1) ** 2
    ).mean(),
    "blocks of labels": lambda m, x, t, s: nn.linear_cross_entropy(
        m(x), TABLE, ts.argmax(t, -1), rows=2
    ),
    "columns": lambda m, x, t, s: (m(x).T * t.T).mean(),
    "flat rows": lambda m, x, t, s: (m(x).reshape(-1) * t.reshape(-1)).mean(),
    "the two largest of a row": lambda m, x, t, s: ts.topk(m(x), 2)[0].mean(),
    "labels of logarithms": lambda m, x, t, s: nn.nll_loss(
        nn.log_softmax(m(x)), ts.argmax(t, -1), ignore_index=0
    ),
    "labels": lambda m, x, t, s: nn.cross_entropy(m(x), ts.argmax(t, -1), ignore_index=0),
}
# What the stages give meets rows of other microbatches before a gradient can go back.
REFUSED = {
    "a running product", "from row to row", "in blocks of rows", "a variance", "the hardest",
    "two halves", "columns in halves", "the largest in turn", "a sum in turn", "neighbours",
    "groups of more rows", "a sum in turn, divided",
}  # fmt: skip
MEETS = "needs all microbatches of a stage"
TABLE = np.random.default_rng(5).normal(size=(4, 4)).astype(np.float32)
LONG_TABLE = ts.tensor(np.random.default_rng(6).normal(size=(40, 4)).astype(np.float32))


def _in_turn(rows: ts.Tensor) -> Any:
    return ts.scan(lambda c, r: (c + r, ()), ts.zeros(()), rows)[0]


def _halves(both: ts.Tensor, rows: int) -> ts.Tensor:
    return nn.mse_loss(both[:rows], both[rows:] * 2)


def _two_losses(logits: ts.Tensor, labels: ts.Tensor) -> ts.Tensor:
    return nn.cross_entropy(logits, labels) + (logits**2).sum()


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_is_that_of_one_device_or_an_error(name: str) -> None:
    rng = np.random.default_rng(0)
    x, t = (rng.normal(size=(8, 4)).astype(np.float32) for _ in "xt")
    s = rng.random(8).astype(np.float32)
    weights = {k: rng.normal(size=(4, 4)).astype(np.float32) for k in "ab"}

    def net(w: Any, x: Any) -> Any:
        return ts.tanh(x @ w["a"]) @ w["b"]

    piped = pipeline.run(mesh_axes=("pp",), schedule="GPipe", microbatches=4,
                         mesh=dist.Mesh.parse("pp=2"))(net)  # fmt: skip

    def step(model: Any) -> Any:
        def run(w: Any, x: Any, t: Any, s: Any) -> Any:
            loss = LOSSES[name](partial(model, w), x, t, s)
            return loss, ts.grad(loss, w)

        return ts.jit(run)(weights, x, t, s)

    if name in REFUSED:
        with pytest.raises(ts.GraphError, match=MEETS):
            step(piped)
        return
    (got, grads), (want, wanted) = step(piped), step(net)
    assert got.item() == pytest.approx(want.item(), rel=1e-5)
    for k, g in grads.items():
        np.testing.assert_allclose(g.numpy(), wanted[k].numpy(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dp", [1, 2])
def test_classes_have_weights_that_are_an_argument(dp: int) -> None:
    rng = np.random.default_rng(0)
    x, labels = rng.normal(size=(8, 4)).astype(np.float32), np.int32([0, 0, 0, 1, 2, 3, -100, 1])
    weights = {k: rng.normal(size=(4, 4)).astype(np.float32) for k in "ab"}
    classes = np.float32([1, 2, 3, 4])

    def step(model: Any) -> Any:
        @ts.jit
        def run(w: Any, x: Any, y: Any, classes: Any) -> Any:
            loss = nn.cross_entropy(model(w, x), y, weight=classes)
            return loss, ts.grad(loss, w)

        mesh = dist.Mesh(("dp", "pp"), shape={"dp": dp, "pp": 2})
        rows = dist.place((x, labels), "data_parallel", mesh, kind="batch")
        return run(weights, *rows, classes)

    def net(w: Any, x: Any) -> Any:
        return ts.tanh(x @ w["a"]) @ w["b"]

    mesh = dist.Mesh(("dp", "pp"), shape={"dp": dp, "pp": 2})
    piped = pipeline.run(mesh_axes=("pp",), schedule="1F1B", microbatches=4, mesh=mesh)(net)
    (loss, grads), (want, wanted) = step(piped), step(net)
    assert loss.item() == pytest.approx(want.item(), rel=1e-5)
    for k in weights:
        np.testing.assert_allclose(grads[k].numpy(), wanted[k].numpy(), rtol=1e-4, atol=1e-6)


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
    with pytest.raises(ts.GraphError, match=rf"model: .* {MEETS}[\s\S]*at *: test_pipeline_losses"):
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

    def decayed(x: ts.Tensor, w: ts.Tensor) -> ts.Tensor:  # which reaches the weight besides
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


def test_a_constant_may_have_a_row_for_each_of_the_batch() -> None:
    def step(model: Any) -> Any:
        def run(x: ts.Tensor, w: ts.Tensor) -> Any:
            late = ts.arange(8).to(ts.f32).reshape(8, 1)
            loss = ((model(x, w) - late) ** 2).mean()
            return loss, ts.grad(loss, w)

        return ts.jit(run)(ROWS, ts.tensor(TABLE, name="w"))

    for a, b in zip(step(two_stages()), step(lambda x, w: ts.tanh(x @ w) @ w), strict=True):
        np.testing.assert_allclose(a.numpy(), b.numpy(), rtol=1e-5)


def recurrent(x: ts.Tensor, w: ts.Tensor) -> ts.Tensor:
    """A scan over the sequence, whose results depend on what is carried."""

    def cell(c: ts.Tensor, t: ts.Tensor) -> Any:
        c = ts.tanh(t @ w + c)
        return c, c

    return ts.scan(cell, ts.zeros((x.shape[0], 4)), x.permute(1, 0, 2))[1].permute(1, 0, 2)[:, -1]


IN_TURN = np.arange(8, dtype=np.int32) % 3


@pytest.mark.parametrize(
    "model",
    [
        lambda x, w, at: ts.tanh(x @ w)[ts.arange(x.shape[0]), at] @ w,
        lambda x, w, at: recurrent(x, w) @ w,
    ],
    ids=["the last token", "a scan"],
)
@pytest.mark.parametrize("where", ["stages", "a local body"])
def test_rows_that_are_taken_by_their_places_are_their_own(model: Any, where: str) -> None:
    x = np.random.default_rng(1).normal(size=(8, 3, 4)).astype(np.float32)
    labels = np.random.default_rng(2).integers(0, 4, 8).astype(np.int32)

    def loss(out: ts.Tensor, y: ts.Tensor) -> ts.Tensor:
        return -nn.log_softmax(out)[ts.arange(out.shape[0]), y].mean()

    def step(run: Any) -> Any:
        def body(x: Any, w: ts.Tensor, at: Any, y: Any) -> Any:
            value = loss(run(x, w, at), y)
            return value, ts.grad(value, w)

        return body

    w = ts.tensor(TABLE, name="w")
    if where == "stages":
        run = pipeline.run(("pp",), "GPipe", 4, mesh=dist.Mesh(("pp",), devices=2))(model)
        got = ts.jit(step(run))(x, w, IN_TURN, labels)
    else:
        plan: Any = {"strategy": "data_parallel", "batch": ("x", "at", "y")}
        mesh = dist.Mesh(("dp",), devices=4)
        got = ts.distribute(step(model), mesh=mesh, **plan)(x, w, IN_TURN, labels)
    want = ts.jit(step(model))(x, w, IN_TURN, labels)
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a.numpy(), b.numpy(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "model",
    [
        lambda x, w: ts.tanh(x @ w) * ts.arange(x.shape[0]).reshape(-1, 1).to(ts.f32) @ w,
        lambda x, w: ts.where(ts.arange(x.shape[0]).reshape(-1, 1) < 1, 0.0, ts.tanh(x @ w)) @ w,
    ],
    ids=["times the place", "but the first"],
)
def test_rows_know_their_places_in_the_batch(model: Any) -> None:
    def step(run: Any) -> Any:
        f = ts.jit(lambda x, w: (loss := (run(x, w) ** 2).mean(), ts.grad(loss, w)))
        return f(ROWS, ts.tensor(TABLE, name="w"))

    piped = pipeline.run(("pp",), "GPipe", 4, mesh=dist.Mesh(("pp",), devices=2))(model)
    for a, b in zip(step(piped), step(model), strict=True):
        np.testing.assert_allclose(a.numpy(), b.numpy(), rtol=1e-5)


@pytest.mark.parametrize("where", ["stages", "a local body"])
def test_labels_of_a_gather_are_a_part_of_the_batch(where: str) -> None:
    """`ts.gather` takes an index with fewer rows than its source: with twice as many of the one
    alone the program goes too, and is another."""
    labels = np.arange(8, dtype=np.int32) % 4

    def step(run: Any) -> Any:
        def body(x: Any, w: ts.Tensor, y: Any) -> Any:
            picked = ts.gather(nn.log_softmax(run(x, w)), y.reshape(-1, 1), -1)
            loss = -picked.mean()
            return loss, ts.grad(loss, w)

        return body

    def model(x: Any, w: ts.Tensor) -> ts.Tensor:
        return ts.tanh(x @ w) @ w

    if where == "stages":
        run = pipeline.run(("pp",), "GPipe", 4, mesh=dist.Mesh(("pp",), devices=2))(model)
        spread = ts.jit(step(run))
    else:
        mesh = dist.Mesh(("dp",), devices=4)
        spread = ts.distribute(step(model), strategy="data_parallel", mesh=mesh)
    got, want = (f(ROWS, ts.tensor(TABLE, name="w"), labels) for f in (spread, ts.jit(step(model))))
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a.numpy(), b.numpy(), rtol=1e-5, atol=1e-6)
