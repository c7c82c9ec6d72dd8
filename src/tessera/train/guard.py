"""Guard of a run: saves, resumption, and checks of each step's loss.

    live = TrainState(model, optimizer.init(model.parameters()), loader)
    with Run(folder, steps=1000, ...) as run, Guard(run, live, every=100) as guard:
        for step in guard:
            with run.step(step) as row:
                row["loss"] = train_step(live.weights, live.optimizer, next(loader))

A run that is started again continues from its newest checkpoint, with the bits of a run that never
stopped. SIGTERM and SIGUSR1, by which schedulers announce the end, cause a save after the current
step. The first process decides for all processes what they do after a step.
"""

from __future__ import annotations

import itertools
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType, TracebackType
from typing import Annotated, Any, Self

from ..checkpoint import Keep
from ..checkpoint.listing import Root, age_text, keep_of, manifests, unfinished
from ..checkpoint.loading import Checkpoint
from ..checkpoint.names import NAME
from ..checkpoint.storage import Storage
from ..core.checks import unfit
from ..core.declared import Count, Given, Natural, Number, OneOf, Positive
from ..core.devices import process_count, process_index
from ..core.errors import CheckpointError, TesseraError, UsageError
from ..core.interrupts import Immediate
from ..core.mesh import Mesh
from ..core.public import checked
from ..lang.value.checks import mesh_or_none
from ..lang.value.engine import engine
from ..nn.module import Module
from .bad_loss import Judge, LossError
from .precision import scale_of_now
from .run import Preempted, Run
from .safe_points import SafePoints
from .saves import Saves, TrainState
from .saving import first_whole, step_tag
from .watchdog import Watchdog

POLICIES = ("stop", "rollback", "ignore")
_LIMIT_S = 3600.0  # the default limit of a wait for another process
_COUNT = itertools.count(1)


