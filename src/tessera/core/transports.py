"""Table of transports of collectives, and the choice of "auto" for each op, as data.

The runtime fills it (`runtime/transports.py`).
"""

from __future__ import annotations

from dataclasses import dataclass

from .wording import columns

COLLECTIVES = "all_reduce, reduce_scatter, all_gather, all_to_all, broadcast, permute"
SENDS = "send, recv"
TOKENS = "dispatch, combine (experts)"
OPS = (COLLECTIVES, SENDS, TOKENS)


@dataclass(frozen=True, slots=True)
class Transport:
    """A transport of data between devices; `why` it is available or not, and how to get it
    (`fix`)."""

    name: str
    available: bool
    why: str
    fix: str = ""


@dataclass(frozen=True, slots=True)
class Transports:
    """The transports of this program. `auto` has, for ops, the transport between the devices of a
    process and the one between processes ("" for a single process)."""

    every: tuple[Transport, ...]
    auto: tuple[tuple[str, str, str], ...]

    def __getitem__(self, name: str) -> Transport:
        return next(t for t in self.every if t.name == name)

    def __str__(self) -> str:
        rows = [("transport", "", "because")]
        for t in self.every:
            rows.append((t.name, "yes" if t.available else "no", t.why))
            if t.fix and not t.available:
                rows.append(("", "", f"to have it: {t.fix}"))
        picks = [("auto takes", "in a process", "between processes"), *self.auto]
        if any(between for *_, between in self.auto):
            return "\n".join([*columns(rows, 3), "", *columns(picks, 3)])
        return "\n".join([*columns(rows, 3), "", *columns([row[:2] for row in picks], 2)])


def choices(platform: str, processes: int, between_cpus: str) -> tuple[tuple[str, str, str], ...]:
    """Returns the choice of "auto" on `platform`; `between_cpus` is the transport between processes
    of CPUs.

    >>> for row in choices("cpu", 2, "gloo"):
    ...     print(row[1:])
    ('in-process', 'gloo')
    ('in-process', 'gloo')
    ('in-process', 'gloo')
    """
    gpus = ("nccl", "nccl")
    by = {"cpu": ("in-process", between_cpus), "gpu": gpus, "cuda": gpus}
    inside, between = by.get(platform, ("engine", "engine"))
    out = between if processes > 1 else ""
    return tuple((op, inside, out) for op in OPS)
