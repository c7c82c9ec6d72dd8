"""Numbered samples of a data set: a map-style one, or arrays.

>>> ArraySamples({"x": np.eye(3), "y": np.arange(3)}).batch(np.array([2, 0]))
{'x': array([[0., 0., 1.],
       [1., 0., 0.]]), 'y': array([2, 0])}
"""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ..core.checks import unfit
from ..core.errors import UsageError
from ..lang.value.host_data import is_array
from ..lang.value.tensor import Tensor
from .collate import as_leaf, collate, mapped

_HASHED_ROWS = 256
_HASHED_BYTES = 1 << 24  # arrays up to this size are hashed whole


class Numbered(Protocol):
    """Samples that are read by their numbers."""

    count: int

    def samples(self, which: NDArray[np.int64]) -> list[Any]:
        """The samples `which`, one by one."""

    def batch(self, which: NDArray[np.int64]) -> Any:
        """The samples `which` as a tree of arrays, which they are stacked in."""

    def fingerprint(self) -> str | None:
        """A hash of the samples, or None if that would read them all."""


class MapSamples:
    """The samples of an object with `__len__` and `__getitem__`; its `__getitems__`, which returns
    a list, is called instead if it has one."""

    def __init__(self, dataset: Any) -> None:
        self._dataset, self.count = dataset, len(dataset)

    def samples(self, which: NDArray[np.int64]) -> list[Any]:
        """The samples `which`, one by one."""
        if hasattr(self._dataset, "__getitems__"):
            return list(self._dataset.__getitems__(which.tolist()))
        return [self._dataset[i] for i in which.tolist()]

    def batch(self, which: NDArray[np.int64]) -> Any:
        """The samples `which`, stacked."""
        return collate(self.samples(which))

    def fingerprint(self) -> None:
        """None: reading a sample may be dear."""


class ArraySamples:
    """The rows of an array, or of a dict or tuple of arrays with as many rows each.

    Raises UsageError if their numbers of rows differ, or for other values.
    """

    def __init__(self, tree: Any) -> None:
        rows: dict[str, int] = {}
        self._leaves: list[NDArray[Any]] = []

        def leaf(x: Any) -> NDArray[Any]:
            if not isinstance(x, (Tensor, list)) and not is_array(x):
                raise unfit(
                    "DataLoader", "an array of the data set", x,
                    "give NumPy arrays; of a dict of data sets name one: dataset['train']",
                )  # fmt: skip
            made = as_leaf(x, "an array")
            array = made if isinstance(made, np.ndarray) else np.asarray(x)
            rows[f"array {len(rows)}"] = len(array) if array.ndim else -1
            self._leaves.append(array)
            return array

        self._tree = mapped(leaf, tree)
        if len(set(rows.values())) != 1 or -1 in rows.values():
            raise UsageError(
                "dataloader: the arrays do not have as many rows each",
                rows=[(name, f"{n} rows" if n >= 0 else "a number") for name, n in rows.items()],
                fix="dim 0 of each array counts the samples",
            )
        self.count = rows["array 0"]

    def samples(self, which: NDArray[np.int64]) -> list[Any]:
        """The rows `which`, one by one."""
        return [mapped(operator.itemgetter(i), self._tree) for i in which.tolist()]

    def batch(self, which: NDArray[np.int64]) -> Any:
        """The rows `which`."""

        def rows(x: NDArray[Any]) -> Any:
            return x[which].tolist() if x.dtype.kind in "US" else x[which]

        return mapped(rows, self._tree)

    def fingerprint(self) -> str:
        """A hash of all rows up to 16 MiB, of 256 evenly spread rows of more."""
        h = hashlib.sha256()
        for x in self._leaves:
            h.update(f"{x.dtype.str} {x.shape}".encode())
            if x.nbytes > _HASHED_BYTES:
                x = x[np.linspace(0, len(x) - 1, min(_HASHED_ROWS, len(x))).astype(np.int64)]
            h.update(np.ascontiguousarray(x).tobytes())
        return h.hexdigest()[:16]


def numbered(dataset: Any) -> Numbered | None:
    """The samples of `dataset`, or None if they have no numbers."""
    if isinstance(dataset, (Mapping, tuple, Tensor)) or is_array(dataset):
        return ArraySamples(dataset)
    if hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__"):
        return MapSamples(dataset)
    return None
