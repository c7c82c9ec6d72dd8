"""Outputs and writes of a recorded call: the structure of its result, and its state changes."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import Any

from ...core.context import settings
from ...core.layout import TensorType
from ...core.locks import TURN
from ..record.places import Place
from ..record.to_host import is_here, value_here
from ..record.tree import Spec, unflatten
from ..value.host_outputs import HostOutput, HostValue
from ..value.tensor import Past, Tensor, wrapped
from .argument_updates import Assigned, Edit, Pending


@dataclass
class Written:
    """The outputs of a recorded call: the structure of its result, its writes and its host
    outputs."""

    spec: Spec
    leaves: list[Any]  # the result's leaves; None for each result of the program
    slots: list[int]  # the indices in `leaves` of the program's first results
    edits: list[Edit]  # the changes of the containers of the arguments, and of variables
    put: list[Any]  # the leaves of the new values in `edits`
    written_slots: list[int]  # the indices in `put` of the program's next results
    places: Sequence[Place]  # the variables that `edits` may change
    host_outputs: list[HostOutput]  # these take the program's last results
    fills: list[int]  # the parameters that take the results after `written_slots`
    same: list[tuple[int, int]]  # returned parameters: (index in `leaves`, index of the tensor)
    assigned: list[Place]  # the attributes and items that take the results after `fills`
    pasts: list[Past | None]  # of all results; None for one without a gradient

    def __post_init__(self) -> None:
        into = self.edits, self.fills, self.assigned
        calm = not any(into) and not self.host_outputs
        self.plain = calm and len(self.slots) == len(self.leaves)

    def give(
        self,
        outs: Sequence[Any],
        types: Sequence[TensorType],
        args: Any,
        kwargs: Any,
        tensors: Sequence[Any],
    ) -> Any:
        """Returns the call's result from the program's results, and writes new values into the
        caller's containers, the parameters among the call's `tensors`, and modules."""
        made = list(map(wrapped, outs, types, repeat(None) if settings().no_grad else self.pasts))
        if self.plain:
            return unflatten(self.spec, made)
        leaves = list(self.leaves)
        for i, t in zip(self.slots, made, strict=False):
            leaves[i] = t
        rest = made[len(self.slots) :]
        taken = len(rest) - sum(len(output.tensors) for output in self.host_outputs)
        pending = Pending(self.edits, self.put, (args, kwargs, Assigned(self.places)))
        with TURN:
            try:
                self._put_all(rest[:taken], pending, tensors)
            except BaseException:
                with contextlib.suppress(Exception):  # after an interrupt: all weights or none
                    self._put_all(rest[:taken], pending, tensors)
                raise
        for i, k in self.same:
            leaves[i] = tensors[k]
        left = iter(rest[taken:])
        for output in self.host_outputs:
            values = [next(left) for _ in output.tensors]
            if all(map(is_here, values)):
                output.act([HostValue(value_here(v), v.type) for v in values])
        return unflatten(self.spec, leaves)

    def _put_all(self, values: list[Tensor], pending: Pending, tensors: Sequence[Any]) -> None:
        """Writes the results of a call to their places. It may be repeated."""
        rest = iter(values)
        for i in self.written_slots:
            pending.leaves[i] = next(rest)
        pending.put()
        for k in self.fills:
            new = next(rest)
            tensors[k].fill(new._data, new.type)
        for place in self.assigned:
            place.assign(next(rest))
