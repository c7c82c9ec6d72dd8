"""Result of timing one compile variant of a program."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CompileVariant:
    """One compile variant of a program: `name`, seconds of a step, bytes of temporaries on a
    device, and whether it was `chosen`.

    >>> print(CompileVariant("preferred, least memory", 0.25, 1_000_000, True))
    preferred, least memory: 250.000 ms, 1.0 MB of temporaries (chosen)
    """

    name: str
    step_s: float
    temporary_bytes: int
    chosen: bool

    def __str__(self) -> str:
        said = f"{self.step_s * 1e3:.3f} ms, {self.temporary_bytes / 1e6:.1f} MB of temporaries"
        return f"{self.name}: {said}" + (" (chosen)" if self.chosen else "")
