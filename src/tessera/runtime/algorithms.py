"""Execution of an algorithm's table of rounds: each round is a few `ppermute`s of chunks.

Called inside `shard_map`. A device's chunks are the rows of one buffer. A round first reads all
rows that it sends; then each exchange (one `ppermute`, in which no rank sends or receives twice)
writes or adds its rows, in the table's order. The row numbers depend on the rank and are looked up
in a constant.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from ..core.dtypes import held_as
from ..core.errors import UsageError
from ..ir.schedule.algorithms.build import PUTS, named
from ..ir.schedule.algorithms.table import Action, Algorithm, Round
from ..ir.tile.kernel import with_sizes
from ..ir.tile.kernels import puts
from ..ir.tile.text import parse
from . import xp_jax
from .cpu.narrow_floats import moved
from .kernels import run_kernel

Array = Any
Axis = str | tuple[str, ...]
Rows = np.ndarray[tuple[int, ...], np.dtype[np.int32]]
# Rows are moved by one slice for each run of consecutive rows; above this many runs, by one gather.
_MOST_RUNS = 16


@dataclass(slots=True)
class _Exchange:
    """Part of a round in which no rank sends or receives twice: `rows` by rank, `count` each."""

    op: Action
    count: int
    pairs: list[tuple[int, int]] = field(default_factory=list)
    reads: dict[int, Sequence[int]] = field(default_factory=dict)
    writes: dict[int, Sequence[int]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _RowMoves:
    """Rounds of exchanges over a buffer of `rows` rows; `spare` rows after them take idle ranks'
    writes. `result` has the rows of the result by rank."""

    rows: int
    spare: int
    rounds: tuple[tuple[_Exchange, ...], ...]
    result: Rows


def run_algorithm(algorithm: Algorithm, x: Array, axis: Axis) -> Array:
    """Returns the result of `algorithm` on this device, from its block `x`, inside `shard_map` over
    `axis`.

    all_reduce and broadcast keep the shape. reduce_scatter returns the n-th part of dim 0,
    all_gather concatenates along dim 0, all_to_all splits and concatenates dim 0: as
    `lax.psum_scatter`, `all_gather` and `all_to_all` with `tiled=True`. Several axes are read major
    to minor. Rows that do not fill whole chunks are padded. Raises UsageError if the axis or dim 0
    does not fit.
    """
    a = algorithm
    size = lax.axis_size(axis)
    if size != a.n:
        raise UsageError(
            f"run_algorithm: the table is for {a.n} ranks, the axis has {size}",
            axis=axis,
            table=a,
            fix=f"build the algorithm for n={size}",
        )
    splits = a.collective in ("reduce_scatter", "all_to_all")
    if splits and (x.ndim == 0 or x.shape[0] % a.n):
        raise UsageError(
            f"run_algorithm: dim 0 of {x.shape} is not {a.n} equal blocks",
            table=a,
            fix=f"pad it to a multiple of {a.n}",
        )
    if a.collective == "all_gather" and x.ndim == 0:
        raise UsageError(
            "run_algorithm: a scalar has no dim 0 to gather along",
            table=a,
            fix="give it a dim of size 1",
        )
    if a.native:
        return _native(a, x, axis)
    if a.n == 1:
        return x
    if a.name in PUTS and a.collective != "broadcast":
        return _by_puts(a, x, axis)
    return _joined(a, x, _run(_row_moves(a), _rows(a, x, axis), axis))


def _native(a: Algorithm, x: Array, axis: Axis) -> Array:
    """Returns the result of the engine's own collective."""
    match a.collective:
        case "all_reduce":
            return lax.psum(x, axis)
        case "reduce_scatter":
            return lax.psum_scatter(x, axis, scatter_dimension=0, tiled=True)
        case "all_gather":
            return xp_jax.all_gather(x, axis, 0)
        case "all_to_all":
            return moved(lax.all_to_all)(x, axis, 0, 0, tiled=True)
        case "broadcast":
            return xp_jax.broadcast(x, axis if isinstance(axis, tuple) else (axis,), a.root)


