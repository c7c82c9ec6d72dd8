"""Visible devices of a process: those in its environment variables, no others."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import tessera as ts
from tessera.core import devices
from tessera.core.machine import visible
from tessera.core.machine.load import save
from tessera.core.machine.presets import preset
from tessera.core.machine.visible import visible_count, visible_ids
from tests.messages import Golden

TT, OWN = "TT_VISIBLE_DEVICES", "TESSERA_VISIBLE_DEVICES"


@pytest.fixture(autouse=True)
def forgets() -> Iterator[None]:
    """Clears the machines in use before and after each test."""
    visible._used.clear()
    yield
    visible._used.clear()


@pytest.mark.parametrize("name", [TT, OWN])
@pytest.mark.parametrize(
    ("text", "ids"), [("0", (0,)), (" 3, 1 ", (1, 3)), ("", None), ("  ", None)]
)
def test_ids_are_read(name: str, text: str, ids: tuple[int, ...] | None) -> None:
    assert visible_ids({name: text}) == ids
    assert visible_count(8, {name: text}) == (None if ids is None else len(ids))


def test_both_names_may_say_the_same() -> None:
    assert visible_ids({TT: "0,1", OWN: "1,0"}) == (0, 1)


BAD = [
    "a",
    "0,,1",
    "-1",
    "0,1,0",
    "8",
]


@pytest.mark.parametrize("name", [TT, OWN])
@pytest.mark.parametrize("text", BAD)
def test_what_names_no_device_is_refused(name: str, text: str, golden: Golden) -> None:
    with pytest.raises(ts.BackendError) as caught:
        visible_count(8, {name: text})
    golden(caught.value)


def test_gpus_are_as_many_as_there_are(golden: Golden) -> None:
    assert visible_count(16, {OWN: "15"}, virtual=False) == 1
    with pytest.raises(ts.BackendError) as caught:
        visible_count(4, {OWN: "4"}, virtual=False)
    golden(caught.value)


def test_two_names_that_differ_are_refused(golden: Golden) -> None:
    with pytest.raises(ts.BackendError) as caught:
        visible_ids({TT: "0", OWN: "1"})
    golden(caught.value)


@given(st.text(max_size=12))
def test_any_text_is_answered(text: str) -> None:
    try:
        count = visible_count(8, {OWN: text})
    except ts.BackendError as error:
        assert "  fix" in str(error)
    else:
        assert count is None or 0 < count <= 8


# ---- on a described machine --------------------------------------------------------------------
@pytest.mark.parametrize(
    ("machine", "text", "shape"),
    [
        ("n300", "0", (1, 2)),
        ("t3000", "0", (1, 2)),
        ("t3000", "0,1", (2, 2)),
        ("t3000", "2,3", (2, 2)),
        ("t3000", "0,3", (1, 4)),
        ("t3000", "1,2", (1, 4)),
        ("t3000", "0,1,2,3", (2, 4)),
        ("dgx_h100", "0,7", (1, 2)),
    ],
)
def test_a_card_shows_all_of_its_chips(
    machine: str, text: str, shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(TT, text)
    mesh = ts.mesh.preset(machine)
    assert mesh.shape == shape and mesh.links is not None and mesh.links.shape == shape
    assert visible_count(8) == mesh.size, "the backend starts with as many"


def test_a_part_of_a_ring_is_a_line() -> None:
    torus = preset("tpu_v4").of(4, 4, 4)
    assert torus.part(range(16)).topology.levels[0].wiring == "line"
    assert torus.part(range(16)).topology.levels[1].wiring == "ring"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("0,2", "t3000: the visible devices are no box of the 2 × 4 mesh"),
        ("4", "visible devices: there is no device 4"),
    ],
)
def test_what_is_no_mesh_is_refused(text: str, says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TT, text)
    with pytest.raises(ts.TesseraError) as caught:
        ts.mesh.preset("t3000")
    assert str(caught.value).startswith(says) and "  fix" in str(caught.value)


def test_a_launcher_names_the_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "t3000.textproto"
    save(preset("t3000"), path)
    environment = {TT: "2,3", "TT_MESH_GRAPH_DESC_PATH": str(path)}
    assert visible_count(8, environment) == 4
    with pytest.raises(ts.BackendError, match="there is no device 5"):
        visible_count(8, environment | {TT: "5"})
    with pytest.raises(ts.MeshError, match="No such file"):
        visible_count(8, environment | {"TT_MESH_GRAPH_DESC_PATH": "nothing.textproto"})
    monkeypatch.setenv("TT_MESH_GRAPH_DESC_PATH", str(path))
    assert ts.mesh.from_descriptor().text() == "y=2 x=4"
    monkeypatch.setenv(TT, "2,3")
    assert ts.mesh.from_descriptor().text() == "y=2 x=2"
    monkeypatch.delenv("TT_MESH_GRAPH_DESC_PATH")
    with pytest.raises(ts.MeshError, match="no file is named"):
        ts.mesh.from_descriptor()


def test_several_processes_are_one_mesh_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TT, "0,1")
    monkeypatch.setattr(devices, "_providers", [(lambda: 4, lambda: (0, 2))])
    assert ts.mesh.preset("t3000").text() == "y=2 x=4"


def test_a_rank_of_a_launcher_sees_the_whole_mesh(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "10.0.0.1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv(TT, "2,3")
    assert ts.mesh.preset("t3000").text() == "y=2 x=4"
