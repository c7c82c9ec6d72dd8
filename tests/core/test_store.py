"""Weights that functions create: owners, names and values. NumPy is the engine."""

from __future__ import annotations

import copy
import functools
import gc
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import tessera as ts
from tessera import dist, graph, nn, op
from tessera.core.layout import plain
from tessera.lang.jit import weight_store
from tests.core.numpy_engine import Oracle

X = np.random.default_rng(3).normal(size=(2, 4, 8)).astype(np.float32)
NAMES = ["norm_1.weight", "norm_1.bias", "attention.qkv", "attention.out", "norm_2.weight",
         "norm_2.bias", "mlp.up", "mlp.down"]  # fmt: skip


@pytest.fixture(autouse=True)
def fresh(oracle: Oracle) -> Iterator[None]:
    """Gives the test its own store for weights created outside of functions."""
    ts.seed(0)
    with weight_store.owned_by(weight_store.Store("")):
        yield


def block(x: ts.Tensor, **how: Any) -> ts.Tensor:
    return op.transformer_block(x, heads=2, hidden=16, **how)


def loss_of(x: ts.Tensor) -> ts.Tensor:
    return ts.mean(x * x)


def test_a_step_keeps_its_weights_and_names_them() -> None:
    @graph.training_step(module="Net")
    def step(x: ts.Tensor) -> Any:
        loss = loss_of(block(block(x)))
        return graph.backward(loss), {"loss": loss}

    grads, metrics = step(X)
    weights = step.parameters
    assert list(weights) == [f"Net.block{i}.{n}" for i in range(2) for n in NAMES]
    assert list(grads) == list(weights)
    assert all(grads[k].shape == w.shape and w.name == k for k, w in weights.items())
    assert all(np.abs(g.numpy()).max() > 0 for g in grads.values())
    again, _ = step(X)
    for k in grads:
        np.testing.assert_array_equal(again[k].numpy(), grads[k].numpy())
    assert {n.scope.split("/")[0] for n in step.graph.nodes if n.scope} == {"Net"} | {
        s for s in ("grad",) if any(n.scope == s for n in step.graph.nodes)
    }
    assert metrics["loss"].item() > 0


def test_new_weights_need_no_recording() -> None:
    recorded: list[int] = []
    note = recorded.append

    @graph.training_step()
    def step(x: ts.Tensor) -> Any:
        note(1)
        loss = loss_of(block(x))
        return graph.backward(loss), loss

    losses = []
    for _ in range(4):
        grads, loss = step(X)
        losses.append(loss.item())
        step.parameters = {k: w - 0.5 * grads[k] for k, w in step.parameters.items()}
    assert losses == sorted(losses, reverse=True) and losses[3] < losses[0]
    assert recorded == [1]
    step.update({"block0.mlp.up": ts.zeros((8, 16)), "block0.attention.out": ts.zeros((2, 4, 8))})
    np.testing.assert_allclose(step(X)[1].item(), (X * X).mean(), rtol=1e-5)


def test_first_values_depend_on_the_seed_and_the_name_alone() -> None:
    def made(seed: int, stage: str, before: int = 0) -> np.ndarray:
        ts.seed(seed)
        for _ in range(before):
            dist.tensor((3,))  # changes the order of creation
        part = graph.stage(stage)(block)
        found = graph.parameters(part, plain(ts.f32, (2, 4, 8)))
        return found[f"{stage}.block0.mlp.up"].numpy()

    np.testing.assert_array_equal(made(1, "a"), made(1, "a", before=5))
    assert np.abs(made(1, "a") - made(2, "a")).max() > 1e-3
    assert np.abs(made(1, "a") - made(1, "b")).max() > 1e-3


