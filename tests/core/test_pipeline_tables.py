"""Pipeline schedules against the papers and the reviewed tables, and refused tables.

`pytest tests/core/test_pipeline_tables.py --refresh-golden` writes tests/golden/pipelines anew.
"""

from __future__ import annotations

import re
import types
import warnings
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from rich.console import Console

from tessera.core.errors import GraphError, UsageError
from tessera.ir.schedule.pipelines.check import verify_table
from tessera.ir.schedule.pipelines.formulas import bubble_s, peak_activations
from tessera.ir.schedule.pipelines.orders import SCHEDULES, named_schedule, pipeline_table
from tessera.ir.schedule.pipelines.simulate import PipelineWarning, simulate, warn_if_few
from tessera.ir.schedule.pipelines.tables import Table
from tessera.show.pipeline_picture import pipeline_svg, pipeline_text, render_pipeline

GOLDEN = Path(__file__).parent.parent / "golden" / "pipelines"


def chunk_counts(name: str) -> tuple[int | None, ...]:
    return (1, 2, 3, 4) if name == "Interleaved1F1B" else (None,)


def defined(name: str, p: int, m: int, v: int | None) -> bool:
    """Returns whether the schedule supports these counts, by its documentation."""
    if name == "DualPipeV":
        return m >= 2 * p
    return name != "Interleaved1F1B" or v == 1 or m % max(1, m // p) == 0


def all_tables(ranks: range, microbatches: range) -> Iterator[tuple[str, int, int, int | None]]:
    for name in SCHEDULES:
        for p in ranks:
            for m in microbatches:
                for v in chunk_counts(name):
                    if defined(name, p, m, v):
                        yield name, p, m, v


def keep(file: str, text: str, request: pytest.FixtureRequest) -> str:
    """Returns the reviewed text of a file, which `--refresh-golden` writes first."""
    if request.config.getoption("--refresh-golden"):
        (GOLDEN / file).write_text(text)
    return (GOLDEN / file).read_text()


# ---- the schedules with a name -----------------------------------------------------------------
@pytest.mark.parametrize("name", SCHEDULES)
def test_a_table_is_what_was_reviewed(name: str, request: pytest.FixtureRequest) -> None:
    table = pipeline_table(name, ranks=4, microbatches=8)
    file = f"{name.lower()}_4_ranks_8_microbatches.csv"
    assert table.to_csv() == keep(file, table.to_csv(), request)
    read = Table.from_csv(GOLDEN / file)
    assert (read.rows, read.placement, read.microbatches) == (table.rows, table.placement, 8)


def counts(everything: bool) -> tuple[range, range]:
    """Returns ranges for the numbers of ranks and of microbatches."""
    return (range(1, 9), range(1, 25)) if everything else (range(1, 6), range(1, 14))


def test_every_table_can_run_wherever_its_schedule_is_defined(everything: bool) -> None:
    for name, p, m, v in all_tables(*counts(everything)):
        table = pipeline_table(name, p, m, v)
        verify_table(table)
        assert (table.ranks, table.microbatches) == (p, m)
        assert table.stages == p * (v or named_schedule(name).chunks or 1)


def test_elsewhere_the_counts_are_refused_with_counts_that_work() -> None:
    for name in ("DualPipeV", "Interleaved1F1B"):
        for p in range(1, 9):
            for m in range(1, 25):
                v = 2
                if not defined(name, p, m, v):
                    with pytest.raises(UsageError):
                        pipeline_table(name, p, m, v)
    with pytest.raises(UsageError) as error:
        pipeline_table("Interleaved1F1B", 4, 9, 2)
    assert [line for line in str(error.value).splitlines() if "  at " not in line] == [
        "pipeline: Interleaved1F1B on 4 ranks takes microbatches in 2 equal groups",
        "  microbatches : 9",
        "  fix          : use 8 or 10 microbatches; every multiple of 4 will do",
    ]


def test_the_orders_are_those_of_pytorch() -> None:
    """PyTorch implements three of them independently; a pair that runs together counts as one."""
    pytest.importorskip("torch")
    from torch.distributed.pipelining import schedules as theirs

    def cells(row: list[Any]) -> list[str]:
        return [str(a) for a in row if a is not None]

    kinds = {
        "Interleaved1F1B": theirs.ScheduleInterleaved1F1B,
        "ZBV": theirs.ScheduleZBVZeroBubble,
        "DualPipeV": theirs.ScheduleDualPipeV,
    }
    compared = 0
    for name, p, m, v in all_tables(range(1, 7), range(1, 17)):
        if name not in kinds or v == 1:
            continue
        table = pipeline_table(name, p, m, v)
        facts = types.SimpleNamespace(
            pp_group_size=p,
            n_local_stages=v or 2,
            num_stages=2 * p,
            _num_stages=2 * p,
            n_microbatches=m,
            _n_microbatches=m,
            microbatches_per_round=m // max(1, m // p),
        )
        for rank, row in enumerate(table.to_csv().splitlines()):
            want = cells(kinds[name]._calculate_single_rank_operations(facts, rank))
            got = row.split(",")
            if name == "ZBV":  # the order of its last weight-gradient parts is not prescribed
                assert sorted(want) == sorted(got)
                want, got = ([c for c in cs if "W" not in c] for cs in (want, got))
            assert got == want, (name, p, m, v, rank)
            compared += 1
    assert compared > 500


# ---- costs -------------------------------------------------------------------------------------
def test_bubble_and_peak_are_those_of_the_formulas_where_these_hold(everything: bool) -> None:
    held: dict[str, list[int]] = {name: [0, 0] for name in SCHEDULES}
    for name, p, m, v in all_tables(*counts(everything)):
        line = simulate(pipeline_table(name, p, m, v))
        bubble, peak = bubble_s(name, p, m, v), peak_activations(name, p, m, v)
        if bubble is not None:
            assert line.bubble_s == bubble, (name, p, m, v)
            held[name][0] += 1
        if peak is not None:
            assert line.peak_activations[0] == max(line.peak_activations) == peak, (name, p, m, v)
            held[name][1] += 1
    least = 50 if everything else 15
    assert all(min(many) > least for many in held.values()), held


costs = st.integers(0, 6).map(lambda n: Fraction(n, 3))


@given(st.sampled_from(SCHEDULES), st.integers(1, 6), st.integers(1, 20), st.integers(1, 4),
       costs, costs, costs)  # fmt: skip
def test_the_formulas_hold_for_any_costs_in_their_region(
    name: str, p: int, m: int, v: int, f: Fraction, i: Fraction, w: Fraction
) -> None:
    chunks = v if name == "Interleaved1F1B" else None
    assume(defined(name, p, m, chunks))
    if name == "ZBV":
        i = w = f
    if name == "DualPipeV":
        i, w = f, min(f, w)
    line = simulate(pipeline_table(name, p, m, chunks), f, i, w)  # type: ignore[arg-type]
    times = {"forward_s": f, "backward_input_s": i, "backward_weight_s": w}
    by_formula = bubble_s(name, p, m, chunks, **times)  # type: ignore[arg-type]
    assert by_formula is None or line.bubble_s == by_formula


@pytest.mark.parametrize(
    ("name", "m", "times"),
    [
        ("Interleaved1F1B", 3, (1, 1, 1)),
        ("ZB-H1", 3, (1, 1, 1)),
        ("ZB-H1", 8, (1, 1, 2)),
        ("ZB-H2", 6, (1, 1, 1)),
        ("ZB-H2", 8, (2, 1, 2)),
        ("ZBV", 6, (1, 1, 1)),
        ("ZBV", 8, (1, 2, 1)),
        ("DualPipeV", 8, (1, 2, 1)),
    ],
)
def test_just_outside_its_region_a_formula_fails(
    name: str, m: int, times: tuple[int, int, int]
) -> None:
    """Shows that the regions of the formulas are as wide as possible in these directions."""
    f, i, w = times
    named = {"forward_s": f, "backward_input_s": i, "backward_weight_s": w}
    assert bubble_s(name, 4, m, **named) is None  # type: ignore[arg-type]
    formula = {"Interleaved1F1B": f + i + w, "ZB-H1": f + i - w, "ZB-H2": f + i - 2 * w,
               "ZBV": 0, "DualPipeV": f + 2 * i - w}[name] * 3  # fmt: skip
    assert simulate(pipeline_table(name, 4, m), *times).bubble_s != formula


@pytest.mark.parametrize("p", range(1, 9))
def test_what_each_schedule_is_for(p: int) -> None:
    for m in range(1, 25):
        line = {n: simulate(pipeline_table(n, p, m)) for n in ("GPipe", "1F1B", "ZB-H1", "ZB-H2")}
        most = {name: max(x.peak_activations) for name, x in line.items()}
        assert most["1F1B"] == min(p, m) <= most["GPipe"] == m
        assert most["ZB-H1"] == most["1F1B"]
        assert most["ZB-H2"] <= max(2 * p - 1, 1)
        assert line["1F1B"].makespan_s == line["GPipe"].makespan_s == 3 * (m + p - 1)
        assert line["ZB-H1"].makespan_s <= line["1F1B"].makespan_s
        assert line["ZB-H2"].bubble_s <= line["ZB-H1"].bubble_s <= line["1F1B"].bubble_s
        zbv = simulate(pipeline_table("ZBV", p, m))
        if m >= 2 * p - 1:
            assert line["ZB-H2"].gap_s == zbv.gap_s == (0,) * p
        assert max(zbv.peak_activations) <= 2 * p  # each is half of a rank's share


@given(st.integers(1, 6), st.integers(6, 16), st.integers(0, 4).map(lambda n: Fraction(n, 4)))
def test_a_late_weights_part_holds_what_it_was_said_to(p: int, m: int, kept: Fraction) -> None:
    """Qi et al. 2023: H1 holds p-r activations and r weight-gradient parts, H2 2(p-r)-1 and 2r."""
    m = max(m, 2 * p - 1)
    h1, h2 = (simulate(pipeline_table(n, p, m), kept_for_weight=kept) for n in ("ZBH1", "ZBH2"))  # type: ignore[arg-type]
    assert h1.peak_activations == tuple(p - r + r * kept for r in range(p))
    assert h2.peak_activations == tuple(2 * (p - r) - 1 + 2 * r * kept for r in range(p))


def test_sending_stages_and_pairs_have_their_own_times() -> None:
    table = pipeline_table("1F1B", 2, 1)
    line = simulate(table, [1, 2], [3, 4], [5, 6], send_s=10, activation=[7, 9])
    assert line.start_s == ((0, 33), (11, 13))  # 0F0, 0B0 · 1F0, 1B0
    assert line.end_s == ((1, 41), (13, 23))
    assert (line.makespan_s, line.busy_s, line.gap_s) == (41, (9, 12), (32, 0))
    assert line.peak_activations == (7, 9)
    assert line.idle_fraction == (1 - 9 / 41, 1 - 12 / 41)
    pair = Table.from_csv("0F0,(0F1;0B0),0B1")
    assert simulate(pair).end_s == ((1, 4, 4, 6),)
    assert simulate(pair, joined_s=2).end_s == ((1, 3, 3, 5),)
    assert simulate(pair, joined_s=2).busy_s == (5,)


@pytest.mark.parametrize(
    "wrong",
    [
        {"forward_s": -1},
        {"forward_s": [1, 1, 1]},
        {"backward_input_s": "fast"},
        {"backward_weight_s": float("nan")},
        {"send_s": [1, 1]},
        {"send_s": None},
        {"joined_s": float("inf")},
        {"activation": [1, -1]},
        {"kept_for_weight": 2},
    ],
)
def test_costs_that_are_none_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=f"simulate: {next(iter(wrong))} cannot be"):
        simulate(pipeline_table("1F1B", 2, 4), **wrong)


