"""For which arguments does a recording of a function stand, and which programs has it?"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from operator import attrgetter, itemgetter
from typing import Any

from ..core.context import Settings
from ..core.layout import TensorType
from .engine import Program
from .guards import Guards
from .parameter import FREEZING, Parameter
from .places import GONE
from .record import Check
from .segments import Segment
from .static_arguments import Same, kept
from .tensor import Tensor

_type_of = attrgetter("type")


class Entry:
    """One recorded variant of a function: what its arguments must be, and its programs."""

    def __init__(
        self,
        leaves: Sequence[Any],
        setting: Settings,
        donated: Sequence[bool],
        owners: Container[type],
        own: int,
    ) -> None:
        self.owners = owners
        self.cover(leaves, own)
        self.setting = setting
        self.donated = {k for k, i in enumerate(self.dynamic) if i < len(donated) and donated[i]}
        self.root = Segment()
        self.key: Any = None  # the structures of its arguments and of what is around them
        self.guards: list[Guards] = []  # of each of its recordings
        # Where the whole function is one program of arguments only: how to pick them.
        self.straight: Callable[[list[Any]], Sequence[Any]] | None = None
        self.have: tuple[TensorType, ...] | None = None
        self.program: Program | None = None  # that one
        self.checks: list[tuple[int, Check]] = []  # at each call, of which of its tensors

    def leads_to(self, other: Entry) -> bool:
        """Whether `other`, of a call now, is its own on other devices, or comes of what its first
        call has put outside, where nothing was."""
        if self.setting == other.setting and self.types[: self.own] == other.types[: self.own]:
            return any(v is GONE for v in self.values) and all(g.hold() for g in self.guards)
        return self._logical() == other._logical()

    def _logical(self) -> tuple[Any, ...]:
        """What it was recorded for, whichever devices the places of a mesh are on."""
        mesh = self.setting.mesh
        types = [t if t.mesh is None else t.on(t.mesh.unfolded) for t in self.types]
        return types, self.values, mesh and mesh.unfolded

    def cover(self, leaves: Sequence[Any], own: int) -> None:
        """Takes `leaves`, `own` of the arguments and what is around them, for what it was recorded
        with."""
        self.dynamic = [i for i, x in enumerate(leaves) if isinstance(x, Tensor)]
        self.static = [i for i, x in enumerate(leaves) if not isinstance(x, Tensor)]
        self.own = sum(i < own for i in self.dynamic)
        tensors = self.pick(leaves)
        self.types = [t.type for t in tensors]
        self.frozen = [t.frozen for t in tensors]
        if any(self.frozen):  # of one that was pickled, say
            FREEZING.add(True)
        # The object that the function is a method of is itself; the rest is what is in it.
        self.values = [
            Same(v) if type(v) in self.owners else kept(v, warn=True)
            for v in (leaves[i] for i in self.static)
        ]
        self.kinds = [type(leaves[i]) for i in self.static]
        # One parameter under several names is one input, and so is one tensor in several variables.
        by_id = enumerate(zip(self.dynamic, tensors, strict=True))
        self.boxes = [k for k, (i, t) in by_id if type(t) is Parameter or i >= own]
        self.distinct = len(set(map(id, tensors)))
        self.alias = self._alias(tensors)

    def _alias(self, tensors: Sequence[Any]) -> list[int]:
        first: dict[int, int] = {}
        return [first.setdefault(id(tensors[k]), k) for k in self.boxes]

    def pick(self, leaves: Sequence[Any]) -> Sequence[Any]:
        """The tensors among `leaves`."""
        return leaves if not self.static else [leaves[i] for i in self.dynamic]

    def matches(self, leaves: list[Any], setting: Settings) -> bool:
        """Whether this recording stands for a call with these arguments: their types, settings,
        frozen parameters, the function's variables and static values are the same. Called at each
        call, so cheap questions come first."""
        tensors = self.pick(leaves)
        try:
            types = list(map(_type_of, tensors))
        except AttributeError:
            return False
        if types != self.types or (setting is not self.setting and setting != self.setting):
            return False
        if self.boxes and not self._same_boxes(tensors):
            return False
        if FREEZING and [t.frozen for t in tensors] != self.frozen:
            return False
        if self.guards and not all(g.hold() for g in self.guards):
            return False
        values = [leaves[i] for i in self.static]
        return list(map(type, values)) == self.kinds and all(map(_equal, values, self.values))

    def _same_boxes(self, tensors: Sequence[Any]) -> bool:
        """Whether names that were of one parameter are so here, and no others."""
        if self.distinct == len(tensors) == len(set(map(id, tensors))):
            return True
        return self._alias(tensors) == self.alias

    def settle(self) -> None:
        """Finds the short way, once the first recording is done."""
        root = self.root
        sources = [root.sources[i] for i in root.imports]
        if root.written is not None and all(isinstance(s, int) for s in sources):
            order = [s for s in sources if isinstance(s, int)]
            self.have = tuple(self.types[s] for s in order)
            if order == list(range(len(self.dynamic))):
                self.straight = list
            elif len(order) > 1:
                self.straight = itemgetter(*order)
            else:
                self.straight = lambda data: [data[s] for s in order]


def _equal(x: object, before: object) -> bool:
    if type(before) is Same:
        return (x.x if type(x) is Same else x) is before.x
    try:
        return bool(kept(x) == before)
    except Exception:  # an object whose == fails is another one
        return False
