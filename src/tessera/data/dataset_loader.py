"""`DataLoader`: batches of any data set: map-style, arrays, or an iterable.

>>> images = {"x": np.zeros((10, 8, 8), np.float32), "label": np.arange(10)}
>>> loader = DataLoader(images, batch_size=4, shuffle=True, seed=1)
>>> [(str(b["x"].type), b["label"].numpy().tolist()) for b in loader]
[('f32[4, 8, 8]', [1, 9, 5, 6]), ('f32[4, 8, 8]', [0, 8, 7, 2]), ('f32[2, 8, 8]', [3, 4])]
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..core.checks import axes_of, divides, shown, unfit
from ..core.declared import Function
from ..core.errors import UsageError
from ..core.mesh import Mesh
from ..lang.value.checks import mesh_or_none
from .collate import Local, collate, mapped, part, whole
from .config import LEGAL
from .loader import Loader, Made, Settings, in_order
from .samples import Numbered, numbered
from .split import Split, data_axes
from .stream import streamed


class DataLoader(Loader[Any]):
    """Batches of `dataset`, as trees of tensors whose dim 0 counts the samples.

    `dataset` is an object with `__len__` and `__getitem__` (a `datasets.Dataset`, a list, a dataset
    of PyTorch or Grain); an array, or a dict or tuple of arrays with as many rows each; or an
    iterable. Samples are dicts and tuples of arrays, numbers, lists of numbers and texts: they are
    stacked, texts are lists.

    | argument | meaning |
    |---|---|
    | `batch_size` | samples of a batch, over all devices and hosts; None: each sample is a batch |
    | `shuffle`, `seed` | another order in each epoch, a function of the seed; False: in the order \
of the data, as iterables are |
    | `epochs` | None: a `for` is one epoch; a number: it ends after that many; `math.inf`: never |
    | `drop_last` | True: a last batch of fewer samples is left out |
    | `collate_fn` | makes a batch of a list of samples (of one sample, without a `batch_size`). \