# ---- too few microbatches ----------------------------------------------------------------------
def test_too_few_microbatches_warn_with_what_they_cost() -> None:
    with pytest.warns(PipelineWarning) as seen:
        warn_if_few(pipeline_table("1F1B", 4, 4))
    assert [str(w.message) for w in seen] == [
        "1F1B: with 4 microbatches on 4 ranks each rank idles 43% of a step; with 8 it would be"
        " 27%. Use at least 8 microbatches"
    ]
    assert seen[0].filename == __file__
    own = Table.from_csv("0F0,0B0\n1F0,1B0")
    with pytest.warns(PipelineWarning, match=r"own: .* 1 microbatch on 2 ranks .* 50% of a step\."):
        warn_if_few(own)
    with pytest.warns(PipelineWarning, match="idles 60% of a step"):
        warn_if_few(own, simulate(own, 1, 1, 0, send_s=0.5))


def test_enough_microbatches_or_a_single_rank_do_not() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_if_few(pipeline_table("1F1B", 4, 8))
        warn_if_few(pipeline_table("GPipe", 1, 1))


# ---- pictures ----------------------------------------------------------------------------------
def test_a_picture_is_readable_without_colour() -> None:
    line = simulate(pipeline_table("Interleaved1F1B", 2, 2))
    assert pipeline_text(line, width=46).splitlines() == [
        "Interleaved1F1B · 2 ranks, 4 stages, 2",
        "microbatches · 15 units · idle 20 % · holds at",
        "most 4",
        "from 0",
        "rank 0 │ F0a F1a F0b F1b .   .   B0b ─",
        "rank 1 │ .   F0a F1a F0b B0b ─   F1b B1b",
        "from 8",
        "rank 0 │ .   B1b ─   B0a ─   B1a ─",
        "rank 1 │ ─   B0a ─   B1a ─   .   .",
    ]


