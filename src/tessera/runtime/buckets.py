"""Several tensors, one collective: a bucket of sums goes as one flat buffer."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp

from ..ir.graph.node import Graph, Node
from ..ir.schedule.schedule import Step
from . import xp_jax
from .algorithms import by_algorithm

Array = Any


def run_bucket(
    step: Step, values: Sequence[Array], run: Callable[[Graph, Sequence[Array]], list[Array]]
) -> list[Array]:
    """The results of a step of several collectives; `run` is for those that do not go together."""
    nodes = step.nodes
    env = dict(zip(step.graph.inputs, values, strict=True))
    kinds = {n.op for n in nodes}
    if kinds == {"all_reduce"}:
        found = _reduced(nodes, [env[n.args[0]] for n in nodes])
    elif kinds == {"reduce_scatter"} and all(map(_plain, nodes)):
        found = _scattered(nodes, [env[n.args[0]] for n in nodes])
    else:
        return run(step.graph, values)
    made = dict(zip(nodes, found, strict=True))
    return [made[o] for o in step.graph.outputs]


def _reduced(nodes: Sequence[Node], xs: Sequence[Array]) -> list[Array]:
    axes = nodes[0].attrs["axes"]
    kind = dict(nodes[0].args[0].type.partial)[axes[0]]
    flat = _xp(nodes).all_reduce(jnp.concatenate([x.reshape(-1) for x in xs]), axes, kind)
    return [part.reshape(x.shape) for part, x in zip(_apart(flat, xs), xs, strict=True)]


def _xp(nodes: Sequence[Node]) -> Any:
    """The array functions for a bucket, whose collectives have one algorithm."""
    name = nodes[0].attrs.get("algorithm")
    return by_algorithm(name) if name else xp_jax


def _plain(n: Node) -> bool:
    """Whether the split digit is the first of its dim, in equal parts."""
    t, axes, dim = n.type, n.attrs["axes"], n.attrs["to_dim"]
    run = t.digits(dim)
    first = [a for d in run[: len(axes)] for a in d.axes]
    return first == list(axes) and not any(d.uneven for d in run)


def _scattered(nodes: Sequence[Node], xs: Sequence[Array]) -> list[Array]:
    axes = nodes[0].attrs["axes"]
    n = math.prod(nodes[0].type.sizes[a] for a in axes)
    rows = [jnp.moveaxis(x, m.attrs["to_dim"], 0).reshape(n, -1) for x, m in zip(xs, nodes)]
    flat = _xp(nodes).reduce_scatter(jnp.concatenate(rows, 1), axes, 0).reshape(-1)
    out = []
    for part, x, m in zip(_apart(flat, rows, n), xs, nodes, strict=True):
        d = m.attrs["to_dim"]
        shape = (x.shape[d] // n, *x.shape[:d], *x.shape[d + 1 :])
        out.append(jnp.moveaxis(part.reshape(shape), 0, d))
    return out


def _apart(flat: Array, xs: Sequence[Array], n: int = 1) -> list[Array]:
    """The parts of `flat` that belong to each of `xs`, whose sizes are `n` times theirs."""
    parts, at = [], 0
    for x in xs:
        size = x.size // n
        parts.append(flat[at : at + size])
        at += size
    return parts
