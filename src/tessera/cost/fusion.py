"""Which values of a program get a buffer, once the compiler has fused it?

What is computed element by element is computed where it is read and has no buffer, as long as that
repeats no expensive work. The rules are those of XLA on a CPU, as far as they decide large buffers.
What an op is for them says `memory`, in its own value (ops/op.py).
"""

from __future__ import annotations

from ..ir.graph.node import Node
from .program import Program


def buffered(program: Program) -> list[Node]:
    """The nodes of `program` whose values get a buffer, in order."""
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
        """Whether `n` is kept rather than computed again for each reader."""
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
        """Whether `n` is made of a convolution's result, which comes in another order of dims."""
        known = self._conv.get(n)
        if known is None:
            cheap = n.kind.memory in ("view", "cheap")
            args = self.program.args.get(n, ())
            known = n.kind.memory == "conv" or (cheap and any(map(self._of_conv, args)))
            self._conv[n] = known
        return known


WINDOW = 32  # elements of a dim that are reduced at once; more are in windows, out of a buffer


def _fuses_into(n: Node, reader: Node) -> bool:
    """Whether `reader` computes `n` by itself: element by element. A product does so with what is
    made of nothing, and reads an operand in another order of its dims."""
    match reader.kind.memory:
        case "product":
            return n.kind.memory in ("created", "transposed")
        case "reduced":
            size = reader.args[0].type.local_shape
            return all(size[d] <= WINDOW for d in reader.attrs["dims"])
    return reader.kind.fuses
