"""The outer modules and boxes that a recorded function reads anew at each call, like arguments.

They are the modules that were called or whose tensors were used, and the parameters outside of any
module. A plain tensor never changes, so it is a constant.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from ..record.box import Box
from ..record.recorder import Recorder
from ..record.tree import containers, flatten
from ..value.tensor import Tensor


def around(recorder: Recorder, found_already: Sequence[Any]) -> list[Any]:
    """Returns the modules and boxes that this recording has read, without those in `found_already`
    and their contents."""
    modules, changes = dict(recorder.called_modules), recorder.changes
    boxes: dict[int, Any] = {
        id(o.box): o.box for o in changes.boxes.values() if o.argument_node is None
    }
    for t, _ in recorder.captured:
        home = t.home() if t.home is not None else None
        if home is not None and id(home) not in changes.created and _holds(home, t):
            modules[id(home)] = home
        if isinstance(t, Box) and id(t) not in changes.created:
            boxes[id(t)] = t
    for holder in (c.place.root for c in changes.changed.values()):
        owner = _owner(holder)
        modules[id(owner)] = owner
    below = _below(found_already) | _below(modules.values())
    ids = {id(x) for x in found_already}
    new = [m for i, m in modules.items() if i not in below and i not in ids]
    held = {id(t) for t in flatten([*found_already, *new])[0]}
    return [*new, *(t for i, t in boxes.items() if i not in held)]


def _owner(holder: Any) -> Any:
    """Returns the module `holder`, or the module that owns the list or dict `holder`."""
    tensors = flatten(holder)[0] if isinstance(holder, (list, dict)) else []
    homes = [t.home() for t in tensors if isinstance(t, Tensor) and t.home]
    return next((h for h in homes if h is not None), holder)


def _holds(module: Any, t: Any) -> bool:
    return any(x is t for x in flatten(module)[0])


def _below(holders: Iterable[Any]) -> set[int]:
    """The ids of the containers inside of `holders`, without `holders` themselves."""
    return {id(x) for h in holders for x in containers(h) if x is not h}
