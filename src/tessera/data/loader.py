"""`DataLoader`: batches of tokens in a reproducible order, with a position that can be saved.

The global order of samples is a function of the data, the seed and the epoch. A loader makes some
rows of each global batch, so the number of loaders, and how far they prefetch, does not change the
data; the position of a run is three numbers that any number of loaders can load.

>>> from tessera.data import create_dataloader
>>> loader = create_dataloader({"data": np.arange(100), "batch_size": 4, "sequence_length": 8})
>>> batch = next(loader)
>>> batch["input_ids"].shape, batch["labels"].dtype
((4, 8), i32)
>>> loader.state_dict()["sample"], len(loader)
(4, 3)
>>> loader.close()

>>> with Ahead(iter(range(3)), depth=2) as made:
...     print(list(made))
[0, 1, 2]
"""

from __future__ import annotations

import threading
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, Generic, NoReturn, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from ..core.checks import shown, unfit
from ..core.devices import process_count
from ..core.errors import BackendError, TesseraError, UsageError, lines_up
from ..core.mesh import Mesh
from ..core.value_checks import is_whole
from ..lang.value.engine import engine
from ..lang.value.tensor import Tensor
from .config import DataConfig
from .packing import Packed, Rows, Samples, Windows
from .shuffle import Order
from .sources import TokenSource

VERSION = 1
TIMES = 3  # comparisons of the next batch among processes
_ALIKE = (
    "make the loader alike in all processes, and call it as often: each reads its own rows of it"
)

Batch = dict[str, Tensor]
Lay = Callable[[Mesh], tuple[NDArray[np.int64], Callable[[Rows], Batch]]]
"""The rows of a batch that this process has on a mesh, and a function that lays them out."""
_LoadedBatch = tuple[int, int, Rows]  # the epoch and place after the batch, and its rows


class LoaderWarning(UserWarning):
    """Warns that a loader gives batches that its user may not expect."""


