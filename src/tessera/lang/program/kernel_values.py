"""Values and sizes of kernels that are written in Python."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...core.checks import NamedSize
from ...core.layout import plain
from ...ir.tile.body import Statement
from ...ir.tile.index import Index, Test
from ...ir.tile.op import Type
from ..value.tensor import Tensor, Trace

EXPRESSIONS = {
    "add": "({})+({})", "sub": "({})-({})", "mul": "({})*({})", "floordiv": "({})//({})",
    "mod": "({})%({})", "neg": "-({})", "lt": "({})<({})", "le": "({})<=({})", "gt": "({})>({})",
    "ge": "({})>=({})", "eq": "({})==({})", "ne": "({})!=({})", "logical_and": "({}) and ({})",
    "maximum": "max({}, {})", "minimum": "min({}, {})", "logical_or": "({}) or ({})",
    "logical_not": "not ({})",
}  # fmt: skip


class Size(NamedSize):
    """A size of a kernel: its number at the recorded sizes, with the expression that has it."""

    text: str

    def __new__(cls, number: int, text: str) -> Size:
        made = super().__new__(cls, number)
        made.text = text
        return made


def _size_operator(name: str, form: str) -> None:
    compute = getattr(int, f"__{name}__")

    def left(x: int, y: object) -> Any:
        if isinstance(y, bool) or not isinstance(y, int):
            return NotImplemented
        return Size(compute(x, y), Index(form.format(size_text(x), size_text(y))).text)

    setattr(Size, f"__{name}__", left)
    setattr(Size, f"__r{name}__", lambda y, x: left(x, y) if isinstance(x, int) else NotImplemented)


for _name in ("add", "sub", "mul", "floordiv", "mod"):
    _size_operator(_name, EXPRESSIONS[_name])


def size_text(n: int) -> str:
    """The expression of a size, or the digits of another number."""
    return n.text if isinstance(n, Size) else str(int(n))


class Value(Tensor):
    """A value of a kernel, made in `block`. `text` is its name there, such as `%3`, or a number.

    `known` is the expression of an index or a condition; `parts` the (op, values) that a condition
    was made of; `turned` the value of which this is the transpose.
    """

    def __init__(self, trace: Trace, block: list[Statement], type: Type, text: str) -> None:
        super().__init__(None, plain(type.dtype, type.shape))
        self._trace, self.block, self.text = trace, block, text
        self.known: Index | Test | None = None
        self.parts: tuple[str, list[Value]] | None = None
        self.turned: Value | None = None

    @property
    def is_number(self) -> bool:
        return bool(self.text) and not self.text.startswith("%")


def shape_text(shape: Sequence[int]) -> str:
    """The expressions of sizes, as in a kernel's text."""
    return ",".join(map(size_text, shape))
