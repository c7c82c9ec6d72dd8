"""Ambient choices as context managers: `ts.autocast`, `ts.strict`."""

from __future__ import annotations

from contextlib import AbstractContextManager

from ..core.context import Settings, replaced
from ..core.dtypes import bf16, dtype_of
from ..core.errors import DTypeError, fail


def autocast(dtype: object = bf16, enabled: bool = True) -> AbstractContextManager[Settings]:
    """Inside, products of f32 tensors are computed in `dtype`; statistics and losses stay f32.

    Raises DTypeError unless `dtype` is bf16, f16 or f32.
    """
    want = dtype_of(dtype)
    if want.name not in ("bf16", "f16", "f32"):
        raise fail(DTypeError, f"autocast: cannot compute in {want}", fix="use ts.bf16 or ts.f16")
    return replaced(autocast=want.name if enabled and want.name != "f32" else None)


def strict(enabled: bool = True) -> AbstractContextManager[Settings]:
    """Inside, a collective that is not written by hand is an error that shows both layouts."""
    return replaced(strict=enabled)
