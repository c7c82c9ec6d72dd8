"""Outside values of a recorded function: read, and written."""

from __future__ import annotations

import functools
import math
from collections import deque
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import torch

import tessera as ts
from tessera import dist, graph, pipeline

from .rows import row

MESH = dist.Mesh(("dp", "tp"), shape={"dp": 2, "tp": 4})
RNG = np.random.default_rng(0)
X = RNG.standard_normal((8, 4)).astype(np.float32)
W = RNG.standard_normal((4, 8)).astype(np.float32)


# -- NumPy's functions, and values read on the way to a loss --------------------------------------
def _like_torch(ours: Any, theirs: Any) -> None:
    """Asserts that the gradient with respect to W is PyTorch's: eager and compiled, on one device
    and on eight."""
    w = torch.tensor(W, requires_grad=True)
    theirs(torch.tensor(X), w).backward()
    assert w.grad is not None and w.grad.abs().max() > 1e-3

    def gradient(x: ts.Tensor, w: ts.Tensor) -> ts.Tensor:
        return ts.grad(ours(x, w), w)  # type: ignore[no-any-return]

    one = ts.tensor(X), ts.tensor(W)
    many = ts.tensor(X, mesh=MESH, layout="[8@dp, 4]"), ts.tensor(W, mesh=MESH, layout="[4, 8@tp]")
    for args in (one, many):
        for f in (gradient, ts.jit(gradient)):
            np.testing.assert_allclose(f(*args).numpy(), w.grad.numpy(), rtol=1e-4, atol=1e-5)


@row("np.sin of a tensor on the way to the loss")
def numpy_sin() -> None:
    _like_torch(lambda x, w: ts.sum(np.sin(x @ w)), lambda x, w: torch.sin(x @ w).sum())


@row("NumPy's functions are used for the whole loss")
def numpy_everywhere() -> None:
    _like_torch(
        lambda x, w: np.mean(
            np.concatenate([np.square(np.tanh(np.dot(x, w))), np.clip(x @ w, -0.5, None)], axis=1)
        ),
        lambda x, w: torch.cat([torch.tanh(x @ w) ** 2, (x @ w).clamp(min=-0.5)], 1).mean(),
    )
    _like_torch(
        lambda x, w: np.sum(
            np.where(x > 0, np.einsum("ij,jk->ik", x, w)[:, :4], np.maximum(x, 0.1))
        ),
        lambda x, w: torch.where(x > 0, (x @ w)[:, :4], x.clamp(min=0.1)).sum(),
    )
    _like_torch(
        lambda x, w: np.var(np.stack([np.transpose(w), np.exp(w.T)], axis=0), ddof=1),
        lambda x, w: torch.stack([w.T, w.T.exp()]).var(),
    )


@row("a NumPy array stands on the left of a tensor that is trained")
def numpy_left() -> None:
    scale = np.abs(W)
    _like_torch(
        lambda x, w: ts.sum(np.float32(2.0) * (scale * w) ** 2 + scale / (1 + w * w)),
        lambda x, w: (2 * (torch.tensor(scale) * w) ** 2 + torch.tensor(scale) / (1 + w * w)).sum(),
    )


def _refuses(name: str, f: Any, says: str) -> None:
    @row(name, error=ts.UsageError, says=says)
    def call() -> None:
        f(ts.tensor(np.abs(W)))


_refuses("a NumPy function that is no op here", np.sinc, "np.sinc: it is no op")
_refuses("NumPy's median of a tensor", np.median, "x.numpy()")
_refuses("NumPy's inverse of a matrix", np.linalg.inv, "write ts.linalg.inv")
_refuses("NumPy's sum in another dtype", lambda w: np.sum(w, dtype=np.float64), "'dtype'")
_refuses("a tensor is added in place to a NumPy array", lambda w: np.add(W, w, out=W.copy()),
         "cannot be put into an array")  # fmt: skip
_refuses("losses are collected by ts.tensor([a, b])", lambda w: ts.tensor([w[0, 0], ts.sum(w)]),
         "use ts.stack(list)")  # fmt: skip


def _unreached(w: ts.Tensor) -> ts.Tensor:
    return ts.grad(ts.sum(ts.tensor(X) * math.sin(ts.sum(w))), {"w": w})["w"]  # type: ignore[no-any-return]


@row("math.sin(t): the loss reaches no weight, at once", error=ts.GraphError, says="weights : w")
def unreached_eager() -> None:
    _unreached(ts.tensor(W))


@row("math.sin(t): the loss reaches no weight, compiled", error=ts.GraphError, says="weights : w")
def unreached_jit() -> None:
    ts.jit(_unreached)(ts.tensor(W))


