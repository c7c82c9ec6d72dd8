"""Variables of a compiled function that change between calls, also deep inside objects."""

from __future__ import annotations

import functools
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np

import tessera as ts
from tessera import nn, optim

from .rows import row

X = ts.tensor(1.0)
Case = tuple[Callable[[ts.Tensor], ts.Tensor], Callable[[float], None]]
made: Any = ModuleType("made")
exec("rate = 1.0\ndef scaled(x): return x * rate", made.__dict__)
file: Any = sys.modules[row.__module__]  # a module with a file
file.rate = 1.0


class Base:
    rate = 1.0
    table: dict[str, float] = {"a": 1.0}  # noqa: RUF012


class Trainer(Base):
    def __init__(self) -> None:
        self.scale, self.w, self.n = 1.0, ts.tensor(1.0), 0

    def __call__(self, x: ts.Tensor) -> ts.Tensor:
        return x * self.scale * self.w

    def step(self, x: ts.Tensor) -> ts.Tensor:
        return self(x)

    def shared(self, x: ts.Tensor) -> ts.Tensor:
        return x * self.rate * self.table["a"]

    def count(self, x: ts.Tensor) -> ts.Tensor:
        self.n += 1
        self.w = self.w * 2
        return x * self.n * self.w

    @classmethod
    @ts.jit
    def of_class(cls, x: ts.Tensor) -> ts.Tensor:
        return x * cls.rate * cls.table["a"]


class Slots:
    __slots__ = ("k",)

    def __call__(self, x: ts.Tensor) -> ts.Tensor:
        return x * self.k  # type: ignore[attr-defined,no-any-return]


@dataclass
class Settings:
    k: float
    w: ts.Tensor

    def step(self, x: ts.Tensor) -> ts.Tensor:
        return x * self.k * self.w


class Layer(nn.Module):
    factor = 1.0

    def __call__(self, x: ts.Tensor) -> ts.Tensor:
        return x * self.factor


def product(row: Any, x: ts.Tensor, k: Any = 1.0) -> ts.Tensor:
    return x * row[0] * k


def _sets(holder: Any, *names: str) -> Callable[[float], None]:
    def change(k: float) -> None:
        for name in names:
            setattr(holder, name, ts.tensor(k) if name == "w" else k)

    return change


def _method() -> Case:
    t = Trainer()
    return ts.jit(t.step), _sets(t, "scale", "w")


def _called() -> Case:
    t = Trainer()
    return ts.jit(t), _sets(t, "scale")


def _layers() -> Case:
    """Objects in a list; their own methods read the attribute that changes."""
    rows = [Trainer(), Trainer()]
    holder = SimpleNamespace(rows=rows)
    return ts.jit(lambda x: holder.rows[1](holder.rows[0](x))), _sets(rows[1], "scale")


def _partial() -> Case:
    given, more = [1.0], np.ones(())
    f = ts.jit(functools.partial(product, given, k=more))
    return f, lambda k: (given.__setitem__(0, k), more.fill(k))[1]


def _partial_method() -> Case:
    t = Trainer()
    return ts.jit(functools.partial(t.step)), _sets(t, "scale")


def _defaults() -> Case:
    first, second = [1.0], SimpleNamespace(k=1.0)

    def inner(x: ts.Tensor, second: Any = second) -> ts.Tensor:
        return x * second.k  # type: ignore[no-any-return]

    def f(x: ts.Tensor, *, first: Any = first) -> ts.Tensor:
        return inner(x) * first[0]

    return ts.jit(f), lambda k: (first.__setitem__(0, k), setattr(second, "k", k))[1]


def _slots() -> Case:
    f = Slots()
    f.k = 1.0  # type: ignore[attr-defined]
    return ts.jit(f), _sets(f, "k")


def _settings() -> Case:
    s = Settings(1.0, ts.tensor(1.0))
    return ts.jit(s.step), _sets(s, "k", "w")


def _number() -> Case:
    s = Settings(1.0, ts.tensor(1.0))
    return ts.jit(s.step), _sets(s, "k")


def _argument() -> Case:
    f = ts.jit(lambda x, kind: x * kind.rate)
    return lambda x: f(x, Base), _sets(Base, "rate")


def _table(k: float) -> None:
    Base.rate, Base.table["a"] = k, k


READ_AGAIN: dict[str, Callable[[], Case]] = {
    "the object of a method": _method,
    "an object that is called": _called,
    "the object of a method in a partial": _partial_method,
    "a dataclass with a method": _settings,
    "a number of a dataclass with a method": _number,
}
CONSTANT: dict[str, Callable[[], Case]] = {
    "an object in a list": _layers,
    "the arguments of a partial": _partial,
    "default arguments": _defaults,
    "the slots of an object": _slots,
    "a class that is given": _argument,
    "a class": lambda: (ts.jit(lambda x: x * Base.rate * Base.table["a"]), _table),
    "the class of an object": lambda: (ts.jit(Trainer().shared), _table),
    "a decorated class method": lambda: (Trainer.of_class, _table),
    "the class of a module": lambda: (ts.jit(nn.Sequential(Layer())), _sets(Layer, "factor")),
    "a module of Python": lambda: (ts.jit(lambda x: x * file.rate), _sets(file, "rate")),
    "a function in a module": lambda: (ts.jit(lambda x: made.scaled(x)), _sets(made, "rate")),
}


