"""Check that all processes of a group call their programs in the same order.

The engine pairs the n-th collective of one process with the n-th of another, whichever programs
they belong to. So each process publishes its last calls in the processes' store, from a background
thread; before a value is copied to the host, its process compares them with those of the others.
"""

from __future__ import annotations

import atexit
import struct
import time
import zlib
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from threading import Event, Lock, Thread

import jax

from ...core.errors import UsageError
from ...core.limits import limits
from ...core.wording import nth, ranks_text
from ..jax_private import service
from .flight import Record, flight
from .store import LOOK_S, ended, unreachable

PUBLISHED_CALLS = 256  # last calls that each process publishes
_PAUSE_S = 0.002  # between two publications, unless a comparison in this process waits
_STUCK_S = 2.0  # a collective that takes longer has the calls compared while it waits
_END_S = 5.0  # for the last publication
_CALL = struct.Struct("<II")  # a program, and the checksum of all calls up to this one
_COUNT = struct.Struct("<Q")


@dataclass(frozen=True)
class Calls:
    """The calls of one process: their number, the last ones, and the text of the last one."""

    count: int
    last: bytes
    text: str

    def at(self, number: int) -> tuple[int, int] | None:
        """Returns (program, checksum) of a call, counted from 1; None if it is not published."""
        i = len(self.last) + (number - self.count - 1) * _CALL.size
        return _CALL.unpack_from(self.last, i) if 0 <= i < len(self.last) else None


class CallOrder:
    """This process's calls of programs that the processes of `group` run together."""

    def __init__(self, group: tuple[int, ...]) -> None:
        self.group = group
        self.path = f"tessera/calls/{','.join(map(str, group))}/"
        self.compared = 0  # calls known to be the same in all processes
        self._count = self._sum = self._told = 0
        self._last: deque[bytes] = deque(maxlen=PUBLISHED_CALLS)
        self._texts: dict[int, str] = {}  # of each program that was called
        self._text = ""
        self._lock = Lock()

    def came(self, program: str, text: str, new: bool) -> None:
        """Records a call of the program with this hash, described by `text`. A `new` program is
        recorded as 0: its hash is compared elsewhere (runtime/processes/program_consistency.py)."""
        number = int(program[:8], 16)
        with self._lock:
            self._texts[number] = self._text = text
            number = 0 if new else number
            self._count += 1
            self._sum = zlib.crc32(number.to_bytes(4, "little"), self._sum)
            self._last.append(_CALL.pack(number, self._sum))
        publisher().wake.set()

    def publish(self) -> None:
        """Writes the calls to the store. Raises RuntimeError if the store is unreachable."""
        own = self._calls()
        if self._told == own.count:
            return
        self._told = own.count
        said = _COUNT.pack(own.count) + own.last + own.text.encode()
        service().key_value_set_bytes(f"{self.path}{jax.process_index()}", said, True)

    def compare(self, record: Record | None = None, fix: str = "") -> None:
        """Waits until the others have made as many calls as this process, and compares them.

        Raises UsageError if they differ. Raises BackendError if a process does not come within the
        limit of a collective: it names the processes missing at `record`, and its advice begins
        with `fix`.
        """
        if self.compared == (mine := self._count):
            return
        begin_s, limit_s, looked_s, over = time.monotonic(), limits().collective_s, 0.0, False
        publisher().hurry.set()
        while True:
            try:
                calls = self._published()
            except RuntimeError as error:
                raise unreachable("the order of calls", error) from None
            if differs := self._difference(calls):
                publisher().raised = True
                raise differs
            missing = [r for r in self.group if r not in calls or calls[r].count < mine]
            if not missing:
                self.compared = mine
                return
            waited_s = time.monotonic() - begin_s
            if over or waited_s > limit_s:
                raise flight().late(record or flight().latest(self.group), limit_s, fix)
            if waited_s - looked_s > LOOK_S:
                # One more comparison: a process may have come to the call before it ended.
                looked_s, over = waited_s, bool(ended(missing))
            time.sleep(min(max(waited_s / 8, 1e-4), 0.01))

    def difference(self) -> UsageError | None:
        """Returns the error that names the first call in which the processes differ, if one is
        known."""
        with suppress(RuntimeError):  # the service has ended
            return self._difference(self._published())
        return None

    def _difference(self, calls: Mapping[int, Calls]) -> UsageError | None:
        found = sorted(filter(None, (self._first(c) for c in calls.values())))
        if not found:
            return None
        first = found[0]
        alike: dict[str, list[int]] = {}
        for rank, c in calls.items():
            if called := c.at(first):
                known = self._texts.get(called[0], "a program that is not known here")
                text = c.text if first == c.count else known
                alike.setdefault(text, []).append(rank)
        where = f"call {first}" if len(alike) > 1 else f"a call before the {nth(first)}"
        return UsageError(
            f"processes call their programs in another order: {where} differs",
            rows=[(ranks_text(ranks), text) for text, ranks in alike.items()],
            fix="make the same calls in one order in every process; what one finds out for itself,"
            " such as a time, all hear by dist.all_gather_object(value)",
        )

    def _first(self, other: Calls) -> int:
        """Returns the number of the first call in which `other` differs from this process; 0 if
        none."""
        mine = self._calls()
        upto = min(mine.count, other.count)
        if mine.at(upto) == other.at(upto):  # the checksum covers all calls up to `upto`
            return 0
        both = (
            (n, mine.at(n), other.at(n))
            for n in range(max(upto - PUBLISHED_CALLS + 1, 1), upto + 1)
        )
        return next((n for n, a, b in both if a and b and a != b), 0)

    def _calls(self) -> Calls:
        with self._lock:
            return Calls(self._count, b"".join(self._last), self._text)

    def _published(self) -> dict[int, Calls]:
        """Returns the calls of each process of the group: for the others, the published ones."""
        found = {jax.process_index(): self._calls()}
        for key, said in service().key_value_dir_get_bytes(self.path):
            if (rank := int(key.rpartition("/")[2])) not in found:
                (count,) = _COUNT.unpack_from(said)
                end = _COUNT.size + min(count, PUBLISHED_CALLS) * _CALL.size
                found[rank] = Calls(count, said[_COUNT.size : end], said[end:].decode())
        return dict(sorted(found.items()))


