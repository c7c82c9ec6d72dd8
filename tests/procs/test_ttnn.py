"""TT-NN programs on a mesh over several processes, each of which writes its results."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from tests.procs.launched import launch

PROGRAM = """\
import json
import numpy as np
from tessera import ttnn

ttnn.init_distributed_context()
rank, seen = ttnn.distributed_context_get_rank(), {}
device = ttnn.open_mesh_device(ttnn.MeshShape(2, 2))
seen["local"] = [device.get_view().is_local(c) for c in ttnn.MeshCoordinateRange(device.shape)]
host = np.arange(-64, 64, dtype=np.float32).reshape(1, 1, 4, 32)
cut = ttnn.ShardTensorToMesh(device, dim=2)
join = ttnn.ConcatMeshToTensor(device, dim=2)
x = ttnn.from_torch(host, layout=ttnn.TILE_LAYOUT, device=device, mesh_mapper=cut)
y = ttnn.relu(x)
seen["own"] = [t.numpy().ravel().tolist() for t in ttnn.get_device_tensors(y)]
seen["printed"] = [s for s in repr(y).splitlines() if s.startswith("device_id")]
seen["whole"] = ttnn.aggregate_tensor(y, join).numpy().ravel().tolist()
doubled = [ttnn.multiply(t, 2.0 + rank) for t in ttnn.get_device_tensors(y)]
again = ttnn.combine_device_tensors(tensors=doubled)
seen["again"] = ttnn.aggregate_tensor(ttnn.all_gather(again, 2), join).numpy().ravel().tolist()
try:
    ttnn.combine_device_tensors(tensors=doubled[:1])
except ttnn.TTNNError as error:
    seen["refused"] = str(error).splitlines()[0]
columns = ttnn.all_reduce(y, cluster_axis=0)
seen["columns"] = ttnn.aggregate_tensor(columns, join).numpy().ravel().tolist()
trace = ttnn.begin_trace_capture(device, cq_id=0)
total = ttnn.all_reduce(ttnn.relu(x))
ttnn.end_trace_capture(device, trace, cq_id=0)
ttnn.copy_host_to_device_tensor(
    ttnn.from_torch(2 * host, layout=ttnn.TILE_LAYOUT, mesh_mapper=cut), x)
ttnn.execute_trace(device, trace, cq_id=0, blocking=True)
seen["total"] = ttnn.get_device_tensors(total)[0].numpy().ravel().tolist()
ttnn.release_trace(device, trace)
part = device.create_submeshes(ttnn.MeshShape(1, 2))[rank]
mine = ttnn.all_reduce(ttnn.from_torch(host + rank, device=part))
seen["mine"] = [t.numpy().ravel().tolist() for t in ttnn.get_device_tensors(mine)]
ttnn.visualize_mesh_device(device, svg=f"mesh{rank}.svg")
ttnn.distributed_context_barrier()
ttnn.close_mesh_device(device)
line = ttnn.open_mesh_device(ttnn.MeshShape(1, 4))
seen["ids"] = line.get_device_ids()
cut = ttnn.ShardTensorToMesh(line, dim=2)
x = ttnn.from_torch(host, layout=ttnn.TILE_LAYOUT, device=line, mesh_mapper=cut)
seen["in_line"] = [t.numpy().ravel().tolist() for t in ttnn.get_device_tensors(x)]
seen["printed_in_line"] = [s for s in repr(x).splitlines() if s.startswith("device_id")]
negated = [ttnn.neg(t) for t in ttnn.get_device_tensors(x)]
negated = ttnn.combine_device_tensors(tensors=negated)
join = ttnn.ConcatMeshToTensor(line, dim=2)
seen["negated"] = ttnn.aggregate_tensor(negated, join).numpy().ravel().tolist()
ttnn.close_mesh_device(line)
open(f"seen{rank}.json", "w").write(json.dumps(seen))
"""


def test_a_mesh_over_two_processes(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    done = launch("-n", 2, "--devices", 2, "program.py", folder=tmp_path)
    assert done.code == 0, f"{done.out}\n{done.err}"
    host = np.arange(-64, 64, dtype=np.float32).reshape(2, 2, 32)
    y = np.maximum(host, 0)
    for rank in range(2):
        seen = json.loads((tmp_path / f"seen{rank}.json").read_text())
        assert seen["local"] == [rank == 0] * 2 + [rank == 1] * 2
        assert seen["printed"] == [f"device_id:{2 * rank}", f"device_id:{2 * rank + 1}"]
        np.testing.assert_array_equal(seen["own"], y[rank])
        np.testing.assert_array_equal(seen["whole"], y.ravel())
        assert seen["refused"].endswith("gives the parts of all its devices of the mesh")
        by_rank = np.concatenate([2 * y[0], 3 * y[1]]).ravel()
        np.testing.assert_array_equal(seen["again"], np.tile(by_rank, 4))
        np.testing.assert_array_equal(seen["columns"], np.stack([y.sum(0)] * 2).ravel())
        np.testing.assert_array_equal(seen["total"], 2 * y.sum((0, 1)))
        np.testing.assert_array_equal(seen["mine"], [2 * (host.ravel() + rank)] * 2)
        # Coordinates in a mesh of one row have two numbers, too.
        places = [k for k, i in enumerate(seen["ids"]) if i // 2 == rank]
        assert seen["printed_in_line"] == [f"device_id:{seen['ids'][k]}" for k in places]
        np.testing.assert_array_equal(seen["in_line"], host.reshape(4, 32)[places])
        np.testing.assert_array_equal(seen["negated"], -host.ravel())
        drawn = (tmp_path / f"mesh{rank}.svg").read_text()
        assert drawn.count("Local") == drawn.count("Remote") == 2
