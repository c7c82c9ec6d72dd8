"""The compiled programs of a pipeline's stages. They are the same in every recording and in every
schedule that cuts alike, so they are kept by what they compute."""

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
    """The program that `make` gives for `graph`, or one that it gave before for the same; of the
    last 128. `aliases` are the arguments whose memory its results take."""
    if graph.key is None:
        return make()
    key = mesh, under, tuple(aliases.items()), graph.key
    found = _programs.pop(key, None) or make()
    _programs[key] = found  # the last used comes last
    if len(_programs) > MOST:
        _programs.pop(next(iter(_programs)))
    return found


def forget() -> None:
    """Lets go of all of them; pipelines that run go on with theirs."""
    _programs.clear()
