"""Functions that only the first process runs, such as writes of files.

The other processes wait in the processes' shared store for the outcome.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from ...core import errors
from ...core.errors import BackendError, TesseraError
from ...core.limits import limits
from ..jax_private import service
from .join import joined
from .store import absent, wait_for

T = TypeVar("T")
_counts: dict[str, int] = {}


def by_first(name: str, run: Callable[[], T]) -> T | None:
    """Returns the result of `run` in the first process; None in the others, once it has finished.

    `name` says the action and the file. If `run` raises one of Tessera's errors, the others raise
    it, too. They raise BackendError for any other error, or if the first process does not come
    within the time limit of collectives.
    """
    rank, _ = joined()
    k = _counts[name] = _counts.get(name, 0) + 1
    key = f"tessera/first/{name}/{k}"
    if rank == 0:
        # Sent if `run` ends by a KeyboardInterrupt, which is no Exception.
        message = f"{BackendError.__name__} the first process was interrupted"
        try:
            value = run()
            message = ""
        except Exception as error:
            kind = BackendError if not isinstance(error, TesseraError) else type(error)
            message = f"{kind.__name__} {str(error) or type(error).__name__}"
            raise
        finally:
            service().key_value_set_bytes(key, message.encode())
        return value
    limit_s = limits().collective_s
    heard = wait_for(key, limit_s, 0)
    if heard is None:
        raise BackendError(
            f"{name}: the first process {absent(0, limit_s)}",
            fix="call it in every process, or set TESSERA_COLLECTIVE_LIMIT to more seconds",
        )
    kind_name, _, text = heard.decode().partition(" ")
    if kind_name:
        raise getattr(errors, kind_name)(text)
    return None
