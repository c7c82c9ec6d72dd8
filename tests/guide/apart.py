"""A reproducible program in a fresh process: `TESSERA_COMM_TRACE=1 python apart.py`.

Section 3.1 of guide 2 on 8 mesh places, run by 8, 2 and 1 devices: a line for each, with the loss
and a hash of the gradients; then the same for trained weights.
"""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np

import tessera as ts
from tessera import dist, op, optim
from tests.guide.reading import in_order

MESH = dist.Mesh(["dp"], devices=range(8))


def inputs() -> tuple[Any, Any, Any]:
    rng = np.random.default_rng(4)
    x, w = (rng.normal(size=s).astype(np.float32) for s in ((48, 33), (33, 7)))
    return x, w, rng.integers(0, 7, 48).astype(np.int32)


def placed(mesh: dist.Mesh) -> tuple[ts.Tensor, ts.Tensor, ts.Tensor]:
    x, w, labels = inputs()
    return (
        ts.tensor(x, mesh=mesh, layout="[48@dp, 33]"),
        ts.tensor(w, mesh=mesh, name="w"),
        ts.tensor(labels, mesh=mesh, layout="[48@dp]"),
    )


def of_the_guide(mesh: dist.Mesh) -> tuple[ts.Tensor, Any]:
    x, w, labels = placed(mesh)
    space = in_order(2, {"out": op.matmul(x, w), "labels": labels}, ("3.1",))
    return space["loss"], space["grads"]["w"]


def trained(mesh: dist.Mesh) -> tuple[ts.Tensor, Any]:
    """Five steps of Adam with its moments split over dp."""
    x, w, labels = placed(mesh)
    adam, plan = optim.AdamW(1e-2), dist.strategy("zero_redundancy_optimizer", "dp", stage=2)
    state = adam.init({"w": w}, plan)

    @ts.jit
    def step(weights: Any, state: Any, x: ts.Tensor, labels: ts.Tensor) -> Any:
        loss = op.cross_entropy(op.matmul(x, weights["w"]), labels)
        new, state = adam.update(weights, ts.grad(loss, weights, layout=plan), state)
        return loss, new, state

    weights: Any = {"w": w}
    for _ in range(5):
        loss, weights, state = step(weights, state, x, labels)
    return loss, weights["w"]


def told(name: str, count: int, loss: ts.Tensor, t: ts.Tensor) -> None:
    print(
        "result", name, count, f"{loss.item():.9g}", hashlib.sha256(t.numpy().tobytes()).hexdigest()
    )


if __name__ == "__main__":
    for count in (8, 2, 1):
        mesh = MESH if count == 8 else MESH.fold(onto=count)
        told("guide", count, *of_the_guide(mesh))
        with dist.deterministic(reduce_tree="binary"):
            told("trained", count, *trained(mesh))