@checked
class Guard:
    """Yields the remaining steps of `run`, and guards the state `live`.

    It saves after each `every` steps and after the last one (without `every` only when a signal
    ends the run) into `root`, by default the run's folder `checkpoints`; `keep` is the policy of
    which checkpoints to keep. A failed save is reported in one line: training goes on, and earlier
    checkpoints stay. While one save is being written, the next one waits.

    With `resume` it continues from the newest undamaged checkpoint in `root`; if `root` has none,
    from another folder that `resume` names.

    A `loss` or `grad_norm` in a row that is not finite, or a loss above `spike` times the median of
    the last 50, is handled by `on_bad_loss`: "stop" raises LossError, "rollback" goes back to the
    newest checkpoint and skips the batches up to the bad one, "ignore" continues. A loader is
    advanced; without one, use batch `step + guard.skipped`. After `rollbacks` of them within the
    run LossError is raised.

    A step (or a save at the end) that takes longer than `hang_s` seconds ends the process with
    status 124, after it prints the stacks of its threads and its last collectives; None sets no
    limit. The limit also holds for the first step, which compiles.

    Inside of `with dist.elastic():`, and in processes that `tessera run --elastic` started, it
    keeps a safe point after each step, as `elastic.steps` does: when a device or a process is lost,
    the run continues after the last one, or after a newer checkpoint. `mesh` is the whole mesh; it
    is needed only if the tensors are on slices of it.

    Raises UsageError if an argument does not fit or the loader ends before the run, CheckpointError
    if a checkpoint does not fit or if the last save of the run fails.
    """

    def __init__(
        self,
        run: Annotated[Run, Given("give a Run(folder, steps=, tokens_per_step=)")],
        live: Annotated[TrainState, Given("give TrainState(model, state, loader)")],
        *,
        root: Root | None = None,
        every: Count | None = None,
        keep: int | Keep | None = None,
        resume: bool | Root = True,
        on_bad_loss: Annotated[str, OneOf(*POLICIES)] = "stop",
        spike: Annotated[float, Number(above=1)] | None = None,
        rollbacks: Natural = 3,
        hang_s: Positive | None = 1800.0,
        mesh: Mesh | None = None,
    ) -> None:
        if not isinstance(live.weights, (dict, Module)):
            raise unfit(
                "Guard", "live.weights", live.weights, "give a module, or a dict of tensors"
            )
        if not isinstance(live.optimizer, (dict, tuple, list)):
            raise unfit("Guard", "live.optimizer", live.optimizer, "give optimizer.init(weights)")
        if not (live.loader is None or hasattr(live.loader, "load_state_dict")):
            fix = "give one that has state_dict() and load_state_dict(), or leave it out and take"
            fix += " the batch of the step's number"
            raise unfit("Guard", "live.loader", live.loader, fix)
        self.run, self.live = run, live
        storage = Storage(root if root is not None else run.shared / "checkpoints")
        policy = None if live.config is None else live.config.keep
        self._resume = resume if isinstance(resume, bool) else Storage(resume)
        self._policy = on_bad_loss
        self._judge = Judge(spike)
        self._most = rollbacks
        self._hang_s = hang_s
        self._name = f"guard/{next(_COUNT)}"
        self._numbers = itertools.count(1)
        self._dog: Watchdog | None = None
        self._signals = Signals(run.progress.note)
        self._saves = Saves(run, live, storage, keep_of(keep) or policy, every)
        self._rolled, self._base, self._bad_tags = 0, -1, set[str]()  # of rollbacks
        self._open = False
        self.begin = 0
        self.skipped = 0
        self._safe = SafePoints(run, {**vars(live), "skipped": 0}, mesh_or_none("Guard", mesh))

    # -- the loop ---------------------------------------------------------------------------------
    def __enter__(self) -> Self:
        if self._hang_s is not None:
            self._dog = Watchdog(self._hang_s)
        self._open = True
        try:
            self._at("reading the checkpoint")
            self._begin()
            self._signals.open()
            self.run.waits = True
        except BaseException:
            self._release()
            raise
        return self

    def __iter__(self) -> Iterator[int]:
        if not self._open:
            raise UsageError(
                "Guard: it was not entered, so it neither goes on nor hears signals",
                fix="write with run, Guard(run, live) as guard: for step in guard: ...",
            )
        step, self.run.waits = self.begin, False
        self._saves.look()
        while step < self.run.steps:
            self._at(f"step {step}")
            yield step
            self._at(f"the end of step {step}")
            try:
                step = self._ended(step) if self.run.error is None else self._back(step)
            except TesseraError as error:
                if not self._safe.lost(error):
                    raise
                self.run.error = error
                step = self._back(step)
        if self.begin >= self.run.steps:
            self.run.progress.note(f"run: all {self.run.steps} steps were made before")

    def _ended(self, step: int) -> int:
        """The number of the step after the completed step `step`."""
        word = self._word(step)
        if word["bad"]:
            step = self._bad(step, word["bad"])
            self._safe.keep(step, **self._now())
            return step
        done = step + 1
        last = self._saves.every is not None and done == self.run.steps
        if word["save"] or word["signal"] or last:
            self._bad_tags.discard(step_tag(done))
            self._saves.save(done, self.skipped)
        if word["signal"]:
            self._safe.leave(done, **self._now())
            self._finish()
            raise self._preempted(word["signal"])
        after = self._safe.after(step, **self._now())
        return after if after == done else self._stand(after)

    def _back(self, step: int) -> int:
        """The number of the step after the last safe point, because a device was lost in `step`."""
        error, self.run.error = self.run.error, None
        return self._stand(self._safe.after(step, error, **self._now()))

    def _stand(self, step: int) -> int:
        """Sets the run to `step`, after the state was restored from a safe point, and returns
        `step`."""
        self.skipped = int(self._safe.state["skipped"])
        self.live.optimizer = self._safe.state["optimizer"]
        self.run.cut(step)
        self._saves.look()
        return step

    def _now(self) -> dict[str, Any]:
        return {**vars(self.live), "skipped": self.skipped}

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            if kind is None:
                failed = self._finish()
                if failed is not None:
                    raise failed
                if self._signals.heard:
                    raise self._preempted(self._signals.heard)
            elif isinstance(error, StopIteration) and self.run.steps_done < self.run.steps:
                fix = 'say "epochs": math.inf in its configuration, so that it goes on without end,'
                raise UsageError(
                    "Guard: the loader has ended: it has no batch for step "
                    f"{self.run.steps_done} of"
                    f" {self.run.steps}",
                    loader=self.live.loader,
                    fix=f"{fix} or give Run fewer steps",
                ) from error
        finally:
            self._release()

    def _release(self) -> None:
        self._open = self.run.waits = False
        self._safe.close()
        self._signals.close()
        if self._dog is not None:
            self._dog.close()

    def _at(self, stage: str) -> None:
        if self._dog is not None:
            self._dog.at(stage)

    def _preempted(self, number: int) -> Preempted:
        newest = self._saves.newest()
        where = "it is not saved"
        if newest is not None:
            there = f"{newest} in {self._saves.storage.name}"
            saved = self._saves.step == self.run.steps_done
            where = f"it is saved as {there}" if saved else f"{where}; the newest is {there}"
        return Preempted(number, where)

    def _word(self, step: int) -> dict[str, Any]:
        """The actions of all processes after `step`, as the first process decides them."""
        self._saves.settle()
        row = self.run.last if self.run.last.get("step") == step else {}
        self._judge.warn_of_unseen(row, self._policy)
        save = self._saves.due(step + 1)
        bad = "" if self._policy == "ignore" else self._judge.why(row)
        heard = self._signals.heard
        mine = {"bad": bad, "save": save, "signal": heard}
        if process_count() > 1:
            if process_index() == 0 or heard:
                mine["signal"] = engine().asked(self._name, heard or None) or 0
            mine = self._of_first(mine)
        self._saves.owed = self._saves.owed and not mine["save"]
        return mine

    def _finish(self) -> TesseraError | None:
        """Waits for pending writes and returns the error of the last save, or None."""
        self._at("the last save")
        error = self._saves.settle(wait=True)
        return error if self._saves.step is None else None

    # -- going on ---------------------------------------------------------------------------------
    def _begin(self) -> None:
        """Resumes from a safe point or checkpoint, after pending writes, and reports which."""
        self._saves.settle(wait=True)
        kept_s = self._safe.open()
        if kept_s and kept_s >= self._of_first(self._saved_s()):
            self.begin = self._stand(self._safe.first(None))
            return
        if not self._go_on():
            self._saves.leave_out()
        if not self.begin:
            self.run.cut(0)
        self._safe.first(self.begin)

    def _saved_s(self) -> float:
        """The time of the newest checkpoint, in seconds since 1970; 0 if there is none."""
        found, _ = manifests(self._saves.storage) if self._resume is not False else ([], {})
        return found[-1].created_s if found else 0.0

    def _go_on(self) -> bool:
        """Restores the state from a checkpoint; returns whether there was one."""
        if self._resume is False:
            return False
        places = [self._saves.storage]
        if isinstance(self._resume, Storage):
            places.append(self._resume)
        for place in places:
            manifests_found, wrong = manifests(place)
            tags = self._of_first([m.tag for m in reversed(manifests_found)])
            unfinished_tags = unfinished(place)
            for why in wrong.values():
                self.run.progress.note(f"run: {why}; it is passed over")
            checkpoint = self._restore(place, tags)
            if checkpoint is not None:
                self._stand_at(checkpoint)
                if place is not self._saves.storage:
                    self._saves.step = None
                self._tell_begin(place, checkpoint, unfinished_tags)
                return True
            if unfinished_tags:
                self.run.progress.note(
                    f"run: {place.name} has only saves that did not end "
                    f"({', '.join(unfinished_tags)}): it"
                    " begins anew"
                )
        if isinstance(self._resume, Storage):
            at, fix = (
                Path(self._resume.name),
                "name the root that it was saved to, or leave out resume=",
            )
            if self._resume.read(NAME) is not None:
                fix = f"it is a checkpoint itself: name its root, resume={str(at.parent)!r}"
            raise CheckpointError(
                f"Guard: there is no checkpoint to go on from in {self._resume.name!r}", fix=fix
            )
        return False

    def _tell_begin(
        self, place: Storage, checkpoint: Checkpoint, unfinished: Sequence[str]
    ) -> None:
        again = self.run.cut(self.begin)
        age = age_text(checkpoint.manifest.created_s)
        parts = [
            f"run: found {checkpoint.tag} of {age} in {place.name}: it goes on after step "
            f"{self.begin}"
        ]
        parts += [f"{again} steps that came after it are made again"] if again else []
        parts += (
            [f"left out: saves that did not end ({', '.join(unfinished)})"] if unfinished else []
        )
        self.run.progress.note("; ".join(parts))

    def _restore(self, place: Storage, tags: Sequence[str]) -> Checkpoint | None:
        """The first undamaged checkpoint of `tags`; its tensors have the layouts of `live`."""

        def together(mine: dict[str, Any]) -> list[Any]:
            limit_s = self._hang_s or _LIMIT_S
            return engine().gather(f"{self._name}/{next(self._numbers)}", mine, limit_s)

        return first_whole(
            place, tags, self.live.weights, self._saves.tensors(), together, self.run.progress.note
        )

    def _stand_at(self, checkpoint: Checkpoint) -> None:
        live, about = self.live, checkpoint.state if isinstance(checkpoint.state, dict) else {}
        if checkpoint.step is None:
            raise CheckpointError(
                f"Guard: {checkpoint.tag!r} has no step to go on after",
                fix="save with step=, or name another folder",
            )
        if isinstance(live.weights, dict):
            live.weights.update(checkpoint.tensors)
        if isinstance(live.optimizer, dict):
            c, was = live.config, about.get("config")
            scale = {} if c is None or was is None else scale_of_now(c, was, live.optimizer)
            live.optimizer.update({**checkpoint.optimizer, **scale})
        else:
            live.optimizer = checkpoint.optimizer
        self._saves.step = self.begin = checkpoint.step
        self.skipped = int(about.get("skipped", 0))
        position = about.get("loader")
        if live.loader is not None and position is not None:
            live.loader.load_state_dict(position)
        elif live.loader is not None:
            self.run.progress.note(
                f"run: {checkpoint.tag} has no position of a loader: the data go on where yours "
                "stands"
            )
        elif position is not None:
            self.run.progress.note(
                f"run: {checkpoint.tag} has the position of a loader, which is not taken: the "
                "guard has"
                " none, TrainState(weights, state, loader) gives it one"
            )

    def _of_first(self, value: Any) -> Any:
        if process_count() == 1:
            return value
        limit_s = self._hang_s or _LIMIT_S
        return engine().from_first(self._name, next(self._numbers), value, limit_s)

    # -- losses -----------------------------------------------------------------------------------
    def _bad(self, step: int, why: str) -> int:
        """The number of the step that follows a step with a bad loss."""
        self._saves.settle(wait=True)
        newest = self._saves.newest()
        rows = [
            ("newest checkpoint", f"{newest} in {self._saves.storage.name}" if newest else "none")
        ]
        if self._policy == "stop":
            fix = (
                'on_bad_loss="rollback" goes back and leaves the batch out; ts.debug.nan_origin'
                " says where a NaN comes from"
            )
            raise LossError(f"Guard: step {step} is bad: {why}", rows=rows, fix=fix)
        self._rolled += 1
        if self._rolled > self._most:
            fix = "look at the data and the rate; rollbacks= allows more"
            message = f"Guard: step {step} is bad: {why}; it went back {self._most} times before"
            raise LossError(message, rows=rows, fix=fix)
        if self._base == step:  # with other batches too: it is the weights that are bad
            self._bad_tags.add(step_tag(step))
        earlier = [
            m.tag
            for m in reversed(self._saves.manifests())
            if m.step is not None and m.step <= step
        ]
        tags = [tag for tag in earlier if tag not in self._bad_tags] or earlier
        batch = step + self.skipped
        checkpoint = self._restore(self._saves.storage, self._of_first(tags))
        if checkpoint is None:
            fix = "save one at the beginning: every= of fewer steps"
            message = f"Guard: step {step} is bad: {why}, and there is no checkpoint to go back to"
            raise LossError(message, rows=rows, fix=fix)
        self._stand_at(checkpoint)
        before = self.begin + self.skipped
        self._base, self.skipped = self.begin, batch + 1 - self.begin
        for _ in range(batch + 1 - before if self.live.loader is not None else 0):
            _give_out(self.live.loader)
        self.run.cut(self.begin)
        self._saves.look()
        self.run.progress.note(
            f"run: step {step} is bad: {why}; it goes back to {checkpoint.tag} and leaves out "
            "batches"
            f" {before} to {batch}"
        )
        return self.begin


