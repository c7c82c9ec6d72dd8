"""How does a guarded run go back when devices or processes are lost? As `elastic.steps` does.

The body of a step is `run.step`, which takes the error of a lost device, and the state is what the
guard saves. A safe point is kept inside of `with dist.elastic():`, and in the processes of
`tessera run --elastic`.
"""

from __future__ import annotations

from typing import Any

from ..core import environment
from ..core.mesh import Mesh
from ..elastic.going_back import GoingBack
from ..elastic.kept import named
from ..elastic.policy import elastic, policy
from ..lang.tensor import Tensor
from .run import Run


class SafePoints:
    """The safe points of `run`. `given` has all that a step changes: what is in its dicts and
    modules is put back in place, numbers are read from it."""

    def __init__(self, run: Run, given: dict[str, Any], mesh: Mesh | None) -> None:
        self.run, self.given, self.mesh = run, given, mesh
        self._loop: GoingBack | None = None
        self._last: Any = None

    def open(self) -> float:
        """When the last safe point of the processes before was made, in seconds since 1970; 0
        without one."""
        now = policy()
        if now is None and environment.text(environment.ELASTIC):
            now = elastic() if self.mesh or _on_mesh(self.given) else None
        if now is None:
            return 0.0
        self._loop = GoingBack(self.given, self.run.steps, self.mesh)
        self._last = self._loop.open(now)
        self.run.goes_back = self._loop.lost
        return 0.0 if self._last is None else float(self._last.created_s)

    def first(self, found: int | None) -> int:
        """The number of the first step: `found`, to which the state has been put, or where that is
        None the one after the last safe point."""
        if self._loop is None:
            return found or 0
        number = self._loop.first(self._last if found is None else None, found or 0)
        self.run.mesh = self._loop.mesh
        return number

    def after(self, number: int, error: BaseException | None = None, **now: Any) -> int:
        """The number of the step after step `number`; `now` is what in the state is new."""
        if self._loop is None:
            return number + 1
        self.given.update(now)
        then = self._loop.after(number, error)
        self.run.mesh = self._loop.mesh
        return then

    def keep(self, step: int, **now: Any) -> None:
        """A safe point after `step` steps, to which something else has put the state."""
        if self._loop is not None:
            self.given.update(now)
            self._loop.keep(step)

    def leave(self, step: int, **now: Any) -> None:
        """A safe point after `step` steps for the processes that come after these, if they find
        it."""
        if self._loop is not None and self._loop.outlives:
            self.keep(step, **now)

    def lost(self, error: BaseException) -> bool:
        return self._loop is not None and self._loop.lost(error)

    def close(self) -> None:
        if self._loop is not None:
            self._loop.close()


def _on_mesh(given: dict[str, Any]) -> bool:
    return any(isinstance(x, Tensor) and x.mesh is not None for _, x in named(given))
