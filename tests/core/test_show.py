"""Pictures, metrics and progress, on a terminal and in a log."""

from __future__ import annotations

import builtins
import io
import json
import math
import sys
import types
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

import tessera as ts
from tessera import dist
from tessera.core.errors import UsageError
from tessera.core.mesh import Mesh
from tessera.show import mesh_picture
from tessera.show.curves import Series, save_loss_curve
from tessera.show.layout_picture import slice_text, who_holds_what
from tessera.show.mesh_picture import mesh_text, plain_text
from tessera.train.metrics import MetricsWriter, column, read_metrics
from tessera.train.progress import TrainProgress, facts_text


# ---- meshes ------------------------------------------------------------------------------------
def test_one_axis_is_a_row() -> None:
    assert mesh_text(Mesh("dp", [3, 1])).splitlines() == [
        "dp mesh, 2 · 2 devices",
        "┌──────┬──────┐",
        "│ dp 0 │ dp 1 │",
        "├──────┼──────┤",
        "│  3   │  1   │",
        "└──────┴──────┘",
    ]


def test_more_axes_are_a_grid_for_each_place() -> None:
    text = mesh_text(Mesh.parse("pp=2 ep=1 dp=1 tp=2"), width=60)
    assert text.splitlines() == [
        "pp × ep × dp × tp mesh, 2 × 1 × 1 × 2 · 4 devices",
        "╭─ pp 0, ep 0 ───────────╮ ╭─ pp 1, ep 0 ───────────╮",
        "│ ┌──────┬──────┬──────┐ │ │ ┌──────┬──────┬──────┐ │",
        "│ │      │ tp 0 │ tp 1 │ │ │ │      │ tp 0 │ tp 1 │ │",
        "│ ├──────┼──────┼──────┤ │ │ ├──────┼──────┼──────┤ │",
        "│ │ dp 0 │  0   │  1   │ │ │ │ dp 0 │  2   │  3   │ │",
        "│ └──────┴──────┴──────┘ │ │ └──────┴──────┴──────┘ │",
        "╰────────────────────────╯ ╰────────────────────────╯",
    ]


@pytest.mark.parametrize("text", ["dp=1", "dp=100", "dp=40 tp=40", "pp=16 dp=32 tp=32", "a=2 b=9"])
@pytest.mark.parametrize("width", [30, 80, 200])
def test_no_picture_is_wider_than_the_console_and_each_counts_what_it_hides(
    text: str, width: int
) -> None:
    mesh = Mesh.parse(text)
    lines = mesh_text(mesh, width).splitlines()
    assert max(map(len, lines)) <= width
    assert len(lines) < 150
    rows, columns = (1, *mesh.shape)[-2:]
    picture = "\n".join(lines)
    header = next(line for line in lines if f"│ {mesh.axes[-1]} 0 " in line)
    assert f"{mesh.axes[-1]} 1 " in header or columns == 1 or width == 30
    row = next(line for line in lines if line.count("│  0  "))
    panels = max(1, row.count("││") + row.count("│ │"))
    shown = header.count(f" {mesh.axes[-1]} ")
    if panels == 1 and shown < columns:
        assert f"+{columns - shown} " in row
    most = mesh_picture.MAX_ROWS if len(mesh.axes) <= 2 else mesh_picture.MAX_PANEL_ROWS
    if rows > most:
        assert f"… and {rows - most} more rows" in picture
    if text.startswith("pp=16"):
        assert "… and 8 more like these" in picture


def test_show_prints_the_picture(capsys: pytest.CaptureFixture[str]) -> None:
    mesh_picture.show(Mesh("dp", 1))
    assert "dp mesh, 1 · 1 device\n" in capsys.readouterr().out


def test_a_text_picture_displays_nothing_in_a_notebook(monkeypatch: pytest.MonkeyPatch) -> None:
    shell = type("ZMQInteractiveShell", (), {})()  # rich detects a notebook by this class
    shown: list[object] = []
    display = types.ModuleType("IPython.display")
    monkeypatch.setattr(display, "display", shown.append, raising=False)
    monkeypatch.setitem(sys.modules, "IPython", types.ModuleType("IPython"))
    monkeypatch.setitem(sys.modules, "IPython.display", display)
    monkeypatch.setattr(builtins, "get_ipython", lambda: shell, raising=False)
    assert Console().is_jupyter
    inspected = dist.inspect(ts.tensor([1.0, 2.0], mesh=Mesh("dp", 2), layout="[2@dp]"))
    for text in (mesh_text(Mesh("dp", 2)), str(inspected), repr(inspected)):
        assert "dp mesh, 2" in text
    assert shown == []


# ---- layouts -----------------------------------------------------------------------------------
def test_equal_slices_share_a_colour() -> None:
    mesh = Mesh.parse("dp=2 tp=2")
    halves = {d: (((d % 2) * 4, (d % 2) * 4 + 4),) for d in range(4)}
    file = io.StringIO()
    console = Console(file=file, width=80, force_terminal=True, color_system="standard")
    console.print(who_holds_what((8,), halves, mesh))
    text = file.getvalue()
    assert text.count("\x1b[32m") == 2  # green: devices 0 and 2
    assert text.count("\x1b[33m") == 2  # yellow: devices 1 and 3


