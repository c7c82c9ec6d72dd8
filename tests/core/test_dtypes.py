"""Dtypes: one name each, promotion, and the names of other libraries."""

from __future__ import annotations

import itertools
import pickle

import ml_dtypes
import numpy as np
import pytest
import torch

from tessera.core.dtypes import (
    ALL,
    DType,
    bf16,
    bool_,
    complex64,
    counts_to,
    dtype_of,
    f16,
    f32,
    fp8_e4m3,
    held_as,
    int8,
    int32,
    int64,
    promote,
    uint8,
    uint32,
    uint64,
)
from tessera.core.errors import DTypeError

# Neither contains the other, and none of our dtypes contains both.
APART = (
    {uint32, int32}, {uint32, int8}, {uint64, int64}, {uint64, int32}, {uint64, int8},
)  # fmt: skip


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
        (torch.bfloat16, bf16), (torch.float, f32), (torch.float8_e4m3fn, fp8_e4m3),
        (torch.bool, bool_),
    ],
)  # fmt: skip
def test_other_names(name: object, dtype: object) -> None:
    assert dtype_of(name) is dtype


@pytest.mark.parametrize(
    ("name", "nearest"),
    [("int16", int32), (np.dtype("uint16"), int32)],
)
def test_what_is_asked_for_is_not_narrowed(name: object, nearest: object) -> None:
    """Data of 16 bits get the nearest dtype, if no dtype is given."""
    assert held_as(np.dtype(name)) is nearest  # type: ignore[call-overload]
    with pytest.raises(DTypeError, match=f"there is none: the nearest is {nearest}"):
        dtype_of(name)


@pytest.mark.parametrize(
    ("name", "nearest"),
    [("float64", f32), (np.int64, int32), (np.uint64, uint32), (np.complex128, complex64)],
)
def test_64_bits_are_kept_where_they_are_asked_for(name: object, nearest: DType) -> None:
    """Data of 64 bits get the dtype of 32 bits, if no dtype is given."""
    assert held_as(np.dtype(name)) is nearest  # type: ignore[call-overload]
    assert dtype_of(name).is_wide and dtype_of(name).kind == nearest.kind


@pytest.mark.parametrize("name", ["q8", object(), "complex256", None])
def test_what_is_no_dtype(name: object) -> None:
    with pytest.raises(DTypeError, match="is not known"):
        dtype_of(name)


def test_promotion_is_a_join() -> None:
    for a in ALL:
        assert promote(a, a) is a
        for b in ALL:
            if {a, b} in APART:
                with pytest.raises(DTypeError, match="add: no dtype holds all values of both"):
                    promote(a, b, "add")
                continue
            both = promote(a, b)
            assert both is promote(b, a)
            assert both.is_float == (a.is_float or b.is_float)
            assert promote(both, a) is both
    assert promote(f16, bf16) is f32


@pytest.mark.parametrize("a", ALL, ids=str)
@pytest.mark.parametrize("b", ALL, ids=str)
def test_what_is_promoted_keeps_its_value(a: DType, b: DType) -> None:
    """Promotion between integers, or between floats, is lossless."""
    if {a, b} in APART or (a.is_float != b.is_float):
        return
    both = promote(a, b)
    for dtype in (a, b):
        info = ml_dtypes.finfo if dtype.is_float else ml_dtypes.iinfo
        limits = info(dtype.real.numpy) if dtype is not bool_ else None
        given = np.array([limits.min, limits.max] if limits else [False, True], dtype.numpy)
        there = given.astype(both.numpy)
        back = there if dtype.is_complex or not both.is_complex else there.real
        assert np.array_equal(back.astype(dtype.numpy), given)


def test_promotion_is_that_of_pytorch() -> None:
    """Equal if PyTorch has both dtypes and the result is one of ours."""
    torch = pytest.importorskip("torch")
    names = {"f32": "float32", "bf16": "bfloat16", "f16": "float16", "i32": "int32", "i8": "int8",
             "u8": "uint8", "bool": "bool", "i64": "int64", "f64": "float64", "c64": "complex64",
             "c128": "complex128"}  # fmt: skip
    theirs = {name: getattr(torch, full) for name, full in names.items()}
    ours = {full: name for name, full in theirs.items()} | {torch.int16: "i32"}  # what we have next
    for a, b in itertools.product(theirs, repeat=2):
        assert (
            promote(dtype_of(a), dtype_of(b)).name
            == ours[torch.promote_types(theirs[a], theirs[b])]
        )


def test_how_far_a_dtype_counts() -> None:
    for dtype in ALL:
        if dtype is bool_:
            continue
        n = counts_to(dtype)
        every = np.arange(min(n, 70_000) + 1)
        assert np.array_equal(every.astype(dtype.numpy).real.astype(np.int64), every)
        if n < 2**24:
            assert int(np.array([n + 1]).astype(dtype.numpy).astype(np.float64)[0]) != n + 1
