"""How does a program join the processes that it was started with, before it needs them?"""

from __future__ import annotations

from ..core.devices import device_count

__all__ = ["initialize"]


def initialize() -> None:
    """Joins the run that this process was started in, by `tessera run`, torchrun, `srun`, `mpirun`
    or Kubernetes, and starts the engine. Alone, it only starts the engine.

    The first use of a device does the same, so programs need this only before they use `jax` by
    themselves. Raises UsageError if the launcher's variables make no sense, BackendError if the
    processes do not come together within `TESSERA_JOIN_LIMIT` seconds (300).

    >>> import tessera as ts
    >>> ts.distributed.initialize()
    >>> ts.dist.process_index(), ts.dist.process_count()
    (0, 1)
    """
    device_count()
