"""Guide 5, TT-NN's mesh API: the reader's values, and the checks of its blocks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import transformers

from tessera import ttnn

Space = dict[str, Any]


def pcc(a: Any, b: Any) -> float:
    x, y = (t.detach().double().numpy().ravel() for t in (a, b))
    return float(np.corrcoef(x, y)[0, 1])


def assert_with_pcc(expected: Any, actual: Any, at_least: float) -> None:
    assert expected.shape == actual.shape
    assert pcc(expected, actual) >= max(at_least, 0.99)


def hybrid(space: Space) -> Callable[..., Any]:
    """The MLP of section 7 on a submesh, with separate weights there."""
    models: Space = {}

    def forward(activations: Any, device: Any) -> Any:
        if device not in models:
            with ttnn.distribute(ttnn.ShardTensorToMesh(device, dim=-1)):
                weights = ttnn.model_preprocessing.preprocess_model_parameters(
                    initialize_model=lambda: space["model"], device=device
                )
            models[device] = space["TtFalconMLP"](weights)
            space.setdefault("inputs", {})[device] = ttnn.from_torch(
                activations, dtype=ttnn.bfloat16, layout=ttnn.TILE_LAYOUT, device=device
            )
        return models[device](space["inputs"][device])

    return forward


GIVES: dict[str, Callable[[Space], Any]] = {
    "transformers": lambda s: transformers,
    "assert_with_pcc": lambda s: assert_with_pcc,
    "activations": lambda s: torch.rand(1, 1, 32, 128) * 2 - 1,
    "hybrid": hybrid,
    "results": lambda s: {},
}


def parts(x: Any) -> list[Any]:
    return [ttnn.to_torch(t) for t in ttnn.get_device_tensors(x)]


def the_system(space: Space, shown: str) -> None:
    """the system's devices as a grid, with their numbers and places"""
    assert "SystemMesh Global Shape: MeshShape([2, 4])" in shown
    assert shown.count("Dev. ID: ") == 8 and "(1, 3)" in shown


def opened(space: Space, shown: str) -> None:
    """a mesh of 1 x 2 devices is open"""
    assert space["mesh_device"].get_device_ids() == [0, 1]


def named(space: Space, shown: str) -> None:
    """it prints its grid and its number of devices"""
    assert repr(space["mesh_device"]) == "MeshDevice(1x2 grid, 2 devices)"


def drawn(space: Space, shown: str) -> None:
    """its devices as a grid"""
    assert "MeshDevice(rows=1, cols=2):" in shown and "Dev. ID: 1" in shown


def cut(space: Space, shown: str) -> None:
    """a tensor on the host, the same along rows and cut along columns: two parts of 32 x 32"""
    x = space["mesh_tensor"]
    assert x.shape == (1, 1, 32, 32) and x.storage_type() is ttnn.StorageType.HOST
    assert [float(p.min()) for p in parts(x)] == [float(p.max()) for p in parts(x)] == [1.0, 2.0]


def printed(space: Space, shown: str) -> None:
    """it prints each part"""
    text = repr(space["mesh_tensor"])
    assert text.count("ttnn.Tensor([[[[ ") == 2 and "device_id" not in text
    row = "[ 1.00000,  1.00000,  ...,  1.00000,  1.00000]"
    end = "shape=Shape([1, 1, 32, 32]), dtype=DataType::FLOAT32, layout=Layout::TILE)"
    assert row in text and text.endswith(end)


def host_drawn(space: Space, shown: str) -> None:
    """the devices planned for its parts"""
    assert "Tensor(storage: HOST)" in shown and "[:, :, :, 32:64]" in shown


def moved(space: Space, shown: str) -> None:
    """it is on the devices, and its text names the device of each part"""
    text = repr(space["mesh_tensor"])
    assert text.startswith("device_id:0\nttnn.Tensor([[[[ 1.00000,") and "device_id:1\n" in text


def device_drawn(space: Space, shown: str) -> None:
    """the device of each part"""
    assert "Tensor(storage: DEVICE)" in shown and "Dev. ID: 1" in shown


def one_gelu(space: Space, shown: str) -> None:
    """gelu on one device equals PyTorch's"""
    (found,) = parts(space["output_tensor"])
    assert_with_pcc(torch.nn.functional.gelu(space["torch_tensor"]), found, 0.999)


def all_gelu(space: Space, shown: str) -> None:
    """gelu on four devices in parallel; without a mapper each has the whole"""
    found = parts(space["output_tensor"])
    assert len(found) == 4 and all(torch.equal(found[0], p) for p in found)
    assert_with_pcc(torch.nn.functional.gelu(space["torch_tensor"]), found[0], 0.999)


def ring(space: Space, shown: str) -> None:
    """each of 8 devices has all parts, in order"""
    found = parts(space["output_tensor"])
    assert len(found) == 8 and all(torch.equal(p, space["torch_tensor"]) for p in found)


def column_line(space: Space, shown: str) -> None:
    """each column of the mesh has its two parts, one after the other"""
    pieces = torch.split(space["torch_tensor"], 32, 3)
    for i, part in enumerate(gathered(space)):
        assert torch.equal(part, torch.cat([pieces[i % 4], pieces[i % 4 + 4]], 3))


