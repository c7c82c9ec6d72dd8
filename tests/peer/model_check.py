"""Comparison of a model of another library with itself as a module here, on one device and on a
mesh."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

import tessera as ts
from tessera import dist

from .models import ROWS, Model

MESH = {"dp": 2, "tp": 2}
LIMIT = 1e-4
RATE = 0.1


@dataclass(frozen=True)
class Found:
    """Errors relative to the largest element: of the results, of the gradient of the worst
    parameter, of losses, gradients and weights of two steps on the mesh; `ops`: how many kinds of
    ops."""

    ops: int
    forward: float
    gradient: float
    mesh: float


def error(got: Any, want: Any, floor: float = 0.0) -> float:
    """The largest difference, relative to the largest element of `want`, or to `floor` if that is
    larger."""
    x, y = np.asarray(got, np.float64), np.asarray(want, np.float64)
    assert x.shape == y.shape, (x.shape, y.shape)
    largest = max(np.abs(y).max(initial=0.0), floor, 1e-30)
    return float(np.abs(x - y).max(initial=0.0) / largest)


def worst(got: Mapping[str, Any], want: Mapping[str, Any]) -> float:
    """The largest error of arrays by name. An array of rounding errors alone, such as the gradient
    of a bias before a softmax, counts relative to a thousandth of the largest of all."""
    assert got.keys() == want.keys()
    floor = 1e-3 * max(float(np.abs(y).max(initial=0.0)) for y in want.values())
    return max(error(got[k], want[k], floor) for k in want)


def split(shape: tuple[int, ...]) -> str:
    """A layout with the largest dim that tp divides split over it."""
    fits = [d for d, n in enumerate(shape) if n % MESH["tp"] == 0]
    at = max(fits, key=lambda d: shape[d], default=None)
    return f"[{', '.join(f'{n}@tp' if d == at else str(n) for d, n in enumerate(shape))}]"


def rows(x: Any) -> str:
    """A layout with the batch split over dp."""
    first = f"{ROWS}@dp" if x.shape[0] == ROWS else str(x.shape[0])
    return f"[{', '.join([first, *map(str, x.shape[1:])])}]"


def step(model: Any, pick: Any, w: Any, inputs: Any) -> Any:
    """A step of SGD: (loss, results, gradients); the loss is a weighted mean of the results."""

    def loss(m: Any) -> Any:
        out = pick(m(**inputs))
        return ts.mean(out * w), out

    (value, out), grads = ts.value_and_grad(loss, has_aux=True)(model)
    model.load_parameters({k: p - RATE * grads[k] for k, p in model.parameters().items()})
    return value, out, grads


def two_steps(model: Any, pick: Any, w: Any, inputs: Any) -> tuple[Any, list[dict[str, Any]]]:
    """(the first step, and by name: the state after two steps, each step's gradients and loss).

    The gradients of the second step are those of the weights that the first has made; they tell
    small updates apart, which the weights themselves do not."""
    run = ts.jit(step)
    first = run(model, pick, w, inputs)
    second = run(model, pick, w, inputs)
    found = [model.state_dict(), first[2], second[2], {"loss": first[0]}, {"loss": second[0]}]
    return first, [{n: t.numpy() for n, t in part.items()} for part in found]


def check(model: Model) -> Found:
    torch.manual_seed(0)
    peer = model.make().float().train()
    inputs = model.inputs()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ours = ts.from_torch(peer, (), inputs)
        want = model.pick(peer(**inputs))
    w = torch.randn(want.shape)
    (want * w).mean().backward()
    grads = {
        n: np.zeros(tuple(p.shape)) if p.grad is None else p.grad.numpy()
        for n, p in peer.named_parameters()
        if p.requires_grad
    }
    given = {k: v.numpy() for k, v in inputs.items()}
    start = ours.state_dict()
    (_, out, got), alone = two_steps(ours, model.pick, w.numpy(), given)
    forward = error(out.numpy(), want.detach().numpy())
    gradient = worst({n: g.numpy() for n, g in got.items()}, grads)
    mesh = dist.Mesh(tuple(MESH), shape=MESH)
    ours.load_state_dict(start)
    dist.place(ours, dist.strategy("data_parallel", "dp"), mesh)
    for p in ours.parameters().values():
        p.put(dist.redistribute(p.now(), split(p.shape)))
    laid = {k: ts.tensor(x, mesh=mesh, layout=rows(x)) for k, x in given.items()}
    laid_w = ts.tensor(w.numpy(), mesh=mesh, layout=rows(w))
    if not any("@tp" in str(p.type) for p in ours.parameters().values()):
        raise AssertionError("tp splits no weight")
    _, spread = two_steps(ours, model.pick, laid_w, laid)
    program = ours._programs().programs[True].program
    apart = max(worst(got, want) for got, want in zip(spread, alone, strict=True))
    return Found(len({c.name for c in program.calls}), forward, gradient, apart)
