"""Stores of the weights that functions make themselves, by name.

The owner of a weight is the innermost `graph.stage` around the line that makes it; else the
`graph.training_step`; else the recorded function; else the process. Within its owner a weight is
found again by its kind and its occurrence (`block0`, `block1`, …), or by its given name. So the
weights made at a function's first call are reused at later calls. Weights are parameters, so a
recorded function reads their values again at each call.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any
from weakref import finalize

from ...core.checks import mapping, same_names, string
from ...core.context import settings
from ...core.errors import UsageError
from ...core.interrupts import whole
from ...core.layout import plain
from ...core.mesh import Mesh
from ..parallel.strategy import Strategy
from ..record.box import Box, fits
from ..record.mesh_transfer import moved
from ..record.operands import as_tensor
from ..record.parameter import Parameter
from ..record.recorder import Recorder, current
from ..value.eager import eager
from ..value.tensor import Tensor


@dataclass
class Group:
    """A module whose parameters were made together, and the description (`asked`) of its sizes and
    options."""

    asked: object
    module: Any


class Store:
    """The weights of one owner."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.groups: dict[str, Group] = {}

    @property
    def weights(self) -> dict[str, Parameter]:
        """All weights by name."""
        every = (p for g in self.groups.values() for p in g.module.parameters().values())
        return {p.name: p for p in every}


@dataclass
class Owner:
    """One call of an owner: the number of weights made so far of each kind, and its recording."""

    store: Store
    recorder: Recorder | None
    counts: Counter[str] = field(default_factory=Counter)


@dataclass(frozen=True)
class Collector:
    """The collection of all weights used inside a training step (or `graph.parameters`)."""

    boxes: dict[str, Box]
    prefix: str = ""
    store: Store | None = None
    strategy: Strategy | None = None
    # The mesh of a batch that is laid out, and whether a pipeline may move it to another mesh.
    batch_on: Mesh | None = None
    asks_for_mesh: bool = False

    def check_mesh(self, pipeline: Mesh | None) -> None:
        """Called with the mesh of a pipeline that is called. Raises NeedsMesh if the batch belongs
        on it."""
        if self.asks_for_mesh and pipeline is not None and pipeline != self.batch_on:
            raise NeedsMesh(pipeline, True)


class NeedsMesh(Exception):
    """The batch of the function being recorded belongs on `mesh`: at every call (`always`), or only
    at this one."""

    def __init__(self, mesh: Mesh, always: bool) -> None:
        self.mesh, self.always = mesh, always
        super().__init__(f"the batch belongs on {mesh.text()}")


@dataclass(frozen=True)
class Current:
    """The owner of weights made at this point, and the collector of weights used."""

    owner: Owner
    collector: Collector | None = None


# All state: the current owner, by default the process; and the weights of recorded functions.
_PROCESS = Current(Owner(Store(""), None))
_current = ContextVar("tessera_weights", default=_PROCESS)
_functions: dict[int, tuple[object, Store]] = {}  # by the id of a function


@contextmanager
def owned_by(store: Store) -> Iterator[None]:
    """A context in which new weights belong to `store`; occurrences count from zero."""
    token = _current.set(replace(_current.get(), owner=Owner(store, current())))
    try:
        yield
    finally:
        _current.reset(token)


@contextmanager
def collected_by(collector: Collector | None) -> Iterator[None]:
    token = _current.set(replace(_current.get(), collector=collector))
    try:
        yield
    finally:
        _current.reset(token)


def collector() -> Collector | None:
    """The current collector, of a training step or of `graph.parameters`."""
    return _current.get().collector


def store_of(fn: Callable[..., Any], name: str) -> Store:
    """The store of the function `fn`, recorded under `name`. It is dropped together with `fn`."""
    fn = inspect.unwrap(fn)
    if id(fn) not in _functions:
        try:
            finalize(fn, _functions.pop, id(fn), None).atexit = False
            _functions[id(fn)] = None, Store(name)
        except TypeError:  # no weak references: the store is never dropped
            _functions[id(fn)] = fn, Store(name)
    return _functions[id(fn)][1]


