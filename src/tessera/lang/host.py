"""What may come in from the host? Numbers, nested lists, NumPy, DLPack, arrays of the engine.

It is taken when it is given: whoever fills a buffer again does not change the tensors made of it.
"""

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
    """`value` as a NumPy array of a dtype that we have, in memory that no one else writes into.

    Raises DTypeError where it would lose.
    """
    x, want = host_view(value, dtype, name)
    if x.dtype == want.numpy and (engine_array(value) or isinstance(value, _COPIED)):
        return x, want
    # Memory of our own, where the engine can use it as it lies: so there is one copy and no more.
    raw = np.empty(x.size * want.numpy.itemsize + ALIGNED, np.uint8)
    at = -raw.ctypes.data % ALIGNED
    made = raw[at : raw.size - ALIGNED + at].view(want.numpy).reshape(x.shape)
    made[...] = x
    return made, want


# What NumPy makes an array of its own from; memory of all else is another's.
_COPIED = (list, tuple, int, float, np.generic)
ALIGNED = 64
"""The engine uses host memory without a copy where its address is a multiple of this."""


def host_view(
    value: object, dtype: object = None, name: str = "tensor"
) -> tuple[np.ndarray[Any, Any], DType]:
    """`value` as NumPy sees it, and the dtype that a tensor of it has. Raises DTypeError."""
    if hasattr(value, "__dlpack__") and not isinstance(value, (np.ndarray, np.generic)):
        value = np.asarray(value) if engine_array(value) else np.from_dlpack(value)
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
    return x, want


# Above this many elements the host forgets what it gave.
REMEMBERED = 1 << 20


def remembered(x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any] | None:
    """A copy of a host array of integers, which may serve as ids; None for others. The array itself
    may be lent to the engine, and become another value's memory."""
    return x.copy() if x.dtype.kind in "iu" and x.size <= REMEMBERED else None
