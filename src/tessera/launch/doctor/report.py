"""Checks with their status and fix, and the report of all checks.

>>> report = Report((Check("hash seed", "fix", "ranks differ", "set PYTHONHASHSEED=0"),))
>>> print(report.text())
 fix   hash seed  ranks differ
                  → set PYTHONHASHSEED=0
<BLANKLINE>
what is seen, and the checks that look for the cause:
  results differ: hash seed fix
<BLANKLINE>
1 thing must be fixed
>>> report.exit_code
1
"""

from __future__ import annotations

import json
import textwrap
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

Status = Literal["ok", "note", "fix"]
"""Good; worth knowing, but perhaps intended; wrong."""
WIDTH = 100
SYMPTOMS = {
    "init or QP errors (NVSHMEM, DeepEP)": ("transports", "driver", "limits"),
    "a collective hangs": ("hangs", "host name", "interfaces", "ranks' versions", "all_reduce"),
    "low overlap": ("overlap",),
    "results differ": ("determinism", "hash seed"),
    "pipeline bubbles": ("bubbles",),
}
"""Symptoms that a user sees (guide 2, section 7), with the checks for their causes."""


@dataclass(frozen=True, slots=True)
class Check:
    """One check: what was `found`, how to `fix` it, and its figures."""

    name: str
    status: Status
    found: str
    fix: str = ""
    facts: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Report:
    """All checks, in the order in which they were made."""

    checks: tuple[Check, ...]

    @property
    def ok(self) -> bool:
        """Returns whether no check needs a fix."""
        return all(c.status != "fix" for c in self.checks)

    @property
    def exit_code(self) -> int:
        return 0 if self.ok else 1

    def json(self) -> str:
        """Returns the JSON {"ok": ..., "checks": [{"name", "status", "found", "fix", "facts"},
        ...]}"""
        return json.dumps({"ok": self.ok, "checks": [asdict(c) for c in self.checks]}, indent=2)

    def text(self) -> str:
        """Returns a line for each check, its fix below it, and at the end the symptoms with their
        checks."""
        wide = max(len(c.name) for c in self.checks)
        blank = " " * (9 + wide)
        lines: list[str] = []
        for c in self.checks:
            first, *more_lines = [p for part in c.found.split("\n") for p in _wrapped(part, blank)]
            lines.append(f" {c.status:<6}{c.name:<{wide}}  {first}")
            lines += [blank + line for line in more_lines]
            if c.fix:
                lines += [
                    blank + ("  " * (i > 0)) + x
                    for i, x in enumerate(_wrapped(f"→ {c.fix}", blank))
                ]
        lines += ["", "what is seen, and the checks that look for the cause:"]
        for symptom, names in SYMPTOMS.items():
            told = [c for c in self.checks if c.name.partition(" (")[0] in names]
            if told:
                lines.append(f"  {symptom}: {', '.join(f'{c.name} {c.status}' for c in told)}")
        bad = sum(c.status == "fix" for c in self.checks)
        count = f"{bad} thing{'s' * (bad > 1)} must be fixed"
        return "\n".join([*lines, "", count if bad else "nothing must be fixed"])


def _wrapped(text: str, blank: str) -> list[str]:
    room = WIDTH - len(blank)
    return textwrap.wrap(text, room, break_on_hyphens=False, break_long_words=False) or [""]


def merged(by_host: list[tuple[str, list[Check]]]) -> list[Check]:
    """Returns the checks of several hosts: equal ones once, others with the names of their hosts.

    >>> a, b = Check("cpu", "ok", "8"), Check("cpu", "ok", "4")
    >>> [c.name for c in merged([("n1", [a]), ("n2", [a])])]
    ['cpu']
    >>> [c.name for c in merged([("n1", [a]), ("n2", [b]), ("n3", [a])])]
    ['cpu (n1, n3)', 'cpu (n2)']
    """
    names = dict.fromkeys(c.name for _, checks in by_host for c in checks)
    merged_checks: list[Check] = []
    for name in names:
        alike: dict[tuple[str, str, str], tuple[Check, list[str]]] = {}
        for host, checks in by_host:
            for c in checks:
                if c.name == name:
                    alike.setdefault((c.status, c.found, c.fix), (c, []))[1].append(host)
        for c, hosts in alike.values():
            whose = f" ({', '.join(dict.fromkeys(hosts))})" if len(alike) > 1 else ""
            merged_checks.append(replace(c, name=name + whose))
    return merged_checks