def _give_out(loader: Any) -> None:
    """Discards one batch; at the end of an epoch the first of the next."""
    try:
        next(loader)
    except StopIteration:
        next(iter(loader))


__all__ = ["Guard", "LossError", "TrainState"]


# Signals that announce the end of a run: SIGTERM and SIGUSR1, as schedulers send them.

SAME_S = 1.0  # a signal that comes once more within it was sent to the launcher and to its ranks
SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


class Signals:
    """The signal that has arrived, as `heard`; 0 before. A second one ends the process at once."""

    def __init__(self, tell: Callable[[str], None]) -> None:
        self.heard = 0
        self._tell, self._heard_s = tell, 0.0
        self._before: dict[int, Any] = {}

    def open(self) -> None:
        """Installs the handlers, if called in the main thread."""
        # Python installs handlers in the main thread only.
        if threading.current_thread() is threading.main_thread():
            arrived = Immediate(self._arrived)
            self._before = {n: signal.signal(n, arrived) for n in SIGNALS}

    def close(self) -> None:
        """Restores the previous handlers."""
        for which, handler in self._before.items():
            signal.signal(which, handler)

    def _arrived(self, number: int, frame: FrameType | None) -> None:
        if self.heard and time.monotonic() - self._heard_s < SAME_S:
            return
        if self.heard:  # a second one does not wait
            raise SystemExit(128 + number)
        self.heard, self._heard_s = number, time.monotonic()
        name = signal.Signals(number).name
        self._tell(f"run: {name}: it saves after this step and ends; once more ends now")
