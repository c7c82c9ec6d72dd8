"""What does a recorded call do besides its program? What its result is made of, and where it puts
what the function has written."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import Any

from ..core.context import settings
from ..core.layout import TensorType
from ..core.turns import TURN
from .host_outputs import HostOutput, HostValue
from .mutations import Assigned, Edit, Pending
from .places import Place
from .tensor import Past, Tensor, wrapped
from .to_host import is_here, value_here
from .tree import Spec, unflatten


@dataclass
class Written:
    """What a recorded call does besides its program: its result's structure and its writes."""

    spec: Spec
    leaves: list[Any]  # the result's leaves; those that the program gives are None
    slots: list[int]  # where in `leaves` the program's results go, in order
    edits: list[Edit]  # how the function changed its arguments' containers
    put: list[Any]  # the leaves of what it put there
    written_slots: list[int]  # which of `put` take the program's further results
    places: Sequence[Place]  # the variables in which edits are made
    host_outputs: list[HostOutput]  # what sees the program's last results
    fills: list[int]  # the parameters among the call's tensors that take results before those
    same: list[tuple[int, int]]  # (which of `leaves` is a parameter, which of the call's it is)
    assigned: list[Place]  # attributes of modules, and items in them, that take those between
    pasts: list[Past | None]  # of the results; None where no gradient would flow to one

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
        """The call's result from the program's; writes go into the caller's containers, parameters
        among the call's `tensors`, and modules."""
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
                with contextlib.suppress(Exception):  # of another thread, say: all weights or none
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
        """Puts the results of a call where its function has put them. To do it twice does no
        harm."""
        rest = iter(values)
        for i in self.written_slots:
            pending.leaves[i] = next(rest)
        pending.put()
        for k in self.fills:
            new = next(rest)
            tensors[k].fill(new._data, new.type)
        for place in self.assigned:
            place.assign(next(rest))
