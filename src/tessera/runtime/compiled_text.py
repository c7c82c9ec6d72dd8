"""Facts in a compiled program's text: collectives, products, transfers to the host, reused memory.

The text is that of a scheduled module, so the order of its lines is the order of its launches.

>>> found = read(EXAMPLE)
>>> (sent,) = found.collectives
>>> sent.kind, sent.bytes, sent.arrays, sent.times, [i.opcode for i in sent.between]
('all_gather', 1024, ('f32',), 1, ['dot'])
>>> [p.given for p in found.products], found.reused, found.host
([('f32', 'f32')], {0: 0}, ())
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

EXAMPLE = """\
HloModule step, is_scheduled=true, input_output_alias={ {0}: (0, {}, may-alias) }

ENTRY %main (x: f32[8,16], w: f32[2,16]) -> (f32[8,16], f32[16,16]) {
  %x = f32[8,16]{1,0} parameter(0)
  %w = f32[2,16]{1,0} parameter(1)
  %start = (f32[2,16]{1,0}, f32[16,16]{1,0}) all-gather-start(%w), dimensions={0}
  %dot = f32[8,16]{1,0} dot(%x, %x), lhs_contracting_dims={1}, rhs_contracting_dims={1}
  %done = f32[16,16]{1,0} all-gather-done(%start)
  ROOT %both = (f32[8,16], f32[16,16]) tuple(%dot, %done)
}
"""
MOVING = (
    "all-reduce", "all-gather", "reduce-scatter", "all-to-all", "ragged-all-to-all",
    "collective-permute", "collective-broadcast",
)  # fmt: skip
BYTES = {"pred": 1, "bf16": 2, "f16": 2, "f32": 4, "f64": 8, "c64": 8, "c128": 16}
# Lines that launch no work: they name values.
NAMING = {
    "parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "opt-barrier",
    "iota", "partition-id", "replica-id",
}  # fmt: skip
HOST = ("outfeed", "infeed", "send", "recv")
_ARRAY = re.compile(r"\b([a-z]\w*)\[([\d,]*)\](?:\{[^}]*\})?")
_HEAD = re.compile(r"(ENTRY )?%?([\w.\-]+) \(.*\{\s*$")
_LINE = re.compile(r"\s+(?:ROOT )?%?([\w.\-]+) = (.*)$")
_CALLED = re.compile(r"(?:body|condition|calls|to_apply|branch_computations)=\{?%?([\w.\-]+)")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_ALIAS = re.compile(r"\{([\d, ]*)\}: \((\d+), \{[\d, ]*\}")


@dataclass(frozen=True, eq=False)
class Line:
    """One instruction: its name, the text of its result's shape, its opcode, the names of its
    operands, and the rest of its text."""

    name: str
    shape: str
    opcode: str
    operands: tuple[str, ...]
    rest: str

    @property
    def called(self) -> tuple[str, ...]:
        """The names of the computations that it runs."""
        return tuple(_CALLED.findall(self.rest))

    @property
    def launches(self) -> bool:
        """Returns whether it is work of a device."""
        return self.opcode not in NAMING and not self.opcode.endswith(("-start", "-done"))


@dataclass(frozen=True)
class Transfer:
    """A collective: the bytes of its results on a device in one run, the dtype of each result, its
    number of runs, and the work `between` its start and its end. `start` and `used` are the places
    of its start and of the first work that reads its results, in the order of launches. The device
    waits for a `blocking` collective."""

    kind: str
    bytes: int
    arrays: tuple[str, ...]
    times: int
    between: tuple[Line, ...]
    blocking: bool
    start: int
    used: int
    op_name: str

    @property
    def overlaps(self) -> bool:
        """Returns whether the device works while it runs."""
        return bool(self.between) and not self.blocking

    @property
    def products(self) -> int:
        """The number of matrix products that run meanwhile."""
        return sum(map(_is_product, self.between))


@dataclass(frozen=True)
class Product:
    """A matrix product or convolution: the dtypes of its factors and of its result, and its name in
    the traced program."""

    given: tuple[str, ...]
    made: str
    op_name: str


@dataclass(frozen=True)
class Text:
    """All facts of one text. `reused` maps results to the arguments whose memory they take, `host`
    are the names of instructions that move data to or from the host."""

    collectives: tuple[Transfer, ...]
    products: tuple[Product, ...]
    reused: Mapping[int, int]
    host: tuple[str, ...]


@dataclass
class _Module:
    main: str = ""
    bodies: dict[str, list[Line]] = field(default_factory=dict)


def read(text: str) -> Text:
    """Returns the facts of a compiled module's text."""
    module = _parsed(text)
    shapes = {
        name: {line.name: line.shape for line in lines} for name, lines in module.bodies.items()
    }
    products, host = [], []
    for name, lines in module.bodies.items():
        for line in lines:
            if _is_product(line):
                given = tuple(_dtypes(shapes[name].get(o, ""))[0] for o in line.operands[:2])
                products.append(Product(given, _dtypes(line.shape)[0], _op_name(line)))
            if line.opcode.removesuffix("-done").removesuffix("-start") in HOST or _on_host(line):
                host.append(line.name)
    return Text(
        tuple(_collectives(module, module.main, 1)), tuple(products), _reused(text), tuple(host)
    )


