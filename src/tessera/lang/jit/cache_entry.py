"""`Entry`: one cached recording of a compiled function, with its argument types and programs."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from operator import attrgetter, itemgetter
from typing import Any

from ...autotune.choices import Timing
from ...core.context import Settings
from ...core.layout import TensorType
from ..record.parameter import FREEZING, Parameter
from ..record.recorder import Check
from ..record.static_arguments import Same, cache_key
from ..record.variables import GONE
from ..value.engine import Program
from ..value.tensor import Tensor
from .guards import Guards
from .segments import Segment

_type_of = attrgetter("type")


class Entry:
    """One cached recording of a function: the types of its arguments, its guards and its
    programs."""

    def __init__(
        self,
        leaves: Sequence[Any],
        setting: Settings,
        donated: Sequence[bool],
        owners: Container[type],
        argument_count: int,
    ) -> None:
        self.owners = owners
        self.cover(leaves, argument_count)
        self.setting = setting
        self.donated = {k for k, i in enumerate(self.dynamic) if i < len(donated) and donated[i]}
        self.root = Segment()
        self.key: Any = None  # the structures of its arguments and of the outer variables
        self.guards: list[Guards] = []  # one for each recording of this entry
        # The fast path if the function is one program of arguments only: picks the arguments.
        self.fast_path: Callable[[list[Any]], Sequence[Any]] | None = None
        self.arg_types: tuple[TensorType, ...] | None = None
        self.program: Program | None = None  # the program of the fast path
        self.checks: list[tuple[int, Check]] = []  # (index of a tensor, check at each call)
        # Of the autotuner: the entry that runs in place of this one, the open choices of the
        # recording, the candidates that were timed, and whether its program was compiled.
        self.best: Entry | None = None
        self.is_looked_up = False
        self.open_choices: Mapping[str, Sequence[Any]] = {}
        self.timings: tuple[Timing, ...] = ()
        self.is_warm = False
        self.last: Any = None  # the recording that `Jit.graph` and `Jit.schedule` show

    def leads_to(self, other: Entry) -> bool:
        """Returns whether `other`, the entry of a new call, differs from this entry only by its
        devices, or only because a global that was missing exists since the first call."""
        if (
            self.setting == other.setting
            and self.types[: self.dynamic_argument_count]
            == other.types[: self.dynamic_argument_count]
        ):
            return any(v is GONE for v in self.values) and all(g.hold() for g in self.guards)
        return self._logical() == other._logical()

    def _logical(self) -> tuple[Any, ...]:
        """The types and values that the entry is for, without the devices of the mesh."""
        mesh = self.setting.mesh
        types = [t if t.mesh is None else t.on(t.mesh.unfolded) for t in self.types]
        return types, self.values, mesh and mesh.unfolded

    def cover(self, leaves: Sequence[Any], argument_count: int) -> None:
        """Makes the entry stand for `leaves`, of which the first `argument_count` are of the
        arguments and the others of outer variables."""
        self.dynamic = [i for i, x in enumerate(leaves) if isinstance(x, Tensor)]
        self.static = [i for i, x in enumerate(leaves) if not isinstance(x, Tensor)]
        self.dynamic_argument_count = sum(i < argument_count for i in self.dynamic)
        tensors = self.pick(leaves)
        self.types = [t.type for t in tensors]
        self.frozen = [t.frozen for t in tensors]
        if any(self.frozen):  # a parameter that was unpickled did not add to FREEZING
            FREEZING.add(True)
        # The object that the function is a method of is compared by identity, others by value.
        self.values = [
            Same(v) if type(v) in self.owners else cache_key(v, warn=True)
            for v in (leaves[i] for i in self.static)
        ]
        self.kinds = [type(leaves[i]) for i in self.static]
        # One parameter under several names is one input, and so is one tensor in several variables.
        by_id = enumerate(zip(self.dynamic, tensors, strict=True))
        self.boxes = [k for k, (i, t) in by_id if type(t) is Parameter or i >= argument_count]
        self.distinct = len(set(map(id, tensors)))
        self.alias = self._alias(tensors)

    def _alias(self, tensors: Sequence[Any]) -> list[int]:
        first: dict[int, int] = {}
        return [first.setdefault(id(tensors[k]), k) for k in self.boxes]

    def pick(self, leaves: Sequence[Any]) -> Sequence[Any]:
        """The tensors among `leaves`."""
        return leaves if not self.static else [leaves[i] for i in self.dynamic]

    def matches(self, leaves: list[Any], setting: Settings) -> bool:
        """Returns whether this entry fits a call: the same types, settings, frozen parameters,
        variables and static values. The cheap comparisons come first, as this runs at each call."""
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
        """Returns whether the same arguments share a parameter as in the recording."""
        if self.distinct == len(tensors) == len(set(map(id, tensors))):
            return True
        return self._alias(tensors) == self.alias

    def settle(self) -> None:
        """Sets up the fast path after the first recording."""
        root = self.root
        sources = [root.sources[i] for i in root.imports]
        if root.written is not None and all(isinstance(s, int) for s in sources):
            order = [s for s in sources if isinstance(s, int)]
            self.arg_types = tuple(self.types[s] for s in order)
            if order == list(range(len(self.dynamic))):
                self.fast_path = list
            elif len(order) > 1:
                self.fast_path = itemgetter(*order)
            else:
                self.fast_path = lambda data: [data[s] for s in order]


def _equal(x: object, before: object) -> bool:
    if type(before) is Same:
        return (x.x if type(x) is Same else x) is before.x
    try:
        return bool(cache_key(x) == before)
    except Exception:  # an object whose == fails is another one
        return False