@row("all weights stand behind ts.stop_gradient", error=ts.GraphError, says="does not depend on")
def unreached_stopped() -> None:
    ts.jit(lambda w: ts.grad(ts.sum(ts.stop_gradient(w)), w))(ts.tensor(W))


@row("a loss that reaches some of the weights gives zeros for the others, compiled as at once")
def some_reached() -> None:
    def gradients(a: ts.Tensor, b: ts.Tensor) -> Any:
        return ts.grad(ts.sum(a * a), {"a": a, "b": b})

    for f in (gradients, ts.jit(gradients)):
        got = f(ts.tensor(W), ts.tensor(X))
        np.testing.assert_allclose(got["a"].numpy(), 2 * W)
        assert (got["b"].numpy() == 0).all()


@row("gradients of every named weight are those that the loss reaches, compiled as at once")
def named_reached() -> None:
    a, b = ts.tensor(W, name="a"), ts.tensor(X, name="b")

    def gradients() -> Any:
        other = ts.sum(b)
        return ts.grad(ts.sum(a * a)), other

    assert set(gradients()[0]) == set(ts.jit(gradients)()[0]) == {"a"}


# -- static arguments that change -----------------------------------------------------------------
class _Settings:
    def __init__(self) -> None:
        self.scales = [1.0, 2.0]


def _change(name: str, make: Any, change: Any, read: Any) -> None:
    @row(f"a static argument is changed in place: {name}")
    def call() -> None:
        counted: list[int] = []
        note = counted.append

        def f(x: ts.Tensor, given: Any) -> ts.Tensor:
            note(1)
            return x * read(given)

        compiled, given, x = ts.jit(f), make(), ts.tensor(X)
        for _ in range(2):
            np.testing.assert_allclose(compiled(x, given).numpy(), X * read(given), rtol=1e-6)
        change(given)
        np.testing.assert_allclose(compiled(x, given).numpy(), X * read(given), rtol=1e-6)
        compiled(x, make())  # equal to the first, so there is no second recording
        assert len(counted) == 2


def _set_scale(cfg: Any) -> None:
    cfg.scale = 3.0


_change("a namespace", lambda: SimpleNamespace(scale=2.0), _set_scale, lambda c: c.scale)
_change("an object with a list", _Settings, lambda c: c.scales.append(5.0), lambda c: sum(c.scales))
_change("a set", lambda: {1.0, 2.0}, lambda c: c.add(5.0), sum)
_change("a deque in a namespace", lambda: SimpleNamespace(of=deque([1.0])),
        lambda c: c.of.append(5.0), lambda c: sum(c.of))  # fmt: skip
_change("bytes that can change", lambda: bytearray(b"ab"), lambda c: c.append(3), len)


class _Configured(ts.nn.Module):
    def __init__(self) -> None:
        self.cfg = SimpleNamespace(scale=2.0)
        self.w = ts.nn.Parameter(4, init="ones")

    def __call__(self, x: ts.Tensor) -> ts.Tensor:
        return x * self.w * self.cfg.scale


@row("module.cfg is changed between calls of a compiled function")
def module_cfg() -> None:
    model, call = _Configured(), ts.jit(lambda model, x: model(x))
    call(model, ts.tensor(X))
    model.cfg.scale = 3.0
    np.testing.assert_allclose(call(model, ts.tensor(X)).numpy(), X * 3)


@row("0.0 and then -0.0 as a static argument")
def minus_zero() -> None:
    f = ts.jit(lambda x, z: 1 / (x * z))
    assert (f(ts.tensor([1.0]), 0.0).numpy() > 0).all()
    assert (f(ts.tensor([1.0]), -0.0).numpy() < 0).all()


@row("a static argument too large to be compared", warns=UserWarning, says="more than 2000 values")
def static_large() -> None:
    f = ts.jit(lambda x, n: x * n.scale)
    f(ts.tensor([1.0]), SimpleNamespace(scale=2.0, rows=list(range(3000))))


@row("a static number of NumPy's is the other zero, and NaN is recorded once")
def static_scalars() -> None:
    f, x = ts.jit(lambda x, n: x / n), ts.tensor([1.0])
    assert f(x, np.float32(0.0)).item() == np.inf
    assert f(x, np.float32(-0.0)).item() == -np.inf
    g = ts.jit(lambda x, n: x * n)
    for _ in range(2):
        assert np.isnan(g(x, np.float32("nan")).item())
    assert len(g.programs) == 1


