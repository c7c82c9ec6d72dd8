"""Batches without a mesh: laid out by the strategy from the first call on, in any container and
with any origin of the step's mesh."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, NamedTuple

import numpy as np
import pytest

import tessera as ts
from tessera import dist, graph, nn, pipeline
from tessera.core.layout import parse_type

MESH = dist.Mesh(("dp", "pp"), shape={"dp": 2, "pp": 2})
RNG = np.random.default_rng(5)
ROWS = dist.Mesh(("dp",), devices=2)
X = RNG.normal(size=(8, 4)).astype(np.float32)
Y = RNG.integers(0, 4, 8)


class Pair(NamedTuple):
    input: Any
    labels: Any


BATCHES: dict[str, tuple[Any, Callable[..., Any]]] = {
    "a dict": (({"input": X, "labels": Y},), lambda b: (b["input"], b["labels"])),
    "a tuple": (((X, Y),), lambda b: b),
    "a list in a dict": (({"both": [X, Y]},), lambda b: b["both"]),
    "a named tuple": ((Pair(X, Y),), lambda b: (b.input, b.labels)),
    "two arguments": ((X, Y), lambda x, y: (x, y)),
}
STRATEGIES: dict[str, Any] = {
    "data_parallel": "data_parallel",
    **{
        f"ZeRO-{k}": dist.strategy("data_parallel")
        + dist.strategy("zero_redundancy_optimizer", stage=k)
        for k in (2, 3)
    },
}


class Net(nn.Module):
    def __init__(self) -> None:
        self.one, self.two = nn.Linear(4, 6), nn.Linear(6, 4)


def model_of(kind: str, strategy: Any) -> Callable[[Any], Any]:
    ts.seed(1)
    net = Net()
    net.parameters()  # names each by its place in the net, since its parts are called on their own
    if kind != "unplaced":
        dist.place(net, strategy, MESH if kind == "a pipeline" else ROWS)

    def last(x: Any) -> Any:
        return net.two(ts.tanh(x))

    if kind == "a pipeline":
        return pipeline.compose(2, [net.one, last], mesh=MESH, microbatches=4)
    return lambda x: last(net.one(x))


def step_of(kind: str, strategy: Any, names: Callable[..., Any]) -> Any:
    held = {"model": model_of(kind, strategy)}  # no global name of the step leads to the mesh

    @graph.training_step(module="Net", strategy=strategy)
    def step(*batch: Any) -> Any:
        x, y = names(*batch)
        loss = nn.cross_entropy(held["model"](x), y)
        return graph.backward(loss), {"loss": loss}

    return step


def laid(step: Any) -> list[str]:
    """The layouts of the batch's arrays."""
    s = step._jit.schedule
    types = [s.buffers[b] for b in s.inputs]
    return [t.text for t in types if t.shape in (X.shape, Y.shape) and t.shape[0] == len(X)]


CASES = [
    *((name, "a pipeline", "data_parallel") for name in BATCHES),
    *(("a tuple", kind, plan) for kind in ("weights", "the mesh in force") for plan in STRATEGIES),
    ("a dict", "a pipeline", "ZeRO-2"),
    ("a dict", "a pipeline", "ZeRO-3"),
]


@pytest.mark.parametrize(("name", "kind", "plan"), CASES, ids=lambda c: c)
def test_a_batch_is_laid_out_at_the_first_call(name: str, kind: str, plan: str) -> None:
    given, names = BATCHES[name]
    _, want = step_of("unplaced", None, names)(*given)
    step = step_of(kind, STRATEGIES[plan], names)
    for _ in range(2):
        with ROWS if kind == "the mesh in force" else nullcontext():
            grads, metrics = step(*given)
        assert sorted(laid(step)) == ["f32[8@dp, 4]", "i32[8@dp]"]
    assert metrics["loss"].item() == pytest.approx(want["loss"].item(), abs=1e-6)
    assert step._jit._recordings == 1 and len(grads) == 4


