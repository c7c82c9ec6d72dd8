"""Check that all processes give the same host value for one global tensor.

The engine takes from each process the part for its own devices, so weights drawn with different
seeds, or each process's own rows in place of the whole batch, would train without an error. Values
placed on a mesh are always compared, by a checksum. Arguments of programs are always summed up; the
checksums are compared at the first calls, and then now and then: for each kind of array, and for
each line of eager code.
"""

from __future__ import annotations

import json
import zlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from ...core.errors import UsageError
from ...core.limits import limits
from ...core.wording import differences, ranks_text
from ..jax_private import service
from .flight import flight
from .program_consistency import IN_ALL, comparison, gathered

Array = np.ndarray[Any, Any]
TIMES, EACH = 3, 64  # compared of a kind: the first 3 values, the 4th, 8th, ... and each 64th
FEW = 1 << 16  # bytes of the sample of a value for a checksum that is compared later
# By kind: the number of values, and the checksum of those not compared yet.
_pending_checksums: dict[tuple[object, ...], tuple[int, int]] = {}
_rounds: Counter[tuple[str, tuple[int, ...]]] = Counter()


def compare_values(
    arrays: Sequence[tuple[Array, jax.sharding.Sharding]],
    at: str | None = None,
    always: bool = False,
) -> None:
    """Raises UsageError, in all processes that hold a part of a value, if they gave different ones
    (`at` is the line of eager code); BackendError if a process does not come."""
    if service() is None:
        return
    me = jax.process_index()
    groups: dict[tuple[int, ...], list[tuple[Array, int]]] = {}
    for x, where in arrays:
        devices: Iterable[Any] = where.device_set
        ranks = tuple(sorted({d.process_index for d in devices}))
        kind = (ranks, x.shape, x.dtype.str) if at is None else (ranks, at)
        if me in ranks and len(ranks) > 1:
            before = None if always else _skipped(kind, x)
            if always or before is not None:
                groups.setdefault(ranks, []).append((x, before or 0))
    for ranks, values in groups.items():
        _compare(ranks, values)


def _skipped(kind: tuple[object, ...], x: Array) -> int | None:
    """Returns the checksum of this kind's values since the last comparison (0 without one) if `x`
    is to be compared now; else adds `x` to the checksum and returns None."""
    n, total = _pending_checksums.get(kind, (0, 0))
    n += 1
    if n <= TIMES or n & (n - 1) == 0 or n % EACH == 0:
        _pending_checksums[kind] = n, 0
        return total
    few = x.reshape(-1)[:: 1 + x.nbytes // FEW]
    _pending_checksums[kind] = n, zlib.crc32(few.tobytes(), total)
    return None


def _compare(ranks: tuple[int, ...], values: Sequence[tuple[Array, int]]) -> None:
    said = _exchanged("values", ranks, [_told(*row) for row in values])
    for i, (x, _) in enumerate(values):
        own = {r: rows[i] if i < len(rows) else _NONE for r, rows in said.items()}
        if len({*map(tuple, own.values())}) > 1:
            alike = len({form for form, _ in own.values()}) == 1
            rows = {r: " ".join(row[alike:]) for r, row in own.items()}
            raise _differ(x if alike else None, rows)


def compare_facts(caller: str, ranks: tuple[int, ...], facts: Mapping[str, Any], fix: str) -> None:
    """Raises UsageError, in all of `ranks`, if they differ in `facts` (of JSON) about `caller`;
    BackendError if a process does not come."""
    if service() is None or len(ranks) == 1 or jax.process_index() not in ranks:
        return
    said = _exchanged(caller, ranks, dict(facts))
    if rows := differences(said):
        raise UsageError(f"{caller}: the processes of a mesh differ", rows=rows, fix=fix)


def _exchanged(caller: str, ranks: tuple[int, ...], mine: Any) -> dict[int, Any]:
    """Returns the value of each of `ranks` about `caller`."""
    turn = _rounds[caller, ranks] = _rounds[caller, ranks] + 1
    place, me = f"tessera/values/{caller}/{','.join(map(str, ranks))}", jax.process_index()
    path = f"{place}/{turn}/"
    limit_s = limits().collective_s
    with comparison(caller, "what each has is compared", ranks) as record:
        service().key_value_set_bytes(f"{path}{me}", json.dumps(mine).encode())
        found = gathered(path, ranks, limit_s)
        if found is None:
            raise flight().late(record, limit_s, IN_ALL)
        # All have read the last round, or they would not be in this one.
        service().key_value_delete(f"{place}/{turn - 1}/{me}")
        return {rank: json.loads(text) for rank, text in found.items()}


_NONE = ["", "no such value"]


def _told(x: Array, before: int) -> list[str]:
    """Returns the dtype and shape of a value, and a short text with its checksum and the checksum
    `before` it."""
    few = ", ".join(f"{v:g}" for v in x.reshape(-1)[:3].astype(np.float64))
    more = ", …" if x.size > 3 else ""
    said = f"checksum {zlib.crc32(x.tobytes()):08x}"
    said += f"; of those before it {before:08x}" if before else ""
    return [f"{x.dtype}{[*x.shape]}", f"{few}{more} ({said})"]


def _differ(x: Array | None, checksums: dict[int, str]) -> UsageError:
    """Returns the error for processes with different values (`checksums`) of one tensor; `x` has
    its dtype and shape if these are the same."""
    rows: list[tuple[str, object]] = []
    if x is not None:
        rows.append(("value", f"{x.dtype}{[*x.shape]}"))
    alike: dict[str, list[int]] = {}
    for rank, text in checksums.items():
        alike.setdefault(text, []).append(rank)
    rows += [(ranks_text(ranks), text) for text, ranks in alike.items()]
    return UsageError(
        "the processes of a mesh gave different values for one tensor",
        rows=rows,
        fix="make it alike in all of them: the same seed, the same numbers, all rows of the batch;"
        " a loader of tessera.data reads in each process only the rows of its devices"
        + ("" if x is not None else "; and run this line in all of them, as often"),
    )
