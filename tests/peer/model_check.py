"""Comparison of a model of another library with itself as a module here: on one device, on a mesh,
and in the stages of a pipeline."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

import tessera as ts
from tessera import dist, pipeline

from .zoo import ROWS, Model

MESH = {"dp": 2, "tp": 2}
STAGES = {"pp": 2, **MESH}
LIMIT = 1e-4
RATE = 0.1
Arrays = Mapping[str, Any]


@dataclass(frozen=True)
class Found:
    """Errors relative to the largest element: of the results, of the gradient of the worst
    parameter, of losses, gradients and weights of two steps on the mesh, and of the gradients of a
    pipeline on `STAGES`, or None without one. `known`: whether tensor parallelism knows the names
    of the weights; `parameters`: their elements; `ops`: how many kinds of ops."""

    parameters: int
    ops: int
    forward: float
    gradient: float
    known: bool
    mesh: float
    stages: float | None


@dataclass(frozen=True)
class Beside:
    """A model and its import: inputs by name, `call(ours, inputs)`, the original's result and,
    from the weights of a mean of it, its gradients by name."""

    ours: Any
    inputs: Arrays
    call: Callable[[Any, Arrays], Any]
    want: Any
    gradients: Callable[[Any], Arrays]
    ops: int


# -- the libraries --------------------------------------------------------------------------------
def of_torch(model: Model) -> Beside:
    torch.manual_seed(0)
    peer = model.make().float().train(model.mode == "train")
    with torch.no_grad():
        for p in peer.parameters():  # some start at 0 or 1, and would hide what follows them
            if p.requires_grad:
                p.add_(0.02 * torch.randn(p.shape))
    inputs = model.inputs()
    # Microbatches have fewer rows.
    free = {k: {0: torch.export.Dim.AUTO} for k in inputs} if model.layers else None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ours = ts.from_torch(peer, (), inputs, dynamic_shapes=free)
        want = model.pick(peer(**inputs))

    def gradients(w: Any) -> Arrays:
        (want * torch.from_numpy(w)).mean().backward()
        return {
            n: np.zeros(tuple(p.shape)) if p.grad is None else p.grad.numpy()
            for n, p in peer.named_parameters()
            if p.requires_grad
        }

    program = ours.exports.programs[model.mode == "train"].program
    given = {k: v.numpy() for k, v in inputs.items()}
    ops = len({c.name for c in program.calls})
    pick = model.pick
    return Beside(ours, given, lambda m, x: pick(m(**x)), want.detach().numpy(), gradients, ops)


def of_jax(model: Model) -> Beside:
    import jax
    import jax.numpy as jnp

    from tests.jax_models import gradients_of, started

    peer, inputs = model.make(), model.inputs()
    run, weights, *imported = started(peer, inputs["x"])
    ours = ts.from_jax_model(*imported)
    want = np.asarray(run(weights))

    def gradients(w: Any) -> Arrays:
        return gradients_of(lambda p: jnp.mean(run(p) * w), weights)

    jaxpr = jax.make_jaxpr(run)(weights)
    ops = len({e.primitive.name for e in jaxpr.jaxpr.eqns})
    return Beside(ours, inputs, lambda m, x: m(x["x"]), want, gradients, ops)


# -- errors ---------------------------------------------------------------------------------------
def error(got: Any, want: Any, floor: float = 0.0) -> float:
    """The largest difference, relative to the largest element of `want`, or to `floor` if that is
    larger."""
    x, y = np.asarray(got, np.float64), np.asarray(want, np.float64)
    assert x.shape == y.shape, (x.shape, y.shape)
    largest = max(np.abs(y).max(initial=0.0), floor, 1e-30)
    return float(np.abs(x - y).max(initial=0.0) / largest)


def worst(got: Arrays, want: Arrays) -> float:
    """The largest error of arrays by name. An array of rounding errors alone, such as the gradient
    of a bias before a softmax, counts relative to a hundredth of the largest of all."""
    assert got.keys() == want.keys()
    floor = 1e-2 * max(float(np.abs(y).max(initial=0.0)) for y in want.values())
    return max(error(got[k], want[k], floor) for k in want)


# -- layouts --------------------------------------------------------------------------------------
def largest_split(shape: tuple[int, ...]) -> str:
    """A layout with the largest dim that tp divides split over it."""
    fits = [d for d, n in enumerate(shape) if n % MESH["tp"] == 0]
    at = max(fits, key=lambda d: shape[d], default=None)
    return f"[{', '.join(f'{n}@tp' if d == at else str(n) for d, n in enumerate(shape))}]"


def rows(x: Any) -> str:
    """A layout with the batch split over dp."""
    first = f"{ROWS}@dp" if x.shape[0] == ROWS else str(x.shape[0])
    return f"[{', '.join([first, *map(str, x.shape[1:])])}]"


def split_matrices(model: Any) -> float:
    """The part of the elements of matrices that lies split over tp."""
    matrices = [p for p in model.parameters().values() if p.ndim > 1]
    split = sum(p.size for p in matrices if "@tp" in str(p.type))
    return split / max(sum(p.size for p in matrices), 1)


def lay(model: Any, mesh: Any) -> bool:
    """Lays the weights out for tensor parallelism by their names, or, where those of most matrices
    are not known, each by its largest dim. Returns whether they are known."""
    data = dist.strategy("data_parallel", "dp")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of names that no rule knows
        dist.place(model, data + dist.strategy("tensor_parallel", "tp"), mesh)
    known = split_matrices(model) > 0.5
    if not known:
        dist.place(model, data, mesh)
        for p in model.parameters().values():
            p.put(dist.redistribute(p.now(), largest_split(p.shape)))
    assert split_matrices(model), "tp splits no weight"
    return known


# -- steps ----------------------------------------------------------------------------------------
def updated(model: Any, grads: Any) -> Any:
    return {k: p - RATE * grads[k] for k, p in model.parameters().items() if k in grads}


def step(model: Any, call: Any, w: Any, inputs: Any) -> Any:
    """A step of SGD: (loss, results, gradients); the loss is a weighted mean of the results."""

    def loss(m: Any) -> Any:
        out = call(m, inputs)
        return ts.mean(out * w), out

    (value, out), grads = ts.value_and_grad(loss, has_aux=True)(model)
    model.load_parameters(updated(model, grads))
    return value, out, grads


def host(tensors: Mapping[str, Any]) -> Arrays:
    return {n: t.numpy() for n, t in tensors.items()}


def two_steps(run: Any, model: Any, w: Any, inputs: Any) -> tuple[Any, list[Arrays]]:
    """(the results of the first step, and by name: the state after two steps, each step's gradients
    and loss).

    The gradients of the second step are those of the weights that the first has made; they tell
    small updates apart, which the weights themselves do not."""
    first = run(model, w, inputs)
    second = run(model, w, inputs)
    found = [model.state_dict(), first[2], second[2], {"loss": first[0]}, {"loss": second[0]}]
    return first[1], [host(part) for part in found]


def piped_step(call: Any, names: tuple[str, ...], mesh: Any) -> Any:
    """`step` in two stages, with microbatches of half the batch, without results."""

    def loss(model: Any, w: Any, *inputs: Any) -> Any:
        return ts.mean(call(model, dict(zip(names, inputs, strict=True))) * w)

    piped = pipeline.run(("pp",), "1F1B", 2, mesh=mesh)(loss)

    def run(model: Any, w: Any, inputs: Any) -> Any:
        value, grads = ts.value_and_grad(piped)(model, w, *(inputs[n] for n in names))
        model.load_parameters(updated(model, grads))
        return value, None, grads

    return ts.jit(run)


def check(model: Model) -> Found:
    beside = (of_jax if model.library in ("flax", "equinox") else of_torch)(model)
    ours, inputs = beside.ours, beside.inputs
    # With the signs of the results: a sum that cancels tells nothing.
    w = np.random.default_rng(0).normal(size=beside.want.shape).astype(np.float32)
    w = np.copysign(w, beside.want)
    start = ours.state_dict()
    call = beside.call

    def compiled(mesh: Any = None) -> Any:
        return ts.jit(lambda m, w, x: step(m, call, w, x))

    out, alone = two_steps(compiled(), ours, w, inputs)

    def on(sizes: dict[str, int], run: Callable[[Any], Any]) -> tuple[float, bool]:
        mesh = dist.Mesh(tuple(sizes), shape=sizes)
        ours.load_state_dict(start)
        known = lay(ours, mesh)
        laid = {k: ts.tensor(x, mesh=mesh, layout=rows(x)) for k, x in inputs.items()}
        laid_w = ts.tensor(w, mesh=mesh, layout=rows(w))
        _, spread = two_steps(run(mesh), ours, laid_w, laid)
        return max(worst(got, want) for got, want in zip(spread, alone, strict=True)), known

    apart, known = on(MESH, compiled)
    stages = None
    if model.uncut:
        with pytest.raises(ts.TesseraError, match=model.uncut):
            on(STAGES, lambda mesh: piped_step(call, tuple(inputs), mesh))
    elif model.layers:
        stages = on(STAGES, lambda mesh: piped_step(call, tuple(inputs), mesh))[0]
    return Found(
        sum(p.size for p in ours.parameters().values()),
        beside.ops,
        error(out.numpy(), beside.want),
        worst(alone[1], beside.gradients(w)),
        known,
        apart,
        stages,
    )
