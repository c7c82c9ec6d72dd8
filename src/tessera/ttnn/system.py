"""The system: the grid of all devices that a program may use.

It is the mesh of `TT_MESH_GRAPH_DESC_PATH`, of several that of `TT_MESH_ID`, of which
`TT_VISIBLE_DEVICES` may leave a part. Without one it is a grid of this program's devices, or of
those of the ranks that have this one's mesh: 8 are a QuietBox, 2 x 4, 32 a Galaxy, 8 x 4. On CPUs
devices are virtual: before the first one runs the system grows to the size that is asked for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..core import environment, flags
from ..core.devices import device_count, process_count
from ..core.machine.machine import Machine
from ..core.machine.share import descriptor_path, mesh_id, mesh_ranks
from ..core.machine.visible import narrowed, visible_count, visible_share
from ..core.mesh_input import balanced
from .shapes import MeshShape

_SHAPES = {1: (1, 1), 2: (1, 2), 4: (2, 2), 8: (2, 4), 32: (8, 4)}  # as the systems are built
Grid = np.ndarray[Any, Any]


@dataclass(frozen=True)
class System:
    """All devices that this process may use, as the grid in which they are wired. `places` are the
    numbers that the program has for them, which goes over all meshes of its ranks."""

    ids: Grid
    machine: Machine | None
    places: Sequence[int]

    @property
    def shape(self) -> MeshShape:
        return MeshShape(self.ids.shape)

    @property
    def pcie_ids(self) -> list[int]:
        """The devices that the host reaches itself; the others are behind them."""
        cards = self.machine.cards if self.machine else ()
        return [card[0] for card in cards] or self.ids.ravel().tolist()


def system(needed: int = 1) -> System:
    """The system, of at least `needed` devices where it can grow."""
    path, mine, ranks = descriptor_path(), visible_share(), mesh_ranks()
    if mine is not None:
        return _grid(mine.machine, mine.ids)
    if path:
        from ..core.machine.load import load  # its parsers are slow to import
        from ..core.machine.mesh_ids import ONLY

        machine = narrowed(load(path, ONLY if ranks is None else mesh_id()))
        return _grid(machine, range(machine.size))
    if ranks is not None:
        each = device_count() // process_count()
        return _grid(None, [r * each + k for r in ranks for k in range(each)])
    if flags.engine_runs():
        count = device_count()
    else:
        own = environment.number(environment.DEVICES, 8)
        grown = next((n for n in sorted(_SHAPES) if n >= needed), needed)
        count = visible_count(own) or max(own, grown if needed > own else 0)
    return _grid(None, range(count))


def _grid(machine: Machine | None, places: Sequence[int]) -> System:
    count = len(places)
    if machine is None:
        shape = _SHAPES.get(count) or balanced(count, 2)
    else:
        shape = machine.shape if len(machine.shape) > 1 else (1, count)
    return System(np.arange(count).reshape(shape), machine, places)


def line(grid: Grid) -> Grid:
    """The devices of a grid in a line, each beside the next: every other row backwards."""
    rows = grid.reshape(-1, grid.shape[-1])
    return np.concatenate([r[::-1] if i % 2 else r for i, r in enumerate(rows)])


def folded(ids: Grid, shape: Sequence[int]) -> Grid:
    """The grid of `shape` whose `line` is `ids`."""
    rows = ids.reshape(-1, shape[-1]).copy()
    rows[1::2] = rows[1::2, ::-1]
    return rows.reshape(shape)
