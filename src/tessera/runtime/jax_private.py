"""What do we take from jax that it does not publish? All of it stands here, but for the service in
coordinator.py, which is there without loading jax.

A new version of jax may move these names: then this file changes, and no other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax._src import distributed
from jax._src.array import ArrayImpl
from jaxlib import _jax  # type: ignore[attr-defined]  # its stub hides it

from .coordinator import HEARTBEAT_S

__all__ = ["ArrayImpl", "block_copy", "connect", "cpu_collectives", "place", "service"]
Array = Any
Copy = Callable[[Sequence[Array], Sequence[Any]], Sequence[Array]]


def service() -> Any:
    """The processes' shared store; None in a single process."""
    return distributed.global_state.client


def place() -> tuple[int, int]:
    """Which of how many processes that the user has started together this one is; known before the
    backend runs."""
    state = distributed.global_state
    return state.process_id or 0, state.num_processes or 1


def connect(address: str, size: int, rank: int) -> None:
    """Makes this process number `rank` of `size`, before the backend runs: what
    `jax.distributed.initialize` does, with a service that another process may host."""
    state = distributed.global_state
    client = _jax.get_distributed_runtime_client(
        address, rank, init_timeout=60, heartbeat_timeout=HEARTBEAT_S, use_compression=True
    )
    client.connect()
    state.client, state.process_id, state.num_processes = client, rank, size
    state.coordinator_address = address


def cpu_collectives() -> str:
    """What joins processes whose devices are CPUs: "gloo", "mpi" or "none"."""
    return str(jax.config.jax_cpu_collectives_implementation or "none")  # type: ignore[attr-defined]


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
