"""Check that all processes hold the same program: schedule hashes compared before the first run.

The engine does not compare: if one process sums and another takes a maximum, or two sums come in
another order, results are wrong without an error. Programs are counted per group of processes, so a
program that only some processes run is found, too.
"""

from __future__ import annotations

import re
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from threading import Thread, current_thread, main_thread
from typing import Any
from weakref import WeakSet

import jax

from ...core.errors import TesseraError, UsageError, caller
from ...core.limits import limits
from ...core.mesh import Mesh
from ...core.wording import nth, ranks_text, record_text
from ...ir.schedule.schedule import Schedule
from ..jax_private import service
from .call_order import order_of
from .flight import Record, flight
from .store import unreachable, wait_for

Run = Callable[..., list[Any]]
_LOC = re.compile(r"  # (\S+:\d+)")
_counts: dict[tuple[int, ...], int] = {}
_last: Thread | None = None  # the last thread that ran a program over several processes
_mixed = ""  # the names of two threads that alternated
_ran: WeakSet[Thread] = WeakSet()  # all threads that ran one
# Seconds by which the flight recorder's watch is delayed: a wait in the store raises the error
# first.
_RAISES_S = 10.0
IN_ALL = "run that line in all of them, also where it is the first read of a tensor; "


def processes_of(mesh: Mesh | None) -> tuple[int, ...]:
    """Returns the processes whose devices are in `mesh`."""
    if mesh is None:
        return (jax.process_index(),)
    every = jax.devices()
    return tuple(sorted({every[i].process_index for i in mesh.physical.device_ids}))


def guarded(run: Run, schedule: Schedule, whole: bool) -> Run:
    """Returns `run` with a comparison of `schedule` between the processes before its first call. If
    `run` is one program (`whole`), each call is recorded; step by step, the steps are.

    In a single process it returns `run` itself.
    """
    if jax.process_count() == 1:
        return run
    group = processes_of(schedule.mesh)
    if len(group) == 1:
        return run
    agreed = False
    size = sum(schedule.buffers[b].local_bytes for b in schedule.outputs)
    collectives = [n for n, _ in schedule.collectives()]
    at = next((n.loc for n in collectives if n.loc), "")
    description = (
        f"{len(collectives)} collectives" if len(collectives) != 1 else f"one {collectives[0].op}"
    )
    order, text = order_of(group), record_text(schedule.name, "", description, at)

    def call(*args: Any) -> list[Any]:
        nonlocal agreed, text
        first = not agreed
        if collectives or not whole:
            need_one_thread(schedule.name)
        if first:
            text = f"the {nth(_counts.get(group, 0) + 1)} program, {text}"
        if collectives or first:
            order.came(schedule.hash, text, first)
        if first:
            agree(schedule, group)
            agreed = True
        if not whole:
            return run(*args)
        record = flight().begin(schedule.name, "", description, at, group, size, compiles=first)
        try:
            outs = run(*args)
        except Exception as error:
            flight().failed(record, error)
            if differs := order.difference():
                raise differs from None
            if flight().ended_ranks(record):
                raise flight().late(record, record.limit_s) from None
            raise
        flight().dispatched(record, outs)
        return outs

    call.__wrapped__ = run  # type: ignore[attr-defined]
    return call


def need_one_thread(name: str) -> None:
    """Raises UsageError if threads alternate in running programs over several processes: another
    process may have another order, and collectives would be mismatched. From then on every thread
    gets the error. A thread may follow the main thread, or one that has ended."""
    global _last, _mixed
    me, last = current_thread(), _last
    if me is last and not _mixed:
        return
    if last is not None and last.is_alive() and (me in _ran or last is not main_thread()):
        _mixed = _mixed or f"{last.name}, {me.name}"
    if _mixed:
        raise UsageError(
            f"{name}: two threads run programs over several processes",
            threads=_mixed,
            fix="call them from one thread, so that all processes run them in one order; what is on"
            " the process's own devices may run in any",
        )
    _ran.add(me)
    _last = me


def agree(schedule: Schedule, group: Sequence[int]) -> None:
    """Compares the hash of `schedule` with that of every process in `group`, within the limit.

    Raises UsageError, in all of them, if they differ: it names the ranks, the first step that
    differs and both lines. Raises BackendError if a process does not come.
    """
    key = tuple(group)
    k = _counts[key] = _counts.get(key, 0) + 1
    me, limit_s = jax.process_index(), limits().collective_s
    path = f"tessera/agree/{','.join(map(str, key))}/{k}"
    client = service()
    with comparison(schedule.name, f"the {nth(k)} program is compared", key) as record:
        order_of(key).compare(record, IN_ALL)
        client.key_value_set_bytes(f"{path}/hash/{me}", schedule.hash.encode())
        hashes = gathered(path + "/hash/", key, limit_s)
        if hashes is None:
            raise flight().late(record, limit_s, IN_ALL)
        if len(set(hashes.values())) > 1:
            client.key_value_set_bytes(f"{path}/text/{me}", zlib.compress(schedule.text.encode()))
            texts = _texts(path + "/text/", hashes, limit_s)
            if texts is None:
                raise flight().late(record, limit_s)
            raise differ(k, hashes, texts)


