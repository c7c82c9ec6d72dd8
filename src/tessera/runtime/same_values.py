"""Do all processes give the same value, where each has it for itself?

A value that lies on devices of several processes is one value. The engine takes from each process
what its own devices hold, so weights that were drawn otherwise in each, or each one's own rows in
place of the whole batch, would train on without a word. Each kind of value is compared the first
times that it comes, by a sum of its bytes.
"""

from __future__ import annotations

import json
import time
import zlib
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import numpy as np

from ..core.errors import BackendError, TesseraError, UsageError, fail
from ..core.limits import limits
from ..core.wording import ranks_text
from .flight import flight
from .jax_private import service
from .store import wait_for

Array = np.ndarray[Any, Any]
TIMES = 3  # that values of one shape and dtype are compared
_seen: Counter[tuple[object, ...]] = Counter()
_rounds: Counter[tuple[int, ...]] = Counter()


def compare_values(given: Sequence[tuple[Array, jax.sharding.Sharding]]) -> None:
    """Raises UsageError, in all processes that hold a part of a value, where they gave different
    ones; BackendError if one of them does not come."""
    if service() is None:
        return
    me = jax.process_index()
    groups: dict[tuple[int, ...], list[Array]] = {}
    for x, where in given:
        devices: Iterable[Any] = where.device_set
        ranks = tuple(sorted({d.process_index for d in devices}))
        kind = (ranks, x.shape, x.dtype.str)
        if me in ranks and len(ranks) > 1 and _seen[kind] < TIMES:
            _seen[kind] += 1
            groups.setdefault(ranks, []).append(x)
    for ranks, values in groups.items():
        _compare(ranks, values)


def _compare(ranks: tuple[int, ...], values: Sequence[Array]) -> None:
    _rounds[ranks] += 1
    path = f"tessera/values/{','.join(map(str, ranks))}/{_rounds[ranks]}/"
    limit_s = limits().collective_s
    record = flight().begin("values", "", "values are compared", "", ranks, 0)
    told = json.dumps([*map(_told, values)])
    try:
        service().key_value_set_bytes(f"{path}{jax.process_index()}", told.encode())
        found: dict[int, list[str]] = {}
        end_s = time.monotonic() + limit_s
        for rank in ranks:
            said = wait_for(f"{path}{rank}", end_s - time.monotonic(), rank)
            if said is None:
                raise flight().late(record, limit_s)
            found[rank] = json.loads(said)
        for i, x in enumerate(values):
            own = {
                rank: rows[i] if i < len(rows) else "no such value" for rank, rows in found.items()
            }
            if len({*own.values()}) > 1:
                raise differ(x, own)
    except TesseraError as error:
        flight().failed(record, error)
        raise
    except RuntimeError as error:
        flight().failed(record, error)
        raise fail(
            BackendError,
            "values: the processes cannot compare them",
            [("service", str(error).splitlines()[0])],
            fix="the coordinator (rank 0) has ended or cannot be reached",
        ) from None
    flight().finish(record)


def _told(x: Array) -> str:
    """A value in a few words, which differ where values do."""
    few = ", ".join(f"{v:g}" for v in x.reshape(-1)[:3].astype(np.float64))
    more = ", …" if x.size > 3 else ""
    return f"{few}{more} (checksum {zlib.crc32(x.tobytes()):08x})"


def differ(x: Array, own: dict[int, str] | None = None) -> UsageError:
    """The error that a value is another one in some process, which has its `own`."""
    rows: list[tuple[str, object]] = [("value", f"{x.dtype}{[*x.shape]}")]
    alike: dict[str, list[int]] = {}
    for rank, text in (own or {}).items():
        alike.setdefault(text, []).append(rank)
    rows += [(ranks_text(ranks), text) for text, ranks in alike.items()]
    return fail(
        UsageError,
        "the processes of a mesh gave different values for one tensor",
        rows,
        fix="make it alike in all of them: the same seed, the same numbers, all rows of the batch;"
        " a loader of tessera.data reads in each process only the rows of its devices",
    )
