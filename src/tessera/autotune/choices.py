"""Choices of a program that are open to the autotuner, as data.

A candidate is a dict of choices by name. A choice is a field of ScheduleOptions, or one of those
below, which `@schedule(choices={...})` sets. A choice of kind "tune" may change the last bits of
results, one of kind "speed" never does: above the determinism level "fast" only those are timed.

>>> applied(ScheduleOptions(), {"overlap": True, "block_rows": 256}).text()
'overlap=True choices=block_rows:256'
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from ..core.checks import shown
from ..core.errors import UsageError
from ..core.options import ScheduleOptions
from ..core.value_checks import is_whole

Value = str | int | bool
Candidate = Mapping[str, Value]


TILES = re.compile(r"\w+:[1-9]\d*(,\w+:[1-9]\d*)*")


class Choice(NamedTuple):
    """`kind`: "tune" or "speed". `values`: the known values, or a pattern for text; None stands for
    numbers from 1 on."""

    kind: str
    values: tuple[Value, ...] | re.Pattern[str] | None = None


FIELDS = {
    "overlap": Choice("speed", (True, False)),
    "bucket_bytes": Choice("speed"),
    "prefetch": Choice("speed"),
    "reshard_after_forward": Choice("speed", (True, False)),
    "algorithm": Choice("tune", ("ring", "halving")),
    "microbatches": Choice("tune"),
    "tile": Choice("tune", TILES),
    "warps": Choice("speed"),
}
CHOICES = {
    # The compiler: its library for products and convolutions, and the order of instructions.
    "library": Choice("tune", ("preferred", "products", "older", "vendor", "engine")),
    "instruction_order": Choice("tune", ("parallel", "least_memory")),
    # Attention: its form, and scores of one tile on a device. A head with its loss: its form.
    # Losses and MLPs: rows of a block.
    "attention": Choice("tune", ("tiles", "sequences", "kernel", "cudnn")),
    "head_loss": Choice("tune", ("blocks", "kernel")),
    "attention_scores": Choice("tune"),
    "block_rows": Choice("tune"),
    # Repeated layers of a stack.
    "layers": Choice("tune", ("loop", "unrolled")),
    # Experts: buckets in which the tokens are sent.
    "expert_buckets": Choice("speed"),
}
_EVERY = {**FIELDS, **CHOICES}


@dataclass(frozen=True, slots=True)
class Timing:
    """A candidate that was timed: its `choices`, the median seconds of a step, bytes of temporaries
    on a device (None if unknown), why it failed ("" if it did not), and whether it is `chosen`.

    >>> print(Timing({"library": "older"}, 0.25, 1_000_000, "", True))
    library=older: 250.000 ms, 1.0 MB of temporaries (chosen)
    >>> print(Timing({}, 0.25, None, "", False))
    the defaults: 250.000 ms
    """

    choices: Candidate
    step_s: float
    temporary_bytes: int | None
    error: str
    chosen: bool

    def __str__(self) -> str:
        size = self.temporary_bytes
        memory = "" if size is None else f", {size / 1e6:.1f} MB of temporaries"
        measured = self.error or f"{self.step_s * 1e3:.3f} ms{memory}"
        return f"{words(self.choices)}: {measured}" + (" (chosen)" if self.chosen else "")


def words(candidate: Candidate) -> str:
    """Returns a candidate as text."""
    return " ".join(f"{k}={v}" for k, v in candidate.items()) or "the defaults"


def kind_of(name: str) -> str:
    """Returns the kind of the choice `name`: "tune" or "speed"."""
    return _EVERY[name].kind


def is_known(candidate: object) -> bool:
    """Returns whether `candidate` is a dict of known choices with possible values."""
    return isinstance(candidate, dict) and all(
        k in _EVERY and _fits(_EVERY[k], v) for k, v in candidate.items()
    )


def _fits(choice: Choice, value: object) -> bool:
    if choice.values is None:
        return is_whole(value) and value > 0
    if isinstance(choice.values, re.Pattern):
        return isinstance(value, str) and choice.values.fullmatch(value) is not None
    return any(value is v or (isinstance(v, str) and value == v) for v in choice.values)


def checked(choices: object) -> tuple[tuple[str, Any], ...]:
    """Returns the choices that a user gives as a dict, as sorted pairs. Raises UsageError if a name
    or a value is unknown."""
    table = choices if isinstance(choices, dict) else {"": choices}
    for name, value in table.items():
        choice = CHOICES.get(name)
        if choice is None:
            names = ", ".join(CHOICES)
            raise UsageError(f"schedule: {shown(name or value)} is no choice", fix=f"use {names}")
        if not _fits(choice, value):
            known = choice.values if isinstance(choice.values, tuple) else ()
            fix = ", ".join(map(str, known)) or "a whole number of at least 1"
            raise UsageError(f"schedule: {name} cannot be {shown(value)}", fix=f"use {fix}")
    return tuple(sorted(table.items()))


def applied(options: ScheduleOptions, candidate: Candidate) -> ScheduleOptions:
    """Returns `options` with the choices of `candidate`."""
    fields: dict[str, Any] = {k: v for k, v in candidate.items() if k in FIELDS}
    if "algorithm" in fields:
        fields["algorithm"] = (("", fields["algorithm"]),)
    if "tile" in fields:
        pairs = (p.split(":") for p in fields["tile"].split(","))
        fields["tile"] = tuple((name, int(size)) for name, size in pairs)
    own = {k: v for k, v in candidate.items() if k in CHOICES}
    if own:
        fields["choices"] = tuple(sorted({**dict(options.choices or ()), **own}.items()))
    return replace(options, **fields)


def is_set(options: ScheduleOptions, name: str) -> bool:
    """Returns whether a user has set the choice `name`, so that it is not open."""
    if name in FIELDS:
        return getattr(options, name) is not None
    return name in dict(options.choices or ())


def singles(
    choices: Mapping[str, Sequence[Value]], allowed: Callable[[str], bool]
) -> list[Candidate]:
    """Returns the candidates that differ from the defaults in one allowed choice. `choices` has the
    values of each open choice, besides the default."""
    return [{name: v} for name, values in choices.items() if allowed(name) for v in values]
