"""Wiring of devices: levels of links, each with a latency and a bandwidth, as data; known clusters.

Devices are numbered row-major over the levels, outermost first: on four hosts of eight, device 11
is the fourth of the second host. A message goes to its destination's coordinate on the outermost
level first, then inwards, a level at a time.

>>> cluster = CLUSTERS["h100"].of(2)
>>> print(cluster)
h100, 16 devices: 2 all (infiniband 400G, 9.6 µs, 50 GB/s) x 8 all (nvlink 4, 3.4 µs, 450 GB/s)
>>> [str(port) for port in cluster.route(3, 12)]
['infiniband 400G out of 3', 'infiniband 400G into 11', 'nvlink 4 out of 11', 'nvlink 4 into 12']
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Annotated, Literal, get_args

from .checks import unfit
from .declared import Count, Flag, Given, OneOf, Positive, Rate, Scale
from .errors import UsageError
from .public import checked

Wiring = Literal["all", "ring", "line", "pairs"]
# Sets a field of a frozen dataclass to its checked value.
_set = object.__setattr__


@checked
@dataclass(frozen=True, slots=True)
class Link:
    """A class of links: α, the seconds of a message besides its bytes; bytes/s each way."""

    name: str
    latency_s: Rate
    bytes_per_s: Scale


@checked
@dataclass(frozen=True, slots=True)
class Level:
    """`size` units joined by `link`: all to a switch, in a ring, in a line, or each pair by a wire.

    A unit is everything inside of this level. On a switch each device has its own port; wires join
    the devices at the same place of both units. With `shared`, all devices of a unit share its port
    or its wire (a host with one network card).
    """

    size: Count
    link: Annotated[Link, Given('give Link("wire", 1e-6, 50e9)')]
    wiring: Annotated[Wiring, OneOf(*get_args(Wiring))] = "all"
    shared: Flag = False

    def __str__(self) -> str:
        link = self.link
        one = "port a unit" if self.wiring == "all" else "wire for all devices of a unit"
        shared = f", one {one}" if self.shared else ""
        return (
            f"{self.size} {self.wiring} ({link.name}, {link.latency_s * 1e6:.1f} µs, "
            f"{link.bytes_per_s / 1e9:g} GB/s{shared})"
        )


@dataclass(frozen=True, slots=True)
class Port:
    """One direction of one wire, which a message occupies; messages share its bandwidth.

    `place` is its identity within the topology.
    """

    link: Link
    place: tuple[int, ...]
    text: str
    # 0 for the second port of a hop over a switch, so that the link's latency counts once.
    latency_s: float

    def __str__(self) -> str:
        return self.text


@checked
@dataclass(frozen=True, slots=True)
class Topology:
    """`levels` of links, outermost first. `add_bytes_per_s` is the speed of additions on a device
    (1 / γ)."""

    name: str
    levels: tuple[Level, ...]
    add_bytes_per_s: Positive = math.inf

    def __post_init__(self) -> None:
        who, given = f"Topology {self.name!r}", self.levels
        levels = tuple(given) if isinstance(given, list | tuple) else ()
        if not levels or not all(isinstance(level, Level) for level in levels):
            raise unfit(who, "its levels", given, "give a tuple of Level, outermost first")
        _set(self, "levels", levels)

    @property
    def size(self) -> int:
        """The number of devices."""
        return math.prod(level.size for level in self.levels)

    @property
    def shape(self) -> tuple[int, ...]:
        """The levels' sizes, outermost first."""
        return tuple(level.size for level in self.levels)

    def of(self, *sizes: int) -> Topology:
        """Returns the same wiring with the outermost levels of other `sizes`."""
        if not 0 < len(sizes) <= len(self.levels):
            raise UsageError(
                f"Topology {self.name!r}: {len(sizes)} sizes for {len(self.levels)} levels",
                topology=self,
                fix="give at least one size and at most one a level, outermost first",
            )
        levels = [replace(level, size=s) for level, s in zip(self.levels, sizes)]
        return replace(self, levels=(*levels, *self.levels[len(sizes) :]))

    def coords(self, device: int) -> tuple[int, ...]:
        """Returns the coordinates of `device`, level by level. Raises UsageError if there is no
        such device."""
        if not 0 <= device < self.size:
            raise UsageError(
                f"topology: there is no device {device}",
                topology=self,
                fix=f"name one from 0 to {self.size - 1}, or describe a larger cluster",
            )
        found: list[int] = []
        for size in reversed(self.shape):
            device, here = divmod(device, size)
            found.append(here)
        return tuple(reversed(found))

    def device(self, coords: Sequence[int]) -> int:
        """Returns the device at `coords`."""
        at = 0
        for c, size in zip(coords, self.shape):
            at = at * size + c
        return at

    def route(self, src: int, dst: int) -> tuple[Port, ...]:
        """Returns the ports that a message from `src` to `dst` passes, in order."""
        return _route(self, src, dst)

    def __str__(self) -> str:
        return f"{self.name}, {self.size} devices: {' x '.join(map(str, self.levels))}"


@lru_cache(maxsize=65536)
def _route(topology: Topology, src: int, dst: int) -> tuple[Port, ...]:
    at, goal = list(topology.coords(src)), topology.coords(dst)
    found: list[Port] = []
    for i, level in enumerate(topology.levels):
        while at[i] != goal[i]:
            here = tuple(at)
            at[i] = _next(level, at[i], goal[i])
            found.extend(_ports(topology, i, here, tuple(at)))
    return tuple(found)


