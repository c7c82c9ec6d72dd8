"""Machines in mesh graph descriptors (MGD 2.0, text format).

Meshes of chips are levels of wires; a graph of meshes is one level more. `read` reports every fault
of a file at once, each with its line; `mesh_graph_text` writes the descriptor of a machine.

>>> t3000 = read(SMALLEST.replace("[1, 2]", "[2, 4]").replace("[1, 1]", "[1, 2]"))
>>> print(t3000.topology)
M0, 8 devices: 2 line (chip ethernet 100G, 1.0 µs, 12.5 GB/s) x 4 line (chip ethernet 100G, ...)
>>> t3000.hosts, t3000.device
((1, 2), 'wormhole_b0')
"""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ..checks import shortened
from ..errors import OptionWarning, lines_up
from ..mesh_input import times
from ..topology import Level, Link, Topology, Wiring
from ..wording import nearest
from .faults import Faults
from .machine import MOST_DEVICES, Machine
from .mesh_ids import named
from .presets import BLACKHOLE, CARDS, WORMHOLE
from .schema import ENUMS, Spot, class_for, spots

SMALLEST = """\
mesh_descriptors {
  name: "M0"
  arch: WORMHOLE_B0
  device_topology { dims: [1, 2] }
  host_topology { dims: [1, 1] }
  channels { count: 1 }
}
top_level_instance { mesh { mesh_descriptor: "M0" mesh_id: 0 } }
"""
# A channel between chips, one direction, and the speed of a chip's additions (a third of its memory
# bandwidth): the guide of TT-NN, 2.1, 288 GB/s; Hot Chips 2024, 10 x 400 Gb/s, 512 GB/s.
CHANNELS = {
    WORMHOLE: (Link("chip ethernet 100G", 1e-6, 12.5e9), 90e9),
    BLACKHOLE: (Link("chip ethernet 400G", 1e-6, 50e9), 170e9),
}
SOURCES = {
    WORMHOLE: "Programming Mesh of Devices with TT-NN, 2.1: 100 Gb/s a channel and direction",
    BLACKHOLE: "Tenstorrent at Hot Chips 2024: 10 channels of 400 Gb/s each way",
}
WIRINGS: dict[str, Wiring] = {"LINE": "line", "RING": "ring", "ALL_TO_ALL": "pairs"}
MOST_DIMS = 8


def read(text: str, where: str = "descriptor", mesh_id: int | None = None) -> Machine:
    """Returns the machine that `text` describes; with `mesh_id` that of one mesh of a graph, whose
    meshes may differ and be wired in any way.

    Unknown fields are ignored with an OptionWarning. Raises MeshError with every fault and its
    line.
    """
    return _Reader(text, where, mesh_id).machine()


def _parse(text: str, faults: Faults) -> tuple[Any, Spot]:
    """Returns the message in `text`, and its lines. Raises MeshError if it is not in the text
    format."""
    from google.protobuf import text_format

    kind = class_for(text)
    message = kind()
    try:
        try:
            text_format.Parse(text, message)
            return message, spots(text)
        except text_format.ParseError as error:
            if "has no field named" not in str(error):
                raise
        message = kind()
        text_format.Parse(text, message, allow_unknown_field=True)
        at = spots(text)
    except text_format.ParseError as error:
        faults.add(error.GetLine() or 1, _plain_error(str(error)))
        raise faults.error() from None
    except (RecursionError, UnicodeError):
        faults.add(1, "it is nested too deep, or is no text")
        raise faults.error() from None
    unknown = sorted(set(_unknown(at, message.DESCRIPTOR)))
    rows = "".join(f"\n  line {n} : {key} (the nearest: {near})" for n, key, near in unknown)
    warnings.warn(
        f"{faults.where}: {len(unknown)} field{'s' * (len(unknown) != 1)} that no descriptor has,"
        f" left out{rows}",
        OptionWarning,
        stacklevel=lines_up(),
    )
    return message, at


def _plain_error(sentence: str) -> str:
    """Returns the protobuf library's error text without the position and its internal names."""
    plain = re.sub(r"^\d+:\d+ : ('.*?': )?(?=[A-Z])", "", sentence, flags=re.DOTALL)
    if enum := re.match(r'Enum type "tessera\.(\w+)Of\.\w+" has no value named (\w+)', plain):
        return f"there is no {enum[2]}; write {' or '.join(ENUMS[enum[1]])}"
    return plain.replace("tessera.", "").rstrip(".")


