"""A recipe's step and its batch: every key is used, or named as unused."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest

import tessera as ts
from tessera import dist
from tessera.train import recipe

Tree = dict[str, Any]
PACKED: Tree = {
    "vocab_size": 64, "hidden_size": 32, "num_layers": 2, "num_heads": 4, "batch_size": 4,
    "sequence_length": 16, "positions": "rotary", "eos_token": 0, "packing": "documents",
    "segment_ids": True, "learning_rate": 0.0,
}  # fmt: skip


def packed() -> tuple[Tree, Tree, Tree]:
    """Returns (config, weights with a visible effect, a batch of packed documents)."""
    draw = np.random.default_rng(0)
    texts = [np.append(draw.integers(1, 50, n), 0) for n in draw.integers(2, 9, 200)]
    config = {**PACKED, "data": np.concatenate(texts)}
    weights = {
        name: ts.tensor((w.numpy() + draw.normal(size=w.shape) * 0.2).astype(np.float32))
        for name, w in recipe.initialize_model_weights(config).items()
    }
    with ts.data.create_dataloader(config) as loader:
        return config, weights, {k: v.numpy() for k, v in next(loader).items()}


def alone(config: Tree, weights: Tree, batch: Tree) -> float:
    """The mean loss of a batch's documents, each computed separately."""
    model, total, count = recipe.make_model(config), 0.0, 0
    for ids, labels, segments in zip(*(batch[k] for k in KEYS), strict=True):
        for k in range(1, segments.max() + 1):
            mine = segments == k
            one = {"input_ids": ids[mine][None], "labels": labels[mine][None]}
            n = int((one["labels"] != -100).sum())
            total, count = total + n * recipe.compute_loss(model, one, weights).item(), count + n
    return total / count


KEYS = ("input_ids", "labels", "segment_ids")


def stepped(config: Tree, weights: Tree, batch: Tree, on: Any = None) -> float:
    given = {name: ts.tensor(w.numpy()) for name, w in weights.items()}
    plan = dist.strategy("zero_redundancy_optimizer", stage=3)
    if on is not None:
        given = dist.place(given, plan, on)
        batch = dist.place(batch, plan, on, kind="batch")
    state = recipe.initialize_optimizer_state(given, config, plan if on is not None else None)
    return float(recipe.make_step(config)(batch, given, state)[0].item())


def test_packed_documents_are_kept_apart() -> None:
    config, weights, batch = packed()
    want = alone(config, weights, batch)
    without = {k: batch[k] for k in ("input_ids", "labels")}
    model = recipe.make_model(config)
    assert abs(recipe.compute_loss(model, without, weights).item() - want) > 0.01
    two = dist.Mesh(("dp",), devices=2)
    for found in (
        recipe.compute_loss(model, batch, weights).item(),
        recipe.compute_loss(recipe.transformer_model, batch, weights).item(),
        stepped(config, weights, batch),
        stepped({**config, "accumulation_steps": 2}, weights, batch),
        stepped({**config, "offload_optimizer_state": True}, weights, batch),
        stepped(config, weights, batch, two),
    ):
        assert found == pytest.approx(want, abs=1e-5)


def test_padding_on_the_left_changes_nothing() -> None:
    config, weights, batch = packed()
    ids = batch["input_ids"]
    labels = np.roll(ids, -1, 1)
    labels[:, -1] = labels[:, :6] = -100
    there = np.ones_like(ids)
    there[:, :6] = 0
    padded = {"input_ids": ids, "labels": labels, "attention_mask": there}
    bare = {"input_ids": ids[:, 6:], "labels": labels[:, 6:]}
    model = recipe.make_model(config)
    want = recipe.compute_loss(model, bare, weights).item()
    assert recipe.compute_loss(model, padded, weights).item() == pytest.approx(want, abs=1e-5)


def own(inputs: Any, weights: Tree) -> ts.Tensor:
    return recipe.transformer_model(inputs, weights)


def own_with_segments(inputs: Any, weights: Tree, segment_ids: Any) -> ts.Tensor:
    return recipe.transformer_model(inputs, weights) * (segment_ids > 0)[..., None]


@pytest.mark.parametrize(
    ("model", "keys", "says"),
    [
        (recipe.transformer_model, ("segment_ids",), ["no argument 'segment_ids'"]),
        (recipe.transformer_model, ("positions", "position_ids"), ["as 'position_ids' too"]),
        (recipe.transformer_model, ("positions", "attention_mask", "segment_ids"),
         ["no argument 'segment_ids'; it has attention_mask, position_ids"]),
        (recipe.transformer_model, ("weight",), ["what the data says of each row"]),
        (own, ("positions", "segment_ids"),
         ["no argument 'position_ids'; it has none of this kind", "no argument 'segment_ids'"]),
        (own_with_segments, ("segment_ids",), []),
        (recipe.transformer_model, ("positions", "segment_ids"), []),
    ],
)  # fmt: skip
def test_a_key_without_effect_is_named(model: Any, keys: tuple[str, ...], says: list[str]) -> None:
    _, weights, batch = packed()
    batch |= {"position_ids": batch["positions"], "weight": np.ones(4)}
    batch |= {"attention_mask": np.ones((4, 16), np.int32)}
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        given = {k: batch[k] for k in ("input_ids", "labels", *keys)}
        recipe.compute_loss(model, given, weights)
    said = [str(w.message) for w in seen if w.category is ts.OptionWarning]
    assert len(said) == len(says), said
    assert all(a in b for a, b in zip(says, said, strict=True)), said


@pytest.mark.parametrize("steps", [1, 2])
def test_a_batch_without_labels_is_an_error(steps: int) -> None:
    config = {**PACKED, "accumulation_steps": steps}
    weights = recipe.initialize_model_weights(config)
    state = recipe.initialize_optimizer_state(weights, config)
    ids = np.ones((4, 16), np.int32)
    step = recipe.make_step(config)
    with pytest.raises(ts.UsageError, match="lacks 'labels'\n  batch : input_ids\n"):
        step({"input_ids": ids}, weights, state)
    with pytest.raises(ts.UsageError, match="lacks 'input_ids' and 'labels'\n  batch : a tuple\n"):
        step((ids, ids), weights, state)  # type: ignore[arg-type]  # that is the point
    with pytest.raises(ts.UsageError, match="compute_loss: the batch lacks 'labels'"):
        recipe.compute_loss(recipe.transformer_model, {"input_ids": ids}, weights)  # type: ignore[dict-item]
