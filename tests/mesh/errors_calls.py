"""Calls with too few or too many arguments. A row: name, error, mistake."""

from __future__ import annotations

import tessera as ts
from tessera import dist
from tessera.train.memory import offload
from tests.mesh.errors import X, row

# These mistakes are intended: mypy would report the same as the messages.
# mypy: disable-error-code="attr-defined, call-arg, arg-type, operator, misc, call-overload"
# ruff: noqa: E501
# fmt: off

LAYER = ts.nn.Linear(2, 3)
GPT = ts.nn.GPT(ts.nn.GPTConfig(vocab=16, seq=8, d=16, layers=1, heads=2))
APART = [ts.tensor([1.0, 2.0], mesh=ts.dist.Mesh(("dp",), devices=[i, i + 1])) for i in (0, 1)]
FOUR = ts.dist.Mesh(("dp",), devices=4)
FOLDED = [ts.tensor([1.0, 2.0], mesh=m) for m in (FOUR, FOUR.fold(onto=2))]


class Own(ts.nn.Module):
    def __call__(self, x: ts.Tensor, y: ts.Tensor, *, mask: ts.Tensor | None = None) -> ts.Tensor:
        return x


def both(x: ts.Tensor, y: ts.Tensor) -> tuple[ts.Tensor, ts.Tensor]:
    return x * 2, y * 2


def loss(w: ts.Tensor) -> ts.Tensor:
    return ts.sum(w)


row('ts.where(X > 0)', ts.UsageError, lambda: ts.where(X > 0))
row('ts.jit(lambda x: offload(x))(X)', ts.UsageError, lambda: ts.jit(lambda x: offload(x))(X))
row('ts.tensor()', ts.UsageError, lambda: ts.tensor())
row('ts.matmul(X)', ts.UsageError, lambda: ts.matmul(X))
row('ts.dist.all_reduce()', ts.UsageError, lambda: ts.dist.all_reduce())
row('ts.grad()', ts.UsageError, lambda: ts.grad())
row('ts.sum(X, 1, 2, 3)', ts.UsageError, lambda: ts.sum(X, 1, 2, 3))
row('X.sum(1, 2, 3)', ts.UsageError, lambda: X.sum(1, 2, 3))
row('ts.exp(X, X, X)', ts.UsageError, lambda: ts.exp(X, X, X))
row('ts.concat(X, X, X)', ts.UsageError, lambda: ts.concat(X, X, X))
row('ts.checkpoint.save()', ts.UsageError, lambda: ts.checkpoint.save())
row('X.transpose(2, 0, 1)', ts.UsageError, lambda: X.transpose(2, 0, 1))
row('X.type(ts.f32)', ts.UsageError, lambda: X.type(ts.f32))
row('X.item(0)', ts.UsageError, lambda: X.item(0))
row('LAYER()', ts.UsageError, lambda: LAYER())
row('LAYER(X, X)', ts.UsageError, lambda: LAYER(X, X))
row('Own()(X)', ts.UsageError, lambda: Own()(X))
row('Own()(X, X, X)', ts.UsageError, lambda: Own()(X, X, X))
row('Own()(X, X, msk=X)', ts.UsageError, lambda: Own()(X, X, msk=X))
row('ts.optim.AdamW(0.1).update({}, {})', ts.UsageError, lambda: ts.optim.AdamW(0.1).update({}, {}))
row('ts.nn.Linear(3)', ts.UsageError, lambda: ts.nn.Linear(3))
row('ts.dist.Mesh()', ts.UsageError, lambda: ts.dist.Mesh())
row('ts.dist.Mesh.parse()', ts.UsageError, lambda: ts.dist.Mesh.parse())
row('ts.no_grad(1)', ts.UsageError, lambda: ts.no_grad(1))
row('ts.jit(loss)(X, X)', ts.UsageError, lambda: ts.jit(loss)(X, X))
row('ts.vmap(loss)(X, X)', ts.UsageError, lambda: ts.vmap(loss)(X, X))
row('ts.vjp(loss)', ts.UsageError, lambda: ts.vjp(loss))
row('ts.scan(loss, X, X)', ts.UsageError, lambda: ts.scan(loss, X, X))
row('ts.checkpoint(loss)', ts.UsageError, lambda: ts.checkpoint(loss))
row('ts.random(3)', ts.UsageError, lambda: ts.random(3))
row('ts.nn(X)', ts.UsageError, lambda: ts.nn(X))
row('ts.mesh((2, 2))', ts.UsageError, lambda: ts.mesh((2, 2)))
row("an optimizer's rate is set", ts.UsageError,
    lambda: setattr(ts.optim.SGD(0.1), "lr", 0.01))
