"""Safe points of a guarded run, to go back to when devices or processes are lost, as in
`elastic.steps`.

The body of a step is `run.step`, which catches the error of a lost device, and the state is that
which the guard saves. Safe points are kept inside of `with dist.elastic():`, and in the processes
of `tessera run --elastic`.
"""

from __future__ import annotations

from typing import Any

from ..core import environment
from ..core.mesh import Mesh
from ..elastic.policy import elastic, policy
from ..elastic.rollback import GoingBack
from ..elastic.snapshot import named
from ..lang.value.tensor import Tensor
from .run import Run


class SafePoints:
    """The safe points of `run`. `state` has all that a step changes: dicts and modules are restored
    in place, numbers are read from it."""

    def __init__(self, run: Run, state: dict[str, Any], mesh: Mesh | None) -> None:
        self.run, self.state, self.mesh = run, state, mesh
        self._loop: GoingBack | None = None
        self._last: Any = None

    def open(self) -> float:
        """The time of the last safe point of earlier processes, in seconds since 1970; 0 if there
        is none."""
        now = policy()
        if now is None and environment.text(environment.ELASTIC):
            now = elastic() if self.mesh or _on_mesh(self.state) else None
        if now is None:
            return 0.0
        self._loop = GoingBack(self.state, self.run.steps, self.mesh)
        self._last = self._loop.open(now)
        self.run.goes_back = self._loop.lost
        return 0.0 if self._last is None else float(self._last.created_s)

    def first(self, restored_step: int | None) -> int:
        """The number of the first step: `restored_step`, whose state is restored already, or with
        None the step after the last safe point."""
        if self._loop is None:
            return restored_step or 0
        number = self._loop.first(self._last if restored_step is None else None, restored_step or 0)
        self.run.mesh = self._loop.mesh
        return number

    def after(self, number: int, error: BaseException | None = None, **now: Any) -> int:
        """The number of the step after step `number`; `now` are the new values of the state."""
        if self._loop is None:
            return number + 1
        self.state.update(now)
        then = self._loop.after(number, error)
        self.run.mesh = self._loop.mesh
        return then

    def keep(self, step: int, **now: Any) -> None:
        """Keeps a safe point after `step` steps, for a state that was restored or changed
        otherwise."""
        if self._loop is not None:
            self.state.update(now)
            self._loop.keep(step)

    def leave(self, step: int, **now: Any) -> None:
        """Keeps a safe point after `step` steps for later processes, if they can find it."""
        if self._loop is not None and self._loop.outlives:
            self.keep(step, **now)

    def lost(self, error: BaseException) -> bool:
        return self._loop is not None and self._loop.lost(error)

    def close(self) -> None:
        if self._loop is not None:
            self._loop.close()


def _on_mesh(state: dict[str, Any]) -> bool:
    return any(isinstance(x, Tensor) and x.mesh is not None for _, x in named(state))
