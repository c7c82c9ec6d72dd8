"""Saves of a guarded run: its state after each `every` steps, one save at a time.

A failed save is reported in one line; training goes on, and earlier checkpoints stay.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from ..checkpoint import Keep
from ..checkpoint.listing import manifests
from ..checkpoint.saving import Save, failures, pending, start
from ..checkpoint.storage import Storage
from ..core.errors import CheckpointError, TesseraError, UsageError
from ..lang.record.tree import flatten
from ..lang.value.tensor import Tensor
from .bad_loss import is_finite
from .config import TrainingConfig
from .run import Run
from .saving import step_tag

if TYPE_CHECKING:
    from ..checkpoint.manifest import Manifest


@dataclass
class TrainState:
    """The state that a step changes: `weights` (a module, or a dict of tensors), `optimizer` (its
    state, a dict, or a tuple for `optim.from_optax`), and `loader`, which has `state_dict()` and
    `load_state_dict()`. A step that returns new values must assign them here."""

    weights: Any
    optimizer: Any
    loader: Any = None

    @property
    def config(self) -> TrainingConfig | None:
        """The configuration of a recipe, from its optimizer state."""
        found = self.optimizer.get("config") if isinstance(self.optimizer, dict) else None
        return found if isinstance(found, TrainingConfig) else None


class Saves:
    """The saves of `run`, whose state is `live`, into `storage`; `step` is the last saved step,
    None before the first save and after a failed one."""

    def __init__(
        self, run: Run, live: TrainState, storage: Storage, keep: Keep | None, every: int | None
    ) -> None:
        self.run, self.live, self.storage, self.every = run, live, storage, every
        self.step: int | None = None
        self._keep = keep
        self.owed = self._told_late = False  # a save that is still to be made
        self._mark: Any = None
        self._others = set[str]()  # ids of another run's checkpoints

    def leave_out(self) -> None:
        """Marks the current checkpoints as those of another run."""
        with suppress(CheckpointError):
            self._others = {m.id for m in manifests(self.storage)[0]}

    def manifests(self) -> list[Manifest]:
        """The readable checkpoints of this run, the oldest first."""
        return [m for m in manifests(self.storage)[0] if m.id not in self._others]

    def due(self, step: int) -> bool:
        """Returns whether to save after `step` steps. A save waits until the previous one is
        written."""
        if self.every is not None and step % self.every == 0:
            self.owed, self._told_late = True, False
        now = self.owed and not pending()
        if self.owed and not now and not self._told_late:
            self.run.progress.note(
                f"run: {step_tag(step)} waits: the save before it is still being written"
            )
            self._told_late = True
        return now

    def save(self, step: int, skipped: int) -> None:
        """Starts a save of the state after `step` steps. Raises UsageError if no step changed the
        state."""
        if step == self.step:
            return
        before = self._mark
        self.look()
        if before is not None and before is self._mark:
            raise UsageError(
                f"Guard: the optimizer's state is after step {step} what it was before",
                fix="put what a step gives back: loss, live.weights, live.optimizer = step(...);"
                " an optimizer that runs after every k-th batch only: every= a multiple of k",
            )
        self._see_gone()
        live, c = self.live, self.live.config
        position = live.loader.state_dict() if live.loader is not None else None
        numbers = {k: v for k, v in self.run.last.items() if is_finite(v) and k != "step"}
        state = {
            "config": None if c is None else asdict(c), "loader": position,
            "skipped": skipped,
        }  # fmt: skip
        start(Save(
            step_tag(step), live.weights, self.tensors(), root=self.storage,
            keep=self._keep, step=step, metrics=numbers, state=state, tell=self.run.progress.note,
        ))  # fmt: skip
        self.step = step

    def look(self) -> None:
        """Remembers the current state, by the optimizer's step count, which each step replaces."""
        state = self.live.optimizer
        first = next(iter(flatten(state)[0]), None)
        count = state.get("step") if isinstance(state, dict) else first
        self._mark = count._data if isinstance(count, Tensor) else None

    def tensors(self) -> Any:
        """The part of the optimizer's state that is saved with the weights."""
        state = self.live.optimizer
        if not isinstance(state, dict):
            return state
        return {name: x for name, x in state.items() if name != "config"}

    def _see_gone(self) -> None:
        """Reports if the last checkpoint has disappeared, for example with its drive."""
        folder, step = self.storage.folder, self.step
        if folder is not None and step is not None and not pending():
            tag = step_tag(step)
            if not (folder / tag).exists():
                self.run.progress.note(
                    f"run: {tag} is gone from {self.storage.name}, where it saves anew"
                )

    def settle(self, wait: bool = False) -> TesseraError | None:
        """Reports failed saves, and returns the last error."""
        last = None
        for tag, last in failures(wait):
            what = str(last).splitlines()[0]
            stays = self.newest()
            self.run.progress.note(
                f"run: {tag} is not saved: {what}; "
                + (f"{stays} stays" if stays else "there is no other checkpoint")
            )
            if self.step is not None and tag == step_tag(self.step):
                self.step = None
        return last

    def newest(self) -> str | None:
        """The tag of the newest readable checkpoint, or None."""
        with suppress(CheckpointError):
            found = self.manifests()
            return found[-1].tag if found else None
        return None
