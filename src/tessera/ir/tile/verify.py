"""Verifier of kernels: every access at every index on every device, without a run.

What needs no enumeration (names, scopes, types, tiles that divide) is checked when a kernel is
made. `faults` finds what is left: indices out of bounds, holes and races in outputs, and, with
`order.py`, mistakes in puts and waits.
"""

from __future__ import annotations

import math

from ...core.errors import GraphError
from .body import Enter, Load, Put, Quiet, Store, Wait, every, where
from .kernel import Kernel, need_kernel
from .order import Fault, communication
from .trace import Access, Place, Step, enumerated


def verify(kernel: Kernel) -> None:
    """Raises GraphError, with the line, for the first of the `faults` of a kernel."""
    found = faults(kernel)
    if found:
        first, *others = found
        rows = [("line", first.line)] + [("also", f"{f.what}, line {f.line}") for f in others[:5]]
        raise GraphError(f"verify: {first.what}", rows=rows, fix=first.fix, at="")


def faults(kernel: Kernel) -> tuple[Fault, ...]:
    """The mistakes in a kernel, one for each kind and line; none for a kernel that is right.

    A kernel with many accesses is checked at sizes of a few tiles, where each dim changes alone;
    faults then begin with these sizes. Raises GraphError if there are too many at any size.
    """
    small, steps = enumerated(need_kernel("verify", kernel))
    found: dict[tuple[str, str], Fault] = {}
    for fault in _faults(small, steps):
        if small is not kernel:
            sizes = " ".join(f"{n}={v}" for n, v in (*small.mesh, *small.dims))
            fault = fault._replace(what=f"at {sizes}: {fault.what}")
        found.setdefault((fault.kind, fault.line), fault)
    return tuple(found.values())


def _faults(k: Kernel, steps: list[Step]) -> list[Fault]:
    # Each stage relies on the ones before it.
    found = _bounds(k, steps)
    if not found:
        found = _outputs(k, steps)
        if any(isinstance(s, Put | Wait | Enter | Quiet) for s in every(k.body)):
            found += communication(k, {s.rank: s.accesses for s in steps})
        else:
            found += _reads(k, steps)
    return found


# ---- bounds ------------------------------------------------------------------------------------
def _bounds(k: Kernel, steps: list[Step]) -> list[Fault]:
    counts = {r.name: k.counts(r) for r in k.refs} | {s.name: k.counts(s) for s in k.signals}
    kinds = {r.name: r.kind for r in k.refs}
    found = []

    def check(a: Access, name: str, at: Place) -> None:
        if not _inside(at, counts[name]):
            kind = f"{kinds[name]} bounds" if name in kinds else "slot"
            unit = "tiles" if name in kinds else "slots"
            what = f"{name}[{_ints(at)}] is outside of {_ints(counts[name], ' x ')} {unit}"
            fix = "correct the index, the loop's bounds or the grid"
            found.append(Fault(kind, what, where(a.s), fix))

    for step in steps:
        for a in step.accesses:
            match a.s:
                case Load() | Store():
                    check(a, a.s.ref, a.at)
                case Put():
                    check(a, a.s.src, a.at)
                    check(a, a.s.dst, a.to)
                    check(a, a.s.sig, a.slot)
                    if not _inside(a.rank, tuple(n for _, n in k.mesh)):
                        sizes = " ".join(f"{axis}={n}" for axis, n in k.mesh)
                        what = f"rank {_ints(a.rank)} is outside of mesh {sizes}"
                        fix = "count modulo the axis, as in (rank_x+1)%x"
                        found.append(Fault("rank", what, where(a.s), fix))
                case Wait():
                    check(a, a.s.sig, a.slot)
                case _:
                    pass
    return found


def _inside(at: Place, counts: Place) -> bool:
    return all(0 <= i < n for i, n in zip(at, counts, strict=True))


def _ints(at: Place, by: str = ", ") -> str:
    return by.join(map(str, at))


# ---- outputs -----------------------------------------------------------------------------------
def _outputs(k: Kernel, steps: list[Step]) -> list[Fault]:
    """Holes in outputs, and tiles that two steps of the grid write."""
    found = []
    writers: dict[tuple[Place, str, Place], Place] = {}
    for step in steps:
        for a in step.accesses:
            if isinstance(a.s, Store):
                other = writers.setdefault((step.rank, a.s.ref, a.at), step.point)
                if other != step.point:
                    what = f"{a.s.ref}[{_ints(a.at)}] is written by the steps"
                    what += f" ({_ints(other)}) and ({_ints(step.point)}) of the grid"
                    fix = "let each step write tiles of its own"
                    found.append(Fault("race", what, where(a.s), fix))
    for r in k.refs:
        counts = k.counts(r)
        for rank in k.ranks if r.kind == "out" else ():
            tiles = (_numbered(n, counts) for n in range(math.prod(counts)))
            hole = next((t for t in tiles if (rank, r.name, t) not in writers), None)
            if hole is not None:
                on = f" on rank {_ints(rank)}" if rank else ""
                what = f"{r.name}[{_ints(hole)}] is never written{on}"
                fix = "write each tile: extend the grid or the loop"
                found.append(Fault("hole", what, where(r), fix))
                break
    return found


def _numbered(n: int, counts: Place) -> Place:
    """The tile with this number, in the order of the text's dims."""
    at: list[int] = []
    for count in reversed(counts):
        n, i = divmod(n, count)
        at.insert(0, i)
    return tuple(at)


def _reads(k: Kernel, steps: list[Step]) -> list[Fault]:
    """Reads of what the own step of the grid has not written."""
    found = []
    kinds = {r.name: r.kind for r in k.refs}
    writers = {
        (step.rank, a.s.ref, a.at): step.point
        for step in steps
        for a in step.accesses
        if isinstance(a.s, Store)
    }
    for step in steps:
        own: set[tuple[str, Place]] = set()
        for a in step.accesses:
            if isinstance(a.s, Store):
                own.add((a.s.ref, a.at))
            elif isinstance(a.s, Load) and kinds[a.s.ref] != "in" and (a.s.ref, a.at) not in own:
                tile = f"{a.s.ref}[{_ints(a.at)}]"
                by = writers.get((step.rank, a.s.ref, a.at), step.point)
                if by == step.point:
                    fix = "store before the load, or carry the value in a loop"
                    what = f"{tile} is read before it is written"
                    found.append(Fault("unwritten", what, where(a.s), fix))
                else:
                    fix = "compute it in the own step, or make a loop of the grid's index"
                    what = f"step ({_ints(step.point)}) of the grid reads {tile} of ({_ints(by)})"
                    found.append(Fault("other step", what, where(a.s), fix))
    return found
