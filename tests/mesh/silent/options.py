"""Does what a user asks for by word, number or pattern happen, and is what cannot happen said?"""

from __future__ import annotations

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
