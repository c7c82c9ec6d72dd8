"""Is an option that changes nothing where it is given said to, with the way out?"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import tessera as ts
from tessera import dist, op, schedule
from tessera.train import recipe
from tests.core.test_lang import Oracle, oracle

__all__ = ["oracle"]

EP = dist.Mesh(("ep",), devices=4)
X = np.ones((16, 8), np.float32)
SMALL = {"vocab_size": 8, "hidden_size": 8, "num_layers": 2, "num_heads": 2, "sequence_length": 4}


def moe(x: Any, **transport: Any) -> ts.Tensor:
    w = {"router": np.ones((8, 4)), "up": np.ones((4, 8, 4)), "down": np.ones((4, 4, 8))}
    out: ts.Tensor = op.moe(x, w, capacity=2.0, groups=1, mesh=EP, transport=transport)
    return out


def trained(model_of: Callable[[Any], Any], **keys: Any) -> None:
    """The step of guide 4's own loop, whose model takes the batch and the weights only."""
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


SILENT: dict[str, tuple[Callable[[], object], str]] = {
    "tile": (lambda: schedule(tile=64), "schedule: tile=(64,) has no effect"),
    "warps": (lambda: schedule(warps=4), "schedule: warps=4 has no effect"),
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
}  # fmt: skip

HEARD: dict[str, Callable[[], object]] = {
    "several buckets": lambda: moe(X, epoch="hard", bucket_bytes=64),
    "by the schedule": lambda: schedule(epoch="hard")(lambda x: moe(x, bucket_bytes=64))(X),
    "a soft epoch": lambda: schedule(epoch="soft")(lambda x: x * 2.0)(X),
    "a model of the configuration": lambda: trained(
        recipe.make_model, mixed_precision=True, gradient_checkpointing=True, dropout=0.1
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