def gathered(space: Space) -> list[Any]:
    """The block closes its mesh: TT-NN has no access to its tensors, but the engine has."""
    gone = space["output_tensor"]
    assert not space["mesh_device"].is_open and not gone.is_allocated()
    held = gone.value_.numpy().reshape(-1, *gone.shape).astype(np.float32)
    return [torch.from_numpy(part).to(torch.bfloat16) for part in held]


def imported(space: Space, shown: str) -> None:
    """the one import"""
    assert space["ttnn"] is ttnn


def defined(space: Space, shown: str) -> None:
    """it is defined; the blocks below run it"""
    assert callable(space["TtFalconMLP"])


def torchs(space: Space, shown: str) -> None:
    """PyTorch's model, to compare with"""
    assert type(space["model"]).__name__ == "FalconMLP"


def on_one(space: Space, shown: str) -> None:
    """the MLP on one device is PyTorch's, at 0.99"""
    assert not space["device"].is_open and space["ttnn_output"].shape == (1, 1, 128, 128)


def data_parallel(space: Space, shown: str) -> None:
    """rows over four devices, weights on each: PyTorch's at 0.99"""
    labels = space["ttnn_output"].tensor_topology()
    assert labels.placements()[-1] == ttnn.PlacementShard(0)
    assert len(parts(space["ttnn_output"])) == 4


def tensor_parallel(space: Space, shown: str) -> None:
    """weights cut over eight devices, activations gathered between: PyTorch's at 0.99"""
    weight = space["parameters"].dense_h_to_4h.weight
    assert weight.shape == (128, 64) and len(parts(space["ttnn_output"])) == 8


def two_parts(space: Space, shown: str) -> None:
    """two meshes of four devices"""
    ids = [d.get_device_ids() for d in space["submesh_devices"]]
    assert ids == [[0, 1, 2, 3], [4, 5, 6, 7]]


def right(space: Space) -> bool:
    """Returns whether each submesh's result is PyTorch's for the current values of its devices."""
    found = []
    for device, out in space["results"].items():
        rows = ttnn.to_torch(ttnn.get_device_tensors(space["inputs"][device])[0]).float()
        whole = ttnn.to_torch(out, mesh_composer=ttnn.ConcatMeshToTensor(device, dim=3))
        found.append(pcc(space["model"](rows), whole.float()) >= 0.99)
    return len(found) == 2 and all(found)


def ran(space: Space, shown: str) -> None:
    """the model runs on each part: PyTorch's at 0.99"""
    assert right(space)


def captured(space: Space, shown: str) -> None:
    """one trace of both parts: a program each"""
    capture = space["mesh_device"].traces[space["trace_id"].number]
    assert [s.device for s in capture.segments] == space["submesh_devices"]
    # The next block replays it on other rows.
    for device, x in space["inputs"].items():
        rows = ttnn.from_torch(
            torch.rand(1, 1, 32, 128) * 2 - 1, dtype=ttnn.bfloat16, layout=ttnn.TILE_LAYOUT
        )
        ttnn.copy_host_to_device_tensor(ttnn.to_device(rows, device).cpu(), x)
    assert not right(space)


def replayed(space: Space, shown: str) -> None:
    """the replay reads the current rows on both parts; the trace is released"""
    assert right(space) and not space["mesh_device"].traces


def product(space: Space, shown: str) -> None:
    """a product of columns on two devices, gathered on both"""
    a, b = space["torch_input_a"].float(), space["torch_input_b"].float()
    found = parts(space["gathered"])
    assert len(found) == 2 and torch.equal(*found)
    assert_with_pcc(a @ b, found[0].float(), 0.999)


def by_hand(space: Space, shown: str) -> None:
    """PyTorch's computation of the same product"""
    a, b = space["torch_input_a"].float(), space["torch_input_b"].float()
    assert_with_pcc(a @ b, space["final_result"].float(), 0.999)


CHECKS: dict[str, Callable[[Space, str], None]] = {
    "5/2.1.1/code": the_system,
    "5/2.2.1/code": opened,
    "5/2.2.1/code 2": named,
    "5/2.2.1/code 3": drawn,
    "5/3.2/code": cut,
    "5/3.2/code 2": printed,
    "5/3.2/code 3": host_drawn,
    "5/3.2/code 4": moved,
    "5/3.2/code 5": device_drawn,
    "5/4.2.1/code": one_gelu,
    "5/4.2.2/code": all_gelu,
    "5/5.2.1/code": ring,
    "5/5.2.2/code": column_line,
    "5/6.1/code": imported,
    "5/6.1/TtFalconMLP": defined,
    "5/6.1/code 2": torchs,
    "5/6.1/code 3": on_one,
    "5/6.1/code 4": data_parallel,
    "5/7.1/code": imported,
    "5/7.1/TtFalconMLP": defined,
    "5/7.1/code 2": torchs,
    "5/7.1/code 3": tensor_parallel,
    "5/8.3.2/code": two_parts,
    "5/8.3.2/code 2": ran,
    "5/8.3.2/code 3": captured,
    "5/8.3.2/code 4": replayed,
    "5/9.2/code": product,
    "5/9.2/code 2": by_hand,
}
