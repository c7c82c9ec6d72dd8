"""Loaders of numbered samples, and which of them their batches hold."""

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
    """Tokens whose window k of S begins with k * S."""
    return np.arange(count * S + 1, dtype=np.int32)


def loader(count: int = 20, **config: Any) -> Any:
    return create_dataloader(
        {"data": samples(count), "batch_size": 4, "sequence_length": S, **config}
    )


def seen(batches: Any, most: int = 10**6) -> list[list[int]]:
    """Which samples each batch holds; -1 for a row that is filled up."""
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
    """An error's text without the line in which it was raised."""
    with pytest.raises(kind) as caught:
        call()
    lines = [" ".join(x.split()) for x in str(caught.value).splitlines()]
    return "\n".join(x for x in lines if not x.startswith("at : "))
