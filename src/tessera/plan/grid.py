"""The meshes of a search that share the steps of one recording, with bounds for each."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..core.mesh import Mesh
from ..ir.schedule.schedule import Schedule
from .candidates import Candidate

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Point:
    """The axes of a mesh in their order, with sizes, and the number of microbatches."""

    axes: tuple[tuple[str, int], ...]
    microbatches: int

    @property
    def staged(self) -> bool:
        return dict(self.axes).get("pp", 1) > 1

    def mesh(self, kind: Candidate) -> Mesh:
        """Returns its mesh, with the axes of the recording of `kind` that it lacks, of size 1."""
        sizes = {**dict(self.axes), **{a: 1 for a, _ in kind.axes if a not in dict(self.axes)}}
        return Mesh(tuple(sizes), shape=sizes)


@dataclass(frozen=True, slots=True)
class Grid:
    """The points of a kind, with lower bounds of time, and of memory for each stage of ZeRO."""

    points: list[Point]
    least_s: Floats
    least_bytes: dict[int, Floats]


def divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]


def orders(point: Mapping[str, int]) -> list[tuple[str, ...]]:
    """The orders of the axes that are longer than 1, "dp" always among them."""
    used = [a for a in ("pp", "dp", "ep", "cp", "tp") if point[a] > 1 or a == "dp"]
    return list(itertools.permutations(used))


def divides(schedule: Schedule, point: Mapping[str, int]) -> bool:
    """Returns whether the sizes divide the dims of the arguments that they split."""
    for b in schedule.inputs:
        t = schedule.buffers[b]
        for dim in t.dims:
            for f in dim:
                used = [a for a in f.axes if a not in t.rest_axes]
                parts = math.prod(point[a] for a in used)
                parts *= point["mb"] if "dp" in used else 1
                if f.size % parts:
                    return False
    return True
