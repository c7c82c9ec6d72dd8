"""How do several processes write one file? The first one writes it, of values that all gather."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from numpy.typing import NDArray

from ..core.devices import process_count, process_index
from .engine import engine
from .tensor import Tensor
from .to_host import on_each_host

T = TypeVar("T")


def by_first(name: str, run: Callable[[], T]) -> T | None:
    """What `run` gives, in the first process; None in the others, once it is through there. Where
    it raises, it raises in all of them."""
    if process_count() == 1:
        return run()
    made: T | None = engine().by_first(name, run)
    return made


def to_first(t: Tensor) -> NDArray[Any] | None:
    """The whole of `t` on the host of the first process; None in the others, which call it too, in
    the same order."""
    t = on_each_host(t)
    return None if process_index() else t.numpy()


__all__ = ["by_first", "to_first"]