class Publisher:
    """A thread that publishes the calls of this process, and ends the process if a collective hangs
    because the calls differ."""

    def __init__(self) -> None:
        self.raised = False  # the main thread has raised the error
        self.wake = Event()
        self.hurry = Event()  # a comparison waits for calls that are not published yet
        self._over = False
        self._thread = Thread(target=self._run, name="tessera-calls", daemon=True)
        self._thread.start()
        atexit.register(self._end)

    def _run(self) -> None:
        while not self._over:
            came = self.wake.wait(LOOK_S)
            self.wake.clear()
            with suppress(RuntimeError):  # the service has ended: no other process reads the calls
                for order in [*_orders.values()]:
                    order.publish()
                    stuck = not came and not self.raised and flight().waits_s() > _STUCK_S
                    if stuck and (error := order.difference()):
                        flight().end(error)
            if came:
                self.hurry.wait(_PAUSE_S)
                self.hurry.clear()

    def _end(self) -> None:
        self._over = True
        self.wake.set()
        self._thread.join(_END_S)
        with suppress(RuntimeError):
            for order in [*_orders.values()]:
                order.publish()


@cache
def publisher() -> Publisher:
    """Returns the publisher of this process."""
    return Publisher()


_orders: dict[tuple[int, ...], CallOrder] = {}


def order_of(group: tuple[int, ...]) -> CallOrder:
    """Returns the calls of this process in a group of processes."""
    return _orders.setdefault(group, CallOrder(group))


def compare_calls() -> None:
    """Compares the calls of this process with those of each group that it ran programs with; called
    before a value is copied to the host. Raises UsageError if they differ, BackendError if a
    process does not come to the same call."""
    for order in [*_orders.values()]:
        order.compare()
