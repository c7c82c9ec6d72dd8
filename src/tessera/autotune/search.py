"""Search for the fastest candidate: successive halving with interleaved rounds, then a final.

The defaults are the first candidate. The others differ from them in one choice. All are timed
once; in each round the slower half is dropped and the rest is timed again, in turn, so that a slow
phase of the machine affects each alike. Then the best values of all choices are combined to one
more candidate, and the finalists are compared by the medians of further rounds. A candidate that is
less than 3 % faster than one before it in the list does not win. One with a kernel of Tile IR wins
only if it takes 1/1.15 of the defaults' time, or half of their temporaries in the same time.

>>> seconds = {"": 1.0, "a=1": 0.8, "a=2": 2.0, "b=1": 0.9, "a=1 b=1": 0.7}
>>> name = lambda c: " ".join(f"{k}={v}" for k, v in c.items())
>>> rows = search([{"a": 1}, {"a": 2}, {"b": 1}], lambda c: seconds[name(c)], lambda: 1.0)
>>> print(next(t.choices for t in rows if t.chosen))
{'a': 1, 'b': 1}
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

from .choices import Candidate, Timing, words

KERNEL, WINS, LESS = "kernel", 1.15, 0.5
NEAR = 0.97  # a candidate has to take less than this part of the time to win
FINALISTS = 3
FEW, MOST, FINAL_S = 5, 31, 4.0  # rounds of the final: as many as fit in FINAL_S, FEW to MOST
RESERVE = 0.35  # of the time limit, for the final
HOPELESS = 1.5  # times the defaults' seconds: such a candidate is timed once


class _Run:
    """A candidate and its seconds so far."""

    def __init__(self, choices: Candidate, index: int) -> None:
        self.choices, self.index = choices, index
        self.times_s: list[float] = []
        self.error = ""

    @property
    def step_s(self) -> float:
        return statistics.median(self.times_s) if self.times_s else float("inf")


def search(
    candidates: Sequence[Candidate],
    seconds: Callable[[Candidate], float | str],
    remaining: Callable[[], float],
    bytes_of: Callable[[Candidate], int | None] = lambda candidate: None,
) -> list[Timing]:
    """Returns the timings of the defaults and of `candidates`, one of which is chosen.

    `seconds` returns the seconds of a step, or the text of an error: a failed candidate is not
    timed again. `remaining` returns the part of the time limit that remains: no new candidate is
    timed from RESERVE on, so that the final has its time.
    """
    runs = [_Run({}, 0)]
    base = runs[0]

    def timed(run: _Run) -> bool:
        """Times `run` once more. Returns whether it did not fail."""
        measured = seconds(run.choices)
        if isinstance(measured, str):
            run.error = measured
        else:
            run.times_s.append(measured)
        return not run.error

    def enter(choices: Candidate) -> _Run | None:
        if remaining() < RESERVE:
            return None
        runs.append(run := _Run(choices, len(runs)))
        timed(run)
        return run

    if not timed(base):
        return _timings(runs, base, bytes_of)
    alive = [made for c in candidates if (made := enter(c)) is not None]
    repeats = 1
    while len(alive := _hopeful(alive, base)) > FINALISTS and remaining() > RESERVE:
        for _ in range(repeats):
            for run in (base, *alive):
                timed(run)
        alive = sorted(alive, key=lambda r: (bool(r.error), r.step_s))[: max(2, len(alive) // 2)]
        repeats *= 2
    best: dict[str, _Run] = {}
    for run in sorted(alive, key=lambda r: r.step_s):
        if not run.error and run.step_s < base.step_s:
            best.setdefault(next(iter(run.choices)), run)
    if len(best) > 1:
        both = {k: v for run in best.values() for k, v in run.choices.items()}
        if (combined := enter(both)) is not None:
            alive.append(combined)
    final = [base, *_hopeful(alive, base)]
    if len(final) > 1 and remaining() > 0:
        total_s = sum(r.step_s for r in final)
        for run in final:
            run.times_s.clear()  # those of the final count
        for _ in range(min(MOST, max(FEW, int(FINAL_S / total_s)))):
            for run in final:
                if not run.error:
                    timed(run)
            if remaining() <= 0:
                break
    fit = sorted((r for r in final if not r.error), key=lambda r: r.index)
    fit = [r for r in fit if KERNEL not in r.choices.values() or _wins(r, base, bytes_of)]
    fit.sort(
        key=lambda r: KERNEL not in r.choices.values()
    )  # of near ties the one with less memory
    near = (r for r in fit if NEAR * r.step_s <= min(x.step_s for x in fit))
    return _timings(runs, next(near, base), bytes_of)  # base, if all have failed


def _wins(run: _Run, base: _Run, bytes_of: Callable[[Candidate], int | None]) -> bool:
    """Returns whether a candidate with a kernel is much faster than the defaults, or needs much
    less memory in the same time."""
    now, was = bytes_of(run.choices), bytes_of(base.choices)
    small = now is not None and was is not None and now <= LESS * was
    return WINS * run.step_s <= base.step_s or (small and NEAR * run.step_s <= base.step_s)


def _hopeful(runs: Sequence[_Run], base: _Run) -> list[_Run]:
    return [r for r in runs if not r.error and r.step_s <= HOPELESS * base.step_s]


def _timings(
    runs: Sequence[_Run], chosen: _Run, bytes_of: Callable[[Candidate], int | None]
) -> list[Timing]:
    return [
        Timing(r.choices, r.step_s, None if r.error else bytes_of(r.choices), r.error, r is chosen)
        for r in runs
    ]


def gain(timings: Sequence[Timing]) -> float:
    """Returns how many times as fast as the defaults the chosen candidate is; 1.0 if the defaults
    were not timed to the end."""
    step_s = next(t.step_s for t in timings if t.chosen)
    return timings[0].step_s / step_s if not timings[0].error and step_s else 1.0


def summary(chosen: Candidate, gain: float, timed: int) -> str:
    """Returns one line about the result of a search."""
    return f"tuned: {words(chosen)}, {gain:.2f} times as fast as the defaults, {timed} timed"
