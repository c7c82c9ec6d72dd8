"""Checks of tensors' types: rank, shape, dtype, layout."""

from __future__ import annotations

from collections.abc import Sequence

from .errors import DTypeError, ShapeError
from .layout import TensorType


def _operand(argument: str, t: TensorType) -> list[tuple[str, object]]:
    return [(argument.removeprefix("the "), t)]


def ranked(
    name: str, argument: str, t: TensorType, rank: int, fix: str, more: bool = False
) -> None:
    """Raises ShapeError unless `t` has `rank` dims; with `more`, at least as many."""
    if t.rank < rank or (t.rank > rank and not more):
        have = f"{t.rank} dim{'s' * (t.rank != 1)}"
        said = f"{name}: {argument} has {have}, not {rank}{' or more' * more}"
        raise ShapeError(said, rows=_operand(argument, t), fix=fix)


def integers(
    name: str, argument: str, t: TensorType, fix: str = "cast them with .to(ts.int32)"
) -> None:
    """Raises DTypeError unless the dtype of `t` is an integer type."""
    if not t.dtype.is_int:
        raise DTypeError(
            f"{name}: {argument} must be integers", rows=_operand(argument, t), fix=fix
        )


def floats(name: str, argument: str, t: TensorType, fix: str = "cast it with .to(ts.f32)") -> None:
    """Raises DTypeError unless the dtype of `t` is a float type."""
    if not t.dtype.is_float:
        raise DTypeError(f"{name}: {argument} must be floats", rows=_operand(argument, t), fix=fix)


def one_dtype(name: str, ins: Sequence[TensorType], *labels: str) -> None:
    """Raises DTypeError unless all of `ins` have one dtype."""
    if len({t.dtype for t in ins}) > 1:
        operands = zip(labels or [f"arg {i}" for i in range(len(ins))], ins, strict=True)
        fix = "cast one of them with .to(dtype)"
        raise DTypeError(f"{name}: arguments have different dtypes", rows=[*operands], fix=fix)


def shaped(
    name: str, argument: str, t: TensorType, shape: Sequence[int], **operands: TensorType
) -> None:
    """Raises ShapeError unless `t` has `shape`, which follows from `operands`."""
    if t.shape != tuple(shape):
        raise ShapeError(
            f"{name}: {argument} has shape {t.shape}, not {tuple(shape)}",
            rows=[*_operand(argument, t), *operands.items()],
            fix=f"give it the shape {tuple(shape)}",
        )


def alike(
    caller: str, expected: TensorType, actual: TensorType, fix: str, exactly: bool = False
) -> None:
    """Raises ShapeError unless `actual` has the shape of `expected`. Raises DTypeError unless both
    or neither have a float dtype; with `exactly`, unless their dtypes are equal."""
    dtype = expected.dtype is actual.dtype or (
        not exactly and expected.dtype.is_float is actual.dtype.is_float
    )
    if expected.shape == actual.shape and dtype:
        return
    error, what = (ShapeError, "shape") if expected.shape != actual.shape else (DTypeError, "dtype")
    raise error(f"{caller} has another {what}", have=expected, given=actual, fix=fix)
