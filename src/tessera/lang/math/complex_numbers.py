"""Complex numbers: `complex`, their parts, `conj` and `angle`.

>>> import tessera as ts
>>> z = ts.complex(ts.tensor([3.0, 0.0]), ts.tensor([4.0, 1.0]))
>>> z.dtype, ts.abs(z).numpy().tolist(), z.conj().imag.numpy().tolist()
(c64, [5.0, 1.0], [-4.0, -1.0])
"""

from __future__ import annotations

from ..record.operands import as_tensor, emit, matched
from ..value.tensor import Like, Tensor, method
from .constants import zeros_like
from .elementwise import wide
from .trigonometry import atan2


def complex(real: Like, imag: Like) -> Tensor:
    """`real + 1j * imag`, elementwise: complex128 of two f64, else complex64. Raises DTypeError if
    one is complex already."""
    x, y = matched("complex", real, imag)
    return emit("complex", wide(x), wide(y))


@method("_real")
def real(x: Like) -> Tensor:
    """The real part of `x`, elementwise; of a real tensor, itself."""
    t = as_tensor(x)
    return emit("real", t) if t.dtype.is_complex else t


@method("_imag")
def imag(x: Like) -> Tensor:
    """The imaginary part of `x`, elementwise; of a real tensor, zeros."""
    t = as_tensor(x)
    return emit("imag", t) if t.dtype.is_complex else zeros_like(t)


@method("conj")
def conj(x: Like) -> Tensor:
    """The complex conjugate of `x`, elementwise; of a real tensor, itself."""
    t = as_tensor(x)
    return emit("conj", t) if t.dtype.is_complex else t


def angle(x: Like) -> Tensor:
    """The angle of each complex number in radians, from -pi to pi; 0 or pi for real numbers."""
    return atan2(imag(x), real(x))
