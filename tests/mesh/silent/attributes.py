"""Attributes of PyTorch's modules and tensors: refused if setting them would have no effect."""

from __future__ import annotations

import copy
from collections import UserDict
from typing import Any

import jax
import numpy as np
import torch

import tessera as ts
from tessera import dist, nn, optim
from tests.mesh.silent.rows import row


@row("a weight's data is set, in a function and outside")
def _() -> None:
    layer, old = nn.Linear(3, 2), nn.Linear(3, 2)
    start = layer.weight.numpy()
    old.weight.data = layer.weight.data
    layer.weight.data -= 0.1 * layer.weight.data
    np.testing.assert_array_equal(old.weight.numpy(), start)
    np.testing.assert_allclose(layer.weight.numpy(), start * 0.9, rtol=1e-6)

    @ts.jit
    def step(model: nn.Linear) -> None:
        _, grads = ts.value_and_grad(lambda m: (m.weight.data * m.weight).sum())(model)
        model.weight.data = model.weight.data - 0.5 * grads["weight"]

    step(layer)
    np.testing.assert_allclose(layer.weight.numpy(), start * 0.45, rtol=1e-6)


@row("a weight's data of uneven parts are its value, as in PyTorch")
def _() -> None:
    with dist.Mesh(("dp",), devices=4):
        x = ts.tensor(np.arange(5.0), layout="[5@dp]")
        assert x.data.shape == (5,)
        assert float(x.data.mean()) == 2.0


@row("a tensor's data is set", error=ts.UsageError, says="model.weight = tensor")
def _() -> None:
    ts.ones(3).data = ts.ones(3)


@row("a weight's data get another shape", error=ts.ShapeError, says="f32[3, 2]")
def _() -> None:
    nn.Linear(3, 2).weight.data = ts.ones((2, 3))


@row("an array is given for a shape", error=ts.UsageError, says="ts.tensor(x, mesh, layout)")
def _() -> None:
    dist.tensor(np.ones((2, 3)))  # type: ignore[arg-type]


@row("a gradient is cleared", error=ts.UsageError, says="Tensor.grad cannot be set")
def _() -> None:
    ts.ones(3).grad = None  # type: ignore[attr-defined]


@row("a tensor is to be trained", error=ts.UsageError, says="a weight is nn.Parameter(x)")
def _() -> None:
    ts.ones(3).requires_grad = True  # type: ignore[attr-defined]


@row("a parameter is frozen")
def _() -> None:
    layer = nn.Linear(3, 2)
    layer.bias.requires_grad = False
    assert [*ts.grad(layer(ts.ones((1, 3))).sum(), layer)] == ["weight"]


@row("JAX traces a function of ours", error=ts.UsageError, says="instead of those of JAX")
def _() -> None:
    jax.jit(lambda x: ts.sin(x))(np.ones(3, np.float32))


@row("an optimizer's pair is taken for its state", error=ts.UsageError, says="params, state =")
def _() -> None:
    weights = {"w": ts.ones((2, 3))}
    rule = optim.AdamW(1e-3)
    both = rule.update(weights, weights, rule.init(weights))
    rule.update(weights, weights, both)  # type: ignore[arg-type]


@row("the state of a smaller model", error=ts.ShapeError, says="m.w : (1, 3), not (2, 3)")
def _() -> None:
    rule, weights = optim.AdamW(1e-3), {"w": ts.ones((2, 3))}
    rule.update(weights, weights, rule.init({"w": ts.ones((1, 3))}))


@row("weights are changed in place, as in PyTorch's own loop")
def _() -> None:
    ours, theirs = nn.Linear(3, 2), torch.nn.Linear(3, 2)
    ours.load_state_dict({k: v.detach().numpy().T for k, v in theirs.state_dict().items()})
    x = np.ones((4, 3), np.float32)

    def step(x: ts.Tensor) -> None:
        grads = ts.grad((ours(x) ** 2).sum(), ours)
        with ts.no_grad():
            for name, p in ours.named_parameters():
                p -= 0.01 * grads[name]

    for run in (step, ts.jit(step), ts.jit(step)):
        run(ts.tensor(x))
        (theirs(torch.tensor(x)) ** 2).sum().backward()  # type: ignore[no-untyped-call]
        with torch.no_grad():
            for p in theirs.parameters():
                assert p.grad is not None
                p -= 0.01 * p.grad
                p.grad = None
    want = theirs.weight.detach().numpy().T
    np.testing.assert_allclose(ours.weight.numpy(), want, rtol=1e-5, atol=1e-6)


