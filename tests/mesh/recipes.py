"""Small models of recipes: weights and state, a batch, and training steps."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np

import tessera as ts
from tessera import dist
from tessera.train import recipe

Tree = dict[str, Any]
SMALL: Tree = {
    "vocab_size": 32, "hidden_size": 16, "num_layers": 1, "num_heads": 2, "sequence_length": 8,
    "batch_size": 4, "learning_rate": 1e-2, "total_steps": 100, "weight_decay": 0.0,
}  # fmt: skip
BLOCK = "blocks.block."


def batch(rows: int = 4, seed: int = 0) -> Tree:
    ids = np.random.default_rng(seed).integers(0, 32, (rows, 8)).astype(np.int32)
    return {"input_ids": ids, "labels": np.roll(ids, -1, 1)}


def begun(**keys: Any) -> tuple[Tree, Tree, Tree]:
    """Returns (config, weights, optimizer state)."""
    c = SMALL | keys
    weights = recipe.initialize_model_weights(c)
    return c, weights, recipe.initialize_optimizer_state(weights, c)


def trained(steps: int, **keys: Any) -> tuple[list[float], Tree, Tree]:
    c, weights, state = begun(**keys)
    step = recipe.make_step(c)
    losses = []
    for _ in range(steps):
        loss, weights, state = step(batch(), weights, state)
        losses.append(loss.item())
    return losses, weights, state


def shape(name: str, **keys: Any) -> tuple[int, ...] | None:
    found = recipe.initialize_model_weights(SMALL | keys).get(name)
    return None if found is None else found.shape


def toy(grad: float = 0.5, steps: int = 1, **keys: Any) -> tuple[float, Tree]:
    """Returns (the one weight, 2 at first, after steps with a constant gradient; the state)."""
    c = SMALL | {"learning_rate": 0.1, "schedule": "constant"} | keys
    weights: Tree = {"w": ts.full((2, 2), 2.0)}
    state = recipe.initialize_optimizer_state(weights, c)
    for _ in range(steps):
        weights, state = recipe.optimizer_step(weights, {"w": ts.full((2, 2), grad)}, state, c)
    return weights["w"].numpy()[0, 0].item(), state


def grads_of(**keys: Any) -> tuple[float, Tree]:
    c, weights, state = begun(**keys)
    loss, grads, _ = ts.jit(recipe.gradients_of)(recipe.make_model(c), batch(), weights, state, c)
    return loss.item(), {name: g.numpy() for name, g in grads.items()}


def sums(step: Any, weights: Tree, *args: Any) -> Counter[tuple[str, str, int]]:
    """Counts the gradient sums over devices that have as many elements as a weight matrix."""
    matrices = {t.size for t in weights.values() if t.size > 128}
    schedule = step.plan(*args)
    return Counter(
        {
            (n.op, n.args[0].type.dtype.name, n.args[0].type.size): times
            for n, times in schedule.graph.collectives()
            if n.op in ("all_reduce", "reduce_scatter") and n.args[0].type.size in matrices
        }
    )


def stepped(stage: int, mesh: dist.Mesh, **keys: Any) -> tuple[Any, Tree, Tree, Tree]:
    """Returns (a step, its batch, weights and state) for eight rows under ZeRO at `stage`."""
    c = SMALL | {"batch_size": 8, "accumulation_steps": 4, **keys}
    plan = dist.strategy("zero_redundancy_optimizer", stage=stage)
    weights = dist.place(recipe.initialize_model_weights(c), plan, mesh)
    state = recipe.initialize_optimizer_state(weights, c, plan)
    step = recipe.make_step(c)
    return step, dist.place(batch(8), plan, mesh, kind="batch"), weights, state
