"""TT-NN meshes, submeshes and reshaping."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tessera import MeshError, UsageError, ttnn
from tessera.core.machine.mesh_graph_text import write
from tessera.core.machine.presets import preset as described
from tessera.ttnn import lifecycle
from tests.cases import LONG
from tests.core.machine_files import GRAPH_TOP, MESH, graph, instances, joined
from tests.procs.launched import launch


def test_shapes_and_places_are_as_in_tt_nn() -> None:
    shape = ttnn.MeshShape(2, 4)
    rows, cols = shape
    assert (rows, cols, shape[1], shape.dims(), shape.mesh_size()) == (2, 4, 4, 2, 8)
    assert (repr(shape), tuple(shape), list(shape)) == ("MeshShape([2, 4])", (2, 4), [2, 4])
    assert shape == ttnn.MeshShape([2, 4]) == ttnn.MeshShape(y=2, x=4)
    assert len({ttnn.MeshCoordinate(0, 1), ttnn.MeshCoordinate([0, 1])}) == 1
    box = ttnn.MeshCoordinateRange(ttnn.MeshShape(2, 2))
    assert len(box) == 4 and (1, 1) in box and (2, 0) not in box
    both = ttnn.MeshCoordinateRangeSet([box, ttnn.MeshCoordinateRange((1, 1), (1, 2))])
    assert len(both.coords()) == 5


def test_meshes_lie_in_the_system(device: ttnn.MeshDevice) -> None:
    assert repr(device) == "MeshDevice(2x4 grid, 8 devices)"
    assert (ttnn.get_num_devices(), ttnn.get_device_ids()) == (8, [*range(8)])
    with ttnn.create_mesh_device(ttnn.MeshShape(1, 8)) as line:  # each beside the next
        assert line.get_device_ids() == [0, 1, 2, 3, 7, 6, 5, 4]
    with ttnn.create_mesh_device(ttnn.MeshShape(4, 2)) as turned:
        assert turned.get_device_ids() == [0, 4, 1, 5, 2, 6, 3, 7]
    with ttnn.create_mesh_device(ttnn.MeshShape(1, 2), offset=(1, 2)) as part:
        assert part.get_device_ids() == [6, 7]
    with ttnn.create_mesh_device(ttnn.MeshShape(1, 2), [5, 3, 1]) as named:
        assert named.get_device_ids() == [5, 3]
    with ttnn.manage_device(3) as one:
        assert (one.get_device_ids(), one.shape) == ([3], ttnn.MeshShape(1, 1))


def test_parts_and_other_shapes(device: ttnn.MeshDevice) -> None:
    halves = device.create_submeshes(ttnn.MeshShape(2, 2))
    assert [h.get_device_ids() for h in halves] == [[0, 1, 4, 5], [2, 3, 6, 7]]
    halves[0].reshape(ttnn.MeshShape(1, 4))
    assert (halves[0].shape, halves[0].get_device_ids()) == ((1, 4), [0, 1, 5, 4])
    halves[0].reshape(ttnn.MeshShape(2, 2))
    assert halves[0].get_device_ids() == [0, 1, 4, 5]
    one = device.create_submesh(ttnn.MeshShape(1, 1), offset=ttnn.MeshCoordinate(1, 1))
    assert one.get_device_ids() == [5] and one in device.get_submeshes()
    assert device.get_device_id(ttnn.MeshCoordinate(1, 2)) == 6
    view = device.get_view()
    assert (view.shape(), view.num_devices(), view.is_local((0, 0))) == ((2, 4), 8, True)


def test_each_mesh_has_a_number_of_its_own() -> None:
    first = ttnn.open_mesh_device(ttnn.MeshShape(2, 4))
    start = first.id()
    ttnn.close_mesh_device(first)
    again = ttnn.open_mesh_device(ttnn.MeshShape(2, 4))
    alone = ttnn.get_device_tensors(ttnn.zeros((1, 1), device=again))
    parts = again.create_submeshes(ttnn.MeshShape(2, 2))
    inner = parts[1].create_submesh(ttnn.MeshShape(1, 2))
    assert [d.id() for d in (again, *parts, inner)] == [start + k for k in range(1, 5)]
    assert len({t.device().id() for t in alone} | set(range(start, start + 5))) == 13
    again.reshape(ttnn.MeshShape(4, 2))
    assert again.id() == start + 1, "the same mesh in another shape"
    ttnn.close_mesh_device(again)


def test_weights_by_the_number_of_a_part_are_its_own(device: ttnn.MeshDevice) -> None:
    made: dict[int, ttnn.Tensor] = {}
    parts = device.create_submeshes(ttnn.MeshShape(2, 2))
    for k, part in enumerate(parts):
        made.setdefault(part.id(), ttnn.full((1, 1), 10.0 * k, device=part))
    for k, part in enumerate(parts):
        total = ttnn.add(ttnn.full((1, 1), 1.0, device=part), made[part.id()])
        assert ttnn.get_device_tensors(total)[0].to_list() == [[10.0 * k + 1]]


def test_tensors_of_an_earlier_shape() -> None:
    x = np.arange(8, dtype=np.float32).reshape(8, 1)
    host = ttnn.from_torch(x[:1])
    with ttnn.create_mesh_device(ttnn.MeshShape(2, 4)) as device:
        there = ttnn.from_torch(x, device=device, mesh_mapper=ttnn.ShardTensorToMesh(device, 0))
        device.reshape(ttnn.MeshShape(1, 8))
        later = ttnn.from_torch(x[:1], device=device)
        for use in (
            ttnn.get_device_tensors, repr, ttnn.from_device, ttnn.relu, ttnn.visualize_tensor,
            lambda t: ttnn.all_gather(t, dim=0),
            lambda t: ttnn.add(later, t),
            lambda t: ttnn.to_device(t, device),
            lambda t: ttnn.copy_host_to_device_tensor(host, t),
            # Without the check this joins the parts with coordinates in the new shape.
            lambda t: ttnn.to_torch(t, mesh_composer=ttnn.ConcatMeshToTensor(device, dim=0)),
        ):  # fmt: skip
            with pytest.raises(ttnn.TTNNError, match="laid on the mesh before the mesh was resh"):
                use(there)
        device.reshape(ttnn.MeshShape(2, 4))
        join = ttnn.ConcatMeshToTensor(device, dim=0)
        np.testing.assert_array_equal(ttnn.aggregate_tensor(there, join).numpy(), x)
    with ttnn.create_mesh_device(ttnn.MeshShape(2, 2)) as square:
        ids = square.get_device_ids()
        square.reshape(ttnn.MeshShape(2, 2))
        assert square.get_device_ids() == ids


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda d: ttnn.open_mesh_device(ttnn.MeshShape(3, 3)), "Requested mesh is too big"),
        (lambda d: ttnn.open_mesh_device((1, 2), physical_device_ids=[1, 1]), "are named make no"),
        (lambda d: d.create_submesh((2, 2), offset=(1, 0)), "is not on the mesh"),
        (lambda d: d.create_submeshes((2, 3)), "do not fill the mesh"),
        (lambda d: d.reshape((3, 3)), "has not as many devices"),
        (lambda d: d.get_device_id((2, 0)), "is no place on the mesh"),
        (lambda d: d.queue(1), "there is no command queue 1"),
    ],
)  # fmt: skip
def test_what_is_not_there_is_an_error(call: Any, says: str, device: ttnn.MeshDevice) -> None:
    with pytest.raises(RuntimeError, match=says):
        call(device)


def test_a_closed_mesh_runs_nothing() -> None:
    device = ttnn.open_mesh_device(ttnn.MeshShape(1, 2))
    x = ttnn.ones((2, 2), device=device)
    ttnn.close_mesh_device(device)
    with pytest.raises(ttnn.TTNNError, match="the mesh device is closed"):
        ttnn.relu(x)


def test_pictures(
    pair: ttnn.MeshDevice, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ttnn.visualize_mesh_device(pair)
    side = "─" * 30
    cells = [f"Dev. ID: {i}".center(30) for i in (0, 1)]
    text = capsys.readouterr().out
    assert "MeshDevice(rows=1, cols=2):" in text and f"┌{side}┬{side}┐\n│{'│'.join(cells)}│" in text
    data = np.ones((1, 1, 32, 64), np.float32)
    cut = ttnn.MeshMapperConfig([ttnn.PlacementReplicate(), ttnn.PlacementShard(3)])
    x = ttnn.from_torch(data, device=pair, mesh_mapper=ttnn.create_mesh_mapper(pair, cut))
    ttnn.visualize_tensor(x, svg=tmp_path / "x.svg")
    text = capsys.readouterr().out
    assert "[PlacementReplicate(), PlacementShard(3)]" in text
    assert "Tensor(storage: DEVICE)" in text and "[:, :, :, 32:64]" in text
    colours = {line.split('"')[1] for line in (tmp_path / "x.svg").read_text().split("<rect fill=")}
    assert len(colours) >= 3  # two parts, and the background
    blocked = tmp_path / "x.svg" / "y.svg"  # its folder is a file
    with pytest.raises(UsageError, match=r"visualize: .* cannot be written: "):
        ttnn.visualize_tensor(x, svg=blocked)
    with pytest.raises(UsageError, match=r"dump_tensor: .* cannot be written: "):
        ttnn.dump_tensor(blocked.with_suffix(".tensorbin"), x)
    with pytest.raises(UsageError, match=r"dump_tensor: .* cannot be written: "):
        ttnn.as_tensor(data, cache_file_name=blocked, device=pair)
    capsys.readouterr()
    ttnn.visualize_system_mesh()
    text = capsys.readouterr().out
    assert "SystemMesh Global Shape: (2, 4) | Local Shape: (2, 4)" in text


SYSTEM = """
from tessera import ttnn
print(ttnn.get_num_devices(), ttnn.get_num_pcie_devices())
device = ttnn.open_mesh_device({shape})
x = ttnn.ones((2, 2), device=device)
print(device.shape, len(ttnn.get_device_tensors(ttnn.all_reduce(x))))
"""


@pytest.mark.parametrize(
    ("preset", "visible", "shape", "says"),
    [
        ("t3000", "0,1", "", "4 2\nMeshShape([2, 2]) 4\n"),
        ("", "", "ttnn.MeshShape(8, 4)", "8 8\nMeshShape([8, 4]) 32\n"),  # a larger mesh
        *(
            pytest.param(*row, marks=LONG)
            for row in (
                ("n300", "", "", "2 1\nMeshShape([1, 2]) 2\n"),
                ("t3000", "2", "ttnn.MeshShape(1, 2)", "2 1\nMeshShape([1, 2]) 2\n"),
                ("", "0,1", "", "2 2\nMeshShape([1, 2]) 2\n"),
            )
        ),
    ],
)
def test_the_system_in_a_fresh_process(
    preset: str, visible: str, shape: str, says: str, tmp_path: Path
) -> None:
    env = {k: v for k, v in os.environ.items() if not k.startswith(("TESSERA_", "TT_"))}
    env |= {"PYTHONPATH": str(Path(__file__).parents[2] / "src")}
    if visible:
        env["TT_VISIBLE_DEVICES"] = visible
    if preset:
        (tmp_path / "system.textproto").write_text(write(described(preset)))
        env["TT_MESH_GRAPH_DESC_PATH"] = str(tmp_path / "system.textproto")
    done = subprocess.run(
        [sys.executable, "-c", SYSTEM.format(shape=shape)], env=env, capture_output=True,
        text=True, timeout=240, check=False,
    )  # fmt: skip
    assert done.stdout == says, done.stderr


def test_one_of_two_meshes_is_the_system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pair = MESH.replace("[2, 4]", "[2, 2]") + graph(instances(0, 1) + joined(0, 1)) + GRAPH_TOP
    (tmp_path / "pair.textproto").write_text(pair)
    monkeypatch.setenv("TT_MESH_GRAPH_DESC_PATH", str(tmp_path / "pair.textproto"))
    with pytest.raises(MeshError, match="it has 2 meshes, and nothing says which is meant"):
        ttnn.open_mesh_device()
    monkeypatch.setenv("TT_MESH_ID", "1")
    device = ttnn.open_mesh_device()
    assert (device.shape, device.get_system_mesh_id()) == (ttnn.MeshShape(2, 2), 1)
    assert device.get_fabric_node_id((1, 0)) == ttnn.FabricNodeId(1, 2)
    monkeypatch.setenv("TT_VISIBLE_DEVICES", "2,3")  # its cards on a host that also has others
    assert ttnn.get_device_ids() == [0, 1, 2, 3]
    ttnn.close_mesh_device(device)


def test_a_name_that_is_not_here() -> None:
    with pytest.raises(AttributeError, match="TT-NN has it, and it is not provided here"):
        ttnn.conv2d  # noqa: B018
    with pytest.raises(AttributeError, match=r"names most like it are all_gather"):
        ttnn.allgather  # noqa: B018


def test_one_process_is_all_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lifecycle, "_begun", [])
    assert not ttnn.distributed_context_is_initialized()
    with pytest.raises(ttnn.TTNNError, match="the processes have not been joined"):
        ttnn.distributed_context_get_rank()
    ttnn.init_distributed_context()
    assert (ttnn.distributed_context_get_rank(), ttnn.distributed_context_get_size()) == (0, 1)
    ttnn.distributed_context_barrier()


def test_two_processes_meet(tmp_path: Path) -> None:
    program = """
from tessera import ttnn
ttnn.init_distributed_context()
for _ in range(3):
    ttnn.distributed_context_barrier()
print(ttnn.distributed_context_get_rank(), "of", ttnn.distributed_context_get_size())
"""
    (tmp_path / "meet.py").write_text(program)
    done = launch("-n", 2, "meet.py", folder=tmp_path)
    assert (done.code, sorted(done.out.splitlines())) == (0, ["0 of 2", "1 of 2"]), done.err
