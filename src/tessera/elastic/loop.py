"""`elastic.steps`, a training loop that goes back; its steps are `with` blocks, which catch errors.

>>> import tessera as ts
>>> from tessera import dist, elastic
>>> mesh = dist.Mesh.parse("dp=8")
>>> state = {"sum": dist.tensor((8,), layout="[8@dp]", mesh=mesh, init="zeros")}
>>> with dist.elastic():
...     for step in elastic.steps(state, 3):
...         with step as i:
...             if i == 1 and step.mesh.physical.size == 8:
...                 elastic.drop(5)
...             state["sum"] = state["sum"] + 1
>>> state["sum"].numpy().sum(), state["sum"].mesh.physical.size
(np.float32(24.0), 4)
>>> elastic.restore(5)
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from types import TracebackType
from typing import Any

from ..core.checks import mapping
from ..core.declared import Natural
from ..core.errors import UsageError
from ..core.mesh import Mesh
from ..lang.record.box import Box
from ..lang.value.checks import mesh_or_none
from .policy import policy
from .rollback import GoingBack
from .snapshot import State, named


class Step:
    """One step of a loop: a context manager that gives the number of the step."""

    def __init__(self, loop: steps, number: int) -> None:
        self.number, self.mesh = number, loop.mesh
        self.ended = False
        self.error: BaseException | None = None
        self._loop = loop

    def __enter__(self) -> int:
        self.mesh.__enter__()
        return self.number

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool:
        self.mesh.__exit__(kind, error, traceback)
        self.ended = True
        if error is not None and self._loop._going.lost(error):
            self.error = error
            return True
        return False


class steps:
    """The steps of a training loop, numbered from 0 to `stop - 1`, as `for step in steps:` with the
    body in `with step as number:`.

    `state` is a dict of all that the steps change: modules, optimizer states, tensors, numbers, and
    loaders (objects with `state_dict` and `load_state_dict`), nested in any way. Modules and dicts
    in it are changed in place; a step must assign new values there: `state["weights"] = ...`.
    `step.mesh` is the mesh of this step, which is current inside of it (as with `with step.mesh:`),
    and a batch is placed on it; it changes when devices are lost or come back. `mesh` is the whole
    mesh; it is needed only if the tensors are on slices of it.

    Inside `with dist.elastic():` a step that loses a device is repeated from the last safe point,
    on the remaining devices; the numbers of the steps, the state and the random generator go back
    with it. So the batch of a step must follow from its number, or come from a loader in `state`.
    Outside, and for any other error, the error is raised. In a program that `tessera run --elastic`
    started, the loop begins at the last safe point of earlier processes. Raises UsageError if
    `state` is no dict or holds a value that cannot be kept, if a step has no `with` block or leaves
    the state unchanged; MeshError if the mesh is ambiguous.
    """

    def __init__(self, state: State, stop: Natural, mesh: Mesh | None = None) -> None:
        mapping("elastic.steps", "state", state, 'give a dict: {"model": model, "state": state}')
        self.stop = stop
        self.state = state
        self._going = GoingBack(state, stop, mesh_or_none("elastic.steps", mesh))

    @property
    def mesh(self) -> Mesh:
        """The mesh of the next step."""
        return self._going.mesh

    @property
    def recovered_s(self) -> list[float]:
        """The duration of each recovery, in seconds, without compilation for the new mesh."""
        return self._going.recovered_s

    def __iter__(self) -> Iterator[Step]:
        going = self._going
        try:
            number = going.first(going.open(policy()))
            while number < self.stop:
                before = _marks(self.state) if not number else None
                step = Step(self, number)
                yield step
                _see(step, before, self.state)
                number = going.after(step.number, step.error)
        finally:
            going.close()


def _marks(state: State) -> list[weakref.ref[Any] | None]:
    """Weak references to the values in the state, for a later comparison: tensors, which are
    immutable, or the contents of boxes."""
    return [_mark(x) for _, x in named(state)]


def _mark(x: Any) -> weakref.ref[Any] | None:
    try:
        return weakref.ref(x._data if isinstance(x, Box) else x)
    except TypeError:  # a number, or nothing yet
        return None


def _see(step: Step, before: list[Any] | None, state: State) -> None:
    """Raises UsageError if a step has no `with` block, or if the first step left the state
    unchanged: then its results are elsewhere, and would not go back."""
    if not step.ended:
        raise UsageError(
            f"elastic.steps: step {step.number} has no `with` block, which could take its error",
            fix="for step in elastic.steps(state, stop): with step as number: ...",
        )
    if before is None or step.error is not None:
        return
    after = [x._data if isinstance(x, Box) else x for _, x in named(state)]
    if len(before) == len(after) and all(
        m is not None and m() is x for m, x in zip(before, after, strict=True)
    ):
        raise UsageError(
            "elastic.steps: the first step changed nothing in the state",
            fix='put what it makes there: state["weights"], state["optimizer"] = step(...)',
        )
