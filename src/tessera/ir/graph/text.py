"""Text form of graphs, for people and files; `to_text(parse(s)) == s`.

>>> print(EXAMPLE)
graph step  v1  mesh dp=2 tp=4
  %0 = input "x"                        : f32[8@dp, 16]
  %1 = input "w"                        : f32[8@dp, 16@tp]
  %2 = all_gather %1 axes=("tp",) dim=1 : f32[8@dp, 16]  # inserted for add; receives 192 B a device
  %3 = add %0 %2                        : f32[8@dp, 16]  # model.py:31  mlp/up
  return %3
>>> to_text(parse(EXAMPLE)) == EXAMPLE
True
>>> two, three = parse(EXAMPLE).nodes[2:]
>>> three.loc, three.scope, two.note
('model.py:31', 'mlp/up', 'for add')

A line is a node: its number, op, arguments, attributes, the types of its results, and a comment
with the user's line, the scope, and for a collective why it was inserted and what one device
receives. A `scan` prints its body below itself, a kernel its text behind `|`. Node numbers are
places in `Graph.nodes`. The mesh stands in the header and holds for every type.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NoReturn

import numpy as np

from ...core.dtypes import BY_NAME, DType
from ...core.errors import GraphError, TesseraError, UsageError
from ...core.layout import TensorType, parse_type
from ...core.mesh import Mesh, in_time
from ...core.mesh_input import ids_of, ids_text
from ...core.options import PLAIN, ProgramOptions, parse_options
from ..tile.kernel import Kernel
from .node import NO_ATTRS, Graph, Node

VERSION = 1
EXAMPLE = """\
graph step  v1  mesh dp=2 tp=4
  %0 = input "x"                        : f32[8@dp, 16]
  %1 = input "w"                        : f32[8@dp, 16@tp]
  %2 = all_gather %1 axes=("tp",) dim=1 : f32[8@dp, 16]  # inserted for add; receives 192 B a device
  %3 = add %0 %2                        : f32[8@dp, 16]  # model.py:31  mlp/up
  return %3"""
# Columns stay aligned up to here; a longer line pushes only itself.
_NODE_WIDTH, _MIDDLE = 52, 28

# Values that a comment holds without quotes.
_LOC = re.compile(r"[^\s\"=;]+:\d+\Z")
_SCOPE = re.compile(r"(?!inserted\Z|receives\Z)[\w.\-/\[\]<>]+\Z")
_NOTE = re.compile(r"[^\s\";]+(?: [^\s\";]+)*\Z")


# ---- writing -----------------------------------------------------------------------------------
def to_text(graph: Graph, around: ProgramOptions = PLAIN) -> str:
    """The text of `graph`, without a final newline. Its options are shown if they differ from
    `around`, those of the enclosing program."""
    rows = list(_rows(graph, "  "))
    left = _width((a for a, types, _ in rows if types), _NODE_WIDTH)
    middle = _width((types for _, types, comment in rows if comment), _MIDDLE)
    own = graph.options.text()
    options = "" if own == around.text() else f"  options {own}"
    lines = [f"graph {_name(graph.name)}  v{VERSION}{_mesh_text(_widest(graph))}{options}"]
    for a, types, comment in rows:
        line = f"{a:<{left}} : {types}" if types else a
        lines.append(f"{line:<{left + 3 + middle}}  # {comment}" if comment else line)
    return "\n".join(lines)


def node_text(graph: Graph, node: Node) -> str:
    """The line of `node` in the text of `graph`, for messages."""
    left, types = _line(node, {n: i for i, n in enumerate(graph.nodes)})
    return f"{left} : {types}"


def _width(column: Iterable[str], most: int) -> int:
    return max((len(c) for c in column if len(c) <= most), default=0)


def size_text(n: int) -> str:
    """A number of bytes for people: 384 B, 192 KiB, 1.5 MiB."""
    value, unit = float(n), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if value < 1024:
            break
        value, unit = value / 1024, larger
    return f"{value:.0f} {unit}" if value == round(value) else f"{value:.1f} {unit}"


def _name(name: str) -> str:
    return name if re.fullmatch(r"[A-Za-z_][\w.]*", name) else _value(name)


def _widest(graph: Graph) -> Mesh | None:
    """The mesh of `graph`, with axes in time if any node has them."""
    meshes = (t.mesh for n in graph.nodes for t in n.types if t.mesh is not None)
    return next((m for m in meshes if m.time), graph.mesh)


def _mesh_text(mesh: Mesh | None) -> str:
    if mesh is None:
        return ""
    if mesh.time:
        turns = " ".join(f"{a}={mesh.sizes[a]}" for a in mesh.time)
        return f"{_mesh_text(mesh.space) or '  mesh'} time({turns})"
    plain = mesh.ids == tuple(range(mesh.size))
    devices = "" if plain else f" devices={_ids(mesh.ids)}"
    onto = ""
    if mesh.onto is not None:
        onto = f" onto={_value(mesh.onto.shape)} at={_ids(mesh.onto.ids)}"
    return f"  mesh {mesh.text()}{devices}{onto}"


def _ids(ids: tuple[int, ...]) -> str:
    text = ids_text(ids)
    return _value(text if ".." in text else ids)


def _ref(n: Node, number: Mapping[Node, int]) -> str:
    # A node of another graph is an error that `verify` reports, so its text must not raise one.
    return f"%{number[n]}" if n in number else "%?"


def _line(n: Node, number: Mapping[Node, int]) -> tuple[str, str]:
    """A node without its bodies: (number, op, arguments and attributes; types)."""
    parts = [f"{_ref(n, number)} = {n.op}"]
    parts += [_value(n.attrs.get("name", ""))] if n.op == "input" else []
    parts += [_ref(a, number) for a in n.args]
    for k, v in n.attrs.items():
        if not isinstance(v, Graph | Kernel) and not (n.op == "input" and k == "name"):
            parts.append(f"{k}={_value(v)}")
    types = ", ".join(t.text for t in n.types)
    return " ".join(parts), types if len(n.types) == 1 else f"({types})"


def _rows(graph: Graph, indent: str) -> Iterator[tuple[str, str, str]]:
    """Yields (node, types, comment) of each line; a body follows its node, indented."""
    number = {n: i for i, n in enumerate(graph.nodes)}
    if graph.inputs != tuple(n for n in graph.nodes if n.op == "input"):
        yield f"{indent}inputs {', '.join(_ref(n, number) for n in graph.inputs)}", "", ""
    for n in graph.nodes:
        left, types = _line(n, number)
        yield indent + left, types, _comment(n)
        for k, body in n.attrs.items():
            if isinstance(body, Graph):
                yield f"{indent}  {k} = graph {_name(body.name)}", "", ""
                yield from _rows(body, indent + "    ")
            elif isinstance(body, Kernel):
                yield f"{indent}  {k} = tile", "", ""
                yield from ((f"{indent}    | {line}", "", "") for line in body.text.split("\n"))
    outputs = ", ".join(_ref(n, number) for n in graph.outputs)
    yield f"{indent}return {outputs}".rstrip(), "", ""


def _value(v: object) -> str:
    """An attribute as text. Raises GraphError for a value that the text form lacks."""
    match v:
        case None | bool():
            return str(v)
        case str():
            return json.dumps(v, ensure_ascii=False)
        case int() | np.integer():
            return str(int(v))
        case float() | np.floating():
            return repr(float(v))
        case DType() | TensorType():
            return str(v)
        case tuple() | list():
            inner = ", ".join(map(_value, v))
            return f"({inner},)" if len(v) == 1 else f"({inner})"
        case _:
            raise GraphError(
                f"graph text: an attribute cannot be a {type(v).__name__}",
                value=repr(v),
                fix="use numbers, strings, tuples, dtypes, types or graphs",
            )


def _field(key: str, text: str, unquoted: re.Pattern[str]) -> list[str]:
    if not text:
        return []
    return [text if unquoted.match(text) else f"{key}={json.dumps(text, ensure_ascii=False)}"]


def _comment(n: Node) -> str:
    fields = _field("loc", n.loc, _LOC) + _field("scope", n.scope, _SCOPE)
    why = []
    if n.note:
        why = [f"inserted {n.note}"] if _NOTE.match(n.note) else _field("note", n.note, _NEVER)
    if n.is_collective:
        why.append(f"receives {size_text(n.wire_bytes)} a device")
    return "  ".join([*fields, *(["; ".join(why)] if why else [])])


_NEVER = re.compile(r"(?!)")  # matches no text, so the text is quoted


# ---- reading -----------------------------------------------------------------------------------
_TOKEN = re.compile(
    r"""\s*(?:
      (?P<string>"(?:[^"\\]|\\.)*")
    | (?P<type>\w+\[[^\]]*\](?:\ (?:\+|max\ |min\ )\w+\b(?!=))*(?:\ varying\ \w+(?:,\w+)*)?)
    | (?P<node>%\d{1,18}(?!\d))
    | (?P<number>-?(?:\d{1,99}(?!\d)(?:\.\d+)?(?:e[+-]?\d+)?|inf\b|nan\b))
    | (?P<word>[A-Za-z_][\w.]*)
    | (?P<mark>[=:(),])
    | \|\ ?(?P<kernel>.*)
    | \#\ ?(?P<comment>.*)
    )""",
    re.VERBOSE,
)
# A first line that ends with options; the name may be a string.
_OPTIONS = re.compile(r'(\s*graph (?:"(?:[^"\\]|\\.)*"|\S+)  v\d+.*?)  options (.*)\Z')
_WORDS: Mapping[str, object] = {"None": None, "True": True, "False": False}


def parse(text: str, around: ProgramOptions = PLAIN) -> Graph:
    """The graph whose text is `text`; `around` are the options of the enclosing program.

    Raises GraphError, with the line, if the text is not a graph.
    """
    if not isinstance(text, str):
        raise UsageError(
            f"parse: takes a graph's text, not a {type(text).__name__}",
            fix="give graph.text, or what was saved of it",
        )
    return _Parser(text, around, lambda mesh: mesh).graph()


def parse_on(text: str, on: Callable[[Mesh], Mesh]) -> Graph:
    """`parse`, with the mesh `on(mesh)` for that of the text: the same logical mesh on other
    devices."""
    return _Parser(text, PLAIN, on).graph()


class _Line:
    """The tokens of one line, consumed from the left; `comment` is the text after `#`."""

    def __init__(self, number: int, text: str) -> None:
        self.number, self.text = number, text.rstrip()
        self.indent = len(text) - len(text.lstrip())
        self.tokens: list[tuple[str, str]] = []
        self.comment = ""
        at = 0
        while at < len(self.text):
            m = _TOKEN.match(self.text, at)
            if m is None or m.lastgroup is None:
                self.wrong(f"cannot read {self.text[at:].strip()!r}")
            if m.lastgroup == "comment":
                self.comment = m["comment"]
            else:
                self.tokens.append((m.lastgroup, m[m.lastgroup]))
            at = m.end()
        self.at = 0

    def wrong(self, message: str) -> NoReturn:
        raise GraphError(
            f"graph text, line {self.number}: {message}",
            line=self.text.strip() or "(empty)",
            fix="write a node as: %2 = add %0 %1 key=value : f32[8@dp, 4]    # file.py:1  scope",
            at="",
        )

    @property
    def more(self) -> bool:
        return self.at < len(self.tokens)

    def sees(self, kind: str, value: str = "") -> bool:
        here = self.tokens[self.at] if self.more else ("end", "")
        return here[0] == kind and value in ("", here[1])

    def follows(self, mark: str) -> bool:
        """Returns whether `mark` is the next token after the current one."""
        return self.tokens[self.at + 1 : self.at + 2] == [("mark", mark)]

    def take(self, kind: str, value: str = "") -> str:
        if not self.sees(kind, value):
            found = repr(self.tokens[self.at][1]) if self.more else "the end of the line"
            self.wrong(f"expected {repr(value) if value else f'a {kind}'}, found {found}")
        self.at += 1
        return self.tokens[self.at - 1][1]

    def skip(self, kind: str, value: str) -> bool:
        if not self.sees(kind, value):
            return False
        self.at += 1
        return True

    def listed(self, read: Callable[[], Any], close: str = "") -> list[Any]:
        """Items separated by commas, up to `close` or the end of the line; a trailing comma is
        allowed."""
        out = []
        while self.more and not (close and self.sees("mark", close)):
            out.append(read())
            if not self.skip("mark", ","):
                break
        if close:
            self.take("mark", close)
        return out

    def name(self) -> str:
        return self.string() if self.sees("string") else self.take("word")

    def string(self) -> str:
        quoted = self.take("string")
        try:
            return str(json.loads(quoted))
        except ValueError:
            self.wrong(f"{quoted} is no JSON string")

    def end(self) -> None:
        if self.more:
            self.wrong(f"did not expect {self.tokens[self.at][1]!r}")


class _Parser:
    def __init__(self, text: str, options: ProgramOptions, on: Callable[[Mesh], Mesh]) -> None:
        rows = text.split("\n")  # splitlines would cut at U+2028 in a string
        head = _OPTIONS.match(rows[0])
        if head is not None:
            rows[0] = head[1]
        self.lines = [_Line(i, row) for i, row in enumerate(rows, 1) if row.strip()]
        self.at = 0
        self.options, self.on = options, on
        if head is not None:
            self.options = self.guard(self.lines[0], lambda: parse_options(head[2]))
        self.mesh: Mesh | None = None

    def next(self) -> _Line:
        if self.at == len(self.lines):
            last = self.lines[-1] if self.lines else _Line(1, "")
            last.wrong("the text ends before its graph does")
        self.at += 1
        return self.lines[self.at - 1]

    def graph(self) -> Graph:
        head = self.next()
        head.take("word", "graph")
        name, version = head.name(), head.take("word")
        if version != f"v{VERSION}":
            head.wrong(f"this version reads v{VERSION}, the text is {version}")
        if head.skip("word", "mesh"):
            self.mesh = self.guard(head, lambda: self.read_mesh(head))
        head.end()
        graph = self.body(name)
        if self.at < len(self.lines):
            self.next().wrong("text after the graph's return")
        return graph

    def guard(self, line: _Line, read: Callable[[], Any]) -> Any:
        """Returns the result of `read()`. Its errors become errors of this line."""
        try:
            return read()
        except GraphError:
            raise
        except (TesseraError, ValueError) as error:
            line.wrong(str(error).splitlines()[0])

    def read_mesh(self, line: _Line) -> Mesh:
        """The mesh of a text such as `dp=2 tp=4 devices=(...) onto=(...) at=(...)`; `onto` and `at`
        are the sizes and ids of the mesh that it is folded onto."""
        sizes: dict[str, int] = {}
        time: dict[str, int] = {}
        lists: dict[str, list[int]] = {}
        while line.sees("word"):
            axis = line.take("word")
            if axis == "time" and line.skip("mark", "("):
                while not line.skip("mark", ")"):
                    axis = line.take("word")
                    line.take("mark", "=")
                    time[axis] = int(line.take("number"))
                continue
            line.take("mark", "=")
            if axis in ("devices", "onto", "at") and line.skip("mark", "("):
                lists[axis] = line.listed(lambda: int(line.take("number")), ")")
            elif axis in ("devices", "at") and line.sees("string"):
                lists[axis] = list(ids_of(line.string()))
            else:
                sizes[axis] = int(line.take("number"))
        mesh = None
        if sizes:
            mesh = Mesh(tuple(sizes), devices=lists.get("devices"), shape=sizes)
        if mesh is not None and "onto" in lists:
            mesh = mesh.fold(Mesh(mesh.axes, lists.get("at"), lists["onto"]))
        mesh = self.on(mesh) if mesh is not None else None
        return in_time(mesh, time) if mesh is None or time else mesh

    def body(self, name: str) -> Graph:
        """The nodes up to `return`, as a graph. Inputs are in the order of their nodes, unless a
        line `inputs` gives another order."""
        nodes: list[Node] = []
        inputs: list[Node] | None = None
        order: _Line | None = None
        while True:
            line = self.next()
            if line.skip("word", "inputs"):
                order = line
            elif line.skip("word", "return"):
                outputs = self.refs(line, nodes)
                line.end()
                break
            else:
                nodes.append(self.node(line, nodes))
        if order is not None:
            inputs = self.refs(order, nodes)
            order.end()
        else:
            inputs = [n for n in nodes if n.op == "input"]
        return Graph(name, tuple(nodes), tuple(inputs), tuple(outputs), self.options)

    def refs(self, line: _Line, nodes: list[Node]) -> list[Node]:
        return line.listed(lambda: self.ref(line, nodes))

    def ref(self, line: _Line, nodes: list[Node]) -> Node:
        text = line.take("node")
        if int(text[1:]) >= len(nodes):
            line.wrong(f"{text} is not defined above")
        return nodes[int(text[1:])]

    def node(self, line: _Line, nodes: list[Node]) -> Node:
        """The node of one line, `%3 = op %1 key=value : type  # loc scope note`, with the graphs
        below it as attributes."""
        number = line.take("node")
        if number != f"%{len(nodes)}":
            line.wrong(f"expected %{len(nodes)}, found {number}")
        line.take("mark", "=")
        op, args, attrs = line.take("word"), [], dict[str, Any]()
        if op == "input":
            attrs["name"] = line.string()
        while line.sees("node"):
            args.append(self.ref(line, nodes))
        while line.sees("word") and line.follows("="):
            key = line.take("word")
            line.take("mark", "=")
            if key in attrs:
                line.wrong(f"attribute {key!r} is given twice")
            attrs[key] = self.value(line)
        line.take("mark", ":")
        if line.skip("mark", "("):
            types = line.listed(lambda: self.type(line), ")")
        else:
            types = [self.type(line)]
        line.end()
        loc, scope, note = _read_comment(line)
        while self.at < len(self.lines) and self.lines[self.at].indent > line.indent:
            head = self.next()
            key = head.take("word")
            head.take("mark", "=")
            if head.skip("word", "tile"):
                attrs[key] = self.kernel(head)
                continue
            head.take("word", "graph")
            inner = head.name()
            head.end()
            attrs[key] = self.body(inner)
        return Node(op, tuple(args), tuple(types), attrs or NO_ATTRS, loc, scope, note)

    def kernel(self, head: _Line) -> Kernel:
        """The kernel of the lines below that begin with `|`."""
        from ..tile.text import parse as parse_kernel  # only for programs with kernels

        head.end()
        rows = []
        while self.at < len(self.lines) and self.lines[self.at].sees("kernel"):
            rows.append(self.next().take("kernel"))
        found: Kernel = self.guard(head, lambda: parse_kernel("\n".join(rows)))
        return found

    def type(self, line: _Line) -> TensorType:
        text = line.take("type")
        found: TensorType = self.guard(line, lambda: parse_type(text, self.mesh))
        return found

    def value(self, line: _Line) -> object:
        """An attribute: string, type, number, tuple, or one of the known words."""
        if line.sees("string"):
            return line.string()
        if line.sees("type"):
            return self.type(line)
        if line.sees("number"):
            number = line.take("number")
            return int(number) if number.lstrip("-").isdecimal() else float(number)
        if line.skip("mark", "("):
            return tuple(line.listed(lambda: self.value(line), ")"))
        word = line.take("word")
        if word in _WORDS:
            return _WORDS[word]
        if word not in BY_NAME:
            line.wrong(f"{word!r} is no value")
        return BY_NAME[word]


_QUOTED = re.compile(r"(loc|scope|note)=(\"(?:[^\"\\]|\\.)*\")(?:  |; |\Z)")


def _read_comment(line: _Line) -> tuple[str, str, str]:
    """(loc, scope, note) of a comment. The received bytes are skipped, as they are derived from the
    node."""
    fields = {"loc": "", "scope": "", "note": ""}
    remaining = line.comment
    while remaining:
        if quoted := _QUOTED.match(remaining):
            fields[quoted[1]] = json.loads(quoted[2])
            remaining = remaining[quoted.end() :]
            continue
        part = re.split(r"  |; ", remaining, maxsplit=1)
        remaining = part[1] if len(part) > 1 else ""
        word, _, text = part[0].partition(" ")
        if word == "inserted" and text:
            fields["note"] = text
        elif word == "receives":
            pass
        elif _LOC.match(part[0]):
            fields["loc"] = part[0]
        elif _SCOPE.match(part[0]):
            fields["scope"] = part[0]
        elif part[0].strip():
            line.wrong(f"a comment holds file:line, scope and reason, not {part[0]!r}")
    return fields["loc"], fields["scope"], fields["note"]
