"""How does a value get out of a recorded function on the way, to be printed or checked?

A tap makes it one more result of the program. When a call is done, the taps act on the host, in the
order in which they were recorded; so they need no callbacks out of a running program, and order and
number never depend on the backend. A tap in a loop's body is a stacked result and acts once a turn.
In a local body it has every device's own value.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ..core.layout import TensorType
from .record import Recorder, current
from .tensor import Tensor

if TYPE_CHECKING:
    from .local.view import View


@dataclass(frozen=True, slots=True)
class Seen:
    """A value that came out: `array`, with a leading dim for each axis of `type.per`; of which
    device it is, where it is one device's."""

    array: np.ndarray[Any, Any]
    type: TensorType
    place: str = ""

    def row(self, i: int) -> Seen:
        """Its part in turn `i` of a loop."""
        inner = self.type.with_dims(self.type.dims[1:])
        return Seen(np.take(self.array, i, axis=len(self.type.per)), inner, self.place)

    def of(self, rank: int, axes: Sequence[str], sizes: Mapping[str, int]) -> Seen:
        """What the device at `rank` along `axes`, of these sizes, has."""
        at: dict[str, int] = {}
        for a in reversed(axes):
            rank, at[a] = divmod(rank, sizes[a])
        place = "[" + " ".join(f"{a}={at[a]}" for a in axes) + "]"
        pick = tuple(at.get(a, slice(None)) for a in self.type.per)
        left = (a for a in self.type.per if a not in at)
        return Seen(self.array[pick], self.type.with_per(left), place)


Act = Callable[[Sequence[Seen]], None]


@dataclass(frozen=True, slots=True)
class Tap:
    """Values of a recording, and what is done with them after a call."""

    tensors: tuple[Tensor, ...]
    act: Act

    def run(self, values: Sequence[Tensor]) -> None:
        self.act([Seen(v.numpy(), v.type) for v in values])


def tap(tensors: Sequence[Tensor], act: Act) -> None:
    """Lets `act` see `tensors` when the function being recorded has run; at once outside of one."""
    recorder = current()
    made = Tap(tuple(tensors), act)
    if recorder is None:
        made.run(made.tensors)
    else:
        recorder.taps.append(made)


def each_turn(taps: Sequence[Tap], length: int, reverse: bool, rows: Sequence[Tensor]) -> list[Tap]:
    """The taps of a loop's body, whose values are now stacked in `rows`."""

    def acting(act: Act) -> Act:
        def run(values: Sequence[Seen]) -> None:
            for i in reversed(range(length)) if reverse else range(length):
                act([v.row(i) for v in values])

        return run

    rest = iter(rows)
    return [Tap(tuple(next(rest) for _ in t.tensors), acting(t.act)) for t in taps]


def on_rank(tap: Tap, rank: int, view: View, tensors: Sequence[Tensor]) -> Tap:
    """The tap of one rank's recording, in the merged program."""
    act, axes, sizes = tap.act, view.axes, view.mesh.sizes
    return Tap(tuple(tensors), lambda values: act([v.of(rank, axes, sizes) for v in values]))


def tapped(recorder: Recorder) -> list[Tensor]:
    """The values of all taps of `recorder`, in order."""
    return [t for tap in recorder.taps for t in tap.tensors]
