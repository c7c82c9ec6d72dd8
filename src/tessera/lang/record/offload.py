"""Offloading of tensors to host memory until they are used again.

>>> import tessera as ts
>>> t, copy = away(ts.zeros((4, 8)))
>>> copy_of(t) is copy, copy.bytes, copy_of(back(t)) is None
(True, 128, True)
"""

from __future__ import annotations

from typing import Any

from ...core.errors import UsageError
from ..value.engine import HostCopy, engine
from ..value.tensor import Tensor
from .box import Box
from .state_effects import cut_from


def away(t: Tensor) -> tuple[Tensor, HostCopy]:
    """Returns (`t` with its data in host memory, the copy); the copy is started, not finished.
    Raises UsageError in a recorded function."""
    if t._trace is not None:
        raise UsageError(
            "a tensor of a recorded function cannot be moved to the host",
            tensor=t.type,
            fix="move it outside: an argument before the call, or what the function returns",
        )
    copy = copy_of(t) or engine().offload(t.stored, t.type)
    out = Tensor(None, t.type)
    out.name, out._pending = t.name, copy
    return cut_from(out, t), copy


def back(t: Tensor) -> Tensor:
    """Returns `t` on the devices; its copy in host memory stays."""
    copy = copy_of(t)
    return t if copy is None else cut_from(Tensor(copy(), t.type), t)


def where_lies(other: Any, t: Tensor) -> Tensor:
    """Offloads `t` if `other` is offloaded. Waits for the copy, so that only one of many tensors is
    on the devices at a time."""
    if not isinstance(other, Tensor) or copy_of(other) is None:
        return t
    out, copy = away(t)
    copy.wait()
    return out


def copy_of(t: Tensor) -> HostCopy | None:
    """The host copy of an offloaded tensor; None if the tensor is on the devices."""
    pending: Any = None
    if t._data is None:
        pending = t._first if isinstance(t, Box) else t._pending
    return pending if hasattr(pending, "wait") else None


__all__ = ["away", "back", "copy_of", "where_lies"]
