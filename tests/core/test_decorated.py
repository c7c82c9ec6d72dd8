"""Choices of `@schedule(...)` in every place of a decorator: each holds, or a warning says not."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import tessera as ts
from tessera import dist, graph, pipeline, schedule
from tests.core.numpy_engine import Oracle
from tests.core.option_rows import STAGES, body, pipe_arguments, piped, sharded

CHOICES: dict[str, Any] = {
    "pipeline": False, "microbatches": 8, "overlap": False, "bucket_bytes": 1 << 20,
    "prefetch": 1, "algorithm": "ring", "epoch": "hard", "tile": {"BM": 64}, "warps": 4,
}  # fmt: skip
Made = Callable[..., Any]
PLACES: dict[str, Callable[[Made, dict[str, Any]], Made]] = {
    "above jit": lambda f, c: schedule(**c)(ts.jit(f)),
    "below jit": lambda f, c: ts.jit(schedule(**c)(f)),
    "below jit with arguments": lambda f, c: ts.jit(donate="x")(schedule(**c)(f)),
    "twice": lambda f, c: schedule()(schedule(**c)(f)),
    "inside": lambda f, c: ts.jit(called(schedule(**c)(f))),
    "above a training step": lambda f, c: schedule(**c)(graph.training_step()(f)),
    "below a training step": lambda f, c: graph.training_step()(schedule(**c)(f)),
}


def called(f: Made) -> Made:
    def step(w: Any, x: Any) -> Any:
        return f(w, x)

    return step


def made(of: str, place: Callable[[Made], Made]) -> tuple[str, list[str]]:
    """Returns (the plan without its name and options, the warnings about options)."""
    if of == "pipeline":
        (w, x), fn = pipe_arguments(), piped()
    else:
        w = {"up": sharded("[8@dp, 8@tp]"), "down": sharded("[8@(tp,dp), 8]")}
        x, fn = sharded("[8@dp, 8]"), body
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        text = place(fn).plan(w, x).text
    body_of = text.partition("\n")[2]
    return body_of, [str(w.message) for w in said if w.category is ts.OptionWarning]


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("of", ["pipeline", "step"])
def test_each_choice_holds_or_says_that_it_does_not(of: str, place: str, oracle: Oracle) -> None:
    plain = made(of, lambda f: PLACES[place](f, {}))
    for name, value in CHOICES.items():
        found = made(of, lambda f, c={name: value}: PLACES[place](f, c))  # type: ignore[misc]
        alone = made(of, lambda f, c={name: value}: schedule(**c)(f))  # type: ignore[misc]
        assert found[1] or found[0] != plain[0] or found == alone, name
        if place in ("above jit", "below jit", "twice"):
            assert found == alone, name


def test_a_choice_is_made_once_and_a_number_of_microbatches_holds_in_a_function_that_is_called(
    oracle: Oracle,
) -> None:
    with pytest.warns(ts.OptionWarning, match=r"bucket_bytes=8 has no effect: body has its own"):
        twice = schedule(bucket_bytes=8)(schedule(bucket_bytes=16)(body))
    assert twice.chosen.options.bucket_bytes == 16
    run = pipeline.run(("pp",), mesh=STAGES)(lambda w, x: ts.tanh(ts.tanh(x @ w) @ w))
    inner = schedule(microbatches=8)(lambda w, x: run(w, x))
    x = ts.tensor(np.ones((32, 8)), mesh=STAGES, layout="[32@dp, 8]")
    w = ts.tensor(np.ones((8, 8)), mesh=STAGES)
    assert ts.jit(called(inner)).plan(w, x).table.endswith("microbatches=8")


def test_a_traced_or_captured_function_keeps_its_choices(oracle: Oracle) -> None:
    x = sharded("[8@dp, 8]")
    chosen = schedule(bucket_bytes=64)(lambda x: x.sum())
    assert graph.trace(chosen, x).options.schedule.bucket_bytes == 64
    with pytest.warns(ts.OptionWarning, match="microbatches=2 has no effect"):
        graph.trace(schedule(microbatches=2)(lambda x: x.sum()), x)


def test_a_choice_of_when_collectives_run_says_that_there_are_none(oracle: Oracle) -> None:
    x = sharded("[8@dp, 8]")
    late = schedule(prefetch=1, bucket_bytes=64)(ts.tanh)
    with pytest.warns(
        ts.OptionWarning, match="bucket_bytes=64, prefetch=1 has no effect: tanh has"
    ):
        late(x)
    schedule(prefetch=1)(ts.tanh)(np.ones((8, 8), np.float32))  # on one device there is no warning


def test_a_scheduled_training_step_remains_one(oracle: Oracle) -> None:
    def step(x: Any) -> Any:
        loss = (x @ dist.tensor((8, 4), name="w", init="normal")).sum()
        return loss, graph.backward(loss)

    made: Any = schedule(bucket_bytes=64)(graph.training_step()(step))
    made(np.ones((2, 8), np.float32))
    assert [*made.parameters] == ["w"]
    assert made.compiled.choices.bucket_bytes == 64


def test_a_context_above_a_compiled_function_holds_for_all_that_is_asked_of_it(
    oracle: Oracle,
) -> None:
    x = ts.ones((4, 4))
    made: Any = ts.autocast(ts.bf16)(ts.jit(lambda x: x @ x))
    assert made(x).dtype is ts.bf16 and "bf16" in made.graph.text
    assert "bf16" in made.plan(x).text and "bf16" in graph.trace(made, x).text
    assert graph.capture(made, x).result.dtype is ts.bf16
    frozen: Any = ts.no_grad()(ts.jit(lambda x: x * 2.0))
    assert "stop_gradient" in frozen.plan(x).text

    class Model:
        @ts.autocast(ts.bf16)
        @ts.jit
        def run(self, x: Any) -> Any:
            return x @ x

    assert Model().run(x).dtype is ts.bf16


def test_what_a_compiled_function_does_not_have_is_said(oracle: Oracle) -> None:
    with pytest.raises(ts.UnknownNameError, match=r"write step.plan\(\*args\)"):
        ts.jit(body).eval_shape(1)  # JAX's name
    assert not hasattr(ts.jit(body), "other")
