"""Which machine is it, by the names that TT-NN has for its own?"""

from __future__ import annotations

from typing import Any

from .configs import words
from .system import system

ClusterType = words("ClusterType", "INVALID N150 N300 T3K GALAXY CUSTOM")
_BY_SHAPE: dict[tuple[int, ...], str] = {
    (1, 1): "N150",
    (1, 2): "N300",
    (2, 4): "T3K",
    (8, 4): "GALAXY",
}


def get_cluster_type() -> Any:
    """The machine that has the system's grid of devices; CUSTOM for another grid."""
    return ClusterType[_BY_SHAPE.get(tuple(system().shape), "CUSTOM")]
