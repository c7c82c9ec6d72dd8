"""Calls that are half right, as people type them: an error with the way out, or what is meant."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

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
}


@pytest.mark.parametrize("case", CALLS)
def test_errors_say_the_way_out(case: str, device: ttnn.MeshDevice) -> None:
    call, says = CALLS[case]
    tensor = ttnn.from_torch(X, layout=ttnn.TILE_LAYOUT, device=device)
    with pytest.raises((ttnn.TTNNError, AttributeError), match=says) as caught:
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
    host = ttnn.from_torch(X)
    np.testing.assert_array_equal(np.asarray(host), X.numpy())
    ids = ttnn.from_torch(torch.tensor([[2.0, 0.0]]), ttnn.bfloat16, device=pair)
    rows = ttnn.embedding(ids, ttnn.from_torch(X[0, 0], device=pair))  # bfloat16 ids are TT-NN's
    np.testing.assert_array_equal(ttnn.get_device_tensors(rows)[0].numpy(), X[0, 0][[2, 0]][None])