@contextmanager
def comparison(name: str, operation: str, group: tuple[int, ...]) -> Iterator[Record]:
    """A context for an exchange between the processes of `group`, recorded by the flight recorder.
    Raises BackendError if the coordination service cannot be reached."""
    record = flight().begin(name, "", operation, caller() or "", group, 0)
    record.limit_s += _RAISES_S
    try:
        yield record
    except TesseraError as error:
        flight().failed(record, error)
        raise
    except RuntimeError as error:
        flight().failed(record, error)
        raise unreachable(name, error) from None
    flight().finish(record)


def gathered(prefix: str, group: Sequence[int], limit_s: float) -> dict[int, str] | None:
    """Returns the text of each of `group` under `prefix`; None if one is not there in time."""
    found = {}
    end_s = time.monotonic() + limit_s
    for rank in group:
        text = wait_for(f"{prefix}{rank}", end_s - time.monotonic(), rank)
        if text is None:
            return None
        found[rank] = text.decode()
    return found


def _texts(prefix: str, hashes: dict[int, str], limit_s: float) -> dict[str, str] | None:
    """Returns the schedules by their hashes, each from the first rank that has it."""
    end_s = time.monotonic() + limit_s
    found: dict[str, str] = {}
    for rank, name in hashes.items():
        if name not in found:
            packed = wait_for(f"{prefix}{rank}", end_s - time.monotonic(), rank)
            if packed is None:
                return None
            found[name] = zlib.decompress(packed).decode()
    return found


def differ(k: int, hashes: dict[int, str], texts: dict[str, str]) -> UsageError:
    """Returns the error that shows where the schedules of `texts` first differ."""
    name = next(iter(texts.values())).split()[1]
    lines = {h: t.split("\n") for h, t in texts.items()}
    longest = max(map(len, lines.values()))
    at = next(
        i
        for i in range(longest)
        if len({_without_comment(t[i]) if i < len(t) else None for t in lines.values()}) > 1
    )
    # A node says more about the difference than the step's buffers: find the first that differs.
    rows = []
    steps = []
    tells = {h: _telling(text, lines, at) for h, text in lines.items()}
    alike = (
        len(
            {
                _without_comment(text[i])
                for h, text in lines.items()
                if (i := tells[h][1]) < len(text)
            }
        )
        < 2
    )
    for h, text in lines.items():
        first, i = tells[h]
        steps.append(_step_of(text, i))
        where = f" at {m[1]}" if (m := _LOC.search(text[i] if i < len(text) else "")) else ""
        line = " ".join(_without_comment(text[i]).split()) if i < len(text) else "nothing more"
        step = f"s{steps[-1]} " if steps[-1] >= 0 and i < len(text) else ""
        of = (
            ", of " + _without_comment(text[first]).partition(" : ")[2]
            if alike and first < i
            else ""
        )
        line = f"{step}{line}{where}{of}"
        rows.append((ranks_text([r for r, x in hashes.items() if x == h]), line))
    place = f"step s{min(steps)}" if min(steps) >= 0 else "the first line"
    return UsageError(
        f"processes hold different schedules: {place} of the {nth(k)} program, {name}, differs",
        rows=rows,
        fix="run the same function with the same shapes, layouts and options on every rank",
        at="",
    )


def _telling(text: list[str], lines: dict[str, list[str]], at: int) -> tuple[int, int]:
    """Returns two line numbers in `text`: the first node that the others do not have at its place,
    and the line to show: that node, or the reader of an input that differs."""
    mine, others = _nodes(text), [_nodes(t) for t in lines.values()]
    for k, (i, node) in enumerate(mine):
        if any(k >= len(o) or o[k][1] != node for o in others):
            return i, next((j for j, said in mine[k:] if not said.startswith("input")), i)
    last = len(text) if any(len(o) > len(mine) for o in others) else at
    return last, last


def _nodes(text: list[str]) -> list[tuple[int, str]]:
    """Returns (line number, text) of each node, without its own name and the names of buffers."""
    found = []
    for i, line in enumerate(text):
        name, equals, said = _without_comment(line).partition(" = ")
        if equals and name.strip().startswith("%"):
            found.append((i, " ".join(re.sub(r'input "b\d+"', "input", said).split())))
    return found


def _without_comment(line: str) -> str:
    return line.partition("  # ")[0].rstrip()


def _step_of(text: list[str], i: int) -> int:
    """Returns the step of line `i`; -1 before the first."""
    for line in reversed(text[: i + 1]):
        if m := re.match(r"  s(\d+) ", line):
            return int(m[1])
    return -1
