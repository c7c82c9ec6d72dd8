"""Changes that a function makes in its argument containers, recorded to be repeated on the
caller's.

>>> given = {"a": 1, "row": [1, 2], "inner": {}}
>>> before = Snapshot(given)
>>> given["b"] = {"of": given["inner"]}
>>> del given["row"][0]
>>> edits, leaves = before.changes()
>>> theirs = {"a": 1, "row": [1, 2], "inner": {}}
>>> Pending(edits, leaves, theirs).put()
>>> theirs, theirs["b"]["of"] is theirs["inner"]
({'a': 1, 'row': [2], 'inner': {}, 'b': {'of': {}}}, True)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ..record.module_items import TensorDict, TensorList
from ..record.parameter import Parameter
from ..record.tree import (
    BOX,
    EMPTY,
    LEAF,
    Foreign,
    Path,
    Spec,
    flatten,
    is_registered,
    opened,
    spec_paths,
    unflatten,
)
from ..record.variables import GONE, Place
from ..value.tensor import Tensor

OUTSIDE = 2
"""The first key of a path in variables. (0 is positional arguments, 1 is keyword arguments.)"""
MOST_ITEMS = 2000
"""The most items of a list or dict in a variable; a larger one is compared by identity."""


@dataclass(frozen=True, slots=True)
class ArgumentLeaf:
    """A leaf of a new value that the caller already has: the object at `path` in the arguments."""

    path: Path


@dataclass(frozen=True, slots=True)
class Edit:
    """A change of the container at `path`: the keys that are gone, and each key that is set with
    the structure of its new value."""

    path: Path
    gone: tuple[Any, ...]
    set: tuple[tuple[Any, Spec], ...]

    def paths(self) -> Iterator[Path]:
        """Yields the path of each new leaf."""
        for key, spec in self.set:
            for rest in spec_paths(spec):
                yield (*self.path, key, *rest)


class Snapshot:
    """The contents of the containers in `tree`, before a function changes them."""

    def __init__(self, tree: Any) -> None:
        self._rows: list[tuple[Path, Any, dict[Any, Any]]] = []
        self._argument_paths: dict[int, Path] = {}  # paths by id; plain tensors are left out
        self._look(tree, ())

    def _look(self, x: Any, path: Path) -> None:
        if id(x) in self._argument_paths:
            return
        if not isinstance(x, Tensor) or type(x) is Parameter:
            self._argument_paths[id(x)] = path
        inside = self._inside(x)
        if inside is not None:
            self._rows.append((path, x, inside))
            for key, value in inside.items():
                self._look(value, (*path, key))

    def _inside(self, x: Any) -> dict[Any, Any] | None:
        return _inside(x)

    def changes(self) -> tuple[list[Edit], list[Any]]:
        """Returns (the edits made since the snapshot, the leaves of their new values)."""
        edits: list[Edit] = []
        leaves: list[Any] = []
        for path, x, before in self._rows:
            after = _inside(x) or {}
            stay = {k: v for k, v in before.items() if k in after}
            if list(stay) != list(after)[: len(stay)]:
                stay = {}  # a dict in another order is filled anew
            gone = tuple([k for k in before if k not in stay])
            new = [(k, v) for k, v in after.items() if k not in stay or not _same(stay[k], v, x)]
            if gone or new:
                put = tuple([(k, self._take(v, leaves)) for k, v in new])
                edits.append(Edit(path, gone, put))
        return edits, leaves

    def _take(self, x: Any, leaves: list[Any], module: bool = False) -> Spec:
        """Returns the structure of `x` and adds its leaves to `leaves`. An object that was there
        before is one leaf."""
        if x is None:
            return EMPTY
        own = self._argument_paths.get(id(x))
        found = opened(x) if own is None else None
        if found is None:
            leaves.append(x if own is None else ArgumentLeaf(own))
            return BOX if module and type(x) is Parameter else LEAF
        kind, keys, values = found
        module = module or is_registered(kind)
        return kind, keys, tuple([self._take(v, leaves, module) for v in values])


class Variables(Snapshot):
    """The contents of the variables at `places`, and of lists and dicts in them, before a function
    changes them."""

    def __init__(self, places: Sequence[Place]) -> None:
        self.places = list(places)
        self.values = [p.now() for p in places]
        self._rows, self._argument_paths = [], {}
        self._look(self.values[:], (OUTSIDE,))

    def _inside(self, x: Any) -> dict[Any, Any] | None:
        """The items of a plain list or dict; a module's own lists and dicts track changes
        themselves."""
        open_ = isinstance(x, (dict, list)) and not isinstance(x, (TensorDict, TensorList))
        return _inside(x) if open_ and len(x) <= MOST_ITEMS else None

    def look_again(self, places: Sequence[Place]) -> None:
        """Adds the variables among `places` that are new."""
        known = {p.name for p in self.places}
        self.places += [p for p in places if p.name not in known]
        self.values += [GONE] * (len(self.places) - len(self.values))

    def set_to(self, mine: Callable[[Any], bool]) -> list[tuple[Path, Any, Any, Any, Any]]:
        """Returns (path, container, key, before, now) of each variable or item whose new value
        satisfies `mine`; the container of a variable is its Place. Items appended to a list are
        left out."""
        rows = [((OUTSIDE,), p, k, self.values[k], p.now()) for k, p in enumerate(self.places)]
        for path, x, before in self._rows[1:]:
            for k, now in (self._inside(x) or {}).items():
                if k in before or isinstance(x, dict):
                    rows.append((path, x, k, before.get(k, GONE), now))
        return [row for row in rows if row[3] is not row[4] and mine(row[4])]

    def changes(self, mine: Callable[[Any], bool] = bool) -> tuple[list[Edit], list[Any]]:
        """Returns (the edits whose new values satisfy `mine`, the leaves of these values)."""
        leaves: list[Any] = []
        rows = self.set_to(mine)
        return [Edit(path, (), ((k, self._take(x, leaves)),)) for path, _, k, _, x in rows], leaves

    def restore(self, mine: Callable[[Any], bool]) -> None:
        """Restores the old values where the new ones satisfy `mine`."""
        for _, x, k, before, _ in self.set_to(mine):
            if isinstance(x, Place):
                x.put(before)
            elif before is GONE:
                del x[k]
            else:
                x[k] = before


class Assigned(list[Any]):
    """The values of the variables at `places`; setting an item writes to its place."""

    def __init__(self, places: Sequence[Place]) -> None:
        super().__init__(p.now() for p in places)
        self.places = places

    def __setitem__(self, key: Any, value: Any) -> None:
        self.places[key].put(value)


class Pending:
    """Edits to make in `top`, the arguments of a caller. Their containers are looked up at once, so
    that `put` can be repeated after an interrupt."""

    def __init__(self, edits: Sequence[Edit], leaves: Sequence[Any], top: Any) -> None:
        self._rows = [(edit, _at(top, edit.path)) for edit in edits]
        self.leaves = [_at(top, x.path) if type(x) is ArgumentLeaf else x for x in leaves]

    def put(self) -> None:
        """Makes the edits."""
        rest = iter(self.leaves)
        for edit, holder in self._rows:
            for key in reversed(edit.gone):
                _remove(holder, key)
            for key, spec in edit.set:
                _put(holder, key, unflatten(spec, rest))


def _inside(x: Any) -> dict[Any, Any] | None:
    """The items of the container `x` by key, index or attribute; None for a leaf."""
    found = opened(x)
    if found is not None:
        _, keys, values = found
        return dict(zip(range(keys) if isinstance(keys, int) else keys, values, strict=True))  # type: ignore[call-overload]
    # A dataclass without tensors is a leaf, but a function may set a tensor in it.
    fields = () if isinstance(x, type) else getattr(type(x), "__dataclass_fields__", ())
    mine = type(x).__module__.startswith("tessera.")
    return {n: getattr(x, n, None) for n in fields} if fields and not mine else None


def _same(before: Any, x: Any, holder: Any) -> bool:
    """Returns whether `x` is the old value `before`. Some classes create their contents anew at
    each access: these are compared leaf by leaf."""
    if before is x or not isinstance((opened(holder) or ((), ()))[1], Foreign):
        return before is x
    (a, spec), (b, other) = flatten(before), flatten(x)
    return spec == other and all(map(lambda v, w: v is w, a, b))


def _at(top: Any, path: Path) -> Any:
    for key in path:
        top = top[key] if isinstance(top, (dict, list, tuple)) else getattr(top, key)
    return top


def _put(holder: Any, key: Any, value: Any) -> None:
    if isinstance(holder, list) and key == len(holder):
        holder.append(value)
    elif isinstance(holder, (dict, list)):
        holder[key] = value
    else:
        setattr(holder, key, value)


def _remove(holder: Any, key: Any) -> None:
    if isinstance(holder, dict):
        holder.pop(key, None)
    elif isinstance(holder, list):
        del holder[key:]
    elif key in vars(holder):
        delattr(holder, key)
