"""An op of Tile IR as a value, and the checks of its operands."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ...core.dtypes import DType, bool_
from ...core.errors import DTypeError, ShapeError, TesseraError
from .index import wrong

Array = Any
Attrs = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Type:
    """The dtype and shape of a value."""

    dtype: DType
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        """The bytes of its elements."""
        return self.size * self.dtype.bytes

    def __repr__(self) -> str:
        return f"{self.dtype}[{', '.join(map(str, self.shape))}]"


Args = Sequence[Type | str]  # types of values, texts of numbers
Rule = Callable[[Args, Attrs, Mapping[str, int]], Type]
Read = Callable[[str], str]


@dataclass(frozen=True, slots=True)
class Call:
    """One execution of an op: all that its computation may read.

    `cast(x, dtype)` and `scalar(text, dtype)` make arrays; `start` is the value of this attribute.
    """

    xp: Any
    out: Type
    attrs: Attrs
    cast: Callable[[Array, DType], Array]
    scalar: Callable[[str, DType], Array]
    start: Array = 0


@dataclass(frozen=True, slots=True)
class TileOp:
    """An op: the number of its operands, the type of its result, its computation, its FLOPs for the
    types of operands and result. `attrs` says how the text of each attribute is read, and its
    default; None: it is required."""

    name: str
    operands: int
    infer: Rule
    compute: Callable[..., Array]
    flops: Callable[[Sequence[Type], Type], int] = lambda ins, out: 0
    attrs: Mapping[str, tuple[Read, str | None]] = field(default_factory=dict)


def number_text(text: str) -> str:
    """A number's text in its one form. Raises GraphError if it is not a number."""
    try:
        return str(int(text))
    except ValueError:
        pass
    try:
        made = repr(float(text))
    except ValueError:
        made = "nan"
    if made == "nan" or "_" in text or not text.isascii():
        fix = "write a value, as in %3, or a number, as in 0.5, 1e-06, -inf"
        raise wrong(f"{text!r} is not a number", fix)
    return made


# ---- checks ------------------------------------------------------------------------------------
def values_of(name: str, args: Args) -> list[Type]:
    """The operands. Raises GraphError if one is a number."""
    types = [a for a in args if isinstance(a, Type)]
    if len(types) < len(args):
        raise wrong(f"{name} takes values, not numbers", "make one with full")
    return types


def dim_of(name: str, t: Type, text: str) -> int:
    """The dim that `text` is. Raises ShapeError if the value lacks it."""
    if text.isdecimal() and int(text) < len(t.shape):
        return int(text)
    fix = f"use a dim from 0 to {len(t.shape) - 1}" if t.shape else "give it a value with dims"
    raise wrong(f"{name}: {t} has no dim {text}", fix, ShapeError)


_CAST, _COMPARE = "cast it, as in: cast %a to=f32", "compare, as in: %c = gt %a 0"
_TAKES: dict[str, tuple[Callable[[DType], bool], str]] = {
    "numbers": (lambda d: d is not bool_, _CAST),
    "floats": (lambda d: d.is_float, _CAST),
    "bools": (lambda d: d is bool_, _COMPARE),
}


def need_kind(name: str, kind: str, dtype: DType) -> None:
    """Raises DTypeError unless the dtype is one of numbers, of floats, or bool, as `kind` says."""
    test, fix = _TAKES[kind]
    if not test(dtype):
        raise wrong(f"{name} takes {kind}, not {dtype}", fix, DTypeError)


def need_number(number: str, dtype: DType) -> None:
    """Raises DTypeError unless the dtype holds the number; floats round it."""
    if dtype.is_float:
        return
    ones = 8 * dtype.bytes - (dtype.kind == "int") if dtype.is_int else 1
    low, high = (-(2**ones) if dtype.kind == "int" else 0), 2**ones - 1
    if not number.lstrip("-").isdecimal() or not low <= int(number) <= high:
        fix = f"write a whole number from {low} to {high}, or give a float dtype"
        raise wrong(f"{number} is not a number of {dtype}", fix, DTypeError)


def one_dtype(name: str, args: Args) -> DType:
    """The dtype of the operands, which numbers have too. Raises DTypeError if there are several."""
    types = [a for a in args if isinstance(a, Type)]
    if not types:
        fix = "make one of them a value: full shape= value=0.5"
        raise wrong(f"{name} of numbers alone has no dtype", fix, DTypeError)
    dtype = types[0].dtype
    if any(t.dtype is not dtype for t in types):
        raise unlike(name, types, f"cast them to one dtype, as in: cast %a to={dtype}", DTypeError)
    for number in args:
        if isinstance(number, str):
            need_number(number, dtype)
    return dtype


def unlike(name: str, types: Sequence[Type], fix: str, error: type[TesseraError]) -> TesseraError:
    """The error that the op does not take these types together."""
    return wrong(f"{name} of {' and '.join(map(str, types))}", fix, error)


def broadcast(name: str, args: Args) -> tuple[int, ...]:
    """The common shape: scalars fit any, and a dim of size 1 any size of the same dim. Raises
    ShapeError if there is none."""
    types = [a for a in args if isinstance(a, Type)]
    shapes = [t.shape for t in types if t.shape]
    if len({len(s) for s in shapes}) <= 1:
        sizes = [{n for n in dim if n != 1} for dim in zip(*shapes, strict=True)]
        if all(len(s) <= 1 for s in sizes):
            return tuple(s.pop() if s else 1 for s in sizes)
    fix = "make shapes equal; row and col make [1, n] and [n, 1] of [n]"
    raise unlike(name, types, fix, ShapeError)
