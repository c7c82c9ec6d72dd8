"""Partly wrong calls, as people type them: the intended result, or an error with advice."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import tessera as ts
from tessera import ttnn

X = torch.arange(64.0).reshape(1, 1, 8, 8)
Make = Callable[[ttnn.MeshDevice, ttnn.Tensor], Any]
CALLS: dict[str, tuple[Make, str]] = {
    "a composer as mapper": (
        lambda d, t: ttnn.from_torch(X, mesh_mapper=ttnn.ConcatMeshToTensor(d, 0)),
        "mesh_mapper cannot be an object of type MeshToTensor",
    ),
    "a mapper as composer": (
        lambda d, t: ttnn.to_torch(t, mesh_composer=ttnn.ReplicateTensorToMesh(d)),
        "mesh_composer cannot be an object of type TensorToMesh",
    ),
    "a config as mapper": (
        lambda d, t: ttnn.from_torch(X, mesh_mapper=ttnn.MeshMapperConfig([])),
        "of a config: ttnn.create_mesh_mapper",
    ),
    "one dim for two": (
        lambda d, t: ttnn.ShardTensor2dMesh(d, mesh_shape=(2, 4), dims=3),
        "it takes two dims and a grid of two",
    ),
    "no dim to join": (
        lambda d, t: ttnn.ConcatMesh2dToTensor(d, mesh_shape=(2, 4), dims=(None, 3)),
        "give a dim of the tensor for each dim of the grid",
    ),
    "a number as device": (lambda d, t: ttnn.from_torch(X, device=0), "device cannot be 0"),
    "torch's dtype": (lambda d, t: ttnn.from_torch(X, torch.bfloat16), "dtype=ttnn.bfloat16"),
    "a word as layout": (lambda d, t: ttnn.from_torch(X, layout="tile"), "layout=ttnn.TILE_LAYOUT"),
    "a word for to_layout": (lambda d, t: ttnn.to_layout(t, "tile"), "layout=ttnn.TILE_LAYOUT"),
    "a mesh by numbers": (lambda d, t: ttnn.open_mesh_device(2, 4), "is no shape of a mesh"),
    "a list of parts": (
        lambda d, t: ttnn.to_torch(ttnn.get_device_tensors(t)),
        "ttnn.aggregate_tensor",
    ),
    "torch's tensor": (lambda d, t: t + X, r"Tensor\[1, 1, 8, 8\] is neither a tensor of ttnn"),
    "a choice by a tensor": (lambda d, t: t[t], r"Tensor\[1, 1, 8, 8\] is not of numbers"),
    "one tensor for concat": (lambda d, t: ttnn.concat(t, 0), "it takes a list of tensors"),
    "starts of two dims": (lambda d, t: ttnn.slice(t, [0, 0], [1, 1]), "it takes 4 numbers for"),
    "no ends": (lambda d, t: ttnn.slice(t, [0] * 4), "it takes 4 numbers for"),
    "bounds that differ": (
        lambda d, t: ttnn.slice(
            t,
            ttnn.from_torch(
                torch.arange(4 * d.get_num_devices(), dtype=torch.int32),
                device=d,
                dtype=ttnn.int32,
                mesh_mapper=ttnn.ShardTensorToMesh(d, dim=0),
            ),
            [1] * 4,
        ),
        "parts of different places",
    ),
    "ids that are floats": (lambda d, t: ttnn.embedding(t, t), "ids are whole numbers"),
    "truth of many": (lambda d, t: bool(t == t), "64 elements is no number"),
    "many as a number": (lambda d, t: float(t), "64 elements is no number"),
    "an array of several parts": (lambda d, t: np.asarray(t), "Supply a mesh composer"),
    "event and queue swapped": (
        lambda d, t: ttnn.wait_for_event(ttnn.record_event(d, 0), 0),
        "mesh_event cannot be 0",
    ),
    "a method of tensors": (lambda d, t: t.buffer_address(), "it is not provided here"),
    "a method of devices": (lambda d, t: d.get_devices(), "it is not provided here"),
    "a misspelled method": (lambda d, t: d.get_device_idz(), "get_device_ids"),
    "no method": (lambda d, t: t.colour, "TT-NN is not known to have it"),
    "a word as dtype": (lambda d, t: ttnn.add(t, t, dtype="bfloat16"), "add: dtype cannot be 'bf"),
    "torch's dtype in an op": (
        lambda d, t: ttnn.multiply(t, t, dtype=torch.bfloat16),
        "multiply: dtype cannot be",
    ),
    "a word as memory": (
        lambda d, t: ttnn.relu(t, memory_config="dram"),
        "memory_config=ttnn.DRAM_MEMORY_CONFIG",
    ),
    "a dtype as memory": (
        lambda d, t: ttnn.to_memory_config(t, ttnn.bfloat16),
        r"memory_config cannot be DataType\.BFLOAT16",
    ),
    "memory in the dtype's place": (
        lambda d, t: ttnn.typecast(t, ttnn.DRAM_MEMORY_CONFIG),
        "typecast: dtype cannot be",
    ),
    "a word as from_torch's memory": (
        lambda d, t: ttnn.from_torch(X, device=d, memory_config="L1"),
        "memory_config cannot be 'L1'",
    ),
    "a layout as dtype": (lambda d, t: ttnn.from_torch(X, ttnn.TILE_LAYOUT), "dtype cannot be La"),
    "a misspelled mapper": (
        lambda d, t: ttnn.from_torch(X, device=d, mesh_maper=ttnn.ReplicateTensorToMesh(d)),
        "the nearest are mesh_mapper",
    ),
    "PyTorch's older keyword": (lambda d, t: ttnn.mean(t, 3, keepdims=True), "nearest are keepdim"),
    "less than none": (
        lambda d, t: ttnn.from_torch(torch.tensor([-1, 2]), ttnn.uint32),
        "the numbers from 0 to 4294967295",
    ),
    "too much": (
        lambda d, t: ttnn.full((2, 2), 70000, ttnn.uint16, device=d),
        r"(?s)to 65535.*from 70000 to 70000",
    ),
    "a fraction as a whole number": (
        lambda d, t: ttnn.from_torch(torch.tensor([2.0, 1.5]), ttnn.uint32, device=d),
        r"(?s)UINT32 has whole numbers alone.*data : 1\.5",
    ),
    "a fraction of bfloat16": (
        lambda d, t: ttnn.from_torch(torch.tensor([2.5], dtype=torch.bfloat16), ttnn.int32),
        r"(?s)INT32 has whole numbers alone.*data : 2\.5",
    ),
    "a float beyond float32": (
        lambda d, t: ttnn.from_torch(torch.tensor([float("inf"), -1e39], dtype=torch.float64)),
        r"(?s)FLOAT32 has the numbers up to 3\.403e\+38.*up to 1e\+39",
    ),
    "a float beyond bfloat16": (
        lambda d, t: ttnn.full((2, 2), -1e39, ttnn.bfloat16, device=d),
        "BFLOAT16 has the numbers up to 3",
    ),
    "a fraction for a tensor of the host": (
        lambda d, t: ttnn.Tensor(torch.tensor([0.5]), ttnn.uint16),
        "Tensor: DataType.UINT16 has whole numbers alone",
    ),
    "complex numbers": (
        lambda d, t: ttnn.from_torch(torch.tensor([1 + 2j]), ttnn.float32),
        "an array of complex64 has no real numbers",
    ),
    "no number": (
        lambda d, t: ttnn.from_torch(torch.tensor([float("nan")]), ttnn.int32),
        "from nan to nan",
    ),
    "a wide number": (lambda d, t: ttnn.from_torch(torch.tensor([2**40])), "to 2147483647"),
    "no dim to cut": (lambda d, t: ttnn.ShardTensorToMesh(d, dim=None), "dim cannot be None"),
    "a word to cut": (lambda d, t: ttnn.ShardTensorToMesh(d, dim="3"), "dim cannot be '3'"),
    "a smaller mesh's composer": (
        lambda d, t: ttnn.to_torch(
            t, mesh_composer=ttnn.ConcatMeshToTensor(d.create_submesh((1, 2)), 0)
        ),
        "of a mesh of 2 devices, and the tensor has 8 parts",
    ),
    "ttnn's dtype for torch": (
        lambda d, t: ttnn.to_torch(ttnn.from_torch(X), ttnn.bfloat16),
        "dtype=torch.float32: it is PyTorch's",
    ),
    "a half added to whole numbers": (
        lambda d, t: ttnn.add(ttnn.typecast(t, ttnn.int32), 1.5),
        r"1\.5 is no whole number, and the tensor is of DataType\.INT32",
    ),
    "a dim that is no number": (lambda d, t: ttnn.all_gather(t, "3"), "dim cannot be '3'"),
    "a dim with a point": (lambda d, t: ttnn.all_gather(t, 3.0), r"dim cannot be 3\.0"),
    "an axis by name": (lambda d, t: ttnn.all_gather(t, 3, cluster_axis="x"), "cannot be 'x'"),
    "an axis that is true": (lambda d, t: ttnn.all_reduce(t, cluster_axis=True), "cannot be True"),
    "an axis too much": (lambda d, t: ttnn.all_reduce(t, cluster_axis=2), "a number from 0 to 1"),
    "half a link": (lambda d, t: ttnn.all_gather(t, 3, num_links=1.5), r"num_links cannot be 1\.5"),
    "a ring by name": (
        lambda d, t: ttnn.all_gather(t, 3, topology="Ring"),
        "topology=ttnn.Topology.Ring",
    ),
    "another mesh": (
        lambda d, t: ttnn.all_gather(t, 3, mesh_device=d.create_submesh((1, 2))),
        "all_gather: the tensor is on another mesh",
    ),
    "torch's tensor for a collective": (lambda d, t: ttnn.all_gather(X, 3), "is no tensor of ttnn"),
    "parts for a collective": (lambda d, t: ttnn.all_reduce([t]), "is no tensor of ttnn"),
    "choices that are floats": (
        lambda d, t: ttnn.all_to_all_dispatch(t, t, t),
        "the chosen experts are whole numbers",
    ),
    "choices of other tokens": (
        lambda d, t: ttnn.all_to_all_dispatch(
            t, _ids(d, (1, 1, 4, 2)), _ids(d, (1, 1, 16, 8)), cluster_axis=1
        ),
        "the choices are not those of the tokens",
    ),
    "a mapping of fewer devices": (
        lambda d, t: ttnn.all_to_all_dispatch(
            t, _ids(d, (1, 1, 8, 2)), _ids(d, (1, 1, 16, 4)), cluster_axis=1
        ),
        "the mapping has no column for each device",
    ),
    "torch's tensor to let go of": (
        lambda d, t: ttnn.deallocate(X),
        "deallocate: tensor cannot be",
    ),
    "a trace before its mesh": (lambda d, t: ttnn.execute_trace(0, d), "device cannot be 0"),
    "a mesh by its name": (lambda d, t: ttnn.synchronize_device("d"), "device cannot be 'd'"),
    "nothing to close": (lambda d, t: ttnn.close_mesh_device(None), "device cannot be None"),
    "no queue": (
        lambda d, t: ttnn.open_mesh_device((1, 1), num_command_queues=0),
        "num_command_queues cannot be 0",
    ),
    "a region by a word": (
        lambda d, t: ttnn.open_mesh_device((1, 1), trace_region_size="big"),
        "trace_region_size cannot be 'big'",
    ),
    "read while captured": (
        lambda d, t: _captured(d, lambda: ttnn.to_torch(ttnn.get_device_tensors(t)[0])),
        "reading is no part of it",
    ),
    "printed while captured": (lambda d, t: _captured(d, lambda: str(t)), "reading is no part"),
    "written while captured": (
        lambda d, t: _captured(
            d,
            lambda: ttnn.copy_host_to_device_tensor(ttnn.from_torch(X, layout=ttnn.TILE_LAYOUT), t),
        ),
        "what the host writes is no part of it",
    ),
    "made of data while captured": (
        lambda d, t: _captured(d, lambda: ttnn.from_torch(X, device=d)),
        "from_torch: a trace is being captured, and what the host writes",
    ),
    "moved while captured": (
        lambda d, t: _captured(d, lambda: ttnn.from_torch(X).to(d)),
        "to_device: a trace is being captured, and what the host writes",
    ),
    "zeros while captured": (
        lambda d, t: _captured(d, lambda: ttnn.zeros((2, 2), device=d)),
        "full: a trace is being captured, and what the host writes",
    ),
    "ones like it while captured, on a part": (
        lambda d, t: _captured(
            d, lambda: ttnn.ones_like(t, device=d.create_submesh(ttnn.MeshShape(1, 1)))
        ),
        "full: a trace is being captured, and what the host writes",
    ),
}


def _ids(device: ttnn.MeshDevice, shape: tuple[int, ...]) -> ttnn.Tensor:
    return ttnn.zeros(shape, ttnn.uint16, device=device)


def _captured(device: ttnn.MeshDevice, body: Callable[[], Any]) -> None:
    trace = ttnn.begin_trace_capture(device)
    try:
        body()
    finally:
        ttnn.end_trace_capture(device, trace)
        ttnn.release_trace(device, trace)


@pytest.mark.parametrize("case", CALLS)
def test_errors_say_the_way_out(case: str, device: ttnn.MeshDevice) -> None:
    call, says = CALLS[case]
    tensor = ttnn.from_torch(X, layout=ttnn.TILE_LAYOUT, device=device)
    with pytest.raises(ts.TesseraError, match=says) as caught:
        call(device, tensor)
    assert "fix" in str(caught.value)


def test_what_is_gone() -> None:
    with ttnn.create_mesh_device(ttnn.MeshShape(1, 2)) as device:
        x = ttnn.from_torch(X, device=device)
        gone = ttnn.clone(x)
        ttnn.deallocate(gone)
        for use in (ttnn.relu, ttnn.from_device, ttnn.get_device_tensors):
            with pytest.raises(ttnn.TTNNError, match=r"deallocated\n.*\n.*ttnn\.clone"):
                use(gone)
        alone = ttnn.get_device_tensors(x)[1]
        host, part = x.cpu(), device.create_submesh(ttnn.MeshShape(1, 1))
        y = ttnn.from_torch(X, device=part)
        ttnn.close_mesh_device(part)
        assert x.is_allocated() and not y.is_allocated()
    np.testing.assert_array_equal(ttnn.get_device_tensors(host)[1].numpy(), X.numpy())
    assert repr(x) == "ttnn.Tensor(deallocated)"
    for read in (ttnn.to_torch, ttnn.from_device, ttnn.get_device_tensors):
        for t in (x, y, alone):
            with pytest.raises(
                ttnn.TTNNError, match=r"is closed, and[^\n]*gone\n.*\n.*\n.*from_device"
            ):
                read(t)
    assert x.shape == X.shape and not x.is_allocated()
    for call in (
        lambda: ttnn.relu(x),
        lambda: ttnn.begin_trace_capture(device),
        lambda: ttnn.record_event(device, 0),
        lambda: device.create_submesh(ttnn.MeshShape(1, 1)),
    ):
        with pytest.raises(ttnn.TTNNError, match="the mesh device is closed"):
            call()


def test_one_number_is_a_number(pair: ttnn.MeshDevice) -> None:
    one = ttnn.get_device_tensors(ttnn.full((1, 1), 2.5, ttnn.float32, device=pair))[0]
    assert (float(one), int(one), bool(one), bool(one - 2.5)) == (2.5, 2, True, False)
    for three in (np.float32(3), np.int64(3), np.array(3.0)[()]):
        more = ttnn.get_device_tensors(ttnn.ones((1, 1), device=pair) * three)[0]
        assert float(more) == 3.0
    much = ttnn.full((1, 1), 2**24 + 1, ttnn.int32, device=pair)
    assert int(ttnn.get_device_tensors(much)[0]) == 2**24 + 1
    host = ttnn.from_torch(X)
    np.testing.assert_array_equal(np.asarray(host), X.numpy())
    ids = ttnn.from_torch(torch.tensor([[2.0, 0.0]]), ttnn.bfloat16, device=pair)
    rows = ttnn.embedding(ids, ttnn.from_torch(X[0, 0], device=pair))  # TT-NN's ids may be bfloat16
    np.testing.assert_array_equal(ttnn.get_device_tensors(rows)[0].numpy(), X[0, 0][[2, 0]][None])
    ids = ttnn.from_torch(torch.tensor([[2.0, 1.5]]), ttnn.bfloat16, device=pair)
    for kind in (ttnn.float32, ttnn.bfloat16):  # a fraction is not an id
        rows = ttnn.embedding(ids, ttnn.from_torch(X[0, 0], kind, device=pair))
        whole, none = ttnn.to_torch(ttnn.get_device_tensors(rows)[0])[0]
        assert torch.equal(whole.float(), X[0, 0, 2]) and none.isnan().all()
