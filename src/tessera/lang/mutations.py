"""What did a function change in the containers it was given? And the same change once more, in the
caller's hands.

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

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from .parameter import Parameter
from .tensor import Tensor
from .tree import (
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
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Own:
    """Among the leaves of what is put into arguments: what the caller has at `path` of them."""

    path: Path


@dataclass(frozen=True, slots=True)
class Edit:
    """A change of the container at `path`: the keys that are gone, and each key that is set with
    the structure of what is there now."""

    path: Path
    gone: tuple[Any, ...]
    set: tuple[tuple[Any, Spec], ...]

    def paths(self) -> Iterator[Path]:
        """The path of each leaf that is put there."""
        for key, spec in self.set:
            for rest in spec_paths(spec):
                yield (*self.path, key, *rest)


class Snapshot:
    """What is in the containers of `tree` before a function changes them."""

    def __init__(self, tree: Any) -> None:
        self._rows: list[tuple[Path, Any, dict[Any, Any]]] = []
        self._own: dict[int, Path] = {}  # of all that is there, except for tensors on their own
        self._look(tree, ())

    def _look(self, x: Any, path: Path) -> None:
        if id(x) in self._own:
            return
        if not isinstance(x, Tensor) or type(x) is Parameter:
            self._own[id(x)] = path
        inside = _inside(x)
        if inside is not None:
            self._rows.append((path, x, inside))
            for key, value in inside.items():
                self._look(value, (*path, key))

    def changes(self) -> tuple[list[Edit], list[Any]]:
        """(the edits that were made since, the leaves of all that they put there)."""
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
        """The structure of `x`, whose leaves go to `leaves`; what was there before is one leaf."""
        if x is None:
            return EMPTY
        own = self._own.get(id(x))
        found = opened(x) if own is None else None
        if found is None:
            leaves.append(x if own is None else Own(own))
            return BOX if module and type(x) is Parameter else LEAF
        kind, keys, values = found
        module = module or is_registered(kind)
        return kind, keys, tuple([self._take(v, leaves, module) for v in values])


class Pending:
    """Edits that are to be made in `top`, the arguments of a caller. What is in these is looked up
    now, so that `put` may be called once more where it was interrupted."""

    def __init__(self, edits: Sequence[Edit], leaves: Sequence[Any], top: Any) -> None:
        self._rows = [(edit, _at(top, edit.path)) for edit in edits]
        self.leaves = [_at(top, x.path) if type(x) is Own else x for x in leaves]

    def put(self) -> None:
        """Makes the edits."""
        rest = iter(self.leaves)
        for edit, holder in self._rows:
            for key in reversed(edit.gone):
                _remove(holder, key)
            for key, spec in edit.set:
                _put(holder, key, unflatten(spec, rest))


def _inside(x: Any) -> dict[Any, Any] | None:
    """What is in the container `x` by its keys, indices or attributes; None for a leaf."""
    found = opened(x)
    if found is not None:
        _, keys, values = found
        return dict(zip(range(keys) if isinstance(keys, int) else keys, values, strict=True))  # type: ignore[call-overload]
    # A dataclass without tensors is a leaf, and may be given one.
    fields = () if isinstance(x, type) else getattr(type(x), "__dataclass_fields__", ())
    mine = type(x).__module__.startswith("tessera.")
    return {n: getattr(x, n, None) for n in fields} if fields and not mine else None


def _same(before: Any, x: Any, holder: Any) -> bool:
    """Whether `x` is what was there; some classes make what is in them when they are asked."""
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