# -- what a compiled function reads outside of its arguments --------------------------------------
def _read_anew(name: str, read: Any, bind: Any) -> None:
    """Asserts that a compiled function's `read()` gives the value bound by `bind` before each
    call."""

    @row(f"a compiled function reads {name}, which is bound anew between calls")
    def call() -> None:
        counted: list[int] = []
        note = counted.append

        def f(x: ts.Tensor) -> ts.Tensor:
            note(1)
            return x @ read()

        compiled, x = ts.jit(f), ts.tensor(X)
        for i in range(3):
            bind(ts.tensor(W * (i + 1)))
            np.testing.assert_allclose(compiled(x).numpy(), X @ W * (i + 1), rtol=1e-5, atol=1e-5)
        assert len(counted) == 1  # another tensor of the same type needs no recording
        bind(ts.tensor(W[:, :2]))
        np.testing.assert_allclose(compiled(x).numpy(), X @ W[:, :2], rtol=1e-5, atol=1e-5)


def _set_global(t: ts.Tensor) -> None:
    global _weight
    _weight = t


def _bind_dict(t: ts.Tensor) -> None:
    _params["w"] = t


def _bind_whole(t: ts.Tensor) -> None:
    global _params
    _params = {"w": t}


def _helper() -> ts.Tensor:
    return _weight


def _bind_object(t: ts.Tensor) -> None:
    _namespace.inner.w = t


_weight = ts.tensor(W)
_params = {"w": ts.tensor(W)}
_namespace = SimpleNamespace(inner=SimpleNamespace(w=ts.tensor(W)))
_rate = 2.0
_read_anew("a global", lambda: _weight, _set_global)
_read_anew("a global of a function that it calls", _helper, _set_global)
_read_anew("an entry of a global dict", lambda: _params["w"], _bind_dict)
_read_anew("a global dict", lambda: _params["w"], _bind_whole)
_read_anew("an attribute of an object in an object", lambda: _namespace.inner.w, _bind_object)


@row("a number that a compiled function reads outside is changed between calls")
def numbers_outside() -> None:
    global _rate
    mask = np.ones(4, np.float32)
    f = ts.jit(lambda x: x * _rate * mask)
    f(ts.tensor(X))
    _rate = 3.0
    mask[0] = 0.0  # the array itself, in place
    np.testing.assert_allclose(f(ts.tensor(X)).numpy(), X * 3.0 * mask, rtol=1e-6)


@row("a stage of a pipeline reads a tensor around it, which is bound anew")
def stages_outside() -> None:
    scale = ts.tensor(2.0)
    mesh = dist.Mesh(("pp",), devices=2)
    parts = [lambda x: x * scale, lambda x: x + 1.0]
    f = ts.jit(pipeline.compose(2, parts, mesh=mesh, microbatches=4))
    f(ts.tensor(X))
    scale = ts.tensor(3.0)
    np.testing.assert_allclose(f(ts.tensor(X)).numpy(), X * 3 + 1, rtol=1e-6)


def _trainer() -> Any:
    class Trainer:
        def __init__(self) -> None:
            self.w, self.rate = ts.tensor(W), 0.5
            self.log: list[ts.Tensor] = []

        @ts.jit
        def step(self, x: ts.Tensor) -> ts.Tensor:
            loss = ts.sum(x @ self.w)
            self.w = self.w - self.rate * ts.grad(loss, self.w)
            self.last = loss
            return loss

        @ts.jit
        def logged(self, x: ts.Tensor) -> ts.Tensor:
            self.log.append(ts.sum(x))
            return x

    return Trainer


@row("a compiled method of a trainer object changes self.w")
def trainer() -> None:
    t, x, w = _trainer()(), ts.tensor(X), W
    g = X.sum(0)[:, None]
    for rate in (0.5, 0.5, 0.25):
        t.rate = rate
        loss = t.step(x)
        np.testing.assert_allclose(loss.numpy(), (X @ w).sum(), rtol=1e-4, atol=1e-4)
        w = w - rate * g
        np.testing.assert_allclose(t.w.numpy(), w, rtol=1e-4, atol=1e-4)
        assert t.last.item() == loss.item()