row("a new attribute of an optimizer", ts.UsageError,
    lambda: setattr(ts.optim.SGD(0.1), "count", 3))
row("the axis of a strategy is set", ts.UsageError,
    lambda: setattr(dist.strategy("data_parallel"), "axis", "x"))
row("the axis of a strategy is deleted", ts.UsageError,
    lambda: delattr(dist.strategy("data_parallel"), "axis"))
row("sizes one by one of random numbers", ts.UsageError, lambda: ts.random.normal(2, 3))
row("sizes one by one of uniform numbers", ts.UsageError, lambda: ts.random.uniform(2, 3))
row("weights are clipped", ts.UsageError,
    lambda: ts.optim.clip_by_global_norm(ts.nn.Linear(2, 2).parameters(), 1.0))
row('ts.optim(0.1)', ts.UsageError, lambda: ts.optim(0.1))
row('ts.pipeline(loss)', ts.UsageError, lambda: ts.pipeline(loss))
row('ts.nn.functional.one_hot(X, 3)', ts.UnknownNameError, lambda: ts.nn.functional.one_hot(X, 3))
row('ts.nn.functional.Linear(2, 3)', ts.UnknownNameError, lambda: ts.nn.functional.Linear(2, 3))
row('ts.mesh.make((2, 2))', ts.UnknownNameError, lambda: ts.mesh.make((2, 2)))
row('ts.zeros((2, 3), mesh=None)', ts.UsageError, lambda: ts.zeros((2, 3), mesh=None))
row('ts.scan(loss, X, X, length=3)', ts.ShapeError, lambda: ts.scan(loss, X, X, length=3))
row('ts.grad(loss, argnums=0)', ts.UsageError, lambda: ts.grad(loss, argnums=0))
row('ts.optim.SGD(0.1, momentum=0.9)', ts.UsageError, lambda: ts.optim.SGD(0.1, momentum=0.9))
row('ts.dist.Mesh(dp=2)', ts.UsageError, lambda: ts.dist.Mesh(dp=2))
row('ts.dist.Mesh((2,), ("dp",))', ts.MeshError, lambda: ts.dist.Mesh((2,), ("dp",)))
row('ts.optim.AdamW(foo=1)', ts.UsageError, lambda: ts.optim.AdamW(foo=1))
row('ts.optim.AdamW(weight_deacy=0.1)', ts.UsageError, lambda: ts.optim.AdamW(weight_deacy=0.1))
row('X.repeat(2, axis=0)', ts.UsageError, lambda: X.repeat(2, axis=0))
row('LAYER.dtype', ts.UnknownNameError, lambda: LAYER.dtype)
row('GPT(ts.ones((1, 8)))', ts.DTypeError, lambda: GPT(ts.ones((1, 8))))
row('GPT(ts.zeros(8, "i32"))', ts.ShapeError, lambda: GPT(ts.zeros(8, "i32")))
row('ts.checkpoint.load(state={})', ts.UsageError, lambda: ts.checkpoint.load(state={}))
row('ts.checkpoint.load(model=LAYER)', ts.UsageError, lambda: ts.checkpoint.load(model=LAYER))
row('X.numpy(force=True)', ts.UsageError, lambda: X.numpy(force=True))
row('APART[0] + APART[1]', ts.MeshError, lambda: APART[0] + APART[1])
row('ts.jit(both)(*APART)', ts.MeshError, lambda: ts.jit(both)(*APART))
row('ts.jit(both)(X, weights=X)', ts.UsageError, lambda: ts.jit(both)(X, weights=X))
row('FOLDED[0] + FOLDED[1]', ts.MeshError, lambda: FOLDED[0] + FOLDED[1])
row('ts.nn.cross_entropy(X, X, reduction="sum")', ts.UsageError, lambda: ts.nn.cross_entropy(X, X, reduction="sum"))
row('ts.linalg.norm(X, p=1)', ts.UsageError, lambda: ts.linalg.norm(X, p=1))
row('ts.mesh.show("dp")', ts.UsageError, lambda: ts.mesh.show("dp"))
row('ts.pipeline.show(None)', ts.UsageError, lambda: ts.pipeline.show(None))
row('ts.dist.profile(loss)', ts.UsageError, lambda: ts.dist.profile(loss))
