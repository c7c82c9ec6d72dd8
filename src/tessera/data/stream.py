"""Streams of samples: iterables, whose state is saved with the position of a run.

An iterable or its iterator may have `state_dict()` and `load_state_dict(state)`, or `get_state()`
and `set_state(state)`. Without these a run that goes on reads the first samples again.

>>> stream = Stream([5, 6, 7])
>>> [next(samples) for samples in [stream.begin(0, 0, None)] for _ in range(2)], stream.state()
([5, 6], None)
>>> next(stream.begin(0, 2, None))
7
"""

from __future__ import annotations

import base64
import copy
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from ..core.errors import UsageError
from .loader import Made, Settings

_NAMES = (("state_dict", "load_state_dict"), ("get_state", "set_state"))
_BYTES = "base64"


class Stream:
    """The passes over an iterable, one at a time."""

    def __init__(self, data: Any) -> None:
        self._data = data
        self._get: Callable[[], Any] = lambda: None

    def begin(self, epoch: int, sample: int, state: Any) -> Iterator[Any]:
        """The samples of the pass `epoch` from number `sample` on, where the data had `state`.

        `set_epoch(epoch)` of the data is called first, if there is one.
        """
        if hasattr(self._data, "set_epoch"):
            self._data.set_epoch(epoch)
        known = state is not None
        get, put = _methods(self._data)
        if get and known:
            put(_unpacked(state))
        iterator = iter(self._data)
        if not get:
            get, put = _methods(iterator)
            if get and known:
                put(_unpacked(state))
        self._get = get or (lambda: None)
        skipped = 0 if get and known else sample
        return itertools.islice(iterator, skipped, None) if skipped else iterator

    def state(self) -> Any:
        """The state of the data after the sample that was read last, or None if it has none."""
        state = self._get()
        if isinstance(state, bytes):  # positions are stored as text
            return {_BYTES: base64.b64encode(state).decode()}
        return copy.deepcopy(state)


def _unpacked(state: Any) -> Any:
    if isinstance(state, dict) and list(state) == [_BYTES]:
        return base64.b64decode(state[_BYTES])
    return copy.deepcopy(state)


def _methods(x: Any) -> tuple[Any, Any]:
    for get, put in _NAMES:
        if hasattr(x, get) and hasattr(x, put):
            return getattr(x, get), getattr(x, put)
    return None, None


def streamed(
    data: Any, read: Callable[[Sequence[Any]], Any], settings: Settings, epoch: int, sample: int,
    state: Any,
) -> Iterator[Made]:  # fmt: skip
    """Yields what `read` makes of the samples of each batch, from a position on, and
    None at the end of each epoch. Raises UsageError if an epoch has no batch."""
    stream, size = Stream(data), settings.batch_size
    while epoch < settings.all_epochs:
        iterator = stream.begin(epoch, sample, state)
        while samples := list(itertools.islice(iterator, size)):
            if len(samples) < size and settings.drop_last:
                break
            sample += len(samples)
            yield epoch, sample, stream.state(), read(samples)
        if sample == 0:
            raise UsageError(
                f"dataloader: epoch {epoch} of the iterable has {len(samples)} samples, a batch"
                f" takes {size}",
                data=type(data).__name__,
                fix="iter(dataset) must begin anew for each epoch, which a generator does not: give"
                " an object whose __iter__ makes one",
            )
        epoch, sample, state = epoch + 1, 0, None
        yield epoch, 0, None, None