def _unknown(at: Spot, kind: Any) -> list[tuple[int, str, str]]:
    """Returns line, name and nearest known name of the fields that `kind` lacks."""
    known = kind.fields_by_name
    found = []
    for key, many in at.fields.items():
        for one in many:
            if key not in known:
                found.append((one.line, key, nearest(key, known, 1).partition(",")[0]))
            elif known[key].message_type is not None:
                found += _unknown(one, known[key].message_type)
    return found


class _Reader:
    """Conversion of one file to a machine."""

    def __init__(self, text: str, where: str, mesh_id: int | None) -> None:
        self.faults = Faults(where)
        self.m, self.at = _parse(text, self.faults)
        self.mesh_id = mesh_id
        self.meshes = self._named("mesh_descriptors")
        self.graphs = self._named("graph_descriptors")
        self.notes: list[str] = []
        self.machines: dict[tuple[str, str], Machine | None] = {}  # by kind and name
        self.open: list[str] = []

    def fault(self, message: str, *path: str | int) -> None:
        self.faults.add(self.at.at(*path), message)

    def _named(self, kind: str) -> dict[str, int]:
        """Returns the index of each descriptor by its name."""
        found: dict[str, int] = {}
        for i, one in enumerate(getattr(self.m, kind)):
            if not one.name:
                self.fault('there is no name; add name: "M0"', kind, i)
            elif one.name in found:
                self.fault(f'the name "{one.name}" is taken', kind, i, "name")
            found.setdefault(one.name, i)
        return found

    def machine(self) -> Machine:
        if not self.meshes:
            self.fault("there is no mesh; add mesh_descriptors { ... }")
        every = [self._mesh(i) for i in range(len(self.m.mesh_descriptors))]
        for i in range(len(self.m.graph_descriptors)):
            self._graph(i)
        top: Machine | None = None
        if not self.m.HasField("top_level_instance"):
            self.fault(
                'there is no top_level_instance; add top_level_instance { mesh { mesh_descriptor: "'
                + next(iter(self.meshes), "M0")
                + '" mesh_id: 0 } }'
            )
        else:
            top = self._node(self.m.top_level_instance, "top_level_instance")
        self.faults.stop()
        if self.mesh_id is not None:
            top = self.machines["mesh", named(self.m, self.faults.where, self.mesh_id)]
        assert top is not None and None not in every, "no machine without a fault"
        sources = (SOURCES[top.device], "latency of 1 µs: an estimate")
        return replace(top, sources=sources, notes=tuple(dict.fromkeys(self.notes)))

    # ---- a mesh --------------------------------------------------------------------------------
    def _mesh(self, i: int) -> Machine | None:
        """Returns the machine of one mesh; None if it has a fault."""
        m, path = self.m.mesh_descriptors[i], ("mesh_descriptors", i)
        before = len(self.faults.messages)
        name = m.name or f"mesh {i}"
        self.machines.setdefault(("mesh", m.name), None)
        if not m.HasField("arch"):
            self.fault(f"{name} has no arch; add arch: {' or '.join(ENUMS['Architecture'])}", *path)
        dims = self._dims(name, "device_topology", m, path)
        hosts = self._dims(name, "host_topology", m, path)
        fits = len(hosts) == len(dims) and not any(n % h for n, h in zip(dims, hosts))
        if dims and hosts and not fits:
            self.fault(
                f"{name}: hosts {times(hosts)} do not divide the devices {times(dims)}",
                *path, "host_topology", "dims",
            )  # fmt: skip
        kinds = self._types(name, m, path, dims)
        count = self._count(name, m, path)
        for k, e in enumerate(m.express_connections):
            size = math.prod(dims) if dims else 0
            good = e.HasField("src") and e.HasField("dst") and e.src != e.dst
            if size and not (good and 0 <= e.src < size and 0 <= e.dst < size):
                self.fault(
                    f"{name}: an express connection joins two devices from 0 to {size - 1}",
                    *path, "express_connections", k,
                )  # fmt: skip
        if len(self.faults.messages) > before or not m.name:
            return None
        device = ENUMS["Architecture"][m.arch - 1].lower()
        wire, adds = CHANNELS[device]
        levels = tuple(Level(n, wires(wire, count), kind) for n, kind in zip(dims, kinds))
        machine = Machine(
            device,
            Topology(m.name, levels, adds),
            _level_names(len(dims)),
            tuple(hosts),
            cards_of(device, dims),
            tuple(dict.fromkeys((e.src, e.dst) for e in m.express_connections)),
        )
        self.machines["mesh", m.name] = machine
        return machine

    def _dims(self, name: str, which: str, m: Any, path: tuple[str | int, ...]) -> list[int]:
        """Returns the dims of a field; [] if it has a fault."""
        dims = list(getattr(m, which).dims)
        if not dims:
            self.fault(f"{name} has no {which}; add {which} {{ dims: [1, 2] }}", *path, which)
        elif min(dims) < 1 or len(dims) > MOST_DIMS or math.prod(dims) > MOST_DEVICES:
            self.fault(
                f"{name}: {which} cannot have dims {times(dims)}: each is at least 1, there are at "
                f"most {MOST_DIMS}, of {MOST_DEVICES:,} devices",
                *path, which, "dims",
            )  # fmt: skip
        else:
            return dims
        return []

    def _types(
        self, name: str, m: Any, path: tuple[str | int, ...], dims: Sequence[int]
    ) -> list[Wiring]:
        """Returns the wiring of each dim; by default a line."""
        grid = m.device_topology
        given = [*grid.types, *grid.dim_types]
        where = "dim_types" if grid.dim_types else "types"
        if grid.types and grid.dim_types:
            self.fault(f"{name} has types and dim_types; keep one", *path, "device_topology", where)
        elif dims and len(given) > len(dims):
            self.fault(
                f"{name} has {len(given)} types for {len(dims)} dims; give one a dim",
                *path, "device_topology", where,
            )  # fmt: skip
        kinds = [WIRINGS[ENUMS["Wiring"][k - 1]] for k in given]
        return kinds + ["line"] * (len(dims) - len(kinds))

    def _count(self, name: str, m: Any, path: tuple[str | int, ...]) -> int:
        """Returns the number of channels of a connection; 0 if it has a fault."""
        if not m.HasField("channels") or not m.channels.HasField("count"):
            self.fault(f"{name} has no channels; add channels {{ count: 2 }}", *path, "channels")
        elif m.channels.count < 1:
            self.fault(
                f"{name}: {m.channels.count} channels; give at least 1", *path, "channels", "count"
            )
        return int(m.channels.count)

    # ---- a graph -------------------------------------------------------------------------------
    def _node(self, node: Any, *path: str | int) -> Machine | None:
        """Returns the machine that `node` names; None if it has a fault."""
        if node.HasField("mesh"):
            kind, ref, descriptors = "mesh", node.mesh, self.meshes
        elif node.HasField("graph"):
            kind, ref, descriptors = "graph", node.graph, self.graphs
        else:
            self.fault("it names no mesh and no graph; add mesh { ... }", *path)
            return None
        name = getattr(ref, f"{kind}_descriptor")
        if name not in descriptors:
            named = [n for n in descriptors if n]
            near = f"; there is {shortened(named)}" if named else "; there are none"
            self.fault(f'"{name}" is no {kind}{near}', *path, kind, f"{kind}_descriptor")
            return None
        if getattr(ref, f"{kind}_id") < 0:
            self.fault(f"{kind}_id is below 0", *path, kind, f"{kind}_id")
        if kind == "graph":
            for inner in ("mesh", "graph"):
                if ref.HasField(inner):
                    self._node(ref, *path, kind)
            return self._graph(descriptors[name])
        found = self.machines["mesh", name]
        if found is not None and ref.HasField("device_id") and not 0 <= ref.device_id < found.size:
            self.fault(
                f"{name} has devices 0 to {found.size - 1}, not {ref.device_id}",
                *path, kind, "device_id",
            )  # fmt: skip
        return found

    def _graph(self, i: int) -> Machine | None:
        """Returns the machine of a graph: its equal instances, as one more level."""
        g, path = self.m.graph_descriptors[i], ("graph_descriptors", i)
        name = g.name or f"graph {i}"
        if ("graph", g.name) in self.machines and g.name not in self.open:
            return self.machines["graph", g.name]
        if g.name in self.open:
            self.fault(f"{name} is inside of itself; name another descriptor", *path)
            return None
        before = len(self.faults.messages)
        self.open.append(g.name)
        inside = [self._node(n, *path, "instances", k) for k, n in enumerate(g.instances)]
        self.open.pop()
        self.machines["graph", g.name] = None
        if not g.type:
            self.fault(f'{name} has no type; add type: "POD"', *path)
        if not inside:
            self.fault(f"{name} has no instances; add instances {{ mesh {{ ... }} }}", *path)
        ids = [_key(n) for n in g.instances]
        for k, one in enumerate(ids):
            if one in ids[:k]:
                self.fault(f"{name} has this instance twice; give it an id of its own",
                           *path, "instances", k)  # fmt: skip
        if len({n.WhichOneof("which") for n in g.instances}) > 1:
            self.fault(f"{name} mixes meshes and graphs; put the meshes in a graph", *path)
        wired = self._wiring(g, name, path, ids)
        if len(self.faults.messages) > before or None in inside or wired is None:
            return None
        if self.mesh_id is not None:
            return None  # only one mesh is asked for, so its graph may be no machine
        first = inside[0]
        assert first is not None
        for k, other in enumerate(inside):
            assert other is not None
            if replace(other.topology, name="") != replace(first.topology, name=""):
                self.fault(
                    f"{name} has instances that differ, which are no levels of one mesh; name one "
                    "mesh: mesh_id=0",
                    *path, "instances", k,
                )  # fmt: skip
                break
        if len(inside) * first.size > MOST_DEVICES:
            self.fault(f"{name} has more than {MOST_DEVICES:,} devices", *path)
        if len(self.faults.messages) > before:
            return None
        wiring, count = wired
        wire, adds = CHANNELS[first.device]
        level = Level(len(inside), wires(wire, count), wiring, shared=True)
        depth = sum(v.shared for v in first.topology.levels)
        machine = Machine(
            first.device,
            Topology(g.name, (level, *first.topology.levels), adds),
            (f"graph{depth}" if depth else "mesh", *first.axes),
            (len(inside), *first.hosts),
            (),
            first.express,
        )
        self.machines["graph", g.name] = machine
        return machine

    def _wiring(
        self, g: Any, name: str, path: tuple[str | int, ...], ids: list[tuple[Any, ...]]
    ) -> tuple[Wiring, int] | None:
        """Returns the wiring of the instances of a graph, and the number of channels; None if it
        has a fault."""
        if g.HasField("graph_topology"):
            if g.connections:
                self.fault(f"{name} has graph_topology and connections; keep one", *path)
            layout, counted, at = g.graph_topology, g, path
            if not isinstance(layout, int):  # a GraphLayout
                counted, at = layout, (*path, "graph_topology")
                if not layout.HasField("layout_type"):
                    self.fault(f"{name} has no layout_type; add layout_type: RING", *at)
                layout = layout.layout_type
            return WIRINGS[ENUMS["GraphTopology"][layout - 1]], self._count(name, counted, at)
        if len(ids) == 1 and not g.connections:
            return "line", g.channels.count if g.channels.count > 0 else 1
        edges: dict[tuple[int, int], int] = {}
        for k, c in enumerate(g.connections):
            at = (*path, "connections", k)
            count = self._count(f"a connection of {name}", c, at)
            if len(c.nodes) != 2:
                self.fault(f"a connection joins two nodes, not {len(c.nodes)}", *at)
                continue
            for n, node in enumerate(c.nodes):
                self._node(node, *at, "nodes", n)
            ends = [ids.index(_key(n)) if _key(n) in ids else -1 for n in c.nodes]
            if -1 in ends or ends[0] == ends[1]:
                self.fault(f"a connection joins two instances of {name}", *at)
            elif c.directional:
                self.fault("a connection of one direction is no link of a mesh; leave it out", *at)
            else:
                pair = (min(ends), max(ends))
                edges[pair] = edges.get(pair, 0) + count
        n = len(ids)
        chain = {(k, k + 1) for k in range(n - 1)}
        shapes: dict[Wiring, set[tuple[int, int]]] = {
            "line": chain,
            "ring": chain | {(0, n - 1)},
            "pairs": {(a, b) for b in range(n) for a in range(b)},
        }
        for wiring, want in shapes.items():
            if edges and edges.keys() == want:
                least, most = min(edges.values()), max(edges.values())
                if least != most:
                    self.notes.append(
                        f"{name}: {least} to {most} channels between instances, priced as {least}"
                    )
                return wiring, least
        if self.mesh_id is not None:
            return "line", 1
        self.fault(
            f"the connections of {name} are no line, no ring and not all pairs of its instances in "
            "their order; write graph_topology: RING or ALL_TO_ALL, or a connection for each pair "
            "of neighbours",
            *path, "connections" if g.connections else "name",
        )  # fmt: skip
        return None


def _key(node: Any) -> tuple[Any, ...]:
    """Returns the identity of the instance that `node` is, or is in."""
    if node.HasField("graph"):
        return "graph", node.graph.graph_descriptor, node.graph.graph_id
    return "mesh", node.mesh.mesh_descriptor, node.mesh.mesh_id


def wires(one: Link, count: int) -> Link:
    """Returns `count` channels as one link."""
    if count == 1:
        return one
    return Link(f"{count} x {one.name}", one.latency_s, count * one.bytes_per_s)


def _level_names(count: int) -> tuple[str, ...]:
    return tuple("zyx"[-count:]) if count <= 3 else tuple(f"d{i}" for i in range(count))


def cards_of(device: str, dims: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """Returns the cards of a mesh of a known shape; () for an unknown one."""
    return CARDS.get((device, tuple(dims)), ())
