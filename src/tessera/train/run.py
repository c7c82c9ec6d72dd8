"""What is left of a run? A folder: its settings, a row a step, the curve, the weights.

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
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from types import TracebackType
from typing import Any, Self

from rich.console import Console

from ..core.errors import UsageError, fail
from ..lang.tensor import Tensor
from ..observe.statistics import Statistics
from ..show.curves import Series, save_loss_curve
from .metrics import MetricsWriter, Row, Value, column, read_metrics
from .progress import TrainProgress, speed_text
from .trackers import Several, Tracker

CONTENTS = {
    "config.json": "the settings",
    "metrics.jsonl": "a row a step",
    "loss.png": "the loss curve",
    "graph.txt": "the step as Graph IR",
    "schedule.txt": "its steps, in order",
    "pipeline.svg": "who does what when",
    "weights.safetensors": "the trained weights",
    "sample.txt": "text that the model wrote",
}
"""The files of a run and what they hold, in the order in which they are shown."""

SPEED_WINDOW = 20  # the bar shows the median speed of so many steps


class Run:
    """A run of `steps` steps and its folder; a context manager around the training loop.

    `model_flops` (a step's, all devices) and `peak_flops` (a second's) give the MFU where both are
    known. `trackers` get the settings and every row too, and are closed with the run. Raises
    UsageError where the folder cannot be made.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        steps: int,
        tokens_per_step: int,
        model_flops: float | None = None,
        peak_flops: float | None = None,
        settings: Mapping[str, Any] | None = None,
        console: Console | None = None,
        trackers: Sequence[Tracker] = (),
    ) -> None:
        self.folder = Path(folder)
        others = Several(trackers)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            for name in CONTENTS:  # of an earlier run: they would be taken for this one's
                (self.folder / name).unlink(missing_ok=True)
        except OSError as error:
            raise fail(
                UsageError,
                f"run: {str(self.folder)!r} cannot be a folder for results: {error.strerror}",
                fix="name another folder",
            ) from None
        self.steps, self.tokens_per_step = steps, tokens_per_step
        self.model_flops, self.peak_flops = model_flops, peak_flops
        self.save_text("config.json", json.dumps(dict(settings or {}), indent=2, default=str))
        self.metrics = MetricsWriter(self.folder / "metrics.jsonl")
        self.tracker = Several([self.metrics, *others.trackers])
        self.tracker.config(settings or {})
        self.progress = TrainProgress(steps, console=console)
        self._times: list[float] = []

    # -- the loop ---------------------------------------------------------------------------------
    @contextmanager
    def step(self, number: int, **values: Value) -> Iterator[dict[str, Any]]:
        """Times step `number` and writes its row: `values`, what the body puts in, its speed.

        Tensors in the row are read before the clock stops, so asynchronous work is counted.
        Statistics in it become a value each: `grads/w/norm`.
        """
        row: dict[str, Any] = dict(values)
        start = time.perf_counter()
        yield row
        row = {name: v for k, given in row.items() for name, v in _numbers(k, given).items()}
        step_s = time.perf_counter() - start
        self._times.append(step_s)
        self.tracker.log(number, {**row, "step_s": round(step_s, 6), **self._speed(step_s)})
        shown = self._speed(median(self._times[-SPEED_WINDOW:]))
        self.progress.update(number, loss=row.get("loss", float("nan")), **shown)

    def _speed(self, step_s: float) -> dict[str, float]:
        found = {"tokens_per_s": round(self.tokens_per_step / step_s, 1)}
        if self.model_flops and self.peak_flops:
            found["mfu"] = round(self.model_flops / step_s / self.peak_flops, 4)
        return found

    @property
    def median_speed(self) -> str:
        """The median step's time, tokens/s and MFU; the first, which compiles, is left out."""
        step_s = median(self._times[1:] or self._times)
        return f"{step_s * 1e3:.0f} ms  {speed_text(**self._speed(step_s))}"

    def rows(self) -> list[Row]:
        """The rows so far."""
        return read_metrics(self.metrics.path)

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
        self.tracker.close()

    # -- files ------------------------------------------------------------------------------------
    def save_text(self, name: str, text: str) -> None:
        """Writes a text file."""
        (self.folder / name).write_text(text.rstrip("\n") + "\n", encoding="utf-8")

    def save_curve(self, title: str, baselines: Mapping[str, float]) -> None:
        """Draws loss.png from the rows: `loss` and, where it is there, `val_loss`."""
        rows = self.rows()
        series = [Series("training", *column(rows, "loss"))]
        validation = Series("validation", *column(rows, "val_loss"), marked=True)
        series += [validation] if validation.steps else []
        save_loss_curve(self.folder / "loss.png", series, baselines=baselines, title=title)

    def save_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Writes weights.safetensors: whole tensors by name. Raises UsageError without its library.

        Each tensor is gathered to this host.
        """
        try:
            from safetensors.numpy import save_file
        except ImportError:
            raise fail(
                UsageError,
                "save_weights: the `safetensors` library is not installed",
                fix="pip install 'tessera[demo]'",
            ) from None
        arrays = {name: t.numpy() for name, t in weights.items()}
        save_file(arrays, str(self.folder / "weights.safetensors"))

    def files(self) -> list[tuple[str, str, int]]:
        """(name, what it holds, bytes) of the files that are there."""
        there = ((name, what, self.folder / name) for name, what in CONTENTS.items())
        return [(name, what, path.stat().st_size) for name, what, path in there if path.is_file()]


def _numbers(name: str, value: Any) -> dict[str, Any]:
    """A value of a row as what trackers take."""
    if isinstance(value, Statistics):
        return dict(value.flat(f"{name}/"))
    return {name: value.item() if isinstance(value, Tensor) else value}


def fresh_folder(root: str | Path, name: str) -> Path:
    """`root/name`, or with -2, -3, ... where there is one: no run overwrites another."""
    path, n = Path(root) / name, 1
    while path.exists():
        n += 1
        path = Path(root) / f"{name}-{n}"
    return path
