"""What does a recorded function do to plain values outside, and what would it do only once?"""

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


def steps(state: Any) -> list[Callable[[ts.Tensor], ts.Tensor]]:
    """Functions that change plain values of `state`, and use them."""

    def count(x: ts.Tensor) -> ts.Tensor:
        state.n += 1
        return x * state.n

    def toggle(x: ts.Tensor) -> ts.Tensor:
        state.flag = not state.flag
        return x if state.flag else -x

    def first(x: ts.Tensor) -> ts.Tensor:
        if state.last is None:
            state.last = x.shape
            return x * 100
        return x * len(state.last)

    def new(x: ts.Tensor) -> ts.Tensor:
        state.made = getattr(state, "made", 0) + 2
        return x * state.made

    def deep(x: ts.Tensor) -> ts.Tensor:
        state.table["a"] = state.table.get("a", 0) + 1
        state.row[1] += 2
        return x * state.table["a"] + state.row[1]

    def total(x: ts.Tensor) -> ts.Tensor:
        state.total = state.total + x[1]  # from a number to a tensor
        return x * state.total

    def read(x: ts.Tensor) -> ts.Tensor:
        state.n += 1 if x[0].item() > 0 else -1
        return x * state.n

    return [count, toggle, first, new, deep, total, read]


class Counts(nn.Module):
    def __init__(self) -> None:
        self.n, self.flag, self.last, self.total = 0, False, None, 0.0
        self.table, self.row = {}, [0, 0]

    def __call__(self, x: ts.Tensor) -> ts.Tensor:
        self.n += 1
        return x * self.n


def _state() -> Any:
    return SimpleNamespace(n=0, flag=False, last=None, total=0.0, table={}, row=[0, 0])


def _run(f: Any) -> list[float]:
    with warnings.catch_warnings():  # a counter is recorded for each value, which is said
        warnings.simplefilter("ignore", ts.TraceWarning)
        return [f(X)[1].item() for _ in range(CALLS)]


@row("changes numbers of an object outside at each call")
def objects() -> None:
    for i in range(len(steps(_state()))):
        mine, theirs = _state(), _state()
        assert _run(ts.jit(steps(mine)[i])) == _run(steps(theirs)[i])
        assert str(mine) == str(theirs) or i == 5
        assert float(mine.total) == float(theirs.total)


@row("changes numbers of a module outside at each call")
def modules() -> None:
    for i in (0, 1, 2, 3, 6):
        mine, theirs = Counts(), Counts()
        assert _run(ts.jit(steps(mine)[i])) == _run(steps(theirs)[i])
        assert vars(mine) == vars(theirs)
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
        done = 0

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


@row("raises after it has counted: the count is as before, and the next call counts on")
def raises() -> None:
    state = _state()

    @ts.jit
    def step(x: ts.Tensor) -> ts.Tensor:
        state.n += 1
        return x @ x.reshape(1, 2) if state.n == 2 and state.flag else x * state.n

    assert step(X)[1].item() == 2.0
    state.flag = True
    for _ in range(2):
        try:
            step(X)
        except ts.ShapeError:
            assert state.n == 1
    state.flag = False
    assert step(X)[1].item() == 4.0 and state.n == 2
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ts.TraceWarning)
        step.plan(X)
    assert state.n == 2


@row("counts without an end", warns=ts.TraceWarning, says="state.n was 0, then 1, then 2; pass a")
def counts() -> None:
    state = _state()

    @ts.jit
    def step(x: ts.Tensor) -> ts.Tensor:
        state.n += 1
        return x * state.n

    for _ in range(CALLS):
        step(X)


GENERATOR = np.random.default_rng(0)


def _once(name: str, says: str) -> Callable[[Callable[[ts.Tensor], Any]], None]:
    """A row: the function below, compiled, warns of what it does once."""

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
        h += w  # by whose gradient the sum is not needed
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
