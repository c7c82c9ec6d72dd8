"""What do we take from jax that it does not publish? All of it stands here.

A new version of jax may move these names: then this file changes, and no other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from jax._src import distributed
from jax._src.array import ArrayImpl

__all__ = ["ArrayImpl", "block_copy", "processes", "service"]
Array = Any
Copy = Callable[[Sequence[Array], Sequence[Any]], Sequence[Array]]


def service() -> Any:
    """The processes' shared store; None in a single process."""
    return distributed.global_state.client


def processes() -> int:
    """How many processes the user has started together; known before the backend runs."""
    return distributed.global_state.num_processes or 1


def block_copy() -> Copy:
    """The copy of arrays to shardings in which `jax.device_put` ends. Raises ImportError or
    AttributeError if this version of jax has none."""
    from jax._src.interpreters.pxla import shard_args
    from jax._src.lib import xla_client  # type: ignore[attr-defined]  # its stub hides it

    reuse = xla_client.ArrayCopySemantics.REUSE_INPUT

    def copy(xs: Sequence[Array], where: Sequence[Any]) -> Sequence[Array]:
        n = len(xs)
        return shard_args(where, [None] * n, [reuse] * n, xs)

    return copy
