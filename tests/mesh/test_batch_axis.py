"""The loss and the gradients of a split batch, against those of the whole batch on one device.

A batch is split into microbatches, over devices, in a pipeline, in a data-parallel body.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import tessera as ts
from tessera import dist, graph, nn, pipeline
from tessera.core.context import replaced
from tessera.train.accumulate import accumulated
from tests.cases import LONG, grid
from tests.mesh.batch_losses import BATCH, LOSSES, Array, Loss, centred

SPLITS = [(1, 1), (2, 1), (4, 1), (1, 2), (1, 4), (2, 2), (8, 1)]  # (microbatches, dp)
CLOSE = 1e-5  # relative to the largest entry
Found = dict[str, Array]

# A stage's result is combined with rows of other microbatches before its gradient can be computed:
# an error of pipelines that names the line.
MEETS = "needs all microbatches of a stage"
REFUSED = {
    "a running product", "a sum in turn", "batch norm", "batch norm by hand",
    "batch norm in the features", "centred labels", "contrastive", "correlation",
    "dropout after centring", "experts, capacity", "four quarters", "goal that is not linear",
    "groups of more rows", "hardest half", "logsumexp", "masked advantages",
    "masked advantages alone", "maximum", "mean as integers", "minimum", "neighbours",
    "plus the sum of rows", "quotient of sums", "recurrence", "root mean square",
    "row by row in Python", "rows or their mean", "stopped mean", "tanh of a mean",
    "ten rows, ignored labels and the batch's mean", "three losses", "upper median", "variance",
    "whitened",
}  # fmt: skip


def cases(splits: Callable[[int], list[tuple[int, int]]], every: int = 1, at: int = 0) -> Any:
    """Returns each loss with the splits of its number as a pytest parameter. `long`: all but the
    first split of those whose number is `at` modulo `every`."""
    found = [
        pytest.param(name, (a, b), marks=[LONG] * (k > 0 or i % every != at), id=f"{name}-{a}x{b}")
        for i, name in enumerate(LOSSES)
        for k, (a, b) in enumerate(splits(i))
    ]
    return pytest.mark.parametrize(("name", "split"), found)


# -- the reference --------------------------------------------------------------------------------
def arrays(value: ts.Tensor, gradients: Any) -> Found:
    """The value and the gradients by name."""
    found = {"value": value.numpy()}

    def walk(tree: Any, name: str) -> None:
        if isinstance(tree, dict):
            for key, part in tree.items():
                walk(part, f"{name} {key}")
        else:
            found[name] = tree.numpy()

    walk(gradients, "gradient")
    return found


@functools.cache
def whole(name: str) -> Found:
    """The value and the gradients of the whole batch on one device."""
    loss = LOSSES[name]

    @ts.jit
    def step(batch: Any, weights: Any) -> Any:
        def goal(weights: Any) -> Any:
            value = loss(batch, weights)
            return loss.goal(value), value

        (_, value), gradients = ts.value_and_grad(goal, has_aux=True)(weights)
        return value, gradients

    ts.seed(3)
    return arrays(*step(loss.batch(), loss.trained()))


def close(found: Found, want: Found) -> None:
    """Asserts that each array is within CLOSE of its largest entry, and none is nearly zero."""
    assert found.keys() == want.keys()
    for name, x in want.items():
        largest = np.abs(x).max()
        assert largest > 1e-2, f"{name} says little: {largest}"
        far = np.abs(found[name] - x).max() / largest
        assert far <= CLOSE, f"{name}: {far:.1e} of its largest entry; {found[name]}, not {x}"


def placed(loss: Loss, mesh: dist.Mesh) -> Any:
    """The batch, split over dp."""
    return dist.place(loss.batch(), "data_parallel", mesh, kind="batch")


@pytest.mark.parametrize("name", [name for name, loss in LOSSES.items() if loss.torch])
def test_the_reference_is_that_of_pytorch(name: str) -> None:
    T, loss = pytest.importorskip("torch"), LOSSES[name]
    batch = {k: T.tensor(v) for k, v in loss.batch().items()}
    w = {k: T.tensor(v, requires_grad=True) for k, v in loss.trained().items()}
    h = batch["x"] @ w["a"]
    h = T.tanh(centred(h) if name == "batch norm in the features" else h) @ w["b"]
    assert loss.torch is not None
    value = loss.torch(T, h, batch, w)
    loss.goal(value).backward()
    found = {f"gradient {k}": x.grad.numpy() for k, x in w.items()}
    close({"value": value.detach().numpy(), **found}, whole(name))


def test_parts_of_the_batch_count_different_numbers_of_rows() -> None:
    for parts in (2, 4):
        for x in (BATCH["y"] >= 0, BATCH["m"], BATCH["w"], BATCH["c"] == 1):
            counts = x.reshape(parts, -1).sum(1).tolist()
            assert len(set(counts)) > 1, counts


# -- microbatches ---------------------------------------------------------------------------------
def in_microbatches(name: str, split: tuple[int, int], executor: str) -> None:
    loss, (count, dp) = LOSSES[name], split
    mesh = dist.Mesh(("dp",), devices=dp)
    ts.seed(3)
    with mesh, replaced(executor=executor):
        step = ts.jit(lambda batch, w: accumulated(loss, batch, w, count, loss.goal))
        found = step(placed(loss, mesh), loss.trained())
    close(arrays(*found), whole(name))


@cases(lambda i: [(4, 2), SPLITS[2 * i % 7], SPLITS[(2 * i + 1) % 7]])
def test_microbatches(name: str, split: tuple[int, int]) -> None:
    in_microbatches(name, split, "fused")


@cases(lambda i: [(4, 1) if i % 2 else (2, 2)], every=3)
def test_microbatches_step_by_step(name: str, split: tuple[int, int]) -> None:
    in_microbatches(name, split, "stepped")


# -- pipelines ------------------------------------------------------------------------------------
def in_pipeline(name: str, dp: int, model: Callable[[Loss, dist.Mesh], Any], refused: str) -> None:
    """Compares a pipelined loss and its gradients with the whole batch. `model` returns the loss
    function; `refused` names a further loss that is an error."""
    loss, mesh = LOSSES[name], dist.Mesh(("dp", "pp"), shape={"dp": dp, "pp": 2})
    loss_of = model(loss, mesh)

    @ts.jit
    def step(batch: Any, weights: Any) -> Any:
        value = loss_of(batch, weights)
        return value, ts.grad(loss.goal(value), weights)

    ts.seed(3)
    if name == "experts, auxiliary loss":
        with pytest.raises(pipeline.PipelineWarning, match="is that of each microbatch"):
            step(placed(loss, mesh), loss.trained())
        return
    if name in REFUSED or name == refused:
        with pytest.raises(ts.GraphError, match=MEETS) as error:
            step(placed(loss, mesh), loss.trained())
        assert "batch_losses.py" in str(error.value)
        return
    close(arrays(*step(placed(loss, mesh), loss.trained())), whole(name))


@cases(lambda i: [(4, 2 - i % 2)], every=2)
def test_a_loss_in_the_last_stage(name: str, split: tuple[int, int]) -> None:
    def model(loss: Loss, mesh: dist.Mesh) -> Any:
        def features(batch: Any, weights: Any) -> Any:
            return loss.features(batch["x"], weights), batch, weights

        @graph.pipeline([features, loss.head], mesh, "pp", microbatches=split[0])
        def piped(batch: Any, weights: Any) -> Any:
            return loss.head(*features(batch, weights))

        return piped

    in_pipeline(name, split[1], model, "running sum")


@cases(lambda i: [(4, 1 + i % 2)], every=2, at=1)
def test_a_loss_after_the_stages(name: str, split: tuple[int, int]) -> None:
    def model(loss: Loss, mesh: dist.Mesh) -> Any:
        features = pipeline.run(("pp",), "1F1B", split[0], mesh=mesh)(loss.features)
        return lambda batch, weights: loss.head(features(batch["x"], weights), batch, weights)

    in_pipeline(name, split[1], model, "products over rows")


# -- bodies ---------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("name", "strategy"), grid(LOSSES, ["data_parallel", "zero_redundancy_optimizer"])
)
def test_a_data_parallel_body(name: str, strategy: str) -> None:
    loss = LOSSES[name]

    def body(batch: Any, weights: Any) -> Any:
        value = loss(batch, weights)
        return value, ts.grad(loss.goal(value), weights)

    ts.seed(3)
    mesh = dist.Mesh(("dp",), devices=4)
    step = ts.distribute(body, strategy=strategy, mesh=mesh, batch=("batch",))
    close(arrays(*step(loss.batch(), loss.trained())), whole(name))


# -- bits -----------------------------------------------------------------------------------------
def step_hash(dp: int, count: int, onto: int | None) -> str:
    """The hash of three gradient descent steps on a loss with ignored labels and a square root."""
    mesh = dist.Mesh(("dp",), devices=dp)
    mesh = mesh if onto is None else mesh.fold(onto)

    def loss(b: Any, w: Any) -> ts.Tensor:
        h = ts.tanh(b["x"] @ w["a"]) @ w["b"]
        return nn.cross_entropy(h, b["y"]) + 0.1 * ts.sqrt((h**2).mean())

    batch = {k: np.concatenate([BATCH[k]] * 4) for k in "xy"}
    rows = dist.place(batch, "data_parallel", mesh, kind="batch")
    weights = {k: ts.tensor(LOSSES["mean"].trained()[k], mesh=mesh) for k in "ab"}
    step, found = ts.jit(lambda b, w: accumulated(loss, b, w, count)), hashlib.sha256()
    for _ in range(3):
        value, slopes = step(rows, weights)
        weights = {k: w - 0.1 * slopes[k] for k, w in weights.items()}
        for t in (value, *weights.values()):
            found.update(t.numpy().tobytes())
    return found.hexdigest()


def test_any_split_of_the_batch_over_time_and_devices_has_the_same_bits() -> None:
    """Eight blocks of rows, some on the same device in sequence and some on different devices."""
    splits = [(1, 8, None), (8, 1, None), (4, 2, None), (2, 4, None), (8, 1, 1), (8, 1, 2),
              (4, 2, 2), (4, 2, 1), (2, 4, 1)]  # fmt: skip
    with dist.deterministic(level="mesh_invariant"):
        assert len({step_hash(*split) for split in splits}) == 1
