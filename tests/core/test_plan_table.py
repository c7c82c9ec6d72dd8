"""Tables of training runs: their cells, their predictions, and published rows with their errors."""

from __future__ import annotations

import csv
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import tessera as ts
from tessera.core.layout import parse_type
from tessera.core.machine.chip import CHIPS, Chip, Products
from tessera.core.machine.cluster_yaml import read, write
from tessera.core.machine.presets import preset
from tessera.cost.fused_time import fused_time
from tessera.cost.step_time import kernels, step_time
from tessera.ir.graph.build import Builder
from tessera.ir.graph.node import Graph
from tessera.launch.cli import app
from tessera.plan import predict as predicting
from tessera.plan.predict import machine_for, predict
from tessera.plan.rows import Row, read_rows
from tessera.plan.table import predicted
from tests.conftest import Golden

DATA = Path(__file__).parents[1] / "data" / "accuracy"
HEAD = "hidden,layers,heads,vocab,seq,global_batch,chips"
CELLS = "4096,32,32,50304,2048,256,64"


def row(**columns: Any) -> Row:
    names, values = ",".join(columns), ",".join(map(str, columns.values()))
    (found,) = read_rows(f"{HEAD},{names}\n{CELLS},{values}" if columns else f"{HEAD}\n{CELLS}")
    return found


def table(name: str) -> list[Row]:
    text = (DATA / f"{name}.csv").read_text()
    return read_rows(text.replace("tests/data/accuracy", str(DATA)))


