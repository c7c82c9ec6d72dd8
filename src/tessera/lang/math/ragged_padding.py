"""Padding of arguments of varying length, so that a compiled function has a program per size
only."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from inspect import Signature
from typing import Any

import numpy as np

from ...core.checks import shown, unfit
from ...core.declared import Real
from ...core.dtypes import bool_, held_as
from ...core.errors import ShapeError, UsageError
from ...core.value_checks import is_whole
from ..record.operands import as_tensor
from ..value.checks import bound, fitting
from ..value.host_data import is_array
from ..value.tensor import Tensor
from . import functions as F


@dataclass(frozen=True, slots=True)
class Pad:
    """Pads dim `dim` of an argument of `ts.jit(pad=...)` to the smallest of `sizes` that holds it.

    The elements are followed by `value`. The function must ignore this value, so there is no
    default. Examples: the `ignore_index` of a loss, False in a mask, 0 for a sum. Raises UsageError
    if `dim` or `sizes` are not whole numbers, or a size is below 1.

    >>> Pad(dim=1, sizes=(64, 128), value=-100).size_for(70)
    128
    """

    dim: int
    sizes: tuple[int, ...]
    value: Real

    def __post_init__(self) -> None:
        sizes = self.sizes if isinstance(self.sizes, (tuple, list, range)) else ()
        if not is_whole(self.dim) or not sizes or not all(is_whole(n) and n > 0 for n in sizes):
            raise UsageError(
                f"Pad: dim {shown(self.dim)} and sizes {shown(self.sizes)} say nothing",
                fix="name a dim and whole numbers, e.g. Pad(dim=1, sizes=(64, 128, 256), value=0)",
            )
        object.__setattr__(self, "sizes", tuple(sorted(sizes)))

    def size_for(self, length: int) -> int | None:
        """The smallest of the sizes that is at least `length`, or None if all are smaller."""
        return next((n for n in self.sizes if n >= length), None)

    def padded(self, argument: str, x: Any) -> Any:
        """`x` padded to its new size: a NumPy array if `x` is on the host, else a tensor.

        `argument` names the argument in errors. Raises UsageError if `x` is not an array, or is of
        bools while `value` is a number; ShapeError if `x` has no such dim or is longer than all
        sizes; DTypeError if `value` does not fit the dtype of `x`.
        """
        if not isinstance(x, Tensor) and not is_array(x):
            raise UsageError(
                f"jit: {argument} cannot be padded: it is {shown(x)}",
                fix="give an array or a tensor, or name the part: pad={'batch': {'ids': Pad(...)}}",
            )
        dtype = held_as(x.dtype) if isinstance(x, np.ndarray) else as_tensor(x).dtype
        if dtype is bool_ and self.value not in (0, 1):
            raise UsageError(f"jit: {argument} holds truths", fix="pad it with False or True")
        value = fitting("jit", self.value, dtype)
        shape = [*x.shape]
        size = self.size_for(shape[self.dim]) if -len(shape) <= self.dim < len(shape) else None
        if size is None:
            raise ShapeError(
                f"jit: {argument} of shape {tuple(shape)} has no dim {self.dim} that fits the "
                "sizes",
                sizes=self.sizes,
                fix="name the dim that varies, and a size for the longest",
            )
        if size == shape[self.dim]:
            return x
        shape[self.dim] = size - shape[self.dim]
        if isinstance(x, np.ndarray):
            return np.concatenate([x, np.full(shape, value, x.dtype)], self.dim)
        return F.concat([as_tensor(x), F.full(shape, value, dtype)], self.dim)


Pads = Mapping[str, "Pad | Pads"]


def checked(name: str, signature: Signature, pads: Any, donated: frozenset[str]) -> Pads:
    """Returns `pads`. Raises UsageError unless it names arguments that are not donated."""
    if not isinstance(pads, Mapping) or not all(map(_is_pad, pads.values())):
        raise unfit(
            "jit",
            "pad",
            pads,
            "give {'ids': ts.Pad(dim=1, sizes=(64, 128), value=0)}, by the names of arguments",
        )
    for what in pads:
        if what not in signature.parameters or what in donated:
            why = "is donated" if what in donated else "is no argument"
            raise UsageError(
                f"jit: {what!r} of {name} {why}, so it cannot be padded",
                arguments=", ".join(signature.parameters),
                fix="name arguments that are not donated",
            )
    return pads


def count(pads: Pads) -> int:
    """The number of sizes in `pads`."""
    return sum(len(p.sizes) if isinstance(p, Pad) else count(p) for p in pads.values())


def _is_pad(x: Any) -> bool:
    return isinstance(x, Pad) or (isinstance(x, Mapping) and all(map(_is_pad, x.values())))


def called(
    fn: Callable[..., Any], name: str, signature: Signature, pads: Pads, args: Any, kwargs: Any
) -> Any:
    """Calls `fn(*args, **kwargs)` with the arguments in `pads` padded."""
    given = bound(name, signature, args, kwargs)
    copies: list[tuple[Any, dict[Any, Any], dict[Any, Any]]] = []
    for what in pads.keys() & given.arguments.keys():
        given.arguments[what] = _padded(what, given.arguments[what], pads[what], copies)
    out = fn(*given.args, **given.kwargs)
    for old, new, before in copies:  # repeats changes of a copied dict in the caller's dict
        for key in before.keys() - new.keys():
            del old[key]
        old.update((k, v) for k, v in new.items() if k not in before or v is not before[k])
    return out


def _padded(argument: str, x: Any, pads: Pad | Pads, copies: list[Any]) -> Any:
    """Returns the argument `x` padded by `pads`. A dict is copied; `copies` gets (given, copy, copy
    before the call), so that the function's changes can be repeated."""
    if isinstance(pads, Pad):
        return pads.padded(argument, x)
    if not isinstance(x, dict) or not pads.keys() <= x.keys():
        raise UsageError(
            f"jit: {argument} is {shown(x)}",
            fix=f"give a dict with {', '.join(map(repr, pads))}, which pad= names",
        )
    new = x | {k: _padded(f"{argument}[{k!r}]", x[k], p, copies) for k, p in pads.items()}
    copies.append((x, new, dict(new)))
    return new
