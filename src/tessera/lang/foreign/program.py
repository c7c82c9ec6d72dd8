"""A program of another library as calls by name, and its run on tensors.

A reader (of `torch.export`, of a jaxpr) writes a `Program`; `play` runs it with the rules of that
library, while a function is recorded or at once. So each result has the layout that the ops of its
rule give it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ...core.errors import TesseraError
from .rules import Rules


class Ref(NamedTuple):
    """The value of this number in a program: its inputs come first, then the calls' results."""

    index: int  # type: ignore[assignment]  # a field, in place of the method of tuples


class Call(NamedTuple):
    """`outs = name(*args, **params)`, which the user wrote at `line` ("model.py:12", or "").

    Operands are `Ref`s, constants, `Program`s (the body of a loop), or lists, tuples and dicts of
    these. `outs` are numbers of values; a call with several has a rule that returns a sequence.
    """

    name: str
    args: Sequence[Any]
    params: dict[str, Any]
    outs: tuple[int, ...]
    line: str = ""


@dataclass
class Program:
    """A function as calls: values 0 to `inputs - 1` are its arguments, `outs` its results."""

    inputs: int
    calls: list[Call] = field(default_factory=list)
    outs: list[Any] = field(default_factory=list)


def play(program: Program, args: Sequence[Any], rules: Rules, caller: str) -> list[Any]:
    """The results of `program` for `args`, tensors or Python numbers. A rule gets a program among
    its operands as a function from a list of arguments to a list of results.

    Raises UsageError, in the name of `caller`, for a call without a rule; the error of a rule
    names the line of the user's program.
    """
    values: dict[int, Any] = dict(enumerate(args))
    last_use = _last_uses(program)

    def read(x: Any) -> Any:
        return _read(x, values, lambda body: bound(body, rules, caller))

    for i, call in enumerate(program.calls):
        operands = [read(x) for x in call.args]
        rule = rules.find(call.name, operands, caller, call.line)
        try:
            result = rule(*operands, **{k: read(v) for k, v in call.params.items()})
        except TesseraError as error:
            raise _located(error, call) from error.__cause__
        if len(call.outs) == 1 and not isinstance(result, (list, tuple)):
            result = (result,)
        values.update(zip(call.outs, result, strict=True))
        for dead in last_use.get(i, ()):
            del values[dead]
    return [read(x) for x in program.outs]


def _read(x: Any, values: dict[int, Any], function: Callable[[Program], Any]) -> Any:
    """The operand `x` with its values, and its programs as functions. (A function inside of `play`
    that calls itself would keep the values alive.)"""
    match x:
        case Ref():
            return values[x.index]
        case Program():
            return function(x)
        case dict():
            return {k: _read(v, values, function) for k, v in x.items()}
        case tuple() if hasattr(x, "_fields"):
            return x  # a record of the library, such as dimension numbers
        case list() | tuple():
            return type(x)([_read(v, values, function) for v in x])
    return x


def bound(program: Program, rules: Rules, caller: str) -> Callable[[Sequence[Any]], list[Any]]:
    """`program` as a function from a list of arguments to a list of results."""
    return lambda args: play(program, args, rules, caller)


def _located(error: TesseraError, call: Call) -> TesseraError:
    """`error` with the call and the user's line."""
    where = f"\n  in   : {call.name}" + (f", {call.line}" if call.line else "")
    if call.line and "\n  in   : " not in str(error):
        error.args = (f"{error.args[0]}{where}", *error.args[1:])
    return error


def _last_uses(program: Program) -> dict[int, list[int]]:
    """The values that no later call reads, by the number of the call that reads them last."""
    last: dict[int, int] = {}

    def note(x: Any, i: int) -> None:
        match x:
            case Ref():
                last[x.index] = i
            case dict():
                for v in x.values():
                    note(v, i)
            case list() | tuple():
                for v in x:
                    note(v, i)

    for i, call in enumerate(program.calls):
        for out in call.outs:
            last[out] = i
        note(call.args, i)
        note(call.params, i)
    note(program.outs, len(program.calls))
    ends: dict[int, list[int]] = {}
    for value, i in last.items():
        ends.setdefault(i, []).append(value)
    return ends