def _by_puts(a: Algorithm, x: Array, axis: Axis) -> Array:
    """Returns the result by kernels with puts: an all_reduce is a reduce_scatter and an all_gather.
    A sum of whole numbers is the engine's, as kernels add in f32."""
    axes = axis if isinstance(axis, tuple) else (axis,)
    if "reduce" in a.collective and not jnp.issubdtype(x.dtype, jnp.floating):
        return _native(a, x, axis)
    epoch = "hard" if a.name == "puts_hard" else "soft"

    def run(text: Callable[..., str], blocks: Array, size: int) -> Array:
        kernel = with_sizes(parse(text(held_as(x.dtype).name, epoch)), M=1, bm=1, K=size, x=a.n)
        return run_kernel(kernel, (axes,), (blocks,))[0]

    match a.collective:
        case "all_to_all":
            size = x.size // a.n
            return jnp.reshape(run(puts.exchange, jnp.reshape(x, (a.n, 1, size)), size), x.shape)
        case "all_gather":
            whole = run(puts.all_gather, jnp.reshape(x, (1, x.size)), x.size)
            return jnp.reshape(whole, (a.n * x.shape[0], *x.shape[1:]))
    flat = jnp.ravel(x)
    blocks = jnp.reshape(jnp.pad(flat, (0, -x.size % a.n)), (a.n, 1, -1))
    size = blocks.shape[-1]
    own = run(puts.reduce_scatter, blocks, size)
    if a.collective == "reduce_scatter":
        return jnp.reshape(own, (x.shape[0] // a.n, *x.shape[1:]))
    return jnp.reshape(jnp.ravel(run(puts.all_gather, own, size))[: x.size], x.shape)


# ---- as array functions ------------------------------------------------------------------------
class AlgorithmXp:
    """The array functions with collectives by the tables called `name`. A reduction other than a
    sum runs on the engine's own collective."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __getattr__(self, name: str) -> Any:
        return getattr(xp_jax, name)

    def _run(self, collective: str, x: Array, axes: tuple[str, ...], root: int = 0) -> Array:
        return run_algorithm(named(collective, self.name, lax.axis_size(axes), root), x, axes)

    def broadcast(self, x: Array, axes: tuple[str, ...], root: int) -> Array:
        return self._run("broadcast", x, axes, root)

    def all_reduce(self, x: Array, axes: tuple[str, ...], kind: str) -> Array:
        return self._run("all_reduce", x, axes) if kind == "sum" else xp_jax.all_reduce(
            x, axes, kind
        )  # fmt: skip

    def reduce_scatter(self, x: Array, axes: tuple[str, ...], dim: int) -> Array:
        return jnp.moveaxis(self._run("reduce_scatter", jnp.moveaxis(x, dim, 0), axes), 0, dim)

    def all_gather(self, x: Array, axes: tuple[str, ...], dim: int) -> Array:
        return jnp.moveaxis(self._run("all_gather", jnp.moveaxis(x, dim, 0), axes), 0, dim)

    def all_to_all(self, x: Array, axes: tuple[str, ...], split: int, concat: int) -> Array:
        return jnp.moveaxis(self._run("all_to_all", jnp.moveaxis(x, split, 0), axes), 0, concat)


by_algorithm = lru_cache(maxsize=64)(AlgorithmXp)


# ---- the buffer --------------------------------------------------------------------------------
def _rows(a: Algorithm, x: Array, axis: Axis) -> Array:
    """Returns this device's chunks as rows: dim 0's blocks, each padded to whole chunks."""
    blocks = a.n if a.collective in ("reduce_scatter", "all_to_all") else 1
    flat = jnp.reshape(x, (blocks, -1))
    lack = -flat.shape[1] % a.pieces
    if lack:
        flat = jnp.pad(flat, ((0, 0), (0, lack)))
    own = jnp.reshape(flat, (blocks * a.pieces, -1))
    moves = _row_moves(a)
    rows = moves.rows + moves.spare
    if own.shape[0] == rows:
        return own
    first = lax.axis_index(axis) * a.pieces if a.collective == "all_gather" else 0
    empty = jnp.zeros((rows, own.shape[1]), own.dtype)
    return lax.dynamic_update_slice(empty, own, (first, 0))


def _joined(a: Algorithm, x: Array, rows: Array) -> Array:
    """Returns the result in its shape from its rows, without the padding."""
    splits = a.collective in ("reduce_scatter", "all_to_all")
    size = x.size // a.n if splits else x.size
    blocks = jnp.reshape(rows, (rows.shape[0] // a.pieces, -1))[:, :size]
    if a.collective == "reduce_scatter":
        return jnp.reshape(blocks, (x.shape[0] // a.n, *x.shape[1:]))
    if a.collective == "all_gather":
        return jnp.reshape(blocks, (x.shape[0] * a.n, *x.shape[1:]))
    return jnp.reshape(blocks, x.shape)


def _run(moves: _RowMoves, buffer: Array, axis: Axis) -> Array:
    rank = lax.axis_index(axis)
    n = moves.result.shape[0]
    for exchanges in moves.rounds:
        # A round reads what was there when it began, so all reads come before all writes.
        sent = [_read(buffer, _table(e.reads, n, e.count, 0), rank) for e in exchanges]
        for e, rows in zip(exchanges, sent):
            came = xp_jax.permute(rows, axis if isinstance(axis, tuple) else (axis,), e.pairs)
            table = _table(e.writes, n, e.count, moves.rows)
            buffer = _write(buffer, table, rank, came, e.op)
    in_order = np.arange(moves.rows)
    if moves.result.shape[1] == moves.rows and (moves.result == in_order).all():
        return buffer[: moves.rows]
    return _read(buffer, moves.result, rank)


def _table(rows: dict[int, Sequence[int]], n: int, count: int, spare: int) -> Rows:
    """Returns rows by rank; an idle rank gets the unused rows from `spare` on."""
    idle = range(spare, spare + count)
    return np.array([rows.get(r, idle) for r in range(n)], np.int32)


def _runs(table: Rows) -> list[tuple[int, int]]:
    """Returns (first, last + 1) of each run of columns in which every rank's rows are
    consecutive."""
    breaks = np.flatnonzero((np.diff(table, axis=1) != 1).any(axis=0)) + 1
    edges = [0, *breaks.tolist(), table.shape[1]]
    return list(itertools.pairwise(edges))


def _read(buffer: Array, table: Rows, rank: Array) -> Array:
    runs = _runs(table)
    if len(runs) > _MOST_RUNS:
        return buffer[jnp.asarray(table)[rank]]
    parts = [lax.dynamic_slice_in_dim(buffer, _start(table, a, rank), b - a) for a, b in runs]
    return parts[0] if len(parts) == 1 else lax.concatenate(parts, 0)


def _write(buffer: Array, table: Rows, rank: Array, came: Array, op: Action) -> Array:
    runs = _runs(table)
    if len(runs) > _MOST_RUNS:
        place = buffer.at[jnp.asarray(table)[rank]]
        return place.set(came) if op == "copy" else place.add(came, unique_indices=True)
    for a, b in runs:
        at, new = _start(table, a, rank), came[a:b]
        if op == "add":
            new = lax.dynamic_slice_in_dim(buffer, at, b - a) + new
        buffer = lax.dynamic_update_slice_in_dim(buffer, new, at, 0)
    return buffer


def _start(table: Rows, column: int, rank: Array) -> Array:
    """Returns the first row of a run: a constant if it is the same for all ranks."""
    line = table[:, column]
    return np.int32(line[0]) if (line == line[0]).all() else jnp.asarray(line)[rank]


# ---- which rows move where ----------------------------------------------------------------------
@lru_cache(maxsize=256)
def _row_moves(a: Algorithm) -> _RowMoves:
    """Returns the exchanges with row numbers. Only an all_to_all reuses rows: it has n times as
    many chunks as a rank holds."""
    homes = [{c: i if a.collective == "all_to_all" else c for i, c in enumerate(a.starts(r))}
             for r in range(a.n)]  # fmt: skip
    if a.collective != "all_to_all":
        homes = [{c: c for c in range(a.chunks)} for _ in range(a.n)]
    last = _last_sent(a)
    rows = a.parts
    rounds = []
    for k, moves in enumerate(a.rounds):
        exchanges = _exchanges(moves)
        for e in exchanges:
            e.reads = {r: [homes[r][c] for c in e.reads[r]] for r in e.reads}
        if a.collective == "all_to_all":
            rows = max(rows, _rehouse(a, k, moves, homes, last))
        for e in exchanges:
            e.writes = {r: [homes[r][c] for c in e.writes[r]] for r in e.writes}
        rounds.append(tuple(exchanges))
    result = np.array([[homes[r][c] for c in a.wants(r)] for r in range(a.n)], np.int32)
    idle = (e.count for exchanges in rounds for e in exchanges if len(e.pairs) < a.n)
    return _RowMoves(rows, max(idle, default=0), tuple(rounds), result)


def _last_sent(a: Algorithm) -> list[dict[int, float]]:
    """Returns the round in which each rank sends each chunk last; infinity for chunks of the
    result."""
    last: list[dict[int, float]] = [{} for _ in range(a.n)]
    for k, moves in enumerate(a.rounds):
        for t in moves:
            last[t.src].update(dict.fromkeys(t.chunks, k))
    for r in range(a.n):
        last[r].update(dict.fromkeys(a.wants(r), math.inf))
    return last


def _rehouse(
    a: Algorithm, k: int, moves: Round, homes: list[dict[int, int]], last: list[dict[int, float]]
) -> int:
    """Frees the rows of chunks sent for the last time, and assigns rows to the received ones.
    Returns the number of rows in use."""
    for r, home in enumerate(homes):
        for c in [c for c in home if last[r].get(c, -1) <= k]:
            del home[c]
    most = 0
    for t in moves:
        home = homes[t.dst]
        taken = set(home.values())
        for c in t.chunks:
            source, piece = divmod(c, a.parts)[0], c % a.pieces
            best = source * a.pieces + piece
            row = best if best not in taken else next(i for i in range(a.chunks) if i not in taken)
            home[c] = row
            taken.add(row)
        most = max(most, max(taken) + 1)
    return most


def _exchanges(moves: Round) -> list[_Exchange]:
    """Returns a round in few exchanges, greedily. The chunks that one rank receives keep their
    order."""
    made: list[_Exchange] = []
    newest: dict[int, int] = {}
    for t in moves:
        for i in range(newest.get(t.dst, -1) + 1, len(made) + 1):
            if i == len(made):
                made.append(_Exchange(t.op, len(t.chunks)))
            e = made[i]
            if t.src not in e.reads and (e.op, e.count) == (t.op, len(t.chunks)):
                break
        e.pairs.append((t.src, t.dst))
        e.reads[t.src] = e.writes[t.dst] = t.chunks
        newest[t.dst] = i
    return made