def _owner_now(caller: str) -> Owner:
    owner = _current.get().owner
    if owner.recorder is not current():
        raise UsageError(
            f"{caller}: weights cannot be made in the body of a loop or a branch",
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
    """Returns (name, module): the module whose weights are made here, or were made by an earlier
    call.

    `make` returns the module at the first call; `asked` describes it, and must be equal at later
    ones. `rename` turns a parameter's path into its name. Raises UsageError in the body of a loop
    or branch, or if `asked` differs.
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
        with eager():
            group = store.groups[name] = Group(asked, _named(make(), full, rename))
    elif group.asked != asked:
        raise UsageError(
            f"{kind}: the weights {full!r} were made with other sizes or options",
            made_with=group.asked,
            wanted=asked,
            fix="give one of the two another name=, or call them in functions of their own",
        )
    for p in group.module.parameters().values():
        use(p, mesh, store)
    return name, group.module


def _named(module: Any, full: str, rename: Callable[[str], str]) -> Any:
    """Gives the parameters of `module` names below `full`, on which their first values depend."""
    for path, p in module.parameters().items():
        p.name = p.label = f"{full}.{rename(path)}"
        p.type = plain(p.dtype, p.shape)
        p.draw_as(p.name)
    return module


def use(p: Parameter, mesh: Mesh | None, store: Store) -> None:
    """Lays out the weight `p` of `store` for its use here, and adds it to the collector. Raises
    UsageError if another weight has its name there."""
    collecting, label = collector(), p.name
    mesh = mesh or settings().mesh or p.mesh
    mesh = mesh.space if mesh is not None and mesh.time else mesh
    want = p.type
    if p.mesh != mesh and (p.mesh is not None or p._data is None):
        want = plain(p.dtype, p.shape, mesh)
    if collecting is not None:
        if collecting.prefix and store is not collecting.store:
            label = f"{collecting.prefix}.{p.name}"
        if collecting.strategy is not None:
            want = collecting.strategy.weight(p.name, plain(p.dtype, p.shape, mesh))
        if collecting.boxes.setdefault(label, p) is not p:
            raise UsageError(
                f"{collecting.prefix or 'parameters'}: two weights are called {label!r}",
                fix="give the stages, or the weights, names of their own",
            )
    p.lay(want)
    if (recorder := current()) is not None:
        recorder.root.labels[id(p)] = label
        stand_for(recorder, p.now(), p)


def stand_for(recorder: Recorder, value: Tensor, box: Box) -> None:
    """Makes `value` an alias of the box in this recording and the enclosing ones, however the user
    refers to it."""
    at: Recorder | None = recorder
    while at is not None:
        at._nodes[id(value)] = at.node(box)
        at = at.parent


@whole
def assign(caller: str, weights: Mapping[str, Box], new: object, whole: bool) -> None:
    """Sets weights from a dict by name, keeping their layouts; with `whole` it must name all.

    Raises UsageError for wrong names, ShapeError or DTypeError if a value does not fit; nothing is
    set then.
    """
    fix = "give a dict from names to tensors, such as .parameters is"
    new = mapping(caller, "the weights", new, fix)
    lost = sorted(set(weights) - set(new)) if whole else []
    odd = sorted(str(k) for k in new if k not in weights)
    same_names(
        caller, lost, odd, "give the names that .parameters has; update() takes some of them"
    )
    values = {}
    for name, x in new.items():
        t = as_tensor(x)
        if t._trace is not None:
            raise UsageError(
                f"{caller}: {name!r} is a tensor of a function that is being recorded",
                tensor=t.type,
                fix="return it from the function, and set the weights outside",
            )
        fits(f"{caller}: {name!r}", weights[name], t, "give a tensor like the weight")
        values[name] = t
    for name, t in values.items():
        p = weights[name]
        p.put(moved(t, p.type if p.mesh is not None else p.type.on(t.mesh)))
