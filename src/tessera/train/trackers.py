"""Trackers of a run's metrics: TensorBoard, W&B, your own.

A tracker receives the settings once and a row per step. Any object with these three methods is one;
if it also has `cut(step)`, that is called when a run goes back, so that no step is in it twice:

>>> class Printed:
...     def config(self, settings): print("settings", settings)
...     def log(self, step, values): print(step, values)
...     def close(self): print("closed")
>>> tracker = Several([Printed()])
>>> tracker.config({"lr": 0.1}); tracker.log(0, {"loss": 2.5}); tracker.close()
settings {'lr': 0.1}
0 {'loss': 2.5}
closed
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Protocol

import numpy as np

from ..core.checks import file_access, path_of, unfit
from ..core.declared import Flag, OneOf
from ..core.devices import process_index
from ..core.errors import UsageError
from ..core.public import checked
from .metrics import MetricsWriter, Value

NAMES = ("jsonl", "tensorboard", "wandb")
Name = Annotated[str, OneOf(*NAMES)]


class Tracker(Protocol):
    """The interface of a tracker. Values are numbers, texts, booleans or None."""

    def config(self, settings: Mapping[str, Any]) -> None:
        """Receives the settings of the run, before the first row."""

    def log(self, step: int, values: Mapping[str, Value | np.generic]) -> None:
        """Receives the row of a step."""

    def close(self) -> None:
        """Writes pending data. It is the last call."""


@checked
class TensorBoard:
    """Event files in `folder` for TensorBoard: a number is a scalar, any other value a text.

    Raises UsageError without its library, tensorboardX.
    """

    def __init__(self, folder: str | Path) -> None:
        try:
            from tensorboardX import SummaryWriter
        except ImportError:
            raise _missing("TensorBoard", "tensorboardX") from None
        self.folder = path_of("TensorBoard", "folder", folder)
        self._writer: Any = SummaryWriter(str(self.folder))

    def config(self, settings: Mapping[str, Any]) -> None:
        text = json.dumps(dict(settings), indent=4, default=str)
        indented = "\n".join(f"    {line}" for line in text.splitlines())  # Markdown for code
        self._writer.add_text("config", indented, 0)

    def log(self, step: int, values: Mapping[str, Value | np.generic]) -> None:
        for name, value in values.items():
            if isinstance(value, (bool, int, float, np.number, np.bool_)):
                self._writer.add_scalar(name, float(value), step)
            elif value is not None:
                self._writer.add_text(name, str(value), step)

    def cut(self, step: int) -> None:
        """Hides entries from `step` on, in this file and in earlier ones, as TensorBoard does after
        a restart."""
        from tensorboardX.proto.event_pb2 import Event, SessionLog

        again = SessionLog(status=SessionLog.START)
        self._writer.file_writer.add_event(Event(step=step, session_log=again))

    def close(self) -> None:
        self._writer.close()


@checked
class WandB:
    """A run of Weights & Biases under `project`, with its files in `folder`.

    `mode` is "online", "offline" (files only, for `wandb sync` later) or "disabled"; None: the
    library's own settings. Raises UsageError without its library, wandb.
    """

    def __init__(
        self,
        folder: str | Path,
        project: str = "tessera",
        name: str | None = None,
        mode: Annotated[str, OneOf("online", "offline", "disabled")] | None = None,
    ) -> None:
        try:
            import wandb
        except ImportError:
            raise _missing("WandB", "wandb") from None
        self.folder = path_of("WandB", "folder", folder)
        with file_access("WandB", folder, "made", "name another folder"):
            self.folder.mkdir(parents=True, exist_ok=True)
        # Passed only if given, so that a mode in the environment is not overridden.
        chosen: dict[str, Any] = {} if mode is None else {"mode": mode}
        self._run: Any = wandb.init(project=project, name=name, dir=str(self.folder), **chosen)

    def config(self, settings: Mapping[str, Any]) -> None:
        self._run.config.update(json.loads(json.dumps(dict(settings), default=str)))

    def log(self, step: int, values: Mapping[str, Value | np.generic]) -> None:
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        self._run.finish()


@checked
class Several:
    """A tracker that forwards to one or several. Each is closed, even if another fails to close. If
    one cannot write (OSError) and there is a `tell`, it receives a line and the others go on."""

    def __init__(
        self, trackers: Tracker | Sequence[Tracker], tell: Callable[[str], None] | None = None
    ) -> None:
        given = trackers if isinstance(trackers, (list, tuple)) else (trackers,)
        for t in given:
            methods = (getattr(t, m, None) for m in ("config", "log", "close"))
            if isinstance(t, type) or not all(map(callable, methods)):
                fix = "give objects with config(settings), log(step, values) and close()"
                raise unfit("trackers", "a tracker", t, fix)
        self.trackers: tuple[Tracker, ...] = tuple(given)
        self._tell, self._told = tell, set[int]()

    def config(self, settings: Mapping[str, Any]) -> None:
        for t in self.trackers:
            with self._going_on(t):
                t.config(settings)

    def log(self, step: int, values: Mapping[str, Value | np.generic]) -> None:
        for t in self.trackers:
            with self._going_on(t):
                t.log(step, values)

    @contextmanager
    def _going_on(self, t: Tracker) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if self._tell is None:
                raise
            if id(t) not in self._told:
                self._told.add(id(t))
                self._tell(f"run: {type(t).__name__} cannot write: {error.strerror or error}")

    def cut(self, step: int) -> None:
        """Calls `cut` of the trackers that have it: rows from `step` on are repeated."""
        for t in self.trackers:
            cut = getattr(t, "cut", None)
            if callable(cut):
                with self._going_on(t):
                    cut(step)

    def close(self) -> None:
        first: Exception | None = None
        for t in self.trackers:
            try:
                with self._going_on(t):
                    t.close()
            except Exception as error:  # the others must still be closed
                first = first or error
        if first is not None:
            raise first


@checked
def tracker(name: Name, folder: str | Path, *, resume: Flag = False) -> Tracker:
    """The tracker called `name`, writing below `folder`; only the first process has it, the others
    get one that does nothing. With `resume` the rows of "jsonl" are appended to its file. Raises
    UsageError for another name."""
    made: dict[str, Callable[[], Tracker]] = {
        "jsonl": lambda: MetricsWriter(Path(folder, "tracked.jsonl"), append=resume),
        "tensorboard": lambda: TensorBoard(Path(folder, "tensorboard")),
        "wandb": lambda: WandB(Path(folder, "wandb"), name=Path(folder).name),
    }
    return Several([]) if process_index() else made[name]()


def _missing(tracker: str, library: str) -> UsageError:
    return UsageError(
        f"{tracker}: the library `{library}` is not installed", fix=f"pip install {library}"
    )
