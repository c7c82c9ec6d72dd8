"""Copies of weights: unchanged when the weights are donated."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np

import tessera as ts
from tessera import dist, nn
from tests.mesh.silent.rows import row


def _decayed(m: nn.Linear, x: np.ndarray) -> None:
    grads = ts.grad((m(x) ** 2).mean(), m)
    m.load_parameters({k: w - 0.1 * grads[k] for k, w in m.parameters().items()})


COPIES: dict[str, Callable[[nn.Linear], Callable[[], np.ndarray]]] = {
    "of a module": lambda m: (c := copy.deepcopy(m)) and c.weight.numpy,
    "of its state": lambda m: copy.deepcopy(m.state_dict())["weight"].numpy,
    "loaded into another": lambda m: _loaded(nn.Linear(3, 3), m),
    "loaded from a copy": lambda m: _loaded(nn.Linear(3, 3), copy.deepcopy(m)),
}


def _loaded(into: nn.Linear, m: nn.Linear) -> Callable[[], np.ndarray]:
    into.load_state_dict(m.state_dict())
    return into.weight.numpy


for name, made in COPIES.items():

    @row(f"a copy of donated weights: {name}")
    def _(made: Any = made) -> None:
        x = np.ones((4, 3), np.float32)
        step = ts.jit(_decayed, donate="m")
        for warm in (0, 1):
            ts.seed(0)
            m = nn.Linear(3, 3)
            for _ in range(warm):
                step(m, x)
            before, kept = m.weight.numpy(), made(m)
            step(m, x)
            np.testing.assert_array_equal(kept(), before)
            assert np.abs(m.weight.numpy() - before).max() > 0

    @row(f"a copy of weights that nobody has read before they are donated: {name}")
    def _(made: Any = made) -> None:
        x, values = np.ones((4, 3), np.float32), {}
        step = ts.jit(_decayed, donate="m")
        for given in (False, True):
            ts.seed(0)
            before = nn.Linear(3, 3).weight.numpy()
            ts.seed(0)
            m = nn.Linear(3, 3)
            if given:
                values = {"weight": before * 2, "bias": np.ones(3, np.float32)}
                before = values["weight"]
                m.load_state_dict(values)
            kept = made(m)
            step(m, x)
            np.testing.assert_array_equal(kept(), before)


@row("a copy of tensors that are donated")
def _() -> None:
    made = ts.full((3,), 2.0) * 3
    weights = {"made": made, "given": ts.tensor(np.ones(3, np.float32)), "slope": made * 2}
    kept = copy.deepcopy(weights)
    loss = (kept["slope"] * kept["made"]).sum()
    np.testing.assert_array_equal(ts.grad(loss, made).numpy(), [24.0] * 3)  # as for a clone
    before = {k: t.numpy() for k, t in kept.items()}
    ts.jit(lambda w: {k: t * 2 for k, t in w.items()}, donate="w")(weights)
    for k, t in kept.items():
        np.testing.assert_array_equal(t.numpy(), before[k])


@row("a state that is looked at before the weights are placed and donated")
def _() -> None:
    m = nn.Linear(3, 3)
    seen = m.state_dict()
    mesh = dist.Mesh(("dp",), devices=4)
    dist.place(m, dist.strategy("zero_redundancy_optimizer", stage=3), mesh)
    ts.jit(_decayed, donate="m")(m, np.ones((4, 3), np.float32))
    assert seen["weight"].shape == m.weight.shape and np.isfinite(m.weight.numpy()).all()
    assert np.isfinite(seen["weight"].numpy()).all()


@row("a moving average of tensors made of parameters")
def _() -> None:
    m = nn.Linear(3, 3)
    first = m.weight.numpy()
    shadow = {name: ts.tensor(p) for name, p in m.named_parameters()}
    with ts.no_grad():
        for name, p in m.named_parameters():
            shadow[name] *= 0.5
            shadow[name] += 0.25 * p
    np.testing.assert_array_equal(m.weight.numpy(), first)
    np.testing.assert_allclose(shadow["weight"].numpy(), 0.75 * first, rtol=1e-6)


class Two(nn.Module):
    """A layer with two heads."""

    def __init__(self) -> None:
        self.up, self.a, self.b = (nn.Linear(3, 3, bias=False) for _ in range(3))

    def lower(self, loss: ts.Tensor) -> Any:
        grads = ts.grad(loss, self)
        self.load_parameters({k: w - 0.1 * grads[k] for k, w in self.parameters().items()})
        return grads


@row("a loss of one head after a step by the other")
def _() -> None:
    def step(m: Two, x: Any) -> Any:
        m.lower((m.a(m.up(x)) ** 2).mean())
        return m.lower((m.b(m.up(x)) ** 2).mean())

    for run in (step, ts.jit(step)):
        grads = run(Two(), np.ones((4, 3), np.float32))
        sizes = {k: np.abs(g.numpy()).max() for k, g in grads.items()}
        assert not sizes["a.weight"] and sizes["up.weight"] and sizes["b.weight"]


for name, compiled in {"at once": lambda f: f, "compiled": ts.jit}.items():

    @row(f"a loss that is older than a weight, {name}", error=ts.GraphError,
         says="up.weight was set after the loss was computed of it")  # fmt: skip
    def _(compiled: Any = compiled) -> None:
        def step(m: Two, x: Any) -> Any:
            h = m.up(x)
            first, second = ((head(h) ** 2).mean() for head in (m.a, m.b))
            m.up.weight = m.up.weight - 0.1 * ts.grad(first, m.up)["weight"]
            return ts.grad(second, m)

        compiled(step)(Two(), np.ones((4, 3), np.float32))


@row("ids out of range in a copy of a batch", error=ts.ShapeError, says="id 7 at [1] is outside")
def _() -> None:
    batch = copy.deepcopy({"ids": ts.tensor([0, 7])})
    nn.embedding(batch["ids"], ts.ones((4, 2)))
