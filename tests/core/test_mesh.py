"""Meshes: axes, sizes and device ids, and refused arguments."""

from __future__ import annotations

import itertools
import math
import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tessera.core import devices
from tessera.core.errors import MeshError, UsageError
from tessera.core.mesh import Mesh, auto, current
from tessera.core.mesh_input import balanced, ids_of, ids_text


@st.composite
def meshes(draw: st.DrawFn, min_axes: int = 1) -> Mesh:
    sizes = draw(st.lists(st.integers(1, 4), min_size=min_axes, max_size=4))
    axes = ["dp", "tp", "pp", "ep"][: len(sizes)]
    count = math.prod(sizes)
    start = draw(st.integers(0, 100))
    ids = draw(st.permutations(range(start, start + count)))
    return Mesh(draw(st.permutations(axes)), devices=ids, shape=tuple(sizes))


# ---- construction ------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("count", "axes", "shape"),
    [
        (16, 2, (4, 4)),
        (48, 3, (4, 4, 3)),
        (72, 3, (6, 4, 3)),
        (64, 2, (8, 8)),
        (8, 1, (8,)),
        (8, 2, (4, 2)),
        (7, 2, (7, 1)),
        (12, 4, (3, 2, 2, 1)),
        (1, 3, (1, 1, 1)),
    ],
)
def test_default_shape_is_as_equal_as_possible(
    count: int, axes: int, shape: tuple[int, ...]
) -> None:
    mesh = Mesh(["a", "b", "c", "d"][:axes], devices=range(count))
    assert mesh.shape == shape
    assert mesh.device_ids == list(range(count))


@given(st.integers(1, 200), st.integers(1, 4))
def test_balanced_is_the_least_sum_of_all_factorisations(count: int, parts: int) -> None:
    divisors = [d for d in range(1, count + 1) if count % d == 0]
    every = (
        f for f in itertools.combinations_with_replacement(divisors, parts) if math.prod(f) == count
    )
    shape = balanced(count, parts)
    assert math.prod(shape) == count
    assert list(shape) == sorted(shape, reverse=True)
    assert sum(shape) == min(map(sum, every))


@pytest.mark.parametrize(
    "same",
    [
        Mesh(("tp", "dp"), [[0, 1, 2, 3], [4, 5, 6, 7]]),
        Mesh(["tp", "dp"], np.arange(8).reshape(2, 4)),
        Mesh(["tp", "dp"], range(8), shape={"dp": 4, "tp": 2}),
        Mesh(["tp", "dp"], 8, shape=(2, 4)),
        Mesh(["tp", "dp"], np.int64(8), shape=[2, np.int32(4)]),
        Mesh(["tp", "dp"], shape=(2, 4)),
        Mesh(["tp", "dp"], [range(4), range(4, 8)], shape=(2, 4)),
        Mesh.parse("tp=2,dp=4"),
        Mesh.parse(" tp=2  dp=4 "),
    ],
)
def test_every_spelling_gives_the_same_mesh(same: Mesh) -> None:
    mesh = Mesh(["tp", "dp"], devices=[[0, 1, 2, 3], [4, 5, 6, 7]])
    assert same == mesh
    assert hash(same) == hash(mesh)
    assert same.shape == (2, 4)
    assert same.device_ids == [0, 1, 2, 3, 4, 5, 6, 7]
    assert all(type(device) is int for device in same.ids)
    assert all(type(size) is int for size in same.shape)


def test_one_axis_may_be_a_bare_name_and_one_size_a_bare_number() -> None:
    assert Mesh("dp", 4) == Mesh(["dp"], shape=4) == Mesh(["dp"], [0, 1, 2, 3])


def test_a_mesh_may_be_larger_than_any_machine() -> None:
    mesh = Mesh(["dp", "tp"], devices=range(100_000))
    assert mesh.size == 100_000
    assert mesh.coords(99_999) == {"dp": mesh.shape[0] - 1, "tp": mesh.shape[1] - 1}


