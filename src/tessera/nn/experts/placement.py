"""Placement of experts on devices, equal on every process that computes it.

Weights are stored by row, and rows are split over devices in equal runs, so a placement is a list
of the expert in each row. An expert in several rows has replicas, which share its tokens.

>>> four = place_experts(8, 4)
>>> three = rehash_experts(four, ["0", "1", "3"], replicas=1)
>>> four.text()
'0: 6 7, 1: 1 2, 2: 4 5, 3: 0 3'
>>> three.text(), three.moves(four)
('0: 5 6 7, 1: 0 1 2, 3: 0 3 4', [(5, '0'), (0, '1'), (4, '3')])
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np

from ...core.checks import divides, shown, unfit, whole
from ...core.declared import Given, Whole
from ...core.errors import UsageError
from ...core.value_checks import is_whole

MOST = 2**16  # experts, replicas or owners
Some = Annotated[int, Whole(1, MOST)]
Extra = Annotated[int, Whole(0, MOST)]
Loads = np.ndarray[tuple[Any, ...], np.dtype[np.float64]]


@dataclass(frozen=True)
class Placement:
    """The expert in each row of the weights, and the device of each row.

    `rows[i]` is the expert in row i; `owners` are the names of the devices, each with an equal run
    of rows. Raises UsageError if the rows do not divide over the owners, or an expert from 0 on has
    no row.
    """

    rows: tuple[int, ...]
    owners: tuple[str, ...]

    def __post_init__(self) -> None:
        owners = _owners(self.owners)
        rows = self.rows if isinstance(self.rows, (list, tuple)) else ()
        whole_ids = bool(rows) and all(map(is_whole, rows))
        if not whole_ids or len(rows) % len(owners) or set(rows) != set(range(max(rows) + 1)):
            raise UsageError(
                f"Placement: {shown(self.rows)} on {len(owners)} owners is no placement",
                fix="give each owner as many rows, and each expert from 0 on a row",
            )
        object.__setattr__(self, "rows", tuple(map(int, rows)))
        object.__setattr__(self, "owners", owners)

    @property
    def experts(self) -> int:
        """The number of experts."""
        return max(self.rows) + 1

    @property
    def replicas(self) -> tuple[int, ...]:
        """The number of rows of each expert."""
        found = Counter(self.rows)
        return tuple(found[e] for e in range(self.experts))

    @property
    def held(self) -> dict[str, tuple[int, ...]]:
        """The experts of each owner, by its name."""
        n = len(self.rows) // len(self.owners)
        return {o: self.rows[i * n : (i + 1) * n] for i, o in enumerate(self.owners)}

    def moves(self, old: Placement) -> list[tuple[int, str]]:
        """(expert, owner) for each expert that an owner has here but not in `old`, and must
        fetch."""
        have = old.held
        return [
            (e, owner)
            for owner, experts in self.held.items()
            for e in sorted(set(experts) - set(have.get(owner, ())))
        ]

    def sources(self, old: Placement | None) -> list[int]:
        """For each row, the row of `old` with the same expert (`old` None: row i has expert i)."""
        rows = old.rows if old is not None else range(self.experts)
        return [rows.index(e) for e in self.rows]

    def text(self) -> str:
        """The experts of each owner as text, e.g. "0: 1 3, 1: 0 2"."""
        return ", ".join(f"{o}: {' '.join(map(str, es))}" for o, es in self.held.items())


def place_experts(experts: Some, owners: int | Sequence[str], replicas: Extra = 0) -> Placement:
    """The placement of `experts` on `owners` by rendezvous hashing (Thaler & Ravishankar 1998).

    `owners` is a number or a list of names; each owner gets the same number of rows. The first
    `replicas` experts get a second row each. Raises UsageError if the rows do not divide over the
    owners.

    >>> place_experts(8, 4).text()
    '0: 6 7, 1: 1 2, 2: 4 5, 3: 0 3'
    """
    return rehash_experts(None, owners, experts=experts, replicas=replicas)


def rehash_experts(
    old: Annotated[Placement, Given("give an nn.Placement")] | None,
    owners: int | Sequence[str],
    *,
    experts: Some | None = None,
    replicas: Extra | None = None,
) -> Placement:
    """The placement after the devices have changed to `owners`, with as few moves as possible.

    Experts whose owner is still there stay. Others go to the owner with room that has the highest
    hash for them. All processes that know `old` compute the same placement. Raises UsageError if
    `old` is not a Placement or the rows do not divide over the owners.
    """
    names = _owners(owners)
    count, more = old.experts if old else whole("placement", "experts", experts, 1), replicas or 0
    wanted = Counter(range(count))
    if old is not None and replicas is None:
        wanted = Counter(old.rows)
    for i in range(more):
        wanted[i % count] += 1
    copies = Counter(wanted)
    rows = sum(wanted.values())
    divides(
        "place_experts", rows, len(names),
        "{count} rows of experts do not divide over {parts} owners",
        f"add {-rows % len(names)} replicas, or take a number of owners that divides", UsageError,
    )  # fmt: skip
    room = {name: rows // len(names) for name in names}
    held: dict[str, list[int]] = {name: [] for name in names}
    for name, own in (old.held if old is not None else {}).items():
        # If there are more than fit, the ones with the highest hash stay.
        for e in sorted(own, key=lambda e: _score(e, name), reverse=True):
            if name in room and room[name] and wanted[e]:
                held[name].append(e)
                room[name] -= 1
                wanted[e] -= 1
    # Experts with copies come first, while there is room on different owners.
    left = [e for e in wanted if wanted[e]]
    pairs = sorted(
        ((copies[e] > 1, _score(e, name), e, name) for e in left for name in names), reverse=True
    )
    for again in range(2):  # a second copy on one owner only if no other has room
        for *_, e, name in pairs:
            while wanted[e] and room[name] and (again or e not in held[name]):
                held[name].append(e)
                room[name] -= 1
                wanted[e] -= 1
    return Placement(tuple(e for name in names for e in sorted(held[name])), names)


def _score(expert: int, owner: str) -> bytes:
    return hashlib.blake2b(f"{expert}@{owner}".encode(), digest_size=8).digest()


def _owners(owners: object) -> tuple[str, ...]:
    if is_whole(owners) and 1 <= owners <= MOST:
        return tuple(map(str, range(int(owners))))
    if isinstance(owners, (list, tuple)) and owners and len(set(map(str, owners))) == len(owners):
        return tuple(map(str, owners))
    raise unfit(
        "place_experts",
        "owners",
        owners,
        'give their number, or different names, e.g. ["host0", "host1"]',
    )


# -- by load --------------------------------------------------------------------------------------
def balance_experts(
    load: Sequence[float], devices: Some, replicas: Extra = 0, nodes: Some = 1, groups: Some = 1
) -> Placement:
    """A placement for measured loads: experts with a high load get replicas, devices get equal
    loads.

    This follows DeepSeek's EPLB. `groups` of experts are assigned to `nodes` so that the nodes have
    equal loads. Each node gives its replicas to the experts with the highest load per copy and
    assigns the copies to its devices. If `nodes` does not divide `groups`, all devices count as one
    node. Raises UsageError if `load` is not a list of numbers or the counts do not divide.
    """
    try:
        w = np.asarray(load, np.float64)
    except (TypeError, ValueError):
        w = np.zeros(0)
    if w.ndim != 1 or not w.size or not np.isfinite(w).all() or (w < 0).any():
        raise unfit("balance_experts", "the load", load, "give a number an expert")
    if groups % nodes or nodes == 1:
        groups = nodes = 1
    rows = w.size + replicas
    if rows % devices or w.size % groups or devices % nodes:
        raise UsageError(
            f"balance_experts: {w.size} experts in {groups} groups, {rows} rows, {devices} devices"
            f" and {nodes} nodes do not divide",
            fix=f"add {-rows % devices} replicas, or change the numbers",
        )
    each = w.size // groups
    node_of = _packed(w.reshape(groups, each).sum(1), nodes)
    out: list[int] = []
    for node in node_of:
        experts = np.array([g * each + i for g in node for i in range(each)])
        copies = _copies(w[experts], rows // nodes)
        each_copy = w[experts[copies]] / np.bincount(copies)[copies]
        for pack in _packed(each_copy, devices // nodes):
            out += [int(experts[copies[i]]) for i in pack]
    return Placement(tuple(out), tuple(map(str, range(devices))))


def _packed(load: Loads, packs: int) -> list[list[int]]:
    """The items in `packs` of equal length: the heaviest first, each to the lightest pack with
    room."""
    room = len(load) // packs
    held: list[list[int]] = [[] for _ in range(packs)]
    sums = [0.0] * packs
    for i in np.argsort(-load, kind="stable"):
        best = min((p for p in range(packs) if len(held[p]) < room), key=lambda p: (sums[p], p))
        held[best].append(int(i))
        sums[best] += float(load[i])
    return held


def _copies(load: Loads, count: int) -> list[int]:
    """The items of `count` copies: each further copy is of the item with the highest load per
    copy."""
    out = list(range(len(load)))
    while len(out) < count:
        out.append(int(np.argmax(load / np.bincount(out))))
    return out
