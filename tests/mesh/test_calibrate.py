"""`tessera calibrate`: a measured machine, its file, and a plan on it."""

from __future__ import annotations

from pathlib import Path

from typer.testing import CliRunner

import tessera as ts
from tessera import dist
from tessera.launch.cli import app
from tessera.plan.machines import machine_from_file
from tessera.plan.simulate import simulate


def test_a_measured_machine_prices_a_step(tmp_path: Path) -> None:
    to = tmp_path / "machine.yaml"
    done = CliRunner().invoke(app, ["calibrate", "--quick", "--out", str(to)])
    assert done.exit_code == 0, done.output
    assert "f32" in done.output and "bf16" in done.output and "links" in done.output
    machine = machine_from_file(to)
    chip = machine.chip
    assert chip is not None and chip.shared and machine.size == 8
    assert 1e8 < chip.rate("f32").peak_flops_per_s < 1e13
    assert chip.memory_bytes_per_s > 1e8
    link = machine.topology.levels[0].link
    assert 0 < link.latency_s < 0.1 and link.bytes_per_s > 1e6

    mesh = dist.Mesh(("dp",), devices=8)

    @ts.jit
    def step(x: ts.Tensor, w: ts.Tensor) -> ts.Tensor:
        return (x @ w).sum()

    x = ts.tensor(ts.ones((64, 256)), mesh=mesh, layout="[64@dp, 256]")
    line = simulate(step.plan(x, ts.ones((256, 256))), machine)
    assert 0 < line.compute_s < line.step_s < 10
    assert [t.what for t in line.traffic] == ["all_reduce"]
    # Eight devices share the processor: one alone would be eight times as fast, or more.
    alone = simulate(step.plan(ts.ones((64, 256)), ts.ones((256, 256))), machine)
    assert alone.compute_s < line.compute_s


def test_the_file_must_be_yaml() -> None:
    done = CliRunner().invoke(app, ["calibrate", "--out", "machine.txt"])
    assert done.exit_code == 2
    assert "machine.txt is no YAML by its name" in done.output
