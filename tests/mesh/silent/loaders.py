"""Loops over a loader: the batches that a user expects."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

import tessera as ts
from tessera.train.evaluate import mean_loss
from tests.mesh.silent.rows import row


def loader(**more: Any) -> ts.data.TokenLoader:
    config = {"data": np.arange(401), "batch_size": 4, "sequence_length": 8, "prefetch": 0}
    return ts.data.create_dataloader({**config, **more})


def starts(batches: Any, count: int | None = None) -> list[int]:
    """The first token of each of `count` batches in one `for`."""
    return [int(b["input_ids"].numpy()[0, 0]) for b in itertools.islice(batches, count)]


@row("tokens that are arrays of other libraries")
def _() -> None:
    ids = np.arange(401, dtype=np.int32)
    for tokens in (ts.tensor(ids), ts.tensor(ids).jax(), pytest.importorskip("torch").tensor(ids)):
        assert starts(loader(data=tokens)) == starts(loader(data=ids))


@row("a validation loop that ends after a few batches, twice")
def _() -> None:
    held = loader(validation_fraction=0.5).validation()
    first = starts(held, 2)
    assert first == starts(held, 2) == starts(held)[:2]


@row("a loader without shuffling for validation, broken off", warns=ts.data.LoaderWarning,
     says="goes on at sample 8")  # fmt: skip
def _() -> None:
    data = loader(shuffle=False)
    assert starts(data, 2) + starts(data, 2) + starts(data) == [32 * i for i in range(12)]


@row("a second `for` over a loader that has ended", error=ts.UsageError, says="it has ended")
def _() -> None:
    data = loader(epochs=1)
    for _ in range(2):
        starts(data)


@row("the mean loss over validation data whose last batch is filled up")
def _() -> None:
    held = loader(validation_fraction=0.2).validation()
    tokens = np.concatenate([b["labels"].numpy().ravel() for b in held])
    kept = tokens[tokens != -100]
    assert kept.size < tokens.size

    def loss(batch: Any) -> ts.Tensor:  # a mean over the labels that count
        keep = batch["labels"] != -100
        return ts.sum(ts.where(keep, batch["labels"], 0).to("f32")) / ts.sum(keep.to("f32"))

    np.testing.assert_allclose(mean_loss(loss, held), kept.mean(), rtol=1e-6)


@row("another size of a batch in the middle of a run", error=ts.UsageError,
     says="load_state_dict(loader.state_dict())")  # fmt: skip
def _() -> None:
    loader().batch_size = 8
