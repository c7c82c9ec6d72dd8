"""Candidates of a search for the fastest step, their rows, and the result with why each lost."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from ..core.mesh import Mesh
from ..lang.parallel.builtin_strategies import Rule, strategy
from ..lang.parallel.strategy import Strategy

Values = tuple[tuple[str, Any], ...]
GIB = 1 << 30
NO_ROOM = "they do not fit in memory"
TOO_SLOW = "they take longer without communication over dp"
ROOMY = "they compute products again that have room"
BOUNDS = (NO_ROOM, TOO_SLOW, ROOMY)


@dataclass(frozen=True, slots=True)
class Candidate:
    """A mesh (its axes in order, with sizes), ZeRO's stage, the choices of `build`, the options of
    the schedule, and rules of single weights in place of the named tensor parallelism."""

    axes: tuple[tuple[str, int], ...]
    zero: int
    choices: Values
    options: Values = ()
    rules: tuple[Rule, ...] | None = None

    @property
    def mesh(self) -> Mesh:
        return Mesh(tuple(a for a, _ in self.axes), shape=dict(self.axes))

    @property
    def strategy(self) -> Strategy:
        zero = self.zero
        data = (
            strategy("zero_redundancy_optimizer", stage=zero) if zero else strategy("data_parallel")
        )
        if dict(self.axes).get("ep", 1) > 1:
            data += strategy("expert_parallel")
        if dict(self.axes).get("tp", 1) == 1 or self.rules == ():
            return data
        return data + strategy("tensor_parallel", rules=self.rules)

    @property
    def text(self) -> str:
        said = [" ".join(f"{a}={n}" for a, n in self.axes)]
        said += [f"ZeRO-{self.zero}"] if self.zero else []
        every = (*self.choices, *self.options)
        said += [f"{k}={v}" for k, v in every if v is not None and v is not False and v != ()]
        return ", ".join([*said, *(["layouts of its own"] if self.rules is not None else [])])


@dataclass(frozen=True, slots=True)
class Row:
    """A candidate that was recorded and simulated in full. `fast_s` is its price before that,
    `why` says why it lost, and `hash` is that of its Schedule."""

    candidate: Candidate
    step_s: float
    fast_s: float
    compute_s: float
    exposed_s: float
    bubble_s: float
    memory_bytes: int
    limit_bytes: int
    wire_bytes: int
    hash: str
    waits: Mapping[str, float] = field(default_factory=dict)
    why: str = ""

    @property
    def fits(self) -> bool:
        return self.memory_bytes <= self.limit_bytes


@dataclass(frozen=True)
class Found:
    """The result of a search: `rows`, the ten best with the best first, and what was left out.

    `mesh`, `strategy`, `choices` and `options` are those of the best: the schedule of
    `ts.schedule(**found.options)(step)`, with `step, args = build(found.mesh, found.strategy,
    **found.choices)`, has the hash `found.best.hash`.
    """

    rows: tuple[Row, ...]
    machine: str
    priced: int
    dropped: Mapping[str, int]
    seconds: float
    priced_s: float

    @property
    def considered(self) -> int:
        """The number of candidates that have a price, or a bound of their memory or time that
        dropped them."""
        return self.priced + sum(self.dropped.get(why, 0) for why in BOUNDS)

    @property
    def best(self) -> Row:
        return self.rows[0]

    @cached_property
    def mesh(self) -> Mesh:
        return self.best.candidate.mesh

    @cached_property
    def strategy(self) -> Strategy:
        return self.best.candidate.strategy

    @property
    def choices(self) -> dict[str, Any]:
        return dict(self.best.candidate.choices)

    @property
    def options(self) -> dict[str, Any]:
        return dict(self.best.candidate.options)

    def data(self) -> dict[str, Any]:
        """Returns all that it holds as plain data; `save_json` writes it. Times are in seconds."""
        rows = [{**asdict(r), "candidate": asdict(r.candidate), "text": r.candidate.text}
                for r in self.rows]  # fmt: skip
        return {
            "machine": self.machine, "considered": self.considered, "priced": self.priced,
            "dropped": dict(self.dropped), "seconds": self.seconds, "rows": rows,
        }  # fmt: skip

    def save_json(self, path: str | Path) -> None:
        """Writes `data`; values of choices that JSON has not are written as text."""
        text = json.dumps(self.data(), indent=1, default=str)
        Path(path).write_text(text + "\n", encoding="utf-8")

    @property
    def text(self) -> str:
        """The rows as a table, with why each lost."""
        lines = [
            f"best of {self.considered:,} candidates on {self.machine}:"
            f" {self.priced:,} priced in full, {len(self.rows)} shown, {self.seconds:.0f} s"
        ]
        lines += [f"  {n:,} dropped: {why}" for why, n in self.dropped.items()]
        for i, r in enumerate(self.rows, 1):
            lines.append(
                f"{i:2}  {r.step_s * 1e3:8.1f} ms  waits {r.exposed_s * 1e3:7.1f} ms "
                f" {r.memory_bytes / GIB:5.1f} GiB  {r.candidate.text}"
            )
            lines += [f"      {r.why}"] if r.why else []
        return "\n".join(lines)

    def __str__(self) -> str:
        return self.text

    __repr__ = __str__


def why_lost(r: Row, best_row: Row) -> str:
    """Says why `r` lost to `best_row`, in words with numbers."""
    if not r.fits:
        return f"needs {r.memory_bytes / GIB:.1f} of {r.limit_bytes / GIB:.1f} GiB"
    more = {
        "computes": r.compute_s - best_row.compute_s,
        "waits": r.exposed_s - best_row.exposed_s,
        "has a bubble of": r.bubble_s - best_row.bubble_s,
    }
    parts = [
        f"{word} {abs(x) * 1e3:.1f} ms {'more' if x > 0 else 'less'}"
        for word, x in sorted(more.items(), key=lambda p: -p[1])
        if abs(x) > 1e-3 * best_row.step_s
    ]
    longer = {k: x - best_row.waits.get(k, 0.0) for k, x in r.waits.items()}
    worst = max(longer, key=longer.__getitem__, default="")
    if worst and longer[worst] > 1e-3 * best_row.step_s:
        parts.append(f"most for {worst}, {longer[worst] * 1e3:.1f} ms more")
    said = "; ".join(parts) or f"needs {(r.memory_bytes - best_row.memory_bytes) / GIB:+.1f} GiB"
    return f"{r.step_s / best_row.step_s - 1:+.1%}: {said}"
