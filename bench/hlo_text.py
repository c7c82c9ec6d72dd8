"""A reader of compiled HLO text: bytes, matrix products and names of each instruction.

>>> made = read(EXAMPLE)
>>> made["dot.1"].products, made["dot.1"].flops, made["dot.1"].moved_bytes
([Product(batch=1, m=8, k=16, n=4, given='f32', made='f32')], 1024, 896)
>>> made["dot.1"].op_names
['jit(step)/mlp/dot_general']
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

EXAMPLE = """\
HloModule step

ENTRY %main (x: f32[8,16], w: f32[16,4]) -> f32[8,4] {
  %x = f32[8,16]{1,0} parameter(0)
  %w = f32[16,4]{1,0} parameter(1)
  ROOT %dot.1 = f32[8,4]{1,0} dot(%x, %w), lhs_contracting_dims={1}, rhs_contracting_dims={0}, \
metadata={op_name="jit(step)/mlp/dot_general"}
}
"""
BYTES = {"pred": 1, "bf16": 2, "f16": 2, "f32": 4, "f64": 8, "c64": 8, "c128": 16}
# Instructions that only name values, or call others, which are counted themselves.
CONTROL = {
    "parameter", "constant", "tuple", "get-tuple-element", "bitcast", "while", "conditional",
    "call", "after-all", "opt-barrier", "iota", "partition-id", "replica-id",
}  # fmt: skip
SLICES = ("dynamic-slice", "slice", "gather")
MOVES = {
    "copy", "transpose", "reshape", "bitcast", "slice", "dynamic-slice", "dynamic-update-slice",
    "concatenate", "pad", "broadcast", "convert", "reverse", "copy-start", "copy-done",
    "parameter", "constant", "iota", "tuple", "get-tuple-element",
}  # fmt: skip
ARRAY = re.compile(r"([a-z]\w*)\[([\d,]*)\]")
NAME = re.compile(r"%([\w.\-]+)")
LINE = re.compile(r"\s+(?:ROOT )?%([\w.\-]+) = ")
HEAD = re.compile(r"(?:ENTRY )?%([\w.\-]+) \(.*\{\s*$")


class Product(NamedTuple):
    """A matrix product [batch, m, k] by [batch, k, n]: its sizes, and the dtypes of factors and
    result."""

    batch: int
    m: int
    k: int
    n: int
    given: str
    made: str

    @property
    def flops(self) -> int:
        return 2 * self.batch * self.m * self.k * self.n


def arrays(shape: str) -> list[tuple[str, tuple[int, ...]]]:
    """(dtype, sizes) of each array that a shape names.

    >>> arrays("(f32[2,3]{1,0}, s32[])")
    [('f32', (2, 3)), ('s32', ())]
    """
    return [(d, tuple(map(int, n.split(","))) if n else ()) for d, n in ARRAY.findall(shape)]


def nbytes(shape: str) -> int:
    """The bytes of all arrays in a shape's text."""
    return sum(_item(d) * math.prod(n) for d, n in arrays(shape))


