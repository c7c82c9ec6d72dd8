"""Meshes of each rank by a rank binding file and tt-metal's descriptors."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cases import LONG
from tests.core.machine_files import GRAPH_TOP, MESH, TOP, graph, instances, joined
from tests.procs.launched import launch, said

EAST, SOUTH = "routing_direction : [ E, W ]", "routing_direction : [ S, N ]"
DUAL = MESH.replace("[1, 1]", "[1, 2]") + TOP
PAIR = MESH.replace("[2, 4]", "[2, 2]")
PAIR += graph(instances(0, 1) + joined(0, 1, more=EAST) * 2) + GRAPH_TOP
SQUARE = MESH.replace("[2, 4]", "[1, 2]") + graph(
    instances(0, 1, 2, 3)
    + joined(0, 1, more=EAST) + joined(2, 3, more=EAST)
    + joined(0, 2, more=SOUTH) * 2 + joined(1, 3, more=SOUTH) * 2
) + GRAPH_TOP  # fmt: skip
SPLIT = MESH.replace("[2, 4]", "[1, 2]") + MESH.replace("M0", "M1").replace("[2, 4]", "[1, 6]")
TO_M1 = joined(0, 1).replace('"M0" mesh_id: 1', '"M1" mesh_id: 1')
SPLIT += graph(instances(0) + instances(1, mesh="M1") + TO_M1) + GRAPH_TOP
PROGRAM = """
import warnings
warnings.simplefilter("error")
import numpy as np
from tessera import ttnn
ttnn.init_distributed_context()
rank, device = ttnn.distributed_context_get_rank(), ttnn.open_mesh_device()
count = device.get_num_devices()
rows = np.arange(1, count + 1, dtype=np.float32).reshape(count, 1)
rows *= 10.0 ** device.get_system_mesh_id()
x = ttnn.from_torch(rows, device=device, layout=ttnn.TILE_LAYOUT, dtype=ttnn.float32,
                    mesh_mapper=ttnn.ShardTensorToMesh(device, dim=0))
own = [int(t.to_list()[0][0]) for t in ttnn.get_device_tensors(x)]
total = int(ttnn.get_device_tensors(ttnn.all_reduce(x))[0].to_list()[0][0])
node = device.get_fabric_node_id((0, 1))
alone = ttnn.open_device(0) if len(own) == count else device
print(f"{rank}: {[*device.shape]} {own} {total} {node.mesh_id}.{node.chip_id}"
      f" {ttnn.get_device_ids()} {alone.get_device_ids()[:1]}\\n", end="")
"""
LINE = r"\d: \[\d, \d\] \[[^\]]*\] \d+ \d\.\d \[[^\]]*\] \[\d\]"


def bound(*ranks: tuple[int, int | None, str]) -> str:
    """The text of a rank binding file: each rank's mesh, host and visible devices."""
    rows = [
        f"  - rank: {k}\n    mesh_id: {mesh}\n"
        + (f"    mesh_host_rank: {host}\n" if host is not None else "")
        + f'    env_overrides: {{TT_VISIBLE_DEVICES: "{ids}"}}\n'
        for k, (mesh, host, ids) in enumerate(ranks)
    ]
    return "rank_bindings:\n" + "".join(rows) + 'mesh_graph_desc_path: "mesh.textproto"\n'


EIGHT = [*range(8)]
CASES = {
    "one mesh of two ranks": (DUAL, [(0, 0, "0,1"), (0, 1, "2,3")], [
        f"0: [2, 4] [1, 2, 5, 6] 36 0.1 {EIGHT} [0]",
        f"1: [2, 4] [3, 4, 7, 8] 36 0.1 {EIGHT} [0]"]),
    "a mesh for each rank": (PAIR, [(0, None, "0,1"), (1, None, "3,2")], [
        "0: [2, 2] [1, 2, 3, 4] 10 0.1 [0, 1, 2, 3] [0]",
        "1: [2, 2] [10, 20, 30, 40] 100 1.1 [0, 1, 2, 3] [0]"]),
    "four meshes in a square": (
        SQUARE, [(0, None, "0"), (2, None, "1"), (3, None, "2"), (1, None, "3")], [
            "0: [1, 2] [1, 2] 3 0.1 [0, 1] [0]", "1: [1, 2] [100, 200] 300 2.1 [0, 1] [0]",
            "2: [1, 2] [1000, 2000] 3000 3.1 [0, 1] [0]",
            "3: [1, 2] [10, 20] 30 1.1 [0, 1] [0]"]),
    "meshes of two sizes": (SPLIT, [(0, None, "0"), (1, None, "1,2,3")], [
        "0: [1, 2] [1, 2] 3 0.1 [0, 1] [0]",
        "1: [1, 6] [10, 20, 30, 40, 50, 60] 210 1.1 [0, 1, 2, 3, 4, 5] [0]"]),
}  # fmt: skip


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=LONG if n[:4] in ("four", "mesh") else ()) for n in CASES]
)
def test_a_rank_has_its_part_of_its_mesh(name: str, tmp_path: Path) -> None:
    descriptor, ranks, says = CASES[name]
    (tmp_path / "mesh.textproto").write_text(descriptor)
    (tmp_path / "ranks.yaml").write_text(bound(*ranks))
    (tmp_path / "program.py").write_text(PROGRAM)
    done = launch("--rank-binding", "ranks.yaml", "program.py", folder=tmp_path)
    assert done.code == 0, done.err
    assert said(done.out, LINE) == says


def test_meshes_need_no_descriptor(tmp_path: Path) -> None:
    text = bound((4, None, "0,1"), (3, None, "2,3")).replace("mesh_graph", "# mesh_graph")
    (tmp_path / "ranks.yaml").write_text(text)
    (tmp_path / "program.py").write_text(PROGRAM)
    done = launch("--rank-binding", "ranks.yaml", "program.py", folder=tmp_path)
    assert done.code == 0, done.err
    assert said(done.out, LINE) == [
        "0: [1, 2] [10000, 20000] 30000 4.1 [0, 1] [0]",
        "1: [1, 2] [1000, 2000] 3000 3.1 [0, 1] [0]",
    ]
