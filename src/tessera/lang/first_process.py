"""How do several processes write one file? The first one writes it, of values that all gather."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from numpy.typing import NDArray

from ..core.context import replaced
from ..core.devices import process_count
from ..core.layout import plain
from ..core.mesh import Mesh
from .eager import redistribute_now
from .engine import engine
from .moving import moved
from .tensor import Tensor

T = TypeVar("T")


def by_first(name: str, run: Callable[[], T]) -> T | None:
    """What `run` gives, in the first process; None in the others, once it is through there. Where
    it raises, it raises in all of them."""
    if process_count() == 1:
        return run()
    made: T | None = engine().by_first(name, run)
    return made


def to_first(t: Tensor) -> NDArray[Any] | None:
    """The whole of `t` on the host of the first process; None in the others. All that hold a part
    of it call this, in one order."""
    if process_count() == 1:
        return t.numpy()
    if t.mesh is not None:
        with replaced(no_grad=True):
            if 0 in t.mesh.physical.device_ids:
                t = redistribute_now(t, t.type.complete().replicated())
            else:
                t = moved(t, plain(t.dtype, t.shape, Mesh(("first",), devices=[0])))
    here: NDArray[Any] | None = engine().by_first("read", t.numpy)
    return here


__all__ = ["by_first", "to_first"]
