"""Which of several processes is this one? TT-NN's names for those that `tt-run` started."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from ..core.devices import process_count, process_index
from ..lang.engine import engine
from .faults import wrong

_begun: list[bool] = []
_barriers = itertools.count()
BARRIER_S = 600.0  # how long a process waits for the others


def init_distributed_context(arguments: Sequence[str] | None = None) -> None:
    """Makes this process one of those that were started together; alone it is the only one.
    `arguments` have no effect."""
    engine().start(None)
    _begun[:] = [True]


def distributed_context_is_initialized() -> bool:
    """Whether `init_distributed_context` was called."""
    return bool(_begun)


def distributed_context_get_rank() -> int:
    """The number of this process, from 0. Raises TTNNError before `init_distributed_context`."""
    _need("distributed_context_get_rank")
    return process_index()


def distributed_context_get_size() -> int:
    """How many processes there are. Raises TTNNError before `init_distributed_context`."""
    _need("distributed_context_get_size")
    return process_count()


def distributed_context_barrier() -> None:
    """Returns when all processes have come here. Raises TTNNError before
    `init_distributed_context`, BackendError if one does not come within 10 minutes."""
    _need("distributed_context_barrier")
    engine().gather(f"ttnn barrier {next(_barriers)}", None, BARRIER_S)


def _need(name: str) -> None:
    if not _begun:
        raise wrong(
            f"{name}: the processes have not been joined",
            fix="call ttnn.init_distributed_context() first",
        )


__all__ = [
    "distributed_context_barrier",
    "distributed_context_get_rank",
    "distributed_context_get_size",
    "distributed_context_is_initialized",
    "init_distributed_context",
]
