"""Hypothesis strategies for meshes, layouts and values."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from hypothesis import strategies as st

from tessera.core.dtypes import DType, f32
from tessera.core.layout import Dim, Factor, TensorType
from tessera.core.mesh import Mesh

AXES = ("dp", "tp", "ep")


@st.composite
def meshes(draw: st.DrawFn, most: int = 16) -> Mesh:
    """Draws a mesh of one to three axes of size 1 to 4, with at most `most` devices."""
    sizes = draw(
        st.lists(st.integers(1, 4), min_size=1, max_size=3).filter(lambda s: math.prod(s) <= most)
    )
    return Mesh(AXES[: len(sizes)], shape=tuple(sizes))


@st.composite
def layouts(
    draw: st.DrawFn,
    mesh: Mesh,
    shape: Sequence[int],
    dtype: DType = f32,
    partial: bool = True,
) -> TensorType:
    """Draws a layout of `shape`: factored, ordered, uneven, or with partial sums."""
    free = list(draw(st.permutations(mesh.axes)))
    dims: list[Dim] = []
    for size in shape:
        factors = []
        for n in _factors(draw, size):
            taken = draw(st.integers(0, min(2, len(free)))) if draw(st.booleans()) else 0
            factors.append(Factor(n, tuple(free[:taken])))
            del free[:taken]
        dims.append(tuple(factors))
    open_ = [(a, "sum") for a in free if partial and draw(st.integers(0, 2)) == 0]
    return TensorType(dtype, dims, tuple(open_), mesh)


def _factors(draw: st.DrawFn, size: int) -> list[int]:
    """Draws one or two factors of `size`."""
    major = draw(st.sampled_from([d for d in range(1, size + 1) if size % d == 0]))
    return [major, size // major] if 1 < major < size else [size]


def shapes(most: int = 8, rank: int = 3) -> st.SearchStrategy[tuple[int, ...]]:
    return st.lists(st.integers(1, most), min_size=1, max_size=rank).map(tuple)


def numbered(shape: Sequence[int]) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
    """Returns distinct elements, to show misplaced ones, that are small, for exact sums."""
    return np.arange(1, math.prod(shape) + 1, dtype=np.float32).reshape(shape)
