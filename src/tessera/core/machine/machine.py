"""`Machine`: levels of devices and links, the hosts of the devices, and the mesh over them.

>>> from tessera.core.machine.presets import preset
>>> t3000 = preset("t3000")
>>> t3000.size, t3000.shape, t3000.host_of(7)
(8, (2, 4), 0)
>>> t3000.mesh().text(), t3000.mesh(("dp", "tp")).text()
('y=2 x=4', 'dp=2 tp=4')
>>> t3000.part((0, 1)).shape
(2, 2)
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ..checks import instance, sizes
from ..errors import MeshError
from ..mesh import Mesh
from ..mesh_input import Shape, checked_axes, times
from ..topology import Level, Topology
from .chip import Chip

# Each device takes memory here; a larger number in a file is taken as a mistake.
MOST_DEVICES = 2**20


@dataclass(frozen=True, slots=True)
class Machine:
    """Devices of one kind, wired as in `topology` and numbered row-major over its levels.

    - `axes` names each level, `hosts` has the number of hosts along each level.
    - `cards`: the devices behind each id of `TT_VISIBLE_DEVICES`; empty if an id is a device.
    - `express`: pairs of devices of a mesh (of each) with an extra wire; drawn, and not priced.
    - `sources`: sources of the figures. `notes`: facts that the figures leave out.
    - `chip`: the rates of a device; None if nothing is known about them.
    """

    device: str
    topology: Topology
    axes: tuple[str, ...]
    hosts: tuple[int, ...]
    cards: tuple[tuple[int, ...], ...] = ()
    express: tuple[tuple[int, int], ...] = ()
    sources: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    chip: Chip | None = None

    def __post_init__(self) -> None:
        instance("Machine", "topology", self.topology, Topology, "give a Topology", MeshError)
        axes = checked_axes(self.axes)
        cut = sizes("Machine: hosts", self.hosts)
        fits = len(cut) == len(axes) == len(self.shape) and all(
            h and n % h == 0 for h, n in zip(cut, self.shape)
        )
        if not fits:
            raise MeshError(
                "Machine: hosts do not divide the levels",
                levels=times(self.shape),
                axes=axes,
                hosts=times(cut),
                fix="give for each level a name, and a number of hosts that divides its size",
            )

    @property
    def name(self) -> str:
        return self.topology.name

    @property
    def shape(self) -> tuple[int, ...]:
        """The size of each level, outermost first."""
        return self.topology.shape

    @property
    def size(self) -> int:
        """The number of devices."""
        return self.topology.size

    @property
    def host_count(self) -> int:
        return math.prod(self.hosts)

    def host_of(self, device: int) -> int:
        """Returns the host of `device`; hosts are numbered row-major. Raises UsageError if there is
        no such device."""
        at = 0
        for place, size, hosts in zip(self.topology.coords(device), self.shape, self.hosts):
            at = at * hosts + place // (size // hosts)
        return at

    def mesh(self, axes: Sequence[str] | None = None, shape: Shape = None) -> Mesh:
        """Returns a mesh over all devices, with the links of this machine.

        `axes` renames the levels; a single name covers all devices. With `shape` the number of axes
        is free. Raises MeshError if they do not fit.
        """
        names = self.axes if axes is None else checked_axes(axes)
        if shape is None and len(names) not in (1, len(self.shape)):
            raise MeshError(
                f"{self.name}: {len(names)} axes for {len(self.shape)} levels of links",
                axes=names,
                levels=times(self.shape),
                fix=f"name one axis a level, as {self.axes}, or give shape= with a product of "
                f"{self.size}",
            )
        if shape is None:
            shape = self.shape if len(names) == len(self.shape) else (self.size,)
        return Mesh(names, range(self.size), shape).wired(self.topology)

    def of(self, *sizes: int) -> Machine:
        """Returns the same machine with the outermost levels of other `sizes`, and hosts as large
        as here.

        Raises MeshError if a size is not a whole number of hosts, or if there are too many devices.
        """
        topology = self.topology.of(*sizes)
        if topology.size > MOST_DEVICES:
            raise MeshError(
                f"{self.name}: {times(topology.shape)} are more than {MOST_DEVICES:,} devices",
                fix="give smaller sizes",
            )
        each = [n // h for n, h in zip(self.shape, self.hosts)]
        odd = [n for n, one in zip(topology.shape, each) if n % one and n > one]
        if odd:
            raise MeshError(
                f"{self.name}: {times(topology.shape)} is no whole number of hosts",
                host=times(each),
                fix="give multiples of a host's sizes",
            )
        hosts = tuple(max(n // one, 1) for n, one in zip(topology.shape, each))
        return replace(self, topology=topology, hosts=hosts, cards=(), express=())

    def behind(self, ids: Sequence[int]) -> tuple[int, ...]:
        """Returns the devices that `ids` of `TT_VISIBLE_DEVICES` show: those of a card, or one
        each."""
        if not self.cards:
            return tuple(ids)
        return tuple(sorted(itertools.chain.from_iterable(self.cards[i] for i in ids)))

    def part(self, ids: Sequence[int]) -> Machine:
        """Returns the machine of the devices that `ids` show, numbered from 0. Raises MeshError if
        they are not a box of neighbours, since they form no mesh then."""
        behind = self.behind(ids)
        places = [self.topology.coords(d) for d in behind]
        along = [sorted({p[i] for p in places}) for i in range(len(self.shape))]
        together = all(
            level.wiring in ("all", "pairs") or c[-1] - c[0] == len(c) - 1
            for level, c in zip(self.topology.levels, along)
        )
        if math.prod(map(len, along)) != len(behind) or not together:
            raise MeshError(
                f"{self.name}: the visible devices are no box of the {times(self.shape)} mesh",
                visible=",".join(map(str, ids)),
                devices=list(behind),
                fix="show devices that are neighbours and fill a box",
            )
        levels = tuple(_shorter(level, len(c)) for level, c in zip(self.topology.levels, along))
        new = {d: i for i, d in enumerate(behind)}
        return replace(
            self,
            topology=replace(self.topology, levels=levels),
            hosts=tuple(
                len({c // (n // h) for c in at}) for at, n, h in zip(along, self.shape, self.hosts)
            ),
            cards=tuple(tuple(new[d] for d in self.cards[i]) for i in ids) if self.cards else (),
            express=tuple((new[a], new[b]) for a, b in self.express if a in new and b in new)
            if not any(level.shared for level in levels)
            else (),
        )


def _shorter(level: Level, size: int) -> Level:
    """Returns a level of fewer units; a part of a ring is a line."""
    if size == level.size:
        return level
    return replace(level, size=size, wiring="line" if level.wiring == "ring" else level.wiring)
