"""A reference mixture of experts: NumPy loops over tokens."""

from __future__ import annotations

from typing import Any

import numpy as np

D, HIDDEN, EXPERTS, K = 16, 24, 8, 2
Array = np.ndarray[Any, np.dtype[Any]]
RNG = np.random.default_rng(7)
X = RNG.normal(size=(8, 12, D)).astype(np.float32)
COTANGENT = RNG.normal(size=X.shape).astype(np.float32)


def drawn(gated: bool = True, shared: bool = True) -> dict[str, Any]:
    def w(*shape: int) -> Array:
        return (RNG.normal(size=shape) / np.sqrt(shape[-2])).astype(np.float32)

    found: dict[str, Any] = {
        "router": w(D, EXPERTS) * 3,
        "up": w(EXPERTS, D, HIDDEN),
        "down": w(EXPERTS, HIDDEN, D),
    }
    if gated:
        found["gate"] = w(EXPERTS, D, HIDDEN)
    if shared:
        found["shared"] = {"up": w(D, HIDDEN), "down": w(HIDDEN, D)}
    return found


def one(x: Array, up: Array, down: Array, gate: Array | None) -> Array:
    """A feed-forward network with ReLU."""
    h = x @ up if gate is None else np.maximum(x @ gate, 0.0) * (x @ up)
    return (np.maximum(h, 0.0) if gate is None else h) @ down


def by_loops(
    x: Array,
    w: dict[str, Any],
    k: int = K,
    router: str = "topk",
    bias: Array | None = None,
    room: int | None = None,
    groups: int = 1,
) -> tuple[Array, Array, int]:
    """Returns (result, tokens per expert, dropped choices) in f64. With `room`, an expert takes at
    most `room` choices of a group, in the order of the tokens."""
    tokens = x.reshape(-1, x.shape[-1]).astype(np.float64)
    logits = tokens @ w["router"].astype(np.float64)
    if router == "topk":
        e = np.exp(logits - logits.max(-1, keepdims=True))
        scores = e / e.sum(-1, keepdims=True)
    else:
        scores = 1.0 / (1.0 + np.exp(-logits))
    seen = scores + (0.0 if bias is None else bias)
    ids = np.argsort(-seen, axis=-1, kind="stable")[:, :k]
    load, dropped = np.bincount(ids.ravel(), minlength=scores.shape[1]), 0
    y = np.zeros_like(tokens)
    taken: dict[tuple[int, int], int] = {}
    for t, chosen in enumerate(ids):
        gates = scores[t, chosen]
        gates = gates / gates.sum() if k > 1 else gates
        for e, gate in zip(chosen, gates, strict=True):
            here = t * groups // len(tokens), int(e)
            if room is not None and taken.get(here, 0) >= room:
                dropped += 1
                continue
            taken[here] = taken.get(here, 0) + 1
            own = w["gate"][e] if "gate" in w else None
            y[t] += gate * one(tokens[t], w["up"][e], w["down"][e], own)
    if "shared" in w:
        # The shared expert has a gate or not, so one expression serves both activations.
        s = w["shared"]
        y += one(tokens, s["up"], s["down"], s.get("gate"))
    return y.reshape(x.shape), load, dropped
