"""`Loader`: batches in a reproducible order, with a position that can be saved.

The global order of samples is a function of the data, the seed and the epoch. A loader makes some
rows of each global batch, so the number of loaders, and how far they prefetch, does not change the
data; the position of a run is three numbers that any number of loaders can load.

`TokenLoader` and `DataLoader` are the two kinds: of tokens, and of any data set.
"""

from __future__ import annotations

import abc
import math
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Generic, NoReturn, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from ..core.checks import shown, unfit
from ..core.devices import process_count
from ..core.errors import BackendError, TesseraError, UsageError, lines_up
from ..core.mesh import Mesh
from ..core.value_checks import is_whole
from ..lang.value.engine import engine
from .ahead import Ahead
from .shuffle import Order
from .split import Split

VERSION = 1
TIMES = 3  # comparisons of the next batch among processes
_ALIKE = (
    "make the loader alike in all processes, and call it as often: each reads its own rows of it"
)

Batch = TypeVar("Batch")
Made = tuple[int, int, Any, Any]
"""The epoch and place after a batch, the state of the data there, and the rows of this process.
Rows of None end an epoch whose length was not known."""


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings that samples become batches by. With `begins_anew` each `for` is one pass from
    the beginning."""

    batch_size: int
    shuffle: bool
    seed: int
    epochs: float | None
    drop_last: bool
    prefetch: int
    begins_anew: bool = False

    @property
    def all_epochs(self) -> float:
        """The number of epochs, infinite if each `for` is one."""
        return math.inf if self.epochs is None else self.epochs

    def next(self, epoch: int, sample: int, samples: float) -> tuple[int, int]:
        """The position itself, or the beginning of the next epoch if no batch begins there."""
        least = self.batch_size if self.drop_last else 1
        return (epoch, sample) if samples - sample >= least else (epoch + 1, 0)


class LoaderWarning(UserWarning):
    """Warns that a loader gives batches that its user may not expect."""


class Loader(abc.ABC, Generic[Batch]):
    """Batches of some data, for some epochs or without end.

    `samples` is the number of samples of an epoch, infinite if it is not known. A subclass makes
    the rows of batches (`_made`, in a thread that must not hold the loader) and tensors of them.
    """

    _begin_again: str  # in a warning: the way to a loop that begins again
    _unmade: str  # in an error: a likely reason why a batch could not be made

    def __init__(
        self,
        source: Any,
        samples: float,
        settings: Settings,
        split: Split,
        facts: Mapping[str, Any],
    ) -> None:
        self._source, self.samples, self._settings = source, samples, settings
        self._split, self._facts = split, dict(facts)
        self._ahead: Iterator[Made] | None = None
        self._epoch = self._sample = 0
        self._stop: float = 0
        self._loaded = self._told = self._ended = False
        self._stand_at(0, 0)

    @abc.abstractmethod
    def _made(self) -> Iterator[Made]:
        """The batches from the position on, until all epochs end."""

    @abc.abstractmethod
    def _place(self, rows: Any) -> Batch:
        """The batch of which this process has made `rows`."""

    @property
    def mesh(self) -> Mesh | None:
        """The mesh of the batches, or None."""
        return self._split.mesh if self._split.joined else None

    def __getitem__(self, key: object) -> NoReturn:
        raise UsageError(
            "dataloader: its batches come one after the other, and have no numbers",
            wanted=shown(key),
            loader=self,
            fix="take the next one, next(loader), or go on from a place:"
            " loader.load_state_dict(state)",
        )

    # ---- giving out ----------------------------------------------------------------------------
    def __iter__(self) -> Self:
        loaded, self._loaded = self._loaded, False
        if self._ended:
            raise UsageError(
                f"dataloader: it has ended: its epochs={self._settings.epochs} were given out",
                loader=self,
                fix="leave epochs out, so that each `for` is one epoch, or make the loader anew",
            )
        if self._sample and not loaded:
            if self._settings.begins_anew:
                self._stand_at(0, 0)
            elif not self._settings.shuffle and not self._told:
                self._told = True
                warnings.warn(
                    f"dataloader: this `for` goes on at sample {self._sample:,}, where the last one"
                    " was broken off; " + self._begin_again,
                    LoaderWarning,
                    stacklevel=lines_up(),
                )
        if self._settings.epochs is None:
            self._stop = self._epoch + 1
        return self

    def __next__(self) -> Batch:
        rows = None
        while rows is None:
            if self._epoch >= self._stop:
                self._ended = self._settings.epochs is not None
                begin = "" if self._ended else "iter(loader) begins the next epoch; "
                message = f"dataloader: {self._epoch} epochs are given out"
                raise StopIteration(f"{message}; {begin}with epochs of math.inf there is no end")
            try:
                epoch, sample, data, rows = self._next_rows()
                if rows is not None:
                    if self.mesh is not None and self._compared < TIMES and process_count() > 1:
                        self._compared += 1
                        engine().alike("dataloader", self.mesh, self._batch_facts(), _ALIKE)
                    batch = self._place(rows)
            except BaseException:
                self.close()  # its prefetched batches would skip one
                raise
            self._epoch, self._sample, self._data_state = epoch, sample, data
        return batch

    def _next_rows(self) -> Made:
        if self._ahead is None:
            made, depth = self._made(), self._settings.prefetch
            self._ahead = Ahead(made, depth) if depth else made
        try:
            return next(self._ahead)
        except TesseraError:
            raise
        except Exception as error:
            raise BackendError(
                f"dataloader: the batch at sample {self._sample:,} of epoch {self._epoch} could "
                f"not be made: {type(error).__name__}: {error}",
                data=self._source,
                fix=self._unmade + " The loader stands where it stood",
            ) from error

    @property
    def batch_size(self) -> int:
        """The rows of a batch, over all hosts."""
        return self._settings.batch_size

    @batch_size.setter
    def batch_size(self, value: object) -> None:
        raise UsageError(
            f"{type(self).__name__}: batch_size cannot be set",
            fix="make another loader of that size, and give it the position of this one:"
            " other.load_state_dict(loader.state_dict())",
        )

    def __len__(self) -> int:
        """The number of batches in a whole epoch."""
        whole, rest = divmod(int(self.samples), self.batch_size)
        return whole + (rest > 0 and not self._settings.drop_last)

    def _rows_text(self) -> str:
        mine = self._split.rows(self.batch_size).size
        return ("" if mine == self.batch_size else f"{mine} rows of ") + f"{self.batch_size}"

    def _place_text(self) -> str:
        return f"at sample {self._sample:,} of epoch {self._epoch}"

    def resize(self, mesh: Mesh) -> None:
        """Lays out further batches on `mesh`, which has the same axes, as `dist.resize` does with
        weights. The position does not change, nor does a loader whose batches have no mesh."""
        if self._split.mesh is not None:
            self.close()
            self._split = replace(self._split, mesh=mesh)

    # ---- position ------------------------------------------------------------------------------
    def state_dict(self) -> dict[str, Any]:
        """The position of the run as a small dict of plain values: epoch, sample, and the facts of
        their order.

        It counts the batches that were returned, over all loaders, and is the same in each.
        """
        of_data = {} if self._data_state is None else {"data_state": self._data_state}
        at = {"version": VERSION, "epoch": self._epoch, "sample": self._sample}
        return {**at, **self._facts, **of_data}

    def _batch_facts(self) -> dict[str, Any]:
        """The facts of the next batch, which must be equal in all processes."""
        at = {"epoch": self._epoch, "sample": self._sample}
        return {**at, **self._facts, "rows of a batch": self.batch_size}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues at the position `state`, also with another batch size or number of hosts.

        Raises UsageError if `state` belongs to other data, or to settings with another order.
        """
        if not isinstance(state, Mapping) or state.get("version") != VERSION:
            raise unfit("dataloader", "the state", state, "give what loader.state_dict() returned")
        other = [
            (key, f"{state.get(key)!r} in the state, {here!r} here")
            for key, here in self._facts.items()
            if state.get(key) != here
        ]
        if other:
            raise UsageError(
                "dataloader: the state was taken with other data or another order",
                rows=other,
                fix="make the loader with the data and the settings of the run that goes on",
            )
        epoch, sample = state.get("epoch", -1), state.get("sample", -1)
        if not (is_whole(epoch) and is_whole(sample) and epoch >= 0 <= sample < self.samples):
            raise UsageError(
                f"dataloader: there is no sample {shown(sample)} of epoch {shown(epoch)}",
                samples=self.samples,
                fix="give what loader.state_dict() returned, unchanged",
            )
        self._stand_at(int(epoch), int(sample), state.get("data_state"))
        self._loaded = True

    def _stand_at(self, epoch: int, sample: int, data_state: Any = None) -> None:
        self.close()
        self._compared = 0
        self._ended = False
        epochs = self._settings.epochs
        self._epoch, self._sample = self._settings.next(epoch, sample, self.samples)
        self._data_state = data_state if self._sample else None
        self._stop = self._epoch + 1 if epochs is None else epochs

    def close(self) -> None:
        """Ends the thread that prepares batches; the next batch starts it again."""
        if isinstance(self._ahead, Ahead):
            self._ahead.close()
        self._ahead = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def in_order(
    read: Callable[[NDArray[np.int64]], Any], samples: int, settings: Settings, epoch: int,
    sample: int,
) -> Iterator[Made]:  # fmt: skip
    """Yields what `read` makes of the numbers of each batch's samples (-1 past the last), from a
    position on, until the epochs of `settings` end."""
    order = Order(samples, settings.seed, settings.shuffle)
    while epoch < settings.all_epochs:
        batch = order(epoch, sample, sample + settings.batch_size)
        after = settings.next(epoch, sample + settings.batch_size, samples)
        yield *after, None, read(batch)
        epoch, sample = after
