"""Warnings about options that have no effect in their place, with the advice."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import tessera as ts
from tessera import dist, graph, nn, op, pipeline, schedule
from tessera.train import recipe
from tests.core.numpy_engine import Oracle

EP = dist.Mesh(("ep",), devices=4)
X = np.ones((16, 8), np.float32)
SMALL = {"vocab_size": 8, "hidden_size": 8, "num_layers": 2, "num_heads": 2, "sequence_length": 4}


def moe(x: Any, **transport: Any) -> ts.Tensor:
    w = {"router": np.ones((8, 4)), "up": np.ones((4, 8, 4)), "down": np.ones((4, 4, 8))}
    out: ts.Tensor = op.moe(x, w, capacity=2.0, groups=1, mesh=EP, transport=transport)
    return out


LAYER = nn.MoE(8, 4, 4, capacity=2.0, groups=1, mesh=EP, transport={"bucket_bytes": 64})


def trained(model_of: Callable[[Any], Any], **keys: Any) -> None:
    """Runs the training step of guide 4's loop; its model takes only the batch and the weights."""
    config = {**SMALL, **keys}
    weights = recipe.initialize_model_weights(config)
    state = recipe.initialize_optimizer_state(weights, config)

    @ts.jit
    def step(batch: Any, weights: Any, state: Any) -> Any:
        loss = recipe.compute_loss(model_of(config), batch, weights)
        return recipe.optimizer_step(weights, ts.grad(loss, weights), state, config)

    ids = np.zeros((2, 4), np.int32)
    step.plan({"input_ids": ids, "labels": ids}, weights, state)


def inside() -> None:
    inner = schedule(overlap=False)(lambda x: x * 2.0)
    ts.jit(lambda x: inner(x))(X)


def plain(config: Any) -> Any:
    return recipe.transformer_model


def begun(**keys: Any) -> None:
    """Initializes an optimizer's state with keys that depend on each other."""
    weights = recipe.initialize_model_weights({**SMALL, **keys})
    recipe.initialize_optimizer_state(weights, {**SMALL, **keys})


def split() -> ts.Tensor:
    return ts.tensor(X, mesh=EP, layout="[16@ep, 8]")


SILENT: dict[str, tuple[Callable[[], object], str]] = {
    "deterministic": (lambda: dist.deterministic() and None, "it was called without `with`"),
    "autocast": (lambda: ts.autocast(ts.bf16) and None, "ts.autocast(...) has no effect"),
    "strict": (lambda: ts.strict() and None, "write with ts.strict(...):"),
    "named_scope": (lambda: ts.named_scope("mlp") and None, "write with ts.named_scope(...):"),
    "profile": (lambda: dist.profile() and None, "with dist.profile() as p: step(batch)"),
    "elastic": (lambda: dist.elastic() and None, "with dist.elastic(): for step in"),
    "schedule": (lambda: schedule(overlap=True) and None, "write @schedule(...) above the"),
    "stage": (lambda: graph.stage("a") and None, "graph.stage(...) has no effect: no function was"),
    "jit": (lambda: ts.jit(donate=("x",)) and None, "write @ts.jit(...) above the function"),
    "a nesting of other sizes": (
        lambda: schedule(algorithm="hierarchical(2:ring x 4:ring)")(lambda x: x * 2.0)(X),
        "schedule: algorithm='hierarchical(2:ring x 4:ring)' has no effect: no collective of <lam",
    ),
    "an algorithm of another collective": (
        lambda: schedule(algorithm={"all_to_all": "ring"})(lambda x: x.sum())(split()),
        "schedule: algorithm={'all_to_all': 'ring'} has no effect: <lambda> has no all_to_all, but"
        " all_reduce",
    ),
    "an algorithm of no collective": (
        lambda: schedule(algorithm="ring")(lambda x: x * 2.0)(split()),
        "schedule: algorithm='ring' has no effect: <lambda> has no collective",
    ),
    "links of a tensor": (
        lambda: dist.inspect(X, topology="h100"),
        "inspect: topology='h100' has no effect: a tensor is looked at",
    ),
    "tile": (
        lambda: schedule(tile={"BM": 64})(lambda x: x * 2.0)(X),
        "schedule: tile={'BM': 64} has no effect: no kernel of <lambda> has the size BM",
    ),
    "warps": (
        lambda: schedule(warps=4)(lambda x: x * 2.0)(X),
        "schedule: warps=4 has no effect: no kernel of <lambda> has the size warps",
    ),
    "no pipeline": (
        lambda: schedule(pipeline=True)(lambda x: x * 2.0)(X),
        "schedule: pipeline=True has no effect: <lambda> calls no pipeline",
    ),
    "microbatches of none": (
        lambda: schedule(microbatches=4)(lambda x: x * 2.0)(X),
        "schedule: microbatches=4 has no effect: <lambda> calls no pipeline",
    ),
    "settled": (inside, "schedule: overlap=False has no effect: <lambda> is called in another"),
    "epoch without experts": (
        lambda: schedule(epoch="hard")(lambda x: x * 2.0)(X),
        "schedule: epoch='hard' has no effect: no experts of <lambda>",
    ),
    "epoch of one bucket": (
        lambda: moe(X, epoch="hard"),
        "moe: transport: epoch='hard' has no effect: all tokens of a device go in one bucket",
    ),
    "queue pairs": (lambda: moe(X, multi_qp=True), "moe: transport: multi_qp=True has no effect"),
    "their number": (lambda: moe(X, num_qps=2), "moe: transport: num_qps=2 has no effect"),
    "precision": (
        lambda: trained(plain, mixed_precision=True),
        "optimizer_step: config['mixed_precision']=True has no effect",
    ),
    "checkpointing": (
        lambda: trained(plain, gradient_checkpointing=True),
        "optimizer_step: config['gradient_checkpointing']=True has no effect",
    ),
    "dropout": (
        lambda: trained(plain, dropout=0.1), "optimizer_step: config['dropout']=0.1 has no effect"
    ),
    "a last rate that is never reached": (
        lambda: begun(schedule="constant", min_learning_rate=1e-5),
        "config['min_learning_rate']=1e-05 has no effect: it needs schedule \"cosine\" or",
    ),
    "the momentum of AdamW": (
        lambda: begun(momentum=0.5),
        "initialize_optimizer_state: config['momentum']=0.5 has no effect: it needs optimizer",
    ),
    "the epsilon of Lion": (lambda: begun(optimizer="lion", eps=1e-3), "config['eps']=0.001 has"),
    "the metric of none": (lambda: begun(keep_metric="val"), "it needs keep_best"),
}  # fmt: skip

