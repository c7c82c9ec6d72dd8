"""Generated programs with modules anywhere, against the same with weights as arguments."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import tessera as ts
from tessera import dist, nn, pipeline
from tests.cases import short

D, ROWS, STEPS, RATE = 4, 8, 5, 0.1
MESH, PIPE = dist.Mesh(("dp",), devices=2), dist.Mesh(("pp",), devices=2)


class Layer(nn.Module):
    """A weight, and a buffer that counts the calls."""

    def __init__(self, w: np.ndarray[Any, Any]) -> None:
        self.w, self.calls = nn.Parameter(ts.tensor(w)), ts.tensor(0.0)

    def __call__(self, x: ts.Tensor) -> ts.Tensor:
        self.calls = self.calls + 1.0
        return ts.tanh(x @ self.w)


class Holder(nn.Module):
    """A module with others as an attribute, in a list and in a dict."""

    def __init__(self, first: Any, second: Any, third: Any) -> None:
        self.first, self.rows, self.names = first, [second], {"third": third}

    def __call__(self, x: ts.Tensor) -> ts.Tensor:
        return apply([self.first, self.rows, self.names], x)


@dataclass
class Pair:
    left: Any
    right: Any


def apply(node: Any, x: ts.Tensor) -> ts.Tensor:
    """Applies `node` to x: a layer, a function, or the members of a container in sequence."""
    if isinstance(node, nn.Module) or callable(node):
        return node(x)  # type: ignore[no-any-return]
    parts = node.values() if isinstance(node, dict) else node
    parts = vars(node).values() if isinstance(node, (Pair, SimpleNamespace)) else parts
    for part in parts:
        x = apply(part, x)
    return x


def around(node: Any) -> Callable[[ts.Tensor], ts.Tensor]:
    return lambda x: apply(node, x)


KINDS: dict[str, Callable[..., Any]] = {
    "list": lambda a, b, c: [a, b, c],
    "dict": lambda a, b, c: {"a": a, "b": [b], "c": c},
    "tuple": lambda a, b, c: (a, (b, c)),
    "dataclass": lambda a, b, c: Pair(a, Pair(b, c)),
    "module": Holder,
    "object": lambda a, b, c: SimpleNamespace(a=a, b=b, c=c),
    "closure": lambda a, b, c: [a, around([b, c])],
    "partial": lambda a, b, c: [functools.partial(apply, [a, b]), c],
}
ARGUMENTS = ("list", "dict", "tuple", "dataclass", "module")
RUNS = (
    "closure",
    "argument",
    "donated",
    "method",
    "two",
    "thread",
    "scan",
    "vmap",
    "zero",
    "pipeline",
)


class Program:
    """Layers in containers, in an order with repetitions, and the kind of step on them."""

    def __init__(self, seed: int) -> None:
        self.draw = np.random.default_rng(seed)
        self.run = RUNS[seed % len(RUNS)]
        self.layers = [Layer(self.weight()) for _ in range(4)]
        self.order = [0, 1, 2, 3, *self.draw.integers(0, 4, 2)]  # some are used several times
        self.draw.shuffle(self.order)
        names = list(ARGUMENTS if self.run in ("argument", "donated", "zero") else KINDS)
        self.kinds = [names[i] for i in self.draw.integers(0, len(names), 2)]
        self.frozen = set(self.draw.integers(0, 8, 1)) & {0, 1, 2, 3}
        for i in self.frozen:
            self.layers[i].freeze()
        stages = [lambda x: self.pure(x, slice(0, 3)), lambda x: self.pure(x, slice(3, None))]
        self.pipe = pipeline.compose(2, stages, mesh=PIPE, microbatches=4)
        if self.run == "zero":
            dist.place(self.tree(), dist.strategy("zero_redundancy_optimizer", stage=3), MESH)

    def weight(self) -> np.ndarray[Any, Any]:
        return self.draw.normal(size=(D, D)).astype(np.float32)

    def tree(self) -> Any:
        """Returns the layers in new containers."""
        a, b, c, d, e, f = (self.layers[i] for i in self.order)
        inner, outer = (KINDS[k] for k in self.kinds)
        return outer(inner(a, b, c), d, [e, f])

    def loss(self, tree: Any, x: ts.Tensor) -> ts.Tensor:
        if self.run == "scan":
            return ts.scan(lambda c, row: (c, self.pure(row[None])[0]), ts.tensor(0.0), x)[1].mean()
        if self.run == "vmap":
            return ts.vmap(lambda row: self.pure(row[None])[0])(x).mean()
        if self.run == "pipeline":
            return self.pipe(x).mean()
        return (apply(tree, x) ** 2).mean()

    def pure(self, x: ts.Tensor, part: slice = slice(None)) -> ts.Tensor:
        """The layers without their call counts, which loop bodies and stages may not set."""
        for i in self.order[part]:
            x = ts.tanh(x @ self.layers[i].w)
        return x**2 if part.stop is None else x

    def step(self, tree: Any, x: ts.Tensor) -> ts.Tensor:
        """Trains the layers in `tree`, which may be those of an argument."""
        loss = self.loss(tree, x)
        found = {id(m): m for m in layers_in(tree)} if self.run in ("argument", "donated") else {}
        mine = list(found.values()) or self.layers
        live = [m for m in mine if m.w.requires_grad]
        slopes = ts.grad(loss, [m.w for m in live])
        for m, g in zip(live, slopes, strict=True):
            m.w = m.w - RATE * g
        return loss


def layers_in(node: Any) -> list[Layer]:
    if isinstance(node, Layer):
        return [node]
    if isinstance(node, (list, tuple)):
        return [m for part in node for m in layers_in(part)]
    inside = node.values() if isinstance(node, dict) else vars(node).values()
    return layers_in([v for v in inside if not isinstance(v, (bool, str))])


def compiled(p: Program) -> Callable[[Any, ts.Tensor], ts.Tensor]:
    """Returns the step, compiled for the program's kind of run."""
    if p.run in ("argument", "donated"):
        return ts.jit(p.step, donate="tree" if p.run == "donated" else None)  # type: ignore[call-overload,no-any-return]
    held = SimpleNamespace(tree=None)

    class Trainer:
        def __init__(self) -> None:
            self.tree: Any = None

        @ts.jit
        def step(self, x: ts.Tensor) -> ts.Tensor:
            return p.step(self.tree, x)

    trainer = Trainer()
    tree: Any = None
    by_name, other = ts.jit(lambda x: p.step(tree, x)), ts.jit(lambda x: p.step(held.tree, x))
    turn = 0

    def call(now: Any, x: ts.Tensor) -> ts.Tensor:
        nonlocal tree, turn
        tree = held.tree = trainer.tree = now
        turn += 1
        run: Any = trainer.step if p.run == "method" else by_name
        run = other if p.run == "two" and turn % 2 else run
        if p.run != "thread":
            return run(x)  # type: ignore[no-any-return]
        out: list[ts.Tensor] = []
        thread = threading.Thread(target=lambda: out.append(run(x)))
        thread.start()
        thread.join(60)
        return out[0]

    return call


