"""Text form of kernels, which can be parsed; `parse(to_text(k)) == k`.

>>> k = parse('''
... kernel double  v1
...   dims M=8
...   tune bm=4
...   grid i=M//bm
...   in x : f32[M] tiles [bm]
...   out y : f32[M] tiles [bm]
...   %0 = load x[i]
...   %1 = mul %0 2
...   store y[i] = %1
... ''')
>>> parse(k.text) == k, k.types["%1"]
(True, f32[4])
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import partial
from typing import NoReturn, TypeVar, cast

from ...core.checks import string
from ...core.dtypes import dtype_of
from ...core.errors import GraphError
from .body import (
    Enter,
    Kind,
    Load,
    Loop,
    Op,
    Put,
    Quiet,
    Ref,
    Signal,
    Statement,
    Store,
    Wait,
    When,
    line_text,
    naming,
    ref_text,
    signal_text,
)
from .index import Index, Test, parts
from .kernel import VERSION, Kernel, Sizes, need_kernel

T = TypeVar("T")
MOST_LEVELS = 32  # of loops and conditions within each other


# ---- writing -----------------------------------------------------------------------------------
def to_text(kernel: Kernel) -> str:
    """The text of a kernel, without a final newline."""
    k = need_kernel("to_text", kernel)
    head = f"kernel {k.name}  v{VERSION}" + (f"  mesh {_sizes(k.mesh)}" if k.mesh else "")
    lines = [head]
    for word, sizes in (("dims", k.dims), ("tune", k.tune), ("speed", k.speed)):
        if sizes:
            lines.append(f"  {word} {_sizes(sizes)}")
    if k.grid:
        lines.append("  grid " + " ".join(f"{name}={extent.text}" for name, extent in k.grid))
    lines += [f"  {ref_text(r)}" for r in k.refs]
    lines += [f"  {signal_text(s)}" for s in k.signals]
    return "\n".join([*lines, *_lines(k.body, "  ")])


def _sizes(sizes: Sizes) -> str:
    return " ".join(f"{name}={size}" for name, size in sizes)


def _lines(body: tuple[Statement, ...], indent: str) -> Iterator[str]:
    for s in body:
        head = indent + line_text(s)
        if isinstance(s, When) and len(s.body) == 1 and not isinstance(s.body[0], Loop | When):
            yield f"{head} {line_text(s.body[0])}"
            continue
        yield head
        if isinstance(s, Loop | When):
            yield from _lines(s.body, indent + "  ")
        if isinstance(s, Loop) and s.next:
            yield f"{indent}  next {' '.join(s.next)}"


# ---- reading -----------------------------------------------------------------------------------
_N = r"[A-Za-z_]\w*"
_V = r"%\w+"
_HEAD = re.compile(rf"kernel\s+({_N})\s+v(\d+)(?:\s+mesh\s+(.+))?")
PAIR = re.compile(rf"({_N})\s*=\s*(.+?)(?=\s+{_N}\s*=|$)")
_REF = re.compile(rf"(in|out|sym)\s+({_N})\s*:\s*(\w+)\s*\[(.*?)\]\s*tiles\s*\[(.*?)\]")
_SIG = re.compile(rf"sig\s+({_N})\s*\[(.*?)\]")
_LOOP = re.compile(
    rf"(?:((?:{_V}\s+)+)=\s*)?loop\s+({_N})\s+in\s+(.+?)\.\.(.+?)(?:\s+carry((?:\s+{_V})+))?"
)
_LOAD = re.compile(rf"({_V})\s*=\s*load\s+({_N})\s*\[(.*)\]")
_ROWS = re.compile(rf"rows\s+({_V})")
_STORE = re.compile(rf"store\s+({_N})\s*\[(.*)\]\s*=\s*({_V})")
_PUT = re.compile(
    rf"put\s+({_N})\s*\[(.*?)\]\s*->\s*({_N})\s*\[(.*?)\]\s+at\s+(.+?)\s+sig\s+({_N})\s*\[(.*)\]"
)
_WAIT = re.compile(rf"wait\s+({_N})\s*\[(.*)\]")
_OP = re.compile(rf"({_V})\s*=\s*(\w+)\s*(.*)")
_ATTRS = re.compile(rf"\s*({_N})\s*=\s*?(.*?)(?=\s+{_N}\s*=|$)")
_DECLARES = ("dims", "tune", "speed", "grid", "in", "out", "sym", "sig")
_FORMS = {
    "store": "store y[i, j] = %3",
    "enter": "enter x",
    "put": "put a[i] -> b[j] at (rank_x+1)%x sig got[s]",
    "wait": "wait got[s]",
    "next": "next %3, as the last line of a loop with carry",
    "loop": "%1 = loop k in 0..K//bk carry %0",
    "load": "%2 = load x[i, k]",
    "when": "when s > 0: wait got[s]",
    "dims": "dims M=256 N=256",
    "in": "in x : f32[M, K] tiles [bm, bk]",
    "sig": "sig got [x]",
}


def parse(text: str) -> Kernel:
    """The kernel whose text is `text`. Raises GraphError, ShapeError or DTypeError, with the line,
    if the text is not a kernel."""
    return _Parser(string("parse", "the text", text)).kernel()


def _grid(pairs: list[tuple[str, str]]) -> tuple[tuple[str, Index], ...]:
    return tuple((name, Index(text)) for name, text in pairs)


class _Parser:
    def __init__(self, text: str) -> None:
        rows = [(i, line.split("#")[0].rstrip()) for i, line in enumerate(text.splitlines(), 1)]
        kept = [(i, line) for i, line in rows if line.strip()]
        if any("\t" in line for _, line in kept):
            raise GraphError("tile text: a line has a tab", fix="indent by spaces", at="")
        self.lines = [(i, len(line) - len(line.lstrip()), line.strip()) for i, line in kept]
        self.at = 0

    def wrong(self, what: str, form: str) -> NoReturn:
        number, _, line = (
            self.lines[min(self.at, len(self.lines) - 1)] if self.lines else (1, 0, "")
        )
        raise GraphError(
            f"tile text, line {number}: {what}",
            line=f"{number}: {line}",
            fix=f"write it as: {_FORMS.get(form, form)}",
            at="",
        )

    def kernel(self) -> Kernel:
        head = _HEAD.fullmatch(self.lines[0][2]) if self.lines else None
        if head is None or int(head[2][:9]) != VERSION:
            self.wrong("a kernel begins with its name", f"kernel NAME  v{VERSION}  mesh x=4")
        mesh = self._whole(self._pairs(head[3], "mesh x=4")) if head[3] else ()
        sizes: dict[str, Sizes] = {}
        grid: tuple[tuple[str, Index], ...] = ()
        refs: list[Ref] = []
        signals: list[Signal] = []
        self.at = 1
        while self.at < len(self.lines):
            number, _, line = self.lines[self.at]
            word, _, rest = line.partition(" ")
            if word not in _DECLARES:
                break
            if word in ("dims", "tune", "speed", "grid"):
                if word in sizes or (word == "grid" and grid):
                    self.wrong(f"{word} is given twice", f"{word}, once")
                pairs = self._pairs(rest, "dims")
                if word == "grid":
                    grid = self._read(partial(_grid, pairs))
                else:
                    sizes[word] = self._whole(pairs)
            elif word == "sig":
                m = self._match(_SIG, "a signal")
                signals.append(Signal(m[1], self._indices(m[2]), line=number))
            else:
                m = self._match(_REF, "a reference", "in")
                dtype = self._read(partial(dtype_of, m[3]))
                shape, tiles = self._indices(m[4]), self._indices(m[5])
                refs.append(Ref(cast(Kind, m[1]), m[2], dtype, shape, tiles, line=number))
            self.at += 1
        body, last = self._block(self.lines[1][1] if len(self.lines) > 1 else 2, 0)
        if last is not None:
            self.at -= 1
            self.wrong("next is outside of a loop", "next")
        if self.at < len(self.lines):
            self.wrong("the line is indented less than the kernel's first", "store")
        return Kernel(
            head[1], mesh, sizes.get("dims", ()), sizes.get("tune", ()), sizes.get("speed", ()),
            grid, tuple(refs), tuple(signals), body,
        )  # fmt: skip

    # ---- parts ---------------------------------------------------------------------------------
    def _pairs(self, text: str, form: str) -> list[tuple[str, str]]:
        pairs = PAIR.findall(text)
        if not pairs or "".join(f"{a}={b}" for a, b in pairs).replace(" ", "") != text.replace(
            " ", ""
        ):
            self.wrong("expected sizes by name", form)
        return pairs

    def _whole(self, pairs: list[tuple[str, str]]) -> Sizes:
        for name, text in pairs:
            if not re.fullmatch(r"\d{1,10}", text):
                self.wrong(f"{name} is not a whole number", "dims")
        return tuple((name, int(text)) for name, text in pairs)

    def _match(self, form: re.Pattern[str], what: str, word: str = "") -> re.Match[str]:
        line = self.lines[self.at][2]
        found = form.fullmatch(line)
        if found is None:
            self.wrong(f"cannot read {what}", word or line.split()[0])
        return found

    def _read(self, make: Callable[[], T]) -> T:
        number, _, line = self.lines[self.at]
        try:
            with naming(f"{number}: {line}"):
                return make()
        except RecursionError:
            self.wrong("it is too deep", "loop")

    def _indices(self, text: str) -> tuple[Index, ...]:
        return self._read(lambda: tuple(Index(part) for part in parts(text)))

    def _block(
        self, indent: int, level: int
    ) -> tuple[tuple[Statement, ...], tuple[str, ...] | None]:
        """(The statements of a block, the values of the `next` that ends it; None without one)."""
        made: list[Statement] = []
        if level > MOST_LEVELS:
            self.wrong(f"more than {MOST_LEVELS} blocks are within each other", "loop")
        while self.at < len(self.lines) and self.lines[self.at][1] >= indent:
            _, deep, line = self.lines[self.at]
            if deep > indent:
                self.wrong(f"it is indented by {deep} spaces, its block by {indent}", "store")
            if line.split()[0] == "next":
                values = tuple(line.split()[1:])
                if not values or not all(re.fullmatch(_V, v) for v in values):
                    self.wrong("cannot read next", "next")
                self.at += 1
                if self.at < len(self.lines) and self.lines[self.at][1] >= indent:
                    self.wrong("a statement follows next in its block", "next")
                return tuple(made), values
            made.append(self._statement(line, level))
        return tuple(made), None

    def _inner(self, level: int) -> tuple[tuple[Statement, ...], tuple[str, ...] | None]:
        """The block below the current line."""
        outer = self.lines[self.at][1]
        self.at += 1
        if self.at >= len(self.lines) or self.lines[self.at][1] <= outer:
            self.at -= 1
            self.wrong("no statements are indented below it", self.lines[self.at][2].split()[0])
        return self._block(self.lines[self.at][1], level + 1)

    def _statement(self, line: str, level: int) -> Statement:
        number = self.lines[self.at][0]
        if line.startswith("when "):
            test, colon, rest = line[5:].partition(":")
            if not colon:
                self.wrong("a condition ends with a colon", "when")
            made = self._read(lambda: Test(test))
            if rest.strip():
                inner = self._simple(rest.strip(), number)
                self.at += 1
                return When(made, (inner,), line=number)
            body, last = self._inner(level)
            if last is not None:
                self.at -= 1
                self.wrong("next is outside of a loop", "next")
            return When(made, body, line=number)
        if re.match(rf"({_V}\s+)*(=\s*)?loop\b", line):
            m = self._match(_LOOP, "a loop", "loop")
            results, carries = tuple((m[1] or "").split()), tuple((m[5] or "").split())
            low, high = self._read(lambda: (Index(m[3]), Index(m[4])))
            body, last = self._inner(level)
            return Loop(results, m[2], low, high, carries, body, last or (), line=number)
        simple = self._simple(line, number)
        self.at += 1
        return simple

    def _simple(self, line: str, number: int) -> Statement:
        """A statement of one line."""
        word = line.split()[0]
        if word == "quiet" and line == word:
            return Quiet(line=number)
        if word == "enter":
            return Enter(tuple(line.split()[1:]), line=number)
        if m := _STORE.fullmatch(line):
            return Store(m[1], self._indices(m[2]), m[3], line=number)
        if m := _PUT.fullmatch(line):
            src, dst, rank, slot = map(self._indices, (m[2], m[4], m[5], m[7]))
            return Put(m[1], src, m[3], dst, rank, m[6], slot, line=number)
        if m := _WAIT.fullmatch(line):
            return Wait(m[1], self._indices(m[2]), line=number)
        if m := _LOAD.fullmatch(line):
            return self._load(m, number)
        if (m := _OP.fullmatch(line)) and m[2] != "load":
            return self._op(m, number)
        self.wrong("cannot read the statement", "load" if " load " in line else word)

    def _load(self, m: re.Match[str], number: int) -> Load:
        at = [part.strip() for part in parts(m[3])]
        rows = None
        for dim, part in enumerate(at):
            if found := _ROWS.fullmatch(part):
                if rows is not None:
                    self.wrong("rows of two dims are gathered", "%2 = load x[rows %1, j]")
                rows, at[dim] = (dim, found[1]), "0"
        return Load(m[1], m[2], self._indices(",".join(at)), rows, line=number)

    def _op(self, m: re.Match[str], number: int) -> Op:
        first = re.search(rf"(^|\s){_N}\s*=", m[3])
        cut = first.start() if first else len(m[3])
        args, rest = m[3][:cut].split(), m[3][cut:]
        attrs = tuple((name, text.strip()) for name, text in _ATTRS.findall(rest))
        return self._read(lambda: Op(m[1], m[2], tuple(args), attrs, line=number))
