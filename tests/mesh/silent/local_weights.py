"""Weights in the local view: gradients, norms and updates."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np

import tessera as ts
from tessera import dist, nn, op, optim
from tests.mesh.silent.local import LABELS, RNG, X, mesh
from tests.mesh.silent.rows import row

# -- norms of weights that are split --------------------------------------------------------------
MLP = {k: RNG.normal(size=s).astype(np.float32) for k, s in {"up": (8, 4), "down": (4, 8)}.items()}
SPLIT = dist.strategy("tensor_parallel", rules=[("up$", 1), ("down$", 0)])


def two_by_two() -> dist.Mesh:
    return dist.Mesh(("dp", "tp"), shape={"dp": 2, "tp": 2})


def of_split_weights(with_grads: Any) -> Any:
    """Returns `with_grads(weights, gradients)` of a body in which tp splits the weights."""

    def body(x: Any, w: Any) -> Any:
        y = dist.all_reduce(ts.nn.gelu(x @ w["up"]) @ w["down"], "tp")
        return with_grads(w, ts.grad((y**2).mean(), w))

    plan = dist.strategy("data_parallel") + SPLIT
    return ts.jit(ts.distribute(body, strategy=plan, mesh=two_by_two(), batch="x"))(X, MLP)


def of_whole_weights(with_grads: Any) -> Any:
    def loss(w: Any) -> ts.Tensor:
        return ((ts.nn.gelu(X @ w["up"]) @ w["down"]) ** 2).mean()

    w = {k: ts.tensor(v) for k, v in MLP.items()}
    return with_grads(w, ts.value_and_grad(loss)(w)[1])


@row("a norm in a body that has blocks of weights")
def _() -> None:
    def clipped(w: Any, grads: Any) -> Any:
        new, norm = ts.optim.clip_by_global_norm(grads, 1.0)
        return new, norm, {k: w[k] - 0.1 * g for k, g in new.items()}

    (got, norm, weights), (want, length, moved) = (f(clipped) for f in (
        of_split_weights, of_whole_weights))  # fmt: skip
    np.testing.assert_allclose(norm.item(), length.item(), rtol=1e-5)
    for x, y in ((got, want), (weights, moved)):
        for k in MLP:
            np.testing.assert_allclose(x[k].numpy(), y[k].numpy(), atol=1e-6, err_msg=k)
    assert [str(got[k].type) for k in MLP] == ["f32[8, 4@tp]", "f32[4@tp, 8]"]


@row("a norm of what each device has, in a kernel", warns=ts.StrategyWarning,
     says="global_norm: what is added up differs along 'tp'")  # fmt: skip
def _() -> None:
    x = ts.tensor(X, mesh=two_by_two(), layout="[8, 8@tp]")
    ts.op.kernel(lambda x: x / ts.optim.global_norm([x]))(x)


@row("means over whole weights where a device has blocks", error=ts.UsageError,
     says="Adafactor: it takes means over whole weights")  # fmt: skip
def _() -> None:
    of_split_weights(updated)


def updated(w: Any, grads: Any) -> Any:
    optimizer = ts.optim.Adafactor()
    return optimizer.update(w, grads, optimizer.init(w))[0]


@row("weights by names within names, and such that are put into the arguments")
def _() -> None:
    w = {"up": {"w": MLP["up"]}, "down": {"w": MLP["down"]}}  # blocks of one type, at tp=2

    def body(x: Any, w: Any) -> Any:
        y = dist.all_reduce(ts.tanh(x @ w["up"]["w"]) @ w["down"]["w"], "tp")
        grads = ts.grad((y**2).mean(), w)
        for k in w:
            w[k]["w"] = w[k]["w"] - 0.1 * grads[k]["w"]
        return grads

    tp = dist.strategy("tensor_parallel", rules=[("up", 1), ("down", 0)])
    mesh = dist.Mesh(("tp",), devices=2)
    square = {k: {"w": np.ones((4, 4), np.float32)} for k in w}
    for given in (w, square):
        x = X[:, : given["up"]["w"].shape[0]]
        grads = ts.distribute(body, strategy=tp, mesh=mesh, batch=())(x, given)
        assert [str(grads[k]["w"].type) for k in w] == [str(given[k]["w"].type) for k in w]
        up, down = grads["up"]["w"], grads["down"]["w"]
        assert (up.type.dims[1], down.type.dims[0]) == (down.type.dims[0], up.type.dims[1])


@row("a gradient through a collective where ranks are told apart", error=ts.GraphError,
     says="no gradient goes back through all_reduce")  # fmt: skip
def _() -> None:
    def body(x: Any, w: Any) -> Any:
        if ts.mesh.current().rank == 0:
            x = x * 1.0
        return ts.grad((dist.all_reduce(x @ w, "dp") ** 2).mean(), w)

    split = [ts.tensor(X, mesh=mesh(), layout=t) for t in ("[8, 8@dp]", "[8@dp, 8]")]
    ts.op.kernel(body)(*split)


def by_the_rank(rank: Callable[[ts.Tensor], Any]) -> ts.Tensor:
    """The gradient with respect to w [4, 8] of the sum over 4 devices of (rows · w[rank]) · (rank +
    1)."""

    def body(x: Any, w: Any) -> Any:
        r = rank(ts.mesh.current().rank)
        return ts.grad(dist.all_reduce((x * w[r]).sum() * (r + 1), "dp"), w)

    return ts.op.kernel(body)(ts.tensor(X, mesh=mesh(), layout="[8@dp, 8]"), np.ones((4, 8), "f4"))


@row("a gradient through a collective, with the rank as a number", error=ts.GraphError,
     says="leave the rank a tensor: w[rank]")  # fmt: skip
def _() -> None:
    by_the_rank(int)


@row("a gradient through a collective, with the rank as a tensor")
def _() -> None:
    want = X.reshape(4, 2, 8).sum(1) * np.arange(1, 5)[:, None]
    np.testing.assert_allclose(by_the_rank(lambda r: r).numpy(), want, rtol=1e-5)


# -- a module among the arguments -----------------------------------------------------------------
class Net(nn.Module):
    def __init__(self) -> None:
        self.up, self.down = nn.Linear(8, 4), nn.Linear(4, 5)

    def __call__(self, x: Any) -> ts.Tensor:
        return self.down(ts.tanh(self.up(x)))


def trained(images: Any, classes: Any, net: Net) -> Any:
    loss = nn.cross_entropy(net(images), classes)
    grads = ts.grad(loss, net)
    net.load_parameters({k: w - 0.5 * grads[k] for k, w in net.parameters().items()})
    net.up.bias = net.up.bias * 0.5
    return loss, grads


def by_rank(images: Any, classes: Any, net: Net) -> Any:
    assert ts.mesh.current().rank < 4
    return trained(images, classes, net)


@row("a module that a local body is given, and trains")
def _() -> None:
    losses, weights = [], []
    steps = [ts.distribute(f, strategy="data_parallel", mesh=mesh()) for f in (trained, by_rank)]
    warnings.simplefilter("ignore", ts.StrategyWarning)  # a body that reads its rank splits nothing
    for step in (trained, *steps):
        ts.seed(3)
        net, compiled = Net(), ts.jit(step)
        losses.append([compiled(X, LABELS, net)[0].item() for _ in range(3)])
        weights.append([w.numpy() for w in net.parameters().values()])
    for k in (1, 2):
        np.testing.assert_allclose(losses[k], losses[0], rtol=1e-5)
        for a, b in zip(weights[k], weights[0], strict=True):
            np.testing.assert_allclose(a, b, atol=1e-6)
    assert losses[0][2] < losses[0][0]


class Tied(nn.Module):
    """A frozen layer, and a head tied to the weight of the layer before it."""

    def __init__(self) -> None:
        self.first, self.up, self.head = nn.Linear(8, 5), nn.Linear(5, 5), nn.Linear(5, 5)
        self.first.freeze()
        self.head.weight = self.up.weight

    def __call__(self, x: Any) -> ts.Tensor:
        return self.head(ts.tanh(self.up(ts.tanh(self.first(x)))))


@row("a module with frozen and shared weights, in a local body")
def _() -> None:
    def step(x: Any, classes: Any, net: Tied) -> Any:
        grads = ts.grad(nn.cross_entropy(net(x), classes), net)
        grads, norm = ts.optim.clip_by_global_norm(grads, 0.1)
        new = {k: w - grads[k] for k, w in net.trainable_parameters().items()}
        net.load_parameters(new, strict=False)
        return grads, norm, [*net.parameters()]

    found = []
    for body in (step, ts.distribute(step, strategy="data_parallel", mesh=mesh())):
        ts.seed(3)
        net, compiled = Tied(), ts.jit(body)
        for _ in range(2):
            grads, norm, names = compiled(X, LABELS, net)
        assert net.head.weight is net.up.weight and not net.first.weight.requires_grad
        found.append([norm, *grads.values(), *net.parameters().values()])
        assert [*grads] == ["up.weight", "up.bias", "head.bias"]
        assert names == ["first.weight", "first.bias", *grads]
    for a, b in zip(*found, strict=True):
        np.testing.assert_allclose(a.numpy(), b.numpy(), atol=1e-6)


@row("a weight that a local body sets to what each device has", error=ts.ShapeError,
     says="a weight is set to what differs between devices")  # fmt: skip
def _() -> None:
    def body(x: Any, net: nn.Linear) -> Any:
        net.bias = net.bias - x.mean(0)

    net, want = nn.Linear(8, 8), nn.Linear(8, 8)
    want.load_parameters(net.parameters())
    ts.distribute(body, strategy="data_parallel", mesh=mesh())(X, net)
    body(ts.tensor(X), want)
    np.testing.assert_allclose(net.bias.numpy(), want.bias.numpy(), rtol=1e-6)
    op.kernel(body)(ts.tensor(X, mesh=mesh(), layout="[8@dp, 8]"), nn.Linear(8, 8))


@row("a weight that one rank of a local body sets", error=ts.ShapeError,
     says="a weight is set to what differs between devices")  # fmt: skip
def _() -> None:
    def body(x: Any, net: nn.Linear) -> Any:
        if ts.mesh.current().rank == 0:
            net.bias = net.bias * 0.5
        return x

    ts.distribute(body, strategy="data_parallel", mesh=mesh())(X, nn.Linear(8, 8))


# -- gradients of rows ----------------------------------------------------------------------------
def row_gradients(x: Any, w: Any) -> Any:
    """The gradient of each row's loss."""

    def grad(w: Any, row: Any) -> Any:
        return ts.value_and_grad(lambda w: (ts.tanh(row @ w) ** 2).sum())(w)[1]

    return ts.vmap(grad, in_dims=(None, 0))(w, x)


