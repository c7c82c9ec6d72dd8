"""What are a tensor's elements, and in which order do they lie? TT-NN's `DataType` and `Layout`.

bfloat8_b and bfloat4_b are block floating point: 16 neighbours in a row of a tile share an
exponent, and each has a sign and 7 or 3 bits. They are rounded as Tenstorrent's host code does it:
what is smaller than the largest of the block is shifted down first, which drops bits, and the rest
is rounded to the nearest, ties to even. Their values are held as bf16, which has all of them.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ..core.dtypes import DType, bf16, f32, int32, largest, uint8, uint32
from ..lang import functions as F
from ..lang.bits import bitcast
from ..lang.tensor import Tensor as Value
from .configs import Word
from .faults import wrong

BLOCK = 16  # elements that share an exponent


class DataType(Word):
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


class Layout(Word):
    """How elements lie in a device's memory: by rows, or in tiles of 32 x 32.

    Results do not depend on it: what pads a tensor to whole tiles is never seen.
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


def fits(name: str, array: np.ndarray[Any, Any], dtype: DataType) -> None:
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

    Whole numbers keep their lowest bits, as on the device; floats lose what is behind the point.
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
    elif dtype is DataType.UINT32:  # what is above the half of its range is no int32
        half = value >= 2.0**31
        found = F.where(half, value - 2.0**31, value).to(int32).to(uint32)
        found = found + (half.to(uint32) << 31)
    else:
        found = value.to(int32)
    mask = {DataType.UINT8: 0xFF, DataType.UINT16: 0xFFFF}.get(dtype)
    return (found if mask is None else found & mask).to(dtype.held)


# Twice, as tensors of the host are made before any device is there.
def _host_blocks(x: np.ndarray[Any, Any], bits: int) -> np.ndarray[Any, Any]:
    if x.size == 0 or x.ndim == 0:
        return x
    pad = -x.shape[-1] % BLOCK
    rows = np.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, pad)]).reshape(*x.shape[:-1], -1, BLOCK)
    word = rows.view(np.uint32)
    exponent = (word >> np.uint32(23)) & np.uint32(0xFF)
    shared = exponent.max(-1, keepdims=True)
    # A zero has no leading one, and no bits at all.
    mantissa = np.where(rows == 0, 0, (word & np.uint32(0x7FFFFF)) | np.uint32(1 << 23))
    mantissa >>= np.minimum(shared - exponent, 31).astype(mantissa.dtype)
    cut = 24 - bits
    rest, kept = mantissa & ((1 << cut) - 1), mantissa >> cut
    half = 1 << (cut - 1)
    kept = kept + ((rest > half) | ((rest == half) & (kept & 1 == 1)))
    kept = np.minimum(kept, (1 << bits) - 1)
    scale = np.ldexp(np.float32(1), shared.astype(np.int32) - 126 - bits)
    out = np.where(np.signbit(rows), -1, 1) * kept * scale
    out = np.where(np.isfinite(rows), out, rows).astype(np.float32)
    return out.reshape(*x.shape[:-1], -1)[..., : x.shape[-1]]


def _device_blocks(x: Value, bits: int) -> Value:
    if x.size == 0 or x.ndim == 0:
        return x
    width = x.shape[-1]
    if pad := -width % BLOCK:
        x = F.pad(x, (0, pad))
    rows = x.reshape(*x.shape[:-1], -1, BLOCK)
    word = bitcast(rows, int32)
    exponent = (word >> 23) & 0xFF
    shared = F.max(exponent, -1, keepdims=True)
    mantissa = F.where(rows == 0.0, 0, (word & 0x7FFFFF) | (1 << 23))
    mantissa = mantissa >> F.minimum(shared - exponent, 31)
    cut = 24 - bits
    rest, kept = mantissa & ((1 << cut) - 1), mantissa >> cut
    half = 1 << (cut - 1)
    up = (rest > half) | ((rest == half) & ((kept & 1) == 1))
    kept = F.minimum(kept + up.to(int32), (1 << bits) - 1)
    # 2 to the power of the shared exponent, in two factors that are both normal numbers.
    e = shared - 126 - bits
    one, other = e >> 1, e - (e >> 1)
    scale = bitcast((one + 127) << 23, f32), bitcast((other + 127) << 23, f32)
    out = kept.to(f32) * scale[0] * scale[1]
    out = F.where(word < 0, -out, out)
    out = F.where(F.isfinite(rows), out, rows)
    return out.reshape(*x.shape[:-1], -1)[..., :width]


__all__ = [
    "DataType", "Layout",
]  # fmt: skip