class DataLoader:
    """Batches of tokens, for some epochs or without end; `create_dataloader` makes one.

    One `for` loop is one epoch unless the config sets `epochs`. If a loop is left early, the next
    one continues there, so a run loses no data; over validation data it restarts. A loop over a
    loader that has ended raises UsageError; a loop that continues without shuffling gives a
    LoaderWarning once. Use it in a `with`, or `close` it, to end its thread early.
    """

    lay: Lay | None = None  # the layout of its batches on a mesh
    mesh: Mesh | None = None

    def __init__(
        self,
        source: TokenSource,
        config: DataConfig,
        batch_size: int,
        rows: NDArray[np.int64],
        place: Callable[[Rows], Batch],
        part: str = "training",
    ) -> None:
        self._source, self._config, self._rows, self._place = source, config, rows, place
        self._part = part
        cut = _cut(source, config)
        used = source.part(cut, source.size) if part == "validation" else source.part(0, cut)
        pad = config.pad_token
        if pad is None:
            pad = 0 if source.eos is None else source.eos
        how = (used, config.sequence_length, pad, config.segment_ids)
        self._samples: Samples = (
            Windows(*how) if config.packing == "concat" else Packed(*how, config.buckets)
        )
        self.samples = self._samples.count
        self._batch_size = batch_size
        if self.samples < (batch_size if config.drop_last else 1):
            raise UsageError(
                f"dataloader: the {part} data hold {self.samples} rows of "
                f"{config.sequence_length} tokens, a batch takes {batch_size}",
                data=source,
                fix="take more data, a smaller batch or shorter rows, or say drop_last=False",
            )
        # The facts that determine the order of samples. The batch size is not one of them.
        self._facts = {
            "data": used.fingerprint(),
            "tokens": used.size,
            "samples": self.samples,
            "part": part,
            "packing": config.packing,
            "sequence_length": config.sequence_length,
            "shuffle": config.shuffle,
            "seed": config.seed if config.shuffle else None,
        }
        self._ahead: Iterator[_LoadedBatch] | None = None
        self._epoch = self._sample = 0
        self._stop: float = 0
        self._loaded = self._told = False
        self._stand_at(0, 0)

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
                f"dataloader: it has ended: its epochs={self._config.epochs} were given out",
                loader=self,
                fix="leave epochs out, so that each `for` is one epoch, or make the loader anew",
            )
        if self._sample and not loaded:
            if self._part == "validation":
                self._stand_at(0, 0)
            elif not self._config.shuffle and not self._told:
                self._told = True
                warnings.warn(
                    f"dataloader: this `for` goes on at sample {self._sample:,}, where the last one"
                    " was broken off; loader.validation() gives a loader that begins again each"
                    " time",
                    LoaderWarning,
                    stacklevel=lines_up(),
                )
        if self._config.epochs is None:
            self._stop = self._epoch + 1
        return self

    def __next__(self) -> Batch:
        if self._epoch >= self._stop:
            self._ended = self._config.epochs is not None
            begin = "" if self._ended else "iter(loader) begins the next epoch; "
            message = f"dataloader: {self._epoch} epochs are given out"
            raise StopIteration(f'{message}; {begin}"epochs": math.inf in its config has no end')
        if self._ahead is None:
            made = _batches(
                self._samples, self._order(), self._rows, self.batch_size,
                self._config.drop_last, self._epoch, self._sample,
            )  # fmt: skip
            depth = self._config.prefetch
            self._ahead = Ahead(made, depth) if depth else made
        try:
            epoch, sample, rows = next(self._ahead)
        except TesseraError:
            self.close()
            raise
        except Exception as error:
            self.close()
            raise BackendError(
                f"dataloader: the batch at sample {self._sample:,} of epoch {self._epoch} could "
                f"not be made: {type(error).__name__}: {error}",
                data=self._source,
                fix="are the files still there and whole? The loader stands where it stood",
            ) from error
        except BaseException:
            self.close()  # its prefetched batches would skip one
            raise
        try:
            if self.mesh is not None and self._compared < TIMES and process_count() > 1:
                self._compared += 1
                engine().alike("dataloader", self.mesh, self._batch_facts(), _ALIKE)
            batch = self._place(rows)
        except BaseException:
            self.close()
            raise
        self._epoch, self._sample = epoch, sample
        return batch

    @property
    def batch_size(self) -> int:
        """The rows of a batch, over all hosts."""
        return self._batch_size

    @batch_size.setter
    def batch_size(self, value: object) -> None:
        raise UsageError(
            "DataLoader: batch_size cannot be set",
            fix="make another loader of that size, and give it the position of this one:"
            " other.load_state_dict(loader.state_dict())",
        )

    def __len__(self) -> int:
        """The number of batches in a whole epoch."""
        whole, rest = divmod(self.samples, self.batch_size)
        return whole + (rest > 0 and not self._config.drop_last)

    def __repr__(self) -> str:
        rows = "" if self._rows.size == self.batch_size else f"{self._rows.size} rows of "
        return (
            f"DataLoader({rows}{self.batch_size} × {self._config.sequence_length} tokens, "
            f"{len(self):,} batches an epoch, at sample {self._sample:,} of epoch {self._epoch})"
        )

    def validation(self) -> DataLoader:
        """A loader of the part that `validation_fraction` sets aside, in the order of the data.

        Each `for` loop is one pass from the beginning; the last batch is filled up with rows whose
        labels are all -100. Raises UsageError if nothing is set aside.
        """
        if not self._config.validation_fraction:
            raise UsageError(
                "dataloader: no data are set aside for validation",
                fix='say how much in the config, e.g. "validation_fraction": 0.05',
            )
        config = replace(self._config, shuffle=False, drop_last=False, epochs=None)
        made = DataLoader(
            self._source, config, self.batch_size, self._rows, self._place, "validation"
        )
        made.lay, made.mesh = self.lay, self.mesh
        return made

    def resize(self, mesh: Mesh) -> None:
        """Lays out further batches on `mesh`, which has the same axes, as `dist.resize` does with
        weights. The position does not change, nor does a loader whose batches have no mesh."""
        if self.lay is not None:
            self.close()
            self._rows, self._place = self.lay(mesh)
            self.mesh = mesh

    # ---- position ------------------------------------------------------------------------------
    def state_dict(self) -> dict[str, Any]:
        """The position of the run as a small dict of plain values: epoch, sample, and the facts of
        their order.

        It counts the batches that were returned, over all loaders, and is the same in each.
        """
        return {"version": VERSION, "epoch": self._epoch, "sample": self._sample, **self._facts}

    def _batch_facts(self) -> dict[str, Any]:
        """The facts of the next batch, which must be equal in all processes."""
        return {**self.state_dict(), "rows of a batch": self.batch_size}

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
        self._stand_at(int(epoch), int(sample))
        self._loaded = True

    def _stand_at(self, epoch: int, sample: int) -> None:
        self.close()
        self._compared = 0
        self._ended = False
        epochs = self._config.epochs
        self._epoch, self._sample = _next(
            epoch, sample, self.samples, self.batch_size, self._config.drop_last
        )
        self._stop = self._epoch + 1 if epochs is None else epochs

    def _order(self) -> Order:
        return Order(self.samples, self._config.seed, self._config.shuffle)

    def close(self) -> None:
        """Ends the thread that prepares batches; the next batch starts it again."""
        if isinstance(self._ahead, Ahead):
            self._ahead.close()
        self._ahead = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _next(
    epoch: int, sample: int, samples: int, batch_size: int, drop_last: bool
) -> tuple[int, int]:
    """The position itself, or the beginning of the next epoch if no batch begins there."""
    return (
        (epoch, sample) if samples - sample >= (batch_size if drop_last else 1) else (epoch + 1, 0)
    )