def clipped_rows(x: Any, w: Any) -> Any:
    """The mean of row gradients clipped to norm 1, as in DP-SGD."""
    grads = row_gradients(x, w)
    lengths = ts.sqrt((grads**2).sum((1, 2), keepdims=True))
    return (grads / ts.maximum(lengths, 1.0)).mean(0)


@row("gradients of single rows, in a data-parallel body and in microbatches")
def _() -> None:
    w = MLP["up"]
    want = row_gradients(ts.tensor(X), ts.tensor(w)).numpy()
    for batch in ("x", None):
        spread = ts.distribute(row_gradients, strategy="data_parallel", mesh=mesh(), batch=batch)
        got = spread(X, w)
        assert got.type.dims[0][0].axes == ("dp",)
        np.testing.assert_allclose(got.numpy(), want, atol=5e-6)
    stages = dist.Mesh(("pp",), devices=2)
    piped = ts.pipeline.run(mesh_axes=("pp",), schedule="GPipe", microbatches=4, mesh=stages)
    np.testing.assert_allclose(piped(row_gradients)(X, w).numpy(), want, atol=5e-6)

    def step(x: Any, w: Any) -> Any:
        return dist.all_reduce(clipped_rows(x, w), "dp", op="mean")

    got = ts.distribute(step, strategy="data_parallel", mesh=mesh(), batch="x")(X, w)
    np.testing.assert_allclose(got.numpy(), clipped_rows(X, ts.tensor(w)).numpy(), atol=1e-6)


