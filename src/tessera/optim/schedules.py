"""Learning rate schedules: functions from the number of steps done to a rate.

A schedule is computed inside the program from the optimizer's step counter, so a new rate needs no
new compilation. It takes an i32[] tensor or a Python int and returns an f32[] tensor:

>>> import tessera as ts
>>> lr = ts.optim.warmup_cosine(peak=1.0, warmup=10, total=110)
>>> print(lr)
warmup_cosine(peak=1.0, warmup=10, total=110, end=0.0, start=0.0)
>>> [round(lr(step).item(), 3) for step in (0, 5, 10, 60, 110, 500)]
[0.0, 0.5, 1.0, 0.5, 0.0, 0.0]
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..core.checks import unfit, whole
from ..core.declared import Count, Integer, Integers, Real, Reals
from ..core.dtypes import f32, int32
from ..core.errors import ShapeError, TesseraError, UsageError
from ..lang.foreign.jax_program import as_ops
from ..lang.math import functions as F
from ..lang.record.operands import as_tensor, scalar
from ..lang.value.tensor import Tensor

Rule = Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class Schedule:
    """A learning rate as a function of the step: `schedule(step)` is f32[].

    Schedules with the same name and settings are equal; `str()` is the call that makes it. Raises
    ShapeError at a call if `step` is not one number.
    """

    name: str
    settings: tuple[tuple[str, object], ...]
    rule: Rule = field(repr=False, compare=False)

    def __call__(self, step: Tensor | int) -> Tensor:
        """The rate after `step` steps. Raises ShapeError if `step` is not one number."""
        t = as_tensor(step)
        if t.shape:
            raise ShapeError(
                f"{self.name}: the step is not one number",
                step=t.type,
                fix="give a Python int or an i32[] tensor",
            )
        return self.rule(t.to(f32))

    def __str__(self) -> str:
        return f"{self.name}({', '.join(f'{k}={v}' for k, v in self.settings)})"

    def __reduce__(self) -> Any:
        """Copies and pickles as the call that makes it, as its rule is a local function."""
        return _schedule_from, (self.name, self.settings)


def _schedule_from(name: str, settings: tuple[tuple[str, object], ...]) -> Schedule:
    made: Schedule = globals()[name](**dict(settings))
    return made


def scheduled(schedule: Callable[[Any], Any], step: Tensor) -> Any:
    """The result of `schedule(step)`; a schedule written in JAX, such as optax's, becomes ops.
    Raises UsageError if it fails for a step."""
    try:
        return schedule(step)
    except Exception as error:
        if isinstance(error, TesseraError) and type(error) is not TesseraError:
            raise  # not of a function of JAX that was given a tensor
        try:
            return as_ops("schedule", lambda step: [schedule(step)], [step])[0]
        except TesseraError:
            raise
        except Exception:  # not a JAX function either: report the first error
            pass
        raise UsageError(
            "schedule: it does not give a rate for a step",
            schedule=schedule,
            says=str(error).splitlines()[0],
            fix="write a function of one step, i32[], with functions of ts or of JAX",
        ) from None


def _schedule(name: str, rule: Rule, **settings: object) -> Schedule:
    """A schedule with checked settings: rates are finite and >= 0, counts of steps >= 0."""
    wrong = [
        (key, f"{v}: rates and steps are finite numbers >= 0")
        for key, value in settings.items()
        for v in (value if isinstance(value, tuple) else (value,))
        if not (callable(v) or (isinstance(v, (int, float)) and 0 <= v < math.inf))
    ]
    if wrong:
        raise UsageError(f"{name}: a setting is out of range", rows=wrong, fix="correct it")
    return Schedule(name, tuple(settings.items()), rule)


def constant(value: Real) -> Schedule:
    """The rate `value` at every step."""
    return _schedule("constant", lambda t: scalar(float(value), f32), value=value)


def linear(start: Real, end: Real, steps: Count) -> Schedule:
    """Linear from `start` to `end` over `steps` steps, then `end`.

    Raises UsageError if `steps` is below 1.
    """

    def rule(t: Tensor) -> Tensor:
        return F.minimum(t * (1.0 / steps), 1.0) * (end - start) + start

    return _schedule("linear", rule, start=start, end=end, steps=steps)


def cosine(peak: Real, total: Count, end: Real = 0.0) -> Schedule:
    """Half a cosine from `peak` to `end` over `total` steps (Loshchilov & Hutter 2017).

    Raises UsageError if `total` is below 1.
    """

    def rule(t: Tensor) -> Tensor:
        # (1 + cos(pi x)) / 2 as sin^2 of the remaining part, which is accurate near the end.
        left = F.maximum((total - t) * (1.0 / total), 0.0)
        wave = F.sin(left * (math.pi / 2))
        return wave * wave * (peak - end) + end

    return _schedule("cosine", rule, peak=peak, total=total, end=end)


def warmup_cosine(
    peak: Real, warmup: Integer, total: Integer, end: Real = 0.0, start: Real = 0.0
) -> Schedule:
    """Linear warmup from `start` to `peak` over `warmup` steps, then a cosine to `end` at step
    `total`.

    Raises UsageError if a number of steps is out of range.
    """
    whole("warmup_cosine", "total", total, warmup + 1)
    rule = _after_warmup(start, peak, warmup, cosine(peak, total - warmup, end))
    settings = {"peak": peak, "warmup": warmup, "total": total, "end": end, "start": start}
    return _schedule("warmup_cosine", rule, **settings)


def warmup_linear(
    peak: Real, warmup: Integer, total: Integer, end: Real = 0.0, start: Real = 0.0
) -> Schedule:
    """Linear warmup from `start` to `peak` over `warmup` steps, then linear to `end` at step
    `total`.

    Raises UsageError if a number of steps is out of range.
    """
    whole("warmup_linear", "total", total, warmup + 1)
    rule = _after_warmup(start, peak, warmup, linear(peak, end, total - warmup))
    settings = {"peak": peak, "warmup": warmup, "total": total, "end": end, "start": start}
    return _schedule("warmup_linear", rule, **settings)


def inverse_sqrt(peak: Real, warmup: Count) -> Schedule:
    """Linear warmup to `peak`, then `peak * sqrt(warmup / step)` (Vaswani et al. 2017).

    Raises UsageError if `warmup` is below 1.
    """

    def rule(t: Tensor) -> Tensor:
        at = F.maximum(t, 1.0)
        return F.minimum(t * (1.0 / warmup), F.rsqrt(at) * math.sqrt(warmup)) * peak

    return _schedule("inverse_sqrt", rule, peak=peak, warmup=warmup)


def piecewise_constant(values: Reals, boundaries: Integers) -> Schedule:
    """Constant rates: `values[i]` from step `boundaries[i-1]` on.

    Raises UsageError unless boundaries rise and are one fewer than values.
    """
    _need_pieces("piecewise_constant", len(values), boundaries)

    def rule(t: Tensor) -> Tensor:
        rate = scalar(float(values[0]), f32)
        for value, at in zip(values[1:], boundaries, strict=True):
            rate = F.where(t < at, rate, float(value))
        return rate

    return _schedule("piecewise_constant", rule, values=tuple(values), boundaries=tuple(boundaries))


def join_schedules(schedules: Sequence[Callable[[Any], Any]], boundaries: Integers) -> Schedule:
    """`schedules[i]` from step `boundaries[i-1]` on; each counts its steps from there.

    Other functions of the step, such as optax's, are schedules too. Raises UsageError if an element
    of `schedules` is no function, or unless boundaries rise and are one fewer than schedules.
    """
    fix = "give a list of schedules, e.g. [optim.linear(...), optim.cosine(...)]"
    if not isinstance(schedules, (tuple, list)):
        raise unfit("join_schedules", "schedules", schedules, fix)
    for i, s in enumerate(schedules):
        if not callable(s):
            raise unfit("join_schedules", f"schedules[{i}]", s, fix)
    _need_pieces("join_schedules", len(schedules), boundaries)

    def rule(t: Tensor) -> Tensor:
        rate = _rate(schedules[0], t)
        for part, at in zip(schedules[1:], boundaries, strict=True):
            rate = F.where(t < at, rate, _rate(part, F.maximum(t - at, 0.0)))
        return rate

    return _schedule(
        "join_schedules", rule, schedules=tuple(schedules), boundaries=tuple(boundaries)
    )


def _rate(schedule: Callable[[Any], Any], t: Tensor) -> Tensor:
    """The rate of `schedule` at `t` f32[] steps, as f32."""
    if isinstance(schedule, Schedule):
        return schedule.rule(t)
    return as_tensor(scheduled(schedule, t.to(int32))).to(f32)


def _after_warmup(start: float, peak: float, warmup: int, then: Schedule) -> Rule:
    return (
        then.rule
        if warmup < 1
        else join_schedules([linear(start, peak, warmup), then], [warmup]).rule
    )


def _need_pieces(name: str, pieces: int, boundaries: Sequence[int]) -> None:
    if pieces != len(boundaries) + 1 or list(boundaries) != sorted(set(boundaries)):
        raise UsageError(
            f"{name}: {pieces} pieces do not lie between boundaries {tuple(boundaries)}",
            fix="give rising boundaries, and one piece more than boundaries",
        )