def _is_product(line: Line) -> bool:
    calls = 'custom_call_target="__cublas' in line.rest or '_target="__cudnn$conv' in line.rest
    return line.opcode in ("dot", "convolution") or (line.opcode == "custom-call" and calls)


def _on_host(line: Line) -> bool:
    """Returns whether it is a host callback, or a result in host memory (`S(5)`)."""
    return "callback" in line.rest.partition("metadata=")[0] or "S(5)" in line.shape


def _op_name(line: Line) -> str:
    found = re.search(r'op_name="([^"]*)"', line.rest)
    return found[1] if found else ""


def _parsed(text: str) -> _Module:
    module, name = _Module(), ""
    for row in text.splitlines():
        if (head := _HEAD.match(row)) and not row.startswith(" "):
            name = head[2]
            module.main = name if head[1] else module.main
            module.bodies[name] = []
        elif (found := _LINE.match(row)) and name:
            module.bodies[name].append(_line(found[1], found[2]))
    return module


def _line(name: str, rest: str) -> Line:
    shape, rest = _cut(rest) if rest.startswith("(") else _word(rest)
    opcode, _, rest = rest.lstrip().partition("(")
    given, rest = _cut("(" + rest)
    return Line(name, shape, opcode, tuple(re.findall(r"%([\w.\-]+)", given)), rest)


def _word(text: str) -> tuple[str, str]:
    first, _, rest = text.partition(" ")
    return first, rest


def _cut(text: str) -> tuple[str, str]:
    """Returns (the text in the parentheses at the start of `text`, the rest)."""
    deep = 0
    for i, c in enumerate(text):
        deep += (c == "(") - (c == ")")
        if not deep:
            return text[: i + 1], text[i + 1 :]
    return text, ""


def _collectives(module: _Module, name: str, times: int) -> Iterator[Transfer]:
    """Yields the collectives of a computation, those of its loops once for each run."""
    lines = module.bodies.get(name, [])
    ends = {line.operands[0]: i for i, line in enumerate(lines) if line.opcode.endswith("-done")}
    for i, line in enumerate(lines):
        opcode = line.opcode.removesuffix("-start")
        if opcode in MOVING:
            end = ends.get(line.name, i)
            between = tuple(x for x in lines[i + 1 : end] if _works(module, x))
            blocking = end == i or '"is_sync":true' in line.rest
            shape = lines[end].shape
            yield Transfer(
                _kind(opcode), _bytes(shape), tuple(_dtypes(shape)), times, between, blocking,
                i, _first_use(lines, end), _op_name(line),
            )  # fmt: skip
        elif line.opcode not in ("fusion", "reduce", "scatter", "sort"):
            trips = _TRIPS.search(line.rest)
            for called in line.called:
                yield from _collectives(module, called, times * int(trips[1]) if trips else times)


def _kind(opcode: str) -> str:
    """Returns the kind of a collective in the words of the schedule."""
    return opcode.removeprefix("ragged-").removeprefix("collective-").replace("-", "_")


def _first_use(lines: Sequence[Line], at: int) -> int:
    """Returns the place of the first work that reads the results of `lines[at]`, also under other
    names; the number of lines if none does."""
    names = {lines[at].name}
    for i, line in enumerate(lines[at + 1 :], at + 1):
        if names.intersection(line.operands):
            if line.opcode not in NAMING:
                return i
            names.add(line.name)
    return len(lines)


def _works(module: _Module, line: Line) -> bool:
    """Returns whether `line` is work, or calls a computation that has some."""
    if line.opcode in ("call", "while", "conditional", "async-start"):
        return any(_works(module, x) for c in line.called for x in module.bodies.get(c, []))
    return line.launches


def _reused(text: str) -> dict[int, int]:
    head = text.partition("\n")[0]
    _, _, rest = head.partition("input_output_alias=")
    rest = rest.partition(" }")[0]
    return {int(out or 0): int(given) for out, given in _ALIAS.findall(rest)}


def _dtypes(shape: str) -> list[str]:
    return [dtype for dtype, _ in _ARRAY.findall(shape)] or [""]


def _bytes(shape: str) -> int:
    def item(dtype: str) -> int:
        bits = re.search(r"\d+", dtype)
        return BYTES.get(dtype) or max(1, int(bits[0]) // 8 if bits else 1)

    return sum(
        item(dtype) * math.prod(map(int, filter(None, sizes.split(","))))
        for dtype, sizes in _ARRAY.findall(shape)
    )
