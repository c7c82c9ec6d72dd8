"""Progress of a run: a bar with loss, tokens/s and MFU; in a log file, a line every few steps.

>>> with TrainProgress(steps=4, every=2, console=Console(file=sys.stdout)) as progress:
...     for step in range(4):
...         progress.update(step, loss=5.0 - step, tokens_per_s=12_000.0, mfu=0.31)
step    2/4  loss 4.0000   12.0k tokens/s  MFU 31.0 %
step    4/4  loss 2.0000   12.0k tokens/s  MFU 31.0 %
"""

from __future__ import annotations

import sys
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from ..core.devices import process_index


class TrainProgress:
    """Shows the progress of a run of `steps` steps; a context manager. Only the first process shows
    it.

    On a terminal it is a progress bar; elsewhere it is a line every `every` steps and one for the
    last step, so that a log stays readable.
    """

    __slots__ = ("_bar", "_task", "console", "every", "steps")

    def __init__(
        self,
        steps: int,
        *,
        label: str = "train",
        every: int = 20,
        console: Console | None = None,
    ) -> None:
        self.steps = steps
        self.every = max(1, every)
        if console is None:
            console = Console(file=sys.stdout, quiet=process_index() > 0)
        self.console = console
        self._bar = Progress(
            TextColumn("[bold]{task.description}"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TextColumn("{task.fields[facts]}"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=self.console,
            disable=not self.console.is_terminal,
        )
        self._task = self._bar.add_task(label, total=steps, facts="")

    def update(
        self,
        step: int,
        *,
        loss: float | None,
        tokens_per_s: float | None = None,
        mfu: float | None = None,
    ) -> None:
        """Marks `step` (from 0) as done. `mfu` is a fraction of the peak, between 0 and 1."""
        facts = facts_text(loss, tokens_per_s, mfu)
        done = step + 1
        if self.console.is_terminal:
            self._bar.update(self._task, completed=done, facts=facts)
        elif done % self.every == 0 or done == self.steps:
            self.console.print(
                f"step {done:>4}/{self.steps}  {facts}", highlight=False, markup=False
            )

    def note(self, text: str) -> None:
        """Prints a line above the bar, for instance a validation loss."""
        self._bar.console.print(text, highlight=False, markup=False, soft_wrap=True)

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._bar.stop()


def facts_text(loss: float | None, tokens_per_s: float | None, mfu: float | None) -> str:
    """The text beside the bar, without unknown numbers.

    >>> facts_text(4.25, None, None), facts_text(None, None, 0.31)
    ('loss 4.2500', 'MFU 31.0 %')
    """
    told = None if loss is None else f"loss {loss:.4f}"
    return "  ".join(filter(None, (told, speed_text(tokens_per_s, mfu))))


def speed_text(tokens_per_s: float | None = None, mfu: float | None = None) -> str:
    """A speed as readable text, without unknown numbers.

    >>> speed_text(12_000.0, 0.31)
    ' 12.0k tokens/s  MFU 31.0 %'
    """
    parts = []
    if tokens_per_s is not None:
        parts.append(f"{_thousands(tokens_per_s):>6} tokens/s")
    if mfu is not None:
        parts.append(f"MFU {100 * mfu:.1f} %")
    return "  ".join(parts)


def _thousands(value: float) -> str:
    if value >= 1e6:
        return f"{value / 1e6:.2f}M"
    return f"{value / 1e3:.1f}k" if value >= 1e3 else f"{value:.0f}"
