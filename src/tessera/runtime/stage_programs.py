"""The compiled programs of a pipeline's stages. They are the same in every recording and in every
schedule that cuts alike, so they are kept by what they compute."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ..core.mesh import Mesh
from ..ir.graph.node import Graph

Program = Callable[..., list[Any]]
MOST = 128
_programs: dict[object, Program] = {}


def kept(
    graph: Graph, mesh: Mesh | None, order: str, aliases: Mapping[int, int],
    make: Callable[[], Program],
) -> Program:  # fmt: skip
    """The program that `make` gives for `graph`, or one that it gave before for the same; of the
    last 128. `aliases` are the arguments whose memory its results take."""
    key = _key(graph, mesh, order, aliases)
    if key is None:
        return make()
    found = _programs.pop(key, None) or make()
    _programs[key] = found  # the last used comes last
    if len(_programs) > MOST:
        _programs.pop(next(iter(_programs)))
    return found


def forget() -> None:
    """Lets go of all of them; pipelines that run go on with theirs."""
    _programs.clear()


def _key(graph: Graph, mesh: Mesh | None, order: str, aliases: Mapping[int, int]) -> object:
    """Graphs that compute the same have the same; None where that cannot be said."""
    place = {n: i for i, n in enumerate(graph.nodes)}
    nodes = tuple(
        (
            n.op,
            tuple(place[a] for a in n.args),
            n.types,
            # As text 0.0 and -0.0 differ.
            tuple(
                (k, repr(v) if isinstance(v, float) else v)
                for k, v in n.attrs.items()
                if n.op != "input"
            ),
        )
        for n in graph.nodes
    )
    ends = tuple(place[n] for n in (*graph.inputs, *graph.outputs)), len(graph.inputs)
    key = (mesh, order, tuple(aliases.items()), graph.options, nodes, ends)
    try:
        hash(key)
    except TypeError:
        return None
    return key
