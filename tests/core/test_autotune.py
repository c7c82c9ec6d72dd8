"""The autotuner's choices, its search and its records."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import tessera as ts
from tessera import schedule
from tessera.autotune import search as search_module
from tessera.autotune.choices import CHOICES, applied, is_known, is_set, singles
from tessera.autotune.predict import Prediction, why_not
from tessera.autotune.records import MOST_FILES, Records, id_of
from tessera.autotune.search import FEW, gain, search
from tessera.core.options import ScheduleOptions, parse_options
from tessera.lang.program.schedule import options


class Clock:
    """Candidates whose seconds are in a table; errors are texts."""

    def __init__(self, table: dict[str, Any]) -> None:
        self.table, self.calls = table, []  # type: ignore[var-annotated]

    def __call__(self, choices: Any) -> Any:
        name = " ".join(f"{k}={v}" for k, v in choices.items())
        self.calls.append(name)
        return self.table[name]


def chosen(table: dict[str, Any], left: Any = lambda: 1.0) -> tuple[str, Clock]:
    """The name of the candidate that wins among the single choices of `table`."""
    clock = Clock(table)
    names = [n for n in table if n and " " not in n]
    candidates = [dict([n.split("=")]) for n in names]
    rows = search(candidates, clock, left)
    assert sum(t.chosen for t in rows) == 1
    won = next(t for t in rows if t.chosen)
    return " ".join(f"{k}={v}" for k, v in won.choices.items()), clock


@pytest.mark.parametrize(
    ("table", "want"),
    [
        ({"": 1.0, "a=1": 2.0}, ""),
        ({"": 1.0, "a=1": 0.5}, "a=1"),
        ({"": 1.0, "a=1": 0.98}, ""),  # a near-tie goes to the first
        ({"": 1.0, "a=1": 0.5, "a=2": 0.49}, "a=1"),
        ({"": 1.0, "a=1": 0.5, "b=1": 0.8, "a=1 b=1": 0.4}, "a=1 b=1"),
        ({"": 1.0, "a=1": 0.5, "b=1": 0.8, "a=1 b=1": 0.6}, "a=1"),
        ({"": 1.0, "a=1": "no memory", "b=1": 0.8}, "b=1"),
        ({"": 1.0, "a=1": 0.5, "b=1": 0.8, "a=1 b=1": "no memory"}, "a=1"),
        ({"": "no memory", "a=1": 0.5}, ""),  # a program that fails is not tuned
        ({"": 1.0, "a=1": "no memory", "b=1": "no memory"}, ""),
        ({"": 1.0}, ""),
    ],
)
def test_the_fastest_candidate_wins_and_failures_do_not(table: Any, want: str) -> None:
    assert chosen(table)[0] == want


def test_slow_candidates_are_dropped_early_and_finalists_take_turns() -> None:
    table: dict[str, Any] = {"": 1.0, **{f"a={i}": 0.5 + 0.1 * i for i in range(16)}}
    name, clock = chosen(table)
    assert name == "a=0"
    count = clock.calls.count
    assert count("a=15") == 1  # hopeless: more than 1.5 times the defaults
    assert count("a=9") < count("a=3") < count("a=0")
    last = clock.calls[-2 * (len({*clock.calls[-20:]})) :]
    assert last[: len(last) // 2] == last[len(last) // 2 :]  # one after the other in each round


def test_medians_decide_and_all_times_of_the_final_count() -> None:
    phases = iter(range(10_000))

    def seconds(choices: Any) -> float:
        slow = 5.0 if next(phases) % 7 == 0 else 1.0  # the machine is slow for a moment
        return slow * (0.8 if choices else 1.0)

    rows = search([{"a": 1}], seconds, lambda: 1.0)
    assert [t.chosen for t in rows] == [False, True] and gain(rows) == pytest.approx(1.25)


def test_when_the_time_is_over_those_that_were_timed_decide() -> None:
    parts = iter([0.5, *[0.3] * FEW, 0.0])
    name, clock = chosen({"": 1.0, "a=1": 0.5, "b=1": 0.1}, lambda: next(parts, 0.0))
    assert name == "a=1" and "b=1" not in clock.calls
    assert chosen({"": 1.0, "a=1": 0.5}, lambda: 0.0)[0] == ""


def test_if_all_fail_in_the_final_the_defaults_stay() -> None:
    calls = iter(range(100))
    rows = search([{"a": 1}], lambda c: 1.0 if next(calls) < 2 else "no memory", lambda: 1.0)
    assert [t.chosen for t in rows] == [True, False] and gain(rows) == 1.0


@pytest.mark.parametrize(
    ("kernel_s", "kernel_bytes", "wins"),
    [(0.86, 100, True), (0.9, 100, False), (1.0, 50, True), (1.2, 10, False), (1.0, None, False)],
)
def test_a_kernel_wins_by_far_or_not_at_all(
    kernel_s: float, kernel_bytes: int | None, wins: bool
) -> None:
    kernel = {"attention": "kernel"}
    rows = search(
        [kernel], lambda c: kernel_s if c else 1.0, lambda: 1.0,
        lambda c: kernel_bytes if c else 100,
    )  # fmt: skip
    assert next(t.choices for t in rows if t.chosen) == (kernel if wins else {})


def test_an_interrupt_ends_the_search(monkeypatch: pytest.MonkeyPatch) -> None:
    def seconds(choices: Any) -> float:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        search([{"a": 1}], seconds, lambda: 1.0)
    assert search_module.NEAR < 1


# -- choices --------------------------------------------------------------------------------------
def test_choices_are_options_with_a_text_that_is_read_back() -> None:
    base = ScheduleOptions(overlap=True)
    made = applied(base, {"bucket_bytes": 4, "library": "older", "algorithm": "ring"})
    made = applied(made, {"block_rows": 64})
    assert parse_options(made.text()).schedule == made
    assert is_set(made, "library") and is_set(made, "overlap") and not is_set(made, "layers")
    assert made == options(
        overlap=True,
        bucket_bytes=4,
        algorithm="ring",
        choices={"block_rows": 64, "library": "older"},
    )
    assert singles({"a": (1, 2), "b": (3,)}, lambda name: name == "a") == [{"a": 1}, {"a": 2}]


@pytest.mark.parametrize(
    ("choices", "text"),
    [
        ({"libary": "older"}, "'libary' is no choice"),
        ({"library": "oldest"}, "library cannot be 'oldest'"),
        ({"block_rows": 0}, "block_rows cannot be 0"),
        ({"block_rows": True}, "block_rows cannot be True"),
        ("library", "'library' is no choice"),
    ],
)
def test_an_unknown_choice_is_an_error(choices: Any, text: str) -> None:
    with pytest.raises(ts.UsageError, match=text):
        schedule(choices=choices)
    assert not is_known(choices)


def test_tuning_is_no_part_of_a_program() -> None:
    assert ScheduleOptions(tune=True) == ScheduleOptions() and not ScheduleOptions(tune=True).text()
    assert all(c.kind in ("tune", "speed") for c in CHOICES.values())


@pytest.mark.parametrize(
    ("now", "why"),
    [
        (Prediction(100, 1.0, 10), ""),
        (Prediction(200, 1.0, 10), "computes 2.0 times as much"),
        (Prediction(100, 2.0, 10), "its collectives take 2.0 times as long"),
        (Prediction(100, 1.0, 2 * 10**9), "needs 2.0 GB of a device's 1.0 GB"),
    ],
)
def test_hopeless_candidates_are_told_by_prediction(now: Prediction, why: str) -> None:
    assert why_not(now, Prediction(100, 1.0, 10), 10**9) == why
    assert why_not(now, now, 0) == ""


@pytest.mark.parametrize("limit", [0, -1, float("nan"), float("inf"), "60"])
def test_a_limit_of_no_time_is_an_error(limit: Any) -> None:
    with pytest.raises(ts.UsageError, match="limit_s"):
        ts.tune(limit_s=limit)


# -- records --------------------------------------------------------------------------------------
def test_damaged_foreign_and_old_lines_have_no_effect_and_stay(tmp_path: Path) -> None:
    records = Records(tmp_path)
    records.add("ab", key={"arch": "cpu"})
    records.add("ab", choices={}, time_s=2.0)
    records.add("ab", chosen={"block_rows": 8}, gain=1.5, timed=2)
    good = {"v": 1, "id": "ab", "at": 9e9}
    odd = [
        b"not json", b'{"v":1,"id":"ab","at":9e9,"chosen":{"block', b"[]", b"\xff\xfe", b"7",
        *(json.dumps({**good, **x}).encode() for x in (
            {"v": 2, "chosen": {"block_rows": 16}},  # another version
            {"chosen": {"flux": 3}}, {"chosen": {"block_rows": "many"}}, {"chosen": 5},
            {"id": 5, "chosen": {}}, {"at": "now", "chosen": {}},
            {"chosen": {"block_rows": 16}},  # without its gain
            {"chosen": {"overlap": "yes"}, "gain": 2.0, "timed": 3},
            {"chosen": {"block_rows": 16}, "gain": "2", "timed": 3},
            {"choices": {}, "time_s": "1"}, {"time_s": 1.0}, {"key": 5},
        )),
    ]  # fmt: skip
    (tmp_path / "foreign.jsonl").write_bytes(b"\n".join(odd))
    row = records.choice("ab")
    assert row is not None and row["chosen"] == {"block_rows": 8}
    assert records.choice("a") is None and len(records.table()) == 1
    assert [t.step_s for t in records.timings("ab")] == [2.0] and records.failed("ab") == []
    records.close()
    records.merge()
    kept = (tmp_path / "merged.jsonl").read_bytes().split(b"\n")
    assert set(odd) < set(kept) and len([*tmp_path.glob("*.jsonl")]) == 1
    assert Records(tmp_path).choice("ab") == row
    assert records.clear() == 1 and not [*tmp_path.glob("*.jsonl")]


def test_the_files_of_running_processes_are_left_alone(tmp_path: Path) -> None:
    mine, other = Records(tmp_path), Records(tmp_path)
    mine.add("a", choices={}, time_s=1.0)
    other.add("a", choices={}, time_s=2.0)
    mine.merge()
    assert len([*tmp_path.glob("*-*.jsonl")]) == 2
    other.add("a", choices={}, time_s=3.0)
    other.close()
    mine.merge()
    assert len([*tmp_path.glob("*-*.jsonl")]) == 1
    assert sorted(row["time_s"] for row in mine.rows("a")) == [1.0, 2.0, 3.0]
    mine.close()


WRITER = """
import sys
from pathlib import Path
from tessera.autotune.records import Records
for i in range(40):
    records = Records(Path(sys.argv[1]))
    records.add("a", choices={"block_rows": i + 1}, time_s=float(sys.argv[2]))
    records.close()
    if i % 10 == 9:
        records.merge()
"""


def test_processes_that_write_and_merge_at_once_lose_nothing(tmp_path: Path) -> None:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    runs = [
        subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path), str(i)], env=env)
        for i in range(3)
    ]
    assert [run.wait(timeout=120) for run in runs] == [0, 0, 0]
    rows = [*Records(tmp_path).rows("a")]
    assert len(rows) == 120 and len([*tmp_path.glob("*.jsonl")]) <= 3 * MOST_FILES


def test_the_id_is_that_of_the_key() -> None:
    key = {"arch": "cpu", "dtype": "f32"}
    assert id_of(key) == id_of(dict(reversed(key.items()))) != id_of({**key, "dtype": "bf16"})
