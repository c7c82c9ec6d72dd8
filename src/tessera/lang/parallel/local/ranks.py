"""The recording of one rank, for bodies that are recorded once per rank: its `Log`.

A collective is not built during such a recording: its result is an input, until all ranks are
recorded and lang/parallel/per_rank/merge.py makes one program of them. Sends and receives are
matched by ranks and name.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from ....core.context import replaced, settings
from ....core.errors import UsageError, caller
from ....core.layout import TensorType
from ....ir.graph.node import Node
from ...math import functions
from ...record.local_view import View, view, view_of
from ...record.recorder import Recorder, current, recording, symbolic
from ...record.tree import Path, path_name
from ...value.tensor import Tensor

Build = Callable[[Tensor], Tensor]


@dataclass(eq=False)
class Issued:
    """A collective or message of a rank: its kind, its operand, and the input that stands for its
    result."""

    key: tuple[Any, ...]
    loc: str
    operand: Node | None = None
    result: Node | None = None
    build: Build | None = None


@dataclass(eq=False)
class Log:
    """The record of one rank: its collectives in order, its messages, and the values that it takes
    by name."""

    rank: int
    every: list[Log]
    calls: list[Issued] = field(default_factory=list)
    sent: dict[tuple[int, str], list[Issued]] = field(default_factory=dict)
    taken: dict[tuple[int, str], list[Issued]] = field(default_factory=dict)
    asked: dict[tuple[int, str], Node] = field(default_factory=dict)
    recorder: Recorder | None = None
    paths: list[Path] = field(default_factory=list)
    spec: Any = None
    leaves: list[Any] = field(default_factory=list)
    done: bool = False

    @property
    def view(self) -> View:
        """The view of the rank."""
        seen = view_of(self.recorder)
        assert seen is not None
        return seen

    def returned(self, name: str) -> Tensor | None:
        """The tensor that the rank returns under `name`, or None."""
        for path, leaf in zip(self.paths, self.leaves, strict=True):
            if path and str(path[-1]) == name and isinstance(leaf, Tensor):
                return leaf
        return None


class Waits(Exception):
    """This rank needs a value that another rank has not sent yet."""

    def __init__(self, source: int, name: str, loc: str) -> None:
        self.source, self.name, self.loc = source, name, loc


# -- during the recording of a body ---------------------------------------------------------------
def _log() -> Log | None:
    seen = view()
    log: Log | None = seen.log if seen is not None else None
    return log


def issue(key: tuple[Any, ...], x: Tensor, build: Build) -> Tensor:
    """Issues a collective on `x`: built now, or after all ranks' operands are known."""
    log, recorder = _log(), current()
    if recorder is not None and (local_view := view()) is not None:
        x = local_view.handed_in(recorder, x)
    if log is None or recorder is None:
        return build(x)
    if recorder is not log.recorder:
        raise UsageError(
            f"{key[0]}: a collective in a loop's body, in a body that tells its ranks apart",
            fix="take it out of the loop, or do without the rank as a number",
        )
    local_view = log.view
    t = x.type if x.type.mesh is not None else x.type.on(local_view.mesh)
    varying = functions.relayout(x, t.with_varying((*t.varying, *local_view.axes)))
    result = recorder.builder.input(_type_of(recorder, varying, build), f"{key[0]}{len(log.calls)}")
    ordered = settings().ordered

    def later(block: Tensor) -> Tensor:
        with replaced(ordered=ordered):
            return build(block)

    key = (*key, *(["in a fixed order"] if ordered else []), str(varying.type))
    log.calls.append(Issued(key, caller(), recorder.node(varying), result, later))
    return symbolic(result, recorder)


def _type_of(around: Recorder, x: Tensor, build: Build) -> TensorType:
    """The type of `build(x)`, found in a scratch recording."""
    seen = view_of(around)
    assert seen is not None
    scratch = Recorder("scratch", around)
    scratch.frame = replace(seen, rank=None, log=None)
    with recording(scratch):
        return build(scratch.input(x.type)).type


def mark(key: tuple[Any, ...]) -> None:
    """Logs a barrier: all ranks must reach it, and no data moves."""
    log = _log()
    if log is not None:
        log.calls.append(Issued(key, caller()))


def send(x: Tensor, to: int, name: str) -> None:
    log, recorder = _log(), current()
    assert log is not None and recorder is not None
    item = Issued(("send", to, name), caller(), recorder.node(x))
    log.sent.setdefault((to, name), []).append(item)


def recv(source: int, name: str) -> Tensor:
    """The next value that rank `source` sent to this rank under `name`. If it is not sent yet,
    raises Waits, and this rank is recorded again later. Raises UsageError if it is never sent."""
    log, recorder = _log(), current()
    assert log is not None and recorder is not None
    mine = log.taken.setdefault((source, name), [])
    theirs = log.every[source].sent.get((log.rank, name), [])
    if len(theirs) <= len(mine):
        if log.every[source].done:
            raise UsageError(
                f"recv: rank {source} sends nothing (more) to rank {log.rank} under {name!r}",
                fix="send and recv in pairs, with the same name and in one order",
            )
        raise Waits(source, name, caller())
    operand = theirs[len(mine)].operand
    assert operand is not None
    t = operand.type if operand.type.mesh is not None else operand.type.on(log.view.mesh)
    result = recorder.builder.input(t.with_varying(log.view.axes), f"recv_{name}")
    mine.append(Issued(("recv", source, name), caller(), None, result))
    return symbolic(result, recorder)


class Promised(Tensor):
    """A value that another rank returns under a name. Its type is known after that rank is
    recorded; a read of the type before raises Waits."""

    _trace: Recorder | None

    def __init__(self, log: Log, owner: int, name: str) -> None:
        self._log, self.owner, self.key, self._loc = log, owner, name, caller()
        self._data = None
        self._trace = log.recorder

    @property
    def type(self) -> TensorType:  # type: ignore[override]  # known late
        theirs = self._log.every[self.owner]
        if not theirs.done:
            raise Waits(self.owner, self.key, self._loc)
        value = self.value()
        seen = self._log.view
        t = value.type if value.type.mesh is not None else value.type.on(seen.mesh)
        return t.with_varying(a for a in t.varying if a not in seen.axes)

    def value(self) -> Tensor:
        """The tensor that the owner returns. Raises UsageError if there is none."""
        theirs = self._log.every[self.owner]
        found = theirs.returned(self.key)
        if found is None:
            raise UsageError(
                f"recv_from: rank {self.owner} returns nothing under {self.key!r}",
                returned=", ".join(map(path_name, theirs.paths[:8])) or "nothing",
                fix="return it there in a dict under that key",
                at=self._loc,
            )
        return found

    @property
    def _node(self) -> Node:  # type: ignore[override]  # made at the first use
        asked = self._log.asked
        if (self.owner, self.key) not in asked:
            assert self._trace is not None
            name = f"from_{self.owner}_{self.key}"
            node = self._trace.builder.input(self.type, name)
            asked[self.owner, self.key] = node
        return asked[self.owner, self.key]


def recv_from(owner: int, name: str) -> Tensor:
    log = _log()
    assert log is not None
    if owner == log.rank:
        raise UsageError(
            f"recv_from: rank {owner} asks itself for {name!r}",
            fix="return the value on its owner, and ask for it on the other ranks",
        )
    return Promised(log, owner, name)
