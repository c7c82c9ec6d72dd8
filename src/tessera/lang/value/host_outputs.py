"""Host outputs: values of a recorded function that are printed or checked on the host.

A host output is an additional result of the program. After a call its action runs on the host, in
the order of the recording: a running program makes no callbacks, so order and number never depend
on the backend. An output in a loop's body is a stacked result and acts once an iteration. In a
local body it has every device's own value.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...core.layout import TensorType
from .tensor import Tensor


@dataclass(frozen=True, slots=True)
class HostValue:
    """The value of a host output: `array` has a leading dim for each axis of `type.varying`.
    `place` names the device if the value is one device's."""

    array: np.ndarray[Any, Any]
    type: TensorType
    place: str = ""

    def row(self, i: int) -> HostValue:
        """Returns the value in iteration `i` of a loop."""
        inner = self.type.with_dims(self.type.dims[1:])
        return HostValue(np.take(self.array, i, axis=len(self.type.varying)), inner, self.place)

    def of(self, rank: int, axes: Sequence[str], sizes: Mapping[str, int]) -> HostValue:
        """Returns the value of the device at `rank` along `axes`, whose sizes are `sizes`."""
        at: dict[str, int] = {}
        for a in reversed(axes):
            rank, at[a] = divmod(rank, sizes[a])
        place = "[" + " ".join(f"{a}={at[a]}" for a in axes) + "]"
        pick = tuple(at.get(a, slice(None)) for a in self.type.varying)
        left = (a for a in self.type.varying if a not in at)
        return HostValue(self.array[pick], self.type.with_varying(left), place)


Act = Callable[[Sequence[HostValue]], None]


@dataclass(frozen=True, slots=True)
class HostOutput:
    """Values of a recording, and the action on them after a call."""

    tensors: tuple[Tensor, ...]
    act: Act

    def run(self, values: Sequence[Tensor]) -> None:
        self.act([HostValue(v.numpy(), v.type) for v in values])


def each_iteration(
    host_outputs: Sequence[HostOutput], length: int, reverse: bool, rows: Sequence[Tensor]
) -> list[HostOutput]:
    """The host outputs of a loop's body; their values are stacked in `rows`."""

    def acting(act: Act) -> Act:
        def run(values: Sequence[HostValue]) -> None:
            for i in reversed(range(length)) if reverse else range(length):
                act([v.row(i) for v in values])

        return run

    rest = iter(rows)
    return [HostOutput(tuple(next(rest) for _ in t.tensors), acting(t.act)) for t in host_outputs]


def on_rank(
    output: HostOutput,
    rank: int,
    axes: Sequence[str],
    sizes: Mapping[str, int],
    tensors: Sequence[Tensor],
) -> HostOutput:
    """The output of the recording of one rank along `axes`, in the merged program."""
    act = output.act

    def run(values: Sequence[HostValue]) -> None:
        act([v.of(rank, axes, sizes) for v in values])

    return HostOutput(tuple(tensors), run)