@functools.lru_cache(maxsize=4)
def explicit(order: tuple[int, ...], live: tuple[int, ...]) -> Any:
    """Returns the same step with weights and counts as arguments."""

    @ts.jit
    def step(ws: list[ts.Tensor], counts: list[ts.Tensor], x: ts.Tensor) -> Any:
        def loss_of(by: list[ts.Tensor]) -> ts.Tensor:
            every = dict(zip(range(4), ws, strict=True)) | dict(zip(live, by, strict=True))
            y = x
            for i in order:
                y = ts.tanh(y @ every[i])
            return (y**2).mean()

        loss, slopes = ts.value_and_grad(loss_of)([ws[i] for i in live])
        new = list(ws)
        for i, g in zip(live, slopes, strict=True):
            new[i] = ws[i] - RATE * g
        return loss, new, [c + float(order.count(i)) for i, c in enumerate(counts)]

    return step


@pytest.mark.filterwarnings("ignore::tessera.TraceWarning")  # the test needs three recordings
@pytest.mark.parametrize("seed", short(range(120), *range(30)))
def test_a_program_is_that_with_explicit_weights(seed: int) -> None:
    p = Program(seed)
    call, tree = compiled(p), p.tree()
    ws = [ts.tensor(m.w.numpy()) for m in p.layers]
    counts = [ts.tensor(0.0) for _ in ws]
    draw = np.random.default_rng(seed)
    for k in range(STEPS):
        x = draw.normal(size=(ROWS, D)).astype(np.float32)
        at = dist.place(ts.tensor(x), "data_parallel", MESH, kind="batch") if p.run == "zero" else x
        live = tuple(i for i in range(4) if p.layers[i].w.requires_grad)
        want, ws, counts = explicit(tuple(map(int, p.order)), live)(ws, counts, ts.tensor(x))
        got = call(tree, ts.tensor(at))
        np.testing.assert_allclose(got.numpy(), want.numpy(), rtol=1e-5, atol=1e-6)
        i, change = int(draw.integers(4)), k % 4
        if change == 0:  # a weight is set
            w = draw.normal(size=(D, D)).astype(np.float32)
            p.layers[i].w, ws[i] = ts.tensor(w), ts.tensor(w)
        elif change == 1 and p.run not in ("zero",):  # a layer is replaced
            w = draw.normal(size=(D, D)).astype(np.float32)
            p.layers[i] = Layer(w)
            ws[i], counts[i], tree = ts.tensor(w), ts.tensor(0.0), p.tree()
        elif change == 2:  # frozen weights become trainable, others frozen
            p.layers[i].requires_grad_(not p.layers[i].w.requires_grad)
            if not any(m.w.requires_grad for m in p.layers):
                p.layers[0].unfreeze()
    for m, w, c in zip(p.layers, ws, counts, strict=True):
        np.testing.assert_allclose(m.w.numpy(), w.numpy(), rtol=1e-5, atol=1e-6)
        if p.run not in ("scan", "vmap", "pipeline"):
            assert m.calls.item() == c.item()
