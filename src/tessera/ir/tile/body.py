"""The parts of a kernel: references cut into tiles, signals, statements.

A statement names values as "%acc" and numbers by their text. Its `line` is that of the text it was
read from; it does not count when kernels are compared.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal, TypeAlias, assert_never

from ...core.dtypes import DType
from ...core.errors import TesseraError
from .index import Index, Test
from .op import number_text
from .ops import plain_attrs

Kind = Literal["in", "out", "sym"]


@dataclass(frozen=True, slots=True)
class Ref:
    """Memory outside of the kernel, cut into tiles: an input, an output, or symmetric memory, which
    each device has and other devices put to.

    A tile's size is that of `tiles`. A dim whose size is written as 1 is only an index: values
    lack it.
    """

    kind: Kind
    name: str
    dtype: DType
    shape: tuple[Index, ...]
    tiles: tuple[Index, ...]
    line: int = field(default=0, compare=False, repr=False)

    @property
    def kept(self) -> tuple[int, ...]:
        """The dims that values of a tile have."""
        return tuple(i for i, size in enumerate(self.tiles) if size.text != "1")


@dataclass(frozen=True, slots=True)
class Signal:
    """Slots on each device, clear when the kernel begins; a put sets one on its target."""

    name: str
    slots: tuple[Index, ...]
    line: int = field(default=0, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class _Statement:
    line: int = field(default=0, compare=False, repr=False, kw_only=True)


@dataclass(frozen=True, slots=True)
class Op(_Statement):
    """`%y = add %a %b`: a value from values and numbers. `attrs` are texts by name, in the order of
    the op's row in `types.py`."""

    result: str
    op: str
    args: tuple[str, ...] = ()
    attrs: tuple[tuple[str, str], ...] = ()

    def __post_init__(self) -> None:
        args = tuple(a if a.startswith("%") else number_text(a) for a in self.args)
        object.__setattr__(self, "args", args)
        object.__setattr__(self, "attrs", plain_attrs(self.op, len(args), self.attrs))

    def attr(self, name: str, default: str = "") -> str:
        """The text of an attribute."""
        return dict(self.attrs).get(name, default)


@dataclass(frozen=True, slots=True)
class Load(_Statement):
    """`%x = load x[i, k]`: a tile. With `rows`, (dim, value), one dim is read at the indices of
    elements in that value, in place of a tile index."""

    result: str
    ref: str
    at: tuple[Index, ...]
    rows: tuple[int, str] | None = None

    def __post_init__(self) -> None:
        if self.rows is not None:  # the index beside them does not count
            dim = self.rows[0]
            object.__setattr__(self, "at", (*self.at[:dim], Index("0"), *self.at[dim + 1 :]))


@dataclass(frozen=True, slots=True)
class Store(_Statement):
    """`store y[i, j] = %y`: writes a tile."""

    ref: str
    at: tuple[Index, ...]
    value: str


@dataclass(frozen=True, slots=True)
class Loop(_Statement):
    """`%y = loop k in 0..n carry %x`: the body, for each index from `low` up to but not including
    `high`. In the body a carried value stands for its current value; `next` is its next one."""

    results: tuple[str, ...]
    index: str
    low: Index
    high: Index
    carries: tuple[str, ...]
    body: tuple[Statement, ...]
    next: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class When(_Statement):
    """`when s > 0: ...`: the body, if the condition holds."""

    test: Test
    body: tuple[Statement, ...]


@dataclass(frozen=True, slots=True)
class Enter(_Statement):
    """`enter x`: waits until all devices along the axes have come here."""

    axes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Put(_Statement):
    """`put a[i] -> b[j] at rank sig got[s]`: starts the copy of a tile to the device at `rank` (a
    coordinate for each axis of the mesh), and sets a slot there when it has arrived."""

    src: str
    src_at: tuple[Index, ...]
    dst: str
    dst_at: tuple[Index, ...]
    rank: tuple[Index, ...]
    sig: str
    slot: tuple[Index, ...]


