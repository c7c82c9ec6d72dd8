"""Several threads of one process, each with the results that it has alone."""

import copy
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
import pytest

import tessera as ts
from tessera import dist, nn, op, optim
from tessera.lang.record.tree import flatten
from tessera.train.generate import generate

X = np.random.default_rng(0).normal(size=(4, 8)).astype(np.float32)


@pytest.fixture(autouse=True)
def often() -> Iterator[None]:
    """Sets a very short switch interval between threads."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


def together(*calls: Callable[[], Any]) -> list[Any]:
    """Runs each call in its own thread, all started at once; returns their results or errors."""
    results: list[Any] = [None] * len(calls)
    begin = threading.Barrier(len(calls))

    def run(i: int) -> None:
        begin.wait()
        try:
            results[i] = calls[i]()
        except BaseException as error:
            results[i] = error

    threads = [threading.Thread(target=run, args=(i,), daemon=True) for i in range(len(calls))]
    for t in threads:
        t.start()
    for t in threads:
        t.join(60)
    assert not any(t.is_alive() for t in threads), "a thread waits for ever"
    for r in results:
        if isinstance(r, BaseException):
            raise r
    return results


def deep() -> nn.Sequential:
    ts.seed(0)
    return nn.Sequential(*[nn.Linear(8, 8) for _ in range(20)])


def test_first_calls_of_one_function_record_it_once() -> None:
    model, fn = deep(), ts.jit(lambda model, x: model(x))
    want = deep()(ts.tensor(X)).numpy()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        got = together(*[lambda: fn(model, X).numpy()] * 6)
    assert all(np.allclose(g, want, atol=1e-5) for g in got)
    assert len(fn.programs) == 1


def test_weights_are_there_while_another_thread_records() -> None:
    model, recorded, read = deep(), threading.Event(), threading.Event()
    want = deep()(ts.tensor(X)).numpy()
    weight = model.state_dict()["0.weight"].numpy()

    @ts.jit
    def slow(model: Any, x: ts.Tensor) -> ts.Tensor:
        y = model(x)
        recorded.set()
        read.wait(0.2)  # without the lock others would have read by now
        return y

    def reads(what: Callable[[], Any]) -> Callable[[], Any]:
        def run() -> Any:
            recorded.wait()
            value = what()
            read.set()
            return value

        return run

    got, *others, read_there = together(
        lambda: slow(model, X).numpy(),
        reads(lambda: model(ts.tensor(X)).numpy()),
        reads(lambda: ts.jit(lambda x: model(x))(X).numpy()),
        reads(lambda: model.parameters()["0.weight"].numpy()),
    )
    assert all(np.allclose(g, want, atol=1e-5) for g in [got, *others])
    assert (read_there == weight).all()


def trained(model: nn.Module, x: ts.Tensor, steps: int, state: Any = None) -> list[float]:
    opt = optim.AdamW(1e-2)
    state = {} if state is None else state
    state.update(opt.init(model))

    @ts.jit(donate=("model", "state"))
    def step(model: Any, state: Any, x: ts.Tensor) -> ts.Tensor:
        loss, grads = ts.value_and_grad(lambda model: (model(x) ** 2).mean())(model)
        weights, new = opt.update(model, grads, state)
        model.load_parameters(weights)
        state.update(new)
        return loss

    return [step(model, state, x).item() for _ in range(steps)]


@pytest.mark.parametrize("devices", [1, 2])
def test_one_thread_trains_what_another_evaluates(devices: int) -> None:
    mesh, plan = dist.Mesh(("dp",), devices=devices), dist.strategy("data_parallel")
    model, x = deep(), ts.tensor(X, mesh=mesh)
    dist.place(model, plan, mesh=mesh)
    want = trained(copy.deepcopy(model), x, 100)
    evaluate = ts.jit(lambda model, x: (model(x) ** 2).mean())
    ended = threading.Event()

    def train() -> list[float]:
        try:
            return trained(model, x, 100)
        finally:
            ended.set()

    def look() -> list[float]:
        found = [evaluate(model, x).item()]
        while not ended.is_set():
            for weight in model.parameters().values():
                assert np.isfinite(weight.numpy()).all() and (weight * 0.0).sum().item() == 0.0
            found.append(evaluate(model, x).item())
        return found

    got, *seen = together(train, look, look)
    np.testing.assert_allclose(got, want, rtol=1e-5)
    assert want[-1] < want[0] / 2
    all_steps = np.array([*want, evaluate(model, x).item()])
    for value in seen[0] + seen[1]:  # weights of one step, never of two
        assert np.isclose(all_steps, value, rtol=1e-4).any()


def test_what_a_step_gives_up_while_another_thread_reads_it_is_an_error_at_most() -> None:
    """Also for an optimizer's state: the engine would end the process, or wait for ever."""
    mesh = dist.Mesh(("dp",), devices=2)
    model, state, ended = deep(), {}, threading.Event()
    dist.place(model, dist.strategy("data_parallel"), mesh=mesh)

    def train() -> list[float]:
        try:
            return trained(model, ts.tensor(X, mesh=mesh), 100, state)
        finally:
            ended.set()

    def look() -> int:
        read = 0
        while not ended.is_set():
            for moment in [t for t in flatten(dict(state))[0] if isinstance(t, ts.Tensor)]:
                try:
                    assert np.isfinite(moment.numpy()).all()
                except ts.DonatedError:
                    continue
                read += 1
        return read

    _, *read = together(train, look, look)
    assert all(read)


def test_a_value_is_read_while_a_callback_calls_a_compiled_function() -> None:
    model, inner = nn.Linear(8, 8), ts.jit(lambda model, x: model(x) * 2)

    def call(x: Any) -> Any:
        there: Any = jax.pure_callback(
            lambda v: np.asarray(inner(model, np.asarray(v)).numpy()),
            jax.ShapeDtypeStruct(x.shape, x.dtype),
            x,
        )
        return there

    hosted = op.from_jax("ij -> ij")(call)

    @ts.jit
    def outer(model: Any, x: ts.Tensor) -> ts.Tensor:
        y = hosted(model(x))
        return y + 1 if y.sum().item() > 0 else y - 1

    [got] = together(lambda: outer(model, X).numpy())
    y = (model(model(ts.tensor(X))) * 2).numpy()
    np.testing.assert_allclose(got, y + np.sign(y.sum()), atol=1e-5)


class Dropping(nn.Module):
    def __init__(self) -> None:
        self.embed, self.drop, self.out = nn.Embedding(16, 16), nn.Dropout(0.5), nn.Linear(16, 16)

    def __call__(self, ids: ts.Tensor) -> ts.Tensor:
        x = self.drop(self.embed(ids))
        return self.out(nn.dropout(x, 0.5) if self.training else x)


def test_texts_are_generated_while_the_model_trains() -> None:
    ts.seed(0)
    model, apply = Dropping(), ts.jit(lambda model, ids: model(ids))
    texts = lambda: [generate(model, [i], 6, window=8, temperature=0.0) for i in range(3)]  # noqa: E731
    ids = np.zeros((1, 64), np.int32)
    drops = lambda: [bool(apply(model, ids).numpy().std(1).any()) for _ in range(60)]  # noqa: E731
    model.eval()
    want = texts()
    model.train()
    dropped, *got = together(drops, texts, texts, texts)
    assert got == [want] * 3
    assert all(dropped)
    assert model.training and "training" not in model.__dict__
