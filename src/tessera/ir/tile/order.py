"""The order of accesses on a mesh: who has seen whose accesses complete, through puts and waits.

An access is ordered before another one if a chain leads there: of the device's own order, of a slot
that was set and waited for, of a barrier. Devices run as far as they can; a slot is set once, so
whether all of them end does not depend on their speeds. A put accesses its tiles at any time from
its start until it is known to have arrived: at the wait for its slot, or at the own `quiet`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from .body import Enter, Load, Put, Quiet, Store, Wait, where
from .kernel import Kernel
from .trace import Access, Place


class Fault(NamedTuple):
    """A mistake in a kernel: its kind, what is wrong, the line, and a way out."""

    kind: str
    what: str
    line: str
    fix: str


@dataclass(slots=True)
class _Use:
    """A use of a tile by a device: at its own position, or by its put number `put`. `seen` counts
    the accesses of each device that are complete before it, `arrived` has a bit for each put."""

    a: Access
    device: int
    position: int
    seen: tuple[int, ...]
    arrived: int
    writes: bool
    put: int = -1

    def is_before(self, other: _Use) -> bool:
        """Returns whether it is complete when `other` begins."""
        if self.put >= 0:
            return bool(other.arrived >> self.put & 1)
        if self.device == other.device:
            return self.position < other.position
        return other.seen[self.device] > self.position


@dataclass(slots=True)
class _Device:
    accesses: tuple[Access, ...]
    seen: tuple[int, ...]
    arrived: int = 0
    position: int = 0
    puts: int = 0  # a bit for each of its own
    came: bool = False  # to the barrier at its position, which has let it go


def communication(k: Kernel, accesses: Mapping[Place, tuple[Access, ...]]) -> list[Fault]:
    """The mistakes in puts, waits, barriers and accesses of symmetric memory."""
    run = _Run(k, accesses)
    found = list(run.slots())
    if not found or all(f.kind in ("unwaited", "itself") for f in found):
        stuck = list(run.advance())
        found += stuck or [*run.ends(), *run.conflicts()]
    return found


class _Run:
    def __init__(self, k: Kernel, accesses: Mapping[Place, tuple[Access, ...]]) -> None:
        self.k = k
        self.number = {rank: n for n, rank in enumerate(k.ranks)}
        none = (0,) * len(k.ranks)
        self.devices = [
            _Device(accesses[rank], tuple(int(i == n) for i in range(len(none))))
            for n, rank in enumerate(k.ranks)
        ]
        self.uses: dict[tuple[int, str, Place], list[_Use]] = {}
        self.puts: list[_Use] = []
        self.setter: dict[tuple[int, str, Place], int] = {}  # the put that sets a slot

    def slots(self) -> Iterator[Fault]:
        """Slots that two puts set, or that only one side uses; puts of a tile onto itself."""
        setters: dict[tuple[int, str, Place], Access] = {}
        waits: dict[tuple[int, str, Place], Access] = {}
        for n, device in enumerate(self.devices):
            for a in device.accesses:
                if isinstance(a.s, Wait):
                    waits[n, a.s.sig, a.slot] = a
                if not isinstance(a.s, Put):
                    continue
                key = (self.number[a.rank], a.s.sig, a.slot)
                if key in setters:
                    fix = "give each put a slot of its own"
                    yield Fault("reused slot", f"two puts set {self._slot(key)}", where(a.s), fix)
                setters[key] = a
                if key[0] == n and (a.s.src, a.at) == (a.s.dst, a.to):
                    fix = "put to another tile or another device"
                    what = f"rank {self._rank(n)} puts {_tile(a.s.dst, a.to)} onto itself"
                    yield Fault("itself", what, where(a.s), fix)
        for key, a in setters.items():
            if key not in waits:
                fix = "wait for it before the tile is used, at the latest at the end"
                what = f"{self._slot(key)} is set, and nobody waits for it"
                yield Fault("unwaited", what, where(a.s), fix)
        for key, a in waits.items():
            if key not in setters:
                fix = "put to this slot, or leave the wait out"
                what = f"{self._slot(key)} is waited for, and no put sets it"
                yield Fault("unset", what, where(a.s), fix)

    def advance(self) -> Iterator[Fault]:
        """Runs all devices to their ends. Yields a fault if they wait for each other."""
        while sum(self._step(n) for n in range(len(self.devices))):
            pass
        stuck = [n for n, d in enumerate(self.devices) if d.position < len(d.accesses)]
        if stuck:
            texts = [f"rank {self._rank(n)} at {self._at(n)}" for n in stuck[:4]]
            barrier = any(self._is_missed(n) for n in stuck)
            kind = "barrier" if barrier else "cycle"
            fix = (
                "let all devices along the axes enter equally often"
                if barrier
                else "put before the wait, as the others wait for that put"
            )
            what = f"devices wait for each other: {', '.join(texts)}"
            yield Fault(kind, what, where(self._next(stuck[0]).s), fix)

    def _group(self, n: int, s: Enter) -> list[int]:
        """The devices that meet at a barrier of device `n`."""
        stays = [i for i, (axis, _) in enumerate(self.k.mesh) if axis not in s.axes]
        own = self.k.ranks[n]
        return [m for m, r in enumerate(self.k.ranks) if all(r[i] == own[i] for i in stays)]

    def _is_missed(self, n: int) -> bool:
        """Returns whether device `n` is at a barrier to which another one never comes."""
        s = self._next(n).s
        return isinstance(s, Enter) and not all(
            any(
                isinstance(a.s, Enter) and {*a.s.axes} == {*s.axes}
                for a in d.accesses[d.position :]
            )
            for d in (self.devices[m] for m in self._group(n, s))
        )

    def _next(self, n: int) -> Access:
        return self.devices[n].accesses[self.devices[n].position]

    def _at(self, n: int) -> str:
        a = self._next(n)
        return f"{a.s.sig}[{_ints(a.slot)}]" if isinstance(a.s, Wait) else "enter"

    def _step(self, n: int) -> bool:
        """Runs device `n` until it must wait. Returns whether it came further."""
        d, begin = self.devices[n], self.devices[n].position
        while d.position < len(d.accesses):
            a = d.accesses[d.position]
            match a.s:
                case Load() | Store():
                    self._use(n, a, a.s.ref, a.at, isinstance(a.s, Store))
                case Put():
                    put = len(self.puts)
                    self._use(n, a, a.s.src, a.at, False, put)
                    target = self.number[a.rank]
                    self.puts.append(self._use(n, a, a.s.dst, a.to, True, put, target))
                    self.setter[target, a.s.sig, a.slot] = put
                    d.puts |= 1 << put
                case Wait():
                    put = self.setter.get((n, a.s.sig, a.slot), -1)
                    if put < 0:
                        break
                    by = self.puts[put]
                    d.seen = _both(d.seen, _with(by.seen, by.device, by.position + 1))
                    d.arrived |= by.arrived | 1 << put
                case Enter():
                    if not self._enter(n, a.s):
                        break
                case Quiet():
                    d.arrived |= d.puts
            d.position += 1
        return d.position > begin

    def _enter(self, n: int, s: Enter) -> bool:
        """Returns whether all devices of the group are at this barrier, or were."""
        d = self.devices[n]
        if d.came:  # the last one of the group has let it go
            d.came = False
            return True
        group = self._group(n, s)
        for m in group:
            e = self.devices[m]
            next_s = self._next(m).s if e.position < len(e.accesses) and not e.came else None
            if not isinstance(next_s, Enter) or {*next_s.axes} != {*s.axes}:
                return False
        seen, arrived = (0,) * len(self.devices), 0
        for m in group:
            e = self.devices[m]
            seen, arrived = _both(seen, _with(e.seen, m, e.position + 1)), arrived | e.arrived
        for m in group:
            self.devices[m].seen, self.devices[m].arrived = seen, arrived
            self.devices[m].came = m != n
        return True

    def _use(
        self, n: int, a: Access, ref: str, at: Place, writes: bool, put: int = -1, on: int = -1
    ) -> _Use:
        d = self.devices[n]
        made = _Use(a, n, d.position, d.seen, d.arrived, writes, put)
        self.uses.setdefault((n if on < 0 else on, ref, at), []).append(made)
        return made

    # ---- after the run -------------------------------------------------------------------------
    def ends(self) -> Iterator[Fault]:
        """Puts to devices that may not have begun, and puts under way at the end."""
        for put, use in enumerate(self.puts):
            target = self.number[use.a.rank]
            if not use.seen[target]:
                what = f"rank {self._rank(use.device)} puts to rank {self._rank(target)}"
                fix = "enter the axis before the first put"
                what += ", which may not have begun"
                yield Fault("entry", what, where(use.a.s), fix)
            if not self.devices[use.device].arrived >> put & 1:
                what = f"a put of rank {self._rank(use.device)} may be under way at the end"
                yield Fault("quiet", what, where(use.a.s), "end the kernel with quiet")

    def conflicts(self) -> Iterator[Fault]:
        """Uses of one tile at once, of which one writes; and reads of what nobody has written."""
        kinds = {r.name: r.kind for r in self.k.refs}
        for (n, ref, at), uses in self.uses.items():
            racing: set[int] = set()
            tile = f"{_tile(ref, at)} on rank {self._rank(n)}"
            for put in (u for u in uses if u.put >= 0):
                for u in uses:
                    same = u is put or (u.put == put.put)
                    if same or not (u.writes or put.writes):
                        continue
                    if not u.is_before(put) and not put.is_before(u):
                        racing.add(id(u))
                        yield self._conflict(tile, put, u)
            written = [u for u in uses if u.writes]
            for u in uses:
                if u.writes or kinds[ref] == "in" or id(u) in racing:
                    continue
                if not any(w.is_before(u) for w in written):
                    what = f"{tile} is read before it is written"
                    yield Fault("unwritten", what, where(u.a.s), "store to it, or wait for a put")

    def _conflict(self, tile: str, put: _Use, u: _Use) -> Fault:
        line = where(u.a.s)
        if not u.writes and u.put < 0:
            fix = "wait for the put's slot before the load"
            return Fault("early read", f"{tile} is read while a put to it is under way", line, fix)
        if u.put >= 0:
            fix = "put to different tiles, or wait in between"
            return Fault("two puts", f"two puts use {tile} at once", line, fix)
        side = "to" if put.writes else "from"
        fix = "write to another tile, or wait for the put first (quiet, or its slot)"
        what = f"{tile} is written while a put {side} it is under way"
        return Fault("overwrite", what, line, fix)

    def _rank(self, n: int) -> str:
        return _ints(self.k.ranks[n])

    def _slot(self, key: tuple[int, str, Place]) -> str:
        return f"{_tile(key[1], key[2])} on rank {self._rank(key[0])}"


def _ints(at: Place) -> str:
    return ", ".join(map(str, at))


def _tile(name: str, at: Place) -> str:
    return f"{name}[{_ints(at)}]"


def _both(a: tuple[int, ...], b: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(map(max, a, b))


def _with(seen: tuple[int, ...], device: int, count: int) -> tuple[int, ...]:
    return (*seen[:device], max(seen[device], count), *seen[device + 1 :])