MISTAKES = {
    "missing": "hidden,layers,heads,seq,global_batch,chips\n1,1,1,1,1,1",
    "near": f"{HEAD},micro_bach\n{CELLS},2",
    "kinds": f"{HEAD},tp,zero,dropout,recompute\n{CELLS},two,4,1.5,all\n{CELLS},0,3,x,full",
    "short": f"{HEAD},tp\n{CELLS}\n{CELLS},1,1\n4096,,32,50304,2048,256,64,1",
    "mesh": f"{HEAD},tp,pp,dp\n{CELLS},8,3,4\n4096,32,32,50304,2048,256,12,1,1,12",
    "divides": f"{HEAD},tp,kv_heads,micro_batch,cp,ep\n4095,32,32,50304,2047,250,96,6,5,3,2,5",
    "contradictory": (
        f"{HEAD},sp,interleave,experts,top_k,ep,attention,mlp\n{CELLS},1,2,4,5,8,stored,swiglu"
    ),
    "pipeline": f"{HEAD},pp,interleave,schedule\n{CELLS},8,16,2F2B\n{CELLS},16,2,1F1B",
    "cluster": f"{HEAD},cluster,chip\n{CELLS},dgx_a100,h100\n{CELLS},t3000,\n{CELLS},nowhere,",
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_wrong_cell_is_named_with_its_row_and_column(name: str, golden: Golden) -> None:
    with pytest.raises(ts.UsageError) as raised:
        read_rows(MISTAKES[name])
    golden(raised.value)


def test_a_machine_of_a_file_has_its_own_size(tmp_path: Path) -> None:
    file = tmp_path / "two.yaml"
    file.write_text(write(preset("dgx_a100").of(2)))
    with pytest.raises(ts.UsageError, match=r"row 1, column chips : .* has 16 chips"):
        row(cluster=file)


def test_operations_are_those_of_the_papers() -> None:
    for r in table("sc21_table1"):
        h, s, v, n = r.hidden, r.seq, r.vocab, r.layers
        whole = 96 * r.global_batch * s * n * h * h * (1 + s / (6 * h) + v / (16 * n * h))
        assert r.hardware_flops == pytest.approx(whole)
    r = row(recompute="selective")
    extra = r.global_batch * r.seq * r.layers * r.score_flops
    assert r.hardware_flops == r.model_flops + extra


def near(value: float, printed: str, more: float = 0.0) -> None:
    """Checks a value against a printed one, within its rounding and the part `more`."""
    digits = len(printed.partition(".")[2])
    assert abs(value - float(printed)) <= 0.51 * 10.0**-digits + more * value


def test_published_figures_agree_with_each_other() -> None:
    count = 0
    for file in sorted(DATA.glob("*.csv")):
        for r in table(file.stem):
            g, tokens = r.given, r.global_batch * r.seq
            chip = machine_for(r).chip
            assert chip is not None
            peak = chip.rate(r.dtype).peak_flops_per_s * r.chips
            if "parameters" in g:  # llm-foundry
                made = r.layers * (12 * r.hidden**2 + 13 * r.hidden)
                made += (r.vocab + r.seq + 2) * r.hidden
                assert made == int(g["parameters"])
                flops = 6 * made + 12 * r.layers * r.hidden * r.seq
                per_chip = float(g["measured_tokens_per_s"])
                mfu = flops * per_chip * r.chips / peak
                assert abs(mfu * 100 / float(g["measured_mfu"]) - 1) < 0.012
            elif "measured_tokens_per_s" in g:  # torchtitan, the embedding counts
                step_s = tokens / r.chips / float(g["measured_tokens_per_s"])
                flops = r.model_flops + 6 * tokens * r.vocab * r.hidden
                near(flops / step_s / peak * 100, g["measured_mfu"], 0.006)
            elif "measured_days" in g and "measured_tflops" in g:  # SC21, by its equation 3
                step_s = r.hardware_flops / r.chips / float(g["measured_tflops"]) / 1e12
                days = 300e9 / tokens * step_s / 86400
                assert abs(days - float(g["measured_days"])) <= 1
            elif g.get("measured_step_s"):
                step_s = float(g["measured_step_s"])
                if g.get("measured_mfu"):
                    near(r.model_flops / step_s / peak * 100, g["measured_mfu"], 0.008)
                if g.get("measured_hfu"):  # its equation counts recomputed scores three times
                    flops = r.model_flops + 3 * (r.hardware_flops - r.model_flops)
                    near(flops / step_s / peak * 100, g["measured_hfu"], 0.008)
                if g.get("measured_days"):  # MegaScale
                    near(tokens / step_s / 1e3, g["measured_ktokens_per_s"], 0.005)
                    near(300e9 / tokens * step_s / 86400, g["measured_days"], 0.005)
            elif g.get("measured_mfu"):  # Llama 3
                near(float(g["measured_tflops"]) / 989 * 100, g["measured_mfu"], 0.013)
            count += 1
    assert count > 200


BOUNDS = {  # the mean and the largest error
    "sc21_table1": (0.05, 0.15),
    "sc21_table2": (0.04, 0.05),
    "korthikanti": (0.07, 0.11),
    "megascale": (0.15, 0.21),
    "torchtitan": (0.19, 0.20),
    "llm_foundry_a100": (0.07, 0.40),
    "llm_foundry_a100_40gb": (0.08, 0.57),
    "llm_foundry_h100": (0.09, 0.32),
}


@pytest.mark.parametrize("name", BOUNDS)
def test_published_rows_are_predicted(name: str, everything: bool) -> None:
    rows = table(name)
    rows = rows if everything or len(rows) <= 10 else rows[::5]
    errors = []
    for r in rows:
        p, g = predict(r), r.given
        if g.get("measured_tflops"):
            real_s = p.step_s * p.tflops_per_chip / float(g["measured_tflops"])
        elif g.get("measured_step_s"):
            real_s = float(g["measured_step_s"])
        else:
            real_s = r.global_batch * r.seq / r.chips / float(g["measured_tokens_per_s"])
        errors.append(abs(real_s / p.step_s - 1))
    mean, worst = BOUNDS[name]
    assert statistics.mean(errors) < mean
    assert max(errors) < worst


def test_a_pipeline_has_the_bubble_of_its_formula() -> None:
    one = row(pp=8, tp=8)
    few, many = (predict(replace(one, global_batch=n)) for n in (32, 64))
    each = (many.pipeline_s - few.pipeline_s) / 32
    # The last stage has the loss besides, so the others wait: at most the bubble of equal stages.
    assert 32 * each < few.pipeline_s <= (32 + 7) * each * 1.01
    parts = predict(replace(one, interleave=4, global_batch=32))
    assert parts.pipeline_s < few.pipeline_s
    for name in ("ZB-H1", "ZBV"):
        assert predict(replace(one, schedule=name, global_batch=32)).pipeline_s < few.pipeline_s
    gpipe = predict(replace(one, schedule="GPipe", global_batch=32))
    assert gpipe.memory_gib > few.memory_gib


def test_choices_change_time_and_memory_as_they_should() -> None:
    base = row(zero=1)
    p = {z: predict(replace(base, zero=z)) for z in (0, 1, 2, 3)}
    assert p[0].memory_gib > p[1].memory_gib > p[2].memory_gib > p[3].memory_gib
    full, early = (predict(replace(base, recompute=c)) for c in ("full", "early_stop"))
    assert p[1].step_s < early.step_s < full.step_s < 4 / 3 * p[1].step_s * 1.02
    assert full.memory_gib < p[1].memory_gib
    late = predict(replace(base, overlap_dp=0))
    assert late.reduce_s > p[1].reduce_s
    assert predict(replace(base, fused=0)).step_s > p[1].step_s
    assert predict(replace(base, attention="flash1")).step_s > p[1].step_s
    stored = replace(base, attention="stored")
    again = predict(replace(stored, recompute="selective"))
    assert p[1].step_s < predict(stored).step_s < again.step_s
    assert again.memory_gib < predict(stored).memory_gib
    assert predict(replace(stored, dropout=0.1)).step_s > predict(stored).step_s


def test_experts_and_context_are_planned() -> None:
    dense = row(mlp="swiglu", ffn=14336, kv_heads=8, zero=1)
    mixed = predict(replace(dense, experts=8, ep=8))
    assert mixed.step_s > predict(dense).step_s
    assert predict(replace(dense, cp=2, dp=32)).step_s > 0


def test_layers_that_do_not_divide_leave_the_ends_lighter() -> None:
    r = replace(row(), layers=30, pp=4, dp=16, tp=1)
    even = predict(replace(r, layers=32))
    assert predict(r).step_s < even.step_s


def test_a_chip_has_the_rate_that_steps_sustain(monkeypatch: pytest.MonkeyPatch) -> None:
    fast = machine_for(row())
    monkeypatch.setitem(predicting.SUSTAINED, "a100", 0.5)
    slow = machine_for(row())
    assert fast.chip is not None and slow.chip is not None
    assert slow.chip.products[0].most == pytest.approx(0.5 * CHIPS["a100"].products[0].most)
    assert predict(row(), slow).step_s > predict(row(), fast).step_s


def softmax() -> Graph:
    b = Builder("softmax")
    x = b.input(parse_type("f32[512, 4096]"))
    e = b("exp", b("sub", x, b("reshape", b("max", x, dims=(1,)), shape=(512, 1))))
    total = b("reshape", b("sum", e, dims=(1,)), shape=(512, 1))
    return b.graph([b("div", e, total)])


def test_fused_kernels_read_and_write_each_value_once() -> None:
    chip = Chip("toy", (Products("f32", 1e12),), 1e12, 1e9)
    one, apart = fused_time(softmax(), chip), step_time(softmax(), chip)
    assert one.moved_bytes == 2 * 4 * 512 * 4096
    assert one.kernels == 1
    assert apart.moved_bytes > one.moved_bytes
    assert one.time_s == pytest.approx(one.moved_bytes / 1e9)


def test_products_are_not_fused() -> None:
    b = Builder("mlp")
    x, w = (b.input(parse_type("bf16[1024, 1024]")) for _ in range(2))
    h = b("tanh", b("contract", x, w, index="a b, b c -> a c"))
    graph = b.graph([b("tanh", b("contract", h, w, index="a b, b c -> a c"))])
    found = fused_time(graph, CHIPS["a100"])
    assert found.kernels == len(kernels(graph, CHIPS["a100"])) == 4
    assert found.flops == step_time(graph, CHIPS["a100"]).flops
    assert found.time_s == pytest.approx(step_time(graph, CHIPS["a100"]).time_s)


def test_attention_takes_the_part_of_the_peak_of_its_chip() -> None:
    b = Builder("attention")
    q = b.input(parse_type("bf16[8, 16, 1, 2048, 128]"))
    k, v = (b.input(parse_type("bf16[8, 16, 2048, 128]")) for _ in range(2))
    graph = b.graph([b("attention", q, k, v, causal=True, scale=0.1)])
    chip = replace(CHIPS["h100"], kernel_s=0.0)
    (one,) = kernels(graph, chip)
    assert one.time_s == pytest.approx(one.flops / (989e12 * 0.35))
    machine = replace(preset("dgx_h100"), chip=replace(chip, name="own", attention=0.5))
    assert read(write(machine)).chip == machine.chip


def test_the_command_writes_the_table(tmp_path: Path) -> None:
    rows, out = tmp_path / "rows.csv", tmp_path / "out.csv"
    rows.write_text(f"# a comment\n{HEAD},note\n{CELLS},mine\n")
    done = CliRunner().invoke(app, ["plan", "--table", str(rows), "--out", str(out)])
    assert (done.exit_code, done.output) == (0, f"{out}: 1 rows\n")
    (found,) = csv.DictReader(out.read_text().splitlines())
    assert found["note"] == "mine"
    assert 0.2 < float(found["mfu"]) < 0.8
    assert float(found["tflops_per_chip"]) == pytest.approx(312 * float(found["mfu"]), abs=0.5)
    shown = CliRunner().invoke(app, ["plan", "--table", str(rows)])
    assert shown.output == out.read_text()
    rows.write_text(f"{HEAD}\n{CELLS}1\n")
    done = CliRunner().invoke(app, ["plan", "--table", str(rows)])
    assert done.exit_code == 2
    assert "row 1, column chips" in done.output
    done = CliRunner().invoke(app, ["plan", "--table", str(tmp_path / "none.csv")])
    assert (done.exit_code, "No such file" in done.output) == (2, True)


def test_a_table_of_no_rows() -> None:
    assert predicted(HEAD).splitlines() == [f"{HEAD},step_s,tflops_per_chip,mfu,memory_gib"]
