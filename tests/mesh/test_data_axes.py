"""Data-parallel and ZeRO bodies: values, gradients, state and random draws of the whole batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import tessera as ts
from tessera import dist, graph, nn, op, optim

RNG = np.random.default_rng(5)
MESH = dist.Mesh(("dp",), devices=4)
STRATEGIES = ("data_parallel", "zero_redundancy_optimizer")
ROWS = 8
SEEN = pytest.mark.filterwarnings("ignore::tessera.TraceWarning")  # bodies write to an outside list
BATCH = {
    "x": RNG.normal(size=(ROWS, 6)).astype(np.float32),
    "y": np.int32([2, -100, 0, 1, -100, -100, 3, 4]),
    "mask": np.float32([1, 1, 0, 0, 1, 0, 1, 1]),
}
W = RNG.normal(size=(6, 5)).astype(np.float32)


def logits(b: Any, w: Any) -> Any:
    return ts.tanh(b["x"] @ w)


def several(b: Any, w: Any) -> Any:
    h = logits(b, w)
    return nn.cross_entropy(h, b["y"]) + 0.1 * ts.sqrt((h**2).mean()) + h.sum() + (w**2).sum()


@SEEN
def test_the_body_runs_once_and_its_rows_are_split() -> None:
    ran = []

    def step(x: Any, w: Any) -> Any:
        ran.append((x.shape, x.layout))
        return ts.value_and_grad(lambda w: (ts.tanh(x @ w) ** 2).mean())(w)

    for strategy in STRATEGIES:
        run = ts.jit(ts.distribute(step, strategy=strategy, mesh=MESH))
        for _ in range(3):
            run(BATCH["x"], W)
        assert ran == [((ROWS, 6), "[8@dp, 6]")]
        ran.clear()


@SEEN
def test_the_body_of_a_graph_function_and_a_kernel_run_once() -> None:
    ran = []

    @op.kernel
    def inner(x: Any) -> Any:
        ran.append(("kernel", x.shape))
        return x - dist.all_reduce(x.mean(0), "dp", op="mean")

    @ts.distribute(strategy="data_parallel", mesh=MESH)
    def body(x: Any, w: Any) -> Any:
        ran.append(("body", x.shape))
        return ts.value_and_grad(lambda w: (inner(x @ w) ** 2).mean())(w)

    @graph.training_step(strategy="data_parallel")
    def step(x: Any) -> Any:
        ran.append(("step", x.shape))
        loss, grad = body(x, ts.nn.Parameter(ts.tensor(W)))
        return loss, grad

    with MESH:
        loss, grad = step(BATCH["x"])
    assert ran == [("step", (8, 6)), ("body", (8, 6)), ("kernel", (2, 5))]
    z = BATCH["x"] @ W
    np.testing.assert_allclose(loss.item(), ((z - z.mean(0)) ** 2).mean(), rtol=1e-5)
    assert grad.shape == W.shape


@pytest.mark.parametrize("rows", [10, 3, 1])
def test_rows_that_do_not_divide(rows: int) -> None:
    x = RNG.normal(size=(rows, 6)).astype(np.float32)

    def step(x: Any, w: Any) -> Any:
        h = ts.tanh(x @ w)
        return h, ts.grad((h + h.sum(0)).mean(), w)

    run = ts.distribute(step, strategy="data_parallel", mesh=MESH, batch="x")
    for got, want in zip(ts.jit(run)(x, W), ts.jit(step)(x, W), strict=True):
        np.testing.assert_allclose(got.numpy(), want.numpy(), rtol=1e-5, atol=1e-6)


def layouts(*args: Any, **options: Any) -> list[str]:
    """The layouts of the arguments in the body."""
    seen: list[str] = []

    def body(a: Any, b: Any, c: Any) -> Any:
        seen.extend(t.layout for t in (a, b, c))
        return a

    ts.distribute(body, strategy="data_parallel", mesh=MESH, **options)(*args)
    return seen


@SEEN
def test_which_rows_are_split() -> None:
    """The rows of arguments without a placement that have as many rows as the first, or of those in
    `batch=`."""
    x, y, w = np.ones((8, 2)), np.ones(8), np.ones((2, 8))
    assert layouts(x, y, w) == ["[8@dp, 2]", "[8@dp]", "[2, 8]"]
    assert layouts(x, nn.Parameter(8, 2), w) == ["[8@dp, 2]", "[8, 2]", "[2, 8]"]
    assert layouts(x, ts.tensor(x, name="v"), w) == ["[8@dp, 2]", "[8, 2]", "[2, 8]"]
    placed = ts.tensor(x, mesh=MESH, layout="[8, 2@dp]")
    assert layouts(placed, y, y) == ["[8, 2@dp]", "[8@dp]", "[8@dp]"]
    assert layouts(np.ones((1, 2)), y, w) == ["[1, 2]", "[8@dp]", "[2, 8]"]
    assert layouts(x, y, w, batch="c") == ["[8, 2]", "[8]", "[2@dp, 8]"]
    assert layouts(x, y, w, batch=()) == ["[8, 2]", "[8]", "[2, 8]"]


def test_a_result_is_laid_out_as_it_is_said() -> None:
    spec = {"return": dist.ShardSpec(("col",), ("dp",))}
    body = ts.distribute(lambda x: x * 2, strategy="data_parallel", mesh=MESH, layouts=spec)
    got = body(np.ones((8, 4), np.float32))
    assert got.layout == "[8, 4@dp]" and (got.numpy() == 2).all()


def test_what_no_argument_splits_is_told_of() -> None:
    whole = ts.tensor(np.ones((8, 2), np.float32), mesh=MESH)
    with pytest.warns(ts.StrategyWarning, match=r"'dp' cuts none of the arguments[^!]*batch=\"x\""):
        ts.distribute(lambda x: x * 2, strategy="data_parallel", mesh=MESH)(whole)


def test_a_strategy_of_ones_own_lays_out_the_batch() -> None:
    class Columns(dist.AxisStrategy):
        def lay_batch(self, t: Any) -> Any:
            return self.split(t, -1) if t.rank == 2 else t

    body = ts.distribute(lambda x: x * 2, strategy=Columns("dp"), mesh=MESH)
    assert body(np.ones((8, 4), np.float32)).layout == "[8, 4@dp]"


def test_collectives_over_a_data_axis_change_layouts_only() -> None:
    x = BATCH["x"]
    moves: dict[str, Callable[[Any], Any]] = {
        "all_reduce": lambda x: dist.all_reduce(x, "dp"),
        "a mean": lambda x: dist.all_reduce(x, "dp", op="mean"),
        "all axes": lambda x: dist.all_reduce(x, op="mean"),
        "all_gather": lambda x: dist.all_gather(x, "dp"),
        "all of all_gather": lambda x: dist.all_gather(x),
        "gather": lambda x: dist.gather(x, "dp"),
        "reduce_scatter": lambda x: dist.reduce_scatter(x, "dp"),
        "broadcast": lambda x: dist.broadcast(x, "dp", root=1),
        "scatter": lambda x: dist.scatter(x, "dp"),
        "all_to_all": lambda x: dist.all_to_all(x, "dp", 1, 0),
        "shard": lambda x: dist.shard(x, "dp", 1),
        "redistribute": lambda x: dist.redistribute(x, "[8, 6@dp]"),
    }
    for name, move in moves.items():
        got = ts.distribute(move, strategy="data_parallel", mesh=MESH)(x)
        np.testing.assert_array_equal(got.numpy(), x, err_msg=name)
    gathered = ts.distribute(
        lambda x: dist.all_gather(x, "dp"), strategy="data_parallel", mesh=MESH
    )
    assert gathered(x).layout == "[8, 6]"


def test_gradients_that_are_reduced_by_hand() -> None:
    """Reduced gradients stay, partial ones are completed; the loss of a number is that number."""
    reduce = {op: lambda g, op=op: dist.all_reduce(g, "dp", op=op) for op in (None, "sum", "mean")}
    for take in (ts.grad, op.autodiff):
        for after in (*reduce.values(), lambda g: g):

            def step(x: Any, w: Any, take: Any, after: Any) -> Any:
                loss = (ts.tanh(x @ w) ** 2).mean()
                return after(loss), after(take(loss, w))

            body = ts.distribute(step, strategy="data_parallel", mesh=MESH)
            got = body(BATCH["x"], W, take, after)
            want = ts.jit(step)(BATCH["x"], W, ts.grad, lambda g: g)
            for a, b in zip(got, want, strict=True):
                np.testing.assert_allclose(a.numpy(), b.numpy(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("permute", lambda x: dist.permute(x, "dp", [(0, 1)])),
        ("shift", lambda x: dist.shift(x, "dp")),
        ("send", lambda x: dist.send(x, 1)),
        ("recv", lambda x: dist.recv(1)),
        ("recv_from", lambda x: ts.distributed.recv_from(1, "x")),
    ],
)
def test_what_is_local_only_says_where_it_goes(name: str, call: Callable[[Any], Any]) -> None:
    body = ts.distribute(call, strategy="data_parallel", mesh=MESH)
    with pytest.raises(ts.UsageError, match=rf"{name}: there are no devices[^!]*this is local"):
        body(BATCH["x"])


def test_statistics_and_state_are_those_of_the_whole_batch() -> None:
    found = []
    for wrap in (ts.jit, lambda f: ts.distribute(f, strategy="data_parallel", mesh=MESH)):
        norm, held = nn.BatchNorm(6), {"largest": ts.zeros(6), "sum": ts.zeros(6)}

        def body(x: Any, norm: Any, held: Any) -> Any:
            held["largest"] = ts.maximum(held["largest"], ts.max(x, 0))
            held["sum"] = held["sum"] + x.sum(0)
            return norm(x)

        rows = wrap(body)(BATCH["x"], norm, held)
        found.append([rows, norm.running_mean, norm.running_var, *held.values()])
    for want, got in zip(*found, strict=True):
        np.testing.assert_allclose(got.numpy(), want.numpy(), rtol=1e-5, atol=1e-6)
    assert [t.layout for t in found[1]] == ["[8@dp, 6]", *["[6]"] * 4]


def test_whole_runs_equal_those_of_one_device() -> None:
    """AdamW with gradient clipping, on state laid out by ZeRO."""
    plan = dist.strategy("zero_redundancy_optimizer")
    optimizer = optim.AdamW(0.05)

    def step(batch: Any, w: Any, state: Any) -> Any:
        loss = several(batch, w["w"])
        grads, norm = optim.clip_by_global_norm(ts.grad(loss, w, layout=plan), 0.5)
        return loss, norm, *optimizer.update(w, grads, state)

    found = []
    for wrap in (ts.jit, lambda f: ts.jit(ts.distribute(f, strategy=plan, mesh=MESH))):
        run = wrap(step)
        w: Any = {"w": ts.tensor(W, mesh=MESH)}
        state = optimizer.init(w, plan)
        for _ in range(3):
            loss, norm, w, state = run(BATCH, w, state)
        found.append([loss, norm, w["w"]])
    for want, got in zip(*found, strict=True):
        np.testing.assert_allclose(got.numpy(), want.numpy(), rtol=1e-5, atol=1e-5)


def test_tensor_parallelism_within_a_data_parallel_body() -> None:
    both = dist.Mesh(("dp", "tp"), shape={"dp": 2, "tp": 2})
    plan = dist.strategy("data_parallel") + dist.strategy("tensor_parallel", rules=[("up", 1)])

    @ts.distribute(strategy=plan, mesh=both)
    def step(x: Any, up: Any) -> Any:
        assert ts.mesh.current().axes == ("dp", "tp") and x.layout == "[8@dp, 6]"
        assert up.shape == (6, 2)
        h = ts.tanh(x @ up)
        loss = dist.all_reduce((h + h.sum(0)).sum(), "tp") / (ROWS * 4)
        return h, loss, ts.grad(loss, up)

    def whole(x: Any, up: Any) -> Any:
        h = ts.tanh(x @ up)
        loss = (h + h.sum(0)).mean()
        return h, loss, ts.grad(loss, up)

    x, up = BATCH["x"], W[:, :4]
    found = step(x, up)
    for got, want in zip(found, ts.jit(whole)(x, up), strict=True):
        np.testing.assert_allclose(got.numpy(), want.numpy(), rtol=1e-5, atol=1e-6)
    assert [t.layout for t in found] == ["[8@dp, 4@tp]", "[]", "[6, 4@tp]"]


@SEEN
def test_a_body_that_asks_for_its_rank_is_local_along_the_data_axes() -> None:
    """Each device holds all arguments whole except those in `batch=`. With whole arguments the
    results are those of one device."""
    seen: list[Any] = []

    def step(x: Any, w: Any) -> Any:
        if ts.mesh.current().rank == 0:
            seen.append(x.shape)
        loss = ((x @ w) ** 2).mean()
        return loss, ts.grad(loss, w)

    with pytest.warns(ts.StrategyWarning, match="'dp' cuts none of the arguments"):
        found = ts.distribute(step, strategy="data_parallel", mesh=MESH)(BATCH["x"], W)
    z = BATCH["x"] @ W
    np.testing.assert_allclose(found[0].item(), (z**2).mean(), rtol=1e-5)
    np.testing.assert_allclose(
        found[1].numpy(), 2 * BATCH["x"].T @ z / z.size, rtol=1e-4, atol=1e-6
    )
    assert seen == [(8, 6)]
    with pytest.raises(ts.ShapeError, match="returns a number that differs between devices"):
        ts.distribute(step, strategy="data_parallel", mesh=MESH, batch="x")(BATCH["x"], W)
    places = ts.distribute(
        lambda x: x * 0 + ts.mesh.current().rank, strategy="data_parallel", mesh=MESH, batch="x"
    )
    assert places(np.zeros(8, np.float32)).numpy().tolist() == [0, 0, 1, 1, 2, 2, 3, 3]


@pytest.mark.parametrize("devices", [1, 2])
def test_owners_of_weights_on_one_device_and_on_two(devices: int) -> None:
    @ts.distribute(strategy="zero_redundancy_optimizer", mesh=dist.Mesh(("dp",), devices=devices))
    def update(weights: Any) -> Any:
        mesh, new = ts.mesh.current(), {}
        for i, name in enumerate(weights):
            if mesh.rank == i % mesh.size:
                new[name] = weights[name] - i
            else:
                new[name] = ts.distributed.recv_from(i % mesh.size, name)
        return new

    new = update({name: np.ones((4, 2), np.float32) for name in "abc"})
    assert [w.numpy().max() for w in new.values()] == [1.0, 0.0, -1.0]


def test_a_body_sets_state_and_then_asks_for_its_rank() -> None:
    """The recording starts again, but outside state is set once."""
    held = {"turns": ts.tensor(0.0)}
    norm = nn.BatchNorm(6)

    def body(x: Any) -> Any:
        held["turns"] = held["turns"] + 1.0
        norm.weight = norm.weight * 2.0
        return norm(x) + 0.0 * dist.broadcast(ts.mesh.current().rank, "dp", root=1)

    run = ts.jit(ts.distribute(body, strategy="data_parallel", mesh=MESH, batch=()))
    rows = run(BATCH["x"])
    assert held["turns"].item() == 1.0 and (norm.weight.numpy() == 2.0).all()
    want = nn.BatchNorm(6)
    np.testing.assert_allclose(rows.numpy(), 2 * want(ts.tensor(BATCH["x"])).numpy(), atol=1e-5)
    np.testing.assert_allclose(norm.running_mean.numpy(), want.running_mean.numpy(), rtol=1e-5)
    with MESH:
        by_rank = ts.distribute(lambda x: x * ts.mesh.current().rank, strategy="data_parallel")
        assert "axis_index" in ts.graph.trace(by_rank, BATCH["x"]).text
