"""The loss and the gradients of a divided batch, against those of the whole batch on one device.

A batch is divided into microbatches, over devices, in a pipeline, in a data-parallel body. NOT_YET
is what each of them refuses or gets wrong.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest

import tessera as ts
from tessera import dist, graph, pipeline
from tessera.core.context import replaced
from tessera.train.accumulate import accumulated
from tests.cases import LONG
from tests.mesh.batch_losses import BATCH, LOSSES, Array, Loss, centred

SPLITS = [(1, 1), (2, 1), (4, 1), (1, 2), (1, 4), (2, 2), (4, 2), (8, 1)]  # (microbatches, dp)
CLOSE = 1e-5  # of the largest entry
Found = dict[str, Array]

# -- what is refused or wrong ---------------------------------------------------------------------
Outcome = tuple[type[BaseException] | tuple[type[BaseException], ...], str]
SUM = ts.GraphError, "a sum over the batch, not a mean"
NO_MEAN = ts.GraphError, "no mean over the batch's rows"
ACROSS = ts.GraphError, "goes across the rows of the batch"
NUMBER = ts.GraphError, "a result follows from the number of rows"
ANOTHER = ts.GraphError, "with more rows it is another program"
ROWS = ts.ShapeError, "the rows do not divide into microbatches"
ROWS_OR_ACROSS = (ts.ShapeError, ts.GraphError), "where rows divide, they go across"
BLOCKS = ts.LayoutError, "a dim does not divide over dp"


def wrong(numbers: str) -> Outcome:
    """Another value ("got, not wanted"), or the same value and other gradients; nothing is said."""
    return AssertionError, numbers


def warned(numbers: str) -> Outcome:
    """A warning, which is an error in tests, and another value."""
    return (ts.StrategyWarning, pipeline.PipelineWarning), numbers


HOW = ("microbatches", "the last stage", "after the stages", "body")
# Of each loss what happens in the order of HOW, with four microbatches or four devices.
NOT_YET: dict[str, tuple[Outcome | None, ...]] = {
    "sum": (SUM, SUM, SUM, warned("7.94, not 31.8")),
    "masked mean": (NO_MEAN, NO_MEAN, NO_MEAN, warned("nan, not 1.85")),
    "weighted mean": (NO_MEAN, NO_MEAN, NO_MEAN, warned("2.113, not 2.11")),
    "ignored labels, a sum": (SUM, SUM, SUM, warned("4.55, not 18.2")),
    "ignored labels, times their number": (NO_MEAN, NO_MEAN, NO_MEAN, warned("6.25, not 18.2")),
    "row by row in Python": (ANOTHER, NO_MEAN, ANOTHER, warned("the same value")),
    "root mean square": (NO_MEAN, NO_MEAN, NO_MEAN, warned("1.4, not 1.41")),
    "maximum": (NO_MEAN, NO_MEAN, NO_MEAN, warned("2.93, not 3.79")),
    "minimum": (NO_MEAN, NO_MEAN, NO_MEAN, warned("0.991, not 0.542")),
    "logsumexp": (NO_MEAN, NO_MEAN, NO_MEAN, warned("3.65, not 5.15")),
    "goal that is not linear": (
        wrong("gradients 62 % off"),
        NO_MEAN,
        NO_MEAN,
        warned("gradients 8 % off"),
    ),
    "quotient of sums": (NO_MEAN, NO_MEAN, NO_MEAN, warned("0.251, not 0.238")),
    "variance": (ACROSS, warned("1.92, not 1.94"), ACROSS, warned("1.92, not 1.94")),
    "correlation": (ACROSS, NO_MEAN, ACROSS, warned("-0.365, not -0.265")),
    "tanh of a share": (NUMBER, SUM, NUMBER, wrong("1.97, not 4.46")),
    "tanh of a mean": (NO_MEAN, NO_MEAN, NO_MEAN, warned("0.42, not 0.632")),
    "times the number of rows": (SUM, SUM, SUM, warned("7.28, not 29.1")),
    "by the sign of the labels' mean": (NO_MEAN, None, None, wrong("0.821, not 1.04")),
    "stopped mean": (ACROSS, warned("0.723, not 0.96"), ACROSS, warned("0.723, not 0.96")),
    "batch norm by hand": (ACROSS, warned("10.1, not 10.6"), ACROSS, warned("10.1, not 10.6")),
    "batch norm": (NO_MEAN, NO_MEAN, ACROSS, warned("18.1, not 18.6")),
    "batch norm in the features": (
        ACROSS,
        warned("1.93, not 1.86"),
        warned("1.93, not 1.86"),
        warned("1.93, not 1.86"),
    ),
    "centred labels": (
        wrong("-0.196, not -0.341"),
        warned("-0.196, not -0.341"),
        wrong("-0.196, not -0.341"),
        wrong("-0.196, not -0.341"),
    ),
    "masked advantages": (ACROSS, warned("0.0821, not 0.173"), ACROSS, warned("0.0821, not 0.173")),
    "masked advantages alone": (
        wrong("-0.0689, not -0.0581"),
        warned("-0.0689, not -0.0581"),
        wrong("-0.0689, not -0.0581"),
        wrong("-0.0689, not -0.0581"),
    ),
    "rows or their mean": (
        wrong("0.107, not 0.0897"),
        warned("0.107, not 0.0897"),
        wrong("0.107, not 0.0897"),
        wrong("0.107, not 0.0897"),
    ),
    "mean as integers": (ACROSS, warned("9.44, not 2.44"), ACROSS, warned("9.44, not 2.44")),
    "plus the sum of rows": (NUMBER, warned("0.43, not 1.46"), NUMBER, wrong("0.43, not 1.46")),
    "contrastive": (ACROSS, NO_MEAN, ACROSS, warned("0.516, not 1.44")),
    "whitened": (NO_MEAN, NO_MEAN, NO_MEAN, warned("33.3, not 20.9")),
    "products over rows": (NO_MEAN, NO_MEAN, NO_MEAN, warned("-1.44, not -7.1")),
    "upper median": (ACROSS, NO_MEAN, ACROSS, warned("2.32, not 1.95")),
    "hardest half": (ACROSS, warned("2.62, not 2.72"), ACROSS, warned("2.62, not 2.72")),
    "running sum": (ACROSS, warned("0.143, not 0.152"), ACROSS, warned("0.143, not 0.152")),
    "recurrence": (ACROSS, SUM, ACROSS, warned("1.73, not 0.663")),
    "next row": (NO_MEAN, warned("2.05, not 1.97"), NO_MEAN, warned("2.05, not 1.97")),
    "places": (ACROSS, warned("0.117, not 0.688"), ACROSS, warned("0.117, not 0.688")),
    "softmax over rows": (NO_MEAN, warned("2.09, not 2.12"), NO_MEAN, warned("2.09, not 2.12")),
    "experts, auxiliary loss": (
        warned("3.34, not 3.32"),
        warned("3.34, not 3.32"),
        ACROSS,
        warned("3.34, not 3.32"),
    ),
    "experts, capacity": (
        wrong("2.778, not 2.78"),
        wrong("2.778, not 2.78"),
        ACROSS,
        wrong("2.778, not 2.78"),
    ),
    "dropout": (wrong("3.11, not 2.94"), wrong("2.78, not 2.94"), wrong("2.78, not 2.94"), None),
    "dropout after centring": (ACROSS, warned("0.968, not 1.77"), ACROSS, warned("1.23, not 1.77")),
    "three losses": (NO_MEAN, NO_MEAN, NO_MEAN, warned("8.017, not 8.022")),
    "ten rows": (ROWS, ROWS, ROWS, BLOCKS),
    "ten rows, ignored labels and the batch's mean": (ROWS_OR_ACROSS, ROWS, ROWS, BLOCKS),
}


def cases(
    how: str,
    splits: Iterable[tuple[int, int]],
    short: Iterable[tuple[int, int]],
    fails: Callable[[Loss, Outcome, tuple[int, int]], bool] = lambda *_: True,
) -> list[Any]:
    """Each loss with each of `splits`, as parameters of a test, `short` of which run by default.
    Where `fails`, what NOT_YET says of it is expected."""
    found = []
    for name, loss in LOSSES.items():
        outcome = NOT_YET.get(name, (None,) * len(HOW))[HOW.index(how)]
        for split in splits:
            marks: list[Any] = [LONG] * (split not in short)
            if outcome is not None and fails(loss, outcome, split):
                raises, reason = outcome
                marks.append(pytest.mark.xfail(raises=raises, reason=reason, strict=True))
            found.append(pytest.param(name, split, marks=marks, id=f"{name}-{split[0]}x{split[1]}"))
    return found


# -- the reference --------------------------------------------------------------------------------
def arrays(value: ts.Tensor, gradients: Any) -> Found:
    """Each by its name."""
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
    """Each array within CLOSE of its largest entry, none of which is next to nothing."""
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


def is_divided(loss: Loss, outcome: Outcome, split: tuple[int, int]) -> bool:
    count, dp = split
    return count > 1 and (outcome is not ROWS or loss.rows % (count * dp) > 0)


@pytest.mark.parametrize(("name", "split"), cases("microbatches", SPLITS, [(4, 2)], is_divided))
def test_microbatches(name: str, split: tuple[int, int]) -> None:
    in_microbatches(name, split, "fused")


@pytest.mark.parametrize(
    ("name", "split"), cases("microbatches", [(4, 1), (2, 2)], [(2, 2)], is_divided)
)
def test_microbatches_step_by_step(name: str, split: tuple[int, int]) -> None:
    in_microbatches(name, split, "stepped")


# -- pipelines ------------------------------------------------------------------------------------
def in_pipeline(name: str, dp: int, model: Callable[[Loss, dist.Mesh], Any]) -> None:
    """`model` gives a function of the batch and the weights that returns the loss."""
    loss, mesh = LOSSES[name], dist.Mesh(("dp", "pp"), shape={"dp": dp, "pp": 2})
    loss_of = model(loss, mesh)

    @ts.jit
    def step(batch: Any, weights: Any) -> Any:
        value = loss_of(batch, weights)
        return value, ts.grad(loss.goal(value), weights)

    ts.seed(3)
    close(arrays(*step(placed(loss, mesh), loss.trained())), whole(name))


@pytest.mark.parametrize(("name", "split"), cases("the last stage", [(4, 1), (4, 2)], [(4, 2)]))
def test_a_loss_in_the_last_stage(name: str, split: tuple[int, int]) -> None:
    def model(loss: Loss, mesh: dist.Mesh) -> Any:
        def features(batch: Any, weights: Any) -> Any:
            return loss.features(batch["x"], weights), batch, weights

        @graph.pipeline([features, loss.head], mesh, "pp", microbatches=split[0])
        def piped(batch: Any, weights: Any) -> Any:
            return loss.head(*features(batch, weights))

        return piped

    in_pipeline(name, split[1], model)


@pytest.mark.parametrize(("name", "split"), cases("after the stages", [(4, 1), (4, 2)], [(4, 2)]))
def test_a_loss_after_the_stages(name: str, split: tuple[int, int]) -> None:
    def model(loss: Loss, mesh: dist.Mesh) -> Any:
        features = pipeline.run(("pp",), "1F1B", split[0], mesh=mesh)(loss.features)
        return lambda batch, weights: loss.head(features(batch["x"], weights), batch, weights)

    in_pipeline(name, split[1], model)


# -- bodies ---------------------------------------------------------------------------------------
@pytest.mark.parametrize(("name", "split"), cases("body", [(1, 4)], [(1, 4)]))
def test_a_data_parallel_body(name: str, split: tuple[int, int]) -> None:
    loss = LOSSES[name]

    def body(batch: Any, weights: Any) -> Any:
        value = loss(batch, weights)
        return value, ts.grad(loss.goal(value), weights)

    ts.seed(3)
    mesh = dist.Mesh(("dp",), devices=split[1])
    step = ts.distribute(body, strategy="data_parallel", mesh=mesh, batch=("batch",))
    close(arrays(*step(loss.batch(), loss.trained())), whole(name))
