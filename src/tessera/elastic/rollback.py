"""Rollback of a loop to its last safe point, for `elastic.steps` and guarded runs.

Both get the number of each next step from here.
"""

from __future__ import annotations

import time
import warnings
from typing import Any

from ..core import environment
from ..core.devices import LOST, device_count, devices_text, need_devices, process_count
from ..core.errors import EngineWarning, MeshError, TesseraError, lines_up
from ..core.mesh import Mesh
from ..lang.value.tensor import Tensor
from .device_loss import lost_by
from .policy import elastic
from .refold import folded_to_fit
from .resizing import places, type_on
from .snapshot import SnapshotStore, State, memory_folder, named, say, steps_text


class GoingBack:
    """A loop of `stop` steps that changes `state`; `mesh` is its mesh, which shrinks when devices
    are lost."""

    def __init__(self, state: State, stop: int, mesh: Mesh | None) -> None:
        self.state, self.stop = state, stop
        self.mesh = mesh or _mesh_of(state)
        self.recovered_s: list[float] = []
        """The duration of each recovery, in seconds, without compilation for the new mesh."""
        self._policy: elastic | None = None
        self._snapshot: SnapshotStore | None = None
        self._loop = 0

    def lost(self, error: BaseException) -> bool:
        """Returns whether `error` means that a device of the loop's mesh is lost, so that the loop
        must go back."""
        here = (
            self._snapshot is not None and process_count() == 1 and isinstance(error, TesseraError)
        )
        return here and bool(lost_by(error, self.mesh))

    def open(self, now: elastic | None) -> Any:
        """The manifest of the safe point that earlier processes left, or None."""
        global _loops
        self._policy, self._loop, _loops = now, _loops, _loops + 1
        if now is None:
            return None
        now.loops += 1
        self._snapshot = _snapshot_of(self.state)
        return None if self._snapshot is None else self._snapshot.begin()

    def close(self) -> None:
        if self._snapshot is not None:
            self._snapshot.end()

    def first(self, last: Any, number: int = 0) -> int:
        """The number of the first step: the step after the safe point `last`, which is restored, or
        else `number`, with the state unchanged."""
        if self._snapshot is None:
            return number
        if last is None:
            if self._snapshot.is_temporary:
                self.keep(number)
            return number
        step = self._snapshot.put_back(lambda t: t)
        if last.state["loop"] > self._loop:  # this one had come to its end
            return self.stop
        say(f"goes on after {steps_text(step)} on {_devices_text(self.mesh)}")
        return step

    def after(self, number: int, error: BaseException | None = None) -> int:
        """The number of the step after step `number`, with a safe point before it if one is due;
        after `error`, which has lost a device, the step after the last safe point."""
        snapshot, now = self._snapshot, self._policy
        if snapshot is None or now is None:
            return number + 1
        done = number + 1
        try:
            if error is None:
                need_devices(f"step {number}", self.mesh.physical.ids)
                if done % now.every == 0 or done == self.stop:
                    self.keep(done)
                    self._grow(done, now.rejoin)
                return done
        except TesseraError as found:
            if not self.lost(found):
                raise
            error = found
        return self._go_back(number, error)

    @property
    def outlives(self) -> bool:
        """Returns whether later processes can find the safe points."""
        return self._snapshot is not None and not self._snapshot.is_temporary

    def keep(self, step: int) -> None:
        """Makes a safe point of the current state, after `step` steps, if safe points are kept."""
        if self._snapshot is None or self._policy is None:
            return
        about = {"loop": self._loop, "rejoin": self._policy.rejoin}
        self._snapshot.keep(f"loop_{self._loop}_step_{step}", step, self.mesh, about)

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
        """Takes back devices that are available again."""
        more = self._fitting()
        if rejoin and process_count() == 1 and more.physical.size > self.mesh.physical.size:
            self._move(None)
            say(f"devices are back after {steps_text(step)}: goes on on {_devices_text(more)}")

    def _fitting(self) -> Mesh:
        return folded_to_fit(self.mesh, {*range(device_count())} - LOST)

    def _move(self, error: BaseException | None) -> int:
        """Restores the last safe point on the available devices. Raises MeshError, from `error`, if
        there are none."""
        try:
            mesh = self._fitting()
        except MeshError as none:
            raise none from error
        assert self._snapshot is not None
        where = places({x.mesh for _, x in named(self.state) if isinstance(x, Tensor)}, mesh)
        step = self._snapshot.put_back(
            lambda t: t if t.mesh is None else type_on(t, where[t.mesh]), mesh
        )
        self.mesh = mesh
        return step


_loops = 0


def _snapshot_of(state: State) -> SnapshotStore | None:
    """The storage of safe points: the run's folder, or a temporary one of this loop."""
    folder = environment.text(environment.ELASTIC)
    if folder:
        return SnapshotStore(folder, state)
    if process_count() == 1:
        return SnapshotStore(memory_folder(), state, is_temporary=True)
    warnings.warn(
        "elastic.steps: when one of several processes is lost, all end: start them with"
        " `tessera run --elastic MIN:MAX`, and they go on; over several hosts with"
        " TESSERA_ELASTIC=/dev/shm/NAME, and once more",
        EngineWarning,
        stacklevel=lines_up(),
    )
    return None


def _mesh_of(state: State) -> Mesh:
    """The one mesh of the tensors of `state`. Raises MeshError if there are several or none."""
    all_of = (x.mesh for _, x in named(state) if isinstance(x, Tensor))
    found = [*dict.fromkeys(mesh for mesh in all_of if mesh is not None)]
    if len(found) == 1:
        return found[0]
    raise MeshError(
        f"elastic.steps: the tensors of the state lie on {len(found) or 'no'} meshes"
        if found
        else "elastic.steps: no tensor of the state lies on a mesh",
        rows=[("mesh", m) for m in found[:3]],
        fix="pass the whole mesh: elastic.steps(state, stop, mesh), or Guard(..., mesh=mesh)",
    )


def _devices_text(mesh: Mesh) -> str:
    there = mesh.physical
    return f"{there.size} of {mesh.size} devices ({there.text()})"
