"""Are element types values with one name, and does everything else that names them map to them?"""

from __future__ import annotations

import pickle

import ml_dtypes
import numpy as np
import pytest

from tessera.core.dtypes import (
    ALL,
    bf16,
    bool_,
    dtype_of,
    f16,
    f32,
    held_as,
    int8,
    int32,
    promote,
    uint8,
    uint32,
)
from tessera.core.errors import DTypeError


@pytest.mark.parametrize("dtype", ALL, ids=str)
def test_a_dtype_is_its_name(dtype: object) -> None:
    found = dtype_of(dtype)
    assert found is dtype
    assert dtype_of(found.name) is found and dtype_of(found.numpy) is found
    assert pickle.loads(pickle.dumps(found)) is found
    assert repr(found) == found.name
    assert found.bytes == found.numpy.itemsize
    assert found.is_float + found.is_int + (found is bool_) == 1


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        (float, f32), (int, int32), (bool, bool_), ("bfloat16", bf16), (np.bool_, bool_),
        (ml_dtypes.bfloat16, bf16), ("half", f16), (np.uint8, uint8), (np.dtype("uint32"), uint32),
    ],
)  # fmt: skip
def test_other_names(name: object, dtype: object) -> None:
    assert dtype_of(name) is dtype


@pytest.mark.parametrize(
    ("name", "nearest"),
    [("float64", f32), (np.int64, int32), (np.dtype("uint16"), int32), (np.uint64, uint32)],
)
def test_what_is_asked_for_is_not_narrowed(name: object, nearest: object) -> None:
    """Data of 64 bits are, where nobody says what they shall be."""
    assert held_as(np.dtype(name)) is nearest  # type: ignore[call-overload]
    with pytest.raises(DTypeError, match=f"there is none: the nearest is {nearest}"):
        dtype_of(name)


@pytest.mark.parametrize("name", ["complex64", "q8", object(), np.complex128, None])
def test_what_is_no_dtype(name: object) -> None:
    with pytest.raises(DTypeError, match="is not known"):
        dtype_of(name)


def test_promotion_is_a_join() -> None:
    for a in ALL:
        assert promote(a, a) is a
        for b in ALL:
            both = promote(a, b)
            assert both is promote(b, a)
            assert both.is_float == (a.is_float or b.is_float)
            assert promote(both, a) is both
    assert promote(f16, bf16) is f32
    assert promote(int8, uint8) is int8