def _item(dtype: str) -> int:
    bits = re.search(r"\d+", dtype)
    return BYTES.get(dtype) or max(1, int(bits[0]) // 8 if bits else 1)


@dataclass(eq=False)
class Instruction:
    """One instruction of a computation; `inside` are the instructions of a fusion."""

    name: str
    shape: str
    opcode: str
    operands: list[Instruction]
    attributes: str
    called: str = ""
    inside: list[Instruction] = field(default_factory=list)

    @property
    def op_names(self) -> list[str]:
        """The names of its ops in the traced program, the result's first."""
        texts = (self.attributes, *(i.attributes for i in reversed(self.inside)))
        return [m[1] for text in texts if (m := re.search(r'op_name="([^"]*)"', text))]

    @cached_property
    def products(self) -> list[Product]:
        """The matrix products in it."""
        lines = self.inside if self.opcode == "fusion" else [self]
        return [_product(i) for i in lines if i.opcode == "dot"]

    @property
    def flops(self) -> int:
        return sum(p.flops for p in self.products)

    @property
    def is_move(self) -> bool:
        """Returns whether it computes nothing: only copies, transposes, slices, concatenations,
        casts."""
        lines = self.inside if self.opcode == "fusion" else [self]
        return all(i.opcode in MOVES for i in lines)

    @cached_property
    def moved_bytes(self) -> int:
        """The bytes that it reads and writes; for a sliced operand those of the slice."""
        if self.opcode in CONTROL:
            return 0
        if self.opcode != "fusion":
            return _moved(self)
        last = self.inside[-1]
        ends = [_source(e) for e in (last.operands if last.opcode == "tuple" else [last])]
        updated = [e for e in ends if e.opcode == "dynamic-update-slice"]
        targets = [_source(e.operands[0]) for e in updated]  # written only where they change
        total = sum(nbytes((e.operands[1] if e in updated else e).shape) for e in ends)
        for p in (i for i in self.inside if i.opcode == "parameter" and i not in targets):
            readers = [i for i in self.inside if p in i.operands]
            sliced = all(i.opcode in SLICES for i in readers)
            total += sum(nbytes(i.shape) for i in readers) if sliced else nbytes(p.shape)
        return total


def _moved(i: Instruction) -> int:
    if i.opcode in SLICES:
        return 2 * nbytes(i.shape)
    if i.opcode == "dynamic-update-slice":
        return 2 * nbytes(i.operands[1].shape)
    return nbytes(i.shape) + sum(nbytes(o.shape) for o in i.operands)


def _source(i: Instruction) -> Instruction:
    while i.opcode in ("bitcast", "copy", "reshape") and i.operands:
        i = i.operands[0]
    return i


def _product(i: Instruction) -> Product:
    def dims(what: str) -> tuple[int, ...]:
        found = re.search(rf"{what}={{([\d,]*)}}", i.attributes)
        return tuple(map(int, found[1].split(","))) if found and found[1] else ()

    ((dtype, left),) = arrays(i.operands[0].shape)[:1]
    ((made, out),) = arrays(i.shape)[:1]
    batch = math.prod(left[d] for d in dims("lhs_batch_dims"))
    k = math.prod(left[d] for d in dims("lhs_contracting_dims"))
    m = math.prod(left) // max(1, batch * k)
    return Product(batch, m, k, math.prod(out) // max(1, batch * m), dtype, made)


def read(text: str) -> dict[str, Instruction]:
    """Returns all instructions of a module's text by name, except those inside of fusions."""
    found: dict[str, list[Instruction]] = {}
    body: dict[str, Instruction] = {}
    where = ""
    for line in text.splitlines():
        if head := HEAD.match(line):
            where, body = head[1], {}
            found[where] = []
        elif m := LINE.match(line):
            made = _instruction(m[1], line[m.end() :], body)
            body[made.name] = made
            found[where].append(made)
    fused = set()
    for i in [i for lines in found.values() for i in lines]:
        if i.opcode == "fusion":
            i.inside = found[i.called]
            fused.add(i.called)
    # Other called computations (the addition of a sum) have almost no work of their own.
    return {i.name: i for name, lines in found.items() if name not in fused for i in lines}


def _instruction(name: str, rest: str, body: dict[str, Instruction]) -> Instruction:
    shape, rest = _cut(rest) if rest.startswith("(") else _word(rest)
    opcode, _, rest = rest.lstrip().partition("(")
    given, attributes = _cut("(" + rest)
    called = re.search(r"calls=%([\w.\-]+)", attributes)
    operands = [body[n] for n in NAME.findall(given) if n in body]
    return Instruction(name, shape, opcode, operands, attributes, called[1] if called else "")


def _word(text: str) -> tuple[str, str]:
    first, _, rest = text.partition(" ")
    return first, rest


def _cut(text: str) -> tuple[str, str]:
    """Returns (the text in the parentheses at the start of `text`, the rest)."""
    depth = 0
    for at, c in _signs(text):
        depth += 1 if c == "(" else -1
        if not depth:
            return text[: at + 1], text[at + 1 :]
    return text, ""


def _signs(text: str) -> Iterator[tuple[int, str]]:
    return ((m.start(), m[0]) for m in re.finditer(r"[()]", text))
