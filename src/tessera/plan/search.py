"""Search for the mesh, strategy and options under which a step is fastest: `ts.plan.best`.

Two levels. All candidates are priced from few recordings: one for each choice that changes the
steps themselves (ZeRO's stage, recomputation, ...), scaled to every mesh (scaled.py). Those that do
not fit in memory, or take longer than the best so far by a bound, are dropped; if a kind has no
others, it is not recorded. The first ones are then recorded and simulated in full, and only these
decide. At last single weights may get another layout, if that is faster.
"""

from __future__ import annotations

import gc
import inspect
import itertools
import math
import time
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ..core.checks import shown
from ..core.declared import Positive
from ..core.errors import TesseraError, UsageError
from ..core.layout import TensorType
from ..core.machine.machine import Machine
from ..core.options import ScheduleOptions
from ..core.public import checked
from ..ir.schedule.schedule import Schedule
from ..lang.jit.jit import Jit, jit
from ..lang.program.training_step import TrainingStep
from .candidates import NO_ROOM, ROOMY, TOO_SLOW, Candidate, Found, Row, Values, why_lost
from .grid import Floats, Grid, Point, divides, divisors, orders
from .machines import as_machine, cluster_of
from .reports import Cluster, memory_of, weights_of
from .scaled import Scaled
from .simulate import simulate
from .timeline import Timeline
from .weight_layouts import better, layouts

Build = Callable[..., tuple[Any, tuple[Any, ...]]]
KNOWN: dict[str, tuple[Any, ...]] = {
    "remat": (False, "products", True, "offload"),
    "sequence_parallel": (None, "tp"),
    "context": (None, "ring", "all_to_all"),
    "expert_parallel": (None, "ep"),
    "precision": (None, "bf16"),
    "pipeline": (None, "1F1B"),
    "microbatches": (1, 4, 8, 16, 32, 64),
}
"""The values of the choices that `build` may name."""
# Options of the schedule, tried in full on the leaders.
OPTIONS: tuple[Values, ...] = (
    (("overlap", True),),
    (("overlap", True), ("bucket_bytes", 32 << 20)),
    (("overlap", True), ("reshard_after_forward", False)),
)
ZEROS = (3, 1, 2, 0)  # each needs no less memory than those before
MOST_TP, MOST_PP = 64, 32
RECORDED = {"cp": ("context", 16), "ep": ("expert_parallel", 64)}
"""The axes of which each size is recorded: the choice that adds the axis, and the largest size."""
FINALISTS, ROWS, LEADERS = 20, 10, 3
SLACK = 1.1  # the estimate of memory may be this much too high
NEARLY = 0.99  # stages of ZeRO fuse some kernels otherwise, so a bound may be this much lower
WINS = 0.995  # of the step's time, for which single weights get another layout


@checked
def best(
    build: Any,
    *,
    cluster: Cluster,
    choices: Mapping[str, Sequence[Any]] | None = None,
    limit_s: Positive = 60.0,
) -> Found:
    """Returns the fastest mesh, strategy and options that fit `cluster`, with the next nine.

    `build(mesh, strategy, *, remat, ...)` returns (step, args) for a mesh with axes among "dp",
    "tp", "cp", "ep" and "pp". It must compute the same training step for all of them, take its
    layouts from `strategy` alone, and make nothing larger than a recipe. Its keyword arguments are
    the choices that the search varies: the names of `KNOWN`, of which "context" adds the axis cp,
    "expert_parallel" ep and "pipeline" pp, or names of its own. `choices` gives the values of a
    name. A step alone does not do: its model is placed already, and only its builder knows which
    layouts of it came from a strategy, and what a choice changes in it. Nothing is compiled or run.
    Raises UsageError if `build` has a choice without values, or if no candidate can be recorded and
    fits.
    """
    machine = cluster_of(cluster)
    search = _Search(build, machine, _choices_of(build, choices or {}), limit_s)
    with as_machine(machine), warnings.catch_warnings(), _rare_collection():
        warnings.simplefilter("ignore")  # of candidates that nobody asked for
        return search.run()


@contextmanager
def _rare_collection() -> Iterator[None]:
    """Collects garbage less often: a fifth of a recording's time goes there otherwise."""
    usual = gc.get_threshold()
    gc.set_threshold(200_000, *usual[1:])
    try:
        yield
    finally:
        gc.set_threshold(*usual)


