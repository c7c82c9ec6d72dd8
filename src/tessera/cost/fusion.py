"""Buffers after the compiler's fusion: the values of a program that are stored in memory.

An elementwise value is computed in its readers and has no buffer, unless that repeats expensive
work. The rules are those of XLA on a CPU, as far as they affect large buffers. The attribute
`memory` of an op (ops/op.py) is its class in these rules.
"""

from __future__ import annotations

from ..ir.graph.node import Node
from .program import Program


def buffered(program: Program) -> list[Node]:
    """Returns the nodes of `program` whose values get a buffer, in order."""
    fusion = _Fusion(program)
    return [n for n in program.nodes if fusion.has_buffer(n)]


class _Fusion:
    def __init__(self, program: Program) -> None:
        self.program = program
        self._conv: dict[Node, bool] = {}

    def has_buffer(self, n: Node) -> bool:
        if n.kind.memory == "view":
            return False
        if not n.kind.fuses:
            return True
        readers, is_result = self.program.uses(n)
        if is_result or not all(_fuses_into(n, r) for r in readers):
            return True
        return len(readers) > 1 and self._is_expensive(n)

    def _is_expensive(self, n: Node) -> bool:
        """Returns whether `n` is stored rather than recomputed for each reader."""
        match n.kind.memory:
            case "expensive":
                return True
            case "cheap":
                size = n.type.local_bytes
                as_large = sum(a.type.local_bytes >= size for a in {*self.program.args[n]})
                return as_large > 1 or self._of_conv(n)
            case _:
                return False

    def _of_conv(self, n: Node) -> bool:
        """Returns whether `n` is computed from a convolution's result, which has another order of
        dims."""
        known = self._conv.get(n)
        if known is None:
            cheap = n.kind.memory in ("view", "cheap")
            args = self.program.args.get(n, ())
            known = n.kind.memory == "conv" or (cheap and any(map(self._of_conv, args)))
            self._conv[n] = known
        return known


WINDOW = 32  # largest dim that is reduced at once; a larger one is read in windows from a buffer


def _fuses_into(n: Node, reader: Node) -> bool:
    """Returns whether `reader` computes `n` element by element. A product does so for values
    without operands, and reads a transposed operand in the other order of dims."""
    match reader.kind.memory:
        case "product":
            return n.kind.memory in ("created", "transposed")
        case "reduced":
            size = reader.args[0].type.local_shape
            return all(size[d] <= WINDOW for d in reader.attrs["dims"])
    return reader.kind.fuses