@row("gradients of columns, each a mean over the batch")
def _() -> None:
    def columns(x: Any, w: Any) -> Any:
        def grad(w: Any, column: Any) -> Any:
            return ts.value_and_grad(lambda w: ((column * w.sum()) ** 2).mean())(w)[1]

        return ts.vmap(grad, in_dims=(None, 1))(w, x)

    w = MLP["up"]
    got = ts.distribute(columns, strategy="data_parallel", mesh=mesh(), batch="x")(X, w)
    np.testing.assert_allclose(got.numpy(), columns(ts.tensor(X), ts.tensor(w)).numpy(), rtol=1e-5)


def penalty(x: Any, w: Any) -> Any:
    """Returns the gradient penalty of a critic (WGAN-GP), and its gradient."""
    gx = ts.grad(ts.tanh(x @ w).sum(), x)
    far = ((ts.linalg.norm(gx, dim=1) - 1) ** 2).mean()
    return far, ts.grad(far, w)


@row("gradients by the batch, and of these")
def _() -> None:
    for w in (nn.Parameter(MLP["up"]), MLP["up"]):
        spread = ts.distribute(penalty, strategy="data_parallel", mesh=mesh(), batch="x")
        for got, want in zip(spread(X, w), ts.jit(penalty)(X, w), strict=True):
            np.testing.assert_allclose(got.numpy(), want.numpy(), rtol=1e-5, atol=1e-6)