# ---- facts -------------------------------------------------------------------------------------
def test_facts_of_one_mesh() -> None:
    mesh = Mesh(["pp", "dp", "tp"], devices=[[[8, 9]], [[5, 4]]])
    assert mesh.axes == ("pp", "dp", "tp")
    assert mesh.shape == (2, 1, 2)
    assert mesh.sizes == {"pp": 2, "dp": 1, "tp": 2}
    assert mesh.size == 4
    assert mesh.device_ids == [8, 9, 5, 4]
    assert mesh.topology == "pp × dp × tp mesh, 2 × 1 × 2"
    assert mesh.text() == "pp=2 dp=1 tp=2"
    assert mesh.axis_size("tp") == 2
    assert mesh.coords(5) == {"pp": 1, "dp": 0, "tp": 0}
    assert mesh.groups("tp") == [[8, 9], [5, 4]]
    assert mesh.groups("pp") == [[8, 5], [9, 4]]
    assert mesh.groups(("tp", "pp")) == [[8, 5, 9, 4]]
    assert "tp" in mesh
    assert "ep" not in mesh
    assert mesh.array().tolist() == [[[8, 9]], [[5, 4]]]


def test_device_ids_are_a_copy_and_sizes_cannot_change() -> None:
    mesh = Mesh.parse("dp=2")
    mesh.device_ids.append(9)
    assert mesh.device_ids == [0, 1]
    with pytest.raises(TypeError):
        mesh.sizes["dp"] = 3  # type: ignore[index]  # that it cannot be written is the test
    with pytest.raises(UsageError, match=r"^Mesh: axes cannot be set"):
        mesh.axes = ("tp",)  # type: ignore[misc]  # frozen


@pytest.mark.parametrize(
    ("mesh", "text"),
    [
        (Mesh.parse("dp=2 tp=4"), "Mesh(('dp', 'tp'), shape=(2, 4))"),
        (Mesh.parse("pp=2 tp=2").slice(pp=1), "Mesh(('tp',), devices=range(2, 4), shape=(2,))"),
        (Mesh.parse("pp=2 tp=2")["pp"], "Mesh(('pp',), devices=[0, 2], shape=(2,))"),
    ],
)
def test_repr_is_the_call_that_builds_it(mesh: Mesh, text: str) -> None:
    assert repr(mesh) == text
    assert eval(text) == mesh


def test_equality_is_by_axes_shape_and_ids() -> None:
    mesh = Mesh(["dp", "tp"], range(4))
    assert mesh != Mesh(["tp", "dp"], range(4))
    assert mesh != Mesh(["dp", "tp"], range(4), shape=(4, 1))
    assert mesh != Mesh(["dp", "tp"], range(1, 5))
    assert mesh.__eq__(mesh) is True
    assert mesh != "dp=2 tp=2"
    assert len({mesh, Mesh(["dp", "tp"], 4), mesh.slice()}) == 1


@given(meshes())
def test_coordinates_and_ids_are_inverse(mesh: Mesh) -> None:
    for device in mesh.device_ids:
        coords = mesh.coords(device)
        assert list(coords) == list(mesh.axes)
        assert mesh.device_at(coords) == device
        assert mesh.array()[tuple(coords.values())] == device
    assert mesh.device_at(dict.fromkeys(mesh.axes, -1)) == mesh.device_ids[-1]


@given(meshes(), st.data())
def test_groups_partition_the_mesh_along_their_axes(mesh: Mesh, data: st.DataObject) -> None:
    axes = tuple(data.draw(st.lists(st.sampled_from(mesh.axes), min_size=1, unique=True)))
    groups = mesh.groups(axes)
    assert sorted(itertools.chain(*groups)) == sorted(mesh.device_ids)
    for group in groups:
        assert len(group) == math.prod(mesh.sizes[a] for a in axes)
        places = [mesh.coords(device) for device in group]
        assert len({tuple(p[a] for a in mesh.axes if a not in axes) for p in places}) == 1
        assert [tuple(p[a] for a in axes) for p in places] == sorted(
            tuple(p[a] for a in axes) for p in places
        )


@given(meshes())
def test_a_mesh_survives_pickle_and_its_text(mesh: Mesh) -> None:
    again = pickle.loads(pickle.dumps(mesh))
    assert again == mesh
    assert hash(again) == hash(mesh)
    assert Mesh.parse(mesh.text()) == Mesh(mesh.axes, shape=mesh.shape)
    assert eval(repr(mesh)) == mesh


