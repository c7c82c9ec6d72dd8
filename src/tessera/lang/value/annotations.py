"""Shape annotations such as `ts.Tensor["B", "S", ts.int32]`: dim names to bind, then a dtype.

A dim may be a product of names and numbers. All annotations of a call are equations in the sizes of
the names; the call is valid if whole numbers solve all of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ...core.dtypes import DType, public_name
from ...core.errors import UsageError


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """An annotation: `dims` are names, products of names and numbers, or ints; None: any rank.

    `optional` is True for `ts.Tensor["B"] | None`.
    """

    dims: tuple[str | int, ...] | None
    dtype: DType | None
    optional: bool = False

    def __str__(self) -> str:
        items = [*(repr(d) for d in self.dims or ())]
        if self.dtype is not None:
            items.append(f"ts.{public_name(self.dtype)}")
        return f"Tensor[{', '.join(items)}]" + " | None" * self.optional

    __repr__ = __str__

    def __or__(self, other: object) -> TensorSpec:
        return replace(self, optional=True) if other is None else NotImplemented


@dataclass(slots=True)
class Product:
    """An equation: dim `dim` of the tensor `where`, written `text`, has the size `size`."""

    where: str
    dim: int
    text: str | int
    size: int

    def unbound_factors(self, bound: Mapping[str, int]) -> tuple[int, Counter[str]]:
        """Returns (the product of the numbers and bound names, the unbound names with their
        powers)."""
        known, unknown = 1, Counter[str]()
        for word in map(str.strip, str(self.text).split("*")):
            if word.isdecimal():
                known *= int(word)
            elif word in bound:
                known *= bound[word]
            else:
                unknown[word] += 1
        return known, unknown

    def row(self, why: str) -> tuple[str, str]:
        return self.where, f"dim {self.dim} ({self.text!r}) is {self.size}, {why}"


@dataclass(slots=True)
class Sizes:
    """The dim names of one call: their sizes (`bound`), and a row for each mismatch (`wrong`).

    >>> from tessera.core.dtypes import f32
    >>> sizes = Sizes()
    >>> sizes.see("w", spec_of(("D", "3*D*H")), (4, 96), f32)
    >>> sizes.settle(), sizes.bound, sizes.wrong
    (None, {'D': 4, 'H': 8}, [])
    """

    bound: dict[str, int] = field(default_factory=dict)
    wrong: list[tuple[str, str]] = field(default_factory=list)
    _open: list[Product] = field(default_factory=list)

    def see(self, where: str, spec: TensorSpec, shape: tuple[int, ...], dtype: DType) -> None:
        """Checks the tensor called `where` against `spec`. A single name is bound at once; a
        product waits for `settle`."""
        if spec.dtype is not None and dtype is not spec.dtype:
            self.wrong.append((where, f"dtype is {dtype}, not {spec.dtype}"))
        if spec.dims is None:
            return
        if len(shape) != len(spec.dims):
            self.wrong.append((where, f"has {len(shape)} dims {shape}, not {len(spec.dims)}"))
            return
        for i, (dim, n) in enumerate(zip(spec.dims, shape, strict=True)):
            if isinstance(dim, str) and "*" in dim:
                self._open.append(Product(where, i, dim, n))
                continue
            have = self.bound.setdefault(str(dim), n) if _is_name(dim) else int(dim)
            if have != n:
                self.wrong.append(Product(where, i, dim, n).row(f"not {have}"))

    def settle(self) -> None:
        """Checks the products seen so far, and binds each name that they determine. A product of
        several unbound names stays open, to be checked with the tensors seen later."""
        left, wrong = _settled(self._open, self.bound)
        self.wrong += wrong
        self._open = left
        if left and not wrong and not _solvable(left, self.bound):
            self.wrong += [p.row("which no sizes of the names make") for p in left]
            self._open = []


def _settled(
    products: list[Product], bound: dict[str, int]
) -> tuple[list[Product], list[tuple[str, str]]]:
    """Returns (the products of several unbound names, a row for each of the others that fails).
    Binds the names that one product alone determines."""
    wrong = []
    while True:
        unsettled = []
        for p in products:
            known, unknown = p.unbound_factors(bound)
            if not unknown or not known:
                if known != p.size:
                    wrong.append(p.row(f"not {known}"))
                continue
            if p.size % known:
                wrong.append(p.row(f"no multiple of {known}"))
            elif len(unknown) > 1:
                unsettled.append(p)
            else:
                ((name, power),) = unknown.items()
                root = round((p.size // known) ** (1 / power))
                if known * root**power == p.size:
                    bound[name] = root
                else:
                    wrong.append(p.row("which no size makes"))
        if wrong or len(unsettled) == len(products):
            return unsettled, wrong
        products = unsettled


def _solvable(products: list[Product], bound: Mapping[str, int]) -> bool:
    """Returns whether sizes exist for the unbound names of `products`, each of which has
    several."""
    if not products:
        return True
    first = min(products, key=lambda p: p.size)
    known, unknown = first.unbound_factors(bound)
    name = next(iter(unknown))
    tries = _divisors(first.size // known) if first.size else ()
    options = [{name: n} for n in tries] or [{k: 0} for k in unknown]
    for option in options:
        here = {**bound, **option}
        left, wrong = _settled(products, here)
        if not wrong and _solvable(left, here):
            return True
    return False


def _divisors(n: int) -> Iterator[int]:
    small = [d for d in range(1, int(n**0.5) + 2) if d * d <= n and n % d == 0]
    yield from small
    yield from (n // d for d in reversed(small) if d * d != n)


def _is_name(dim: str | int) -> bool:
    return isinstance(dim, str) and dim.isidentifier()


def spec_of(items: Any) -> TensorSpec:
    """Returns the annotation `Tensor[items]`. Raises UsageError if an item is neither a dim nor a
    dtype."""
    parts = items if isinstance(items, tuple) else (items,)
    dtype = None
    if parts and isinstance(parts[-1], DType):
        dtype, parts = parts[-1], parts[:-1]
    for p in parts:
        words = [w.strip() for w in p.split("*")] if isinstance(p, str) else []
        if isinstance(p, bool) or not (
            isinstance(p, int) or (words and all(w.isidentifier() or w.isdecimal() for w in words))
        ):
            raise UsageError(
                f"Tensor[...]: {p!r} is neither a dim nor a dtype",
                fix='write Tensor["B", "S", ts.int32]; a dim is a name, a number or a product',
            )
    return TensorSpec(tuple(parts) if parts or dtype is not None else None, dtype)
