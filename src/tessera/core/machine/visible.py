"""Visible devices of this process, from `TESSERA_VISIBLE_DEVICES` or `TT_VISIBLE_DEVICES`.

An id is a device on PCIe. On a machine of cards (named by the descriptor in
`TT_MESH_GRAPH_DESC_PATH`, or by the program's mesh) an id shows the other chips of its card, too;
elsewhere it is one device.

>>> visible_ids({"TT_VISIBLE_DEVICES": "0,1"}), visible_ids({})
((0, 1), None)
>>> visible_count(8, {"TT_VISIBLE_DEVICES": "2"})
1
"""

from __future__ import annotations

from ..devices import process_count
from ..environment import DEVICES, VISIBLE_DEVICES
from ..errors import BackendError
from ..mesh_input import times
from ..ranks import rank_of
from .machine import Machine
from .share import Environment, Share, descriptor_path, share, variable_text

NAMES = (VISIBLE_DEVICES, "TT_VISIBLE_DEVICES")


def visible_ids(environment: Environment = None) -> tuple[int, ...] | None:
    """Returns the visible ids; None if no variable is set, so that all devices are visible.

    Raises BackendError if a variable is no list of distinct ids, or if the two differ.
    """
    said = {name: variable_text(name, environment) for name in NAMES}
    found = {name: _ids(name, text) for name, text in said.items() if text}
    if len({frozenset(ids) for ids in found.values()}) > 1:
        raise BackendError(
            "visible devices: two variables say different things",
            rows=[(name, said[name]) for name in found],
            fix=f"unset one of {' and '.join(found)}",
        )
    return next(iter(found.values()), None)


def _ids(name: str, text: str) -> tuple[int, ...]:
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdecimal() and len(part) < 10 for part in parts):
        raise BackendError(
            f"{name}: {text!r} is no list of device ids",
            fix=f'set it to ids with commas between them, {name}="0,1", or unset it',
        )
    ids = tuple(map(int, parts))
    twice = sorted({i for i in ids if ids.count(i) > 1})
    if twice:
        raise BackendError(
            f"{name}: {', '.join(map(str, twice))} is there twice",
            visible=text,
            fix="name each device once",
        )
    return tuple(sorted(ids))


def visible_count(
    total: int, environment: Environment = None, *, virtual: bool = True
) -> int | None:
    """Returns the number of the host's `total` devices that this process sees; None if it sees all.
    The number of `virtual` devices can be increased, and the error says so.

    With a descriptor the ids are those of one of its hosts; a rank of a mesh sees its part of the
    mesh. Raises BackendError if an id does not exist.
    """
    mine = visible_share(environment)
    if mine is not None:
        return mine.local_count
    ids = visible_ids(environment)
    if ids is None:
        return None
    machine = _system(environment)
    if machine is None:
        _need(ids, total, f"{total} devices", f"{DEVICES}={ids[-1] + 1}" if virtual else "")
        return len(ids)
    _need_on(machine, ids)
    return len(machine.behind(ids))


def visible_share(environment: Environment = None) -> Share | None:
    """Returns the process's part of the mesh from a rank bindings file; None without one.

    The visible ids are numbers of the machine of the mesh; each shows one device, or the two of a
    card. If they show fewer, a process that runs alone has the mesh of these devices; one of
    several processes gets a BackendError.
    """
    mine, ids = share(environment), visible_ids(environment)
    if mine is None or ids is None or mine.local_count in (len(ids), 2 * len(ids)):
        return mine
    if process_count() > 1:
        raise BackendError(
            f"visible devices: the ids do not show the {mine.local_count} devices that this rank "
            "has of"
            f" {mine.machine.name}",
            visible=",".join(map(str, ids)),
            mesh=times(mine.machine.shape),
            fix=f"show {mine.local_count} devices, or half as many cards of two; or mend "
            "device_topology or"
            " host_topology in the descriptor",
        )
    _need_on(mine.machine, ids)
    part = mine.machine.part(ids)
    return Share(part, part.size, tuple(range(part.size)))


_used: list[Machine] = []  # the last machine of which `narrowed` took a part


def _system(environment: Environment) -> Machine | None:
    """Returns the machine of this process: that of the descriptor, or the one whose mesh the
    program took; None without either."""
    path = descriptor_path(environment)
    if not path:
        return _used[0] if _used else None
    from .load import load  # its parsers are slow to import

    return load(path)


def narrowed(machine: Machine, environment: Environment = None) -> Machine:
    """Returns the part of `machine` that this process sees, if it is the whole program on one host.

    Several processes or hosts share one mesh: each sees its own part of the same machine. Raises
    BackendError if a visible device does not exist, MeshError if they are no box.
    """
    ids = visible_ids(environment)
    alone = process_count() == 1 and rank_of(environment) is None
    if ids is None or machine.host_count > 1 or not alone:
        return machine
    _need_on(machine, ids)
    part = machine.part(ids)
    _used[:] = [machine]
    return part


def _need_on(machine: Machine, ids: tuple[int, ...]) -> None:
    each = machine.size // machine.host_count
    count = len(machine.cards) or each
    what = "cards" if machine.cards else "devices"
    _need(ids, count, f"{machine.name} has {count} {what} a host", "")


def _need(ids: tuple[int, ...], count: int, available: str, more: str) -> None:
    if ids[-1] < count:
        return
    raise BackendError(
        f"visible devices: there is no device {ids[-1]}",
        visible=",".join(map(str, ids)),
        have=available,
        fix=f"name ids from 0 to {count - 1}" + (f", or set {more}" if more else ""),
    )
