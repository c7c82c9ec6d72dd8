"""Index expressions: integers and names with + - * // %, min and max, and conditions on them.

Both are values with a text, in one form: spaces and needless parentheses do not count.

>>> Index("( rank - s+x ) % x"), Index("K // (bk)"), Test("s>0 and (s < x - 1)")
((rank-s+x)%x, K//bk, s > 0 and s < x-1)
>>> Index("(i+1)*bq").value({"i": 2, "bq": 16}), Test("i == 0").value({"i": 2})
(48, False)
>>> Index("max(0, i - 1)").value({"i": 0})
0
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache, reduce
from types import CodeType
from typing import Any

from ...core.checks import string
from ...core.errors import GraphError, TesseraError
from ...core.wording import nearest

NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
MOST_CHARACTERS = 400  # of one expression: a deeper tree than Python's parser takes is not read
_ARITHMETIC = (ast.Add, ast.Sub, ast.Mult, ast.FloorDiv, ast.Mod)
_COMPARES = (ast.Lt, ast.LtE, ast.Gt, ast.GtE, ast.Eq, ast.NotEq)
# In code, functions have names that no size has. Both also take arrays.
_CALL = re.compile(r"\b(min|max)\(")
_BARE: dict[str, Any] = {
    "__builtins__": {},
    "min\u03bb": lambda a, b: a + (b - a) * (b < a),
    "max\u03bb": lambda a, b: a + (b - a) * (b > a),
}


def wrong(
    what: str,
    fix: str,
    error: type[TesseraError] = GraphError,
    rows: Iterable[tuple[str, object]] = (),
) -> TesseraError:
    """The error that `what` is wrong in a kernel."""
    return error(f"tile: {what}", rows=rows, fix=fix, at="")


@dataclass(frozen=True, slots=True)
class _Expression:
    """An expression over names, whose value is known as soon as those of the names are."""

    text: str

    def __post_init__(self) -> None:
        string("tile", "an expression", self.text)
        object.__setattr__(self, "text", _read(self.text, type(self) is Test)[0])

    @property
    def names(self) -> frozenset[str]:
        """The names that it reads."""
        return _read(self.text, type(self) is Test)[1]

    def _value(self, names: Mapping[str, int]) -> Any:
        code = _read(self.text, type(self) is Test)[2]
        try:
            return eval(code, _BARE, names)  # only what `_read` lets through
        except NameError as error:
            name = str(error.name)
            fix = f"use one of {nearest(name, names)}" if names else "write a number"
            raise wrong(f"{name!r} is not a known name in {self.text!r}", fix) from None
        except ZeroDivisionError:
            rows = [(n, names[n]) for n in sorted(self.names)]
            what = f"{self.text!r} divides by zero"
            raise wrong(what, "make the divisor at least 1", rows=rows) from None

    def __repr__(self) -> str:
        return self.text


class Index(_Expression):
    """An index, a size or a bound."""

    __slots__ = ()

    def value(self, names: Mapping[str, int]) -> int:
        """Its value under the values of `names`."""
        return int(self._value(names))

    def traced(self, names: Mapping[str, Any]) -> Any:
        """Its value, where values of names may be arrays that JAX traces."""
        return self._value(names)


class Test(_Expression):
    """A condition: comparisons of indices, joined by `and`, `or`, `not`."""

    __slots__ = ()
    __test__ = False  # pytest looks for classes of this name

    def value(self, names: Mapping[str, int]) -> bool:
        """Its value under the values of `names`."""
        return bool(self._value(names))

    def traced(self, names: Mapping[str, Any]) -> Any:
        """Its value, where values of names may be arrays that JAX traces."""
        return eval(_without_branches(self.text), _BARE, names)


@lru_cache(maxsize=4096)
def _read(text: str, is_test: bool) -> tuple[str, frozenset[str], CodeType]:
    """(The text in its one form, names, code) of an expression."""
    kind = "a condition" if is_test else "an index"
    fix = (
        "compare indices, as in: s > 0 and s < x-1"
        if is_test
        else "use whole numbers, names, + - * // %, min and max of two, as in: (i+1)*bq//bk"
    )

    def no(why: str) -> TesseraError:
        return wrong(f"{text!r} is not {kind}: {why}", fix)

    if len(text) > MOST_CHARACTERS or not text.isascii() or "\n" in text:
        raise no(f"it is not one line of at most {MOST_CHARACTERS} ASCII characters")
    if "%" in text and re.search(r"(?:^|[-+*/%(<>=]|\b(?:and|or|not)\b)\s*%\w", text):
        raise no("it reads a value, known only at run time")
    if re.search(r"\b\d+[A-Za-z_.]", text):
        raise no("it is not made of whole numbers and names")
    try:
        tree = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise no("it cannot be read") from None
    names: set[str] = set()

    def arithmetic(node: ast.expr) -> None:
        match node:
            case ast.Constant(value=int() as number) if not isinstance(number, bool):
                if number >= 2**31:
                    raise no(f"{number} is above 2**31 - 1")
            case ast.Name(id=name):
                names.add(name)
            case ast.BinOp(left=left, op=op, right=right) if isinstance(op, _ARITHMETIC):
                arithmetic(left)
                arithmetic(right)
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                arithmetic(operand)
            case ast.Call(ast.Name("min" | "max"), [left, right], []) if not is_test:
                arithmetic(left)
                arithmetic(right)
            case _:
                raise no(f"{ast.unparse(node)!r} is not allowed in it")

    def condition(node: ast.expr) -> ast.expr:
        match node:
            case ast.BoolOp(op=op, values=values):
                return ast.BoolOp(op, [condition(v) for v in values])
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                return ast.UnaryOp(ast.Not(), condition(operand))
            case ast.Compare(left=left, ops=ops, comparators=others):
                if not all(isinstance(op, _COMPARES) for op in ops):
                    raise no(f"{ast.unparse(node)!r} is not allowed in it")
                return ast.Compare(plain(left), ops, [plain(other) for other in others])
            case _:
                raise no(f"{ast.unparse(node)!r} compares nothing")

    def plain(node: ast.expr) -> ast.expr:
        """The node as a name that is its own text without spaces."""
        arithmetic(node)
        return ast.Name(ast.unparse(node).replace(" ", ""))

    try:
        one = ast.unparse((condition if is_test else plain)(tree))
        code = compile(_CALL.sub("\\1\u03bb(", one), "<tile>", "eval")
    except (RecursionError, MemoryError):
        raise no("it is too deep") from None
    return one, frozenset(names), code


@lru_cache(maxsize=256)
def _without_branches(text: str) -> CodeType:
    """The code of a condition with & and | in place of `and` and `or`."""

    def bits(node: ast.expr) -> ast.expr:
        match node:
            case ast.BoolOp(op=op, values=values):
                one: ast.operator = ast.BitAnd() if isinstance(op, ast.And) else ast.BitOr()
                return reduce(lambda a, b: ast.BinOp(a, one, b), map(bits, values))
            case ast.UnaryOp(operand=operand):
                return ast.Compare(bits(operand), [ast.Eq()], [ast.Constant(False)])
            case ast.Compare(left=left, ops=ops, comparators=others) if len(ops) > 1:
                ends = zip([left, *others], ops, others)  # one end more
                pairs = [ast.Compare(a, [op], [b]) for a, op, b in ends]
                return bits(ast.BoolOp(ast.And(), list(pairs)))
        return node

    tree = ast.Expression(bits(ast.parse(text, mode="eval").body))
    return compile(ast.fix_missing_locations(tree), "<tile>", "eval")


def sizes_of(texts: tuple[Index, ...], names: Mapping[str, int]) -> tuple[int, ...]:
    """The values of several expressions."""
    return tuple([t.value(names) for t in texts])


def parts(text: str) -> list[str]:
    """The expressions of a list; commas within parentheses are theirs.

    >>> parts("max(0, i), j")
    ['max(0, i)', ' j']
    """
    made, depth = [""], 0
    for c in text:
        depth += (c == "(") - (c == ")")
        if c == "," and not depth:
            made.append("")
        else:
            made[-1] += c
    return made