@row("two trainer objects share a compiled method")
def two_trainers() -> None:
    kind, x = _trainer(), ts.tensor(X)
    a, b = kind(), kind()
    b.w = ts.tensor(2 * W)
    for t in (a, b, a):
        t.step(x)
    g = 0.5 * X.sum(0)[:, None]
    np.testing.assert_allclose(a.w.numpy(), W - 2 * g, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(b.w.numpy(), 2 * W - g, rtol=1e-4, atol=1e-4)


@row("a compiled function sets a variable around it with nonlocal")
def nonlocal_tensor() -> None:
    total = ts.tensor(np.zeros((8, 4), np.float32))

    @ts.jit
    def add(x: ts.Tensor) -> None:
        nonlocal total
        total = total + x

    for _ in range(3):
        add(ts.tensor(X))
    np.testing.assert_allclose(total.numpy(), 3 * X, rtol=1e-6)


_losses: list[Any] = []


@functools.lru_cache
def _table(n: int) -> ts.Tensor:
    return ts.cos(ts.arange(n).to(ts.f32))


def _left(name: str, f: Any, used: Any) -> None:
    @row(f"a tensor of a compiled function, left in {name}, is used after it", **_AFTER)
    def call() -> None:
        _losses.clear()
        _table.cache_clear()
        ts.jit(f)(ts.tensor(X))
        used()


_AFTER: Any = {"error": ts.UsageError, "says": "is used after that function ended"}
_keep: Any = lambda x: _losses.append(x * 2) or x  # type: ignore[func-returns-value] # noqa: E731
_left("a global list", _keep, lambda: _losses[0] + 1)
_left("a global list, and printed", _keep, lambda: _losses[0].numpy())
_left("a global list, and given to it", _keep, lambda: ts.jit(lambda x: x)(_losses[0]))
_left("a global list, and given in a tree", _keep, lambda: ts.jit(lambda x: x)({"x": [_losses[0]]}))
_scaled: Any = lambda x: x * _table(4)  # noqa: E731
_left("an lru_cache", _scaled, lambda: _table(4) * 2)
_left("an lru_cache that another reads", _scaled, lambda: ts.jit(_scaled)(ts.tensor(X)))


@row("a compiled method appends its loss to self.log, which is added up", **_AFTER)
def trainer_log() -> None:
    t = _trainer()()
    t.logged(ts.tensor(X))
    sum(t.log)


@row("a failing function has set an attribute to its tensor: the attribute is as it was")
def failed() -> None:
    t = _trainer()()

    def f(x: ts.Tensor) -> None:
        t.w = t.w * 2
        raise KeyError(1)

    try:
        ts.jit(f)(ts.tensor(X))
    except KeyError:
        np.testing.assert_array_equal(t.w.numpy(), W)
    else:
        raise AssertionError


@row("a training step's weight is a variable around it, which the loop binds anew")
def training_step_weight() -> None:
    w = ts.tensor(W, name="w")

    @graph.training_step()
    def step(x: ts.Tensor) -> Any:
        loss = ts.sum(x @ w)
        return loss, graph.backward(loss)

    x, at = ts.tensor(X), W
    for _ in range(3):
        loss, grads = step(x)
        np.testing.assert_allclose(loss.numpy(), (X @ at).sum(), rtol=1e-4, atol=1e-4)
        w = w - 0.5 * grads["w"]
        at = at - 0.5 * X.sum(0)[:, None]


# -- classes registered with JAX ------------------------------------------------------------------
class _State:
    def __init__(self, w: Any, rate: float) -> None:
        self.w, self.rate = w, rate


jax.tree_util.register_pytree_node(
    _State, lambda s: ((s.w,), s.rate), lambda rate, c: _State(*c, rate)
)


@row("a class registered with JAX holds the weights, which change between calls")
def registered() -> None:
    f = ts.jit(lambda s, x: (x @ s.w) * s.rate)
    s, x = _State(ts.tensor(W), 1.0), ts.tensor(X)
    f(s, x)
    s.w, s.rate = ts.tensor(2 * W), 3.0
    np.testing.assert_allclose(f(s, x).numpy(), X @ W * 6, rtol=1e-4, atol=1e-4)


@row("a compiled function changes a weight of a class registered with JAX, and gives its gradient")
def registered_written() -> None:
    @ts.jit
    def step(s: _State) -> Any:
        g = ts.grad(ts.sum(s.w * s.w), s)
        s.w = s.w - s.rate * g.w
        return g

    s = _State(ts.tensor(W), 0.25)
    for i in range(2):
        g = step(s)
        assert type(g) is _State
        np.testing.assert_allclose(g.w.numpy(), 2 * W * 0.5**i, rtol=1e-6)
    np.testing.assert_allclose(s.w.numpy(), W / 4, rtol=1e-6)


@row("a static argument holds what cannot be copied: a type with its mesh, a view of bytes")
def not_copied() -> None:
    calls: list[Any] = []
    note = calls.append

    @ts.jit
    def doubled(x: ts.Tensor, how: Any) -> ts.Tensor:
        note(how)
        return x * (2 if how is None else 3)

    t = ts.tensor(X, mesh=MESH, layout="[8@dp, 4]").type
    for how in (SimpleNamespace(t=t), SimpleNamespace(t=t), memoryview(b"ab")):
        np.testing.assert_allclose(doubled(ts.tensor(X), how).numpy(), 3 * X, rtol=1e-6)
    assert len(calls) == 2  # recorded again for the changed value only
