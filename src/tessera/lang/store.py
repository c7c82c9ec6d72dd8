"""Where do weights live that a function makes for itself? In a store, by name.

The owner of a weight is the innermost `graph.stage` around the place that makes it; else the
`graph.training_step`; else the recorded function; else, outside of all, the process. Within its
owner a weight is found again by what it is and its occurrence (`block0`, `block1`, …), or by the
name it was given. So what a function makes at its first call it meets again at every later one.

A recorded function does not hold a weight's value but its slot, so new values need no recording.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any
from weakref import finalize, ref

from ..core.checks import mapping, same_names, string
from ..core.context import settings
from ..core.errors import UsageError, fail
from ..core.interrupts import whole
from ..core.layout import TensorType, plain
from ..core.mesh import Mesh
from .moving import moved
from .operands import as_tensor
from .parameter import Parameter, fits
from .record import Recorder, current
from .strategy import Strategy
from .tensor import Tensor
from .tree import flatten, path_name, spec_paths, unflatten, without_boxes


class Slot:
    """A weight's place: its value now, and what recorded functions hold in its stead."""

    def __init__(self, name: str, value: Tensor) -> None:
        self.name, self._now = name, value
        self._held: dict[tuple[str, TensorType], Tensor] = {}

    @property
    def now(self) -> Tensor:
        """The value; of a parameter of a module, what is in it now."""
        return self._now.now()

    @now.setter
    def now(self, value: Tensor) -> None:
        if isinstance(self._now, Parameter):
            self._now.put(value)
        else:
            self._now = value

    def move(self, to: TensorType) -> None:
        """Gives the value the layout `to`."""
        if self._now._data is None and self._now._pending is not None:
            self._now.type = to
        elif self.now.type is not to:
            self.now = self._named(moved(self.now, to))

    def put(self, value: Tensor) -> None:
        """Sets the value, in the layout that the weight has. It is checked to fit."""
        have = self.now.type
        to = have if have.mesh is not None else have.on(value.mesh)
        self.now = self._named(moved(value, to))
        for held in self._held.values():
            self._fill(held)

    def held(self, shown_as: str) -> Tensor:
        """The tensor that stands for this weight in recordings, under the name `shown_as`."""
        if isinstance(self._now, Parameter):
            return self._now
        key = shown_as, self.now.type
        found = self._held.get(key)
        if found is None:
            found = self._held[key] = Tensor(None, self.now.type)
            found.name = shown_as
            self._fill(found)
        return found

    @property
    def holders(self) -> list[Tensor]:
        """Every tensor that stands for this weight in a recording."""
        return [self._now] if isinstance(self._now, Parameter) else list(self._held.values())

    def _fill(self, held: Tensor) -> None:
        held._data = None
        held._pending = lambda: moved(self.now, held.type).stored

    def _named(self, value: Tensor) -> Tensor:
        """`value` without the history of how it was made."""
        new = Tensor(value.stored, value.type)
        new.name = self.name
        return new


@dataclass
class Group:
    """Weights that were made together: a tree of them and what asked for it."""

    asked: object
    tree: Any
    slots: list[Slot | None]  # one per leaf of the tree; None for what is no tensor