@dataclass(frozen=True, slots=True)
class Wait(_Statement):
    """`wait got[s]`: waits until the own slot is set."""

    sig: str
    slot: tuple[Index, ...]


@dataclass(frozen=True, slots=True)
class Quiet(_Statement):
    """`quiet`: waits until all own puts have arrived."""


Statement: TypeAlias = Op | Load | Store | Loop | When | Enter | Put | Wait | Quiet


def joined(parts: tuple[Index, ...], rows: tuple[int, str] | None = None) -> str:
    """Indices as text, as they are between brackets."""
    texts = [p.text for p in parts]
    if rows is not None:
        texts[rows[0]] = f"rows {rows[1]}"
    return ", ".join(texts)


def line_text(s: Statement) -> str:
    """The line of a statement, without the statements in it."""
    match s:
        case Op():
            attrs = [f"{name}={text}" for name, text in s.attrs]
            return " ".join([f"{s.result} = {s.op}", *s.args, *attrs])
        case Load():
            return f"{s.result} = load {s.ref}[{joined(s.at, s.rows)}]"
        case Store():
            return f"store {s.ref}[{joined(s.at)}] = {s.value}"
        case Loop():
            given = f"{' '.join(s.results)} = " if s.results else ""
            carry = f" carry {' '.join(s.carries)}" if s.carries else ""
            return f"{given}loop {s.index} in {s.low.text}..{s.high.text}{carry}"
        case When():
            return f"when {s.test.text}:"
        case Enter():
            return f"enter {' '.join(s.axes)}"
        case Put():
            ends = f"{s.src}[{joined(s.src_at)}] -> {s.dst}[{joined(s.dst_at)}]"
            return f"put {ends} at {joined(s.rank)} sig {s.sig}[{joined(s.slot)}]"
        case Wait():
            return f"wait {s.sig}[{joined(s.slot)}]"
        case Quiet():
            return "quiet"
        case _:
            assert_never(s)


def ref_text(r: Ref) -> str:
    """The line of a reference."""
    return f"{r.kind} {r.name} : {r.dtype}[{joined(r.shape)}] tiles [{joined(r.tiles)}]"


def signal_text(s: Signal) -> str:
    """The line of a signal."""
    return f"sig {s.name} [{joined(s.slots)}]"


def where(s: Statement | Ref | Signal) -> str:
    """The line of a part with its number, if it was read from a text."""
    match s:
        case Ref():
            text = ref_text(s)
        case Signal():
            text = signal_text(s)
        case _:
            text = line_text(s)
    return (f"{s.line}: " if s.line else "") + text


def every(body: tuple[Statement, ...]) -> Iterator[Statement]:
    """All statements, also those within others, in the order of the text."""
    for s in body:
        yield s
        if isinstance(s, Loop | When):
            yield from every(s.body)


@contextmanager
def naming(line: str) -> Iterator[None]:
    """A context that adds a line of the kernel to errors that name none."""
    try:
        yield
    except TesseraError as error:
        if "line" in _rows(error):
            raise
        raise located(error, line=line) from None


def located(error: TesseraError, line: str = "", at: str = "") -> TesseraError:
    """The error with this line of the kernel, and with this line of the user's code if it has
    none."""
    rows = _rows(error)
    fix, at = rows.pop("fix", ""), rows.pop("at", at)
    more = {"line": line or rows.get("line", ""), **{k: v for k, v in rows.items() if k != "line"}}
    return type(error)(str(error).split("\n")[0], rows=more.items(), fix=fix, at=at)


def _rows(error: TesseraError) -> dict[str, str]:
    """The rows of an error's text, by name."""
    rows = [row.split(" : ", 1) for row in str(error).split("\n")[1:]]
    return {row[0].strip(): row[1].strip() for row in rows if len(row) == 2}
