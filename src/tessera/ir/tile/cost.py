"""Costs of a kernel's run on one device: FLOPs, bytes, and the memory that its tiles need.

>>> from tessera.ir.tile.kernels import DISPATCH
>>> from tessera.ir.tile.text import parse
>>> cost(parse(DISPATCH)).stored_bytes == 96 * 64 * 2
True
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import product
from typing import assert_never

from .body import Enter, Load, Loop, Op, Put, Quiet, Statement, Store, Wait, When, every
from .kernel import Kernel, need_kernel
from .op import Type
from .ops import op_of


@dataclass(frozen=True, slots=True)
class Cost:
    """The costs of a run on one device.

    A product of [m, k] and [k, n] has 2 m k n FLOPs, an elementwise op one for each element of its
    result, a reduction one for each element that it reduces. `loaded_bytes` and `stored_bytes`
    count each load and store as it happens. `put_bytes` go to other devices. `shared_bytes` is the
    size of the loaded tiles that a step of the grid holds at once, those of a loop `stages` times
    if the kernel has this speed.
    """

    flops: int = 0
    loaded_bytes: int = 0
    stored_bytes: int = 0
    put_bytes: int = 0
    shared_bytes: int = 0

    def times(self, n: int) -> Cost:
        """The cost of `n` runs; the memory is that of one."""
        return Cost(
            n * self.flops,
            n * self.loaded_bytes,
            n * self.stored_bytes,
            n * self.put_bytes,
            self.shared_bytes,
        )

    def plus(self, other: Cost) -> Cost:
        """The cost of both, one after the other."""
        return Cost(
            self.flops + other.flops,
            self.loaded_bytes + other.loaded_bytes,
            self.stored_bytes + other.stored_bytes,
            self.put_bytes + other.put_bytes,
            max(self.shared_bytes, other.shared_bytes),
        )


def cost(kernel: Kernel, rank: int = 0) -> Cost:
    """The cost on the device with this number, in the order of `kernel.ranks`."""
    k = need_kernel("cost", kernel)
    count = _Counter(k)
    own = k.at(k.ranks[rank])
    read = _decides(k.body)
    # Steps differ only by the indices that bounds and conditions read.
    loops = {name: range(n if name in read else min(n, 1)) for name, n in k.extents.items()}
    alike = 1
    for name, n in k.extents.items():
        alike *= 1 if name in read else n
    total = Cost()
    for point in product(*loops.values()):
        total = total.plus(count.body(k.body, own | dict(zip(loops, point, strict=True))))
    return total.times(alike)


def _decides(body: Iterable[Statement]) -> frozenset[str]:
    """The names that bounds and conditions, and ranks of puts, read."""
    names: frozenset[str] = frozenset()
    for s in every(tuple(body)):
        match s:
            case Loop():
                names |= s.low.names | s.high.names
            case When():
                names |= s.test.names
            case Put():
                names = names.union(*(r.names for r in s.rank))
            case _:
                pass
    return names


class _Counter:
    def __init__(self, k: Kernel) -> None:
        self.k, self.stages = k, dict(k.speed).get("stages", 1)

    def body(self, body: tuple[Statement, ...], names: Mapping[str, int]) -> Cost:
        """The cost of statements under values of names."""
        total, held = Cost(), 0
        for s in body:
            part = self._one(s, names)
            if isinstance(s, Load):
                held += self.k.types[s.result].bytes
            total = total.plus(part)
        return replace(total, shared_bytes=total.shared_bytes + held)

    def _one(self, s: Statement, names: Mapping[str, int]) -> Cost:
        match s:
            case Op():
                types = self.k.types
                ins = [types[a] for a in s.args if a.startswith("%")]
                return Cost(op_of(s.op, dict(s.attrs)).flops(ins, types[s.result]))
            case Load():
                return Cost(loaded_bytes=self.k.types[s.result].bytes)
            case Store():
                return Cost(stored_bytes=self.k.types[s.value].bytes)
            case Loop():
                return self._loop(s, names)
            case When():
                return self.body(s.body, names) if s.test.value(names) else Cost()
            case Put():
                r = self.k.ref(s.src)
                size = Type(r.dtype, self.k.tile(r)).bytes
                own = tuple(names[f"rank_{axis}"] for axis, _ in self.k.mesh)
                there = tuple(part.value(names) for part in s.rank)
                return Cost(put_bytes=0 if own == there else size)
            case Enter() | Wait() | Quiet():
                return Cost()
            case _:
                assert_never(s)

    def _loop(self, s: Loop, names: Mapping[str, int]) -> Cost:
        turns = range(s.low.value(names), s.high.value(names))
        total = Cost()
        if turns and s.index not in _decides(s.body):
            total = self.body(s.body, {**names, s.index: turns[0]}).times(len(turns))
        else:
            for i in turns:
                total = total.plus(self.body(s.body, {**names, s.index: i}))
        return replace(total, shared_bytes=total.shared_bytes * self.stages)
