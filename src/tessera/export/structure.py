"""Structures of arguments and results as JSON: dicts, lists and tuples of tensors and numbers.

>>> from ..lang.record.tree import flatten, unflatten
>>> leaves, spec = flatten({"a": [1, (2, None)]})
>>> stored = encoded("save", "result", spec)
>>> stored
{'dict': {'a': {'list': ['leaf', {'tuple': ['leaf', None]}]}}}
>>> unflatten(decoded(stored), leaves)
{'a': [1, (2, None)]}
"""

from __future__ import annotations

from typing import Any

from ..core.errors import UsageError
from ..lang.record.tree import BOX, EMPTY, LEAF, Spec

_SEQUENCES = {"list": list, "tuple": tuple}


def encoded(caller: str, what: str, spec: Spec) -> Any:
    """The structure `spec` of `what` (the arguments, the result) as JSON. Raises UsageError for a
    container that is a class of the user, since the file is read without its code."""
    if spec == LEAF:
        return LEAF
    if spec == EMPTY:
        return None
    kind, keys, inner = spec
    parts = inner
    if inner is None or inner == BOX:
        parts = [LEAF] * (keys if isinstance(keys, int) else len(keys))
    if inner != BOX and kind is dict and all(isinstance(k, str) for k in keys):
        items = zip(keys, parts, strict=True)
        return {"dict": {k: encoded(caller, what, s) for k, s in items}}
    if inner != BOX and kind.__name__ in _SEQUENCES and kind is _SEQUENCES[kind.__name__]:
        return {kind.__name__: [encoded(caller, what, s) for s in parts]}
    fix = "give and return dicts with string keys, lists and tuples"
    if kind is not dict:
        fix += "; a module goes into the file where the function closes over it: lambda x: model(x)"
    raise UsageError(
        f"{caller}: {what} has a {kind.__name__}, whose class the file cannot hold", fix=fix
    )


def decoded(stored: Any) -> Spec:
    """The structure of its JSON."""
    if stored == LEAF:
        return LEAF
    if stored is None:
        return EMPTY
    ((kind, inner),) = stored.items()
    if kind == "dict":
        return dict, tuple(inner), tuple(map(decoded, inner.values()))
    return _SEQUENCES[kind], len(inner), tuple(map(decoded, inner))
