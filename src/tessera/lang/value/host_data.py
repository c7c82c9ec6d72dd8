"""Host data for tensors: numbers, nested lists, NumPy, DLPack, and arrays of the engine.

The values are copied when they are given: a buffer that is filled again later does not change the
tensors made of it.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import numpy as np

from ...core.checks import shown
from ...core.dtypes import (
    BY_NAME,
    DType,
    bf16,
    bool_,
    dtype_of,
    fp8_e4m3,
    fp8_e5m2,
    held_as,
    largest,
)
from ...core.errors import DTypeError, ShapeError, UsageError
from ...core.layout import TensorType
from .deferred_values import Recipe
from .engine import engine
from .tensor import Tensor


def engine_array(value: object) -> bool:
    """Returns whether `value` is an array of the engine. The test must not load the engine."""
    return type(value).__module__.startswith("jax") and engine().is_array(value)


def is_array(value: object) -> bool:
    """Returns whether `value` is an array of the engine, or a host array."""
    return is_host_array(value) or engine_array(value)


def is_host_array(value: object) -> bool:
    """Returns whether `value` is a NumPy array or shares its memory by DLPack, such as a PyTorch
    tensor: others may write into it. A NumPy scalar is not one."""
    lends = hasattr(type(value), "__dlpack__") and not isinstance(value, Tensor)
    return lends and not engine_array(value)


def host_array(
    value: object, dtype: object = None, name: str = "tensor"
) -> tuple[np.ndarray[Any, Any], DType]:
    """Returns (`value` as a NumPy array, its dtype), in memory that no one else writes into.

    Raises DTypeError if `value` does not fit the dtype.
    """
    x, want = host_view(value, dtype, name)
    if x.dtype == want.numpy and (engine_array(value) or isinstance(value, _COPIED)):
        return x, want
    # Aligned memory, which the engine uses in place: so there is only one copy.
    raw = np.empty(x.size * want.numpy.itemsize + ALIGNED, np.uint8)
    at = -raw.ctypes.data % ALIGNED
    made = raw[at : raw.size - ALIGNED + at].view(want.numpy).reshape(x.shape)
    made[...] = x
    return made, want


# NumPy copies these; the memory of any other value is shared.
_COPIED = (list, tuple, int, float, complex, np.generic)
ALIGNED = 64
"""The engine uses host memory without a copy if its address is a multiple of this."""


def host_view(
    value: object, dtype: object = None, name: str = "tensor"
) -> tuple[np.ndarray[Any, Any], DType]:
    """Returns (a NumPy view of `value`, the dtype of a tensor of it). Raises DTypeError if it has
    no numbers of a known dtype, or if they do not fit; ShapeError if nested lists are ragged."""
    if is_array(value) and not isinstance(value, np.ndarray):
        value = np.asarray(value) if engine_array(value) else lent(value, name)
    if isinstance(value, (list, tuple)):
        _need_no_tensors(name, value)
    if isinstance(value, np.ma.MaskedArray) and value.mask.any():
        raise DTypeError(
            f"{name}: some values of the array are masked, and a tensor has no mask",
            masked=f"{int(value.mask.sum())} of {value.size}",
            fix="give x.filled(value), and the mask as a tensor of its own: ~x.mask",
        )
    try:
        try:
            x = np.asarray(value)
        except (TypeError, RuntimeError):  # tensors of PyTorch that it does not give to NumPy
            x = np.asarray(_hosted(value, name))
    except ValueError:
        raise ShapeError(
            f"{name}: the nested lists are ragged",
            data=shown(value),
            fix="give lists of one length at each depth",
        ) from None
    if x.dtype.kind not in "biufc" and x.dtype.name not in BY_NAME:
        raise DTypeError(
            f"{name}: {shown(value)} holds no numbers of a dtype that is known",
            rows=[("NumPy's dtype", x.dtype)],
            fix=f"give one of its values, as in x[{next(iter(value))!r}]"
            if isinstance(value, Mapping) and value
            else "give numbers, nested lists of numbers, or an array",
        )
    want = held_as(x.dtype) if dtype is None else dtype_of(dtype)
    if x.size and x.dtype != want.numpy and want is not bool_:
        _check_range(x, want, name)
    return x, want


def host_recipe(x: np.ndarray[Any, Any]) -> Recipe:
    """A recipe that places a host array. Each use takes a copy, since the engine may reuse the
    memory of an array that it was given."""
    return Recipe(lambda to: engine().place(x.copy(), to), of_host=True)


def unmade(type: TensorType) -> Tensor:
    """Returns a tensor in place of a result that is not computed: NaN, or 0 without a float dtype.
    The values are made at their first use."""
    t = Tensor(None, type)
    value = np.asarray(np.nan if type.dtype.is_float else 0).astype(type.dtype.numpy)
    t.wait(Recipe(lambda to: engine().place(np.full(to.shape, value), to)))
    return t


# The host keeps copies of integer arrays up to this many elements, to check ids.
REMEMBERED = 1 << 20


def remembered(x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any] | None:
    """Returns a copy of a number, or of a host array of integers, which may be ids; None for
    others. The array itself cannot serve, since the engine may reuse its memory."""
    may_be_read = not x.ndim or x.dtype.kind in "iu"
    return x.copy() if may_be_read and x.size <= REMEMBERED else None


def _check_range(x: np.ndarray[Any, Any], want: DType, name: str) -> None:
    """Raises DTypeError if a number of `x` does not fit `want`: it would change, or become
    infinite."""
    if x.dtype.kind == "c":
        if not want.is_complex:
            raise DTypeError(
                f"{name}: complex numbers do not fit {want}",
                fix="give their real or imaginary parts, or name ts.complex64",
            )
        x = np.stack([x.real, x.imag])
    low, high = x.min(), x.max()
    if want.is_float:
        if not (np.isfinite(low) and np.isfinite(high)):  # infinity and NaN fit any float
            finite = x[np.isfinite(x)]
            low, high = (finite.min(), finite.max()) if finite.size else (0, 0)
        top = largest(want)
        with np.errstate(over="ignore"):
            fits = np.isfinite(np.array([low, high]).astype(want.real.numpy)).all()
        least = -top
    else:
        info = np.iinfo(want.numpy.name)
        least, top = info.min, info.max
        fits = low >= least and high <= top
    if not fits:
        raise DTypeError(
            f"{name}: values from {low} to {high} do not fit {want}",
            fix=f"keep them within {least} to {top}",
        )


def lent(value: Any, name: str = "tensor") -> np.ndarray[Any, Any]:
    """Returns a NumPy view of another library's array; of a PyTorch tensor without its gradient.

    Raises UsageError if the host cannot read the memory, DTypeError if the dtype is unknown.
    """
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(value, torch.Tensor):
        try:
            return np.from_dlpack(value)
        except (BufferError, RuntimeError, TypeError, ValueError) as error:
            raise UsageError(
                f"{name}: the memory of this array is not read from here",
                array=f"{type(value).__module__}.{type(value).__name__}",
                says=error,
                fix="copy it to the host, and give a NumPy array",
            ) from None
    dtype, layout = (str(x).removeprefix("torch.") for x in (value.dtype, value.layout))
    for yes, kind, fix in (
        (
            value.device.type == "meta",
            "on the meta device, without values",
            "load its values first",
        ),
        (value.is_nested, "nested", "give x.to_padded_tensor(0.0)"),
        (value.is_quantized, f"quantized, {dtype}", "give x.dequantize()"),
        (layout != "strided", f"sparse, {layout}", "give x.to_dense()"),
    ):
        if yes:
            message = f"{name}: the tensor of PyTorch is {kind}"
            raise UsageError(message, fix=fix)
    x = value.detach().cpu().resolve_conj().resolve_neg()
    narrow = BY_NAME.get(dtype)
    # PyTorch does not export these dtypes to NumPy, but integers of the same width.
    if narrow in (bf16, fp8_e4m3, fp8_e5m2):
        return np.asarray(x.view(torch.int16 if narrow is bf16 else torch.uint8)).view(narrow.numpy)
    try:
        return np.asarray(x)
    except (TypeError, RuntimeError):
        raise DTypeError(
            f"{name}: the tensor of PyTorch is of {dtype}, which is no dtype here",
            fix="convert it: x.float()",
        ) from None


def _hosted(x: Any, name: str) -> Any:
    """Returns nested lists with NumPy views in place of other libraries' arrays."""
    if isinstance(x, (list, tuple)):
        return [_hosted(v, name) for v in x]
    return lent(x, name) if is_array(x) and not isinstance(x, np.ndarray) else x


def _need_no_tensors(name: str, rows: list[Any] | tuple[Any, ...]) -> None:
    for x in rows:
        if isinstance(x, (list, tuple)):
            _need_no_tensors(name, x)
        elif isinstance(x, Tensor):
            raise UsageError(
                f"{name}: a list of tensors is no host data; their gradients would be cut",
                tensor=x.type,
                fix="use ts.stack(list), or ts.concat(list)",
            )
