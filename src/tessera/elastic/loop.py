"""How does a loop go back? Its steps are `with` blocks, which take an error for the loop.

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

import time
import warnings
import weakref
from collections.abc import Iterator
from types import TracebackType
from typing import Any

from ..core import environment
from ..core.checks import mapping, whole
from ..core.devices import (
    LOST,
    device_count,
    devices_text,
    need_devices,
    process_count,
)
from ..core.errors import EngineWarning, MeshError, TesseraError, UsageError, fail, lines_up
from ..core.mesh import Mesh
from ..lang.checks import mesh_or_none
from ..lang.parameter import Parameter
from ..lang.tensor import Tensor
from .fitting import folded_to_fit
from .kept import Kept, State, memory_folder, named, say, steps_text
from .lost import lost_by
from .policy import elastic, policy
from .resizing import places, type_on


class Step:
    """One step of a loop: a context, which gives the number of the step."""

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
        if error is not None and self._loop.lost(error):
            self.error = error
            return True
        return False


class steps:
    """The steps of a training loop, numbered from 0 to `stop - 1`, as `for step in steps:` with the
    body in `with step as number:`.

    `state` is a dict of all that the steps change: modules, optimizer states, tensors, numbers, and
    loaders (what has `state_dict` and `load_state_dict`), nested as you like. Modules and dicts in
    it are changed in place; what a step makes anew it puts there: `state["weights"] = ...`.
    `step.mesh` is the mesh of this step, which is open inside of it (`with step.mesh:`), and a
    batch is placed on it; it changes when devices are lost or come back. `mesh` is the whole mesh,
    which the tensors tell unless they lie on slices of it.

    Inside `with dist.elastic():` a step that loses a device is repeated, from the last safe point
    on, with the devices that are left; the numbers of the steps, the state and the random generator
    go back with it. So the batch of a step follows from its number, or comes from a loader in
    `state`. Outside, or for any other error, the error is raised as ever. In a program that
    `tessera run --elastic` started, the loop begins at the last safe point of the processes before.

    Raises UsageError if `state` is no dict or holds what cannot be kept, if a step has no `with`
    block or leaves the state as it was; MeshError if it is not known which mesh is meant.
    """

    def __init__(self, state: State, stop: int, mesh: Mesh | None = None) -> None:
        mapping("elastic.steps", "state", state, 'give a dict: {"model": model, "state": state}')
        self.stop = whole("elastic.steps", "stop", stop, 0)
        self.state = state
        self.mesh = mesh_or_none("elastic.steps", mesh) or _mesh_of(state)
        self.recovered_s: list[float] = []
        """How long each way back took, in seconds, without compiling for the new mesh."""
        self._policy: elastic | None = None
        self._kept: Kept | None = None

    def __iter__(self) -> Iterator[Step]:
        self._policy = now = policy()
        global _loops
        loop, _loops = _loops, _loops + 1
        if now is not None:
            now.loops += 1
            self._kept = _kept_of(self.state, self.mesh)
        try:
            number = self._begin(loop)
            while number < self.stop:
                before = _marks(self.state) if not number else None
                step = Step(self, number)
                yield step
                _see(step, before, self.state)
                number = self._next(step, loop)
        finally:
            if self._kept is not None:
                self._kept.end()

    def lost(self, error: BaseException) -> bool:
        """Whether the loop goes back because of `error`: a device of its mesh is lost."""
        here = self._kept is not None and process_count() == 1 and isinstance(error, TesseraError)
        return here and bool(lost_by(error, self.mesh))

    # -- safe points ------------------------------------------------------------------------------
    def _begin(self, loop: int) -> int:
        """The number of the first step."""
        if self._kept is None:
            return 0
        last = self._kept.begin()
        if last is None:
            if self._kept.own:
                self._keep(0, loop)
            return 0
        step = self._kept.put_back(lambda t: t)
        if last.state["loop"] > loop:  # this one had come to its end
            return self.stop
        say(f"goes on after {steps_text(step)} on {_devices_text(self.mesh)}")
        return step

    def _next(self, step: Step, loop: int) -> int:
        """The number of the step after `step`, at whose end there is a safe point, perhaps."""
        kept, now = self._kept, self._policy
        if kept is None or now is None:
            return step.number + 1
        error, done = step.error, step.number + 1
        try:
            if error is None:
                need_devices(f"step {step.number}", self.mesh.physical.ids)
                if done % now.every == 0 or done == self.stop:
                    self._keep(done, loop)
                    self._grow(done, now.rejoin)
                return done
        except TesseraError as found:
            if not self.lost(found):
                raise
            error = found
        return self._go_back(step.number, error)

    def _keep(self, step: int, loop: int) -> None:
        assert self._kept is not None and self._policy is not None
        about = {"loop": loop, "rejoin": self._policy.rejoin}
        self._kept.keep(f"loop_{loop}_step_{step}", step, self.mesh, about)

    def _go_back(self, number: int, error: BaseException) -> int:
        begin_s = time.perf_counter()
        gone = devices_text(sorted(LOST.intersection(self.mesh.physical.ids)))
        step = self._move(error)
        self.recovered_s.append(time.perf_counter() - begin_s)
        say(
            f"{gone} lost in step {number}: goes on after {steps_text(step)} on"
            f" {_devices_text(self.mesh)}, {self.recovered_s[-1]:.2f} s later"
        )
        return step

    def _grow(self, step: int, rejoin: bool) -> None:
        """Takes back the devices that are there again."""
        more = self._fitting()
        if rejoin and process_count() == 1 and more.physical.size > self.mesh.physical.size:
            self._move(None)
            say(f"devices are back after {steps_text(step)}: goes on on {_devices_text(more)}")

    def _fitting(self) -> Mesh:
        return folded_to_fit(self.mesh, {*range(device_count())} - LOST)

    def _move(self, error: BaseException | None) -> int:
        """Puts the last safe point onto the devices that are there. Raises `error` if none is."""
        try:
            mesh = self._fitting()
        except MeshError as none:
            raise none from error
        assert self._kept is not None
        where = places({x.mesh for _, x in named(self.state) if isinstance(x, Tensor)}, mesh)
        step = self._kept.put_back(lambda t: t if t.mesh is None else type_on(t, where[t.mesh]))
        self.mesh = mesh
        return step


_loops = 0


def _kept_of(state: State, mesh: Mesh) -> Kept | None:
    """Where safe points are kept: in the folder of the run, or in one that goes with the loop."""
    folder = environment.text(environment.ELASTIC)
    if folder:
        return Kept(folder, state)
    if process_count() == 1:
        return Kept(memory_folder(), state, own=True)
    warnings.warn(
        "elastic.steps: when one of several processes is lost, all end: start them with"
        " `tessera run --elastic MIN:MAX`, and they go on; over several hosts with"
        " TESSERA_ELASTIC=/dev/shm/NAME, and once more",
        EngineWarning,
        stacklevel=lines_up(),
    )
    return None


def _mesh_of(state: State) -> Mesh:
    """The one mesh that the tensors of `state` lie on. Raises MeshError."""
    found = {x.mesh for _, x in named(state) if isinstance(x, Tensor) and x.mesh is not None}
    if len(found) == 1:
        return found.pop()
    raise fail(
        MeshError,
        f"elastic.steps: the tensors of the state lie on {len(found) or 'no'} meshes"
        if found
        else "elastic.steps: no tensor of the state lies on a mesh",
        [("mesh", m) for m in list(found)[:3]],
        fix="pass the whole mesh: elastic.steps(state, stop, mesh)",
    )


def _marks(state: State) -> list[weakref.ref[Any] | None]:
    """What is in the state, to be known again: tensors, which never change, or what is in boxes."""
    return [_mark(x) for _, x in named(state)]


def _mark(x: Any) -> weakref.ref[Any] | None:
    try:
        return weakref.ref(x._data if type(x) is Parameter else x)
    except TypeError:  # a number, or nothing yet
        return None


def _see(step: Step, before: list[Any] | None, state: State) -> None:
    """Raises UsageError if a step has no `with` block, or the first one left the state as it was:
    what it made is somewhere else then, and would not go back."""
    if not step.ended:
        raise fail(
            UsageError,
            f"elastic.steps: step {step.number} has no `with` block, which could take its error",
            fix="for step in elastic.steps(state, stop): with step as number: ...",
        )
    if before is None or step.error is not None:
        return
    after = [x._data if type(x) is Parameter else x for _, x in named(state)]
    if len(before) == len(after) and all(
        m is not None and m() is x for m, x in zip(before, after, strict=True)
    ):
        raise fail(
            UsageError,
            "elastic.steps: the first step changed nothing in the state",
            fix='put what it makes there: state["weights"], state["optimizer"] = step(...)',
        )


def _devices_text(mesh: Mesh) -> str:
    there = mesh.physical
    return f"{there.size} of {mesh.size} devices ({there.text()})"
