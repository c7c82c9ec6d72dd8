"""Fixtures of tests written for hardware."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

CONFTEST = 'pytest_plugins = ["tessera.ttnn.testing"]\n'
TESTS = """
import pytest
import torch

import tessera.ttnn as ttnn
from tessera.ttnn.testing import assert_with_pcc, comp_pcc


@pytest.mark.parametrize("mesh_device", [(2, 4), 2, pytest.param((1, 8), id="line")], indirect=True)
@pytest.mark.parametrize("device_params", [{"num_command_queues": 2}], indirect=True)
def test_rows_over_a_mesh(mesh_device, silicon_arch_name, silicon_arch_wormhole_b0, reset_seeds):
    n = mesh_device.get_num_devices()
    x, w = torch.rand(n, 1, 32, 32, dtype=torch.bfloat16), torch.rand(1, 1, 32, 32)
    rows = ttnn.from_torch(x, layout=ttnn.TILE_LAYOUT, device=mesh_device,
                           mesh_mapper=ttnn.ShardTensorToMesh(mesh_device, dim=0))
    weight = ttnn.from_torch(w, dtype=ttnn.bfloat8_b, layout=ttnn.TILE_LAYOUT, device=mesh_device,
                             mesh_mapper=ttnn.ReplicateTensorToMesh(mesh_device))
    event = ttnn.record_event(mesh_device, 1)
    ttnn.wait_for_event(0, event)
    found = ttnn.to_torch(rows @ weight, device=mesh_device, cq_id=1,
                          mesh_composer=ttnn.ConcatMeshToTensor(mesh_device, dim=0))
    assert_with_pcc(x.float() @ w, found, 0.999)
    assert not comp_pcc(x.float() @ w, -found)[0]


def test_one_device(device, n300_mesh_device, t3k_mesh_device):
    assert [d.get_num_devices() for d in (device, n300_mesh_device, t3k_mesh_device)] == [1, 2, 8]
    assert t3k_mesh_device.shape == ttnn.MeshShape(1, 8)
    x = ttnn.from_torch(torch.ones(32, 32), layout=ttnn.TILE_LAYOUT, device=device)
    programs = device.cache_entries_counter
    with programs.measure():
        ttnn.add(ttnn.exp(x), x)
    programs.decorator(ttnn.exp)(x)  # is there already
    assert programs.total == 2
    programs.reset()
    assert programs.total == 0


def test_other_systems(pcie_mesh_device, t3k_single_board_mesh_device, bh_1d_mesh_device,
                       bh_2d_mesh_device, use_program_cache, function_level_defaults,
                       silicon_arch_blackhole, clear_compile_cache, is_ci_env):
    meshes = pcie_mesh_device, t3k_single_board_mesh_device, bh_1d_mesh_device, bh_2d_mesh_device
    assert [tuple(d.shape) for d in meshes] == [(1, 4), (1, 2), (8, 1), (4, 2)]


def test_a_galaxy(ensure_devices_tg):
    assert False


@pytest.mark.parametrize("mesh_device", [(9, 9)], indirect=True)
def test_too_large(mesh_device):
    assert False
"""


def test_their_fixtures_are_there(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_them.py").write_text(TESTS)
    source = str(Path(__file__).parents[2] / "src")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"], cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": source}, capture_output=True, text=True, timeout=240,
        check=False,
    )  # fmt: skip
    assert "5 passed, 2 skipped" in done.stdout, done.stdout + done.stderr
