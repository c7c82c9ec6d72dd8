"""Masked padding in experts: it takes no capacity, counts in no statistics, and changes no other
token.

Compared with the tokens alone, and with transformers.
"""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import tessera as ts
from tessera import dist, nn, op, pipeline
from tests.cases import LONG, grid

RNG = np.random.default_rng(4)
MESH = dist.Mesh(("dp", "ep"), shape={"dp": 2, "ep": 4})
B, S, D, E = 8, 6, 16, 8
X = RNG.normal(size=(B, S, D)).astype(np.float32)
MASK = RNG.integers(0, 2, (B, S)).astype(np.int32)
MASK[:, 0] = 1
MASK[3] = 0  # a sequence of padding alone
W = {
    "router": RNG.normal(size=(D, E)).astype(np.float32),
    "up": RNG.normal(size=(E, D, 12)).astype(np.float32) / 4,
    "down": RNG.normal(size=(E, 12, D)).astype(np.float32) / 4,
}
LAYOUTS: dict[str, tuple[Any, str]] = {
    "one": (None, ""),
    "tokens": (MESH, f"[{B}@(dp,ep), {S}, {D}]"),
    "sequence": (MESH, f"[{B}@dp, {S}, {D}]"),
}


def called(layout: str, weights: Any, mask: Any = MASK, **how: Any) -> Any:
    """Returns (the result, the routing statistics, the gradients) of a call with split experts."""
    mesh, kind = LAYOUTS[layout]
    x = ts.tensor(X) if mesh is None else ts.tensor(X, mesh=mesh, layout=kind)
    split = {} if mesh is None else {"mesh": mesh}

    def run(x: ts.Tensor, weights: Any, mask: Any) -> Any:
        y, routing = op.moe(x, weights, stats=True, mask=mask, **how, **split)
        loss = (y * y).sum() + routing.aux_loss + routing.z_loss
        return y, routing, ts.grad(loss, weights)

    given = {n: ts.tensor(w, name=n) for n, w in weights.items()}
    return ts.jit(run)(x, given, mask)


@pytest.mark.parametrize(("capacity", "layout"), grid([None, 1.0, 0.5], list(LAYOUTS)))
def test_padding_takes_no_room_and_counts_nowhere(capacity: float | None, layout: str) -> None:
    """The reference is a loop over tokens in NumPy."""
    how: dict[str, Any] = {"capacity": capacity, "k": 2, "activation": "relu"}
    y, routing, grads = called(layout, W, **how)
    there = MASK.astype(bool)
    logits = X.astype(np.float64) @ W["router"]
    scores = np.exp(logits - logits.max(-1, keepdims=True))
    scores /= scores.sum(-1, keepdims=True)
    chosen = np.argsort(-scores, -1, kind="stable")[..., :2]
    room = S * 2 if capacity is None else int(np.ceil(capacity * 2 * S / E))
    want, load, dropped = np.zeros(X.shape), np.zeros(E), 0
    for b in range(B):
        taken = np.zeros(E, int)
        for s in range(S):
            gates = scores[b, s, chosen[b, s]] / scores[b, s, chosen[b, s]].sum()
            for e, gate in zip(chosen[b, s], gates, strict=True):
                if not there[b, s]:
                    continue
                load[e] += 1
                if taken[e] == room:
                    dropped += 1
                    continue
                taken[e] += 1
                hidden = np.maximum(X[b, s] @ W["up"][e], 0.0)
                want[b, s] += gate * (hidden @ W["down"][e])
    np.testing.assert_allclose(y.numpy(), want, rtol=0, atol=2e-5)
    assert not y.numpy()[~there].any()
    np.testing.assert_array_equal(routing.load.numpy(), load)
    assert routing.dropped.item() == dropped
    mean = scores[there].mean(0)
    assert abs(routing.aux_loss.item() - E * (load / load.sum() * mean).sum()) < 1e-5
    lse = np.log(np.exp(logits[there]).sum(-1))
    assert abs(routing.z_loss.item() - (lse**2).mean()) < 1e-4
    if layout != "one":
        for g, alone in zip(grads.values(), called("one", W, **how)[2].values(), strict=True):
            np.testing.assert_allclose(g.numpy(), alone.numpy(), rtol=1e-4, atol=1e-4)


