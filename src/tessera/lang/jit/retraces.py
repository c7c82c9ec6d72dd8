"""Warning texts for functions that are recorded again and again: the changing argument and a
fix."""

from __future__ import annotations

import inspect
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from ...core.layout import TensorType
from ..record.static_arguments import Same
from ..record.tree import Spec, call_paths, path_name
from ..record.variables import GONE, Place, mark_of
from .cache_entry import Entry
from .guards import Leaf

_FEW = 3


def changed_arguments(
    signature: inspect.Signature,
    entries: Mapping[Any, Sequence[Entry]],
    new: Entry,
    spec: Spec,
    around: Sequence[str],
) -> str:
    """Returns a text with the arguments in which `new`, of the structure `spec`, differs from the
    other `entries` of a function, and the fix. `around` are the names of its outer variables."""
    before = [e for key, same in entries.items() if key[0] == spec for e in same]
    structures = dict.fromkeys([*(key[0] for key in entries), spec])
    names = [list(map(path_name, call_paths(signature, s))) for s in structures]
    if len(before) > 1 or len(entries) == 1:
        return changing([*reversed(before), new], [*names[[*structures].index(spec)], *around])
    return restructured(names)


def changing(entries: Sequence[Entry], names: Sequence[str]) -> str:
    """Returns a text with the differences between `entries`, the oldest first, whose leaves have
    `names`, and the fix."""
    values_at: dict[int, list[object]] = {}
    for e in entries:
        leaves = [*zip(e.dynamic, e.types, strict=True), *zip(e.static, e.values, strict=True)]
        for i, value in leaves:
            values = values_at.setdefault(i, [])
            if not any(_equal(value, v) for v in values):
                values.append(value)
    rows = [(names[i], vs) for i, vs in sorted(values_at.items()) if i < len(names)]
    rows = [(name, vs) for name, vs in dict([*rows, *_outside(entries)]).items() if len(vs) > 1]
    if not rows:
        return (
            "its settings, or something that it finds outside of itself, keep changing; give it"
            " what changes as an argument, a number as a tensor, ts.tensor(x)"
        )
    changes = " and ".join(f"{name} was {', then '.join(_texts(vs))}" for name, vs in rows[:_FEW])
    if len(rows) > _FEW:
        changes += f", and {len(rows) - _FEW} more"
    every = [v for _, vs in rows for v in vs]
    if all(isinstance(v, TensorType) for v in every):
        return f"{changes}; give tensors of few shapes, such as lengths that are padded"
    if any(isinstance(v, (int, float)) or _is_number(v) for v in every):
        return f"{changes}; pass a number that changes as a tensor, ts.tensor(x)"
    return f"{changes}; give the same object, or one that is equal to it (a dataclass, say)"


def _outside(entries: Sequence[Entry]) -> list[tuple[str, list[object]]]:
    """The values of each outer variable over all `entries`, and its current value, by name."""
    seen: dict[object, tuple[Place | Leaf, list[object]]] = {}
    for place, mark in (row for e in entries for g in e.guards for row in g.others):
        known = seen.setdefault(place.name, (place, []))[1]
        if not any(_equal(mark, v) for v in known):
            known.append(mark)
    for place, known in seen.values():
        now = mark_of(place.now())
        if not any(_equal(now, v) for v in known):
            known.append(now)
    return [(place.label, vs) for place, vs in seen.values()]


def restructured(structures: Sequence[Sequence[str]]) -> str:
    """Returns a text with the arguments whose numbers of leaves differ, and the fix. `structures`
    has the names of all leaves of each structure, the oldest first."""
    counts = [Counter(re.split(r"[.\[]", name)[0] for name in names) for names in structures]
    tops = list(dict.fromkeys(t for c in counts for t in c))
    said = " and ".join(
        f"{t} had {', then '.join(str(c[t]) for c in counts)} leaves"
        for t in tops
        if len({c[t] for c in counts}) > 1
    )
    said = said or "the names in its arguments"
    return (
        f"the structure of its arguments keeps changing: {said}; give as many of each at each call"
    )


def _equal(a: object, b: object) -> bool:
    try:
        return type(a) is type(b) and bool(a == b)
    except Exception:  # an object whose == fails is another one
        return False


def _is_number(mark: object) -> bool:
    """Returns whether `mark` is the comparison key of a number that is not a plain Python one."""
    return isinstance(mark, tuple) and len(mark) == 2 and isinstance(mark[1], str)


def _texts(values: Sequence[object]) -> list[str]:
    """Returns distinct texts for `values`: equal ones are told apart by mesh, or as objects."""
    texts = list(map(_text, values))
    if len(set(texts)) == len(texts):
        return texts
    if all(isinstance(v, TensorType) for v in values):
        meshes = [v.mesh for v in values if isinstance(v, TensorType)]
        where = [f"on {m.text()}" if m is not None else "without a mesh" for m in meshes]
        return [f"{t} {w}" for t, w in zip(texts, where, strict=True)]
    return [texts[0], *("another" for _ in texts[1:])]


def _text(value: object) -> str:
    if value is GONE:
        return "not there"
    if isinstance(value, tuple) and _is_number(value):
        return f"{value[0].__name__}({value[1]})"
    if isinstance(value, tuple) and len(value) == 2 and isinstance(value[0], type):
        return f"a {value[0].__name__} of others"  # its size, or its keys
    if isinstance(value, Same):
        return f"one object of class {type(value.x).__name__}"
    text = str(value) if isinstance(value, TensorType) else repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."
