"""The devices of each rank in the mesh of its id, by a rank binding file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

import tessera as ts
from tessera.core import devices
from tessera.core.machine.share import Share, mesh_ranks, share
from tessera.core.machine.visible import visible_count, visible_share
from tests.core.machine_files import ALL, GRAPH_TOP, MESH, TOP, graph, instances

Run = Callable[..., dict[str, str]]
DUAL = MESH.replace("[1, 1]", "[1, 2]") + TOP
TWO_DUAL = MESH.replace("[1, 1]", "[1, 2]") + graph(instances(0, 1) + ALL) + GRAPH_TOP
ROW = MESH.replace("[2, 4]", "[1, 2]")
SPLIT = ROW + MESH.replace("M0", "M1").replace("[2, 4]", "[1, 6]")
SPLIT += graph(instances(0) + instances(1, mesh="M1") + ALL) + GRAPH_TOP


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """The environment variables of one rank of several, under a mesh descriptor."""

    def seen(text: str, rank: int, size: int, mesh: int, **more: str) -> dict[str, str]:
        (tmp_path / "mesh.textproto").write_text(text)
        monkeypatch.setattr(devices, "_providers", [(lambda: 8, lambda: (rank, size), lambda: "")])
        path = str(tmp_path / "mesh.textproto")
        return {"TT_MESH_GRAPH_DESC_PATH": path, "TT_MESH_ID": str(mesh), **more}

    return seen


def of(variables: dict[str, str]) -> Share:
    found = visible_share(variables)
    assert found is not None and visible_count(8, variables) == found.local_count
    return found


def test_hosts_of_one_mesh_have_their_boxes(run: Run) -> None:
    for rank, ids in enumerate(("0,1", "2,3")):
        for says in ({"TESSERA_MESHES": "0.0,0.1"}, {"TT_MESH_HOST_RANK": str(rank)}):
            found = of(run(DUAL, rank, 2, 0, TT_VISIBLE_DEVICES=ids, **says))
            assert (found.local_count, found.ids) == (4, (0, 1, 4, 5, 2, 3, 6, 7))
            assert found.machine.shape == (2, 4)
            assert of(run(DUAL, rank, 2, 0, **says)) == found, "all are visible"


def test_ranks_of_two_meshes_take_turns(run: Run) -> None:
    meshes = "1.1,0.1,0.0,1.0"
    wanted = {0: (8, 9, 4, 5, 10, 11, 6, 7), 1: (12, 13, 0, 1, 14, 15, 2, 3)}
    for rank, mesh in enumerate((1, 0, 0, 1)):
        variables = run(TWO_DUAL, rank, 4, mesh, TESSERA_MESHES=meshes)
        assert of(variables).ids == wanted[mesh]
        assert mesh_ranks(variables) == ((2, 1), (3, 0))[mesh]


def test_meshes_may_differ_in_size(run: Run) -> None:
    first = of(run(SPLIT, 0, 2, 0, TESSERA_MESHES="0.0,1.0", TT_VISIBLE_DEVICES="0"))
    other = of(run(SPLIT, 1, 2, 1, TESSERA_MESHES="0.0,1.0", TT_VISIBLE_DEVICES="1,2,3"))
    assert (first.local_count, first.ids) == (2, (0, 1))
    assert (other.local_count, other.ids, other.machine.shape) == (6, (2, 3, 4, 5, 6, 7), (1, 6))


def test_more_ranks_than_hosts_share_in_their_order(run: Run) -> None:
    found = of(run(MESH + TOP, 1, 2, 0, TESSERA_MESHES="0.0,0.1", TT_VISIBLE_DEVICES="2,3"))
    assert (found.local_count, found.ids) == (4, tuple(range(8)))


def test_a_process_that_is_alone_may_see_a_part(run: Run) -> None:
    assert of(run(MESH + TOP, 0, 1, 0, TT_VISIBLE_DEVICES="2,3")).machine.shape == (2, 2)
    whole = of(run(SPLIT, 0, 1, 1, TESSERA_MESHES="0.0,1.0", TT_VISIBLE_DEVICES="3,2,1"))
    assert (whole.local_count, whole.ids) == (6, tuple(range(6)))


def test_without_a_mesh_there_is_no_share(run: Run) -> None:
    variables = run(MESH + TOP, 0, 1, 0)
    assert share(variables | {"TT_MESH_ID": ""}) is None
    assert share(variables | {"TT_MESH_GRAPH_DESC_PATH": "t3000"}) is None
    assert mesh_ranks(variables) is None


@pytest.mark.parametrize(
    ("more", "kind", "says"),
    [
        ({"TT_MESH_ID": "7"}, ts.MeshError, "there is no mesh 7"),
        ({"TT_MESH_ID": "-1"}, ts.BackendError, "TT_MESH_ID: '-1' is no number from 0"),
        ({"TT_MESH_HOST_RANK": "2"}, ts.MeshError, "M0: there is no host 2"),
        ({"TESSERA_MESHES": "0.0,1"}, ts.BackendError, "'0.0,1' is no list of meshes"),
        ({"TESSERA_MESHES": "0.0,0.1,0.2"}, ts.MeshError, "8 devices cannot be shared by 3 ranks"),
        (
            {"TT_VISIBLE_DEVICES": "0"},
            ts.BackendError,
            "the ids do not show the 4 devices that this rank has of M0",
        ),
    ],
)
def test_what_does_not_fit_is_said(
    run: Run, more: dict[str, str], kind: type[Exception], says: str
) -> None:
    size = 3 if "0.2" in more.get("TESSERA_MESHES", "") else 2
    with pytest.raises(kind, match=says) as caught:
        visible_count(8, run(DUAL, 0, size, 0) | more)
    assert "  fix" in str(caught.value)
