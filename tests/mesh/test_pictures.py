"""The pictures of a plan on the first page: what they draw is what the report says."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from tessera import dist

pytest.importorskip("matplotlib")
SCRIPT = Path(__file__).resolve().parents[2] / "docs" / "images" / "plan.py"
SMALL = {"vocab": 64, "seq": 32, "d": 32, "heads": 2, "layers": 2, "stacked": False}


@pytest.fixture(scope="module")
def pictures() -> Any:
    spec = importlib.util.spec_from_file_location("plan_pictures", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_timeline_has_each_event_in_its_lane(pictures: Any, tmp_path: Path) -> None:
    strategy = pictures.zero(3) + dist.strategy("tensor_parallel")
    mesh = {"dp": 2, "tp": 8}
    report = pictures.step_report(mesh, strategy, rows=4, cluster="h100x16", **SMALL)
    figure = pictures.draw_timeline(report)
    bars = [len(lane.get_paths()) for lane in figure.axes[0].collections]
    streams = [e.streams for e in report.timeline.events]
    assert bars == [sum(n in s for s in streams) for n in ("compute", "gpu", "node")]
    assert min(bars) > 0
    pictures.save(figure, tmp_path / "a.svg")
    first = (tmp_path / "a.svg").read_bytes()
    pictures.save(pictures.draw_timeline(report), tmp_path / "a.svg")
    assert first == (tmp_path / "a.svg").read_bytes() and b"InfiniBand (dp)" in first


def test_a_bar_of_memory_ends_at_the_planned_peak(pictures: Any) -> None:
    wide = SMALL | {"d": 512}
    report = pictures.step_report({"dp": 8}, pictures.zero(0), rows=8, cluster="h100x8", **wide)
    (axes,) = pictures.draw_memory({"data parallel": report}).axes
    ends = [bar.get_x() + bar.get_width() for bar in axes.patches]
    memory = report.memory[0]
    left_out = pictures.LEAST * memory.peak * len(memory.rows)
    assert len(ends) > 2 and ends == sorted(ends)
    assert memory.peak - left_out <= 1e9 * ends[-1] <= memory.peak * (1 + 1e-9)
