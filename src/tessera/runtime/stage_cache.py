"""Compiled programs of pipeline stages, cached by graph.

They are the same in every recording, and in every schedule with the same stages.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ..core.mesh import Mesh
from ..core.options import ProgramOptions
from ..ir.graph.node import Graph

Program = Callable[..., list[Any]]
MOST = 128
_programs: dict[object, Program] = {}


def kept(
    graph: Graph, mesh: Mesh | None, under: ProgramOptions, aliases: Mapping[int, int],
    make: Callable[[], Program],
) -> Program:  # fmt: skip
    """Returns the program that `make` makes for `graph`, or the cached one of an equal graph; the
    last 128 are kept. `aliases` maps donated arguments to results."""
    if graph.key is None:
        return make()
    key = mesh, under, tuple(aliases.items()), graph.key
    found = _programs.pop(key, None) or make()
    _programs[key] = found  # the last used comes last
    if len(_programs) > MOST:
        _programs.pop(next(iter(_programs)))
    return found


def forget() -> None:
    """Clears the cache; running pipelines keep their programs."""
    _programs.clear()
