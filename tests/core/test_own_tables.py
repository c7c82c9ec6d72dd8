"""User-defined pipeline tables: validation and execution."""

from __future__ import annotations

from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tessera.core.errors import GraphError, UsageError
from tessera.ir.schedule.pipelines.check import run_order, verify_table
from tessera.ir.schedule.pipelines.formulas import bubble_s, peak_activations
from tessera.ir.schedule.pipelines.orders import SCHEDULES, pipeline_table
from tessera.ir.schedule.pipelines.tables import Action, Table


def test_csv_is_that_of_pytorch_and_says_only_the_order() -> None:
    table = Table.from_csv("# mine\n0F0, ,0F1,0B0,,0I1,0W1\n,1F0,(1F1;1B0)OVERLAP_F_B,1B1\n")
    assert table.rows == (
        (Action("F", 0, 0), Action("F", 0, 1), Action("B", 0, 0), Action("I", 0, 1),
         Action("W", 0, 1)),
        (Action("F", 1, 0), Action("F", 1, 1), Action("B", 1, 0, joined=True), Action("B", 1, 1)),
    )  # fmt: skip
    assert table.to_csv() == "0F0,0F1,0B0,0I1,0W1\n1F0,(1F1;1B0)OVERLAP_F_B,1B1\n"
    assert table.splits_backward and table.chunks == 1
    verify_table(table)


def test_a_schedule_is_a_name_a_table_a_file_or_a_function(tmp_path: Path) -> None:
    def mine(rank: int, ranks: int, microbatches: int) -> Iterator[str]:
        for j in range(microbatches):
            yield f"{rank}F{j}"
            yield f"{rank}B{j}"

    table = pipeline_table(mine, 2, 3)
    assert (table.name, table.microbatches) == ("mine", 3)
    file = tmp_path / "one_by_one.csv"
    file.write_text(table.to_csv())
    for given_as in (file, str(file), table):
        assert pipeline_table(given_as, 2, 3).rows == table.rows
    assert pipeline_table(file, 2, 3).name == "one_by_one"
    with pytest.raises(UsageError, match="is for other counts"):
        pipeline_table(table, 2, 4)
    for name in ("gpipe", "ZB_H1", "zbh1", "interleaved", "Dualpipev", "1f1b", "zb-h2", "ZBV"):
        assert pipeline_table(name, 2, 4).name in SCHEDULES


@pytest.mark.parametrize(
    ("call", "what"),
    [
        (lambda: pipeline_table("2F2B", 2, 4), "there is no schedule '2F2B'"),
        (lambda: pipeline_table(7, 2, 4), "there is no schedule 7"),  # type: ignore[arg-type]
        (lambda: pipeline_table("1F1B", 0, 4), "ranks cannot be 0"),
        (lambda: pipeline_table("1F1B", 2, True and 1.5), "microbatches cannot be 1.5"),  # type: ignore[arg-type]
        (lambda: pipeline_table("1F1B", 2, 4, 2), r"1F1B has 1 stage\(s\) on a rank"),
        (lambda: pipeline_table("DualPipeV", 4, 7), "DualPipeV on 4 ranks needs 8 microbatches"),
        (lambda: pipeline_table(lambda r, p, m: None, 2, 4), "a list of actions for each rank"),  # type: ignore[arg-type, return-value]
        (lambda: Table.from_rows(None), "a list of actions for each rank"),  # type: ignore[arg-type]
        (lambda: Table.from_rows([None]), "a list of actions for each rank"),  # type: ignore[list-item]
        (lambda: Table.from_function("1F1B", 2, 4), "a list of actions for each rank"),  # type: ignore[arg-type]
        (lambda: Table.from_function(lambda r, p, m: [], "x", 4), "ranks cannot be 'x'"),  # type: ignore[arg-type]
        (lambda: bubble_s("1F1B", 0, 4), "ranks cannot be 0"),
        (lambda: peak_activations("1F1B", 2, -4), "microbatches cannot be -4"),
        (lambda: Table.from_csv(3), "a table is read from text"),  # type: ignore[arg-type]
        (lambda: Table.from_csv("nowhere.csv"), "the table cannot be read"),
    ],
)
def test_what_is_no_schedule_is_refused(call: Any, what: str) -> None:
    with pytest.raises(UsageError, match=what):
        call()


@pytest.mark.parametrize("cell", ["F0", "0X0", "0F", "-1F0", "0F0;0B0", "²F0", None])
def test_a_cell_that_cannot_be_read_is_named_with_its_place(cell: Any) -> None:
    with pytest.raises(GraphError) as error:
        Table.from_rows([["0F0", "0B0"], ["1F0", cell]])
    assert str(error.value).splitlines() == [
        f"pipeline: cell {cell!r} of a table cannot be read",
        "  at  : rank 1, slot 1",
        "  fix : a cell is stage, kind and microbatch, e.g. 0F3, 2B1, 1I0, 1W0 or (0F7;3B2)",
    ]


