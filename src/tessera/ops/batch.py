"""Batching rules (`Op.batch`) that several ops share: an op with one more leading dim, for
`ts.vmap`.

>>> next_dim("dim")({"dim": 1}, (True,), (), 8).attrs
{'dim': 2}
"""

from __future__ import annotations

from typing import Any

from ..core.layout import TensorType
from .op import Attrs, Batch, Batched


def next_dim(attr: str) -> Batch:
    """A rule that increments the dims in attribute `attr`."""

    def rule(
        attrs: Attrs, which: tuple[bool, ...], ins: tuple[TensorType, ...], size: int
    ) -> Batched | None:
        dims: Any = attrs[attr]
        moved = dims + 1 if isinstance(dims, int) else tuple(d + 1 for d in dims)
        return Batched({**attrs, attr: moved}) if all(which) else None

    return rule


def last_dims(
    attrs: Attrs, which: tuple[bool, ...], ins: tuple[TensorType, ...], size: int
) -> Batched | None:
    """The rule of an op that works on the last dims and accepts any leading dims."""
    return Batched(attrs) if all(which) else None


def sizes(**front: int | None) -> Batch:
    """A rule for attributes with one number per dim: each gets its number for the new leading dim;
    None stands for the size of that dim."""

    def rule(
        attrs: Attrs, which: tuple[bool, ...], ins: tuple[TensorType, ...], size: int
    ) -> Batched | None:
        new = {k: (size if n is None else n, *attrs[k]) for k, n in front.items()}
        return Batched({**attrs, **new})

    return rule
