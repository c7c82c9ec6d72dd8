"""What does one process do for all? Files are written once, and each process learns how it ended.

The first process runs it; the others wait for a word of it in the processes' shared store.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from ..core import errors
from ..core.errors import BackendError, TesseraError
from ..core.limits import limits
from .jax_private import service
from .join import joined
from .store import absent, wait_for

T = TypeVar("T")
_counts: dict[str, int] = {}


def by_first(name: str, run: Callable[[], T]) -> T | None:
    """What `run` gives, in the first process; None in the others, once it is through.

    `name` says what is done, and to which file. Where `run` raises, the others raise the same error
    if it is Tessera's own, else BackendError; that also if the first process does not get there
    within the limit of collectives.
    """
    rank, _ = joined()
    k = _counts[name] = _counts.get(name, 0) + 1
    key = f"tessera/first/{name}/{k}"
    if rank == 0:
        said = f"{BackendError.__name__} the first process was interrupted"
        try:
            made = run()
            said = ""
        except Exception as error:
            kind = BackendError if not isinstance(error, TesseraError) else type(error)
            said = f"{kind.__name__} {str(error) or type(error).__name__}"
            raise
        finally:
            service().key_value_set_bytes(key, said.encode())
        return made
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
