"""FLOPs of one device, and sums over the nodes that a graph runs.

>>> from tessera.core.layout import parse_type
>>> from tessera.core.mesh import Mesh
>>> from tessera.ir.graph.build import Builder
>>> mesh = Mesh(["dp", "tp"], devices=range(8), shape=(2, 4))
>>> b = Builder("step")
>>> x, w = (b.input(parse_type(t, mesh)) for t in ("f32[512@dp, 64]", "f32[64, 256]"))
>>> graph = b.graph([b("contract", x, w, index="a b, b c -> a c")])
>>> graph.flops, device_flops(graph)
(16777216, 8388608)
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

from ..core.layout import Factor, TensorType
from ..ir.graph.node import Graph, Node
from ..ops.control import iterations


def counted(graph: Graph, of: Callable[[Node], int]) -> int:
    """Returns the sum of `of(node)` over one run of `graph`: a loop's body counts once for each
    iteration, of two branches the larger one counts."""
    total = 0
    for n in graph.nodes:
        if n.op == "scan":
            total += iterations(n.attrs["length"]) * counted(n.attrs["body"], of)
        elif n.op == "cond":
            total += max(counted(n.attrs[branch], of) for branch in ("yes", "no"))
        elif n.op != "input":
            total += of(n)
    return total


def device_flops(graph: Graph) -> int:
    """Returns the floating-point operations of one device in one run; replicated work counts on
    each device."""
    return counted(graph, on_a_device)


def on_a_device(n: Node) -> int:
    """Returns the floating-point operations of one device in `n`."""
    return n.kind.flops(tuple(map(_block, n.ins)), tuple(map(_block, n.types)), n.attrs)


@lru_cache(maxsize=4096)
def _block(t: TensorType) -> TensorType:
    """Returns the block of `t` on one device, as the type of a whole tensor."""
    return TensorType(t.dtype, ((Factor(size),) for size in t.local_shape))
