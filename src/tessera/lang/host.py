"""What may come in from the host? Numbers, nested lists, NumPy, DLPack, arrays of the engine."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..core.dtypes import BY_NAME, DType, dtype_of
from ..core.errors import DTypeError, ShapeError, fail
from .checks import shown
from .engine import engine


def engine_array(value: object) -> bool:
    """Whether `value` is an array of the engine's; asking must not load the engine."""
    return type(value).__module__.startswith("jax") and engine().is_array(value)


def host_array(
    value: object, dtype: object = None, name: str = "tensor"
) -> tuple[np.ndarray[Any, Any], DType]:
    """`value` as a NumPy array of a dtype that we have. Raises DTypeError where it would lose."""
    if hasattr(value, "__dlpack__") and not isinstance(value, np.ndarray):
        value = np.from_dlpack(value)
    try:
        x = np.asarray(value)
    except ValueError:
        raise fail(
            ShapeError,
            f"{name}: the nested lists are ragged",
            [("data", shown(value))],
            fix="give lists of one length at each depth",
        ) from None
    if not x.size:
        raise fail(
            ShapeError,
            f"{name}: there are no elements in shape {x.shape}",
            fix="every dim has at least one element",
        )
    if x.dtype.kind not in "biuf" and x.dtype.name not in BY_NAME:
        raise fail(
            DTypeError,
            f"{name}: {shown(value)} holds no numbers of a dtype that is known",
            [("NumPy's dtype", x.dtype)],
            fix="give numbers, nested lists of numbers, or an array",
        )
    want = dtype_of(x.dtype if dtype is None else dtype)
    if want.is_int and x.dtype.kind in "iu" and x.size and x.dtype != want.numpy:
        info = np.iinfo(want.numpy.name)
        if x.min() < info.min or x.max() > info.max:
            raise fail(
                DTypeError,
                f"{name}: values from {x.min()} to {x.max()} do not fit {want}",
                fix=f"keep them within {info.min} to {info.max}",
            )
    return x.astype(want.numpy, copy=False), want
