"""The folder of a run: settings, a row per step, the loss curve, the weights.

>>> import io, tempfile
>>> from tessera.train.metrics import read_metrics
>>> folder = tempfile.TemporaryDirectory()
>>> quiet = Console(file=io.StringIO())
>>> with Run(folder.name, steps=2, tokens_per_step=64, settings={"seed": 7}, console=quiet) as run:
...     for i in range(2):
...         with run.step(i) as row:
...             row["loss"] = 3.0 - i
>>> [row["loss"] for row in read_metrics(run.folder / "metrics.jsonl")]
[3.0, 2.0]
>>> [name for name, what, size in run.files()]
['config.json', 'metrics.jsonl']
>>> folder.cleanup()

>>> import tempfile
>>> with tempfile.TemporaryDirectory() as there:
...     blocked = Path(there, "file"); _ = blocked.write_text("")
...     files = Files(blocked / "run", Path(there, "spare"), print)
...     files.write("sample.txt", b"text")
...     files.finish()  # doctest: +ELLIPSIS
run: sample.txt cannot be written to ...file/run: Not a directory; tried again at the end
run: sample.txt is in ...spare
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from shutil import rmtree
from signal import Signals
from statistics import median
from tempfile import mkdtemp
from types import TracebackType
from typing import Annotated, Any, Self
from weakref import finalize

import numpy as np
from rich.console import Console

from ..core.checks import library, path_of
from ..core.contexts import within
from ..core.declared import Given, Mapped, Natural, NonNegative
from ..core.devices import process_index
from ..core.errors import BackendError, TesseraError, UsageError
from ..core.files import write_whole
from ..core.mesh import Mesh
from ..core.public import checked
from ..lang.record.first_process import to_first
from ..lang.record.to_host import read_by_all
from ..lang.value.tensor import Tensor
from ..observe.statistics import Statistics
from ..show.curves import Series, draw_loss_curve
from .metrics import MetricsWriter, Row, Value, column, read_metrics
from .progress import TrainProgress, speed_text
from .rows import StepRow, plain
from .trackers import Several, Tracker

WEIGHTS = "weights.safetensors"
CONTENTS = {
    "config.json": "the settings",
    "metrics.jsonl": "a row a step",
    "loss.png": "the loss curve",
    "graph.txt": "the step as Graph IR",
    "schedule.txt": "its steps, in order",
    "pipeline.svg": "who does what when",
    WEIGHTS: "the trained weights",
    "sample.txt": "text that the model wrote",
}
"""The files of a run and their descriptions, in the order in which they are shown."""

SPEED_WINDOW = 20  # the bar shows the median speed of so many steps


class Preempted(SystemExit):
    """Ends a program after a signal, with the shell's exit status for it: 128 and its number.
    `saved` tells where the state was saved."""

    def __init__(self, number: int, saved: str) -> None:
        super().__init__(128 + number)
        self.signal, self.saved = Signals(number).name, saved


@checked
class Run:
    """A run of `steps` steps with its folder; a context manager around the training loop.

    `model_flops` (per step, all devices) and `peak_flops` (per second) give the MFU if both are
    known. `trackers`, one or several, also receive the settings and every row, and are closed with
    the run. `weights` returns the tensors that are saved when the run ends, also after an interrupt
    or an error. A failed write (a full disk, a missing folder) is reported in one line and tried
    again at the end, then in the folder `spare`; training goes on. Of several processes the first
    one writes and shows; the others have the same values in temporary folders. With `resume` the
    files of an earlier run in `folder` stay, and its rows are continued: rows from the first
    repeated step on are removed, with a line. Without it all are removed, with a line too. Raises
    UsageError if the folder cannot be made, or an argument does not fit.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        steps: Natural,
        tokens_per_step: Natural,
        model_flops: NonNegative | None = None,
        peak_flops: NonNegative | None = None,
        settings: Annotated[Mapping[str, Any], Mapped('give a dict: {"lr": 0.1}')] | None = None,
        console: Annotated[Console, Given("give a rich.console.Console(file=...)")] | None = None,
        trackers: Tracker | Sequence[Tracker] = (),
        weights: Callable[[], Mapping[str, Tensor]] | None = None,
        spare: str | Path | None = None,
        resume: bool = False,
    ) -> None:
        settings = {} if settings is None else settings
        self.folder = self.shared = path_of("Run", "folder", folder)
        spare = None if spare is None else path_of("Run", "spare", spare)
        self._weights = weights
        if process_index():
            temporary = Path(mkdtemp(prefix="tessera-run-"))
            finalize(self, rmtree, temporary, ignore_errors=True)
            self.folder, spare, trackers = temporary, None, ()
            console = Console(quiet=True)
        self.progress = TrainProgress(steps, console=console)
        self._files = Files(self.folder, spare, self.progress.note)
        self._others = Several(trackers, self.progress.note)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            if not resume:
                self._clear()
        except OSError as error:
            raise self._unfit(error) from None
        self.steps, self.tokens_per_step = steps, tokens_per_step
        self.model_flops, self.peak_flops = model_flops, peak_flops
        self.save_text("config.json", json.dumps(dict(settings), indent=2, default=str))
        rows = self.folder / "metrics.jsonl"
        self.metrics = MetricsWriter(rows, append=resume, tell=self.progress.note)
        self.tracker = Several([self.metrics, *self._others.trackers], self.progress.note)
        self.tracker.config(settings)
        self._times: list[float] = []
        self.steps_done = 0
        """The number of completed steps of the run, including those of earlier processes."""
        self.last: Row = {}
        """The row of the last completed step."""
        self.mesh: Mesh | None = None
        """The mesh that is current inside of a step, if a guard keeps safe points."""
        self.goes_back: Callable[[BaseException], bool] = lambda error: False
        """True if a guard handles an error in a step, which is then in `error`."""
        self.waits = False
        """True while a guard is entered that has given out no step yet."""
        self.error: BaseException | None = None
        self._next = 0  # the first step without a row; an earlier one is repeated
        self._looks = resume  # True if rows of repeated steps may have to be removed
        self._failed = self._told_twice = False

    def _clear(self) -> None:
        """Removes the files of an earlier run, which would be mistaken for this one's, with a
        line."""
        gone = []
        for name in CONTENTS:
            path = self.folder / name
            if path.is_file():
                count = path.read_bytes().count(b"\n") if name == "metrics.jsonl" else None
                gone.append(name if count is None else f"{name} ({count} rows)")
            path.unlink(missing_ok=True)
        if gone:
            self.progress.note(
                f"run: what an earlier run left in {self.folder} is removed: {', '.join(gone)};"
                " Run(..., resume=True) keeps it"
            )

    def _unfit(self, error: OSError) -> UsageError:
        return UsageError(
            f"run: {str(self.folder)!r} cannot be a folder for results: {error.strerror}",
            fix="name another folder",
        )

    # -- the loop ---------------------------------------------------------------------------------
    @within("run.step", 'write with run.step(i) as row: row["loss"] = step(batch)')
    @contextmanager
    def step(self, number: Natural, **values: Value) -> Iterator[dict[str, Any]]:
        """Times step `number` and writes its row: `values`, entries set in the body, and the speed.

        Tensors in the row are read before the clock stops, so asynchronous work is counted. If a
        process has no device of their mesh, all processes read together.

        Statistics become one entry per value: `grads/w/norm`. Raises UsageError for a value that is
        neither a number nor a text, for a key that the run writes itself, and for one that is set
        later.
        """
        if self.waits:
            raise UsageError(
                f"run: the guard gave out no step {number}, so it neither saves nor looks at it",
                fix="write for step in guard: with run.step(step) as row: ...",
            )
        row = StepRow(number, values, ("step", "step_s", *self._speed(1.0)))
        self._see_again(number)
        start = time.perf_counter()
        self.error, is_done = None, False
        try:
            with self.mesh or nullcontext():
                yield row
            is_done = True
            self._done(number, read_by_all("row", dict(row)), start)
        except BaseException as error:
            self._failed = True
            if self.goes_back(error):
                self.error = error
                return
            if not is_done and len(row) > len(values):  # an interrupt came after the step
                with suppress(BackendError):  # other processes may hold its values
                    self._done(number, row, start)
            raise
        finally:
            row.written = True

    def _see_again(self, number: int) -> None:
        """Removes the rows of steps that are repeated, in a run that is resumed or goes back after
        a failed step. A repeated step of another run is reported in one line, once."""
        if self._looks or (self._failed and number < self._next):
            again = self.cut(number)
            if again:
                self.progress.note(f"run: the rows of {again} steps from {number} on come again")
        elif number < self._next and not self._told_twice:
            self._told_twice = True
            self.progress.note(
                f"run: step {number} has a row already and gets a second one: if the run goes back,"
                f" call run.cut({number}) before; else count its steps on"
            )
        self._failed = False

    def _done(self, number: int, metrics: Mapping[str, Any], start: float) -> None:
        row = {name: v for k, value in metrics.items() for name, v in _numbers(k, value).items()}
        step_s = time.perf_counter() - start
        self._times.append(step_s)
        self.steps_done = self._next = number + 1
        self.last = {"step": number, **row}
        self.tracker.log(number, {**row, "step_s": round(step_s, 6), **self._speed(step_s)})
        shown = self._speed(median(self._times[-SPEED_WINDOW:]))
        loss = row.get("loss")
        self.progress.update(number, loss=loss if isinstance(loss, (int, float)) else None, **shown)

    def _speed(self, step_s: float) -> dict[str, float]:
        found = {"tokens_per_s": round(self.tokens_per_step / step_s, 1)}
        if self.model_flops and self.peak_flops:
            found["mfu"] = round(self.model_flops / step_s / self.peak_flops, 4)
        return found

    @property
    def median_speed(self) -> str:
        """The median time of a step, with tokens/s and MFU, without the first step, which
        compiles."""
        if not self._times:
            return "none was made"
        step_s = median(self._times[1:] or self._times)
        return f"{step_s * 1e3:.0f} ms  {speed_text(**self._speed(step_s))}"

    def rows(self) -> list[Row]:
        """The rows so far."""
        return read_metrics(self.metrics.path)

    def cut(self, step: int) -> int:
        """Removes the rows from `step` on, which is repeated, and returns their number. It also
        tells the trackers."""
        self.last, self.steps_done, self._next = {}, step, step
        self._looks = self._failed = False
        self._others.cut(step)
        return self.metrics.cut(step)

    def __enter__(self) -> Self:
        self.progress.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.progress.__exit__(kind, error, traceback)
        lost = None
        try:
            if self._weights is not None and self._times and kind is not Preempted:
                lost = self._save_at_end()
        finally:
            content = self.metrics.content()
            self.tracker.close()
            self._files.finish()
            if not self._on_disk(content):
                self._files.write("metrics.jsonl", content)
        if error is not None:
            self.progress.note(self._ended_by(error, lost))

    def _save_at_end(self) -> str | None:
        """Saves the weights; returns the problem if that fails, else None."""
        assert self._weights is not None
        try:
            self.save_weights(self._weights())
        except TesseraError as error:
            return str(error).splitlines()[0]
        return None

    def _on_disk(self, content: bytes) -> bool:
        try:
            return self.metrics.path.stat().st_size == len(content)
        except OSError:
            return False

    def _ended_by(self, error: BaseException, lost: str | None) -> str:
        """One line with the cause of the end of the run, and the place of its weights."""
        if isinstance(error, Preempted):
            return f"run: ended by {error.signal} after {self.steps_done} steps; {error.saved}"
        what = "interrupted" if isinstance(error, KeyboardInterrupt) else "stopped by an error"
        begin = f"run: {what} after {self.steps_done} of {self.steps} steps; "
        if self._weights is None:
            return f"{begin}what was written is in {self.folder}"
        if not self._times:
            return begin + "there are no weights to save yet"
        path = self._files.place(WEIGHTS)
        if lost is not None or path is None:
            return f"{begin}the weights could not be saved" + (f": {lost}" if lost else "")
        return f"{begin}the weights are in {path}"

    # -- files ------------------------------------------------------------------------------------
    def save_text(self, name: str, text: str) -> None:
        """Writes a text file."""
        self._files.write(name, (text.rstrip("\n") + "\n").encode())

    def save_curve(self, title: str, baselines: Mapping[str, float]) -> None:
        """Draws loss.png from the rows: `loss` and, if present, `val_loss`."""
        path = self._files.place("metrics.jsonl")
        if path is None:
            self.progress.note("run: there are no rows to draw loss.png from")
            return
        rows = read_metrics(path)
        series = [Series("training", *column(rows, "loss"))]
        validation = Series("validation", *column(rows, "val_loss"), marked=True)
        series += [validation] if validation.steps else []
        png = draw_loss_curve(series, baselines=baselines, title=title)
        self._files.write("loss.png", png)

    def save_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Writes weights.safetensors: whole tensors by name. Raises UsageError without its library.

        Each tensor is gathered to the host of the first process: all processes must call it.
        """
        save = library("save_weights", "safetensors.numpy", "demo").save
        arrays = {}
        for name, t in weights.items():
            if (x := to_first(t)) is not None:
                arrays[name] = np.asarray(x, order="C")
        self._files.write(WEIGHTS, save(arrays))

    def files(self) -> list[tuple[str, str, int]]:
        """(name, description, bytes) of the files that exist."""
        there = ((name, what, self._files.place(name)) for name, what in CONTENTS.items())
        return [(name, what, path.stat().st_size) for name, what, path in there if path]


def _numbers(name: str, value: Any) -> dict[str, Any]:
    """A value of a row as entries for trackers."""
    if isinstance(value, Statistics):
        return dict(value.flat(f"{name}/"))
    return {name: plain("run", name, value)}


def fresh_folder(root: str | Path, name: str) -> Path:
    """`root/name`, or with -2, -3, ... if it exists, so that no run overwrites another."""
    path, n = Path(root) / name, 1
    while path.exists():
        n += 1
        path = Path(root) / f"{name}-{n}"
    return path


# Files of a run, with retries: a failed write is reported in one line, and tried again at the
# end.

Tell = Callable[[str], None]


class Files:
    """The files of `folder`, each written whole or not at all; at the end `spare` gets the files
    that failed."""

    def __init__(self, folder: Path, spare: Path | None, tell: Tell) -> None:
        self.folder, self.spare, self.tell = folder, spare, tell
        self.ended = False
        self._late: dict[str, bytes] = {}

    def write(self, name: str, data: bytes) -> None:
        """Writes a file now; if that fails, again at the end."""
        known = name in self._late
        self._late[name] = data
        error = self._put(name, self.folder)
        if error is None:
            return
        if self.ended:
            self._at_last(name, error)
        elif not known:
            self.tell(_line(name, self.folder, error) + "; tried again at the end")

    def finish(self) -> None:
        """Tries failed files once more; from now on a failed file goes to `spare`."""
        self.ended = True
        for name in list(self._late):
            error = self._put(name, self.folder)
            if error is not None:
                self._at_last(name, error)

    def place(self, name: str) -> Path | None:
        """The path of a file; None if it was not written."""
        folders = [self.folder] if self.spare is None else [self.folder, self.spare]
        there = (folder / name for folder in folders if name not in self._late)
        return next((path for path in there if path.is_file()), None)

    def _at_last(self, name: str, error: OSError) -> None:
        """Tries the spare folder for a failed file, and reports that it is there or lost."""
        if self.spare is None:
            self.tell(
                _line(name, self.folder, error) + ", and is lost; spare= names a second folder"
            )
            return
        again = self._put(name, self.spare)
        if again is None:
            self.tell(f"run: {name} is in {self.spare}")
        else:
            both = f"{self.folder} ({error.strerror}) nor to {self.spare} ({again.strerror})"
            self.tell(f"run: {name} can be written neither to {both}, and is lost")

    def _put(self, name: str, folder: Path) -> OSError | None:
        try:
            write_whole(folder / name, self._late[name])
        except OSError as error:
            return error
        del self._late[name]
        return None


def _line(name: str, folder: Path, error: OSError) -> str:
    return f"run: {name} cannot be written to {folder}: {error.strerror}"
