"""Which bytes will cross a wire, and whose line asks for them? `TESSERA_COMM_TRACE=1` prints it.

>>> from tessera.ir.graph.text import parse
>>> print(*trace_lines(parse('''graph step  v1  mesh dp=2 tp=4
...   %0 = input "w"                      : f32[8, 8@tp] +dp
...   %1 = all_reduce %0 axes=("dp",)     : f32[8, 8@tp]  # train.py:31  grad
...   %2 = all_gather %1 axes=("tp",) dim=1  : f32[8, 8]     # train.py:32
...   return %2''')), sep="\\n")
step: all_reduce  dp  receives  64 B  : f32[8, 8@tp]  # train.py:31  grad
step: all_gather  tp  receives 192 B  : f32[8, 8]     # train.py:32
"""

from __future__ import annotations

from collections.abc import Sequence

from .node import Graph, need_graph
from .text import size_text


def trace_lines(graph: Graph) -> list[str]:
    """One line of text for each collective of `graph`, in program order.

    A line has the kind, the mesh axes, the bytes that one device receives each time, how many times
    it runs in a loop, the type of the result, the user's line, the scope, and why Tessera inserted
    it (nothing if the user wrote it).
    """
    rows = []
    for node, times in need_graph("comm_trace", graph).collectives():
        size = size_text(node.wire_bytes)
        why = "  ".join(filter(None, (node.loc, node.scope, node.note and f"inserted {node.note}")))
        rows.append((
            node.op,
            ",".join(node.attrs["axes"]),
            size if times == 1 else f"{times} x {size}",
            str(node.type),
            f"# {why}" if why else "",
        ))  # fmt: skip
    width = [max((len(row[i]) for row in rows), default=0) for i in range(4)]
    return [_line(graph.name, row, width) for row in rows]


def _line(name: str, row: Sequence[str], width: Sequence[int]) -> str:
    kind, axes, size, made, why = row
    text = (
        f"{name}: {kind:<{width[0]}}  {axes:<{width[1]}}  receives {size:>{width[2]}}"
        f"  : {made:<{width[3]}}  {why}"
    )
    return text.rstrip()
