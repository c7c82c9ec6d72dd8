"""Work of the first process alone, such as writing a file, in a run of several processes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from numpy.typing import NDArray

from ...core.devices import process_count, process_index
from ..value.engine import engine
from ..value.tensor import Tensor
from .to_host import on_each_host

T = TypeVar("T")


def by_first(name: str, run: Callable[[], T]) -> T | None:
    """Returns the result of `run` in the first process, and None in the others after `run` has
    ended there. An error of `run` is raised in all of them."""
    if process_count() == 1:
        return run()
    made: T | None = engine().by_first(name, run)
    return made


def to_first(t: Tensor) -> NDArray[Any] | None:
    """Returns the whole of `t` on the host of the first process, and None in the others. All
    processes call it, in the same order."""
    t = on_each_host(t)
    return None if process_index() else t.numpy()


__all__ = ["by_first", "to_first"]
