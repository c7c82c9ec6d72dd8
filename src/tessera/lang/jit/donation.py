"""Donated arguments of a compiled function: their names, and their leaves in a call."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

from ...core.errors import UsageError
from ..record.tree import flatten, tree_map
from ..value.checks import bound


def donated_names(
    fn: str, signature: inspect.Signature, donate: str | int | Sequence[str | int] | None
) -> frozenset[str]:
    """Returns the names of the arguments that `donate` names, by name or place. Raises UsageError
    if the function `fn` has no such argument."""
    params = list(signature.parameters)
    names = set()
    asked = () if donate is None else donate
    for n in asked if isinstance(asked, (tuple, list, set, frozenset)) else [asked]:
        name = params[n] if isinstance(n, int) and 0 <= n < len(params) else n
        if name not in params:
            raise UsageError(
                f"jit: {fn} has no argument {n!r} to donate",
                arguments=", ".join(params),
                fix="name one of them",
            )
        names.add(str(name))
    return frozenset(names)


def donated_leaves(
    fn: str, signature: inspect.Signature, names: frozenset[str], args: Any, kwargs: Any
) -> list[bool]:
    """Returns whether the argument of each leaf is one of `names`."""
    if not names:
        return [False] * len(flatten((args, kwargs))[0])
    arguments = bound(fn, signature, args, kwargs).arguments
    donated = {id(v) for k, v in arguments.items() if k in names}

    def mark(value: Any) -> Any:
        yes = id(value) in donated
        return tree_map(lambda _: yes, value)

    return flatten((tuple(map(mark, args)), {k: mark(v) for k, v in kwargs.items()}))[0]
