"""The body of a kernel as it is recorded for a GPU: a step of the grid is a block of one warpgroup.

Tiles are copied to shared memory and back (TMA), those that a loop loads `stages` turns ahead.
Values are in registers, in layouts that the backend infers; products are those of the tensor cores
(wgmma). A put is a copy to the memory of another device, and then a signal to its semaphore.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from types import MappingProxyType
from typing import Any, assert_never

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ..core.dtypes import bf16, f32
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
)
from ..ir.tile.index import Index
from ..ir.tile.kernel import Kernel
from ..ir.tile.op import Call, Type
from ..ir.tile.ops import op_of
from .kernels_gpu_values import (
    XP,
    Product,
    Shared,
    Values,
    cast,
    fit,
    flat,
    place_of,
    refused,
    scalar,
    thirds,
)

Array = Any
Names = Mapping[str, Any]  # sizes and indices: numbers, or traced
MOST = 256  # elements of a copy along a dim
# The terms of a product of f32 in three parts of bf16 each, the smallest first.
TERMS = ((2, 0), (0, 2), (1, 1), (1, 0), (0, 1), (0, 0))


def _shared(t: Type) -> Any:
    """A buffer in shared memory."""
    return plgpu.SMEM(flat(t.shape), t.dtype.numpy)


def _one_by_one(source: Any, target: Any, s: Statement) -> None:
    """Copies the elements of a tile that the engine for copies does not take."""
    if len(source.shape) != 1:
        fix = "make the last dim of tiles and references a multiple of 16 bytes"
        raise refused("no copy of tiles whose rows are not whole 16 bytes", s, fix)

    @pl.loop(0, source.shape[0])
    def _(i: Array) -> None:
        target[i] = source[i]


def _indices(at: Sequence[Index], names: Names) -> tuple[Any, ...]:
    return tuple(i.traced(names) for i in at)


@dataclass
class Run:
    """The recording of a kernel's body: its memory, its semaphores, its axes."""

    k: Kernel
    memory: dict[str, Any]
    signals: dict[str, Any]
    entered: dict[int, Any]  # the semaphores of each `enter`, by the id of the statement
    axes: dict[str, Any]
    interpreted: bool

    def __post_init__(self) -> None:
        self.refs = {r.name: r for r in self.k.refs}
        self.stages = dict(self.k.speed).get("stages", 2)
        self.added = _added(self.k)

    def tile(
        self, ref: str, at: tuple[Index, ...], names: Names, memory: Any = None,
        row: tuple[int, Any] | None = None,
    ) -> Any:  # fmt: skip
        """A tile in global memory, or a row of it: (dim, index of the element)."""
        parts = []
        for d, (i, n) in enumerate(zip(_indices(at, names), self.k.tile(self.refs[ref]))):
            if row is not None and d == row[0]:
                parts.append(row[1])
            else:
                parts.append(i if n == 1 else pl.ds(i * n, n))
        return (self.memory[ref] if memory is None else memory).at[tuple(parts)]

    def pieces(self, ref: str) -> list[tuple[Any, ...]]:
        """The parts of a tile that are copied at once, of at most MOST elements along each dim.
        None if its elements are copied one by one: apart, or not in units of 16 bytes."""
        r, tile = self.refs[ref], self.k.tile(self.refs[ref])
        rows = (tile[-1], self.k.shape(r)[-1])[: len(flat(self.k.shape(r)))]
        if any(n * r.dtype.bytes % 16 for n in rows):
            return []
        sizes = flat(tile)
        starts = product(*(range(0, n, MOST) for n in sizes))
        return [tuple(pl.ds(i, min(MOST, n - i)) for i, n in zip(at, sizes)) for at in starts]

    def is_aligned(self, s: Load) -> bool:
        """Returns whether several buffers for the tile may lie next to each other."""
        t = self.k.types[s.result]
        return t.bytes % (128 if len(flat(t.shape)) == 1 else 1024) == 0

    def registers(self, x: Any) -> Array:
        """A value in registers."""
        if isinstance(x, Product):
            return self.multiply(x)
        if not isinstance(x, Shared):
            return x
        if x.ref.ndim != 2 or self.interpreted:
            return x.ref[...]
        return plgpu.layout_cast(x.ref[...], plgpu.Layout.WGMMA)

    def value(self, name: str, values: Values) -> Array:
        """A value in registers, by its name."""
        return self.registers(values[name])

    # ---- statements ----------------------------------------------------------------------------
    def block(
        self, body: Sequence[Statement], names: Names, values: Values,
        results: Sequence[str] = (), ready: Mapping[int, Any] = MappingProxyType({}),
    ) -> tuple[Array, ...]:  # fmt: skip
        """Records statements, and returns the values `results`. `ready` has the buffers of loads
        that are done, by the id of the statement."""
        loads = [s for s in body if isinstance(s, Load) and id(s) not in ready]
        loads = [s for s in loads if flat(self.k.types[s.result].shape)]

        def within(*scratch: Any) -> tuple[Array, ...]:
            pairs = zip(scratch[: len(loads)], scratch[len(loads) :])
            buffers = dict(zip(map(id, loads), pairs))
            coming: list[Any] = []
            for s in body:
                if not isinstance(s, Load) or s.rows is not None:
                    for barrier in coming:
                        plgpu.barrier_wait(barrier)
                    coming = []
                if isinstance(s, Load):
                    if id(s) in ready:
                        values[s.result] = Shared(ready[id(s)])
                    elif id(s) in buffers:
                        buffer, barrier = buffers[id(s)]
                        values[s.result] = Shared(buffer)
                        if self.copy_in(s, names, values, buffer, barrier):
                            coming.append(barrier)
                    else:
                        values[s.result] = self.tile(s.ref, s.at, names)[...]
                else:
                    self.statement(s, names, values)
            for barrier in coming:
                plgpu.barrier_wait(barrier)
            return tuple(self.value(v, values) for v in results)

        if not loads:
            return within()
        types = [self.k.types[s.result] for s in loads]
        copies = [
            self.k.types[s.rows[1]].size if s.rows else len(self.pieces(s.ref)) or 1 for s in loads
        ]
        return pl.run_scoped(
            within, *map(_shared, types), *(plgpu.Barrier(num_arrivals=n) for n in copies)
        )

    def copy_in(self, s: Load, names: Names, values: Values, buffer: Any, barrier: Any) -> bool:
        """Copies a tile to shared memory; a gather is a copy for each row. Returns whether the
        barrier must be waited for."""
        if s.rows is None:
            source, pieces = self.tile(s.ref, s.at, names), self.pieces(s.ref)
            for piece in pieces:
                plgpu.copy_gmem_to_smem(source.at[piece], buffer.at[piece], barrier)
            if not pieces:
                _one_by_one(source, buffer, s)
            return bool(pieces)
        (dim, ids), out = s.rows, self.k.types[s.result]
        if place_of(out.shape, dim) or out.bytes // out.shape[dim] % 128:
            fix = "load rows along the first dim of a tile, each of a multiple of 128 bytes"
            raise refused("no gather of parts of rows", s, fix)

        def row(ids: Any) -> None:
            @pl.loop(0, out.shape[dim])
            def _(r: Array) -> None:
                source = self.tile(s.ref, s.at, names, row=(dim, ids[r]))
                plgpu.copy_gmem_to_smem(source, buffer.at[r], barrier)

        self.in_shared([(values[ids], self.k.types[ids])], row)
        return True

    def statement(self, s: Statement, names: Names, values: Values) -> None:
        """Records a statement that is no load."""
        match s:
            case Op():
                values[s.result] = self.op(s, names, values)
            case Store():
                self.store(s, names, values)
            case Loop():
                values.update(zip(s.results, self.loop(s, names, values)))
            case When():
                test = s.test.traced(names)
                if test is True:
                    self.block(s.body, names, dict(values))
                elif test is not False:

                    @pl.when(test)
                    def _() -> None:
                        self.block(s.body, names, dict(values))

            case Enter():
                self.enter(s, names)
            case Put():
                self.put(s, names)
            case Wait():
                pl.semaphore_wait(self.signals[s.sig].at[_indices(s.slot, names)])
            case Quiet():
                pass  # each put has arrived when its statement ends
            case Load():
                raise AssertionError(s)
            case _:
                assert_never(s)

    def store(self, s: Store, names: Names, values: Values) -> None:
        to, ref = self.tile(s.ref, s.at, names), self.refs[s.ref]
        made = Type(ref.dtype, self.k.tile(ref))
        if not flat(made.shape):
            to[...] = self.value(s.value, values)
            return

        def copy_out(buffer: Any) -> None:
            pieces = self.pieces(s.ref)
            for piece in pieces:
                plgpu.copy_smem_to_gmem(buffer.at[piece], to.at[piece])
            if pieces:
                plgpu.wait_smem_to_gmem(0)
            else:
                _one_by_one(buffer, to, s)

        self.in_shared([(values[s.value], made)], copy_out)

    def loop(self, s: Loop, names: Names, values: Values) -> tuple[Array, ...]:
        """Records a loop, whose loads of inputs are copied `stages` turns ahead."""
        low, high = s.low.traced(names), s.high.traced(names)
        first = tuple(self.value(v, values) for v in s.carries)
        if isinstance(low, int) and isinstance(high, int) and low >= high:
            return first
        ahead = [
            x
            for x in s.body
            if isinstance(x, Load) and x.rows is None
            and self.refs[x.ref].kind == "in" and flat(self.k.types[x.result].shape)
            and len(self.pieces(x.ref)) == 1 and self.is_aligned(x)
        ]  # fmt: skip

        def turn(i: Any, carried: tuple[Array, ...], buffers: Sequence[Any] = ()) -> Any:
            inner = values | dict(zip(s.carries, carried))
            ready = dict(zip(map(id, ahead), buffers))
            return self.block(s.body, {**names, s.index: i}, inner, s.next, ready)

        if not ahead:
            return lax.fori_loop(low, high, turn, first)

        def spec(x: Load) -> Any:
            tile = tuple(None if n == 1 else n for n in self.k.tile(self.refs[x.ref]))
            return plgpu.BlockSpec(
                tile, lambda i: _indices(x.at, {**names, s.index: i + low}), delay_release=0
            )

        return plgpu.emit_pipeline(
            lambda at, *given: turn(at[0] + low, given[-1], given[:-1]),
            grid=(high - low,),
            in_specs=[spec(x) for x in ahead],
            max_concurrent_steps=self.stages,
            init_carry=first,
        )(*(self.memory[x.ref] for x in ahead))

    # ---- other devices -------------------------------------------------------------------------
    def enter(self, s: Enter, names: Names) -> None:
        """A barrier: each device signals the others, each of which has a slot for it."""
        sizes, slots = dict(self.k.mesh), self.entered[id(s)]
        own = [names[f"rank_{a}"] for a in s.axes]
        others = list(product(*(range(sizes[a]) for a in s.axes)))[1:]
        far = [
            [lax.rem(i + d, jnp.int32(sizes[a])) for i, d, a in zip(own, steps, s.axes)]
            for steps in others
        ]
        for there in far:
            device: dict[Any, Any] = {self.axes[a]: i for a, i in zip(s.axes, there)}
            pl.semaphore_signal(slots.at[tuple(own)], device_id=device)
        for there in far:
            pl.semaphore_wait(slots.at[tuple(there)])

    def put(self, s: Put, names: Names) -> None:
        """Copies a tile to another device, and signals when it has arrived."""
        src, dst = (Type(self.refs[r].dtype, self.k.tile(self.refs[r])) for r in (s.src, s.dst))
        if flat(src.shape) != flat(dst.shape):
            raise refused(f"puts no tile of {src} to one of {dst}", s, "give both the same tiles")
        device: Any = {self.axes[a]: i for (a, _), i in zip(self.k.mesh, _indices(s.rank, names))}
        there = plgpu.remote_ref(self.memory[s.dst], device)

        source = self.tile(s.src, s.src_at, names)
        target = self.tile(s.dst, s.dst_at, names, there)
        pieces = self.pieces(s.src)

        def copy(buffer: Any, barrier: Any) -> None:
            for piece in pieces:
                plgpu.copy_gmem_to_smem(source.at[piece], buffer.at[piece], barrier)
            plgpu.barrier_wait(barrier)
            for piece in pieces:
                plgpu.copy_smem_to_gmem(buffer.at[piece], target.at[piece])
            plgpu.wait_smem_to_gmem(0)

        if not flat(src.shape):
            target[...] = source[...]
        elif pieces and self.pieces(s.dst):
            pl.run_scoped(copy, _shared(src), plgpu.Barrier(num_arrivals=len(pieces)))
        else:
            _one_by_one(source, target, s)
        pl.semaphore_signal(self.signals[s.sig].at[_indices(s.slot, names)], device_id=device)

    # ---- ops -----------------------------------------------------------------------------------
    def op(self, s: Op, names: Names, values: Values) -> Any:
        out, types, attrs = self.k.types[s.result], self.k.types, dict(s.attrs)
        if not (self.interpreted or _is_tile(out)):
            fix = "make its tiles multiples of 64 and 8"
            raise refused(f"values of two dims are tiles of 64 by 8, not {out}", s, fix)
        if s.op in ("row", "col"):
            return values[s.args[0]]
        if s.op == "iota":
            start = jnp.int32(0) + Index(attrs.get("start", "0")).traced(names)
            if out.shape[int(attrs["dim"])] == 1:
                return lax.broadcast_in_dim(start, flat(out.shape), ())
            place = place_of(out.shape, int(attrs["dim"]))
            return lax.broadcasted_iota(jnp.int32, flat(out.shape), place) + start
        if s.op == "dot":
            made = Product(values[s.args[0]], values[s.args[1]], s)
            return made if s.result in self.added else self.multiply(made)
        for name, other in (s.args, s.args[::-1]) if s.op == "add" else ():
            if isinstance(late := values.get(name), Product):
                x = self.value(other, values)
                return self.multiply(late, fit(x, types[other].shape, out.shape))
        near = [types[a].dtype for a in s.args if a.startswith("%")]
        shape = out.shape
        if "dim" in attrs:  # a reduction
            shape, dim = types[s.args[0]].shape, int(attrs["dim"])
            if shape[dim] == 1:
                return values[s.args[0]]
            attrs["dim"] = str(place_of(shape, dim))
        args = [
            fit(self.value(a, values), types[a].shape, shape)
            if a.startswith("%")
            else lax.full(flat(shape), scalar(a, near[-1]))
            for a in s.args
        ]
        call = Call(XP, Type(out.dtype, flat(out.shape)), attrs, cast, scalar)
        return op_of(s.op, dict(s.attrs)).compute(call, *args)

    def multiply(self, p: Product, start: Array | None = None) -> Array:
        """The product, added to `start`. Tensor cores round f32 to 11 bits, so three parts of it
        are multiplied. The interpreter has no transposed operands, and begins sums with zero."""
        out, x = self.k.types[p.op.result], self.k.types[p.op.args[0]]
        flags = p.op.attr("transpose")
        wide = x.dtype is f32
        turned = ["a" in flags, "b" in flags]
        if x.shape[0 if turned[0] else 1] % 16:
            raise refused("no product over fewer than 16", p.op, "make the tiles larger")
        if p.x is p.y:  # one buffer has one form
            p = Product(p.x, self.registers(p.y), p.op)
        sides: list[list[tuple[Any, Type | None]]] = []
        for n, (side, name) in enumerate(zip((p.x, p.y), p.op.args)):
            shape = self.k.types[name].shape
            if turned[n] and self.interpreted:
                side, shape = lax.transpose(self.registers(side), (1, 0)), shape[::-1]
            parts = thirds(self.registers(side)) if wide else [side]
            by_value = n == 0 and not turned[n] and not self.interpreted
            t = None if by_value else Type(bf16 if wide else x.dtype, shape)
            sides.append([(part, t) for part in parts])
        if self.interpreted:
            turned = [False, False]

        def run(*given: Any) -> Array:
            left, right = given[: len(sides[0])], given[len(sides[0]) :]

            def go(acc: Any) -> None:
                for i, j in TERMS if wide else ((0, 0),):
                    plgpu.wgmma(acc, _turned(left[i], turned[0]), _turned(right[j], turned[1]))

            def fresh(acc: Any) -> Array:
                go(acc)
                return acc[...]

            if start is None or self.interpreted:
                made = pl.run_scoped(
                    fresh, plgpu.WGMMAAccumulatorRef((out.shape[0], out.shape[1]), out.dtype.numpy)
                )
                return made if start is None else lax.add(start, made)
            return pl.run_state(go)(plgpu.WGMMAAccumulatorRef.init(start))

        return self.in_shared([*sides[0], *sides[1]], run)

    def in_shared(self, given: Sequence[tuple[Any, Type | None]], run: Callable[..., Any]) -> Any:
        """Calls `run` with values in shared memory, where those in registers of a type are written
        first; those without a type may stay in registers."""
        move = [t for x, t in given if t is not None and not isinstance(x, Shared)]

        def within(*buffers: Any) -> Any:
            free, args = iter(buffers), []
            for x, t in given:
                if isinstance(x, Shared):
                    args.append(x.ref)
                elif t is None:
                    args.append(self.registers(x))
                else:
                    args.append(next(free))
                    args[-1][...] = self.registers(x)
            if move:
                plgpu.commit_smem()
            return run(*args)

        return pl.run_scoped(within, *map(_shared, move)) if move else within()


def _is_tile(t: Type) -> bool:
    """Returns whether a value has a layout in registers: that of products, if it has two dims."""
    shape = flat(t.shape)
    return len(shape) < 2 or (len(shape) == 2 and shape[0] % 64 == 0 and shape[1] % 8 == 0)


def _turned(x: Any, turned: bool) -> Any:
    return x.transpose((1, 0)) if turned else x


def _added(k: Kernel) -> set[str]:
    """The products that are used once, by an addition in the same block."""
    inner = [s for s in every(k.body) if isinstance(s, Loop | When)]
    uses: Counter[str] = Counter()
    for s in every(k.body):
        match s:
            case Op():
                uses.update(s.args)
            case Store():
                uses[s.value] += 1
            case Loop():
                uses.update((*s.carries, *s.next))
            case _:
                pass
    found = set()
    for body in (k.body, *(s.body for s in inner)):
        ops = [s for s in body if isinstance(s, Op)]
        sums = [s for s in ops if s.op == "add" and all(a.startswith("%") for a in s.args)]
        found |= {
            s.result
            for s in ops
            if s.op == "dot" and uses[s.result] == 1 and any(s.result in x.args for x in sums)
        }
    return found