def test_a_model_is_balanced_in_training_and_nowhere_else() -> None:
    ids = np.random.default_rng(2).integers(0, 16, (4, 6)).astype(np.int32)
    balanced = {"experts": 4, "balance": "bias", "balance_rate": 0.5, "aux_weight": 0.0}
    ts.seed(0)
    c = nn.GPTConfig(vocab=16, seq=6, d=8, layers=2, heads=2, capacity=None, **balanced)
    model = nn.GPT(c)
    moe = model.blocks.block.moe

    @ts.jit
    def step(model: Any, ids: Any) -> Any:
        loss = model.loss(ids, ids)
        return loss, ts.grad(loss, model)

    first, grads = step(model, ids)
    assert not any("moe.bias" in name for name in grads)
    assert set(np.unique(moe.bias.numpy())) <= {-0.5, 0.0, 0.5} and moe.bias.numpy().any(1).all()
    assert step(model, ids)[0].item() != first.item()  # the balancing changes the choices
    twice = moe.bias.numpy()
    model.prefill(ids, np.full(4, 5, np.int32), 6)
    np.testing.assert_array_equal(moe.bias.numpy(), twice)
    model.eval()
    model.loss(ids, ids)
    np.testing.assert_array_equal(moe.bias.numpy(), twice)
    apart = nn.GPT(replace(c, stacked=False))
    with dist.Mesh(("pp",), devices=2):
        pipe = pipeline.run(("pp",), schedule="1F1B", microbatches=2)(
            lambda model, ids: model.features(ids)
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", pipeline.PipelineWarning)  # of few microbatches
            ts.jit(lambda m, ids: m.loss_of(pipe(m, ids), ids))(apart, ids)
    moved = [x.moe.bias.numpy() for x in apart.blocks.layers]
    assert all(x.any() for x in moved)  # by the load of the whole batch


@LONG
def test_a_mask_of_ones_is_none() -> None:
    for capacity in (None, 0.5):
        ones = called("one", W, np.ones((B, S), bool), capacity=capacity)
        none = called("one", W, None, capacity=capacity)
        np.testing.assert_array_equal(ones[0].numpy(), none[0].numpy())
        np.testing.assert_allclose(ones[1].aux_loss.item(), none[1].aux_loss.item(), rtol=1e-6)


def test_the_balance_of_a_padded_batch_is_that_of_transformers() -> None:
    torch = pytest.importorskip("torch")
    peer = pytest.importorskip("transformers.models.mixtral.modeling_mixtral")
    _, routing, _ = called("one", W, k=2)
    logits = torch.tensor((X @ W["router"]).reshape(-1, E))
    theirs = peer.load_balancing_loss_func((logits,), E, 2, torch.tensor(MASK))
    assert abs(theirs.item() - 2 * routing.aux_loss.item()) < 1e-5  # a sum over both choices


@pytest.mark.parametrize("context", [None, pytest.param("ring", marks=LONG)])
def test_a_model_serves_the_tokens_that_are_there(context: str | None) -> None:
    """The contents of padding change no logit and no loss under a small capacity; nor does padding
    change a prompt's."""
    c = nn.GPTConfig(
        vocab=16, seq=8, d=16, layers=2, heads=2, experts=4, capacity=0.5, context=context
    )
    ts.seed(0)
    mesh = dist.Mesh(("dp", "cp"), shape={"dp": 2, "cp": 2})
    model = nn.GPT(c)
    if context:
        model = dist.place(model, dist.strategy("data_parallel"), mesh)
    mask = (np.arange(8) >= np.array([[0], [5], [3], [2]])).astype(np.int32)
    a, b = (RNG.integers(0, 16, (4, 8)).astype(np.int32) for _ in range(2))
    b = np.where(mask, a, b)
    labels = np.where(mask, a, -100)
    run = ts.jit(lambda model, ids: (model(ids, mask), model.loss(ids, labels, mask)))
    (y, loss), (z, same) = run(model, a), run(model, b)
    seen = mask.astype(bool)
    np.testing.assert_allclose(y.numpy()[seen], z.numpy()[seen], rtol=0, atol=1e-5)
    assert abs(loss.item() - same.item()) < 1e-5
    if context is None:
        first = np.where(np.arange(8) < 3, a, 0), np.where(np.arange(8) < 3, a, 7)
        at = np.full(4, 2, np.int32)
        outs = [model.prefill(ids.astype(np.int32), at, 8)[0].numpy() for ids in first]
        np.testing.assert_allclose(*outs, rtol=0, atol=1e-5)