# One invalid table per check, which only this check refuses: (csv, message).
WRONG = {
    "a rank without a stage": ("0F0,0B0\n,", ["rank 1 : does nothing: it has no stage"]),
    "a stage on no rank": ("0F0,0B0\n2F0,2B0", ["stage 1 : is on no rank"]),
    "a stage on two ranks": (
        "0F0,0B0,0F1\n1F0,1B0,1F1,1B1,0B1",
        ["rank 1, slot 4 : 0B1: stage 0 is on rank 0"],
    ),
    "a repeated action": (
        "0F0,0B0\n1F0,1F0,1B0",
        ["rank 1, slot 1 : 1F0 is repeated: 1F0 is in slot 0"],
    ),
    "a backward both whole and split": (
        "0F0,0B0,0W0",
        [
            "rank 0, slot 2 : 0W0 is repeated: 0B0 is in slot 1"
            " (0B0 is the whole backward; its parts are I and W)"
        ],
    ),
    "missing actions": (
        "0F0,0F1,0B0,0B1\n1F0,1I0,1B1",
        ["rank 1 : 1W0 is missing", "rank 1 : 1F1 is missing"],
    ),
    "a missing backward": ("0F0,0F1,0B1", ["rank 0 : 0B0 (or 0I0 and 0W0) is missing"]),
    "weights before inputs": (
        "0F0,0W0,0I0",
        ["rank 0, slot 1 : 0W0 comes before 0I0 (slot 2), whose result it needs"],
    ),
    "stages in the wrong order on a rank": (
        "1F0,0F0,1B0,0B0",
        ["rank 0, slot 0 : 1F0 comes before 0F0 (slot 1), whose result it needs"],
    ),
    "a pair of two forwards": (
        "(0F0;0F1),0B0,0B1",
        ["rank 0, slot 0 : 0F0 and 0F1 are joined: a pair is a forward and a backward"],
    ),
    "a pair that waits for itself": (
        "(0F0;0B0)",
        ["rank 0, slot 0 : 0B0 needs 0F0: they cannot run together"],
    ),
    "ranks that wait in a circle": (
        "0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1",
        [
            "rank 0, slot 1 : 0B0 waits for 1B0 (rank 1, slot 2), which comes after 1F1 (slot 1)",
            "rank 1, slot 1 : 1F1 waits for 0F1 (rank 0, slot 2), which comes after 0B0 (slot 1)",
        ],
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_table_is_refused_in_these_words(case: str) -> None:
    csv, rows = WRONG[case]
    with pytest.raises(GraphError) as error:
        verify_table(Table.from_csv(csv))
    first, *rest, fix = str(error.value).splitlines()
    assert first == "pipeline: table own cannot run"
    assert [" : ".join(p.strip() for p in line.split(" : ", 1)) for line in rest] == rows
    assert fix.split() == ["fix", ":", "correct", "the", "table"]


def test_numbers_that_do_not_exist_are_refused_and_long_lists_cut() -> None:
    for bad in (Action("F", 5, 0), Action("F", 0, 9), Action("F", -1, 0), Action("Q", 0, 0)):  # type: ignore[arg-type]
        with pytest.raises(GraphError, match="cannot run"):
            verify_table(Table("t", ((bad,),), (0,), 1))
    with pytest.raises(GraphError, match="it has no ranks"):
        verify_table(Table("t", (), (), 1))
    with pytest.raises(GraphError) as error:
        verify_table(Table.from_csv("0F0,0B99999999"))
    assert len(str(error.value).splitlines()) == 11
    with pytest.raises(GraphError, match="a table of 2 actions names stage 99999999"):
        Table.from_csv("0F0,99999999B0")


@given(st.integers(1, 4), st.integers(1, 3), st.integers(1, 4), st.booleans(), st.data())
def test_a_complete_table_is_refused_exactly_where_its_order_has_a_circle(
    p: int, v: int, m: int, split: bool, data: st.DataObject
) -> None:
    rows = []
    for r in range(p):
        kinds = "FIW" if split else "FB"
        actions = [Action(k, s, j) for s in range(r, p * v, p) for j in range(m) for k in kinds]  # type: ignore[arg-type]
        if data.draw(st.booleans()):  # close to a valid order, so that some draws are valid
            actions.sort(
                key=lambda a: (a.microbatch, a.kind != "F", a.stage if a.kind == "F" else -a.stage)
            )
        else:
            actions = data.draw(st.permutations(actions))
        rows.append(actions)
    table = Table.from_rows(rows)
    before: dict[str, set[str]] = {}
    for row in rows:
        for i, a in enumerate(row):
            places = [table.done_at[need] for need in a.needs(p * v)]
            before[str(a)] = {str(rows[r][k]) for r, k in places}
            before[str(a)] |= {str(row[i - 1])} if i else set()
    try:
        list(TopologicalSorter(before).static_order())
    except CycleError:
        with pytest.raises(GraphError, match=r"waits for|comes before"):
            run_order(table)
        return
    done: set[str] = set()
    for rank, slot in run_order(table):
        assert before[str(rows[rank][slot])] <= done
        done.add(str(rows[rank][slot]))
    assert len(done) == sum(map(len, rows))
