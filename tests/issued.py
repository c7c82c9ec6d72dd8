"""A check that a program issues exactly the collectives of its schedule.

`checked()` compares each program built inside when it is traced: kind, number and elements of each
collective, with those in loops counted per iteration. `compiled_collectives` counts the collectives
of a compiled program.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, assert_never

import pytest

from tessera.core.layout import shard_count
from tessera.core.options import ProgramOptions
from tessera.ir.graph.node import Node
from tessera.ir.schedule.schedule import Collective, Compute, Loop, Region, Schedule, Send, Step
from tessera.ir.tile.node import mesh_kernel
from tessera.ops.redistribute import all_gather, all_reduce, all_to_all, reduce_scatter

Count = Counter[tuple[str, int]]
ISSUED = {
    "psum": all_reduce.name,
    "pmax": all_reduce.name,
    "pmin": all_reduce.name,
    "all_gather": all_gather.name,
    "reduce_scatter": reduce_scatter.name,
    "all_to_all": all_to_all.name,
    "ppermute": "permute",
}


def planned(steps: Iterable[Step], times: int = 1, results: bool = False) -> Count:
    """Counts the collectives of `steps` by (kind, elements that a device sends); with `results`, by
    (kind, elements that it receives)."""
    size = (lambda n: _size(n.type.local_shape)) if results else _sent
    found = Count()
    for step in steps:
        match step:
            case Collective():
                found[step.op, sum(map(size, step.nodes))] += times
            case Loop():
                found += planned(step.body.steps, times * step.times, results)
            case Region():
                found += planned(step.body.steps, times, results)
            case Compute() | Send():
                pass
            case _:
                assert_never(step)
    return Count({k: n for k, n in found.items() if k[1]})  # without elements nothing is sent


def issued(jaxpr: Any) -> Count:
    """Counts the collectives of a traced program like `planned`."""
    found = Count()
    for e, times in equations(jaxpr):
        if e.primitive.name in ISSUED:
            size = sum(v.aval.size for v in e.invars)
            found[ISSUED[e.primitive.name], size] += times if size else 0
    return found


def equations(jaxpr: Any, times: int = 1) -> Iterator[tuple[Any, int]]:
    """Yields each equation of a traced program and of its inner programs, with the number of times
    it runs."""
    for e in jaxpr.eqns:
        yield e, times
        inner = times * e.params["length"] if e.primitive.name == "scan" else times
        for value in e.params.values():
            for part in value if isinstance(value, list | tuple) else (value,):
                body = getattr(part, "jaxpr", part)
                if hasattr(body, "eqns"):
                    yield from equations(body, inner)


def _sent(n: Node) -> int:
    """The elements that a device sends, with the padding of an uneven split."""
    if n.op == reduce_scatter.name:
        return _size(n.type.local_shape) * shard_count(n.attrs["axes"], n.type.sizes)
    return _size(n.args[0].type.local_shape)


def _size(shape: Iterable[int]) -> int:
    n = 1
    for s in shape:
        n *= s
    return n


def _says(steps: Iterable[Step]) -> bool:
    """Returns whether each collective of `steps` is one collective of the engine.

    Tables of rounds, sums in a fixed order, broadcasts and kernels are made of several. On a folded
    mesh one device holds several coordinates.
    """
    for step in steps:
        if step.mesh is not None and step.mesh.onto is not None:
            return False
        match step:
            case Collective():
                own = any({"algorithm", "order"} & {*n.attrs} for n in step.nodes)
                if step.op in ("broadcast", mesh_kernel.name) or own:
                    return False
            case Loop() | Region():
                if not _says(step.body.steps):
                    return False
            case _:
                pass
    return True


class _Checked:
    """A jitted program that is compared with its steps at the first call or lowering."""

    def __init__(self, run: Any, steps: tuple[Step, ...]) -> None:
        self.run, self.steps, self.fresh = run, steps, True

    def _check(self, arrays: Any) -> None:
        if self.fresh:
            self.fresh = False
            found, want = issued(self.run.trace(*arrays).jaxpr.jaxpr), planned(self.steps)
            assert found == want, f"issued: {found - want}, planned: {want - found}"

    def __call__(self, *arrays: Any) -> Any:
        self._check(arrays)
        return self.run(*arrays)

    def lower(self, *arrays: Any) -> Any:
        self._check(arrays)
        return self.run.lower(*arrays)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.run, name)


@contextmanager
def checked() -> Iterator[None]:
    """Compares each program that is built inside with its schedule."""
    from tessera import compile
    from tessera.runtime import stepped_executor as stepped
    from tessera.runtime.program_cache import Program

    def seen(run: Any, steps: tuple[Step, ...], order: str) -> Any:
        program = run if isinstance(run, Program) else run.run  # else it puts results in order
        if not order and _says(steps):
            make = program._make
            program._make = lambda: _Checked(make(), steps)
        return run

    whole, one = compile.lower, stepped.Stepped._compiled

    def lower(s: Schedule, donate: Any, options: Any, under: ProgramOptions) -> Any:
        return seen(whole(s, donate, options, under), s.steps, under.sum_order)

    def compiled(self: Any, step: Any) -> Any:
        return seen(one(self, step), (step,), self.under.sum_order)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compile, "lower", lower)
        patch.setattr(stepped.Stepped, "_compiled", compiled)
        yield


# -- compiled programs ----------------------------------------------------------------------------
_KIND = re.compile(
    r" = (.*?) (all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)(?:-start)?\("
)
_SHAPE = re.compile(r"(pred|[suf]\d+|bf16)\[([\d,]*)\]")
_CALLS = re.compile(r"(?:body|to_apply|calls|condition)=%?([\w.\-]+)")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')


def compiled_collectives(text: str) -> Count:
    """Counts the collectives in a compiled program's text by (kind, elements of the results on a
    device), loops included."""
    bodies: dict[str, list[str]] = {}
    name = main = ""
    for line in text.splitlines():
        if head := re.match(r"(ENTRY )?%?([\w.\-]+) .*\{$", line):
            name = head[2]
            main = name if head[1] else main
            bodies[name] = []
        elif name:
            bodies[name].append(line)

    def count(of: str, times: int) -> Count:
        found = Count()
        for line in bodies.get(of, ()):
            if m := _KIND.search(line):
                size = sum(_size(map(int, filter(None, s[2].split(","))))
                           for s in _SHAPE.finditer(m[1]))  # fmt: skip
                found[m[2].replace("-", "_").replace("collective_", ""), size] += times
                continue
            trips = _TRIPS.search(line)
            for called in _CALLS.findall(line):
                found += count(called, times * int(trips[1]) if trips else times)
        return found

    return count(main, 1)
