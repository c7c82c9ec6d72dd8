"""What does a recorded function use from outside that can change between calls?

Modules that were called or whose tensors were used, and parameters that are in none: they are read
anew at each call, as if they were arguments. A tensor on its own never changes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from .box import Box
from .record import Recorder
from .tensor import Tensor
from .tree import containers, flatten


def around(recorder: Recorder, known: Sequence[Any]) -> list[Any]:
    """The modules and boxes that this recording met, beside those `known` and what is in
    them."""
    modules, changes = dict(recorder.met), recorder.changes
    boxes: dict[int, Any] = {id(o.box): o.box for o in changes.boxes.values() if o.given is None}
    for t, _ in recorder.captured:
        home = t.home() if t.home is not None else None
        if home is not None and id(home) not in changes.born and _holds(home, t):
            modules[id(home)] = home
        if isinstance(t, Box) and id(t) not in changes.born:
            boxes[id(t)] = t
    for holder in (c.place.root for c in changes.changed.values()):
        owner = _owner(holder)
        modules[id(owner)] = owner
    below = _below(known) | _below(modules.values())
    have = {id(x) for x in known}
    new = [m for i, m in modules.items() if i not in below and i not in have]
    held = {id(t) for t in flatten([*known, *new])[0]}
    return [*new, *(t for i, t in boxes.items() if i not in held)]


def _owner(holder: Any) -> Any:
    """The module `holder`, or that of the list or dict `holder`."""
    tensors = flatten(holder)[0] if isinstance(holder, (list, dict)) else []
    homes = [t.home() for t in tensors if isinstance(t, Tensor) and t.home]
    return next((h for h in homes if h is not None), holder)


def _holds(module: Any, t: Any) -> bool:
    return any(x is t for x in flatten(module)[0])


def _below(holders: Iterable[Any]) -> set[int]:
    """The containers inside of `holders`, not they themselves."""
    return {id(x) for h in holders for x in containers(h) if x is not h}
