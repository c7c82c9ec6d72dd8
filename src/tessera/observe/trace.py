"""`graph.trace`: the graph of a function at each stage of the compiler, e.g. `trace(model,
batch).show()`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from ..core.checks import whole
from ..core.context import replaced, settings
from ..core.layout import TensorType
from ..ir.graph.node import Graph
from ..ir.schedule.schedule import Schedule
from ..lang.jit import trace as lang
from ..lang.jit.jit import Jit
from ..lang.program.training_step import TrainingStep
from ..lang.record.tree import tree_map
from ..lang.value.tensor import Tensor
from ..passes.plan import plan, prepared, scheduled


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Trace(Graph):
    """The recorded Graph, with the later stages of the same program.

    A pipeline in it is recorded as a plain function, on the whole batch; `.schedule` has its stages
    and sends.
    """

    planned: Callable[[], Schedule] | None = dataclasses.field(default=None, repr=False)

    @property
    def stages(self) -> dict[str, Graph]:
        """The graph after each stage by its name, in execution order."""
        return {"recorded": self, "simplified": prepared(self)}

    @property
    def schedule(self) -> Schedule:
        """The steps of the program, under the options of its recording. A pipeline is planned as in
        a call, which records the function once more."""
        return plan(self) if self.planned is None else self.planned()

    def side_by_side(self, width: int = 160) -> str:
        """The stages side by side as text of `width` columns: `-` marks lines that the next stage
        removes, `+` lines that it adds. Raises UsageError for a width below 40."""
        from ..show.stages import stages_text  # its library is slow to import

        return stages_text(self.stages, whole("side_by_side", "width", width, 40))

    def show(self) -> None:
        """Prints the stages side by side, with changes in colour."""
        from ..show.stages import show

        show(self.stages)


def trace(fn: Callable[..., Any], *args: Any, reduce_partial: bool = True, **kwargs: Any) -> Trace:
    """The Graph that `fn(*args, **kwargs)` records. Nothing is computed and no device is needed.

    Arguments are tensors, arrays, or types (`TensorType`) in place of tensors; all others are
    static. With `reduce_partial`, partial sums over devices in results are completed. `.stages` and
    `.show()` of the result show the graph after the passes. Raises UsageError if `fn` reads a value
    on the host.
    """
    recording = lang.record_call("trace", fn, args, kwargs, reduce_partial=reduce_partial)
    setting = settings()

    def planned() -> Schedule:
        given, named = tree_map(_standing, (args, kwargs))
        compiled = fn if isinstance(fn, (Jit, TrainingStep)) else Jit(fn, (), reduce_partial)
        with replaced(
            mesh=setting.mesh,
            program=setting.program,
            autocast=setting.autocast,
            autocast_embeddings=setting.autocast_embeddings,
            autocast_fp8=setting.autocast_fp8,
        ):
            return scheduled(compiled.plan(*given, **named))

    g = recording.graph
    last = planned if recording.piped else None
    return Trace(g.name, g.nodes, g.inputs, g.outputs, g.options, last)


def _standing(x: Any) -> Any:
    """A tensor without data in place of a type."""
    return Tensor(None, x) if isinstance(x, TensorType) else x