def of_pairs(w: Any, rows: Any) -> Any:
    return nn.cross_entropy(ts.tanh(rows[0] @ w["up"]) @ w["down"], rows[1])


def adam_step(rows: Any, given: Any, moments: Any) -> Any:
    """A training step in JAX's style, with no argument named `weights` or `batch`."""
    loss, grads = ts.value_and_grad(of_pairs)(given, rows)
    return loss, *optim.Adam(0.1).update(given, grads, moments)


@row("a step of value_and_grad whose arguments have names of one's own")
def _() -> None:
    moments = optim.Adam(0.1).init({k: ts.tensor(w) for k, w in MLP.items()})
    alone = ts.jit(adam_step)((X, LABELS), MLP, moments)
    spread = ts.distribute(adam_step, strategy="data_parallel", mesh=mesh())
    loss, new, _ = spread((X, LABELS), MLP, moments)
    np.testing.assert_allclose(loss.numpy(), alone[0].numpy(), rtol=1e-6)
    for k, w in alone[1].items():
        np.testing.assert_allclose(new[k].numpy(), w.numpy(), rtol=1e-4, atol=1e-6)


def hardened(images: Any, classes: Any, w: Any) -> Any:
    _, by_row = ts.value_and_grad(lambda x: of_pairs(w, (x, classes)))(images)
    return ts.value_and_grad(of_pairs)(w, (images + 0.1 * ts.sign(by_row), classes))


@row("a step along the batch, by value_and_grad, and then one of the weights")
def _() -> None:
    want = ts.jit(hardened)(X, LABELS, MLP)
    for batch in (("images", "classes"), None):
        spread = ts.distribute(hardened, strategy="data_parallel", mesh=mesh(), batch=batch)
        got = spread(X, LABELS, MLP)
        np.testing.assert_allclose(got[0].numpy(), want[0].numpy(), rtol=1e-5)
        for k, g in want[1].items():
            np.testing.assert_allclose(got[1][k].numpy(), g.numpy(), rtol=1e-4, atol=1e-6)