# ---- parts -------------------------------------------------------------------------------------
@given(meshes(), st.data())
def test_sub_mesh_holds_the_devices_at_zero_of_the_others(mesh: Mesh, data: st.DataObject) -> None:
    axes = tuple(data.draw(st.lists(st.sampled_from(mesh.axes), min_size=1, unique=True)))
    part = mesh[axes]
    assert part.axes == axes
    for device in part.device_ids:
        coords = mesh.coords(device)
        assert {a: coords[a] for a in axes} == part.coords(device)
        assert all(coords[a] == 0 for a in mesh.axes if a not in axes)


@given(meshes(min_axes=2), st.data())
def test_slices_at_a_number_tile_the_mesh(mesh: Mesh, data: st.DataObject) -> None:
    axis = data.draw(st.sampled_from(mesh.axes))
    parts = [mesh.slice(**{axis: i}) for i in range(mesh.sizes[axis])]
    assert all(part.axes == tuple(a for a in mesh.axes if a != axis) for part in parts)
    assert sorted(d for part in parts for d in part.device_ids) == sorted(mesh.device_ids)
    assert all(mesh.coords(d)[axis] == i for i, part in enumerate(parts) for d in part.device_ids)


@given(meshes(), st.data())
def test_slices_over_a_range_keep_the_axis(mesh: Mesh, data: st.DataObject) -> None:
    axis = data.draw(st.sampled_from(mesh.axes))
    start = data.draw(st.integers(0, mesh.sizes[axis] - 1))
    stop = data.draw(st.integers(start + 1, mesh.sizes[axis]))
    part = mesh.slice(**{axis: slice(start, stop)})
    assert part == mesh.slice(**{axis: range(start, stop)})
    assert part.axes == mesh.axes
    assert part.sizes[axis] == stop - start
    assert {mesh.coords(d)[axis] for d in part.device_ids} == set(range(start, stop))


def test_slice_forms() -> None:
    mesh = Mesh.parse("pp=4 dp=2 tp=2")
    assert mesh.slice(pp=-1).device_ids == [12, 13, 14, 15]
    assert mesh.slice(pp=slice(None, None, 2)).device_ids == [0, 1, 2, 3, 8, 9, 10, 11]
    assert mesh.slice(pp=range(3, 1, -1), tp=0).device_ids == [12, 14, 8, 10]
    assert mesh.slice() == mesh
    assert mesh["tp", "pp"].device_ids == [0, 4, 8, 12, 1, 5, 9, 13]


# ---- ambient -----------------------------------------------------------------------------------
def test_the_open_mesh_is_the_innermost_and_may_be_entered_again() -> None:
    outer, inner = Mesh.parse("dp=2"), Mesh.parse("tp=2")
    with outer as opened:
        assert opened is current() is outer
        with inner, outer:
            assert current() is outer
            with pytest.raises(KeyError), inner:
                raise KeyError
            assert current() is outer
        assert current() is outer
    with pytest.raises(MeshError):
        current()


def test_auto_takes_every_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "_providers", [(lambda: 8, lambda: 1)])
    assert auto() == Mesh(["dp"], 8)
    assert auto(("dp", "tp")).shape == (4, 2)
    assert auto(("dp", "tp"), shape={"dp": 1, "tp": 8}).shape == (1, 8)


@given(
    st.lists(st.integers(0, 40), min_size=1)
    | st.lists(
        st.builds(
            lambda a, n, by: list(range(a, a + n * by, by)),
            st.integers(0, 99),
            st.integers(1, 9),
            st.integers(1, 5),
        ),
        min_size=1,
    ).map(lambda runs: [*itertools.chain(*runs)])
)
def test_ids_are_read_back_from_their_text(ids: list[int]) -> None:
    assert ids_of(ids_text(ids)) == tuple(ids)


def test_many_ids_are_a_short_text() -> None:
    mesh = Mesh(("dp", "pp", "tp"), shape={"dp": 8, "pp": 8, "tp": 64})
    assert ids_text(mesh.slice(dp=1).ids) == "512..1023"
    assert ids_text(mesh.slice(tp=3).ids) == "3..4035:64"
    assert ids_text(mesh.slice(pp=1).ids).split(",")[:2] == ["64..127", "576..639"]
    for bad in ("", "a", "1..", "1..2:0"):
        with pytest.raises(ValueError):
            ids_of(bad)
