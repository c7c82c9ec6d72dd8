"""Hardware options of programs: accepted and checked, without effect on values."""

from __future__ import annotations

import numpy as np
import pytest

from tessera import ttnn
from tessera.ttnn import names


def test_collectives_of_programs_with_sub_devices_and_semaphores(device: ttnn.MeshDevice) -> None:
    grid = device.compute_with_storage_grid_size()
    cores = ttnn.num_cores_to_corerangeset(grid.x * grid.y, grid, row_wise=True)
    manager = device.create_sub_device_manager([ttnn.SubDevice([cores])], 0)
    device.load_sub_device_manager(manager)
    device.set_sub_device_stall_group([ttnn.SubDeviceId(0)])
    ttnn.set_fabric_config(
        ttnn.FabricConfig.FABRIC_1D, ttnn.FabricReliabilityMode.RELAXED_INIT, None,
        ttnn.FabricTensixConfig.DISABLED,
    )  # fmt: skip
    semaphores = [ttnn.create_global_semaphore(device, cores, 0) for _ in range(2)]
    x = np.arange(8 * 32, dtype=np.float32).reshape(1, 1, 8, 32)
    cut = ttnn.from_torch(
        x, layout=ttnn.TILE_LAYOUT, device=device, mesh_mapper=ttnn.ShardTensorToMesh(device, dim=2)
    )
    ttnn.apply_device_delay(device, [[0, 1, 2, 3], [3, 2, 1, 0]], ttnn.SubDeviceId(0))
    whole = ttnn.experimental.all_gather_async(
        cut, 2, multi_device_global_semaphore=semaphores, num_links=1,
        topology=ttnn.Topology.Linear, subdevice_id=ttnn.SubDeviceId(0),
    )  # fmt: skip
    ttnn.synchronize_device(device, sub_device_ids=[ttnn.SubDeviceId(0)])
    for part in ttnn.get_device_tensors(whole):
        np.testing.assert_array_equal(part.numpy(), x)
    ttnn.reset_global_semaphore_value(semaphores[0], 3)
    assert "value=3" in repr(semaphores[0])
    device.reset_sub_device_stall_group()
    device.clear_loaded_sub_device_manager()
    device.remove_sub_device_manager(manager)


def test_what_is_no_sub_device_is_refused(device: ttnn.MeshDevice) -> None:
    first, second = (device.create_sub_device_manager([ttnn.SubDevice()] * n) for n in (1, 2))
    device.load_sub_device_manager(second)
    device.set_sub_device_stall_group([ttnn.SubDeviceId(1)])
    with pytest.raises(ttnn.TTNNError, match="this manager is loaded"):
        device.remove_sub_device_manager(second)
    device.load_sub_device_manager(first)
    with pytest.raises(ttnn.TTNNError, match="takes the numbers of loaded sub-devices"):
        device.set_sub_device_stall_group([ttnn.SubDeviceId(1)])
    device.clear_loaded_sub_device_manager()
    for manager in (first, second):
        device.remove_sub_device_manager(manager)
        with pytest.raises(ttnn.TTNNError, match="has no such manager"):
            device.load_sub_device_manager(manager)
    with pytest.raises(ttnn.TTNNError, match="takes a list of sub-devices"):
        device.create_sub_device_manager([])
    with pytest.raises(ttnn.TTNNError, match="no configuration of the fabric"):
        ttnn.set_fabric_config("ring")
    with pytest.raises(ttnn.TTNNError, match="a number for each device"):
        ttnn.apply_device_delay(device, [[0] * 8])


@pytest.mark.parametrize("count", [1, 7, 8, 9, 64])
@pytest.mark.parametrize("by_rows", [True, False])
def test_the_first_cores_of_a_grid(count: int, by_rows: bool) -> None:
    found = ttnn.num_cores_to_corerangeset(count, ttnn.CoreCoord(8, 8), by_rows)
    cores = {
        (x, y)
        for r in found
        for x in range(r.start.x, r.end.x + 1)
        for y in range(r.start.y, r.end.y + 1)
    }
    order = [(i % 8, i // 8) if by_rows else (i // 8, i % 8) for i in range(count)]
    assert cores == {*order} and found.num_cores() == count


def test_too_many_cores() -> None:
    with pytest.raises(ttnn.TTNNError, match="there are no 65 cores"):
        ttnn.num_cores_to_corerangeset(65, ttnn.CoreCoord(8, 8))


def test_names_of_before_the_mesh() -> None:
    assert ttnn.GetNumAvailableDevices() == ttnn.get_num_devices()
    assert ttnn.get_arch_name() == "wormhole_b0" and not ttnn.using_distributed_env()
    config = ttnn.init_device_compute_kernel_config(
        ttnn.Arch.WORMHOLE_B0, math_fidelity=ttnn.MathFidelity.HiFi4, fp32_dest_acc_en=True
    )
    assert config.fp32_dest_acc_en and config.math_fidelity is ttnn.MathFidelity.HiFi4


def test_names_that_are_not_provided_are_known() -> None:
    for module in (ttnn, ttnn.experimental, ttnn.transformer):
        assert not names.OF_TT_NN[module.__name__] & {*module.__all__}
    for module, name in (
        (ttnn, "gcd"),
        (ttnn, "_ttnn"),
        (ttnn, "gelu_bw"),
        (ttnn, "moreh_full"),
        (ttnn, "pearson_correlation_coefficient"),
        (ttnn.experimental, "send_async"),
        (ttnn.transformer, "flash_mla_prefill"),
    ):
        with pytest.raises(AttributeError, match="TT-NN has it, and it is not provided here"):
            getattr(module, name)
    with pytest.raises(AttributeError, match="the names most like it are all_gather_async"):
        ttnn.experimental.all_gather_asink  # noqa: B018
