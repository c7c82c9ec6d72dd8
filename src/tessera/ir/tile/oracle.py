"""NumPy oracle of kernels: expected values, also of devices that put to each other.

The devices of a mesh run in turns, in an order that can be chosen. A put copies its tile some time
after it was issued, so a race shows as a difference between orders.

>>> from tessera.ir.tile.kernels import DISPATCH
>>> from tessera.ir.tile.text import parse
>>> x = np.arange(64 * 64).reshape(64, 64) % 7
>>> (y,) = evaluate(parse(DISPATCH), x.astype("bfloat16"), np.arange(96, dtype=np.int32) // 2)
>>> bool((y == x[np.arange(96) // 2]).all())
True
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any, assert_never

import numpy as np

from ...core.checks import unfit
from ...core.dtypes import DType, beyond, held_as
from ...core.errors import DTypeError, GraphError, ShapeError, UsageError
from ...core.value_checks import is_whole
from ..graph import xp_numpy as xp
from .body import Enter, Load, Loop, Op, Put, Quiet, Ref, Statement, Store, Wait, When, where
from .index import Index, sizes_of
from .kernel import Kernel, need_kernel
from .op import Call
from .ops import op_of

Array = Any
Names = dict[str, int]
Place = tuple[int, ...]


def evaluate(
    kernel: Kernel, *arrays: Array, order: str | int = "in turn", wide: bool = False
) -> tuple[Array, ...]:
    """The outputs of a kernel for arrays, one for each input.

    On a mesh, arrays and outputs have one more dim in front for each axis: the blocks of the
    devices. `order` is that of their turns: "in turn" (puts arrive at once), "reversed" (a device
    runs as far as it can, and puts arrive as late as they can), or the seed of a random order.
    `wide` computes floats in f64. A number that nobody wrote is NaN.

    Raises UsageError, ShapeError or DTypeError if the arrays are not those of the inputs, or an
    index is out of bounds; GraphError, with the devices and their slots, if devices wait for ever.
    """
    k = need_kernel("evaluate", kernel)
    if order not in ("in turn", "reversed") and not is_whole(order):
        fix = 'use "in turn", "reversed", or a whole number as a seed'
        raise unfit("evaluate", "the order", order, fix)
    ins = [r for r in k.refs if r.kind == "in"]
    if len(ins) != len(arrays):
        raise UsageError(
            f"evaluate: {k.name} has {len(ins)} inputs, {len(arrays)} arrays are given",
            fix=f"give one array for each, in order: {', '.join(r.name for r in ins)}",
        )
    given = {r.name: _given(k, r, x, wide) for r, x in zip(ins, arrays, strict=True)}
    devices = Devices(k, wide)
    for n, rank in enumerate(k.ranks):
        for r in k.refs:
            if r.kind == "in":
                devices.memory[n][r.name] = given[r.name][rank]
            else:
                dtype = _held(r.dtype, wide)
                devices.memory[n][r.name] = np.full(k.shape(r), beyond(r.dtype), dtype)
    with np.errstate(all="ignore"):
        devices.run(order)
    sizes = tuple(n for _, n in k.mesh)
    return tuple(
        np.stack([m[r.name] for m in devices.memory]).reshape(*sizes, *k.shape(r))
        for r in k.refs
        if r.kind == "out"
    )


def _held(dtype: DType, wide: bool) -> Any:
    return np.dtype(np.float64) if wide and dtype.is_float else dtype.numpy


def _given(k: Kernel, r: Ref, value: Array, wide: bool) -> Array:
    """The array of an input, checked."""
    x, shape = np.asarray(value), (*(n for _, n in k.mesh), *k.shape(r))
    if x.shape != shape:
        have = list(x.shape)
        fix = f"give {r.name} the shape {list(shape)}"
        raise ShapeError(f"evaluate: {r.name} is {r.dtype}{list(shape)}, not {have}", fix=fix)
    if held_as(x.dtype) is not r.dtype and not (wide and r.dtype.is_float and x.dtype.kind == "f"):
        fix = f"give {r.name} in {r.dtype}"
        raise DTypeError(f"evaluate: {r.name} is {r.dtype}, not {held_as(x.dtype)}", fix=fix)
    made = x.astype(_held(r.dtype, wide))
    if not r.dtype.is_float and not np.array_equal(made, x):
        fix = f"keep the values of {r.name} within {r.dtype}"
        raise DTypeError(f"evaluate: {r.name} has values that {r.dtype} does not hold", fix=fix)
    return made


# ---- devices -----------------------------------------------------------------------------------
class Devices:
    """The devices of a mesh with their memory, slots and puts under way."""

    def __init__(self, k: Kernel, wide: bool) -> None:
        self.kernel, self.wide = k, wide
        self.refs = {r.name: r for r in k.refs}
        self.number = {rank: n for n, rank in enumerate(k.ranks)}
        self.memory: list[dict[str, Array]] = [{} for _ in k.ranks]
        self.set: set[tuple[int, str, tuple[int, ...]]] = set()
        self.flying: list[tuple[int, int, Put, Names]] = []  # source, target, put, names
        self.here: dict[tuple[Any, ...], set[int]] = {}  # devices that came to a barrier

    def run(self, order: str | int) -> None:
        """Runs all devices to their ends, in turns."""
        draw = random.Random(order) if is_whole(order) else None
        steps = [self.device(n) for n in range(len(self.memory))]
        asks: dict[int, tuple[Any, ...]] = dict.fromkeys(range(len(steps)), ("go",))
        last = -1
        while asks or self.flying:
            ready = [n for n, ask in asks.items() if self._is_ready(n, ask)]
            if not ready and not self.flying:
                self._deadlock(asks)
            if draw is not None:
                i = draw.randrange(len(ready) + len(self.flying)) - len(ready)
                last = ready[i] if i < 0 else last
            else:
                i = 0 if order == "in turn" else len(self.flying) - 1
                if order == "reversed" and ready:
                    i, last = -1, max(ready)
                elif not self.flying:
                    i, last = -1, min((n for n in ready if n > last), default=min(ready))
            if i >= 0:
                self._arrive(i)
                continue
            ask = next(steps[last], None)
            if ask is None:
                del asks[last]
            else:
                asks[last] = ask

    def _is_ready(self, n: int, ask: tuple[Any, ...]) -> bool:
        match ask:
            case ("wait", sig, slot):
                return (n, sig, slot) in self.set
            case ("enter", key, size):
                return bool(len(self.here[key]) == size)
            case ("quiet",):
                return all(source != n for source, *_ in self.flying)
        return True

    def _arrive(self, i: int) -> None:
        source, target, put, names = self.flying.pop(i)
        tile = self.memory[source][put.src][self._place(put.src, put.src_at, names, put)]
        place = self._place(put.dst, put.dst_at, names, put)
        self.memory[target][put.dst][place] = tile.reshape(self.kernel.tile(self.refs[put.dst]))
        self.set.add((target, put.sig, sizes_of(put.slot, names)))

    def _deadlock(self, asks: dict[int, tuple[Any, ...]]) -> None:
        rows = []
        for n, ask in asks.items():
            what = f"wait {ask[1]}{list(ask[2])}" if ask[0] == "wait" else "enter"
            rows.append((f"rank {','.join(map(str, self.kernel.ranks[n]))}", what))
        raise GraphError(
            "evaluate: devices wait for ever",
            rows=rows,
            fix="put to each slot that is waited for, before the own wait",
            at="",
        )

    # ---- one device ----------------------------------------------------------------------------
    def device(self, n: int) -> Iterator[tuple[Any, ...]]:
        """The run of one device, which yields what it must wait for."""
        k = self.kernel
        names = k.at(k.ranks[n])
        for point in product(*map(range, k.extents.values())):
            yield from self._body(k.body, n, names | dict(zip(k.extents, point)), {})

    def _body(
        self, body: Sequence[Statement], n: int, names: Names, values: dict[str, Array]
    ) -> Iterator[tuple[Any, ...]]:
        for s in body:
            match s:
                case Op():
                    values[s.result] = self._op(s, names, values)
                case Load():
                    if self.kernel.mesh:
                        yield ("go",)
                    rows = None if s.rows is None else (s.rows[0], values[s.rows[1]])
                    place = self._place(s.ref, s.at, names, s, rows)
                    shape = self.kernel.types[s.result].shape
                    values[s.result] = np.array(self.memory[n][s.ref][place]).reshape(shape)
                case Store():
                    if self.kernel.mesh:
                        yield ("go",)
                    place, tile = self._place(s.ref, s.at, names, s), self.refs[s.ref]
                    value = values[s.value].reshape(self.kernel.tile(tile))
                    self.memory[n][s.ref][place] = value
                case Loop():
                    carried = [values[v] for v in s.carries]
                    for i in range(s.low.value(names), s.high.value(names)):
                        inner = values | dict(zip(s.carries, carried, strict=True))
                        yield from self._body(s.body, n, names | {s.index: i}, inner)
                        carried = [inner[v] for v in s.next]
                    values.update(zip(s.results, carried, strict=True))
                case When():
                    if s.test.value(names):
                        yield from self._body(s.body, n, names, dict(values))
                case Put():
                    yield ("go",)
                    rank = sizes_of(s.rank, names)
                    if rank not in self.number:
                        fix = "count modulo the axis, as in (rank_x+1)%x"
                        what = f"evaluate: there is no rank {rank}"
                        raise ShapeError(what, line=where(s), fix=fix)
                    self._place(s.src, s.src_at, names, s), self._place(s.dst, s.dst_at, names, s)
                    self._slot(s, names)
                    self.flying.append((n, self.number[rank], s, dict(names)))
                case Wait():
                    yield ("wait", s.sig, self._slot(s, names))
                case Enter():
                    yield ("go",)
                    yield self._enter(s, n)
                case Quiet():
                    yield ("quiet",)
                case _:
                    assert_never(s)

    def _enter(self, s: Enter, n: int) -> tuple[Any, ...]:
        sizes, rank = dict(self.kernel.mesh), self.kernel.ranks[n]
        size = int(np.prod([sizes[a] for a in s.axes]))
        group = tuple(-1 if a in s.axes else c for (a, _), c in zip(self.kernel.mesh, rank))
        turn = 0
        while n in self.here.setdefault((group, turn), set()):
            turn += 1
        self.here[group, turn].add(n)
        return ("enter", (group, turn), size)

    def _slot(self, s: Put | Wait, names: Names) -> tuple[int, ...]:
        slot = sizes_of(s.slot, names)
        signal = next(x for x in self.kernel.signals if x.name == s.sig)
        self._bounds(s.sig, slot, self.kernel.counts(signal), s)
        return slot

    def _bounds(self, name: str, at: Place, counts: Place, s: Statement) -> None:
        if not all(0 <= i < n for i, n in zip(at, counts, strict=True)):
            fix = f"stay within {list(counts)}"
            raise ShapeError(f"evaluate: {name}{list(at)} does not exist", line=where(s), fix=fix)

    def _place(
        self, name: str, at: tuple[Index, ...], names: Names, s: Statement,
        rows: tuple[int, Array] | None = None,
    ) -> Any:  # fmt: skip
        """The NumPy index of a tile; with `rows`, (dim, indices of elements), of gathered rows."""
        r = self.refs[name]
        index = sizes_of(at, names)
        self._bounds(name, index, self.kernel.counts(r), s)
        tiles = zip(index, self.kernel.tile(r), strict=True)
        parts: list[Any] = [slice(i * size, (i + 1) * size) for i, size in tiles]
        if rows is not None:
            dim, ids = rows
            most = self.kernel.shape(r)[dim] - 1
            low, high = (int(ids.min()), int(ids.max())) if ids.size else (0, 0)
            if low < 0 or high > most:
                what = f"evaluate: {name} has no rows {low} to {high}"
                raise ShapeError(what, line=where(s), fix=f"give ids from 0 to {most}")
            parts[dim] = ids
        return tuple(parts)

    # ---- values --------------------------------------------------------------------------------
    def _op(self, s: Op, names: Names, values: dict[str, Array]) -> Array:
        out, attrs = self.kernel.types[s.result], dict(s.attrs)
        start = np.int32(Index(attrs.get("start", "0")).value(names))
        # A number has the dtype of the values beside it; the first of `where` is a bool.
        near = [self.kernel.types[a].dtype for a in s.args if a.startswith("%")]
        call = Call(xp, out, attrs, self._cast, self._scalar, start)
        args = [values[a] if a.startswith("%") else self._scalar(a, near[-1]) for a in s.args]
        return np.asarray(op_of(s.op, attrs).compute(call, *args))

    def _cast(self, x: Array, dtype: DType) -> Array:
        return x.astype(_held(dtype, self.wide))

    def _scalar(self, text: str, dtype: DType) -> Array:
        return np.asarray(float(text), _held(dtype, self.wide))