def test_a_stage_shares_its_weights_between_calls_and_functions() -> None:
    @graph.stage("encoder")
    def encoder(x: ts.Tensor) -> ts.Tensor:
        return block(block(x))

    @graph.training_step(module="Net")
    def step(x: ts.Tensor) -> Any:
        loss = loss_of(encoder(encoder(x)))
        return graph.backward(loss), loss

    @ts.jit
    def evaluate(x: ts.Tensor) -> ts.Tensor:
        return loss_of(encoder(encoder(x)))

    outside = loss_of(encoder(encoder(ts.tensor(X))))  # eagerly, before the first call of the step
    grads, loss = step(X)
    assert list(step.parameters) == [f"Net.encoder.block{i}.{n}" for i in range(2) for n in NAMES]
    assert list(encoder.parameters) == [n.removeprefix("Net.") for n in step.parameters]
    np.testing.assert_allclose(outside.item(), loss.item(), rtol=1e-5)
    np.testing.assert_allclose(evaluate(X).item(), loss.item(), rtol=1e-5)
    step.parameters = {k: w - 0.5 * grads[k] for k, w in step.parameters.items()}
    now = step(X)[1].item()
    assert now < loss.item()
    np.testing.assert_allclose(evaluate(X).item(), now, rtol=1e-5)
    np.testing.assert_allclose(loss_of(encoder(encoder(ts.tensor(X)))).item(), now, rtol=1e-5)
    # the eager gradient, by the stage's own names, equals the compiled one
    taped = ts.grad(loss_of(encoder(encoder(ts.tensor(X)))))
    for k, g in step(X)[0].items():
        want = taped[k.removeprefix("Net.")].numpy()
        np.testing.assert_allclose(g.numpy(), want, rtol=1e-4, atol=1e-6)


def test_scopes_tell_the_stages_apart() -> None:
    first, second = graph.stage("first")(block), graph.stage("second")(block)

    @graph.training_step(module="Net")
    def step(x: ts.Tensor) -> Any:
        loss = loss_of(second(first(x)))
        return graph.backward(loss), loss

    step(X)
    heads = ["/".join(n.scope.split("/")[:2]) for n in step.graph.nodes if n.op != "input"]
    order = [s for s in dict.fromkeys(heads) if s.startswith("Net/")]
    assert order == ["Net/first", "Net/second"]
    assert next(iter(first.parameters)) == "first.block0.norm_1.weight"


def test_two_functions_made_stages_of_one_name_collide_in_a_step() -> None:
    parts = [graph.stage("same")(block), graph.stage("same")(block)]

    @graph.training_step(module="Net")
    def step(x: ts.Tensor) -> Any:
        return loss_of(parts[1](parts[0](x)))

    with pytest.raises(ts.UsageError, match=r"two weights are called 'Net\.same\.block0"):
        step(X)


def test_a_recorded_function_owns_what_it_makes() -> None:
    @ts.jit
    def f(x: ts.Tensor) -> ts.Tensor:
        return block(block(x))

    one = f(X)
    np.testing.assert_array_equal(one.numpy(), f(X).numpy())
    # another number of rows is recorded anew, with the same weights
    np.testing.assert_allclose(f(X[:1]).numpy(), one.numpy()[:1], rtol=1e-4, atol=1e-5)
    found = graph.parameters(f, X)
    assert list(found)[:1] == ["f.block0.norm_1.weight"] and len(found) == 16


def test_functions_of_one_name_have_weights_of_their_own() -> None:
    small, large = ts.jit(lambda x: block(x)), ts.jit(lambda x: block(x))
    assert small(X).shape == (2, 4, 8) and large(np.tile(X, 2)).shape == (2, 4, 16)
    found = [graph.parameters(f, x) for f, x in ((small, X), (large, np.tile(X, 2)))]
    assert [w["<lambda>.block0.mlp.up"].shape[0] for w in found] == [8, 16]
    held = len(weight_store._functions)
    del small, large
    gc.collect()
    assert len(weight_store._functions) <= held - 2  # their weights are released with them


