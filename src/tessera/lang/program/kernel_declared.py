"""The arguments of `ts.kernel`, read, and the kernels that they and a function's body make."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from keyword import iskeyword
from typing import Any, cast

from ...core.checks import MOST, mapping, string, unfit, whole
from ...core.context import replaced
from ...core.dtypes import DType, dtype_of, f32
from ...core.errors import TesseraError, UsageError
from ...core.wording import nearest
from ...ir.tile.body import (
    Kind,
    Load,
    Loop,
    Op,
    Ref,
    Signal,
    Store,
    When,
    every,
    located,
    where,
)
from ...ir.tile.index import NAME, Index, parts
from ...ir.tile.kernel import Kernel
from ...ir.tile.text import PAIR
from ...ir.tile.tidy import tidy
from ...ir.tile.verify import verify
from ..value.eager import CURRENT_TRACE
from .kernel_references import Reference, Slots
from .kernel_trace import KernelTrace
from .kernel_values import Size

_REF = re.compile(r"(in|out|sym)\s+(\w+)?\s*\[(.*?)\]\s*tiles\s*\[(.*?)\]")
_SIG = re.compile(r"sig\s*\[(.*?)\]")
_FORMS = 'write "in f32[M, K] tiles [BM, BK]", also with out or sym, or "sig [n]"'


@dataclass(frozen=True)
class Declared:
    """The arguments of `ts.kernel`, read. A dtype of None is that of an argument."""

    name: str
    grid: tuple[tuple[str, Index], ...]
    refs: tuple[tuple[Ref, DType | None], ...]
    signals: tuple[Signal, ...]
    tune: tuple[tuple[str, int], ...]
    speed: tuple[tuple[str, int], ...]
    mesh: tuple[tuple[str, int], ...]
    split: tuple[str, ...]
    at: str

    @property
    def dims(self) -> tuple[str, ...]:
        """The names of sizes that a call gives."""
        texts = [e for r, _ in self.refs for e in (*r.shape, *r.tiles)]
        texts += [e for _, e in self.grid] + [e for s in self.signals for e in s.slots]
        known = {n for n, _ in (*self.tune, *self.speed, *self.mesh)}
        names = dict.fromkeys(n for e in texts for n in NAME.findall(e.text))
        return tuple(n for n in names if n not in known)

    @property
    def parameters(self) -> tuple[str, ...]:
        """The names that a parameter of the function may have."""
        refs = [r.name for r, _ in self.refs] + [s.name for s in self.signals]
        sizes = [n for n, _ in (*self.tune, *self.mesh)]
        ranks = [f"rank_{axis}" for axis, _ in self.mesh]
        return (*refs, *(n for n, _ in self.grid), *self.dims, *sizes, *ranks)

    def trace(self, fn: Callable[..., Any], kernel: Kernel) -> Kernel:
        """`kernel`, which has no body yet, with the body that `fn` records."""
        indices = [n for n, _ in self.grid] + [f"rank_{axis}" for axis, _ in self.mesh]
        names = [*kernel.sizes, *indices, *(n for n, _ in self.speed)]
        trace = KernelTrace(self.name, kernel.sizes, names)
        given: dict[str, Any] = {n: trace.index(Index(n)) for n in indices}
        given |= {n: Size(v, n) for n, v in kernel.sizes.items()}
        given |= {r.name: Reference(trace, r) for r in kernel.refs}
        given |= {s.name: Slots(trace, s) for s in kernel.signals}
        token = CURRENT_TRACE.set(trace)
        try:
            with replaced(autocast=None):
                returned = fn(
                    **{n: given[n] for n in inspect.signature(fn).parameters if n in given}
                )
        finally:
            CURRENT_TRACE.reset(token)
        if returned is not None:
            what = f"{self.name}: the function of a kernel returns a value"
            raise UsageError(what, fix="store it in an output: y[i, j] = value", at=self.at)
        try:
            made = replace(kernel, body=tidy(trace.block, trace.first))
            self._need_independent(made)
            verify(made)
        except TesseraError as error:
            found = re.search(r"line +: (\d+): (.*)", str(error))
            number, text = (int(found[1]), found[2]) if found else (0, "")
            raise located(error, text, trace.places.get(number, self.at)) from None
        return made

    def _need_independent(self, kernel: Kernel) -> None:
        """Raises UsageError if what is computed depends on an index along a dim that is split."""
        for dim in self.split:
            own = {dim, *(n for n, extent in self.grid if dim in extent.names)}
            for s in every(kernel.body):
                match s:
                    case Op():
                        read = Index(s.attr("start", "0")).names
                    case Loop():
                        ends = s.low.names | s.high.names
                        read = ends - {dim}  # part of a sum along the dim is no mistake
                        own |= {s.index} if ends & own else set()
                    case When():
                        read = s.test.names
                    case Load() | Store():
                        read = frozenset(_places(s, kernel.ref(s.ref), dim, own))
                    case _:
                        continue
                if own & read:
                    raise UsageError(
                        f"{self.name}: {dim} cannot be split, the body reads {min(own & read)}",
                        line=where(s),
                        fix=f"leave {dim} out of split: each device would count from 0",
                        at="",
                    )


def _places(s: Load | Store, ref: Ref, dim: str, own: set[str]) -> set[str]:
    """{`dim`} if an access finds its tile by the place along `dim` of all devices."""
    rows = s.rows if isinstance(s, Load) else None
    for d, (at, size, tile) in enumerate(zip(s.at, ref.shape, ref.tiles, strict=True)):
        if dim not in size.names or (tile.text == size.text and rows is None):
            continue
        if (rows and rows[0] == d) or dim in at.names or not own & at.names or "%" in at.text:
            return {dim}
    return set()


def _sizes(name: str, argument: str, given: object) -> tuple[tuple[str, int], ...]:
    fix = 'give sizes by name, e.g. {"BM": 64}'
    sizes = mapping(name, argument, given or {}, fix).items()
    for n, _ in sizes:
        if not isinstance(n, str) or not n.isidentifier() or iskeyword(n):
            raise unfit(name, argument, dict(sizes), fix)
    return tuple((n, whole(name, n, v, 1, MOST)) for n, v in sizes)


def _indices(text: str) -> tuple[Index, ...]:
    return tuple(Index(part) for part in parts(text))


def declared(
    name: str, texts: Mapping[str, str], grid: str, split: str, at: str, **sizes: Any
) -> Declared:
    refs: list[tuple[Ref, DType | None]] = []
    signals: list[Signal] = []
    for n, text in texts.items():
        given = string("kernel", n, text).strip()
        if m := _REF.fullmatch(given):
            dtype = dtype_of(m[2]) if m[2] else None
            ref = Ref(cast(Kind, m[1]), n, dtype or f32, _indices(m[3]), _indices(m[4]))
            refs.append((ref, dtype))
        elif m := _SIG.fullmatch(given):
            signals.append(Signal(n, _indices(m[1])))
        else:
            raise UsageError(f"kernel: {n}={text!r} is not a reference", fix=_FORMS)
    pairs = PAIR.findall(grid)
    if "".join(f"{a}={b}" for a, b in pairs).replace(" ", "") != grid.replace(" ", ""):
        raise UsageError(f"kernel: grid={grid!r} is not one", fix='write grid="i=M//BM j=N//BN"')
    d = Declared(
        name, tuple((a, Index(b)) for a, b in pairs), tuple(refs), tuple(signals),
        **{k: _sizes("kernel", k, v) for k, v in sizes.items()},
        split=tuple(split.split()), at=at,
    )  # fmt: skip
    for n in d.parameters:
        if d.parameters.count(n) > 1:
            fix = "give each reference, index and size a name of its own"
            raise UsageError(f"kernel: {n!r} has two meanings", fix=fix)
    for n in d.split:
        if n not in d.dims:
            fix = f"use some of {nearest(n, d.dims)}"
            raise UsageError(f"kernel: split={split!r} names {n}, which is no dim", fix=fix)
    return d