HEARD: dict[str, Callable[[], object]] = {
    "several buckets": lambda: moe(X, epoch="hard", bucket_bytes=64),
    "by the schedule": lambda: schedule(epoch="hard")(lambda x: moe(x, bucket_bytes=64))(X),
    "by the schedule, of a layer": lambda: schedule(epoch="hard")(LAYER)(X),
    "a soft epoch": lambda: schedule(epoch="soft")(lambda x: x * 2.0)(X),
    "a model of the configuration": lambda: trained(
        recipe.make_model, mixed_precision=True, gradient_checkpointing=True, dropout=0.1
    ),
    "a nesting of these sizes": lambda: schedule(algorithm="hierarchical(2:ring x 2:tree)")(
        lambda x: x.sum()
    )(split()),
    "an algorithm of what a sum becomes": lambda: schedule(algorithm={"reduce_scatter": "ring"})(
        lambda x: x.sum()
    )(split()),
    "an algorithm on one device": lambda: schedule(algorithm={"all_to_all": "ring"})(
        lambda x: x.sum()
    )(X),
    "keys that go together": lambda: begun(
        optimizer="momentum", momentum=0.5, schedule="linear", min_learning_rate=1e-5
    ),
}


@pytest.mark.parametrize("name", SILENT)
def test_it_is_said(name: str, oracle: Oracle) -> None:
    run, says = SILENT[name]
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        run()
    (said,) = [str(w.message) for w in seen if w.category is ts.OptionWarning]
    assert says in said and "\n  means : " in said and "\n  fix   : " in said
    assert [w.filename for w in seen if w.category is ts.OptionWarning] == [__file__]


@pytest.mark.parametrize("name", HEARD)
def test_nothing_is_said_where_it_has_one(name: str, oracle: Oracle) -> None:
    HEARD[name]()


def test_a_layer_sends_as_the_schedule_says(oracle: Oracle) -> None:
    """The schedule sets the options that the layer's transport leaves open. A direct call uses the
    layer's options."""
    said: list[str] = []
    note = said.append

    def served(x: Any) -> ts.Tensor:
        note(str(nn.moe_inspection(LAYER, x)))
        return LAYER(x)

    schedule(epoch="hard")(served)(X)
    assert "hard epochs" in said[0] and "soft epochs" in str(nn.moe_inspection(LAYER, X))
    one = nn.MoE(8, 4, 4, k=1, capacity=0.5, groups=2, router="sigmoid", scale=3.0)
    assert nn.moe_inspection(one, X).k == 1 and nn.moe_inspection(one, X, k=3).k == 3
    np.testing.assert_array_equal(op.moe(X, one).numpy(), one(ts.tensor(X)).numpy())
    wide = op.moe(X, one, capacity=4.0, scale=6.0).numpy()
    np.testing.assert_allclose(wide[0], one(ts.tensor(X)).numpy()[0] * 2, rtol=1e-6)


def test_a_model_routes_as_its_configuration_says(oracle: Oracle) -> None:
    """The expert options of the configuration are those of each layer, and so are the results."""
    c = nn.GPTConfig(
        vocab=8, seq=4, d=8, layers=1, heads=2, experts=8, experts_per_token=3, capacity=None,
        router="sigmoid", shared_experts=2, normalize_gates=False, gate_scale=2.5,
        expert_groups=4, topk_groups=2, stacked=False,
    )  # fmt: skip
    layer = nn.GPT(c).blocks.layers[0].moe
    same = nn.MoE(
        8, c.width, 8, 3, router="sigmoid", shared=2, normalize=False, scale=2.5,
        expert_groups=4, topk_groups=2, activation="gelu",
    )  # fmt: skip
    assert layer.options() == same.options()
    assert {n: w.shape for n, w in layer.named_parameters()} == {
        n: w.shape for n, w in same.named_parameters()
    }


@pytest.mark.parametrize(
    ("name", "made"),
    [
        ("schedule", lambda: schedule(overlap=True)),
        ("graph.stage", lambda: graph.stage("encoder")),
        ("graph.training_step", lambda: graph.training_step(module="Small")),
        ("graph.pipeline", lambda: graph.pipeline(stages=[lambda x: x, lambda x: x])),
        ("pipeline.run", lambda: pipeline.run(microbatches=2)),
        ("ts.jit", lambda: ts.jit(donate=("x",))),
        ("ts.distribute", lambda: ts.distribute(strategy="data_parallel")),
        ("ts.op", lambda: ts.op(index="a -> a")),
    ],
)
def test_what_stands_above_a_function_is_no_context(name: str, made: Callable[[], Any]) -> None:
    with pytest.raises(ts.UsageError) as error, made():
        raise AssertionError
    text = str(error.value)
    assert text.startswith(f"{name}(...) is for a function, and not for a block of code")
    assert f"write @{name}(" in text
