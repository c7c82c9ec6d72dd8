"""Weights of a training step: created by name, and loaded from a checkpoint."""

from __future__ import annotations

import tempfile
from typing import Any

import numpy as np

import tessera as ts
from tessera import checkpoint, dist, graph, op

from .rows import row


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
        checkpoint.load("t", mine, root=root)  # a load into the user's own dict sets nothing else
        assert step(x)[1].item() != before
        checkpoint.load("t", step.parameters, root=root)
    assert step(x)[1].item() == before


@row("a step trains a global of dist.tensor, which other functions read")
def trained_global() -> None:
    w = dist.tensor((4, 2))

    @graph.training_step()
    def step(x: ts.Tensor) -> Any:
        loss = ((x @ w) ** 2).mean()
        return graph.backward(loss), loss

    def evaluated(x: ts.Tensor) -> ts.Tensor:
        return ((x @ w) ** 2).mean()

    compiled = ts.jit(evaluated)
    for rows in (8, 8, 6, 8):
        x = ts.ones((rows, 4))
        before = compiled(x).item()
        slopes, loss = step(x)
        assert loss.item() == before == evaluated(x).item()
        step.parameters = {k: v - 0.1 * slopes[k] for k, v in step.parameters.items()}
        assert compiled(x).item() < before and w.shape == (4, 2)
    w = ts.zeros((4, 2))
    assert step(ts.ones((8, 4)))[1].item() == 0.0
