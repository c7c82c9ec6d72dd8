"""A function's graph as it goes through the passes: `graph.trace(model, batch).show()`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from ..core.checks import whole
from ..core.context import replaced, settings
from ..core.layout import TensorType
from ..ir.graph.node import Graph
from ..ir.schedule.schedule import Schedule
from ..lang import trace as lang
from ..lang.jit import Jit
from ..lang.tensor import Tensor
from ..lang.training import TrainingStep
from ..lang.tree import tree_map
from ..passes.plan import plan, prepared, scheduled


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Trace(Graph):
    """The Graph as recorded, and with it the later stages of the same program.

    A pipeline in it is recorded as a plain function, on the whole batch; `.schedule` has its
    stages, and what they send.
    """

    planned: Callable[[], Schedule] | None = dataclasses.field(default=None, repr=False)

    @property
    def stages(self) -> dict[str, Graph]:
        """The graph after each stage by its name, in the order in which they run."""
        return {"recorded": self, "simplified": prepared(self)}

    @property
    def schedule(self) -> Schedule:
        """The steps that the program runs in, under the options that it was recorded under. Of a
        pipeline: as a call plans them, which records the function once more."""
        return plan(self) if self.planned is None else self.planned()

    def side_by_side(self, width: int = 160) -> str:
        """The stages beside each other as text of `width` columns: `-` marks what the next stage
        takes away, `+` what it adds. Raises UsageError for a width that holds nothing."""
        from ..show.stages import stages_text  # its library is slow to import

        return stages_text(self.stages, whole("side_by_side", "width", width, 40))

    def show(self) -> None:
        """Prints the stages beside each other, what changed in colour."""
        from ..show.stages import show

        show(self.stages)


def trace(fn: Callable[..., Any], *args: Any, reduce_partial: bool = True, **kwargs: Any) -> Trace:
    """The Graph that `fn(*args, **kwargs)` records. Nothing is computed and no device is needed.

    Arguments are tensors, arrays, or types (`TensorType`) that stand for tensors; all others are
    static. With `reduce_partial` sums over devices that are pending in results are completed.
    `.stages` and `.show()` of the result show what the passes make of it. Raises UsageError if `fn`
    reads a value on the host.
    """
    made = lang.record_call("trace", fn, args, kwargs, reduce_partial=reduce_partial)
    here = settings()

    def planned() -> Schedule:
        given, named = tree_map(_standing, (args, kwargs))
        compiled = fn if isinstance(fn, (Jit, TrainingStep)) else Jit(fn, (), reduce_partial)
        with replaced(
            mesh=here.mesh,
            program=here.program,
            autocast=here.autocast,
            autocast_embeddings=here.autocast_embeddings,
        ):
            return scheduled(compiled.plan(*given, **named))

    g = made.graph
    last = planned if made.piped else None
    return Trace(g.name, g.nodes, g.inputs, g.outputs, g.options, last)


def _standing(x: Any) -> Any:
    """A tensor that stands for its type, where only that is given."""
    return Tensor(None, x) if isinstance(x, TensorType) else x