def _batches(
    samples: Samples, order: Order, rows: NDArray[np.int64], batch_size: int, drop_last: bool,
    epoch: int, sample: int,
) -> Iterator[_LoadedBatch]:  # fmt: skip
    """Yields the rows `rows` of every batch from a position on, without end, each with the position
    after it."""
    while True:
        batch = order(epoch, sample, sample + batch_size)
        after = _next(epoch, sample + batch_size, samples.count, batch_size, drop_last)
        yield *after, samples.rows(batch[rows], batch)
        epoch, sample = after


def _cut(source: TokenSource, config: DataConfig) -> int:
    """The token at which validation begins: the end of a document, if ends are known."""
    if not config.validation_fraction:
        return source.size
    cut = int(source.size * (1.0 - config.validation_fraction))
    if source.ends is None and config.packing == "concat":
        return cut
    ends = source.document_ends()
    return int(ends[min(int(np.searchsorted(ends, cut)), ends.size - 1)])


# Prefetching: a thread makes a bounded number of batches ahead.

T = TypeVar("T")
_LOOK_S = 1.0
"""The interval at which a waiting consumer checks that the thread is alive."""


class _Shared(Generic[T]):
    """The state that the two threads share. The worker holds this and not `Ahead`, so that `Ahead`
    can be garbage collected."""

    def __init__(self, depth: int) -> None:
        self.changed = threading.Condition()
        self.ready: deque[T] = deque()
        self.depth = depth
        self.closed = False
        self.ended = False
        self.error: BaseException | None = None

    def room(self) -> bool:
        """Waits until an item may be made; returns False after `close`."""
        with self.changed:
            self.changed.wait_for(lambda: self.closed or len(self.ready) < self.depth)
            return not self.closed

    def put(self, item: T) -> None:
        with self.changed:
            if not self.closed:
                self.ready.append(item)
                self.changed.notify_all()

    def end(self, error: BaseException | None) -> None:
        with self.changed:
            self.ended, self.error = True, error
            self.changed.notify_all()

    def close(self) -> None:
        with self.changed:
            self.closed = True
            self.ready.clear()
            self.changed.notify_all()


def _work(items: Iterator[T], shared: _Shared[T]) -> None:
    try:
        while shared.room():
            shared.put(next(items))
        shared.end(None)
    except StopIteration:
        shared.end(None)
    except BaseException as error:  # raised again when the item is requested
        shared.end(error)


class Ahead(Generic[T]):
    """The items of an iterator, at most `depth` (at least 1) of them made before they are
    requested.

    An error of the iterator is raised in the consumer, after the items before it. `close` ends the
    thread; so does dropping the last reference.
    """

    def __init__(self, items: Iterator[T], depth: int) -> None:
        self._shared: _Shared[T] = _Shared(depth)
        self._thread = threading.Thread(
            target=_work, args=(items, self._shared), name="tessera-data", daemon=True
        )
        self._finalizer = weakref.finalize(self, self._shared.close)
        self._thread.start()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> T:
        shared = self._shared
        with shared.changed:
            while not (shared.ready or shared.ended or shared.closed):
                # A forked process has the object but not the thread.
                if not shared.changed.wait(_LOOK_S) and not self._thread.is_alive():
                    raise BackendError(
                        "dataloader: the thread that makes batches is gone",
                        fix="make the loader in the process that uses it, or say prefetch=0",
                    )
            if shared.ready:
                item = shared.ready.popleft()
                shared.changed.notify_all()
                return item
        if shared.error is not None:
            raise shared.error
        raise StopIteration

    def close(self) -> None:
        """Ends the thread, after the item that it is making."""
        self._shared.close()
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout=10.0)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