class Store:
    """The weights of one owner."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.groups: dict[str, Group] = {}

    @property
    def slots(self) -> dict[str, Slot]:
        return {s.name: s for g in self.groups.values() for s in g.slots if s is not None}


@dataclass
class Owner:
    """One call of an owner: how often it has made what, and in which recording it runs."""

    store: Store
    recorder: Recorder | None
    counts: Counter[str] = field(default_factory=Counter)


@dataclass(frozen=True)
class Collector:
    """What a training step (or `graph.parameters`) wants of all weights that are met inside."""

    seen: dict[str, Slot]
    prefix: str = ""
    own: Store | None = None
    strategy: Strategy | None = None
    # Of a batch that is laid out: where it is, and whether another mesh is to be told of.
    batch_on: Mesh | None = None
    asks_for_mesh: bool = False

    def met(self, pipeline: Mesh | None) -> None:
        """Is told the mesh of a pipeline that is called. Raises NeedsMesh if the batch goes
        there."""
        if self.asks_for_mesh and pipeline is not None and pipeline != self.batch_on:
            raise NeedsMesh(pipeline, True)


class NeedsMesh(Exception):
    """The batch of the function being recorded belongs on `mesh`: `always`, or in this call."""

    def __init__(self, mesh: Mesh, always: bool) -> None:
        self.mesh, self.always = mesh, always
        super().__init__(f"the batch belongs on {mesh.text()}")


@dataclass(frozen=True)
class Here:
    """Who owns the weights that are made here, and who collects all that are met."""

    owner: Owner
    collector: Collector | None = None


# All state: who owns what is made here, by default the process; and recorded functions' weights.
_PROCESS = Here(Owner(Store(""), None))
_here = ContextVar("tessera_weights", default=_PROCESS)
_functions: dict[int, tuple[object, Store]] = {}  # by the id of a function


@contextmanager
def owned_by(store: Store) -> Iterator[None]:
    """What is made inside belongs to `store`; occurrences count from zero."""
    token = _here.set(replace(_here.get(), owner=Owner(store, current())))
    try:
        yield
    finally:
        _here.reset(token)


@contextmanager
def collected_by(collector: Collector | None) -> Iterator[None]:
    token = _here.set(replace(_here.get(), collector=collector))
    try:
        yield
    finally:
        _here.reset(token)


def collector() -> Collector | None:
    """The training step, or the question, that weights are met in."""
    return _here.get().collector


def store_of(fn: Callable[..., Any], name: str) -> Store:
    """The weights of the function `fn`, which is recorded under `name`: they go when it goes."""
    fn = inspect.unwrap(fn)
    if id(fn) not in _functions:
        try:
            finalize(fn, _functions.pop, id(fn), None).atexit = False
            _functions[id(fn)] = None, Store(name)
        except TypeError:  # of a kind that cannot be watched: it stays
            _functions[id(fn)] = fn, Store(name)
    return _functions[id(fn)][1]


def _owner_now(what: str) -> Owner:
    owner = _here.get().owner
    if owner.recorder is not current():
        raise fail(
            UsageError,
            f"{what}: weights cannot be made in the body of a loop or a branch",
            fix="call a function with @graph.stage there: its weights are its own",
        )
    return owner


def weights(
    kind: str,
    make: Callable[[], Any],
    asked: object,
    mesh: Mesh | None,
    name: str = "",
    rename: Callable[[str], str] = str,
) -> tuple[str, Any]:
    """(name, tree): the weights that this place makes, or met here before.

    `make` gives a tree of `Parameter`s at the first call; `asked` describes it, and must be equal
    at later ones. `rename` turns a leaf's path into its name. Raises UsageError.
    """
    owner = _owner_now(kind)
    string(kind, "name", name)
    if not name:
        name = f"{kind}{owner.counts[kind]}"
        owner.counts[kind] += 1
    store = owner.store
    full = f"{store.name}.{name}" if store.name else name
    group = store.groups.get(name)
    if group is None:
        group = store.groups[name] = _made(full, make(), asked, rename)
    elif group.asked != asked:
        raise fail(
            UsageError,
            f"{kind}: the weights {full!r} were made with other sizes or options",
            [("made with", group.asked), ("asked for", asked)],
            fix="give one of the two another name=, or call them in functions of their own",
        )
    leaves, spec = flatten(group.tree)
    now = [x if s is None else use(s, mesh, store) for x, s in zip(leaves, group.slots)]
    return name, unflatten(without_boxes(spec), now)


def _made(full: str, tree: Any, asked: object, rename: Callable[[str], str]) -> Group:
    """The weights of `tree`, made anew under names below `full`, as a group for what `asked` for
    them."""
    leaves, spec = flatten(tree)
    slots: list[Slot | None] = []
    for x, path in zip(leaves, spec_paths(spec), strict=True):
        if not isinstance(x, Tensor):
            slots.append(None)
            continue
        assert x.remake is not None, "a tree of Parameters"
        name = f"{full}.{rename(path_name(path))}"
        made = x.remake(x.shape, name)
        t = made.opened() if isinstance(made, Parameter) else made
        t.name, t.type = name, plain(t.dtype, t.shape)
        slots.append(Slot(name, t))
    return Group(asked, tree, slots)


def use(slot: Slot, mesh: Mesh | None = None, store: Store | None = None) -> Tensor:
    """The tensor to compute with here: the value, or what stands for it in a recording."""
    here, now, label = collector(), slot.now, slot.name
    mesh = mesh or settings().mesh or now.mesh
    mesh = mesh.space if mesh is not None and mesh.time else mesh
    want = now.type
    if now.mesh != mesh and (now.mesh is not None or now._data is None):
        want = plain(now.dtype, now.shape, mesh)
    if here is not None:
        if here.prefix and store is not here.own:
            label = f"{here.prefix}.{slot.name}"
        if here.strategy is not None:
            want = here.strategy.weight(slot.name, plain(now.dtype, now.shape, mesh))
        if here.seen.setdefault(label, slot) is not slot:
            raise fail(
                UsageError,
                f"{here.prefix or 'parameters'}: two weights are called {label!r}",
                fix="give the stages, or the weights, names of their own",
            )
    slot.move(want)
    return known(slot, label)


def known(slot: Slot, label: str) -> Tensor:
    """The weight's tensor as it is asked for by name: its value, or what stands for it here."""
    recorder = current()
    if recorder is None:
        value = slot.now
        value.slot = ref(slot)
        return value
    held = slot.held(label)
    stand_for(recorder, slot.now, held)
    return held


def put_weight(old: Tensor, new: Tensor) -> None:
    """Sets the weight of a graph function to `new` where `old` is its value."""
    slot = old.slot() if old.slot is not None else None
    if slot is not None and slot.now is old:
        slot.put(new)


def stand_for(recorder: Recorder, value: Tensor, held: Tensor) -> None:
    """In this recording `value` means `held`, wherever the user has it from."""
    at: Recorder | None = recorder
    while at is not None:
        at.node(held)
        at._nodes[id(value)] = at._nodes[id(held)]
        at = at.parent


@whole
def assign(what: str, slots: Mapping[str, Slot], new: object, whole: bool) -> None:
    """Sets weights from a dict by name; with `whole` it must name all.

    Raises UsageError, ShapeError, DTypeError; nothing is set then.
    """
    fix = "give a dict from names to tensors, such as .parameters is"
    new = mapping(what, "the weights", new, fix)
    lost = sorted(set(slots) - set(new)) if whole else []
    odd = sorted(str(k) for k in new if k not in slots)
    same_names(what, lost, odd, "give the names that .parameters has; update() takes some of them")
    values = {}
    for name, x in new.items():
        t = as_tensor(x)
        if t._trace is not None:
            raise fail(
                UsageError,
                f"{what}: {name!r} is a tensor of a function that is being recorded",
                [("tensor", t.type)],
                fix="return it from the function, and set the weights outside",
            )
        fits(f"{what}: {name!r}", slots[name].now, t, "give a tensor like the weight")
        values[name] = t
    for name, t in values.items():
        slots[name].put(t)
