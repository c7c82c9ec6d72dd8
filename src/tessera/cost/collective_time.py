"""Time of one collective between many devices, from one group of them, by closed forms.

The tables of rounds (cost/collectives.py) name every transfer; here a group is known by the number
of units that it spans on each level of links, so that thousands of devices cost as much as eight.
The engine's collective is a ring through all units, on whose ports the bytes flow at the same time:
the slowest level decides (NCCL's rings use every network card of a host). A sum may also take a
tree, with fewer hops between units. Named algorithms, and wires other than a switch, are priced by
their tables.

>>> from tessera.core.topology import cluster
>>> two_hosts = cluster("h100").of(2)
>>> one = collective_time("all_reduce", 2**30, [range(16)], two_hosts)
>>> f"{one.time_s * 1e3:.2f} ms", one.levels
('5.15 ms', (0, 1))
>>> across = collective_time("all_reduce", 2**30, [[i, i + 8] for i in range(8)], two_hosts)
>>> f"{across.time_s * 1e3:.1f} ms", across.levels
('21.5 ms', (0,))
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from ..core.topology import Topology
from ..ir.schedule.algorithms.build import MOST_RANKS, named
from ..ir.schedule.algorithms.table import COLLECTIVES
from .collectives import price

TABLED = 2048  # most ranks of all groups together for which a table is priced with its contention
TREE = 0.9  # part of a ring's bandwidth that NCCL's trees reach (tuning.cc)
# NCCL's protocols as (part of the bandwidth, seconds of a hop by the kind of link), from the same
# tuner: "simple", whose latencies the described links have, LL128 and LL. The fastest is taken.
PROTOCOLS: tuple[tuple[float, dict[str, float]], ...] = (
    (1.0, {}),
    (0.92, {"nvlink": 1.9e-6, "pcie": 2.5e-6, "infiniband": 4.0e-6}),
    (0.25, {"nvlink": 0.47e-6, "pcie": 1.0e-6, "infiniband": 2.7e-6}),
)


@dataclass(frozen=True, slots=True)
class CollectiveTime:
    """The seconds of a collective, and the levels of links that it uses, outermost first."""

    time_s: float
    levels: tuple[int, ...]


def collective_time(
    op: str,
    size_bytes: float,
    groups: Sequence[Sequence[int]],
    topology: Topology,
    algorithm: str = "engine",
) -> CollectiveTime:
    """Returns the time of the collective `op` of a rank's whole tensor of `size_bytes` in the first
    of `groups`, which all run it at the same time. Raises UsageError if the topology is too small.
    """
    group = groups[0]
    units = _units(topology, tuple(group))
    used = [i for i in range(len(units) - 1) if units[i + 1] > units[i]]
    if not used:
        return CollectiveTime(0.0, ())
    n = len(group)
    switched = all(topology.levels[i].wiring == "all" for i in used)
    if (algorithm != "engine" or not switched) and op in COLLECTIVES and n <= MOST_RANKS:
        those = groups if n * len(groups) <= TABLED else [group]
        time_s = price(named(op, algorithm, n), topology, those).time_s(size_bytes)
    else:
        time_s = min(
            _closed(op, size_bytes, topology, units, used, n * len(groups), part, hops)
            for part, hops in PROTOCOLS
        )
    return CollectiveTime(time_s, tuple(used))


@lru_cache(maxsize=256)
def _units(topology: Topology, group: tuple[int, ...]) -> list[int]:
    """Returns the number of units that the group spans: of the whole (1), and on each level."""
    places = [topology.coords(d) for d in group]
    return [len({p[:i] for p in places}) for i in range(len(topology.levels) + 1)]


def _closed(
    op: str, size: float, topology: Topology, units: list[int], used: list[int], devices: int,
    part: float, hop_s: Mapping[str, float],
) -> float:  # fmt: skip
    """Returns the time by the protocol that reaches `part` of the bandwidth, with other latencies
    of a hop for the kinds of links in `hop_s`."""
    n = units[-1]
    passes = 2 if op == "all_reduce" else 1
    load_s = ring_s = tree_s = 0.0
    for i in used:
        level, outer, inner = topology.levels[i], units[i], units[i + 1]
        link, members = level.link, n / inner
        latency_s = hop_s.get(link.name.partition(" ")[0], link.latency_s)
        if op == "all_to_all":  # each device sends its own rows to those of other units
            moved, hops = size * (1 / outer - 1 / inner), n / outer - n / inner
        else:
            moved, hops = passes * size * (n - 1) / n / members, passes * (inner - outer)
        if level.shared:  # one port for all devices of a unit, of all groups
            moved *= min(devices, math.prod(topology.shape[i + 1 :]))
        load_s = max(load_s, moved / (part * link.bytes_per_s))
        ring_s += hops * latency_s
        # A tree between the outermost units, a chain inside of each.
        steps = math.ceil(math.log2(inner)) if i == used[0] else inner / outer - 1
        tree_s += passes * steps * latency_s
    if op in ("permute", "broadcast"):
        return topology.levels[used[0]].link.latency_s + load_s * n / (n - 1)
    if op in ("all_reduce", "reduce_scatter"):  # additions keep up with the bytes, or decide
        load_s = max(load_s, size * (n - 1) / n / topology.add_bytes_per_s)
    if op == "all_reduce":
        return min(ring_s + load_s, tree_s + load_s * n / (n - 1) / TREE)
    return ring_s + load_s
