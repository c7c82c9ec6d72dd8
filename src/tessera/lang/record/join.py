"""Several processes: `initialize` joins a run, `all_gather_object` exchanges host values."""

from __future__ import annotations

import json
from collections.abc import Iterable
from itertools import count
from typing import Any
from zlib import crc32

import numpy as np

from ...core.checks import unfit
from ...core.devices import device_count, process_count
from ...core.errors import UsageError, caller
from ...core.limits import limits
from ...core.wording import differences
from ..value.engine import engine
from ..value.tensor import Tensor
from .recorder import current

__all__ = ["all_gather_object", "initialize", "see_alike"]
_join_numbers = count(1)


def initialize() -> None:
    """Joins the run that this process was started in, by `tessera run`, torchrun, `srun`, `mpirun`
    or Kubernetes, and starts the engine. A single process only starts the engine.

    The first use of a device does the same, so programs need this only before they use `jax` by
    themselves. Raises UsageError if the launcher's variables are invalid, BackendError if the
    processes do not come together within `TESSERA_JOIN_LIMIT` seconds (300).

    >>> import tessera as ts
    >>> ts.distributed.initialize()
    >>> ts.dist.process_index(), ts.dist.process_count()
    (0, 1)
    """
    device_count()


def all_gather_object(value: Any) -> list[Any]:
    """The `value` of each process, in the order of their ranks. Each process calls it.

    It is for host values that differ by process, such as a measured time or a stop flag: numbers,
    texts, and lists and dicts of them, which are returned as JSON has them. Raises UsageError for
    other values, and if the processes call it at different lines; BackendError if one does not call
    it within the limit of a collective.

    >>> import tessera as ts
    >>> ts.dist.all_gather_object({"took_s": 1.5})
    [{'took_s': 1.5}]
    """
    if current() is not None:
        raise UsageError(
            "all_gather_object: inside of a compiled function it runs once, when that is recorded",
            fix="call it outside",
        )
    try:
        text = json.dumps(value, default=_number)
    except (TypeError, ValueError):
        fix = "give numbers, texts, and lists and dicts of them"
        raise unfit("all_gather_object", "value", value, fix) from None
    if process_count() == 1:
        return [json.loads(text)]
    at = caller() or ""
    reports = engine().gather(f"object/{next(_join_numbers)}", [at, text], limits().collective_s)
    if rows := differences({rank: {"at": line} for rank, (line, _) in enumerate(reports)}):
        raise UsageError(
            "all_gather_object: the processes are not at the same call",
            rows=rows,
            fix="call it in all of them, in the same order",
        )
    return [json.loads(text) for _, text in reports]


def _number(x: Any) -> Any:
    """Returns a number of another library as a Python number."""
    if getattr(x, "shape", None) != ():
        raise TypeError
    return x.item()


def see_alike(name: str, leaves: Iterable[Any]) -> None:
    """Raises UsageError, in all processes, if a collective outside of functions gets a value on no
    mesh that differs between processes: such values would not be exchanged."""
    if process_count() == 1 or current() is not None:
        return
    said = [_few(x) for x in leaves if not isinstance(x, Tensor) or x.mesh is None]
    if said:
        fix = "a value on no mesh is one of all processes; what each has: dist.all_gather_object(x)"
        engine().alike(name, None, {"value": ", ".join(said)}, fix)


def _few(x: Any) -> str:
    try:
        found = x.numpy() if isinstance(x, Tensor) else np.asarray(x)
        few = ", ".join(f"{v:g}" for v in found.reshape(-1)[:3].astype(np.float64))
        return few if found.size <= 3 else f"{few}, … (checksum {crc32(found.tobytes()):08x})"
    except (TypeError, ValueError):
        return type(x).__name__