def test_a_trace_before_the_first_call_shows_the_batch_as_it_will_lie() -> None:
    given, names = BATCHES["a dict"]
    for kind in ("a pipeline", "weights"):
        traced = graph.trace(step_of(kind, "data_parallel", names), *given)
        assert {"f32[8@dp, 4]", "i32[8@dp]"} <= {n.type.text for n in traced.nodes}, kind


def test_a_strategy_by_its_name_is_that_strategy() -> None:
    weights = {"w": ts.tensor(np.ones((4, 4), np.float32), mesh=MESH)}
    by = dist.strategy("zero_redundancy_optimizer")
    adam = ts.optim.AdamW(1e-2)
    named = adam.init(weights, "zero_redundancy_optimizer")
    assert named["m"]["w"].type == adam.init(weights, by)["m"]["w"].type
    rows = dist.place({"x": X}, "data_parallel", MESH, kind="batch")["x"]
    assert rows.layout == "[8@dp, 4]"
    with pytest.raises(ts.StrategyError, match="the strategy cannot be 'data-parallel'"):
        dist.place({"x": X}, "data-parallel", MESH, kind="batch")


def test_weights_that_nobody_laid_out_are_told_of() -> None:
    given, names = BATCHES["a dict"]
    for kind in ("the mesh in force", "a pipeline"):
        held = step_of("unplaced", "data_parallel", names)
        with MESH, pytest.raises(ts.StrategyError) as caught:
            held(*given)
        assert str(caught.value).splitlines()[0].endswith("the weight 'one.weight' lies on no mesh")
        assert "fix    : lay the model out first: dist.place(model, strategy, mesh)" in str(
            caught.value
        ), kind


def test_the_schedule_of_a_trace_has_the_stages_and_sends_that_a_call_runs() -> None:
    """Also for types in place of arrays, and without the devices of the mesh."""
    given, names = BATCHES["a dict"]
    traced = graph.trace(step := step_of("a pipeline", "data_parallel", names), *given)
    before = traced.schedule
    step(*given)
    assert before.text == step._jit.schedule.text and step._jit._recordings == 1
    assert {s.stage for s in before.steps if s.kind == "send"} == {0, 1}

    wide = dist.Mesh(("dp", "pp"), shape={"dp": 32, "pp": 2})
    model = pipeline.compose(2, [lambda x: ts.tanh(x * 2.0)] * 2, mesh=wide, microbatches=4)
    rows = parse_type("f32[128, 8]")
    mean = graph.trace(lambda b: ts.mean(model(b["x"]) ** 2), {"x": rows}).schedule
    assert {"send", "compute"} <= {s.kind for s in mean.steps} and mean.mesh == wide
    with pytest.raises(ts.BackendError, match="needs 64 devices"):
        model(np.ones((128, 8), np.float32))


def test_a_model_of_one_array_is_not_given_a_whole_batch() -> None:
    with pytest.raises(ts.DTypeError, match=r"fix .*: give one of its values, as in x\['input'\]"):
        graph.trace(model_of("a pipeline", "data_parallel"), {"input": X, "labels": Y})


SIXTEEN = {
    "a weight": "print(dist.tensor((16, 4), '[16@dp, 4]', mesh).numpy().shape)",
    "a batch": "print(pipeline.compose(2, [ts.tanh] * 2, mesh=mesh)(np.ones((16, 4))).shape)",
}


@pytest.mark.parametrize("what", SIXTEEN)
def test_the_first_of_a_process_starts_as_many_devices_as_its_mesh_has(what: str) -> None:
    lines = ["import numpy as np, tessera as ts", "from tessera import dist, pipeline",
             "mesh = dist.Mesh(('dp', 'pp'), shape={'dp': 8, 'pp': 2})", SIXTEEN[what]]  # fmt: skip
    env = {k: v for k, v in os.environ.items() if not k.startswith(("TESSERA_", "JAX_", "XLA_"))}
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(lines)], env=env, capture_output=True, text=True,
        timeout=300, check=False,
    )  # fmt: skip
    assert done.stdout == "(16, 4)\n", done.stderr
