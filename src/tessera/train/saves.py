"""What does a guarded run save, and when? The state after each `every` steps, one at a time.

A save that fails is said in a line; training goes on, and the checkpoints before it stay.
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
from ..lang.tensor import Tensor
from ..lang.tree import flatten
from .bad_loss import is_finite
from .config import TrainingConfig
from .run import Run
from .saving import step_tag

if TYPE_CHECKING:
    from ..checkpoint.manifest import Manifest


@dataclass
class TrainState:
    """What a step changes: `weights` (a module, or a dict of tensors), `optimizer` (its state, a
    dict, of `optim.from_optax` a tuple), and `loader`, which has `state_dict()` and
    `load_state_dict()`. A step that makes new ones puts them back here."""

    weights: Any
    optimizer: Any
    loader: Any = None

    @property
    def config(self) -> TrainingConfig | None:
        """The configuration of a recipe, which its optimizer's state has."""
        found = self.optimizer.get("config") if isinstance(self.optimizer, dict) else None
        return found if isinstance(found, TrainingConfig) else None


class Saves:
    """The saves of `run`, whose state is `live`, into `storage`; `step` is the one that was saved
    last, None before and where that save has failed."""

    def __init__(
        self, run: Run, live: TrainState, storage: Storage, keep: Keep | None, every: int | None
    ) -> None:
        self.run, self.live, self.storage, self.every = run, live, storage, every
        self.step: int | None = None
        self._keep = keep
        self.owed = self._told_late = False  # a save that is still to be made
        self._mark: Any = None
        self._others = set[str]()  # the ids of those of another run, which this one did not go on

    def leave_out(self) -> None:
        """Notes that what is there now is of another run."""
        with suppress(CheckpointError):
            self._others = {m.id for m in manifests(self.storage)[0]}

    def made(self) -> list[Manifest]:
        """The checkpoints of this run that can be read, the oldest first."""
        return [m for m in manifests(self.storage)[0] if m.id not in self._others]

    def due(self, step: int) -> bool:
        """Whether it is time for a save after `step` steps: one that is owed waits for the one that
        is being written."""
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
        """Begins to save the state after `step` steps. Raises UsageError if no step changed it."""
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
        """Marks the state as it is now: each step of an optimizer replaces the count of its
        steps."""
        state = self.live.optimizer
        first = next(iter(flatten(state)[0]), None)
        count = state.get("step") if isinstance(state, dict) else first
        self._mark = count._data if isinstance(count, Tensor) else None

    def tensors(self) -> Any:
        """What of the optimizer's state is saved with the weights."""
        state = self.live.optimizer
        if not isinstance(state, dict):
            return state
        return {name: x for name, x in state.items() if name != "config"}

    def _see_gone(self) -> None:
        """Says that what was saved last is there no longer, as where a drive has gone."""
        folder, step = self.storage.folder, self.step
        if folder is not None and step is not None and not pending():
            tag = step_tag(step)
            if not (folder / tag).exists():
                self.run.progress.note(
                    f"run: {tag} is gone from {self.storage.name}, where it saves anew"
                )

    def settle(self, wait: bool = False) -> TesseraError | None:
        """Says which saves have failed; the last error."""
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
        """The tag of the newest checkpoint that can be read."""
        with suppress(CheckpointError):
            found = self.made()
            return found[-1].tag if found else None
        return None
