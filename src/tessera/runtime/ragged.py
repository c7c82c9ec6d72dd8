"""Ragged products on one device: rows in runs, each run with its own matrix.

On a CPU a loop over the runs multiplies the rows of each, a tile at a time: only the last tile of a
run, a small one, has masked rows. A GPU would wait for the trip count of each loop; there rows are
laid out in blocks, each of one run, and all blocks are one batched product.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from ..core.dtypes import DType, f32

Array = Any
Contract = Callable[[Sequence[str], str, Sequence[Array], DType], Array]
# Rows of a tile, at least and at most: a product of fewer rows takes longer per row. A run has
# about TILES full tiles of the large size; the other rows are in tiles of the least size.
LEAST, MOST, TILES = 64, 512, 4


def ragged_dot(
    contract: Contract, x: Array, w: Array, counts: Array, transposed: bool, dtype: DType
) -> Array:
    """Returns row r of run e of x [a, j, r, d] times w [j, e, d, h], or its transpose if
    `transposed`; zeros for rows in no run of `counts` [a, j, e]."""
    matrix = "hd" if transposed else "dh"
    ways = [functools.partial(f, contract, matrix, dtype) for f in (dot_by_tiles, dot_in_blocks)]

    def each(*args: Array) -> Array:
        return lax.platform_dependent(*args, cpu=ways[0], default=ways[1])

    across, down = (range(n) for n in counts.shape[:2])
    made = [jnp.stack([each(x[a, j], w[j], counts[a, j]) for j in down]) for a in across]
    return jnp.stack(made)


def ragged_contract(contract: Contract, x: Array, y: Array, counts: Array, dtype: DType) -> Array:
    """Returns for each run e the product [j, e, d, h] of its rows in x [a, j, r, d], transposed,
    with its rows in y [a, j, r, h]."""
    ways = [functools.partial(f, contract) for f in (contract_by_tiles, contract_in_blocks)]

    def each(*args: Array) -> Array:
        return lax.platform_dependent(*args, cpu=ways[0], default=ways[1])

    across, down = (range(n) for n in counts.shape[:2])
    made = [jnp.stack([each(x[a, j], y[a, j], counts[a, j]) for j in down]) for a in across]
    return functools.reduce(operator.add, made).astype(dtype.numpy)


# -- by tiles -------------------------------------------------------------------------------------
def dot_by_tiles(
    contract: Contract, matrix: str, dtype: DType, x: Array, w: Array, counts: Array
) -> Array:
    """Returns x [r, d] in runs times w [e, d, h], whose dims d and h are in the order of
    `matrix`."""
    sizes = len(x), len(counts)

    def run(out: Array, now: tuple[Array, Array, Array]) -> tuple[Array, None]:
        w, start, count = now

        def tile(out: Array, cut: Callable[[Array], Array], first: Array, mine: Array) -> Array:
            y = contract(("rd", matrix), "rh", (cut(x), w), dtype)
            y = y if mine is None else jnp.where(mine, y, cut(out))
            return lax.dynamic_update_slice_in_dim(out, y, first, 0)

        return _by_tiles(tile, out, start, count, *sizes), None

    zeros = _zeros((len(x), w.shape[matrix.index("h") + 1]), dtype.numpy, x)
    return lax.scan(run, zeros, (w, jnp.cumsum(counts) - counts, counts))[0]


def contract_by_tiles(contract: Contract, x: Array, y: Array, counts: Array) -> Array:
    """Returns xᵀ y [e, d, h] of each run, accumulated in f32."""
    sizes = len(x), len(counts)
    thin, wide = (x, y) if x.shape[1] <= y.shape[1] else (y, x)  # faster in this order

    def run(_: None, now: tuple[Array, Array]) -> tuple[None, Array]:
        def tile(total: Array, cut: Callable[[Array], Array], _: Array, mine: Array) -> Array:
            rows = [cut(v) if mine is None else jnp.where(mine, cut(v), 0) for v in (thin, wide)]
            return total + contract(("rm", "rn"), "mn", rows, f32)

        zeros = jnp.zeros((thin.shape[1], wide.shape[1]), jnp.float32)
        return None, _by_tiles(tile, zeros, *now, *sizes)

    made = lax.scan(run, None, (jnp.cumsum(counts) - counts, counts))[1]
    return made if thin is x else jnp.swapaxes(made, 1, 2)


def _by_tiles(
    step: Callable[..., Array], carry: Array, start: Array, count: Array, rows: int, runs: int
) -> Array:
    """Returns the carry after `step(carry, cut, first, mine)` for each tile of the `count` rows
    from `start` on; there are `rows` rows in `runs` runs.

    `cut` slices the tile out of an array, `first` is its first row, and `mine` masks the rows that
    are in the run and were in no tile before (None: all). Full large tiles come first, then small
    ones.
    """
    even = 1 << (rows // (TILES * runs)).bit_length()
    large, end = min(max(LEAST, even), MOST, rows), start + count
    small = min(LEAST, large)

    def run_loop(size: int, start: Array, count: Array, whole: bool, carry: Array) -> Array:
        def tile_step(now: tuple[Array, Array]) -> tuple[Array, Array]:
            n, carry = now
            begin = start + n * size
            first = begin if whole else jnp.minimum(begin, rows - size)

            def cut(x: Array) -> Array:
                return lax.dynamic_slice_in_dim(x, first, size, 0)

            at = first + jnp.arange(size)[:, None]
            mine = None if whole else (at >= begin) & (at < end)
            return n + 1, step(carry, cut, first, mine)

        return lax.while_loop(lambda now: now[0] * size < count, tile_step, (jnp.int32(0), carry))[
            1
        ]

    if small < large:
        full = count // large * large
        carry = run_loop(large, start, full, True, carry)
        start, count = start + full, count - full
    return run_loop(small, start, count, False, carry)


def _zeros(shape: tuple[int, ...], dtype: Any, after: Array) -> Array:
    """Returns zeros that depend on `after`. The engine allocates constant zeros when a program
    begins, and holds them until a loop has written to them."""
    if not after.size:
        return jnp.zeros(shape, dtype)
    first = lax.convert_element_type(after.reshape(-1)[0], jnp.float32)
    bits = lax.bitcast_convert_type(first, jnp.uint32)
    zero = lax.shift_right_logical(lax.shift_right_logical(bits, np.uint32(31)), np.uint32(1))
    return jnp.broadcast_to(zero.astype(dtype), shape)


# -- in blocks ------------------------------------------------------------------------------------
def dot_in_blocks(
    contract: Contract, matrix: str, dtype: DType, x: Array, w: Array, counts: Array
) -> Array:
    """As `dot_by_tiles`."""
    of, rows, places = _blocks(counts, len(x))
    y = contract(("nrd", f"n{matrix}"), "nrh", (_at(x, rows), w[of]), dtype)
    # A gather, not a scatter into zeros: the engine allocates all zeros of a program when it
    # begins, and their memory is needed until each has been written to.
    return _at(y.reshape(-1, y.shape[-1]), places)


def contract_in_blocks(contract: Contract, x: Array, y: Array, counts: Array) -> Array:
    """As `contract_by_tiles`."""
    of, rows, _ = _blocks(counts, len(x))
    each = contract(("nrd", "nrh"), "ndh", (_at(x, rows), _at(y, rows)), f32)
    mine = (of[:, None] == jnp.arange(len(counts))).astype(each.dtype)
    return contract(("ne", "ndh"), "edh", (mine, each), f32)


def _blocks(counts: Array, rows: int) -> tuple[Array, Array, Array]:
    """Returns (the run of each block, its rows, the place of each row among all blocks). A block is
    filled up with row number `rows`, which is out of range; a row in no run has an out-of-range
    place."""
    runs = len(counts)
    size = max(8, -(-rows // (2 * runs)))
    needs = (counts + (size - 1)) // size
    ends, stops = jnp.cumsum(needs), jnp.cumsum(counts)
    starts, firsts = stops - counts, ends - needs  # rows, blocks
    n, r = jnp.arange(-(-rows // size) + runs), jnp.arange(rows)
    of, run = (
        jnp.minimum(jnp.sum(i[:, None] >= x, 1), runs - 1) for i, x in ((n, ends), (r, stops))
    )
    at = (starts[of] + (n - firsts[of]) * size)[:, None] + jnp.arange(size)
    at = jnp.where((at < stops[of][:, None]) & (n < ends[-1])[:, None], at, rows)
    places = jnp.where(r < stops[-1], firsts[run] * size + r - starts[run], len(n) * size)
    return of, at, places


def _at(x: Array, rows: Array) -> Array:
    return x.at[rows].get(mode="fill", fill_value=0)
