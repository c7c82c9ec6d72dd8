"""What does a recorded function see from outside, and what may leave it?"""

from __future__ import annotations

import math
from collections import deque
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

import tessera as ts
from tessera import dist

from .rows import row

MESH = dist.Mesh(("dp", "tp"), shape={"dp": 2, "tp": 4})
RNG = np.random.default_rng(0)
X = RNG.standard_normal((8, 4)).astype(np.float32)
W = RNG.standard_normal((4, 8)).astype(np.float32)


# -- NumPy's functions, and values read on the way to a loss --------------------------------------
def _like_torch(ours: Any, theirs: Any) -> None:
    """The gradient by W is PyTorch's: at once and compiled, on one device and on eight."""
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


_refuses("a NumPy function that is no op here", np.sinh, "np.sinh: it is no op")
_refuses("NumPy's median of a tensor", np.median, "x.numpy()")
_refuses("NumPy's inverse of a matrix", np.linalg.inv, "use ts.linalg.inv")
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
        counted = []

        def f(x: ts.Tensor, given: Any) -> ts.Tensor:
            counted.append(1)
            return x * read(given)

        compiled, given, x = ts.jit(f), make(), ts.tensor(X)
        for _ in range(2):
            np.testing.assert_allclose(compiled(x, given).numpy(), X * read(given), rtol=1e-6)
        change(given)
        np.testing.assert_allclose(compiled(x, given).numpy(), X * read(given), rtol=1e-6)
        compiled(x, make())  # equal to the first: nothing is recorded again
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
