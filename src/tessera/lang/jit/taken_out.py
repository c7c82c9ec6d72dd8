"""Programs taken out of compiled functions: `Lowered` for their text, `OneProgram` for files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ...core.errors import UsageError
from ...ir.graph.node import Graph
from ..record.tree import Spec
from ..value.engine import Program, engine
from ..value.tensor import Tensor
from .cache_entry import Entry
from .segments import Source, held


@dataclass(frozen=True)
class CompiledText:
    """A compiled program: its `text`, in XLA's HLO, `cost` and `memory`.

    `cost` has "flops", and "bytes" read and written, of one device, as XLA counts them: the body of
    a loop counts once. `memory` has the bytes of one device: "arguments", "results", "temporary",
    and "reused", the part of the results that lies in donated arguments.
    """

    text: str
    cost: dict[str, float]
    memory: dict[str, int]


class Lowered:
    """The program of a call that does not run: `f.lower(x).stablehlo()`, `.compile()`."""

    def __init__(self, program: Program) -> None:
        self._lowered = engine().lowered(program)

    def stablehlo(self) -> str:
        """The program as it is given to XLA, in StableHLO."""
        return self._lowered.text()

    def compile(self) -> CompiledText:
        """Compiles the program for its devices, without running it."""
        return CompiledText(*self._lowered.compiled())


@dataclass(frozen=True)
class OneProgram:
    """A recorded call that is one program. Each input of `graph` takes what stands at its place in
    `sources`: the number of a leaf of the call, a tensor from outside the call, or None for a
    random key. `leaves` and `spec` are the call's own; `out_leaves` and `out_spec` its result's,
    where the results of `graph` go to the places `slots`."""

    graph: Graph
    program: Program
    sources: tuple[int | Tensor | None, ...]
    leaves: Sequence[Any]
    spec: Spec
    out_leaves: Sequence[Any]
    out_spec: Spec
    slots: Sequence[int]
    changes: bool  # whether the call changes its arguments or variables, or prints


def one_program(
    caller: str, name: str, entry: Entry, leaves: Sequence[Any], spec: Spec
) -> OneProgram:
    """The program of `entry`, recorded for a call with these leaves. Raises UsageError if the call
    is several programs."""
    root = entry.root
    if root.written is None:
        raise UsageError(
            f"{caller}: {name} reads a value on the host, so it is several programs",
            fix="return the value, or choose by ts.where(...)",
        )
    program = root.program()
    if program.schedule.is_staged or program.schedule.options.executor == "stepped":
        kind = "a pipeline" if program.schedule.is_staged else "run step by step here"
        raise UsageError(
            f"{caller}: {name} is {kind}, so each of its steps is a program",
            fix=f"look at its schedule: {name}.plan(...); or take out a function of one program",
        )
    own, tensors = entry.dynamic[: entry.dynamic_argument_count], entry.pick(leaves)
    graph, written = root.graph, root.written

    def source(where: Source) -> int | Tensor | None:
        is_own = isinstance(where, int) and where < len(own)
        return own[where] if is_own else held(where, tensors)  # type: ignore[index]

    sources = [source(root.sources[i]) for i in root.imports]
    return OneProgram(
        graph, program, tuple(sources), leaves, spec,
        written.leaves, written.spec, written.slots, bool(_effects(written)),
    )  # fmt: skip


def _effects(written: Any) -> list[Any]:
    return [*written.edits, *written.fills, *written.assigned, *written.host_outputs, *written.same]