def test_outside_of_all_a_call_is_new_unless_it_is_named() -> None:
    x = ts.tensor(X)
    assert np.abs(block(x).numpy() - block(x).numpy()).max() > 1e-6
    np.testing.assert_array_equal(block(x, name="a").numpy(), block(x, name="a").numpy())
    grads = ts.grad(loss_of(block(x, name="a")))
    assert sorted(grads) == sorted(f"a.{n}" for n in NAMES)


def test_layers_are_stacked_and_equal_layers_one_by_one() -> None:
    @graph.stage("deep")
    def deep(x: ts.Tensor) -> ts.Tensor:
        return block(x, depth=3)

    @graph.stage("flat")
    def flat(x: ts.Tensor) -> ts.Tensor:
        return block(block(block(x)))

    x = ts.tensor(X)
    deep(x), flat(x)
    stacked = deep.parameters
    assert stacked["deep.block0.mlp.up"].shape == (3, 8, 16)
    flat.parameters = {
        f"flat.block{i}.{n}": stacked[f"deep.block0.{n}"][i] for i in range(3) for n in NAMES
    }
    np.testing.assert_allclose(deep(x).numpy(), flat(x).numpy(), rtol=1e-5, atol=1e-5)


def test_weights_from_outside_are_trained_too() -> None:
    head = dist.tensor((8, 5), name="head")
    model = ts.nn.Linear(8, 8)
    model.parameters()

    @graph.training_step(module="Net")
    def step(x: ts.Tensor) -> Any:
        loss = loss_of(model(block(x)) @ head)
        return graph.backward(loss), loss

    grads, loss = step(X)
    assert {"head", "weight", "bias"} < set(step.parameters) == set(grads)
    for _ in range(2):
        step.parameters = {k: w - 0.1 * grads[k] for k, w in step.parameters.items()}
        grads, loss = step(X)
    # a new shape is recorded again, with the new weights instead of those of the first recording
    rows = np.concatenate([X, X])
    again, same = step(rows)
    np.testing.assert_allclose(same.item(), loss.item(), rtol=1e-5)
    np.testing.assert_allclose(again["head"].numpy(), grads["head"].numpy(), rtol=1e-4, atol=1e-6)
    np.testing.assert_array_equal(head.numpy(), step.parameters["head"].numpy())


OUTER = dist.tensor((8, 8))


