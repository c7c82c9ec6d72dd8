"""Is what a compiled function reads without naming it in its code read anew at each call: items and
lengths of a user's own objects, names given as texts, containers of the standard library?"""

from __future__ import annotations

import tempfile
from array import array
from collections import ChainMap, UserDict, UserList, deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np

import tessera as ts
from tessera import checkpoint, dist, graph, nn, op

from .rows import row


class Config:
    """Settings as many write them: items, attributes and arithmetic of what is inside."""

    def __init__(self) -> None:
        self.__dict__["held"] = {"k": 1.0}

    def __getitem__(self, name: str) -> Any:
        return self.held[name]

    def __getattr__(self, name: str) -> Any:
        try:
            return self.__dict__["held"][name]
        except KeyError:
            raise AttributeError(name) from None

    def __len__(self) -> int:
        return int(self.held["k"])

    def __iter__(self) -> Any:
        return iter(self.held.values())

    def __contains__(self, k: float) -> bool:
        return k in self.held.values()

    def __rmul__(self, other: Any) -> Any:
        return other * self.held["k"]

    def __enter__(self) -> float:
        return float(self.held["k"])

    def __exit__(self, *error: object) -> None: ...


class Empty: ...


class Scaled(nn.Module):
    def __call__(self, x: ts.Tensor) -> ts.Tensor:
        return x * getattr(self, "k", 1.0)


def _entered(c: Config, x: ts.Tensor) -> ts.Tensor:
    with c as k:
        return x * k


def _held(c: Config, k: float) -> None:
    c.held["k"] = k


def _item(c: Any, k: float) -> None:
    c[0] = k


def _name(c: Any, k: float) -> None:
    c["k"] = k


def _set(c: Any, k: float) -> None:
    c.k = k


Row = tuple[Callable[[], Any], Callable[[Any, ts.Tensor], Any], Callable[[Any, float], None]]
ROWS: dict[str, Row] = {
    "an item of an object": (Config, lambda c, x: x * c["k"], _held),
    "an attribute by __getattr__": (Config, lambda c, x: x * c.k, _held),
    "a length": (Config, lambda c, x: x * len(c), _held),
    "what it yields": (Config, lambda c, x: x * sum(c), _held),
    "what is in it": (Config, lambda c, x: x * (2.0 if 2.0 in c else 1.0), _held),
    "its product": (Config, lambda c, x: x * (1.0 * c), _held),
    "its context": (Config, _entered, _held),
    "a UserDict": (lambda: UserDict(k=1.0), lambda c, x: x * c["k"], _name),
    "a ChainMap": (lambda: ChainMap({}, {"k": 1.0}), lambda c, x: x * c["k"], _name),
    "a UserList": (lambda: UserList([1.0]), lambda c, x: x * c[0], _item),
    "a deque": (lambda: deque([1.0]), lambda c, x: x * c[0], _item),
    "an array": (lambda: array("d", [1.0]), lambda c, x: x * c[0], _item),
    "getattr": (lambda: SimpleNamespace(k=1.0), lambda c, x: x * getattr(c, "k", 3.0), _set),
    "getattr of what was not there": (Empty, lambda c, x: x * getattr(c, "k", 1.0), _set),
    "hasattr": (Empty, lambda c, x: x * (2.0 if hasattr(c, "k") else 1.0), _set),
    "getattr of names in turn": (
        lambda: SimpleNamespace(k=1.0, n=1.0),
        lambda c, x: x * getattr(c, "k") * getattr(c, "n"),  # noqa: B009
        _set,
    ),
    "vars": (lambda: SimpleNamespace(k=1.0), lambda c, x: x * vars(c)["k"], _set),
    "getattr of a module": (Scaled, lambda c, x: c(x), _set),
}


def _is_read_anew(name: str) -> None:
    @row(f"a compiled function reads {name} and names it nowhere")
    def call() -> None:
        make, read, change = ROWS[name]
        outside = make()
        f = ts.jit(lambda x: read(outside, x))
        assert f(ts.tensor(1.0)).item() == 1.0
        change(outside, 2.0)
        assert f(ts.tensor(1.0)).item() == 2.0


for name in ROWS:
    _is_read_anew(name)


@row("an attribute that getattr did not find is set by the function itself")
def _() -> None:
    seen = Empty()

    @ts.jit
    def count(x: ts.Tensor) -> ts.Tensor:
        seen.n = getattr(seen, "n", 0) + 1  # type: ignore[attr-defined]
        return x * seen.n  # type: ignore[attr-defined]

    assert [count(ts.tensor(1.0)).item() for _ in range(3)] == [1.0, 2.0, 3.0]
    assert seen.n == 3  # type: ignore[attr-defined]


@row("a property that a text names does not run where settings are looked at")
def _() -> None:
    class Lazy:
        runs = 0

        @property
        def k(self) -> float:
            Lazy.runs += 1
            return 2.0

    lazy = Lazy()
    f = ts.jit(lambda x: x * (getattr(lazy, "k", 1.0)))
    assert f(ts.tensor(1.0)).item() == 2.0
    assert Lazy.runs == 1  # where the function itself reads it


@row("a step makes a weight by name, and is recorded more than once")
def made_in_a_step() -> None:
    mesh, plan = dist.Mesh(("dp",), devices=4), dist.strategy("data_parallel")

    @graph.training_step(strategy=plan)
    def step(x: ts.Tensor) -> Any:
        w = dist.tensor((4, 2), name="w", mesh=mesh)
        loss = ((x @ w) ** 2).mean()
        return graph.backward(loss), loss

    for rows in (8, 8, 16):
        x = np.ones((rows, 4), np.float32)
        slopes, loss = step(dist.place(x, plan, mesh, kind="batch"))
        w = step.parameters["w"].numpy()
        np.testing.assert_allclose(loss.item(), ((x @ w) ** 2).mean(), rtol=1e-5)
        np.testing.assert_allclose(slopes["w"].numpy(), x.T @ (x @ w) / rows, rtol=1e-5)
        step.update({"w": step.parameters["w"] * 0.5})


@row("a checkpoint is loaded into the weights of a step")
def loaded_into_a_step() -> None:
    @graph.training_step()
    def step(x: Any) -> Any:
        loss = (op.linear(x, dist.tensor((4, 2), name="w")) ** 2).mean()
        return graph.backward(loss), loss

    x = np.ones((8, 4), np.float32)
    before = step(x)[1].item()
    with tempfile.TemporaryDirectory() as root:
        checkpoint.save("t", step.parameters, root=root, async_io=False)
        step.update({"w": step.parameters["w"] * 0.5})
        assert step(x)[1].item() != before
        mine = {"w": step.parameters["w"] * 1.0}
        checkpoint.load("t", mine, root=root)  # a dict of the user's own sets nothing else
        assert step(x)[1].item() != before
        checkpoint.load("t", step.parameters, root=root)
    assert step(x)[1].item() == before
