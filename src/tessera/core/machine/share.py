"""The mesh that a rank bindings file gives to this process, and this process's devices in it.

`TT_MESH_ID` names one mesh of the mesh graph descriptor in `TT_MESH_GRAPH_DESC_PATH`. Its hosts are
ranks of the run: `TESSERA_MESHES`, set by the launcher, has the mesh and the host of each rank,
"0.0,0.1,1.0"; without it `TT_MESH_HOST_RANK` is the host of this rank, and the ranks of a mesh are
consecutive.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

from .. import environment
from ..devices import process_count, process_index
from ..errors import BackendError, MeshError
from ..mesh_input import times
from .machine import Machine

DESCRIPTOR = "TT_MESH_GRAPH_DESC_PATH"
MESH_ID, HOST_RANK = "TT_MESH_ID", "TT_MESH_HOST_RANK"
GRAPHS = (".textproto", ".pbtxt", ".txtpb")
Environment = Mapping[str, str] | None


@dataclass(frozen=True, slots=True)
class Share:
    """The part of a mesh that belongs to this process: `local_count` devices. `ids` are the
    program's numbers of the devices of `machine`, in the machine's order."""

    machine: Machine
    local_count: int
    ids: tuple[int, ...]


def variable_text(name: str, variables: Environment = None) -> str:
    """Returns the text of the variable `name`; "" if it is unset."""
    return (os.environ if variables is None else variables).get(name, "").strip()


def descriptor_path(variables: Environment = None) -> str:
    """Returns the path of the machine's descriptor, set by a launcher; "" without one."""
    return variable_text(DESCRIPTOR, variables)


def mesh_id(variables: Environment = None) -> int | None:
    """Returns the mesh_id of this process, set by the launcher; None without one."""
    return _number(MESH_ID, variables)


def mesh_ranks(variables: Environment = None) -> tuple[int, ...] | None:
    """Returns the ranks of this process's mesh, in the order of its hosts; None if all ranks are on
    one mesh, or if it is unknown."""
    every = _places(variables)
    return _ranks(every, process_index()) if len({m for m, _ in every}) > 1 else None


def share(variables: Environment = None) -> Share | None:
    """Returns this process's part of its mesh; None without a mesh and a mesh graph descriptor.

    Raises MeshError if the descriptor has no such mesh, or if its devices cannot be divided among
    its ranks; BackendError if a variable is not a number.
    """
    path = descriptor_path(variables)
    if Path(path).suffix not in GRAPHS or (mine := mesh_id(variables)) is None:
        return None
    from .load import load  # its parsers are slow to import

    machine, rank = load(path, mine), process_index()
    every = _places(variables)
    if every and every[rank][0] == mine:
        sizes = {m: _each(load(path, m), [p for p, _ in every].count(m)) for m, _ in every}
        begin = [0, *accumulate(sizes[m] for m, _ in every)]
        own, starts = sizes[mine], [begin[r] for r in _ranks(every, rank)]
    else:
        alone = process_count() == 1
        host = 0 if alone else _number(HOST_RANK, variables) or 0
        count = 1 if alone else machine.host_count
        if host >= count:
            raise MeshError(
                f"{machine.name}: there is no host {host}",
                rows=[(HOST_RANK, host), ("host_topology", times(machine.hosts))],
                fix=f"give numbers below {count}, or a larger host_topology in the descriptor",
            )
        own = _each(machine, count)
        starts = [(rank - host + h) * own for h in range(count)]
    return Share(machine, own, _ids(machine, starts))


def _places(variables: Environment) -> list[tuple[int, int]]:
    """Returns the mesh and host of each rank; [] if they are unknown, or if this process runs
    alone."""
    parts = [p.split(".") for p in variable_text(environment.MESHES, variables).split(",") if p]
    if not all(len(p) == 2 and all(map(str.isdecimal, p)) for p in parts):
        raise BackendError(
            f"{environment.MESHES}: {variable_text(environment.MESHES, variables)!r} is no list "
            "of meshes",
            fix="leave it to tessera run --rank-binding, which sets it",
        )
    size = process_count()
    return [(int(m), int(h)) for m, h in parts[:size]] if len(parts) >= size > 1 else []


def _ranks(every: list[tuple[int, int]], rank: int) -> tuple[int, ...]:
    """Returns the ranks of the mesh of `rank`, in the order of its hosts."""
    mine = [r for r, (mesh, _) in enumerate(every) if mesh == every[rank][0]]
    return tuple(sorted(mine, key=lambda r: every[r][1]))


def _each(machine: Machine, ranks: int) -> int:
    """Returns the number of devices of each rank of the mesh."""
    if machine.size % ranks:
        raise MeshError(
            f"{machine.name}: {machine.size} devices cannot be shared by {ranks} ranks",
            fix=f"give its mesh_id to {machine.host_count} in the file of ranks, as many as"
            " host_topology has",
        )
    return machine.size // ranks


def _ids(machine: Machine, starts: list[int]) -> tuple[int, ...]:
    """Returns the number of each device of the mesh: those of a host are consecutive from its start
    on. If the number of ranks is not that of hosts, the ranks divide the devices in their order."""
    each = machine.size // len(starts)
    boxes = machine.host_count == len(starts)
    taken = list(starts)
    found = []
    for d in range(machine.size):
        host = machine.host_of(d) if boxes else d // each
        found.append(taken[host])
        taken[host] += 1
    return tuple(found)


def _number(name: str, variables: Environment) -> int | None:
    text = variable_text(name, variables)
    if not text:
        return None
    if text.isascii() and text.isdecimal() and len(text) < 10:
        return int(text)
    raise BackendError(f"{name}: {text!r} is no number from 0", fix=f"set {name}=0, or unset it")