@pytest.mark.parametrize(
    ("shape", "parts", "head"),
    [
        (
            (8,),
            {0: ((0, 4),), 1: ((4, 8),)},
            "8 on dp mesh, 2 · 2 different slices, each on 1 device",
        ),
        ((8,), {0: ((0, 8),), 1: ((0, 8),)}, "8 on dp mesh, 2 · the same on 2 devices"),
        ((8,), {1: ((0, 8),)}, "8 on dp mesh, 2 · one copy"),
        ((), {0: (), 1: ()}, "a scalar on dp mesh, 2 · the same on 2 devices"),
        ((8,), {}, "8 on dp mesh, 2 · no device holds any of it"),
    ],
)
def test_the_head_says_how_the_tensor_lies(
    shape: tuple[int, ...], parts: dict[int, tuple[tuple[int, int], ...]], head: str
) -> None:
    text = plain_text(who_holds_what(shape, parts, Mesh("dp", 2)))
    assert text.splitlines()[0] == head
    if 0 not in parts:
        assert "0: –" in text


def test_unequal_replication_is_a_range() -> None:
    parts = {0: ((0, 4),), 1: ((0, 4),), 2: ((4, 8),)}
    text = plain_text(who_holds_what((8,), parts, Mesh("dp", 3)))
    assert "2 different slices, each on 1 to 2 devices" in text


def test_slices_read_like_numpy() -> None:
    data = np.arange(8 * 6 * 4).reshape(8, 6, 4)
    part = ((2, 8), (0, 3), (0, 4))
    text = slice_text(data.shape, part)
    assert text == "[2:, :3, :]"
    assert (eval(f"data{text}") == data[tuple(slice(*p) for p in part)]).all()


# ---- curves ------------------------------------------------------------------------------------
def test_a_curve_is_a_png_that_shows_its_lines(tmp_path: Path) -> None:
    from matplotlib.image import imread

    path = save_loss_curve(
        tmp_path / "new" / "loss.png",
        [Series("train", [0, 1, 2], [7.0, 5.0, 4.0]), Series("val", [2], [4.2], marked=True)],
        baselines={"bigram": 4.5, "untrained": 6.9},
        title="a run",
    )
    image = np.asarray(imread(path))
    assert image.shape[:2] == (576, 960)
    # More than one colour beside greys shows that the curves are drawn.
    spread = image[..., :3].max(-1) - image[..., :3].min(-1)
    assert (spread > 0.3).sum() > 500
    without = save_loss_curve(tmp_path / "plain.png", [Series("train", [0, 1], [7.0, 5.0])])
    assert without.read_bytes() != path.read_bytes()


def test_curves_need_points_and_matplotlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="no series has a point"):
        save_loss_curve(tmp_path / "x.png", [Series("train", [], [])])
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(UsageError, match="the `matplotlib` library is not installed"):
        save_loss_curve(tmp_path / "x.png", [Series("train", [0], [1.0])])


# ---- metrics -----------------------------------------------------------------------------------
def test_rows_are_on_disk_at_once_and_come_back(tmp_path: Path) -> None:
    path = tmp_path / "run" / "metrics.jsonl"
    with MetricsWriter(path) as metrics:
        metrics.write(0, loss=np.float32(2.5), tokens=np.int64(4), ok=True, note=None)
        assert json.loads(path.read_text()) == {
            "step": 0, "loss": 2.5, "tokens": 4, "ok": True, "note": None,
        }  # fmt: skip
    with MetricsWriter(path, append=True) as metrics:
        metrics.write(1, loss=math.nan, low=-math.inf)
    rows = read_metrics(path)
    assert [row["step"] for row in rows] == [0, 1]
    assert math.isnan(float(rows[1]["loss"] or 0))
    assert rows[1]["low"] == -math.inf
    assert column(rows, "low") == ([1], [-math.inf])
    with MetricsWriter(path):
        assert read_metrics(path) == []


def test_a_torn_last_line_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 0, "loss": 1.0}\n{"step": 1, "lo')
    assert read_metrics(path) == [{"step": 0, "loss": 1.0}]


# ---- progress ----------------------------------------------------------------------------------
def test_a_log_gets_a_line_every_few_steps_and_the_last() -> None:
    file = io.StringIO()
    with TrainProgress(7, every=3, console=Console(file=file, width=100)) as progress:
        for step in range(7):
            progress.update(step, loss=7.0 - step, tokens_per_s=900.0)
        progress.note("validation [loss] 1.25")
    assert file.getvalue().splitlines() == [
        "step    3/7  loss 5.0000     900 tokens/s",
        "step    6/7  loss 2.0000     900 tokens/s",
        "step    7/7  loss 1.0000     900 tokens/s",
        "validation [loss] 1.25",
    ]


def test_a_terminal_gets_a_bar() -> None:
    file = io.StringIO()
    console = Console(file=file, width=120, force_terminal=True, color_system=None)
    with TrainProgress(4, label="gpt", console=console) as progress:
        for step in range(4):
            progress.update(step, loss=3.5, tokens_per_s=2_500_000.0, mfu=0.425)
        progress.note("saved")
    text = file.getvalue()
    assert "gpt" in text
    assert "4/4" in text
    assert "loss 3.5000   2.50M tokens/s  MFU 42.5 %" in text
    assert "saved" in text
    assert "step " not in text


def test_default_console_is_stdout(capsys: pytest.CaptureFixture[str]) -> None:
    with TrainProgress(1) as progress:
        progress.update(0, loss=1.0)
    assert capsys.readouterr().out == "step    1/1  loss 1.0000\n"
    assert facts_text(1.0, 1234.0, None) == "loss 1.0000    1.2k tokens/s"
