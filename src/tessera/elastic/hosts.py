"""Safe points over several hosts: each host's blocks have a copy on the next host.

Processes that see each other's files in the folder form a group: they are on one host, or the
folder is on a shared disk. With several groups, each writes its blocks to its own folder, and a
peer in the next group stores them as well, so any one group may be lost. When processes start
again, the newest safe point that the remaining groups have in full is completed in each folder.
"""

from __future__ import annotations

import itertools
import secrets
import socket
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np

from ..checkpoint.listing import manifests, remove
from ..checkpoint.names import NAME
from ..checkpoint.storage import Storage
from ..core.devices import device_count, process_count, process_index
from ..core.dtypes import uint8
from ..core.errors import CheckpointError
from ..core.layout import Factor, TensorType
from ..core.mesh import Mesh
from ..lang.record.mesh_transfer import sent
from ..lang.value.engine import Parts, engine
from ..lang.value.tensor import Tensor

LIMIT_S = 600.0
"""The time limit for a process to reach a point where all exchange values."""
_ROOM = 4096  # bytes of the smallest array that goes between hosts; each size is a program
_COUNT = itertools.count(1)


class Move(NamedTuple):
    """A file that a process sends to another."""

    key: str
    giver: int
    taker: int
    nbytes: int


class Hosts:
    """The processes of a run, grouped by their folders at `storage`; all of them must create it
    together."""

    def __init__(self, storage: Storage) -> None:
        self.storage, self.rank = storage, process_index()
        token = _gathered(secrets.token_hex(6))[0]
        mine, size = f"seen/{token}-{self.rank}", process_count()
        storage.write(mine, b"")
        self.names = len({*_gathered(socket.gethostname())})
        seen = [r for r in range(size) if storage.read(f"seen/{token}-{r}") is not None]
        self.groups: list[tuple[int, ...]] = sorted({tuple(s) for s in _gathered(seen)})
        """The ranks that share a folder, for each folder."""
        storage.delete([mine])
        self.folder_ranks = next(g for g in self.groups if self.rank in g)
        self.devices = _gathered(_first_device(device_count())) if len(self.groups) > 1 else []

    @property
    def leads(self) -> bool:
        """Returns whether this process writes the files that its folder has once."""
        return self.folder_ranks[0] == self.rank

    def text(self) -> str:
        """A description of the place of safe points; "" if it is this host only."""
        if len(self.groups) > 1:
            return f"in {self.storage.name} of {len(self.groups)} hosts, each block in two of them"
        shared = f"in {self.storage.name}, which {self.names} hosts share"
        return shared if self.names > 1 else ""

    def spread(self, files: Mapping[str, tuple[int, int]]) -> None:
        """Sends each file, given by its key with its writer and its bytes, to a peer of the writer
        as well."""
        if len(self.groups) > 1:
            self._carry(Move(key, r, self._peer(r), n) for key, (r, n) in files.items())

    def _peer(self, rank: int) -> int:
        at = next(i for i, g in enumerate(self.groups) if rank in g)
        there = self.groups[(at + 1) % len(self.groups)]
        return there[self.groups[at].index(rank) % len(there)]

    # -- when processes begin ---------------------------------------------------------------------
    def complete(self) -> int | None:
        """Completes the newest full safe point in each folder and removes all others; returns the
        number of steps of a newer one that is no longer full, or None."""
        manifests_found = manifests(self.storage)[0] if self.leads else []
        files = {*self.storage.listed()} if self.leads else set[str]()
        mine = [
            {
                "order": [m.sequence, m.created_s, m.id], "step": m.step, "tag": m.tag,
                "files": {f"{m.tag}/{file}": n for file, n in m.files().items()},
                "manifest": len(self.storage.read(f"{m.tag}/{NAME}") or b""),
            }
            for m in manifests_found
        ]  # fmt: skip
        reports = _gathered({"points": mine, "there": sorted(files)})
        have = [{*s["there"]} for s in reports]
        points = sorted((p for s in reports for p in s["points"]), key=lambda p: p["order"])
        whole = [p for p in points if all(any(f in h for h in have) for f in p["files"])]
        best = whole[-1] if whole else None
        if best is not None:
            first = next(r for r, s in enumerate(reports) if best in s["points"])
            moves = [
                Move(key, next(r for r, h in enumerate(have) if key in h), group[0], n)
                for group in self.groups
                for key, n in best["files"].items()
                if key not in have[group[0]]
            ]
            name = f"{best['tag']}/{NAME}"
            moves += [
                Move(name, first, group[0], best["manifest"])
                for group in self.groups
                if best not in reports[group[0]]["points"]
            ]
            self._carry(moves)
        for m in manifests_found:
            if best is None or m.id != best["order"][2]:
                remove(self.storage, m.tag)
        _gathered(None)  # readers wait until all folders are complete
        late = [p["step"] for p in points if best is None or p["order"] > best["order"]]
        return max(late, default=None)

    # -- files between processes ------------------------------------------------------------------
    def _carry(self, moves: Iterable[Move]) -> None:
        wrong: CheckpointError | None = None
        for move in _spread_moves(moves):
            try:
                self._carried(move)
            except CheckpointError as error:  # the others go on giving and taking
                wrong = error
        if wrong is not None:
            raise wrong

    def _carried(self, move: Move) -> None:
        room = max(_ROOM, 1 << (move.nbytes - 1).bit_length())
        raw = b""
        if move.giver == self.rank:
            raw = self.storage.read(move.key) or b""
        ids = [self.devices[r] for r in (move.giver, move.taker)]
        at, to = (_on(Mesh(("host",), devices=[i]), room) for i in ids)
        padded = np.frombuffer(raw.ljust(room, b"\0"), np.uint8)

        def fill(parts: Parts) -> None:
            for cut, out in parts:
                out[...] = padded[cut]

        x = Tensor(engine().place_blocks(fill, at), at)
        (there,) = sent([x], [to], Mesh(("host",), devices=sorted(ids)))
        if move.taker == self.rank:
            ((_, got),) = engine().blocks(there.stored, to, 0)
            self.storage.write(move.key, got[: move.nbytes].tobytes())


def _spread_moves(moves: Iterable[Move]) -> list[Move]:
    """`moves` reordered so that neighbours involve different processes as far as possible, and run
    at the same time."""
    rest, found = [*moves], list[Move]()
    while rest:
        busy, later = set[int](), list[Move]()
        for move in rest:
            if busy.isdisjoint((move.giver, move.taker)):
                busy |= {move.giver, move.taker}
                found.append(move)
            else:
                later.append(move)
        rest = later
    return found


def _on(mesh: Mesh, count: int) -> TensorType:
    return TensorType(uint8, [(Factor(count),)], (), mesh)


def _first_device(count: int) -> int:
    """The id of this process's first device."""
    line = Mesh(("device",), devices=count)
    return int(
        engine().local_row_indices(TensorType(uint8, [(Factor(count, ("device",)),)], (), line))[0]
    )


def _gathered(value: Any) -> list[Any]:
    """The values of all processes at this point."""
    return engine().gather(f"elastic/{next(_COUNT)}", value, LIMIT_S)
