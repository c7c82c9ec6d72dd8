"""Folded meshes: a logical mesh on fewer devices."""

from __future__ import annotations

import pickle

import pytest

import tessera as ts
from tessera import dist
from tessera.core.layout import parse_type
from tessera.core.mesh import Mesh
from tessera.ir.graph.text import parse

MESH = Mesh.parse("dp=4 tp=2")


@pytest.mark.parametrize(
    ("onto", "sizes"),
    [
        ("dp=2,tp=1", (2, 1)), ("tp=1", (4, 1)), ({"dp": 1}, (1, 2)), (8, (4, 2)), (4, (2, 2)),
        (2, (1, 2)), (1, (1, 1)), (Mesh.parse("dp=2 tp=2"), (2, 2)),
    ],
)  # fmt: skip
def test_what_it_is_folded_onto(onto: object, sizes: tuple[int, ...]) -> None:
    mesh = MESH.fold(onto)
    assert mesh.physical.shape == sizes and mesh.size == 8 and mesh.axes == MESH.axes
    assert all(mesh.folds[a] * mesh.physical.sizes[a] == n for a, n in mesh.sizes.items())
    assert mesh != MESH and mesh == MESH.fold(onto) and hash(mesh) == hash(MESH.fold(onto))
    assert pickle.loads(pickle.dumps(mesh)) == mesh


@pytest.mark.parametrize("onto", ["dp=3", "pp=2", 3, 0, -1, None, 1.5, "x", {"dp": 0}, {"dp": "2"},
                                  Mesh.parse("tp=2 dp=4"), Mesh.parse("dp=8 tp=2")])  # fmt: skip
def test_folds_that_are_none(onto: object) -> None:
    with pytest.raises(ts.MeshError):
        MESH.fold(onto)


def test_parts_of_a_folded_mesh() -> None:
    mesh = MESH.fold("dp=2,tp=1")
    assert mesh.slice(dp=3).physical.device_ids == [1] and mesh.slice(dp=0).text() == "tp=2"
    assert mesh["tp"].folds == {"tp": 2} and mesh["dp"].physical.shape == (2,)
    with pytest.raises(ts.MeshError, match="slice first, and fold the part"):
        mesh.slice(dp=slice(0, 2))


def test_types_and_texts_are_those_of_the_logical_mesh() -> None:
    mesh = MESH.fold("dp=2,tp=1")
    t = parse_type("f32[8@(dp,tp), 6] ", mesh)
    assert t.local_shape == (1, 6) and t is not parse_type("f32[8@(dp,tp), 6]", MESH)
    g = ts.graph.trace(lambda x: dist.redistribute(x, "[8, 6@tp]"), t)
    assert "onto=(2, 1) at=(0, 1)" in g.text and parse(g.text).text == g.text
    assert parse(g.text).mesh == mesh and repr(mesh) == (
        "Mesh(('dp', 'tp'), shape=(4, 2)).fold('dp=2 tp=1')"
    )
