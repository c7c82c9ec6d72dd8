"""Kernels of Tile IR as XLA programs: loops over the grid, and puts in lockstep. On GPUs they have
a form of their own (kernels_gpu.py), if it takes the kernel.

Without a mesh the steps of the grid run one after the other. On a mesh all devices run the same
statements together, so a put is a permute: the verifier has shown that any order of arrival gives
the same result. Loops that put or wait are unrolled, as the pairs of a permute are constants.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from math import prod
from typing import Any, assert_never

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..core.dtypes import DType
from ..core.errors import GraphError
from ..ir.tile.body import (
    Enter,
    Load,
    Loop,
    Op,
    Put,
    Quiet,
    Statement,
    Store,
    Wait,
    When,
    every,
    where,
)
from ..ir.tile.index import Index, sizes_of
from ..ir.tile.kernel import Kernel, with_sizes
from ..ir.tile.op import Call
from ..ir.tile.ops import op_of
from . import xp_jax
from .devices import platform
from .transports import transports

LANES = 8  # steps of a grid at once on a CPU, at most
Array = Any
Names = Mapping[str, Any]  # sizes and indices: numbers, or traced
Rank = tuple[int, ...]
Axes = tuple[str | tuple[str, ...], ...]  # of the program's mesh: some may be one of the kernel's


def run_kernel(
    k: Kernel, axes: Axes, arrays: Sequence[Array], xp: Any = xp_jax
) -> tuple[Array, ...]:
    """The outputs of a kernel for the arrays of its inputs. `axes` are the axes of the program's
    mesh that are those of the kernel's, in a program on all their devices (`shard_map`). `xp` has
    the sums and products of loops of XLA."""
    if platform() == "gpu" and not (k.mesh and not transports()["nvshmem"].available):
        from .kernels_gpu import gpu_call, why_not  # slow to import

        if not why_not(k):
            return gpu_call(k, *arrays, axes=axes)
    if (lanes := _lanes(k)) is not None and platform() == "cpu":
        return _in_lanes(k, axes, arrays, xp, *lanes)
    ins = iter(arrays)
    memory = {
        r.name: next(ins) if r.kind == "in" else jnp.zeros(k.shape(r), r.dtype.numpy)
        for r in k.refs
    }
    names = dict(k.sizes) | {
        f"rank_{a}": lax.axis_index(axis) for (a, _), axis in zip(k.mesh, axes, strict=True)
    }
    run = _Run(k, axes, memory, xp)
    if k.mesh:
        run.body(k.body, names, {}, k.ranks)
    else:
        run.grid(names)
    return tuple(run.memory[r.name] for r in k.refs if r.kind == "out")


def _lanes(k: Kernel) -> tuple[str, int, dict[str, int]] | None:
    """(size, number of lanes, dim of each reference) of an index of the grid whose steps may be
    vectorized: it only selects along dims of one size, all of whose tiles are an index. So the
    products of several steps are one, which runs on all cores."""
    for name, extent in reversed(k.grid):
        count = next(n for n in range(LANES, 0, -1) if k.extents[name] % n == 0)
        own, dims = {name, extent.text}, dict[str, int]()
        for s in every(k.body):
            match s:
                case Load() | Store():
                    r = k.ref(s.ref)
                    for d, (at, size, tile) in enumerate(zip(s.at, r.shape, r.tiles, strict=True)):
                        if (at.text, size.text, tile.text) == (name, extent.text, "1"):
                            dims[r.name] = d
                        elif own & (at.names | size.names | tile.names):
                            count = 1
                case Loop() if own & (s.low.names | s.high.names):
                    count = 1
                case When() if own & s.test.names:
                    count = 1
                case Op() if any(n in text for n in own for _, text in s.attrs):
                    count = 1
                case _:
                    pass
        outs = [r.name for r in k.refs if r.kind == "out"]
        if count > 1 and extent.text in dict(k.dims) and dims.keys() >= {*outs}:
            return extent.text, count, dims
    return None


def _in_lanes(
    k: Kernel, axes: Axes, arrays: Sequence[Array], xp: Any, size: str, count: int,
    dims: Mapping[str, int],
) -> tuple[Array, ...]:  # fmt: skip
    """`run_kernel` with `count` steps along the dim `size` at once."""
    fewer = with_sizes(k, **{size: k.sizes[size] // count})
    ins, outs = ([r.name for r in k.refs if r.kind == kind] for kind in ("in", "out"))
    places = [dims[n] + 1 if n in dims else None for n in ins]
    cut = [
        x if d is None else x.reshape(*x.shape[: d - 1], -1, count, *x.shape[d:])
        for x, d in zip(arrays, places, strict=True)
    ]
    made = jax.vmap(
        lambda *xs: run_kernel(fewer, axes, xs, xp), places, tuple(dims[n] + 1 for n in outs)
    )(*cut)
    return tuple(y.reshape(k.shape(k.ref(n))) for n, y in zip(outs, made, strict=True))


@dataclass
class _Run:
    """The run of a kernel: its memory, and the slots that are set."""

    k: Kernel
    axes: Axes
    memory: dict[str, Array]
    xp: Any
    slots: set[tuple[Rank, str, tuple[int, ...]]] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.refs = {r.name: r for r in self.k.refs}

    def grid(self, names: Names) -> None:
        """Runs the steps of the grid."""
        extents, outs = self.k.extents, [r.name for r in self.k.refs if r.kind == "out"]

        def step(n: Array, held: tuple[Array, ...]) -> tuple[Array, ...]:
            point = {}
            for name, size in reversed(extents.items()):
                point[name] = lax.rem(n, np.int32(size)) if size > 1 else 0
                n = lax.div(n, np.int32(size)) if size > 1 else n
            self.memory.update(zip(outs, held, strict=True))
            self.body(self.k.body, {**names, **point}, {}, ((),))
            return tuple(self.memory[name] for name in outs)

        made = _loop(0, prod(extents.values()), step, tuple(self.memory[name] for name in outs))
        self.memory.update(zip(outs, made, strict=True))

    def body(
        self, body: Sequence[Statement], names: Names, values: dict[str, Array],
        ranks: Sequence[Rank],
    ) -> None:  # fmt: skip
        """Runs statements on the devices `ranks`, and adds their values to `values`."""
        for s in body:
            match s:
                case Op():
                    values[s.result] = self._op(s, names, values)
                case Load():
                    values[s.result] = self._load(s, names, values)
                case Store():
                    start = self._start(s.ref, s.at, names)
                    self._store(s.ref, start, values[s.value], self._mask(ranks))
                case Loop():
                    self._repeated(s, names, values, ranks)
                case When():
                    self._when(s, names, values, ranks)
                case Put():
                    self._put(s, names, ranks)
                case Wait():
                    for rank in ranks:
                        slot = sizes_of(s.slot, self._static(names, rank))
                        if (rank, s.sig, slot) not in self.slots:
                            raise GraphError(
                                f"{self.k.name}: devices run together, and the put to"
                                f" {s.sig}{list(slot)} comes after the wait",
                                line=where(s),
                                fix="write the put above the wait, or make the kernel one statement"
                                " for all ranks",
                            )
                case Enter() | Quiet():
                    pass
                case _:
                    assert_never(s)

    # ---- statements ----------------------------------------------------------------------------
    def _op(self, s: Op, names: Names, values: Mapping[str, Array]) -> Array:
        out, attrs = self.k.types[s.result], dict(s.attrs)
        start = jnp.asarray(Index(attrs.get("start", "0")).traced(names), jnp.int32)
        near = [self.k.types[a].dtype for a in s.args if a.startswith("%")]
        call = Call(self.xp, out, attrs, xp_jax.cast, _scalar, start)
        args = [values[a] if a.startswith("%") else _scalar(a, near[-1]) for a in s.args]
        return op_of(s.op, attrs).compute(call, *args)

    def _start(self, ref: str, at: tuple[Index, ...], names: Names) -> list[Any]:
        tile = self.k.tile(self.refs[ref])
        return [i.traced(names) * n for i, n in zip(at, tile, strict=True)]

    def _load(self, s: Load, names: Names, values: Mapping[str, Array]) -> Array:
        x, tile = self.memory[s.ref], list(self.k.tile(self.refs[s.ref]))
        start = self._start(s.ref, s.at, names)
        if s.rows is not None:  # the other dims first
            dim, ids = s.rows
            tile[dim], start[dim] = x.shape[dim], 0
            x = xp_jax.take(_cut(x, start, tile), values[ids], dim)
        else:
            x = _cut(x, start, tile)
        return xp_jax.reshape(x, self.k.types[s.result].shape)

    def _store(self, ref: str, start: Sequence[Any], value: Array, mask: Array | None) -> None:
        """Writes a tile from `start` on, on the devices where `mask` is true."""
        old, tile = self.memory[ref], self.k.tile(self.refs[ref])
        value = xp_jax.reshape(value, tile)
        if mask is not None:
            value = jnp.where(mask, value, _cut(old, start, tile))
        whole = tile == old.shape
        self.memory[ref] = value if whole else lax.dynamic_update_slice(old, value, start)

    def _repeated(
        self, s: Loop, names: Names, values: dict[str, Array], ranks: Sequence[Rank]
    ) -> None:
        low, high = s.low.traced(names), s.high.traced(names)
        first = tuple(values[v] for v in s.carries)
        apart = any(isinstance(x, Put | Wait | When) for x in every(s.body)) and self.k.mesh
        kept = sorted({x.ref for x in every(s.body) if isinstance(x, Store)})

        def once(i: Any, state: tuple[Any, Any], chosen: Sequence[Rank] = ranks) -> tuple[Any, Any]:
            carried, held = state
            self.memory.update(zip(kept, held, strict=True))
            inner = values | dict(zip(s.carries, carried, strict=True))
            self.body(s.body, {**names, s.index: i}, inner, chosen)
            return tuple(inner[v] for v in s.next), tuple(self.memory[ref] for ref in kept)

        state = first, tuple(self.memory[ref] for ref in kept)
        if apart:
            own = [self._static(names, r) for r in ranks]
            turns = {r: range(s.low.value(n), s.high.value(n)) for r, n in zip(ranks, own)}
            for i in sorted({*chain(*turns.values())}):
                chosen = [r for r in ranks if i in turns[r]]
                new, held = once(i, state, chosen)
                if len(chosen) < len(ranks) and (mask := self._mask(chosen)) is not None:
                    new = tuple(jnp.where(mask, a, b) for a, b in zip(new, state[0], strict=True))
                state = new, held
        else:
            state = _loop(low, high, once, state)
        self.memory.update(zip(kept, state[1], strict=True))
        values.update(zip(s.results, state[0], strict=True))

    def _when(self, s: When, names: Names, values: dict[str, Array], ranks: Sequence[Rank]) -> None:
        if self.k.mesh:
            chosen = [r for r in ranks if s.test.value(self._static(names, r))]
            if chosen:
                self.body(s.body, names, dict(values), chosen)
            return
        kept = sorted({x.ref for x in every(s.body) if isinstance(x, Store)})

        def yes(held: tuple[Array, ...]) -> tuple[Array, ...]:
            self.memory.update(zip(kept, held, strict=True))
            self.body(s.body, names, dict(values), ranks)
            return tuple(self.memory[ref] for ref in kept)

        held = tuple(self.memory[ref] for ref in kept)
        test = s.test.traced(names)
        if isinstance(test, bool):
            made = yes(held) if test else held
        else:
            made = lax.cond(test, yes, lambda held: held, held)
        self.memory.update(zip(kept, made, strict=True))

    def _put(self, s: Put, names: Names, ranks: Sequence[Rank]) -> None:
        """Runs a put of several devices as permutes, in which no device receives twice."""
        number = {r: n for n, r in enumerate(self.k.ranks)}
        source = self.k.tile(self.refs[s.src])
        tile = _cut(self.memory[s.src], self._start(s.src, s.src_at, names), source)
        rounds: list[dict[int, tuple[int, list[int]]]] = []
        flat = tuple(a for axis in self.axes for a in ((axis,) if isinstance(axis, str) else axis))
        size = self.k.tile(self.refs[s.dst])
        for rank in ranks:
            own = self._static(names, rank)
            to = sizes_of(s.rank, own)
            first = [i * n for i, n in zip(sizes_of(s.dst_at, own), size, strict=True)]
            free = next((r for r in rounds if number[to] not in r), None)
            if free is None:
                rounds.append(free := {})
            free[number[to]] = number[rank], first
            self.slots.add((to, s.sig, sizes_of(s.slot, own)))
        for came in rounds:
            pairs = [(src, to) for to, (src, _) in came.items()]
            got = xp_jax.permute(tile, flat, pairs)
            table = np.zeros((len(number), len(size)), np.int32)
            for at, (_, first) in came.items():
                table[at] = first
            here = self._number(names)
            starts = list(jnp.asarray(table)[here])
            mask = None
            if len(came) < len(number):
                mask = jnp.asarray([i in came for i in range(len(number))])[here]
            self._store(s.dst, starts, got, mask)

    # ---- ranks ---------------------------------------------------------------------------------
    def _static(self, names: Names, rank: Rank) -> dict[str, int]:
        """The names on the device at `rank`. Loops that put are unrolled, so their indices are
        numbers."""
        return {**names, **self.k.at(rank)}

    def _number(self, names: Names) -> Array:
        number: Array = jnp.int32(0)
        for axis, n in self.k.mesh:
            number = number * n + names[f"rank_{axis}"]
        return number

    def _mask(self, ranks: Sequence[Rank]) -> Array | None:
        """A traced bool: True on the devices `ranks`; None if these are all devices."""
        if len(ranks) == len(self.k.ranks):
            return None
        chosen = [r in ranks for r in self.k.ranks]
        names = {f"rank_{a}": lax.axis_index(x) for (a, _), x in zip(self.k.mesh, self.axes)}
        return jnp.asarray(chosen)[self._number(names)]


def _loop(low: Any, high: Any, step: Any, state: Any) -> Any:
    """`lax.fori_loop`; one iteration or none without a loop."""
    if isinstance(low, int) and isinstance(high, int) and high - low <= 1:
        return step(low, state) if high > low else state
    low, high = jnp.asarray(low, jnp.int32), jnp.asarray(high, jnp.int32)
    return lax.fori_loop(low, high, step, state)


def _cut(x: Array, start: Sequence[Any], size: Sequence[int]) -> Array:
    if tuple(size) == x.shape:
        return x
    if all(isinstance(i, int) for i in start):
        return lax.slice(x, start, [i + n for i, n in zip(start, size, strict=True)])
    return lax.dynamic_slice(x, [jnp.asarray(i, jnp.int32) for i in start], size)


def _scalar(text: str, dtype: DType) -> Array:
    return jnp.asarray(float(text) if dtype.is_float else int(text), dtype.numpy)
