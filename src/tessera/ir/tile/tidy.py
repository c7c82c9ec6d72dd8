"""Bodies of kernels as they are recorded: without what nothing uses, and with numbered values.

In a recorded body each value of a loop that is carried has a name of its own; `first` has the names
of their first values, which are those in the text.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from .body import Load, Loop, Op, Statement, Store, When, every


def tidy(body: Sequence[Statement], first: Mapping[str, str]) -> tuple[Statement, ...]:
    """The statements that write, and those that make what they read, with values %0, %1 and so
    on."""
    return tuple(_numbered(_used(body, set(), first), {}, first))


def reads(s: Statement, first: Mapping[str, str]) -> set[str]:
    """The values that a statement itself reads."""
    match s:
        case Op():
            return {*s.args}
        case Load():
            return set() if s.rows is None else {s.rows[1]}
        case Store():
            return {s.value}
        case Loop():
            return {*s.next, *(first[c] for c in s.carries)}
    return set()


def _used(
    block: Sequence[Statement], needed: set[str], first: Mapping[str, str]
) -> list[Statement]:
    """The statements that write, or make what is `needed`; adds the values that they read."""
    kept: list[Statement] = []
    for s in reversed(block):
        made = {s.result} if isinstance(s, Op | Load) else set()
        inside = set(needed)
        if isinstance(s, Loop | When):
            made = {*s.results} if isinstance(s, Loop) else made
            inside |= reads(s, first)
            s = replace(s, body=tuple(_used(s.body, inside, first)))
        if made & needed or any(not isinstance(x, Op | Load | Loop | When) for x in every((s,))):
            kept.insert(0, s)
            needed |= inside | reads(s, first)
    return kept


def _numbered(
    block: Sequence[Statement], names: dict[str, str], first: Mapping[str, str]
) -> Iterator[Statement]:
    """The statements with values named %0, %1 and so on; `names` has those named so far."""

    def new(name: str) -> str:
        return names.setdefault(name, f"%{len({*names.values()})}")

    for s in block:
        match s:
            case Op():
                args = tuple(names.get(a, a) for a in s.args)
                yield replace(s, result=new(s.result), args=args)
            case Load():
                rows = s.rows and (s.rows[0], names.get(s.rows[1], s.rows[1]))
                yield replace(s, result=new(s.result), rows=rows)
            case Store():
                yield replace(s, value=names.get(s.value, s.value))
            case Loop():
                names |= {c: names.get(first[c], first[c]) for c in s.carries}
                body = tuple(_numbered(s.body, names, first))
                carries, last = (tuple(names.get(v, v) for v in vs) for vs in (s.carries, s.next))
                results = tuple(map(new, s.results))
                yield replace(s, results=results, carries=carries, body=body, next=last)
            case When():
                yield replace(s, body=tuple(_numbered(s.body, names, first)))
            case _:
                yield s