def _choices_of(build: Any, given: Mapping[str, Sequence[Any]]) -> dict[str, tuple[Any, ...]]:
    if not callable(build):
        raise UsageError(
            f"plan.best: {shown(build)} is no function",
            fix="give build(mesh, strategy, *, remat) that returns (step, args): a step alone"
            " cannot be recorded for another mesh",
        )
    kinds = inspect.signature(build).parameters.values()
    names = [p.name for p in kinds if p.kind is inspect.Parameter.KEYWORD_ONLY]
    open_ = [n for n in names if n not in given and n not in KNOWN]
    if open_ or not set(given) <= set(names):
        wrong = open_ or [n for n in given if n not in names]
        raise UsageError(
            f"plan.best: {', '.join(wrong)}: "
            + ("a choice without values" if open_ else "build has no such keyword argument"),
            fix='give values by choices={"name": (value, ...)}, names after the * of build',
        )
    return {n: tuple(given.get(n, KNOWN.get(n, ()))) for n in names}


@dataclass(frozen=True, slots=True)
class _Priced:
    candidate: Candidate
    step_s: float

    @property
    def staged(self) -> bool:
        return dict(self.candidate.axes).get("pp", 1) > 1


class _Search:
    def __init__(
        self, build: Build, machine: Machine, choices: dict[str, tuple[Any, ...]], limit_s: float
    ) -> None:
        self.build, self.machine, self.choices, self.limit_s = build, machine, choices, limit_s
        self.begun = time.monotonic()
        self.dropped: Counter[str] = Counter()
        self.priced = 0
        self.plans = [v for v in choices.get("pipeline", ()) if v is not None]
        self.grids: dict[object, Grid] = {}
        self.roomy: set[tuple[Point, int, Values]] = set()  # fit with room to spare
        assert machine.chip is not None
        self.room = SLACK * machine.chip.memory_bytes
        # The time that a design must beat, without and with stages.
        self.bound_s = {False: math.inf, True: math.inf}

    def run(self) -> Found:
        designs: dict[object, _Priced] = {}
        failed: TesseraError | None = None
        for structure in self._structures():
            if designs and self._spent() > self.limit_s / 2:
                self.dropped["no time was left to record their kind"] += 1
                continue
            try:
                for p in self._price(structure):
                    key = sorted(p.candidate.axes), p.candidate.zero, p.candidate.choices
                    if repr(key) not in designs or p.step_s < designs[repr(key)].step_s:
                        designs[repr(key)] = p
            except TesseraError as error:
                self.dropped["their kind cannot be recorded"] += 1
                failed = error
            for staged in self.bound_s:
                best_s = sorted(p.step_s for p in designs.values() if p.staged is staged)
                self.bound_s[staged] = [*best_s, *[math.inf] * FINALISTS][FINALISTS - 1]
        priced_s = self._spent()
        rows: list[Row] = []
        counts = Counter[bool]()
        # A pipeline records each layer by itself, which takes longer: they come last.
        for p in sorted(designs.values(), key=lambda p: (p.staged, p.step_s)):
            if counts[p.staged] >= FINALISTS:
                continue
            if rows and self._spent() > (0.85 if p.staged else 0.75) * self.limit_s:
                break
            counts[p.staged] += 1
            try:
                rows.append(self.row(p.candidate, p.step_s))
            except TesseraError as error:
                self.dropped["cannot be recorded as priced"] += 1
                failed = error
        rows.sort(key=_rank)
        rows = sorted([*rows, *self._with_options(rows[:LEADERS])], key=_rank)
        if not rows or not rows[0].fits:
            raise UsageError(
                f"plan.best: no candidate fits {self.machine.name}, {self.machine.size:,} devices",
                rows=[(why, f"{n:,}") for why, n in self.dropped.items()],
                fix="take more devices, a smaller batch, or name more choices in build (remat)",
            ) from failed
        own = self.improved(rows[0])
        if own.step_s < WINS * rows[0].step_s:
            rows = [own, *rows]
        told = [rows[0], *(replace(r, why=why_lost(r, rows[0])) for r in rows[1:ROWS])]
        machine = f"{self.machine.name}, {self.machine.size:,} devices"
        return Found(tuple(told), machine, self.priced, dict(self.dropped), self._spent(), priced_s)

    def _spent(self) -> float:
        return time.monotonic() - self.begun

    # -- the first level: prices of all candidates ------------------------------------------------
    def _structures(self) -> Iterator[Candidate]:
        """Yields a candidate for each kind of schedule, on a mesh whose sizes are typical."""
        names = [n for n in self.choices if n not in ("microbatches", "pipeline")]
        given = [self.choices[n] for n in names]
        alone = {"microbatches": 1, "pipeline": None}
        rest = [(n, alone[n]) for n in self.choices if n in alone]
        n = self.machine.size
        kinds = [dict(zip(names, values, strict=True)) for values in itertools.product(*given)]
        own = ([d for d in divisors(n) if d <= most] for _, most in RECORDED.values())
        for each in itertools.product(*own):  # the most costly to record come last
            size, taken = dict(zip(RECORDED, each, strict=True)), math.prod(each)
            if n % taken:
                continue
            # what computes least comes first: its prices are bounds of the others
            for zero, chosen in sorted(
                itertools.product(ZEROS, kinds), key=lambda x: _work(x[1].get("remat"))
            ):
                if all((chosen.get(RECORDED[a][0]) is None) == (k == 1) for a, k in size.items()):
                    tp = self._base(taken)
                    more = [(a, k) for a, k in size.items() if k > 1]
                    sizes = ("dp", n // (tp * taken)), *more, ("tp", tp)
                    yield Candidate(sizes, zero, (*chosen.items(), *rest))

    def _base(self, taken: int) -> int:
        """The size of tp for which a kind is recorded: between 1 and that of a host."""
        most = math.gcd(self.machine.shape[-1], max(1, self.machine.size // (2 * taken)))
        return min(divisors(most), key=lambda d: abs(math.log(d * d / most)))

    def _price(self, kind: Candidate) -> Iterator[_Priced]:
        """Yields the prices of the candidates with the steps of `kind` that may be among the
        best. Bounds of the same choices with ZeRO-3 may drop all before `kind` is recorded."""
        key, schedule = (kind.axes, kind.choices), None
        least = self.grids.get((kind.axes, _less_work(kind.choices)))
        if key not in self.grids and least is not None:
            none = np.zeros(len(least.points))
            if not self._kept(kind, least.points, none, least.least_s, count=False):
                self._kept(kind, least.points, none, least.least_s)
                return
        if key not in self.grids:
            schedule, step, args = self.record(kind)
            self.grids[key] = self._grid(kind, schedule, [*weights_of(step, args).values()])
        grid = self.grids[key]
        kept = self._kept(kind, grid.points, grid.least_bytes[kind.zero], grid.least_s)
        if not kept:
            return
        points = [grid.points[i] for i in kept]
        scaled = self._scaled(schedule or self.record(kind)[0], points)
        needs = scaled.memory_bytes()
        kept = self._kept(kind, points, needs, np.zeros(len(points)))
        if not kept:
            return
        times = scaled.part(kept).step_s([points[i].mesh(kind) for i in kept])
        for i, step_s in zip(kept, times, strict=True):
            p = points[i]
            if needs[i] * SLACK**2 < self.room:
                self.roomy.add((p, kind.zero, _less_work(kind.choices)))
            for plan in self.plans if p.staged else [None]:
                self.priced += 1
                own = {"pipeline": plan, "microbatches": p.microbatches}
                chosen = tuple((k, own.get(k, v)) for k, v in kind.choices)
                yield _Priced(Candidate(p.axes, kind.zero, chosen, kind.options), float(step_s))

    def _kept(
        self, kind: Candidate, points: Sequence[Point], needs: Floats, least_s: Floats,
        count: bool = True,
    ) -> list[int]:  # fmt: skip
        """Returns the indices of the points that may be among the best, and counts the others: one
        that computes products again loses to one that has room for them."""
        kept, dropped, less = [], Counter[str](), _less_work(kind.choices)
        for i, p in enumerate(points):
            plans = len(self.plans) if p.staged else 1
            if less != kind.choices and (p, kind.zero, less) in self.roomy:
                dropped[ROOMY] += plans
            elif needs[i] > self.room:
                dropped[NO_ROOM] += plans
            elif least_s[i] > self.bound_s[p.staged]:
                dropped[TOO_SLOW] += plans
            else:
                kept.append(i)
        self.dropped.update(dropped if count else {})
        return kept

    def _grid(self, kind: Candidate, schedule: Schedule, weights: list[TensorType]) -> Grid:
        """Returns the points of a kind, with bounds that hold for each stage of ZeRO from that of
        `kind` on down."""
        n, own = self.machine.size, {a: dict(kind.axes).get(a, 1) for a in RECORDED}
        taken = math.prod(own.values())
        turns = self.choices.get("microbatches", (1,))
        sizes = [
            {**own, "dp": n // (tp * taken * pp), "tp": tp, "pp": pp, "mb": mb}
            for tp in divisors(n)
            for pp in divisors(n)
            for mb in (turns if pp > 1 else (1,))
            if tp <= MOST_TP and n % (tp * taken * pp) == 0
            if pp == 1 or (self.plans and mb >= pp and pp <= MOST_PP)
            if tp > 1 or not dict(kind.choices).get("sequence_parallel")
        ]
        sizes = [p for p in sizes if divides(schedule, p)]
        points = [
            Point(tuple((a, p[a]) for a in order), p["mb"]) for p in sizes for order in orders(p)
        ]
        if not points:
            return Grid(points, np.zeros(0), dict.fromkeys(ZEROS, np.zeros(0)))
        scaled = self._scaled(schedule, points)
        least_s = NEARLY * scaled.least_s([p.mesh(kind) for p in points])
        return Grid(points, least_s, {z: scaled.least_bytes(z, weights) for z in ZEROS})

    def _scaled(self, schedule: Schedule, points: Sequence[Point]) -> Scaled:
        of = [dict(p.axes) for p in points]
        sizes = {
            a: np.array([float(p.get(a, 1)) for p in of]) for a in ("dp", *RECORDED, "tp", "pp")
        }
        return Scaled(
            schedule, self.machine, sizes, np.array([float(p.microbatches) for p in points])
        )

    # -- the second level: recorded and simulated in full -----------------------------------------
    def record(self, c: Candidate) -> tuple[Schedule, Any, tuple[Any, ...]]:
        """Returns (schedule, step, its arguments) of a candidate."""
        made = self.build(c.mesh, c.strategy, **dict(c.choices))
        if not (isinstance(made, tuple) and len(made) == 2 and isinstance(made[1], tuple | list)):
            raise UsageError(
                f"plan.best: build returned {shown(made)}",
                fix="return the step and a tuple of its arguments: return step, (model, ids)",
            )
        step, args = made
        compiled = step if isinstance(step, Jit | TrainingStep) else jit(step)
        if c.options:
            compiled = compiled.under(ScheduleOptions(**dict(c.options)))
        return compiled.plan(*args), step, tuple(args)

    def row(self, c: Candidate, fast_s: float) -> Row:
        """Returns the row of a candidate that is recorded and simulated in full."""
        schedule, step, args = self.record(c)
        line = simulate(schedule, self.machine)
        memory = max(memory_of(schedule, step, args, self.machine), key=lambda m: m.peak)
        waits: defaultdict[str, float] = defaultdict(float)
        for t in line.traffic:
            if t.stage == 0:
                waits[f"{t.what} over {', '.join(t.axes)}"] += t.exposed_s
        return Row(
            c, line.step_s, fast_s, line.compute_s, line.exposed_s, line.bubble * line.step_s,
            memory.peak, memory.limit, _wire_bytes(line), schedule.hash, dict(waits),
        )  # fmt: skip

    def _with_options(self, rows: list[Row]) -> Iterator[Row]:
        """Yields `rows` under other options of the schedule, where these are faster."""
        for r in rows:
            best_row = r
            for options in OPTIONS:
                if self._spent() > 0.9 * self.limit_s:
                    break
                with suppress(TesseraError):  # a pipeline cannot be planned under each of them
                    new = self.row(replace(r.candidate, options=options), r.fast_s)
                    if new.fits and better(new, best_row):
                        best_row = new
            if best_row is not r:
                yield best_row

    # -- layouts of single weights ----------------------------------------------------------------
    def improved(self, row: Row) -> Row:
        """Returns `row` with other layouts of single weights over tp where that is faster: a local
        search, which lays one weight anew at a time and derives all collectives again."""
        sizes = dict(row.candidate.axes)
        if sizes.get("tp", 1) == 1 or sizes.get("pp", 1) > 1:
            return row
        return layouts(
            lambda c: self.row(c, row.fast_s),
            row,
            self._weights(row.candidate),
            lambda: self._spent() > self.limit_s,
        )

    def _weights(self, c: Candidate) -> dict[str, tuple[int, int | None]]:
        """Returns the number of dims of each weight, and the dim that is split over tp."""
        _, step, args = self.record(c)
        return {
            name: (t.rank, next((i for i, d in enumerate(t.dims)
                                 if any("tp" in f.axes for f in d)), None))
            for name, t in weights_of(step, args).items() if t.rank > 1
        }  # fmt: skip


def _rank(r: Row) -> tuple[bool, float]:
    return not r.fits, r.step_s


# -- small parts ----------------------------------------------------------------------------------
def _work(remat: object) -> int:
    """Returns the rank of a value of `remat` by how much it computes again."""
    known = KNOWN["remat"]
    return known.index(remat) if remat in known else len(known)


def _less_work(choices: Values) -> Values:
    """`choices` that keep products, if these compute all again. Those that keep all are no bound:
    to compute a value again may take less time than to read it."""
    return tuple((k, "products" if k == "remat" and v is True else v) for k, v in choices)


def _wire_bytes(line: Timeline) -> int:
    return sum(t.bytes for t in line.traffic)


__all__ = ["best"]
