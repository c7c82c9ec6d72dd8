"""Loaders of numbered samples, and the sample numbers in their batches."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest

import tessera as ts
from tessera.data import (
    create_dataloader,
)

pytestmark = pytest.mark.usefixtures("oracle")

S = 4


def samples(count: int) -> np.ndarray:
    """Returns tokens in which window k of length S begins with k * S."""
    return np.arange(count * S + 1, dtype=np.int32)


def loader(count: int = 20, **config: Any) -> Any:
    return create_dataloader(
        {"data": samples(count), "batch_size": 4, "sequence_length": S, **config}
    )


def seen(batches: Any, most: int = 10**6) -> list[list[int]]:
    """The sample numbers in each batch; -1 for a padded row."""
    found = []
    for batch in itertools.islice(batches, most):
        ids, labels = batch["input_ids"].numpy(), batch["labels"].numpy()
        empty = (labels == -100).all(1)
        assert (labels[~empty] == ids[~empty] + 1).all()
        found.append(np.where(empty, -1, ids[:, 0] // S).tolist())
    return found


def flat(lists: Iterable[list[int]]) -> list[int]:
    return list(itertools.chain.from_iterable(lists))


def text_of(call: Callable[[], Any], kind: type[Exception] = ts.UsageError) -> str:
    """Returns an error's text without the source line at which it was raised."""
    with pytest.raises(kind) as caught:
        call()
    lines = [" ".join(x.split()) for x in str(caught.value).splitlines()]
    return "\n".join(x for x in lines if not x.startswith("at : "))