def test_colour_tells_the_kind_and_the_chunk() -> None:
    console = Console(width=200, color_system="standard", force_terminal=True, legacy_windows=False)
    with console.capture() as capture:
        console.print(render_pipeline(pipeline_table("ZBV", 1, 1)))
    row = capture.get().splitlines()[1]
    codes = {m[2]: m[1] for m in re.finditer(r"\x1b\[([0-9;]+)m([FIW]0[ab])", row)}
    assert codes == {"F0a": "30;44", "F0b": "30;104", "I0b": "30;106", "W0b": "30;103",
                     "I0a": "30;46", "W0a": "30;43"}  # fmt: skip


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("width", [40, 100, 400])
def test_a_picture_fits_and_names_every_action_once(name: str, width: int) -> None:
    table = pipeline_table(name, 4, 8)
    text = pipeline_text(table, width)
    assert max(map(len, text.splitlines())) <= width
    if width == 400:
        for rank, row in enumerate(table.rows):
            (line,) = [s for s in text.splitlines() if s.startswith(f"rank {rank} ")]
            shown = [c for cell in line.split("│")[1].split() for c in cell.split("+")]
            names = [c.rstrip("ab") for c in shown if c not in (".", "─")]
            assert names == [f"{a.kind}{a.microbatch}" for a in row]


