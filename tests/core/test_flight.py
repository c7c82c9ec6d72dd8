"""Flight recorder dumps: read, compared and shown."""

from __future__ import annotations

import io
import json
import threading
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import tessera as ts
from tessera import dist
from tessera.core import environment
from tessera.core import limits as limits_of
from tessera.core.context import settings
from tessera.core.limits import Limits, limits
from tessera.core.wording import nth, ranks_text
from tessera.observe.flight import load_dump, render_dump


def record(place: int, what: str, at: str, end_s: float | None, **more: Any) -> dict[str, Any]:
    return {
        "number": place, "program": "step", "step": "", "what": what, "at": at, "place": place,
        "bytes": 64, "start_s": 100.0 + place, "end_s": end_s, "error": "", "group": [0, 1, 2],
    } | more  # fmt: skip


def told(*records: dict[str, Any], ended: str = "") -> dict[str, Any]:
    return {"ended": ended, "doing": "", "seen": {"0,1,2": len(records)}, "records": list(records)}


SUM, MAX = ("one all_reduce", "a.py:3"), ("one all_gather", "a.py:9")
DUMP: dict[str, Any] = {
    "version": 1,
    "written_s": 110.0,
    "rank": 0,
    "limit_s": 5.0,
    "stuck": record(3, *SUM, None),
    "missing": [2],
    "ranks": {
        "0": told(record(1, *SUM, 101.5), record(2, *SUM, 102.5), record(3, *SUM, None)),
        "1": told(record(1, *SUM, 101.5), record(2, *MAX, 102.5), record(3, *SUM, None)),
        "2": told(record(1, *SUM, 101.5), ended="its program has ended"),
    },
}


@pytest.fixture
def dump(tmp_path: Path) -> Path:
    path = tmp_path / "dump.json"
    path.write_text(json.dumps(DUMP))
    return path


def test_what_differs(dump: Path) -> None:
    found = load_dump(dump)
    assert found.missing == (2,) and found.limit_s == 5 and set(found.ranks) == {0, 1, 2}
    assert found.differs == [
        "the 2nd is not the same: rank 0: step: one all_reduce at a.py:3;"
        " rank 1: step: one all_gather at a.py:9",
        "ranks 0, 1 came to the 3rd",
        "rank 2 came to the 1st",
    ]


def test_what_is_shown(dump: Path) -> None:
    console = Console(width=100, record=True, file=io.StringIO())
    for part in render_dump(load_dump(dump), last=2):
        console.print(part)
    lines = [" ".join(line.split()) for line in console.export_text().splitlines()]
    assert lines[0] == (
        "rank 0 waited 5 s in step: one all_reduce at a.py:3: rank 2 did not arrive"
    )
    rows = [line for line in lines if "step one" in line]
    assert rows == [
        "0 2 step one all_reduce a.py:3 64 0.500",
        "3 step one all_reduce a.py:3 64 7.000, not done",
        "1 2 step one all_gather a.py:9 64 0.500",
        "3 step one all_reduce a.py:3 64 7.000, not done",
        "2 late 1 step one all_reduce a.py:3 64 0.500",
    ]
    assert any("its program has ended" in line for line in lines)
    assert lines[-1] == "rank 2 came to the 1st"


@pytest.mark.parametrize("text", ["", "[]", "{}", json.dumps(DUMP | {"version": 9})])
def test_what_is_no_dump(tmp_path: Path, text: str) -> None:
    path = tmp_path / "other.json"
    path.write_text(text)
    with pytest.raises(ts.UsageError, match="is no dump of the flight recorder"):
        load_dump(path)
    with pytest.raises(ts.UsageError, match="cannot be read: No such file"):
        load_dump(tmp_path / "missing.json")


@pytest.fixture
def limits_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits_of, "_set", [])


@pytest.mark.usefixtures("limits_as_before")
def test_limits() -> None:
    assert limits() == Limits(300, 256)
    before = settings()
    dist.set_collective_timeout(2.5, records=7)
    assert limits() == Limits(2.5, 7)
    assert settings() is before  # limits are not settings of a program
    seen = []
    thread = threading.Thread(target=lambda: seen.append(limits()))
    thread.start()
    thread.join()
    assert seen == [Limits(2.5, 7)]  # a setting of the process, so of all threads
    for wrong in (0, -1, float("inf"), float("nan"), "5"):
        with pytest.raises(ts.UsageError, match="set_collective_timeout"):
            dist.set_collective_timeout(wrong)  # type: ignore[arg-type]
    with pytest.raises(ts.UsageError, match="set_collective_timeout"):
        dist.set_collective_timeout(5, records=0)
    assert (
        environment.number(environment.COLLECTIVE_LIMIT, 300, {"TESSERA_COLLECTIVE_LIMIT": "9"})
        == 9
    )
    assert environment.folder(environment.FLIGHT_DIR, {"TESSERA_FLIGHT_DIR": " "}) == "."


def test_words() -> None:
    assert [nth(n) for n in (1, 2, 3, 4, 11, 21, 112)] == [
        "1st", "2nd", "3rd", "4th", "11th", "21st", "112th",
    ]  # fmt: skip
    assert ranks_text([3]) == "rank 3" and ranks_text([0, 1, 2, 5]) == "ranks 0 to 2, 5"
