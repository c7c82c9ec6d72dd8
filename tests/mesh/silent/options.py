"""Does what a user asks for by word, number or pattern happen, and is what cannot happen said?"""

from __future__ import annotations

import numpy as np

import tessera as ts
from tests.mesh.silent.rows import row

# -- annotations -----------------------------------------------------------------------------------
FUSED, HEADS = ts.Tensor["D", "3*D_head*H"], ts.Tensor["H", "D_head", "D"]
ROWS, WIDTH = ts.Tensor["B"], ts.Tensor["D"]


@ts.function
def attend(qkv: FUSED, out: HEADS | None = None) -> WIDTH:
    return ts.sum(qkv, 1)


@row("a product of names that nothing else binds", error=ts.ShapeError, says="97, no multiple of 3")
def _() -> None:
    attend(ts.zeros((4, 96)))
    attend(ts.zeros((4, 97)))


@row("a product whose names are bound by a later argument", error=ts.ShapeError, says="not 108")
def _() -> None:
    attend(ts.zeros((4, 96)), ts.zeros((4, 8, 4)))
    attend(ts.zeros((4, 96)), ts.zeros((4, 9, 4)))


@row("a pair of results that is annotated", error=ts.ShapeError, says="result.1 : dim 0 ('B') is 3")
def _() -> None:
    @ts.function
    def halves(x: ROWS) -> tuple[ROWS, ROWS]:
        return x, x[1:]

    halves(ts.zeros(4))


@row("a function that forgets to return", error=ts.ShapeError, says="is a NoneType, not a tensor")
def _() -> None:
    @ts.function
    def lost(x: ROWS) -> ROWS:
        x + 1

    lost(ts.zeros(4))


# -- dtypes ----------------------------------------------------------------------------------------
for asked in ("float64", np.float64, np.int64, "int16"):

    @row(f"a tensor with dtype={asked!r}", error=ts.DTypeError, says="there is none: the nearest")
    def _(asked: object = asked) -> None:
        ts.tensor(np.ones(3), dtype=asked)


@row("x.to(np.float64)", error=ts.DTypeError, says="the nearest is f32")
def _() -> None:
    ts.ones(3).to(np.float64)


@row("float64 data beyond f32", error=ts.DTypeError, says="do not fit f32")
def _() -> None:
    assert ts.tensor(np.array([1.0, np.inf, np.nan])).dtype is ts.f32
    ts.tensor(np.array([np.nan, np.finfo(np.float64).min]))


@row("numbers beyond f16", error=ts.DTypeError, says="full: 70000.0 does not fit f16")
def _() -> None:
    ts.full(3, 70000.0, ts.f16)


@row("NaN as an integer", error=ts.DTypeError, says="values from nan to nan do not fit i32")
def _() -> None:
    ts.tensor([1.0, np.nan], dtype=ts.int32)