def _changed(kind: str, name: str, make: Callable[[], Case], want: tuple[float, ...]) -> None:
    @row(f"numbers in {name}, which change after a compiled function has used them: {kind}")
    def call() -> None:
        f, change = make()
        try:
            assert f(X).item() == 1.0
            change(2.0)
            assert f(X).item() in want
        finally:
            Base.rate, Base.table["a"], Layer.factor, file.rate, made.rate = 1.0, 1.0, 1.0, 1.0, 1.0


for name, make in READ_AGAIN.items():
    _changed("read again", name, make, (2.0, 4.0))  # one factor or both
for name, make in CONSTANT.items():
    _changed("constants, as documented", name, make, (1.0,))


@row("a compiled method of a plain object counts, and sets a tensor")
def counted() -> None:
    ours, theirs = Trainer(), Trainer()
    step = ts.jit(ours.count)
    with warnings.catch_warnings():  # each value of a counter gives a new recording, with a warning
        warnings.simplefilter("ignore", ts.TraceWarning)
        for _ in range(3):
            assert step(X).item() == theirs.count(X).item()
    assert ours.n == theirs.n
    assert ours.w.item() == theirs.w.item()


@row("an object whose __init__ names what a loop changes, and a step that does not read it")
def unread() -> None:
    class Task:
        def __init__(self) -> None:
            self.losses: list[float] = []
            self.loss, self.done = None, 0
            self.step = ts.jit(self.of(ts.tensor([2.0])))

        def of(self, w: ts.Tensor) -> Any:
            return lambda x: x * w * self.scale

        scale = 3.0

        def train(self) -> None:
            self.loss = self.step(X)
            self.done += 1
            self.losses.append(self.loss.item())

    task = Task()
    for _ in range(4):
        task.train()
    assert task.losses == [6.0] * 4 and len(task.step.programs) == 1


class Whole:
    """A user's trainer that holds all of its state."""

    def __init__(self) -> None:
        ts.seed(0)
        self.model = nn.Linear(4, 3)
        self.opt = optim.AdamW(0.01)
        self.state = self.opt.init(self.model)
        self.pair = ts.tensor(0.0), ts.tensor(1.0)
        self.log: dict[str, Any] = {"loss": ts.tensor(0.0), "n": 0, "all": [ts.tensor(0.0)]}

    def step(self, x: Any, y: Any) -> ts.Tensor:
        loss = nn.cross_entropy(self.model(x), y)
        slopes = ts.grad(loss, self.model)
        new, self.state = self.opt.update(self.model, slopes, self.state)
        self.model.load_parameters(new)
        self.pair = self.pair[0] + loss, self.pair[1] * 2.0
        self.log = {"loss": loss, "n": 3, "all": [self.log["all"][0] + loss]}
        return loss

    def update(self, x: Any, y: Any) -> ts.Tensor:
        loss = nn.cross_entropy(self.model(x), y)
        new, state = self.opt.update(self.model, ts.grad(loss, self.model), self.state)
        self.model.load_parameters(new)
        self.state.update(state)
        return loss


@row("a trainer that holds its optimizer's state, a pair of tensors and a log")
def _() -> None:
    for name in ("step", "update"):
        seen = []
        for compiled in (False, True):
            method = getattr(Whole, name)
            kind = type("Whole", (Whole,), {name: ts.jit(method) if compiled else method})
            t = kind()
            for i in range(4):
                rng = np.random.default_rng(i)
                getattr(t, name)(rng.normal(size=(8, 4)), rng.integers(0, 3, 8))
            moments = t.opt.state_dict(t.state)
            seen.append([*moments.values(), *t.pair, t.log["loss"], *t.log["all"]])
            assert type(t.pair) is tuple and t.log["n"] == (3 if name == "step" else 0)
        assert seen[1][0].item() == 4
        for a, b in zip(*seen, strict=True):
            np.testing.assert_allclose(a.numpy(), b.numpy(), rtol=1e-4, atol=1e-7)


@row("state of tensors in a container deep inside an object")
def _() -> None:
    class Box:
        pass

    def counts() -> list[float]:
        top = Box()
        top.a = SimpleNamespace(b=Box())  # type: ignore[attr-defined]
        top.a.b.st = {"m": {"w": ts.tensor(0.0)}}  # type: ignore[attr-defined]

        @ts.jit
        def step() -> Any:
            now = top.a.b.st["m"]["w"] + 1.0  # type: ignore[attr-defined]
            top.a.b.st = {"m": {"w": now}}  # type: ignore[attr-defined]
            return now

        return [step().item() for _ in range(3)]

    assert counts() == [1.0, 2.0, 3.0]


READS: dict[str, Callable[[ts.Tensor], Any]] = {
    "numpy": lambda w: w.numpy(), "array": np.asarray, "jax": lambda w: w.jax(),
    "a list": lambda w: w.tolist() if hasattr(w, "tolist") else w.numpy().tolist(),
    "one element": lambda w: float(w[0]),
}  # fmt: skip

for name, read in READS.items():

    @row(f"a weight from outside that is read whole while a function is recorded: {name}")
    def _(read: Any = read) -> None:
        layer, held = nn.Linear(2, 2), {"w": ts.tensor([2.0, 2.0])}
        layer.bias = held["w"]
        by_name = ts.jit(lambda x: x * read(held["w"]))
        by_layer = ts.jit(lambda x: x * read(layer.bias))
        for value in (2.0, 5.0):
            held["w"] = ts.tensor([value, value])
            layer.bias = held["w"]
            for run in (by_name, by_layer):
                np.testing.assert_array_equal(run(ts.ones(2)).numpy(), [value, value])