def _next(level: Level, at: int, goal: int) -> int:
    """Returns the next coordinate: the goal itself, the next along a line, or the shorter way round
    a ring."""
    if level.wiring in ("all", "pairs"):
        return goal
    if level.wiring == "ring":
        ahead = (goal - at) % level.size
        return (at + (1 if ahead <= level.size // 2 else -1)) % level.size
    return at + (1 if goal > at else -1)


def _ports(topology: Topology, i: int, src: tuple[int, ...], dst: tuple[int, ...]) -> list[Port]:
    """Returns the ports of one hop on level i: a wire between neighbours, or out of one unit and
    into another."""
    level = topology.levels[i]
    a, b = topology.device(src), topology.device(dst)
    link, unit = level.link, ""
    if level.shared:
        inside = math.prod(topology.shape[i + 1 :])
        a, b, unit = a // inside, b // inside, "unit "
    if level.wiring != "all":
        text = f"{link.name} from {unit}{a} to {unit}{b}"
        return [Port(link, (i, a, b), text, link.latency_s)]
    return [
        Port(link, (i, a, 0), f"{link.name} out of {unit}{a}", link.latency_s),
        Port(link, (i, b, 1), f"{link.name} into {unit}{b}", 0.0),
    ]


# ---- clusters ----------------------------------------------------------------------------------
# Bandwidths are the makers' figures, one direction of one device. Latencies of NVLink, PCIe and
# InfiniBand are the per-step figures that NCCL 2.1x's tuner holds for its ring and simple protocol;
# those of Ethernet, of wires between accelerator chips and of the virtual devices are estimates.
# Measure your own before you trust a choice that is close.
NVLINK_5 = Link("nvlink 5", 3.4e-6, 900e9)
NVLINK_4 = Link("nvlink 4", 3.4e-6, 450e9)
NVLINK_3 = Link("nvlink 3", 3.4e-6, 300e9)
PCIE_4 = Link("pcie 4 x16", 5.7e-6, 32e9)
INFINIBAND_400 = Link("infiniband 400G", 9.6e-6, 50e9)
INFINIBAND_200 = Link("infiniband 200G", 9.6e-6, 25e9)
ETHERNET_100 = Link("ethernet 100G", 30e-6, 12.5e9)
TWO_WIRES = Link("2 x chip ethernet 100G", 1e-6, 25e9)
ONE_WIRE = Link("chip ethernet 100G", 1e-6, 12.5e9)
FOUR_WIRES = Link("4 x chip ethernet 100G", 1e-6, 50e9)
ICI_V4 = Link("ici v4", 1e-6, 50e9)
ICI_V5P = Link("ici v5p", 1e-6, 100e9)
MEMORY = Link("memory", 20e-6, 5e9)

CLUSTERS: dict[str, Topology] = {
    t.name: t
    for t in (
        Topology("h100", (Level(4, INFINIBAND_400), Level(8, NVLINK_4)), 1000e9),
        Topology("a100", (Level(4, INFINIBAND_200), Level(8, NVLINK_3)), 600e9),
        Topology("pcie", (Level(4, ETHERNET_100, shared=True), Level(4, PCIE_4)), 300e9),
        Topology("tpu_v4", (Level(4, ICI_V4, "ring"),) * 3, 400e9),
        Topology("quietbox", (Level(2, TWO_WIRES, "line"), Level(4, TWO_WIRES, "line")), 90e9),
        Topology("galaxy", (Level(8, FOUR_WIRES, "line"), Level(4, FOUR_WIRES, "line")), 90e9),
        Topology("virtual", (Level(8, MEMORY),), 5e9),
        # Machines as they are sold (core/machine/presets.py has their sources).
        Topology("n300", (Level(1, ONE_WIRE, "line"), Level(2, ONE_WIRE, "line")), 90e9),
        Topology("t3000", (Level(2, TWO_WIRES, "line"), Level(4, TWO_WIRES, "line")), 90e9),
        Topology("dgx_a100", (Level(1, INFINIBAND_200), Level(8, NVLINK_3)), 680e9),
        Topology("dgx_h100", (Level(1, INFINIBAND_400), Level(8, NVLINK_4)), 1100e9),
        Topology("dgx_h200", (Level(1, INFINIBAND_400), Level(8, NVLINK_4)), 1600e9),
        Topology("dgx_b200", (Level(1, INFINIBAND_400), Level(8, NVLINK_5)), 2600e9),
        Topology("gb200_nvl72", (Level(1, INFINIBAND_400), Level(72, NVLINK_5)), 2600e9),
        Topology("tpu_v5p", (Level(4, ICI_V5P, "ring"),) * 3, 920e9),
    )
}


def cluster(name: str | Topology) -> Topology:
    """Returns the described cluster `name`; `.of(hosts)` gives it another size. A Topology is
    returned unchanged.

    >>> cluster("h100").of(16).size
    128
    """
    if isinstance(name, Topology):
        return name
    if not isinstance(name, str) or name not in CLUSTERS:
        raise UsageError(
            f"topology: {name!r} is not described",
            fix=f"name one of {', '.join(CLUSTERS)}, or write a Topology; a mesh's is mesh.links",
        )
    return CLUSTERS[name]


def flat(n: int, link: Link, wiring: Wiring = "all") -> Topology:
    """Returns `n` devices with one class of links.

    >>> flat(4, Link("wire", 1e-6, 1e9), "ring").route(0, 3)[0].text
    'wire from 0 to 3'
    """
    return Topology(f"{wiring} of {n}", (Level(n, link, wiring),))
