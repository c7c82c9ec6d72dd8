"""Batches from samples: dicts, tuples and lists of arrays, stacked; and the rows of them that a
process has.

>>> collate([{"x": [1, 2], "label": 0}, {"x": [3, 4], "label": 1}])
{'x': array([[1, 2],
       [3, 4]]), 'label': array([0, 1])}
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..core.checks import shown
from ..core.errors import UsageError
from ..lang.value.host_data import host_view, is_host_array, lent
from ..lang.value.tensor import Tensor

Leaf = NDArray[Any] | list[Any]


@dataclass(frozen=True, slots=True)
class Local:
    """The rows of this process of an array with `size` rows; numbers and texts have size 0."""

    rows: Any
    size: int


def mapped(fn: Callable[[Any], Any], tree: Any) -> Any:
    """`tree` with `fn` of each leaf: dicts, tuples, named ones too, and lists of arrays or of dicts
    are nodes."""
    if isinstance(tree, Mapping):
        return {key: mapped(fn, value) for key, value in tree.items()}
    if _is_node(tree):
        return _like(tree, [mapped(fn, value) for value in tree])
    return fn(tree)


def _is_node(x: Any) -> bool:
    """Returns whether `x` is a tuple, or a list of arrays or dicts and not of numbers or texts."""
    if not isinstance(x, list):
        return isinstance(x, tuple)
    return any(
        _is_node(y)
        if isinstance(y, list)
        else isinstance(y, (Mapping, Local)) or getattr(y, "ndim", 0)
        for y in x
    )


def _like(node: Any, parts: list[Any]) -> Any:
    return type(node)(*parts) if hasattr(node, "_fields") else type(node)(parts)


def collate(samples: Sequence[Any], at: str = "a sample") -> Any:
    """One tree of the samples' trees. Numbers, lists of numbers and arrays are stacked in a new
    dim 0; texts are in a list. Raises UsageError if samples differ in their shapes or names."""
    first = samples[0]
    if isinstance(first, Mapping):
        _alike(samples, lambda s: sorted(map(str, s)) if isinstance(s, Mapping) else None, at)
        return {key: collate([s[key] for s in samples], f"{at}[{key!r}]") for key in first}
    if _is_node(first):
        _alike(samples, lambda s: len(s) if _is_node(s) else None, at)
        columns = enumerate(zip(*samples, strict=True))
        return _like(first, [collate(of, f"{at}[{i}]") for i, of in columns])
    arrays = [as_leaf(s, at) for s in samples]
    if isinstance(arrays[0], list):
        return list(samples)
    _alike(arrays, lambda a: None if isinstance(a, list) else a.shape, at)
    return np.stack(arrays)


def _alike(samples: Sequence[Any], fact: Callable[[Any], Any], at: str) -> None:
    want = fact(samples[0])
    for sample in samples:
        if fact(sample) != want:
            raise UsageError(
                f"dataloader: the samples of a batch differ in {at}",
                rows=[("one", want), ("another", fact(sample) or shown(sample))],
                fix="give collate_fn=, a function from a list of samples to a batch, which can pad"
                " them",
            )


def as_leaf(x: object, at: str) -> Leaf:
    """`x` as a NumPy array, or in a list if it is text. Raises UsageError for other values."""
    if isinstance(x, Tensor):
        return x.numpy()
    if isinstance(x, (str, bytes)):
        return [x]
    if is_host_array(x) and not isinstance(x, np.ndarray):
        return lent(x, "dataloader")
    try:
        found = np.asarray(x)
    except ValueError:  # lists of different lengths
        found = np.asarray(None)
    if found.dtype.kind in "US":
        return [x]
    if found.dtype.kind in "OmM":
        raise UsageError(
            f"dataloader: {at} cannot be {shown(x)}",
            fix="give numbers, arrays, lists of numbers of one length, texts, and dicts and tuples"
            " of these; collate_fn= can make them of other samples",
        )
    return found


def whole(batch: Any, rows: Callable[[int], NDArray[np.int64]]) -> Any:
    """The rows of this process of a batch that it has made whole: `rows` gives their numbers."""

    def cut(x: Any) -> Local:
        leaf = as_leaf(x, "a batch")
        if isinstance(leaf, list):  # texts: those in a list belong to rows
            return Local([x[i] for i in rows(len(x))] if isinstance(x, list) else x, 0)
        leaf = plain(leaf)
        return Local(leaf[rows(len(leaf))], len(leaf)) if leaf.ndim else Local(leaf, 0)

    return mapped(cut, batch)


def part(batch: Any, size: int, most: int) -> Any:
    """At most `most` rows, all those of this process, of a batch of `size` rows."""
    return mapped(
        lambda x: Local(x[:most] if isinstance(x, list) else plain(x)[:most], size), batch
    )


def plain(x: NDArray[Any]) -> NDArray[Any]:
    """`x` in the dtype of its tensor: numbers of 64 bits in 32. Raises DTypeError if they do not
    fit."""
    view, want = host_view(x, None, "dataloader")
    return view.astype(want.numpy, copy=False)
