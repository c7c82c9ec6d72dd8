"""What did a function change in the containers it was given? And the same change once more, in the
caller's hands."""

from __future__ import annotations

from typing import Any

from .tree import Path, flatten, spec_paths


def _at(top: Any, path: Path) -> Any:
    for key in path:
        top = top[key] if isinstance(top, (dict, list, tuple)) else getattr(top, key)
    return top


def put(top: Any, path: Path, value: Any) -> None:
    holder, key = _at(top, path[:-1]), path[-1]
    if isinstance(holder, list) and key == len(holder):
        holder.append(value)
    elif isinstance(holder, (dict, list)):
        holder[key] = value
    else:
        setattr(holder, key, value)


def snapshot(tree: Any) -> dict[Path, Any]:
    leaves, spec = flatten(tree)
    return dict(zip(spec_paths(spec), leaves, strict=True))


def changes(before: dict[Path, Any], tree: Any) -> tuple[list[tuple[Path, Any]], list[Path]]:
    """(path and new leaf of all that changed, paths that are gone)."""
    after = snapshot(tree)
    writes = [(p, x) for p, x in after.items() if p not in before or before[p] is not x]
    return writes, [p for p in before if p not in after]


def remove(top: Any, path: Path) -> None:
    holder = _at(top, path[:-1])
    if isinstance(holder, dict):
        holder.pop(path[-1], None)
