"""How do ops take one more dim in front, as `ts.vmap` gives them? Rules that several ops share
(`Op.batch`).

>>> next_dim("dim")({"dim": 1}, (True,), (), 8).attrs
{'dim': 2}
"""

from __future__ import annotations

from typing import Any

from ..core.layout import TensorType
from .op import Attrs, Batch, Batched


def next_dim(attr: str) -> Batch:
    """The dims that attribute `attr` counts are one further back."""

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
    """It acts on the last dims, whatever stands before them."""
    return Batched(attrs) if all(which) else None


def sizes(**front: int | None) -> Batch:
    """Attributes with a number for each dim get one for the dim in front; None is its size."""

    def rule(
        attrs: Attrs, which: tuple[bool, ...], ins: tuple[TensorType, ...], size: int
    ) -> Batched | None:
        new = {k: (size if n is None else n, *attrs[k]) for k, n in front.items()}
        return Batched({**attrs, **new})

    return rule
