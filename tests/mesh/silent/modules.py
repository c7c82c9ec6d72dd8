"""Modules: the trained tensors, and every holder's view of their new values."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

import tessera as ts
from tessera import dist, graph, nn, op, optim
from tessera.nn.stack import Stack

from .rows import row

RNG = np.random.default_rng(0)
X = RNG.normal(size=(8, 4)).astype(np.float32)
Y = RNG.normal(size=(8, 2)).astype(np.float32)


class Net(nn.Module):
    """Two layers, a mask that is not a parameter, and the last input."""

    def __init__(self) -> None:
        self.up = nn.Linear(4, 8)
        self.down = nn.Linear(8, 2)
        self.mask = ts.tensor(np.arange(8, dtype=np.float32) / 8)
        self.last: Any = ts.zeros(())
        self.rate = 0.5

    def __call__(self, x: Any) -> Any:
        h = self.up(x) * self.mask
        self.last = h.mean()
        return self.down(h)


def make() -> Net:
    ts.seed(0)
    return Net()


def loss_of(model: Any) -> Any:
    return ((model(X) - Y) ** 2).mean()


@ts.jit
def train(model: Any, state: Any, x: Any, y: Any) -> Any:
    loss = ((model(x) - y) ** 2).mean()
    weights, new = OPTIMIZER.update(model, ts.grad(loss, model), state)
    model.load_parameters(weights)
    state.update(new)
    return loss


OPTIMIZER = optim.AdamW(0.05, weight_decay=0.1)


def trained(model: Any, steps: int = 2) -> Any:
    state = OPTIMIZER.init(model)
    train._recordings = 0  # all rows share this function, and no row records it three times
    for _ in range(steps):
        train(model, state, X, Y)
    return state


def same(a: Any, b: Any) -> None:
    np.testing.assert_allclose(ts.Tensor.numpy(a), ts.Tensor.numpy(b), rtol=1e-5, atol=1e-6)


@row("a mask is an attribute of the model, and the model is trained")
def _() -> None:
    model = make()
    mask = model.mask.numpy().copy()
    state = trained(model)
    np.testing.assert_array_equal(model.mask.numpy(), mask)
    assert [*state["m"]] == [*model.parameters()] and "mask" not in state["m"]
    assert "mask" in model.state_dict()
    assert [*ts.grad(loss_of(model), model)] == [*model.parameters()]


@row("predict = ts.jit(model) is compiled before the model is trained")
def _() -> None:
    model = make()
    predict, by_lambda = ts.jit(model), ts.jit(lambda x: model(x))

    @ts.jit
    def by_hand(x: Any) -> Any:
        return (x @ model.up.weight + model.up.bias) * model.mask

    before = [f(X).numpy() for f in (predict, by_lambda, by_hand)]
    trained(model)
    for f, old in zip((predict, by_lambda, by_hand), before, strict=True):
        assert np.abs(f(X).numpy() - old).max() > 1e-3
    same(predict(X), model(X))
    same(by_lambda(X), model(X))
    same(by_hand(X), model.up(X) * model.mask)
    model.load_parameters(make().parameters())
    same(predict(X), model(X))
    model.mask = model.mask * 2
    same(predict(X), model(X))
    same(by_hand(X), model.up(X) * model.mask)


@row("the weights' layout changes after a function that uses them was compiled")
def _() -> None:
    model = make()
    predict = ts.jit(model)
    was = predict(X)
    mesh = dist.Mesh(("dp",), devices=4)
    dist.place(model, dist.strategy("zero_redundancy_optimizer", stage=3), mesh)
    assert model.up.weight.type.split_axes and model.mask.mesh == mesh
    same(predict(X), was)


@row("a layer is replaced after a function that uses it was compiled")
def _() -> None:
    model = make()
    predict, by_name = ts.jit(model), ts.jit(lambda x: model.up(x))
    predict(X), by_name(X)
    model.up = nn.Linear(4, 8)
    same(predict(X), model(X))
    model.down = nn.Linear(8, 5)
    assert predict(X).shape == (8, 5)


@row("model.eval() after the compilation of a function that drops out")
def _() -> None:
    class Drop(nn.Module):
        def __init__(self) -> None:
            self.drop = nn.Dropout(0.5)

        def __call__(self, x: Any) -> Any:
            return self.drop(x)

    model = Drop()
    predict = ts.jit(model)
    assert (predict(X).numpy() == 0).any()
    model.eval()
    np.testing.assert_array_equal(predict(X).numpy(), X)


@row("a compiled function without arguments for it changes a model's running statistics")
def _() -> None:
    norm = nn.BatchNorm(4)
    run = ts.jit(lambda x: norm(x))
    for _ in range(2):
        run(X)
    expect = (1 - 0.9**2) * X.mean(0)
    np.testing.assert_allclose(norm.running_mean.numpy(), expect, rtol=1e-4, atol=1e-6)


@row("a compiled step trains a model that is a global, and a compiled function uses it")
def _() -> None:
    model, other = make(), make()
    state = OPTIMIZER.init(model)
    predict = ts.jit(model)
    predict(X)

    @ts.jit
    def step(x: Any, y: Any, state: Any) -> Any:
        loss = ((model(x) - y) ** 2).mean()
        weights, new = OPTIMIZER.update(model, ts.grad(loss, model), state)
        model.load_parameters(weights)
        state.update(new)
        return loss

    for _ in range(2):
        step(X, Y, state)
    trained(other)
    for name, t in other.parameters().items():
        same(model.parameters()[name], t)
    same(predict(X), other(X))
    same(model.last, other.last)


@row("a model is an argument and a global of one function")
def _() -> None:
    model = make()

    @ts.jit
    def both(m: Any, x: Any) -> Any:
        loss = (m(x) * model(x)).mean()
        return ts.grad(loss, m)["up.weight"]

    expect = ts.grad((model(X) * model(X)).mean(), model)["up.weight"]
    same(both(model, X), expect)
    assert np.abs(both(make(), X).numpy() - expect.numpy()).max() > 1e-3


@row("model.w = model.w - lr * g, and whoever holds the weight sees it")
def _() -> None:
    model = make()
    held, old = model.up.weight, model.up.weight.numpy().copy()
    g = ts.grad(loss_of(model), model)
    model.up.weight = model.up.weight - 0.1 * g["up.weight"]
    assert model.up.weight is held and isinstance(held, nn.Parameter)
    np.testing.assert_allclose(held.numpy(), old - 0.1 * g["up.weight"].numpy(), rtol=1e-5)

    @ts.jit
    def step(m: Any) -> Any:
        g = ts.grad(loss_of(m), m)
        m.up.weight = m.up.weight - 0.1 * g["up.weight"]
        return m

    now = held.numpy().copy()
    g = ts.grad(loss_of(model), model)
    assert step(model).up.weight is held
    np.testing.assert_allclose(held.numpy(), now - 0.1 * g["up.weight"].numpy(), rtol=1e-4)


@row("a gradient is asked for after the weight was changed", error=ts.GraphError,
     says="was set after the loss was computed of it")  # fmt: skip
def _() -> None:
    model = make()
    loss = loss_of(model)
    for p in model.parameters().values():
        p.put(p * 2)
    ts.grad(loss, model)


@row("a weight is set to one of another shape", error=ts.ShapeError, says="Net.w: the new value")
def _() -> None:
    model = make()
    model.w = nn.Parameter(3)  # type: ignore[attr-defined]
    type(model).__setattr__(model, "w", ts.zeros(4))


@row("a weight is set to a number", error=ts.UsageError, says="it cannot be 0.5")
def _() -> None:
    make().up.weight = 0.5  # type: ignore[assignment]


@row("a weight is set in the body of a loop", error=ts.UsageError, says="in the body of a loop")
def _() -> None:
    model = make()

    def body(carry: Any, x: Any) -> Any:
        model.up.bias = model.up.bias + 1
        return carry, x

    ts.jit(lambda x: ts.scan(body, ts.zeros(()), x))(X)


@row("a layer of a stack changes its state")
def _() -> None:
    stack, one, x = Stack(nn.BatchNorm(4), 2), nn.BatchNorm(4), ts.tensor(X)
    y = one(x)
    stack(x)
    first = stack.block.running_mean.numpy()  # type: ignore[attr-defined]
    np.testing.assert_allclose(first[0], one.running_mean.numpy(), rtol=1e-6)
    one.running_mean = ts.zeros(4)
    one(y)
    np.testing.assert_allclose(first[1], one.running_mean.numpy(), atol=1e-6)


@row("a layer of a stack makes another tensor of its state", error=ts.UsageError,
     says="or of another shape or dtype")  # fmt: skip
def _() -> None:
    class Grows(nn.Module):
        def __init__(self) -> None:
            self.seen = ts.zeros(1)

        def __call__(self, x: ts.Tensor) -> ts.Tensor:
            self.seen = ts.concat([self.seen, x[0, :1]])
            return x

    Stack(Grows(), 2)(ts.tensor(X))


@row("a buffer of an argument is set in the body of a loop", error=ts.UsageError,
     says="BatchNorm.running_mean is set in the body of a loop")  # fmt: skip
def _() -> None:
    ts.jit(lambda norm, x: ts.scan(lambda c, x: (c, norm(x)), 0.0, x))(nn.BatchNorm(4), X[None])


@row("a buffer is set in the body of a loop that runs at once", error=ts.UsageError,
     says="BatchNorm.running_mean is set in the body of a loop")  # fmt: skip
def _() -> None:
    norm = nn.BatchNorm(4)
    ts.scan(lambda c, x: (c, norm(x)), 0.0, X[None])


@row("weights are kept from before a step, by state_dict()")
def _() -> None:
    model = make()
    first = model(X).numpy()
    kept = model.state_dict()
    trained(model)
    assert np.abs(model(X).numpy() - first).max() > 1e-3
    model.load_parameters(kept)
    np.testing.assert_allclose(model(X).numpy(), first, rtol=1e-5, atol=1e-6)


@row("weights are kept from before a step, by parameters()", warns=UserWarning, says="state_dict()")
def _() -> None:
    model = make()
    kept = model.parameters()
    trained(model, 1)
    model.load_parameters(kept)


@row("a model is loaded, then placed, and the model itself is used")
def _() -> None:
    model = make()
    first = model(X).numpy()
    mesh = dist.Mesh(("dp",), devices=4)
    assert dist.place(model, None, mesh) is model
    assert all(t.mesh == mesh for t in model.state_dict().values())
    np.testing.assert_allclose(model(X).numpy(), first, rtol=1e-5, atol=1e-6)


@row("LoRA: all is frozen but what was added")
def _() -> None:
    model = make()
    model.freeze("*")
    model.a, model.b = nn.Parameter(4, 2), nn.Parameter(2, 8, init="zeros")  # type: ignore[attr-defined]
    predict = ts.jit(model)
    predict(X)
    before = model.state_dict()
    state = OPTIMIZER.init(model)
    assert [*state["m"]] == ["a", "b"] == [*model.trainable_parameters()]

    @ts.jit
    def step(m: Any, state: Any, x: Any) -> Any:
        delta = m.a @ m.b
        loss = ((((x @ (m.up.weight + delta)) * m.mask) @ m.down.weight - Y) ** 2).mean()
        weights, new = OPTIMIZER.update(m, ts.grad(loss, m), state)
        m.load_parameters(weights)
        state.update(new)
        return loss

    losses = [step(model, state, X).item() for _ in range(3)]
    assert losses[2] < losses[0]
    for name, t in model.state_dict().items():
        changed = (t.numpy() != before[name].numpy()).any() if name != "last" else False
        assert changed == (name in ("a", "b")), name


@row("a weight is frozen after its step was compiled")
def _() -> None:
    model = make()
    state = trained(model, 1)
    model.freeze("up")
    state = OPTIMIZER.init(model)
    up = model.up.weight.numpy().copy()
    train(model, state, X, Y)
    np.testing.assert_array_equal(model.up.weight.numpy(), up)
    model.unfreeze("up.*")
    trained(model)
    assert (model.up.weight.numpy() != up).any()


@row("freeze(pattern) that fits nothing", error=ts.UsageError, says="'encoder.*' fits no parameter")
def _() -> None:
    make().freeze("encoder.*")


@row("a gradient by frozen weights", error=ts.UsageError, says="grad: 'up.weight' is frozen")
def _() -> None:
    model = make().freeze("up.*")
    ts.grad(loss_of(model), model.parameters())


@row("a model is pickled, or copied, before its weights were made")
def _() -> None:
    model = make()
    twin = copy.deepcopy(model)
    other = pickle.loads(pickle.dumps(make()))
    same(twin(X), model(X))
    same(other(X), model(X))
    trained(model)
    assert np.abs(twin(X).numpy() - model(X).numpy()).max() > 1e-3


@row("a checkpoint lacks names", error=ts.UsageError, says="1 names are missing, 0 are too many")
def _() -> None:
    model, values = make(), make().state_dict()
    del values["mask"]
    assert model.load_state_dict(values, strict=False) == (["mask"], [])
    model.load_parameters(values)  # the buffers are not needed
    model.load_state_dict(values)


@row("integers are made a parameter", error=ts.DTypeError, says="i32 cannot be trained")
def _() -> None:
    nn.Parameter(ts.tensor([1, 2]))


@row("a layer is replaced that a compiled function reaches by attributes alone")
def _replaced_below() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            self.head = nn.Linear(4, 3)

    model, x = Model(), ts.ones((2, 4))
    f = ts.jit(lambda x: x @ model.head.weight)
    f(x)
    model.head = nn.Linear(4, 3)
    assert np.allclose(f(x).numpy(), x.numpy() @ model.head.weight.numpy())


@row("square weights of PyTorch are loaded as they are", warns=UserWarning, says="give w.T")
def square_weights() -> None:
    theirs = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.ReLU(), torch.nn.Linear(3, 2))
    values = {n: t.T if t.shape == (2, 3) else t for n, t in theirs.state_dict().items()}
    nn.Sequential(nn.Linear(3, 3), nn.relu, nn.Linear(3, 2)).load_state_dict(values)


@row("square weights of PyTorch are loaded as here, and those of an embedding")
def turned_weights() -> None:
    theirs = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Embedding(4, 4))
    values = {n: t.T if n == "0.weight" else t for n, t in theirs.state_dict().items()}
    ours, x = nn.Sequential(nn.Linear(3, 3), nn.Embedding(4, 4)), torch.ones(2, 3)
    ours.load_state_dict(values)
    np.testing.assert_allclose(ours[0](ts.tensor(x)).numpy(), theirs[0](x).detach().numpy(), 1e-5)


class _First(nn.Module):
    def __init__(self) -> None:
        self.w = nn.Parameter(3, 2)

    def __call__(self, x: ts.Tensor) -> ts.Tensor:
        return x @ self.w


class _Second(nn.Module):
    def __init__(self) -> None:
        self.v, self.inner = nn.Parameter(2, 2), nn.Sequential(nn.Linear(2, 2))

    def __call__(self, x: ts.Tensor) -> ts.Tensor:
        return self.inner(x @ self.v)


LOOKS: dict[str, Callable[[Any, Any], object]] = {
    "none": lambda a, b: None,
    "one": lambda a, b: a.parameters(),
    "the inside of one": lambda a, b: b.inner[0].parameters(),
}


def _looked_at(name: str) -> None:
    @row(f"gradients by the parameters of two modules, of which {name} was looked at before")
    def _() -> None:
        x = ts.ones((4, 3))

        def names(run: Callable[[Any, Any, Any], Any]) -> set[str]:
            a, b = _First(), _Second()
            LOOKS[name](a, b)
            return set(run(a, b, lambda a=a, b=b: (b(a(x)) ** 2).mean()))

        gradients = (
            lambda a, b, loss: ts.grad(loss()),
            lambda a, b, loss: op.autodiff(loss()),
            lambda a, b, loss: ts.jit(lambda: ts.grad(loss()))(),
            lambda a, b, loss: ts.jit(lambda a, b: ts.grad(loss(a, b)))(a, b),
            lambda a, b, loss: graph.training_step()(lambda: graph.backward(loss()))(),
        )
        for run in gradients:
            assert names(run) == {"w", "v", "inner.0.weight", "inner.0.bias"}
        by_attribute = lambda a, b, loss: ts.jit(lambda: ts.grad((x @ a.w @ b.v).sum()))()  # noqa: E731
        assert names(by_attribute) == {"w", "v"}


for looked in LOOKS:
    _looked_at(looked)


@row("gradients by parameters that are in no module", error=ts.UsageError, says="has no name")
def _() -> None:
    p, q = nn.Parameter(ts.ones(3), name="p"), nn.Parameter(2 * ts.ones(3))
    ts.grad((p * q).sum())


class _Items(nn.Module):
    """Parameters and state in a list and a dict, filled through another name."""

    def __init__(self) -> None:
        weights: list[Any] = []
        self.weights, self.by_name = weights, {"a": nn.Parameter(ts.ones(2))}
        weights.append(nn.Parameter(ts.ones(2)))
        self.state, self.cache = [ts.zeros(2)], {"k": ts.zeros(2)}

    def __call__(self, x: ts.Tensor) -> ts.Tensor:
        self.state[0] = self.state[0] + x
        self.cache["k"] = self.cache["k"] + x
        self.cache["new"] = 2 * x
        return x * self.weights[0] + self.by_name["a"]

    def double(self) -> None:
        self.weights[-1] = self.weights[-1] * 2
        self.weights[:] = [w * 2 for w in self.weights]
        self.by_name.update(a=self.by_name["a"] * 3)


@row("parameters and state in lists and dicts of a module are set to tensors")
def _() -> None:
    runs: tuple[Callable[[Any, Any], Any], ...] = (
        lambda f, m: f(m),
        lambda f, m: ts.jit(f)(m),
        lambda f, m: ts.jit(lambda: f(m))(),
    )
    for run in runs:
        model, x = _Items(), ts.ones(2)
        run(lambda m: m.double(), model)
        assert [*model.parameters()] == ["weights.0", "by_name.a"]
        for _ in range(2):
            assert run(lambda m: m(x), model).numpy().tolist() == [7.0, 7.0]  # noqa: B023
        found = [model.state[0], model.cache["k"], model.cache["new"]]
        assert [t.numpy().tolist() for t in found] == [[2.0, 2.0]] * 3
        assert isinstance(model.weights, list) and copy.deepcopy(model).cache.keys() == {"k", "new"}
        assert [*pickle.loads(pickle.dumps(model)).parameters()] == ["weights.0", "by_name.a"]


@row("a parameter in a list of a module is set to a tensor of another shape", error=ts.ShapeError,
     says="TensorList.0: the new value")  # fmt: skip
def _() -> None:
    _Items().weights[0] = ts.ones(3)
