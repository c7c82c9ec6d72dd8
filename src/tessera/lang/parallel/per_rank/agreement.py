"""Checks that the ranks of a local body agree, before anything runs.

They compare the order of collectives, the messages, and the returned structures. The errors name
the ranks that differ, and their lines.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from ....core.errors import UsageError, line_of
from ....core.wording import nth, ranks_text
from ....ir.graph.node import Node
from ....ops.redistribute import COLLECTIVES
from ...record.tree import path_name
from ...value.tensor import Tensor
from ..local.ranks import Log, Waits


def check_order(logs: Sequence[Log]) -> None:
    """Raises UsageError unless all ranks issue the same collectives in the same order."""
    for k in range(max(len(log.calls) for log in logs)):
        seen: dict[tuple[Any, ...] | None, list[int]] = {}
        where: dict[tuple[Any, ...] | None, str] = {}
        for log in logs:
            call = log.calls[k] if k < len(log.calls) else None
            key = call.key if call is not None else None
            seen.setdefault(key, []).append(log.rank)
            where.setdefault(key, call.loc if call is not None else "")
        if len(seen) > 1:
            rows = [(ranks_text(r), _call_text(key, where[key])) for key, r in seen.items()]
            raise UsageError(
                f"ranks issue different collectives: the {nth(k + 1)} of each does not match",
                rows=rows,
                fix="issue the same collectives in the same order on every rank",
                at="",
            )


def check_collectives(logs: Sequence[Log], parts: Iterable[tuple[Node, set[int]]]) -> None:
    """Raises UsageError if some ranks lack a collective that the body did not issue itself, such as
    the completion of a gradient."""
    every = set(range(len(logs)))
    for n, ranks in parts:
        if n.op in COLLECTIVES and ranks != every:
            others = sorted(every - ranks)
            kind = f"{n.op} {n.args[0].type} over {', '.join(n.attrs['axes'])}"
            derived = "gradient" in n.note
            raise UsageError(
                "ranks issue different collectives" + ": their gradients differ" * derived,
                rows=[
                    (ranks_text(sorted(ranks)), f"{kind} at {n.loc or 'here'}"),
                    (ranks_text(others), "not this one"),
                ],
                fix="take the gradient of one loss on every rank, and choose in it by a tensor:"
                " ts.where(ts.mesh.current().rank == 0, a, b)"
                if derived
                else "issue the same collectives in the same order on every rank",
                at="",
            )


def check_messages(logs: Sequence[Log]) -> None:
    """Raises UsageError if a message is sent and never received."""
    for log in logs:
        for (to, name), items in log.sent.items():
            got = len(logs[to].taken.get((log.rank, name), []))
            if got < len(items):
                raise UsageError(
                    f"send: rank {to} does not receive what rank {log.rank} sends as {name!r}",
                    sent=f"{len(items)} times, received {got} times",
                    fix="send and recv in pairs, with the same name and in one order",
                    at=items[got].loc,
                )


def check_structure(logs: Sequence[Log]) -> None:
    """Raises UsageError unless all ranks return the same keys and lengths."""
    first = logs[0]
    for log in logs[1:]:
        if log.spec != first.spec:
            raise UsageError(
                "ranks return different structures",
                rows=[
                    (f"rank {x.rank}", ", ".join(map(path_name, x.paths[:8])) or "one value")
                    for x in (first, log)
                ],
                fix="return the same keys and lengths on every rank",
            )


def progress(logs: Sequence[Log], waits: dict[int, Waits]) -> bool:
    """Returns whether one of the waiting ranks can go on with a message sent since."""
    for rank, wait in waits.items():
        taken = len(logs[rank].taken.get((wait.source, wait.name), []))
        if len(logs[wait.source].sent.get((rank, wait.name), [])) > taken:
            return True
    return False


def raised_error(
    logs: Sequence[Log], waits: dict[int, Waits], raised: dict[int, Exception]
) -> UsageError:
    """The error if the bodies of some ranks raised: it names them, and the lines where the others
    go on."""
    groups: dict[str, list[int]] = {}
    for log in logs:
        if log.rank in raised:
            error = raised[log.rank]
            first = next(iter(str(error).splitlines()), "")
            message = f"raises {type(error).__name__}: {first}".rstrip(": ")
            text = message + (f" at {at}" if (at := line_of(error)) else "")
        elif log.rank in waits:
            wait = waits[log.rank]
            text = f"waits for {wait.name!r} of rank {wait.source} at {wait.loc or 'here'}"
        else:
            k = min(len(logs[r].calls) for r in raised)
            next_call = log.calls[k] if k < len(log.calls) else None
            text = (
                "goes on to " + _call_text(next_call.key, next_call.loc)
                if next_call is not None
                else "goes on to its end"
            )
        groups.setdefault(text, []).append(log.rank)
    return UsageError(
        f"{ranks_text(sorted(raised))} of a body raised, the others did not",
        rows=[(ranks_text(ranks), text) for text, ranks in groups.items()],
        fix="let all ranks raise, or none: check what all of them know",
        at="",
    )


def deadlock(waits: dict[int, Waits]) -> UsageError:
    rows = [
        (f"rank {rank}", f"waits for {wait.name!r} of rank {wait.source} at {wait.loc or 'here'}")
        for rank, wait in sorted(waits.items())[:8]
    ]
    return UsageError(
        "ranks wait for each other and none goes on",
        rows=rows,
        fix="send before you receive, in an order in which one rank can always go on",
    )


def differ(label: str, path: str, values: Sequence[Any]) -> UsageError:
    rows: list[tuple[str, object]] = []
    for rank, v in enumerate(values):
        text = str(v.type) if isinstance(v, Tensor) else str(v)
        if text not in [t for _, t in rows]:
            rows.append((f"rank {rank}", text))
    return UsageError(
        f"ranks return different {label}" + (f" as {path}" if path else ""),
        rows=rows[:4],
        fix="return values of one kind, shape and dtype from every rank",
    )


def _call_text(key: tuple[Any, ...] | None, loc: str) -> str:
    if key is None:
        return "none"
    kind, axes, *rest = key
    what = rest[-1] if rest else ""
    more = "".join(f" {v}" for v in rest[:-1])
    return f"{kind} over {', '.join(axes)}{more} {what}".rstrip() + (f" at {loc}" if loc else "")
