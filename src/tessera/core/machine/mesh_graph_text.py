"""Mesh graph descriptor (MGD 2.0) of a machine as text; `mesh_graph.read` reads it back.

>>> from tessera.core.machine.presets import preset
>>> print(write(preset("n300")).splitlines()[2].strip())
arch: WORMHOLE_B0
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..errors import MeshError
from ..topology import Level, Link
from .machine import Machine
from .mesh_graph import CHANNELS, WIRINGS, wires
from .schema import ENUMS, message, text_of


def write(machine: Machine) -> str:
    """Returns the descriptor of `machine`. Raises MeshError if it is no mesh of chips."""
    outer = [v for v in machine.topology.levels if v.shared]
    inner = machine.topology.levels[len(outer) :]
    if why := _not_described(machine, outer, inner):
        raise MeshError(
            f"{machine.name}: it has no mesh graph descriptor: {why}",
            machine=machine.topology,
            fix="write it as YAML: a file name that ends in .yaml",
        )
    wire, _ = CHANNELS[machine.device]
    names = {v: k for k, v in WIRINGS.items()}
    m = message()()
    mesh = m.mesh_descriptors.add(name="M0" if outer else machine.name)
    mesh.arch = ENUMS["Architecture"].index(machine.device.upper()) + 1
    mesh.device_topology.dims.extend(v.size for v in inner)
    if any(v.wiring == "ring" for v in inner):
        kinds = (ENUMS["Wiring"].index(names[v.wiring]) + 1 for v in inner)
        mesh.device_topology.dim_types.extend(kinds)
    mesh.host_topology.dims.extend(machine.hosts[len(outer) :])
    mesh.channels.count = _channels(inner[0].link, wire)
    for a, b in machine.express:
        mesh.express_connections.add(src=a, dst=b)
    top = ("mesh", mesh.name)
    for depth, level in enumerate(reversed(outer), 1):
        g = m.graph_descriptors.add(
            name=machine.name if depth == len(outer) else f"{machine.name}/{depth}"
        )
        g.type = "POD"
        count = _channels(level.link, wire)
        for k in range(level.size):
            _refer(g.instances.add(), *top, k)
        if level.wiring == "line":
            for k in range(level.size - 1):
                c = g.connections.add()
                _refer(c.nodes.add(), *top, k)
                _refer(c.nodes.add(), *top, k + 1)
                c.channels.count = count
        else:
            g.graph_topology = ENUMS["GraphTopology"].index(names[level.wiring]) + 1
        if level.wiring != "line" or level.size == 1:
            g.channels.count = count
        top = ("graph", g.name)
    _refer(m.top_level_instance, *top, 0)
    return text_of(m)


def _not_described(machine: Machine, outer: Sequence[Level], inner: Sequence[Level]) -> str:
    """Returns why `machine` has no descriptor; "" if it has one."""
    if machine.device not in CHANNELS:
        return f"there is no arch for {machine.device}"
    if not inner or len({v.link for v in inner}) > 1 or any(v.shared for v in inner):
        return "its meshes have links of several kinds"
    wire, adds = CHANNELS[machine.device]
    if machine.topology.add_bytes_per_s != adds:
        return f"its devices add otherwise than {machine.device}"
    if any(v.link != wires(wire, _channels(v.link, wire)) for v in (*outer, *inner)):
        return f"its links are not channels of {wire.name}"
    if any(v.wiring not in ("line", "ring") for v in inner) or any(
        v.wiring == "all" for v in outer
    ):
        return "its devices are not in lines and rings"
    if machine.hosts[: len(outer)] != tuple(v.size for v in outer):
        return "its meshes share hosts"
    return ""


def _channels(link: Link, wire: Link) -> int:
    return max(round(link.bytes_per_s / wire.bytes_per_s), 1)


def _refer(node: Any, kind: str, name: str, number: int) -> None:
    ref = getattr(node, kind)
    setattr(ref, f"{kind}_descriptor", name)
    setattr(ref, f"{kind}_id", number)