@row("weights are changed in place where they are trained", error=ts.UsageError,
     says="change it inside `with ts.no_grad():`")  # fmt: skip
def _() -> None:
    for p in nn.Linear(3, 2).parameters().values():
        p -= 0.1


@row("a batch is laid out as weights", error=ts.UsageError, says='kind="batch"')
def _() -> None:
    mesh = dist.Mesh(("dp",), devices=4)
    dist.place((np.ones((8, 3)),) * 2, dist.strategy("data_parallel"), mesh)


@row("a batch of arrays of jax")
def _() -> None:
    mesh = dist.Mesh(("dp",), devices=4)
    placed = dist.place({"x": jax.numpy.ones((8, 3))}, "data_parallel", mesh, kind="batch")
    assert str(placed["x"].type) == "f32[8@dp, 3]"


@row("a plan is inspected")
def _() -> None:
    assert "no collectives" in str(dist.inspect(ts.jit(lambda x: x).plan(ts.ones(3))))


@row("a module of one's own that asks whether it is trained")
def _() -> None:
    class Doubled(nn.Module):
        def __call__(self, x: ts.Tensor) -> ts.Tensor:
            return x * 2 if self.training else x

    model, x = nn.Sequential(Doubled(), Doubled()), ts.ones(2)
    outside, given = ts.jit(lambda x: model(x)), ts.jit(lambda m, x: m(x))
    for _ in range(2):
        for mode, times in ((True, 4.0), (False, 1.0)):
            model.train(mode)
            for got in (model(x), outside(x), given(model, x)):
                assert got.numpy().tolist() == [times] * 2
    assert not model.train().eval()[0].training and model.train()[0].training


@row("whether a model of ours is trained, asked before it is evaluated")
def _() -> None:
    def evaluated(model: Any, x: Any) -> Any:
        was = model.training
        y = model.eval()(x)
        model.train(was)
        return y

    model, x = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)), ts.ones((2, 4))
    evaluated(model, x)
    assert model.training and model[1].training
    model.eval()
    evaluated(model, x)
    assert not model.training and not model[1].training and not copy.deepcopy(model).training
    assert "training" not in repr(model)


@row("a batch norm that is evaluated in a loop, and for each row")
def _() -> None:
    norm, x = nn.BatchNorm(4).eval(), ts.tensor(np.arange(8.0).reshape(2, 4))
    want = norm(x).numpy()
    for got in (
        ts.vmap(lambda r: norm(r[None])[0])(x),
        ts.scan(lambda c, r: (c, norm(r[None])[0]), ts.tensor(0.0), x)[1],
    ):
        np.testing.assert_array_equal(got.numpy(), want)


@row("a batch that is like a dict, as tokenizers give it")
def _() -> None:
    step = ts.jit(lambda b: (b["ids"] * b["weight"]).sum())
    mesh = dist.Mesh(("dp",), devices=4)
    for k in range(3):
        batch = UserDict(ids=np.full(8, k, np.int32), weight=np.ones(8, np.float32))
        placed = dist.place(batch, "data_parallel", mesh, kind="batch")
        assert str(placed["ids"].type) == "i32[8@dp]"
        assert step(batch).item() == step(placed).item() == 8 * k


@row("a layer that is put in place of another")
def _() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.relu)
    assert model(ts.ones((1, 2))).shape == (1, 2)
    model[0] = nn.Linear(2, 3)
    assert model(ts.ones((1, 2))).shape == (1, 3) and [*model.parameters()] == [
        "0.weight",
        "0.bias",
    ]