def test_long_and_tall_pictures_say_what_they_leave_out() -> None:
    text = pipeline_text(pipeline_table("1F1B", 40, 40), width=60)
    assert len(text.splitlines()) < 220
    assert "more units" in text and "… and 8 more ranks" in text


def test_an_svg_is_what_was_reviewed(request: pytest.FixtureRequest) -> None:
    svg = pipeline_svg(simulate(pipeline_table("ZB-H1", 2, 2)))
    assert svg == keep("zb-h1_2_ranks_2_microbatches.svg", svg, request)


@pytest.mark.parametrize("name", SCHEDULES)
def test_an_svg_draws_every_action_inside_its_frame(name: str) -> None:
    line = simulate(pipeline_table(name, 3, 6), 0.01, 0.02, 0.015, send_s=0.001)
    root = ElementTree.fromstring(pipeline_svg(line))
    groups = root.findall("{*}g")
    assert len(groups) == sum(map(len, line.table.rows))
    width, height = float(root.attrib["width"]), float(root.attrib["height"])
    for g in groups:
        (rect,) = g.findall("{*}rect")
        x, y, w, h = (float(rect.attrib[k]) for k in ("x", "y", "width", "height"))
        assert x >= 64 and x + w <= width and y >= 30 and y + h <= height


@pytest.mark.parametrize("cell", ["0SEND_F1", "1RECV_B0", "2UNSHARD", "0REDUCE_GRAD"])
def test_a_dump_with_communication_names_the_one_without(cell: str) -> None:
    with pytest.raises(GraphError, match='format="compute_only"'):
        Table.from_csv(f"0F0,{cell},0B0")
