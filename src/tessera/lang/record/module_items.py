"""The lists and dicts of a module: setting an item that is a parameter writes into the
parameter."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

from ..value.tensor import Tensor
from .box import Box, fits
from .parameter import Parameter
from .recorder import current


def stored(holder: Any, key: Any, old: Any, value: Any) -> Any:
    """Returns the object to store at `key` of `holder`, a module or one of its containers, in place
    of `old`: the parameter `old`, into which `value` is written; in a recorded function a
    stand-in for `value` until the program has run; else `value`. Raises ShapeError or DTypeError if
    the parameter and `value` differ."""
    if not isinstance(value, Tensor) or type(value) is Parameter:
        return value
    if type(value) is Box:  # the module gets a buffer of its own, with the same first value
        value = copy.copy(value.now())
    if type(old) is Parameter:
        what = f"{type(holder).__name__}.{key}: the new value"
        fits(what, old, value, "give a tensor like it, or another weight: nn.Parameter(tensor)")
        old.put(value)
        return old
    recorder = current()
    if recorder is not None and recorder.is_outside(holder):
        return recorder.assign(holder, key, value)
    return value


class TensorList(list[Any]):
    """A list of a module. Setting an item that is a parameter writes into the parameter."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        if (recorder := current()) is not None:
            recorder.add_created(self)

    def __setitem__(self, key: Any, value: Any) -> None:
        if isinstance(key, slice):
            places, values = range(len(self))[key], list(value)
            if len(places) == len(values):
                for i, v in zip(places, values, strict=True):
                    self[i] = v
                return
        elif -len(self) <= key < len(self):
            key %= len(self)
            value = stored(self, key, self[key], value)
        super().__setitem__(key, value)


class TensorDict(dict[Any, Any]):
    """A dict of a module. Setting an item that is a parameter writes into the parameter."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        if (recorder := current()) is not None:
            recorder.add_created(self)

    def __setitem__(self, key: Any, value: Any) -> None:
        super().__setitem__(key, stored(self, key, self.get(key), value))

    def update(self, *args: Any, **named: Any) -> None:
        for key, value in dict(*args, **named).items():
            self[key] = value

    def __ior__(self, other: Any) -> Any:  # type: ignore[misc]  # a dict of another type
        self.update(other)
        return self


ITEMS: dict[type, type] = {list: TensorList, dict: TensorDict}


def converted(value: Any) -> Any:
    """Returns `value` with lists and dicts that hold tensors replaced by a module's own."""
    kind = type(value)
    if kind not in ITEMS:
        return value
    rows: Iterable[Any] = value.items() if kind is dict else enumerate(value)
    new = [(k, converted(v)) for k, v in rows]
    if not any(isinstance(v, Tensor) or v is not value[k] for k, v in new):
        return value
    return ITEMS[kind](new if kind is dict else [v for _, v in new])
