"""What does an annotation say? `ts.Tensor["B", "S", ts.int32]`: dims to bind, then a dtype."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..core.dtypes import DType
from ..core.errors import UsageError, fail


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """An annotation: `dims` are names, products of names and numbers, or ints; None: any rank."""

    dims: tuple[str | int, ...] | None
    dtype: DType | None

    def __str__(self) -> str:
        items = [*(repr(d) for d in self.dims or ())]
        if self.dtype is not None:
            items.append(f"ts.{self.dtype}")
        return f"Tensor[{', '.join(items)}]"

    __repr__ = __str__

    def mismatches(self, shape: tuple[int, ...], dtype: DType, bound: dict[str, int]) -> list[str]:
        """What does not fit; binds names that are new, in `bound`."""
        wrong = []
        if self.dtype is not None and dtype is not self.dtype:
            wrong.append(f"dtype is {dtype}, not {self.dtype}")
        if self.dims is None:
            return wrong
        if len(shape) != len(self.dims):
            return [*wrong, f"has {len(shape)} dims {shape}, not {len(self.dims)}"]
        for i, (dim, n) in enumerate(zip(self.dims, shape, strict=True)):
            if isinstance(dim, str) and dim.isidentifier():
                have = bound.setdefault(dim, n)
            else:
                value = product(dim, bound)
                if value is None:
                    continue  # names an unbound dim: nothing to hold it against
                have = value
            if have != n:
                wrong.append(f"dim {i} ({dim!r}) is {n}, not {have}")
        return wrong


def product(dim: str | int, bound: Mapping[str, int]) -> int | None:
    """The size that `dim` stands for, e.g. "3*D*H"; None while one of its names is unbound."""
    if isinstance(dim, int):
        return dim
    total = 1
    for part in dim.split("*"):
        word = part.strip()
        if word.isdecimal():
            total *= int(word)
        elif word in bound:
            total *= bound[word]
        else:
            return None
    return total


def spec_of(items: Any) -> TensorSpec:
    """The annotation `Tensor[items]`. Raises UsageError for what is no dim and no dtype."""
    parts = items if isinstance(items, tuple) else (items,)
    dtype = None
    if parts and isinstance(parts[-1], DType):
        dtype, parts = parts[-1], parts[:-1]
    for p in parts:
        words = [w.strip() for w in p.split("*")] if isinstance(p, str) else []
        if isinstance(p, bool) or not (
            isinstance(p, int) or (words and all(w.isidentifier() or w.isdecimal() for w in words))
        ):
            raise fail(
                UsageError,
                f"Tensor[...]: {p!r} is neither a dim nor a dtype",
                fix='write Tensor["B", "S", ts.int32]; a dim is a name, a number or a product',
            )
    return TensorSpec(tuple(parts) if parts or dtype is not None else None, dtype)
