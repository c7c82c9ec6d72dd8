"""Element types and layouts: TT-NN's `DataType` and `Layout`.

bfloat8_b and bfloat4_b are block floating point: 16 neighbours in a row of a tile share an
exponent, and each has a sign and 7 or 3 bits. They are rounded as Tenstorrent's host code does it:
numbers below the largest of the block are shifted down first, which drops bits, and the rest
is rounded to the nearest, ties to even. Their values are held as bf16, which has all of them.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ..core.dtypes import DType, bf16, f32, int32, largest, uint8, uint32
from ..lang.math import functions as F
from ..lang.math.bitwise import bitcast
from ..lang.value.tensor import Tensor as Value
from .configs import Member
from .errors import wrong

BLOCK = 16  # elements that share an exponent


class DataType(Member):
    """The element types of TT-NN, with the form in which their values are held here."""

    BFLOAT16 = ("bfloat16", bf16)
    FLOAT32 = ("float32", f32)
    UINT32 = ("uint32", uint32)
    BFLOAT8_B = ("bfloat8_b", bf16)
    BFLOAT4_B = ("bfloat4_b", bf16)
    UINT8 = ("uint8", uint8)
    UINT16 = ("uint16", uint32)
    INT32 = ("int32", int32)

    @property
    def held(self) -> DType:
        """The dtype of the array that holds the values."""
        return self.value[1]

    @property
    def is_float(self) -> bool:
        return self.held.is_float

    @property
    def bits(self) -> int:
        """The bits of an element's sign and mantissa, if it shares its exponent; else 0."""
        return {DataType.BFLOAT8_B: 7, DataType.BFLOAT4_B: 3}.get(self, 0)


class Layout(Member):
    """The order of elements in a device's memory: by rows, or in tiles of 32 x 32.

    Results do not depend on it: the padding to whole tiles is never seen.
    """

    ROW_MAJOR = 0
    TILE = 1


# What NumPy's and PyTorch's dtypes become where nothing is said.
BY_NUMPY = {
    "bfloat16": DataType.BFLOAT16,
    "float16": DataType.BFLOAT16,
    "float32": DataType.FLOAT32,
    "float64": DataType.FLOAT32,
    "uint8": DataType.UINT8,
    "int8": DataType.INT32,
    "bool": DataType.UINT8,
    "uint16": DataType.UINT16,
    "int16": DataType.INT32,
    "int32": DataType.INT32,
    "uint32": DataType.UINT32,
    "int64": DataType.INT32,
}


def check_numbers(name: str, array: np.ndarray[Any, Any], dtype: DataType) -> None:
    """Raises TTNNError if `dtype` lacks a number of the array's: one out of its bounds, or with a
    fraction where it is of whole numbers.

    Floats may be rounded. All their types have the exponents of float32; its largest numbers, which
    masks are made of, become infinite as bfloat16.
    """
    if array.dtype.kind not in "iubfV":  # V: those of ml_dtypes
        raise wrong(
            f"{name}: an array of {array.dtype} has no real numbers",
            fix="give whole numbers or floats; of complex numbers tensor.real, or tensor.imag",
        )
    if not array.size:
        return
    if dtype.is_float:
        if array.dtype.kind != "f" or array.dtype.itemsize <= f32.numpy.itemsize:
            return  # whole numbers are far below
        most = np.max(np.abs(array), where=np.isfinite(array), initial=0)
        if most > largest(f32):
            raise wrong(
                f"{name}: {dtype} has the numbers up to {largest(f32):.4g}",
                [("data", f"up to {most:.4g}")],
                fix="scale the data, or bring them into the bounds",
            )
        return
    bounds = np.iinfo(dtype.name.lower())
    least, most = array.min(), array.max()
    if not (bounds.min <= least and most <= bounds.max):
        raise wrong(
            f"{name}: {dtype} has the numbers from {bounds.min} to {bounds.max}",
            [("data", f"from {least} to {most}")],
            fix="name a wider type, ttnn.int32 or ttnn.float32, or bring the data into the bounds",
        )
    if array.dtype.kind not in "iub" and (parted := array != np.trunc(array)).any():
        raise wrong(
            f"{name}: {dtype} has whole numbers alone",
            [("data", array[parted][0])],
            fix="round them first (torch.round, torch.trunc), or name a type of floats",
        )


