"""Side effects while tracing: outside values changed by a compiled function, and random draws."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

import tessera as ts
from tessera import nn, optim

from .rows import row

X = ts.tensor([1.0, 2.0])
CALLS = 4
SGD = optim.Momentum(0.1)
STATE = SGD.init({"w": X})


class Counts(nn.Module):
    def __init__(self) -> None:
        self.n = 0

    def __call__(self, x: ts.Tensor) -> ts.Tensor:
        self.n += 1
        return x * self.n


def _state() -> Any:
    return SimpleNamespace(n=0, flag=False, total=0.0)


def _run(f: Any) -> list[float]:
    with warnings.catch_warnings():  # each value of a counter gives a new recording, with a warning
        warnings.simplefilter("ignore", ts.TraceWarning)
        return [f(X)[1].item() for _ in range(CALLS)]


@row("adds tensors up in an object around it, where a number was")
def totals() -> None:
    def total(state: Any, x: ts.Tensor) -> ts.Tensor:
        state.total = state.total + x[1]
        return x * state.total

    mine, theirs = _state(), _state()
    assert _run(ts.jit(lambda x: total(mine, x))) == _run(lambda x: total(theirs, x))
    assert mine.total.item() == theirs.total.item()


@row("changes a number of an object around it: once, as documented")
def objects() -> None:
    state = _state()

    @ts.jit
    def count(x: ts.Tensor) -> ts.Tensor:
        state.n += 1
        return x * state.n

    assert [count(X)[1].item() for _ in range(CALLS)] == [2.0] * CALLS and state.n == 1


@row("changes a number of a module at each call")
def modules() -> None:
    inside = Counts()
    blocks = nn.Sequential(nn.Sequential(inside))
    assert _run(ts.jit(lambda x: blocks(x))) == [2.0, 4.0, 6.0, 8.0] and inside.n == CALLS
    assert _run(ts.jit(alone := Counts())) == [2.0, 4.0, 6.0, 8.0] and alone.n == CALLS


GLOBAL = 0


@row("counts in a global, in a variable around the function and in the object of a method")
def variables() -> None:
    near = 0

    @ts.jit
    def both(x: ts.Tensor) -> ts.Tensor:
        global GLOBAL
        nonlocal near
        GLOBAL += 1
        near -= 1
        return x * GLOBAL - near

    class Trainer:
        def __init__(self) -> None:
            self.at = (0, 1)

        @ts.jit
        def step(self, x: ts.Tensor) -> ts.Tensor:
            self.at = self.at[1], sum(self.at)
            return x * self.at[1]

    start = GLOBAL
    assert _run(both) == [3.0 * (i + 1) + 2 * start for i in range(CALLS)]
    assert (GLOBAL - start, near) == (CALLS, -CALLS)
    one, other = Trainer(), Trainer()
    assert _run(one.step) == [2.0, 4.0, 6.0, 10.0] and one.at == (3, 5)
    assert _run(other.step) == [2.0, 4.0, 6.0, 10.0]


@row("counts without an end", warns=ts.TraceWarning, says="count was 0, then 1, then 2; pass a")
def counts() -> None:
    count = 0

    @ts.jit
    def step(x: ts.Tensor) -> ts.Tensor:
        nonlocal count
        count += 1
        return x * count

    for _ in range(CALLS):
        step(X)


GENERATOR = np.random.default_rng(0)


def _once(name: str, says: str) -> Callable[[Callable[[ts.Tensor], Any]], None]:
    """A row: the function below, compiled, must warn of a side effect once."""

    def add(f: Callable[[ts.Tensor], Any]) -> None:
        @row(name, warns=ts.TraceWarning, says=says)
        def _() -> None:
            step = ts.jit(f)
            assert step(X).numpy().tolist() == step(X).numpy().tolist()

    return add


@_once("draws noise with np.random", "draws from np.random while it is recorded; later calls use")
def _(x: ts.Tensor) -> Any:
    return x + np.random.normal(size=2)


@_once("draws with random", "draws from random while it is recorded")
def _(x: ts.Tensor) -> Any:
    return x * random.random()


@_once("draws with torch", "draws from torch while it is recorded")
def _(x: ts.Tensor) -> Any:
    return x * float(torch.rand(()))


@_once("draws from a generator outside", "draws from GENERATOR while it is recorded")
def _(x: ts.Tensor) -> Any:
    return x * GENERATOR.normal()


@row("adds up in place what it uses")
def sums_in_place() -> None:
    @ts.jit
    def step(x: ts.Tensor, w: ts.Tensor, state: dict[str, ts.Tensor]) -> Any:
        h = x * 1.0
        h += w  # the gradient of this addition does not need the sum
        state["seen"] += x.sum()
        total = x * 0.0
        for k in range(3):
            total += k * x
        return total, ts.grad(h.sum(), w)

    state = {"seen": ts.tensor(0.0)}
    total, grad = step(X, X, state)
    np.testing.assert_array_equal(total.numpy(), 3 * np.asarray(X))
    assert grad.numpy().tolist() == [1.0, 1.0]
    assert state["seen"].item() == np.asarray(X).sum()


@row("draws before the call")
def nothing_is_said() -> None:
    noise = np.random.normal()

    @ts.jit
    def step(x: ts.Tensor) -> ts.Tensor:
        return x * noise

    assert step(X).shape == (2,)
