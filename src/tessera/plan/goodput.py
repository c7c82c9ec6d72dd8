"""Goodput of a long run: the share of its time that makes progress which is kept.

Failures come at random at a constant rate. After each one the run goes back to its last checkpoint.
The best interval between checkpoints and the share of time are exact for this model (Young 1974 and
Daly 2006 approximate it); the hosts under repair are a birth-death process.

>>> run = Run(16384, 5.0, 2e-5, stall_s=5.0, restart_s=600.0, spares=20)
>>> round(mtbf_s(run) / 3600, 2), round(young_s(run)), round(best_interval_s(run))
(3.05, 331, 328)
>>> best = goodput(run)
>>> best.interval_steps, f"{best.share:.1%}"
(66, '91.9%')
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from ..core.declared import Count, Flag, Natural, Probability, Rate, Scale, Share
from ..core.errors import UsageError
from ..core.public import checked

DAY_S = 86400.0


@checked
@dataclass(frozen=True, slots=True)
class Run:
    """A run on `devices`, whose steps take `step_s`, and the failures that interrupt it.

    The rates are per device and hour, and further ones per host and hour. `stall_s` is the time
    that training waits for a checkpoint, `restart_s` the time from a failure to the first step
    after it: detection, new processes, loading, warm-up. Add to it the time for which a checkpoint
    is still being written after the stall, as a failure then loses that much more. `broken` is the
    share of failures after which a host is repaired, for `repair_s`; `spares` are further hosts.
    """

    devices: Count
    step_s: Scale
    failures_per_device_hour: Rate
    stall_s: Rate
    restart_s: Rate
    failures_per_host_hour: Rate = 0.0
    devices_per_host: Count = 8
    broken: Share = 1.0
    repair_s: Rate = DAY_S
    spares: Natural = 0

    @property
    def hosts(self) -> int:
        """The hosts that it runs on, without spares."""
        return -(-self.devices // self.devices_per_host)


@dataclass(frozen=True, slots=True)
class Goodput:
    """Shares of the time of a run; the first five add up to 1.

    `share` makes progress that is kept, `stalls` waits for checkpoints, `lost` is repeated after
    failures, `restarts` are restarts, `waiting` has too few hosts: the run waits, or computes more
    slowly with fewer. `interval_steps` lie between two checkpoints (0: none is needed).
    """

    share: float
    stalls: float
    lost: float
    restarts: float
    waiting: float
    interval_steps: int
    mtbf_s: float


def mtbf_s(run: Run) -> float:
    """Returns the mean time between failures of the whole run."""
    per_hour = run.devices * run.failures_per_device_hour + run.hosts * run.failures_per_host_hour
    return 3600 / per_hour if per_hour else math.inf


def young_s(run: Run) -> float:
    """Returns Young's interval between checkpoints: √(2 · stall · MTBF)."""
    return math.sqrt(2 * run.stall_s * mtbf_s(run))


def best_interval_s(run: Run) -> float:
    """Returns the time between two checkpoints, without the stall, that gives the best goodput.

    It is the root of e^((τ + stall) / MTBF) · (1 - τ / MTBF) = 1, and does not depend on the time
    of a restart. Without failures it is infinite.
    """
    mtbf = mtbf_s(run)
    if math.isinf(mtbf):
        return math.inf
    low, high = 0.0, 1.0  # τ / MTBF
    for _ in range(100):
        mid = (low + high) / 2
        if math.log1p(-mid) + mid + run.stall_s / mtbf > 0:
            low = mid
        else:
            high = mid
    return low * mtbf


