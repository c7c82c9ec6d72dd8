"""Goodput: formulas against a simulation of failures, and against published figures."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from itertools import pairwise

import pytest

import tessera as ts
from tessera.plan.goodput import (
    Goodput,
    Run,
    best_interval_s,
    goodput,
    mtbf_s,
    spares_for,
    young_s,
)

HOUR, DAY = 3600.0, 86400.0
# 419 unexpected interruptions of 16,384 devices in 54 days (Llama 3).
LLAMA = 419 / (54 * 24 * 16384)


def simulated(run: Run, interval_steps: int, groups: int | None, fold: bool, days: int) -> float:
    """The share of kept work in `days` of a run whose failures are drawn at random: each host that
    computes fails, is repaired for a random time, and every change of the speed upwards is a
    restart."""
    draw = random.Random(3)
    end, now, kept = days * DAY, 0.0, 0.0
    work_s = interval_steps * run.step_s
    repairs: list[float] = []  # when hosts come back

    def speed() -> float:
        missing = max(0, len(repairs) - run.spares)
        if groups is None or not missing:
            return float(not missing)
        left = groups * (run.hosts - missing) // run.hosts
        while fold and left and groups % left:
            left -= 1
        return left / groups

    todo, phase = work_s + run.stall_s, "work"
    while now < end:
        here = speed()
        if not here:
            now = min(repairs)
            repairs.remove(now)
            todo, phase = run.restart_s, "restart"
            continue
        # The formulas take the failures of a slower run to be as harmful to its work as all.
        failure = draw.expovariate(here / mtbf_s(run))
        rate = here if phase == "work" else 1.0
        done = todo / rate
        repaired = min(repairs, default=math.inf) - now
        step = min(failure, done, repaired)
        now += step
        todo -= step * rate
        if step == done:
            kept += work_s * (phase == "work")
            todo, phase = work_s + run.stall_s, "work"
        elif step == repaired:
            repairs.remove(min(repairs))
            if speed() > here and phase == "work":  # at a checkpoint: work is kept
                kept += work_s + run.stall_s - todo if todo < work_s else 0.0
                todo, phase = run.restart_s, "restart"
        else:
            if draw.random() < run.broken:
                repairs.append(now + draw.expovariate(1 / run.repair_s))
            todo, phase = run.restart_s, "restart"
    return kept / now


BASE = Run(1024, 10.0, 1e-4, stall_s=20.0, restart_s=300.0, repair_s=6 * HOUR)
CASES = {
    "a few": (replace(BASE, broken=0.0), 60, None, True),
    "often": (replace(BASE, failures_per_device_hour=2e-3, broken=0.0), 20, None, True),
    "by host": (replace(BASE, failures_per_host_hour=1e-3, broken=0.0), 30, None, True),
    "waits": (replace(BASE, spares=0), 60, None, True),
    "spares": (replace(BASE, spares=2), 60, None, True),
    "shrinks": (replace(BASE, repair_s=2 * HOUR), 60, 64, False),
    "folds": (replace(BASE, repair_s=2 * HOUR), 60, 64, True),
}


@pytest.mark.parametrize("name", CASES)
def test_a_simulation_finds_the_same_share(name: str) -> None:
    run, steps, groups, fold = CASES[name]
    found = goodput(run, steps, groups=groups, fold=fold)
    assert simulated(run, steps, groups, fold, 4000) == pytest.approx(found.share, rel=0.02)
    parts = (found.share, found.stalls, found.lost, found.restarts, found.waiting)
    assert sum(parts) == pytest.approx(1.0) and min(parts) >= 0


@pytest.mark.parametrize("stall_s", [0.01, 5.0, 60.0, 600.0])
def test_the_best_interval_is_the_best(stall_s: float) -> None:
    run = replace(BASE, step_s=1e-3, stall_s=stall_s)
    best = best_interval_s(run)
    at = round(best / run.step_s)
    shares = [goodput(run, round(at * k)).share for k in (0.9, 0.99, 1.0, 1.01, 1.1)]
    assert max(shares) == shares[2] and goodput(run).share >= shares[2]
    mtbf = mtbf_s(run)
    ratio = stall_s / (2 * mtbf)
    daly = math.sqrt(2 * stall_s * mtbf) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - stall_s
    assert best == pytest.approx(daly, rel=2e-3)
    assert best < young_s(run)


def test_the_first_order_is_the_known_one() -> None:
    run = Run(64, 1.0, 1e-5, stall_s=2.0, restart_s=30.0, broken=0.0)
    steps, mtbf = 900, mtbf_s(run)
    known = steps / (steps + 2.0) - (steps / 2 + 30.0) / mtbf
    assert goodput(run, steps).share == pytest.approx(known, abs=1e-4)


def test_published_figures() -> None:
    """Llama 3: more than 90 % effective time at 16,384 devices, which needs restarts within 13
    minutes. 2.3 failures of 1,000 servers a day: 50 minutes between failures of 98,304 devices; at
    the measured 18 minutes, 44 % are left if a restart takes 13 minutes."""
    run = Run(16384, 5.0, LLAMA, stall_s=5.0, restart_s=600.0, broken=0.0)
    assert mtbf_s(run) / HOUR == pytest.approx(54 * 24 / 419)
    assert goodput(run).share > 0.9 > goodput(replace(run, restart_s=840.0)).share
    assert goodput(replace(run, restart_s=780.0)).share > 0.9
    servers = Run(98304, 5.0, 0.0, 5.0, 780.0, failures_per_host_hour=2.3 / 1000 / 24, broken=0.0)
    assert round(mtbf_s(servers) / 60) in (50, 51)
    measured = replace(servers, failures_per_host_hour=1 / (0.3 * servers.hosts))
    assert mtbf_s(measured) / 60 == pytest.approx(18)
    assert goodput(measured).share == pytest.approx(0.44, abs=0.005)


def test_spares_are_worth_what_they_keep_from_waiting() -> None:
    run = Run(16384, 5.0, LLAMA, stall_s=1.0, restart_s=300.0, broken=0.5)
    shares = [goodput(replace(run, spares=n)) for n in range(30)]
    assert all(a.share < b.share for a, b in pairwise(shares[:12]))
    enough = spares_for(run)
    assert shares[enough].waiting <= 1e-3 < shares[enough - 1].waiting
    # Erlang's formula for the chance that all of spares + 1 places are taken.
    load, blocked = 0.5 * DAY / mtbf_s(run), 1.0
    for n in range(1, 8):
        blocked = load * blocked / (n + load * blocked)
        assert goodput(replace(run, spares=n - 1)).waiting == pytest.approx(blocked)
    waits, folds = goodput(run), goodput(run, groups=128)
    shrinks = goodput(run, groups=128, fold=False)
    assert waits.share < folds.share < shrinks.share < shares[29].share


def test_without_failures_and_with_far_too_many() -> None:
    calm = Run(8, 1.0, 0.0, stall_s=1.0, restart_s=10.0)
    assert goodput(calm) == Goodput(1.0, 0.0, 0.0, 0.0, 0.0, 0, math.inf)
    assert best_interval_s(calm) == math.inf and spares_for(calm) == 0
    assert goodput(calm, 9).share == pytest.approx(0.9)
    free = replace(calm, failures_per_device_hour=1.0, stall_s=0.0, broken=0.0)
    assert goodput(free).interval_steps == 1 and best_interval_s(free) < 1e-9
    never = replace(calm, failures_per_device_hour=1e6, broken=0.0)
    assert goodput(never, 100).share == 0.0
    many = Run(1 << 20, 1.0, 1e-3, 1.0, 10.0, repair_s=7 * DAY, spares=100000)
    assert goodput(many, 1).waiting < 1.0


def test_wrong_settings_are_said() -> None:
    with pytest.raises(ts.UsageError, match="Run: stall_s cannot be -1"):
        Run(8, 1.0, 0.0, stall_s=-1.0, restart_s=1.0)
    with pytest.raises(ts.UsageError, match="7 groups do not divide the 1024 devices"):
        goodput(BASE, groups=7)
    with pytest.raises(ts.UsageError, match="availability cannot be 1"):
        spares_for(BASE, 1.0)