def rounded(array: np.ndarray[Any, Any], dtype: DataType) -> np.ndarray[Any, Any]:
    """`array` on the host as `dtype` has it, in the form that holds it.

    Whole numbers keep their lowest bits, as on the device; floats lose their fractions.
    """
    if dtype.bits:
        return _host_blocks(array.astype(np.float32), dtype.bits).astype(dtype.held.numpy)
    if dtype.is_float:
        return array.astype(dtype.held.numpy)
    if array.dtype.kind not in "iub":
        array = np.nan_to_num(array.astype(np.float64))
        array = np.clip(array, -(2.0**62), 2.0**62).astype(np.int64)
    if dtype is DataType.UINT16:
        array = array.astype(np.int64) & 0xFFFF
    return array.astype(dtype.held.numpy)


def stored(value: Value, dtype: DataType) -> Value:
    """`value` on the devices as `dtype` has it: the same, elementwise, as `rounded`."""
    if dtype.bits:
        return _device_blocks(value.to(f32), dtype.bits).to(dtype.held)
    if dtype.is_float or not value.dtype.is_float:
        found = value
    elif dtype is DataType.UINT32:  # the upper half of its range is not in int32
        half = value >= 2.0**31
        found = F.where(half, value - 2.0**31, value).to(int32).to(uint32)
        found = found + (half.to(uint32) << 31)
    else:
        found = value.to(int32)
    mask = {DataType.UINT8: 0xFF, DataType.UINT16: 0xFFFF}.get(dtype)
    return (found if mask is None else found & mask).to(dtype.held)


def _host_blocks(x: np.ndarray[Any, Any], bits: int) -> np.ndarray[Any, Any]:
    if x.size == 0 or x.ndim == 0:
        return x
    full = np.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, -x.shape[-1] % BLOCK)])
    found: np.ndarray[Any, Any] = _blocks(
        np, full, bits, lambda v, t: v.view(t.numpy), lambda v, t: v.astype(t.numpy)
    )[..., : x.shape[-1]]
    return found


def _device_blocks(x: Value, bits: int) -> Value:
    if x.size == 0 or x.ndim == 0:
        return x
    full = F.pad(x, (0, pad)) if (pad := -x.shape[-1] % BLOCK) else x
    found: Value = _blocks(F, full, bits, bitcast, lambda v, t: v.to(t))[..., : x.shape[-1]]
    return found


def _blocks(xp: Any, x: Any, bits: int, bitcast: Any, cast: Any) -> Any:
    """`x` in blocks of `bits`, by the functions of `xp`: NumPy for tensors of the host, which are
    made before any device is there, or Tessera's."""
    rows = x.reshape(*x.shape[:-1], -1, BLOCK)
    word = bitcast(rows, int32)
    exponent = (word >> 23) & 0xFF
    shared = xp.max(exponent, -1, keepdims=True)
    # A zero has no leading one, and no bits at all.
    mantissa = cast(xp.where(rows == 0.0, 0, (word & 0x7FFFFF) | (1 << 23)), int32)
    mantissa = mantissa >> xp.minimum(shared - exponent, 31)
    cut = 24 - bits
    remainder, rounded = mantissa & ((1 << cut) - 1), mantissa >> cut
    half = 1 << (cut - 1)
    up = (remainder > half) | ((remainder == half) & ((rounded & 1) == 1))
    rounded = xp.minimum(rounded + cast(up, int32), (1 << bits) - 1)
    # 2 to the power of the shared exponent, in two factors that are both normal numbers.
    e = shared - 126 - bits
    one, other = e >> 1, e - (e >> 1)
    out = cast(rounded, f32) * bitcast((one + 127) << 23, f32) * bitcast((other + 127) << 23, f32)
    out = xp.where(word < 0, -out, out)
    return xp.where(xp.isfinite(rows), out, rows).reshape(x.shape)


__all__ = [
    "DataType", "Layout",
]  # fmt: skip
