"""References and signals of kernels that are written in Python."""

from __future__ import annotations

from typing import Any, NamedTuple

from ...core.checks import unfit
from ...core.value_checks import is_number
from ...ir.tile.body import Load, Ref, Signal, Store
from ...ir.tile.index import Index, sizes_of
from ...ir.tile.op import Type
from ..value.tensor import Tensor
from .kernel_trace import KernelTrace
from .kernel_values import Size, Value


class Place(NamedTuple):
    """A tile of a reference, or a slot of a signal."""

    name: str
    at: tuple[Index, ...]


class Reference:
    """A reference of a kernel: `x[i, k]` loads a tile, `y[i, j] = value` stores one, and `x.at(i)`
    names one for `ts.kernel.put`. `x[ids, j]` with a tile of i32 gathers rows."""

    __iter__ = None  # Python would count its indices for ever

    def __init__(self, trace: KernelTrace, ref: Ref) -> None:
        self._trace, self._ref, self.dtype = trace, ref, ref.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """The sizes of its dims."""
        return tuple(Size(e.value(self._trace.sizes), e.text) for e in self._ref.shape)

    def at(self, *index: object) -> Place:
        """The place of a tile."""
        return Place(self._ref.name, self._trace.indices(self._ref.name, index))

    def __getitem__(self, at: Any) -> Value:
        trace, ref, at = self._trace, self._ref, at if isinstance(at, tuple) else (at,)
        tile, kept, rows = sizes_of(ref.tiles, trace.sizes), {*ref.kept}, None
        found = [d for d, v in enumerate(at) if isinstance(v, Value) and v.ndim]
        with trace.naming():
            if found and len(tile) == len(at):  # rows, by the first such index
                d = found[0]
                ids = trace.held(trace.own(at[d]))
                rows, kept = (d, ids.text), {*kept, d}
                tile, at = (*tile[:d], ids.size, *tile[d + 1 :]), (*at[:d], 0, *at[d + 1 :])
            index = trace.indices(ref.name, at)
        s = Load(trace.fresh(), ref.name, index, rows, line=trace.line())
        trace.block.append(s)
        return trace.made_value(Type(ref.dtype, tuple(tile[d] for d in sorted(kept))), s.result)

    def __setitem__(self, at: Any, value: Any) -> None:
        trace, ref, at = self._trace, self._ref, at if isinstance(at, tuple) else (at,)
        with trace.naming():
            if is_number(value):  # in all elements
                tile = sizes_of(ref.tiles, trace.sizes)
                value = trace.full(value, ref.dtype, tuple(tile[d] for d in ref.kept))
            if not isinstance(value, Tensor):
                raise unfit(ref.name, "a stored tile", value, "store a tile")
            v = trace.held(trace.own(value))
            index = trace.indices(ref.name, at)
        trace.block.append(Store(ref.name, index, v.text, line=trace.line()))


class Slots:
    """A signal of a kernel: `got[s]` is a slot of it."""

    __iter__ = None  # Python would count its indices for ever

    def __init__(self, trace: KernelTrace, signal: Signal) -> None:
        self._trace, self._signal = trace, signal

    def __getitem__(self, at: Any) -> Place:
        name, index = self._signal.name, at if isinstance(at, tuple) else (at,)
        return Place(name, self._trace.indices(name, index))
