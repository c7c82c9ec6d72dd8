"""Dumps of the flight recorder: reading, comparison of ranks, and display."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..core.checks import file_access
from ..core.errors import UsageError
from ..core.wording import DUMP_VERSION, nth, ranks_text, record_text

if TYPE_CHECKING:
    from rich.console import RenderableType


@dataclass(frozen=True)
class Dump:
    """A dump: the rank that wrote it, the record it was stuck in, the missing ranks, and the
    reports of all ranks."""

    rank: int
    limit_s: float
    written_s: float
    stuck: Mapping[str, Any]
    missing: tuple[int, ...]
    ranks: Mapping[int, Mapping[str, Any]]

    @property
    def differs(self) -> list[str]:
        """The differences between ranks, one per line: the first record of the group that is not
        equal on all ranks, and how far each rank has come."""
        group = tuple(self.stuck["group"])
        found: dict[int, dict[int, str]] = {}
        for rank, told in self.ranks.items():
            for r in told.get("records", ()):
                if tuple(r["group"]) == group:
                    found.setdefault(r["place"], {})[rank] = _record_line(r)
        lines = []
        for place, said in sorted(found.items()):
            kinds: dict[str, list[int]] = {}
            for rank, text in sorted(said.items()):
                kinds.setdefault(text, []).append(rank)
            if len(kinds) > 1:
                parts = [f"{ranks_text(r)}: {text}" for text, r in kinds.items()]
                lines.append(f"the {nth(place)} is not the same: " + "; ".join(parts))
                break  # all after it are shifted
        far: dict[int, list[int]] = {}
        for rank in self.ranks:
            in_places = [p for p, said in found.items() if rank in said]
            far.setdefault(max(in_places, default=0), []).append(rank)
        if len(far) > 1:
            for place, ranks in sorted(far.items(), reverse=True):
                came = f"came to the {nth(place)}" if place else "came to none"
                lines.append(f"{ranks_text(ranks)} {came}")
        return lines


def load_dump(path: Path | str) -> Dump:
    """The dump in the file `path`. Raises UsageError if the file is not a dump."""
    with file_access("flight", path, "read", "name a tessera-flight-*.json"):
        held = Path(path).read_bytes()
    try:
        told = json.loads(held.decode("utf-8"))
        if told["version"] != DUMP_VERSION:
            raise ValueError
        return Dump(
            int(told["rank"]),
            float(told["limit_s"]),
            float(told["written_s"]),
            dict(told["stuck"]),
            tuple(told["missing"]),
            {int(r): dict(t) for r, t in told["ranks"].items()},
        )
    except (ValueError, KeyError, TypeError, AttributeError):
        raise UsageError(
            f"flight: {str(path)!r} is no dump of the flight recorder",
            fix="name a tessera-flight-*.json as a program of this version wrote it",
        ) from None


def render_dump(dump: Dump, last: int = 8) -> Iterator[RenderableType]:
    """Yields the parts of a dump for a rich console: a summary line, a table, the differences."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    stuck = dump.stuck
    who = f"{ranks_text(dump.missing)} did not arrive" if dump.missing else "all ranks arrived"
    yield Text(f"rank {dump.rank} waited {dump.limit_s:g} s in {_record_line(stuck)}: {who}")
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("rank", "nr", "program", "what", "at", "bytes", "seconds"):
        table.add_column(name, overflow="fold", justify="right" if name == "bytes" else "left")
    for rank, told in sorted(dump.ranks.items()):
        mark = f"{rank} late" if rank in dump.missing else str(rank)
        for r in told.get("records", [])[-last:]:
            took = f"{r['end_s'] - r['start_s']:.3f}" if r["end_s"] else _open(dump, r)
            program = f"{r['program']} {r['step']}".strip()
            how = f"raised {r['error']}" if r["error"] else took
            table.add_row(mark, str(r["place"]), program, r["what"], r["at"], str(r["bytes"]), how)
            mark = ""
        state = (told.get("doing") or told.get("ended") or "") if told else "has told nothing"
        if state:
            table.add_row(mark, "", "", state, "", "", "")
    yield table
    for line in dump.differs or ["no record differs between the ranks"]:
        yield Text(line)


def _open(dump: Dump, r: Mapping[str, Any]) -> str:
    return f"{dump.written_s - r['start_s']:.3f}, not done"


def _record_line(r: Mapping[str, Any]) -> str:
    return record_text(r["program"], r["step"], r["what"], r["at"])