It gets all samples of the batch in each process, which then takes its rows |
    | `prefetch` | batches that a thread makes ahead; 0: no thread |
    | `mesh`, `data_axes` | dim 0 is split over these axes: dp, fsdp, ddp and data, if None |
    | `hosts` | (index of this process, number of processes), for processes not connected |

    Each process reads its own rows alone, except for an iterable, with `collate_fn`, or without a
    `batch_size`: there every process reads all samples and takes its rows. `for` loops go on, and
    end, as those of `create_dataloader`. Raises UsageError if an argument is not allowed or has no
    effect; MeshError if `mesh` is not a mesh.
    """

    _begin_again = "a loader that is made anew begins again"
    _unmade = "the error above came from the data set or collate_fn."

    def __init__(
        self,
        dataset: Any,
        batch_size: int | None = 1,
        *,
        shuffle: bool = False,
        seed: int = 0,
        epochs: float | None = None,
        drop_last: bool = False,
        collate_fn: Function | None = None,
        prefetch: int = 2,
        mesh: Mesh | None = None,
        data_axes: str | tuple[str, ...] | None = None,
        hosts: tuple[int, int] = (0, 1),
    ) -> None:
        given = {
            "shuffle": shuffle, "seed": seed, "epochs": epochs, "drop_last": drop_last,
            "prefetch": prefetch, "data_axes": data_axes, "hosts": hosts,
        }  # fmt: skip
        if batch_size is not None:
            given["batch_size"] = batch_size
        for key, value in given.items():
            kind, fits = LEGAL[key]
            if not fits(value):
                raise UsageError(f"DataLoader: {key} cannot be {shown(value)}", fix=f"give {kind}")
        samples = numbered(dataset)
        if samples is None and not hasattr(dataset, "__iter__"):
            raise unfit(
                "DataLoader", "dataset", dataset,
                "give an object with __len__ and __getitem__, arrays, or an iterable",
            )  # fmt: skip
        idle = {
            "shuffle": shuffle and samples is None and "an iterable gives its own order",
            "drop_last": drop_last and batch_size is None and "each sample is a batch",
            "data_axes": data_axes is not None and mesh is None and "there is no mesh",
        }
        if rows := [(key, why) for key, why in idle.items() if why]:
            raise UsageError(
                "DataLoader: " + ", ".join(f"{key} has no effect" for key, _ in rows),
                rows=rows,
                fix="leave " + ("it" if len(rows) == 1 else "them") + " out",
            )
        settings = Settings(
            int(batch_size or 1), bool(shuffle), int(seed), epochs, bool(drop_last), int(prefetch)
        )
        self._batched, self._collate, self._samples = batch_size is not None, collate_fn, samples
        count = math.inf if samples is None else samples.count
        if count < (settings.batch_size if drop_last else 1):
            raise UsageError(
                f"DataLoader: the data set has {count} samples, a batch takes"
                f" {settings.batch_size}",
                fix="give more samples or a smaller batch, or leave drop_last out",
            )
        facts = {
            "data": samples and samples.fingerprint(),
            "samples": samples and samples.count,
            "shuffle": settings.shuffle,
            "seed": settings.seed if shuffle else None,
        }
        split = _split(mesh, data_axes, hosts, batch_size)
        super().__init__(_Shown(dataset), count, settings, split, facts)

    def _made(self) -> Iterator[Made]:
        at = (self._settings, self._epoch, self._sample)
        merge = self._collate or (collate if self._batched else _same)
        if self._samples is None:
            read = _reader(merge, self._split, self._batched)
            return streamed(self._source.data, read, *at, self._data_state)
        own = self._batched and self._collate is None
        how = (self._samples, self._split)
        numbers = _own_rows(*how) if own else _all_rows(*how, merge, self._batched)
        return in_order(numbers, self._samples.count, *at)

    def _place(self, rows: Any) -> Any:
        def leaf(x: Local) -> Any:
            if isinstance(x.rows, np.ndarray):
                return self._split.tensor(x.rows, x.size)
            return x.rows

        return mapped(leaf, rows)

    def __len__(self) -> int:
        """The number of batches in a whole epoch. Raises UsageError for an iterable, which does not
        say it."""
        if self._samples is None:
            raise UsageError(
                "DataLoader: an iterable does not say how many samples it has",
                data=self._source,
                fix="count the batches of a `for`",
            )
        return super().__len__()

    def __repr__(self) -> str:
        batches = "" if self._samples is None else f"{len(self):,} batches an epoch, "
        unit = f"{self._rows_text()} samples" if self._batched else "batches"
        return f"DataLoader({unit} of {self._source}, {batches}{self._place_text()})"


class _Shown:
    """A data set, with a short text for errors: a data set's own may be long."""

    def __init__(self, data: Any) -> None:
        self.data = data

    def __repr__(self) -> str:
        return type(self.data).__name__


def _split(mesh: Any, axes: Any, hosts: tuple[int, int], batch_size: int | None) -> Split:
    hosts = (int(hosts[0]), int(hosts[1]))
    if batch_size is not None and mesh is None:
        divides(
            "DataLoader", batch_size, hosts[1],
            "a batch of {count} samples does not divide over {parts} hosts",
            "give a batch_size that does", UsageError,
        )  # fmt: skip
    where = mesh_or_none("DataLoader", mesh)
    if where is None:
        return Split(hosts=hosts)
    asked = None if axes is None else axes_of("", axes)
    return Split(where, data_axes(where, asked), hosts)


# Readers run in the thread that makes batches: they hold no loader, so that it can be collected.


def _same(sample: Any) -> Any:
    return sample


def _reader(
    merge: Callable[[Any], Any], split: Split, batched: bool
) -> Callable[[Sequence[Any]], Any]:
    """A function from all samples of a batch to the rows of this process."""
    return lambda samples: whole(merge(samples if batched else samples[0]), split.rows)


def _all_rows(
    samples: Numbered, split: Split, merge: Callable[[Any], Any], batched: bool
) -> Callable[[NDArray[np.int64]], Any]:
    read = _reader(merge, split, batched)
    return lambda batch: read(samples.samples(batch[batch >= 0]))


def _own_rows(samples: Numbered, split: Split) -> Callable[[NDArray[np.int64]], Any]:
    def read(batch: NDArray[np.int64]) -> Any:
        batch = batch[batch >= 0]
        mine = batch[split.rows(len(batch))]
        # A process without rows in a last batch reads one, for the shapes.
        return part(samples.batch(mine if mine.size else batch[:1]), len(batch), mine.size)

    return read