def test_what_was_made_without_a_name_is_called_as_its_variable(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    outer, inner = dist.tensor((8, 8)), dist.tensor((8, 8))
    monkeypatch.setitem(globals(), "OUTER", outer)
    known, constant = dist.tensor((8, 8), name="known"), ts.ones((8,))

    @graph.training_step(module="Net")
    def step(x: ts.Tensor) -> Any:
        loss = loss_of(((x @ OUTER) @ inner * constant) @ known)
        unset = not_yet if x.ndim == 0 else 0  # a variable without a value
        return graph.backward(loss), unset

    grads, _ = step(X)
    assert set(grads) == {"OUTER", "inner", "known"} == set(step.parameters)
    assert outer.name == "OUTER" and not constant.name
    step.update({"inner": np.zeros((8, 8), np.float32)})
    assert not step(X)[0]["OUTER"].numpy().any()
    whole = graph.training_step()(functools.partial(lambda x, y: (x * y, inner), X))
    np.testing.assert_array_equal(whole(X)[0].numpy(), X * X)
    if X.ndim == 0:
        not_yet = 1


def test_reads_and_branches_inside_a_step() -> None:
    @graph.training_step(module="Net")
    def step(x: ts.Tensor) -> Any:
        h = block(x)
        if ts.mean(h) > 1e6:
            return graph.backward(loss_of(h)), ts.tensor(0.0)
        loss = loss_of(block(h))
        return graph.backward(loss), loss

    grads, loss = step(X)
    assert len(grads) == 16
    step.parameters = {k: w - 0.5 * grads[k] for k, w in step.parameters.items()}
    assert step(X)[1].item() < loss.item()


def test_weights_belong_to_no_loop_but_a_stage_may_be_called_in_one() -> None:
    part = graph.stage("part")(block)

    def looped(layer: Any) -> Any:
        @graph.training_step(module="Net")
        def step(x: ts.Tensor) -> Any:
            h, _ = ts.scan(lambda h, _: (layer(h), ()), x, ts.zeros((3, 1)))
            loss = loss_of(h)
            return graph.backward(loss), loss

        return step

    for run in (looped(block), lambda x: ts.scan(lambda h, _: (block(h), ()), x, ts.zeros(3))):
        with pytest.raises(ts.UsageError, match="cannot be made in the body of a loop"):
            run(ts.tensor(X))
    grads, loss = looped(part)(X)
    x = ts.tensor(X)
    np.testing.assert_allclose(loss.item(), loss_of(part(part(part(x)))).item(), rtol=1e-5)
    taped = ts.grad(loss_of(part(part(part(x)))))
    for k, g in grads.items():
        want = taped[k.removeprefix("Net.")].numpy()
        np.testing.assert_allclose(g.numpy(), want, rtol=1e-4, atol=1e-6)


def test_parameters_are_the_same_tensors_inside_and_outside() -> None:
    part = graph.stage("part")(block)
    x = ts.tensor(X)
    part(x)
    outer = part.parameters

    @ts.jit
    def by_tree(x: ts.Tensor) -> Any:
        loss = loss_of(part(x))
        return ts.grad(loss, part.parameters), ts.grad(loss, outer)

    inside, closed = by_tree(x)
    taped = ts.grad(loss_of(part(x)), part.parameters)
    for k, g in taped.items():
        assert np.abs(g.numpy()).max() > 0
        np.testing.assert_allclose(inside[k].numpy(), g.numpy(), rtol=1e-4, atol=1e-6)
        np.testing.assert_allclose(closed[k].numpy(), g.numpy(), rtol=1e-4, atol=1e-6)


def test_what_does_not_fit_is_refused_whole() -> None:
    part = graph.stage("part")(block)
    with pytest.raises(ts.UsageError, match="it has no weights yet"):
        _ = part.parameters
    part(ts.tensor(X))
    have = part.parameters
    before = have["part.block0.mlp.up"].numpy()
    wrong: list[tuple[Any, str, type[ts.TesseraError]]] = [
        ({**have, "x": ts.ones(2)}, "0 names are missing, 1 are too many", ts.UsageError),
        (
            {k: have[k] for k in list(have)[1:]},
            "1 names are missing, 0 are too many",
            ts.UsageError,
        ),
        ({**have, "part.block0.mlp.down": ts.ones(2)}, "another shape", ts.ShapeError),
        ({k: v.to(ts.bf16) for k, v in have.items()}, "another dtype", ts.DTypeError),
        ([1], "the weights cannot be", ts.UsageError),
    ]
    for new, said, kind in wrong:
        with pytest.raises(kind, match=said):
            part.parameters = new
    with pytest.raises(ts.UsageError, match="is a tensor of a function that is being recorded"):
        ts.jit(lambda x: part.update({"part.block0.mlp.up": x}))(ts.zeros((8, 16)))
    np.testing.assert_array_equal(part.parameters["part.block0.mlp.up"].numpy(), before)


def test_sizes_that_changed_and_bad_arguments_are_said_so() -> None:
    x = ts.tensor(X)
    block(x, name="a")
    with pytest.raises(ts.UsageError, match=r"the weights 'a' were made with other sizes"):
        op.transformer_block(x, heads=4, name="a")
    with pytest.raises(ts.ShapeError, match=r"x has 2 dims, not 3"):
        op.transformer_block(x[0])
    with pytest.raises(ts.DTypeError, match="x must be floats"):
        op.transformer_block(ts.zeros((1, 2, 4), ts.int32))
    with pytest.raises(ts.UsageError, match="an option cannot be 'vocab'"):
        op.transformer_block(x, vocab=3)
    with pytest.raises(ts.UsageError, match="do not divide"):
        op.transformer_block(x, heads=3)
    with pytest.raises(ts.UsageError, match="depth cannot be 0"):
        op.transformer_block(x, depth=0)
    for bad in (graph.stage, graph.training_step):
        with pytest.raises(ts.UsageError, match="cannot be"):
            bad(3)  # type: ignore[operator]
        with pytest.raises(ts.UsageError, match="the function cannot be 3"):
            bad("a")(3)  # type: ignore[operator]
    with pytest.raises(ts.StrategyError, match="the strategy cannot be 'dp'"):
        graph.training_step(strategy="dp")  # type: ignore[arg-type]


# -- capture --------------------------------------------------------------------------------------
def test_a_capture_replays_one_program_and_takes_nothing_else(oracle: Oracle) -> None:
    part = graph.stage("part")(block)
    runs = graph.capture(lambda x, k: part(x) * k, X, 2.0)
    made = oracle.compiled
    np.testing.assert_array_equal(runs.replay().numpy(), runs.result.numpy())
    other = runs.replay(X + 1.0, 2.0)
    np.testing.assert_allclose(other.numpy(), 2 * part(ts.tensor(X + 1.0)).numpy(), rtol=1e-5)
    assert oracle.compiled > made  # the line above ran eagerly
    made = oracle.compiled
    part.update({"part.block0.mlp.up": ts.zeros((8, 16))})
    assert np.abs(runs(X, 2.0).numpy() - runs.result.numpy()).max() > 1e-4  # weights are read anew
    assert oracle.compiled - made <= 1  # only the program of the zeros
    assert "part/block0" in runs.text and runs.text == runs.graph.text
    for given in (ts.tensor(X), X.astype(np.float64)):
        np.testing.assert_array_equal(runs.replay(given, 2.0).numpy(), runs(X, 2.0).numpy())
    with pytest.raises(ts.UsageError) as caught:
        runs.replay(X[:1], 3.0)
    assert str(caught.value).splitlines()[:3] == [
        "capture: <lambda> was captured with other types of arguments",
        "  x   : captured f32[2, 4, 8], given f32[1, 4, 8]",
        "  k   : captured 2.0, given 3.0",
    ]
    np.testing.assert_array_equal(runs.replay(k=2.0, x=X).numpy(), runs(X, 2.0).numpy())
    with pytest.raises(ts.UsageError, match="<lambda>: k is missing"):
        runs.replay(X)
    with pytest.raises(ts.UsageError, match="was captured with other arguments"):
        runs.replay([X], 2.0)
    mesh = dist.Mesh(("pp", "dp"), shape=(2, 2))
    one, two = (ts.tensor(X, mesh=mesh.slice(pp=i)) for i in (0, 1))
    there = (
        r"x   : captured f32\[2, 4, 8\] on dp=2, devices 0, 1, given f32\[2, 4, 8\] on dp=2, dev"
    )
    with pytest.raises(ts.UsageError, match=there):
        graph.capture(lambda x: x * 2.0, one).replay(two)
    with pytest.raises(ts.UsageError, match=r"given f32\[2, 4, 8\] on no mesh"):
        graph.capture(lambda x: x * 2.0, one).replay(X)


def test_a_module_has_its_weights_already() -> None:
    with pytest.raises(ts.UsageError, match=r"a call of Linear makes no weights: it has its own"):
        graph.parameters(nn.Linear(8, 3), X)


def test_a_step_says_that_it_is_not_copied() -> None:
    step = graph.training_step()(lambda x: graph.backward(block(x).sum()))
    with pytest.raises(ts.UsageError, match="a step is not copied"):
        copy.deepcopy(step)


def test_a_capture_is_one_program() -> None:
    def reads(x: ts.Tensor) -> ts.Tensor:
        return x if ts.sum(x) > 0 else -x

    with pytest.raises(ts.UsageError, match="reads reads a value, so it is no single program"):
        graph.capture(reads, X)
    with pytest.raises(ts.UsageError, match="being recorded here already"):
        ts.jit(lambda x: graph.capture(loss_of, x))(X)