@checked
def goodput(
    run: Run,
    interval_steps: Count | None = None,
    *,
    groups: Count | None = None,
    fold: Flag = True,
) -> Goodput:
    """Returns the expected shares of the time of `run`, with a checkpoint each `interval_steps`
    (None: the best number).

    If more hosts than its spares are down, the run waits. With `groups`, it goes on instead with
    fewer of that many data-parallel groups, until hosts are repaired: with `fold` on the largest
    number that divides them, as Tessera folds a mesh, else on all that are whole. Each growth is a
    restart. Raises UsageError if `groups` do not divide the devices.
    """
    if groups is not None and run.devices % groups:
        raise UsageError(
            f"goodput: {groups} groups do not divide the {run.devices} devices",
            fix="give the size of the data-parallel axis of the mesh",
        )
    mtbf = mtbf_s(run)
    if interval_steps is None:
        if math.isinf(mtbf):
            return Goodput(1.0, 0.0, 0.0, 0.0, 0.0, 0, mtbf)
        best = max(1.0, best_interval_s(run) / run.step_s)
        around = {math.floor(best), math.ceil(best)}
        found = [goodput(run, n, groups=groups, fold=fold) for n in around]
        return max(found, key=lambda g: g.share)
    work_s = interval_steps * run.step_s
    period = (work_s + run.stall_s) / mtbf
    # The part of the time outside of restarts after which no failure comes before a checkpoint.
    whole = period / math.expm1(period) if 0 < period < 700 else float(period == 0)
    up = math.exp(-run.restart_s / mtbf)  # the part of the time outside of restarts
    states = _states(run, groups, fold)
    speed = sum(s.chance * s.speed for s in states)
    grown = min(1.0, sum(s.grows_per_s for s in states) * run.restart_s)
    on = speed * (1 - grown)
    kept, stall = on * up * whole, run.stall_s / (work_s + run.stall_s)
    restarts = on * (1 - up) + speed * grown
    lost = on * up * (1 - whole)
    return Goodput(
        kept * (1 - stall), kept * stall, lost, restarts, 1 - speed, interval_steps, mtbf
    )


@checked
def spares_for(run: Run, availability: Probability = 0.999) -> int:
    """Returns the fewest spare hosts with which `run` has enough hosts for this share of the
    time."""
    spares = 0
    while sum(s.chance * s.speed for s in _states(replace(run, spares=spares))) < availability:
        spares += 1
    return spares


# -- hosts under repair ----------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class _State:
    """A number of hosts under repair: the share of time, the speed of the run in it, and how often
    a second of all time a repair ends in it that makes a run go faster that computes meanwhile."""

    chance: float
    speed: float
    grows_per_s: float


def _states(run: Run, groups: int | None = None, fold: bool = True) -> list[_State]:
    """The states of the birth-death process with 0, 1, 2, ... hosts down. Only hosts that compute
    fail; each is repaired on its own."""
    load = run.broken * run.repair_s / mtbf_s(run)  # hosts that fail in the time of a repair
    rows, weight, total = [(1.0, 1.0)], 1.0, 1.0  # weights and speeds
    while rows[-1][1]:
        down = len(rows)
        weight *= load * rows[-1][1] / down
        if weight < 1e-14 * total and down > load:
            break
        rows.append((weight, _speed(run, down, groups, fold)))
        total += weight
        if total > 1e200:  # only ratios count
            rows, weight, total = [(w / total, s) for w, s in rows], weight / total, 1.0
    found = []
    for down, (w, speed) in enumerate(rows):
        grows = down > 0 and 0 < speed < rows[down - 1][1]
        found.append(_State(w / total, speed, w / total * down / run.repair_s if grows else 0.0))
    return found


def _speed(run: Run, down: int, groups: int | None, fold: bool) -> float:
    """The speed of the run with `down` hosts under repair, relative to that with all."""
    missing = max(0, down - run.spares)
    if groups is None or not missing:
        return float(not missing)
    left = groups * (run.hosts - missing) // run.hosts
    while fold and left and groups % left:
        left -= 1
    return left / groups


__all__ = ["Goodput", "Run", "best_interval_s", "goodput", "mtbf_s", "spares_for", "young_s"]
