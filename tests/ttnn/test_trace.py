"""Trace replays against direct calls, on the operands' values at the replay."""

from __future__ import annotations

import gc
from typing import Any

import numpy as np
import pytest
import torch

import tessera as ts
from tessera import ttnn


def chain(x: ttnn.Tensor, y: ttnn.Tensor) -> ttnn.Tensor:
    return ttnn.neg(ttnn.add(ttnn.mul(y, ttnn.neg(ttnn.gelu(x))), ttnn.relu(y)))


def golden(x: Any, y: Any) -> Any:
    return -(y * -torch.nn.functional.gelu(x) + torch.relu(y))


def allocated(device: ttnn.MeshDevice, *shape: int) -> ttnn.Tensor:
    return ttnn.allocate_tensor_on_device(ttnn.Shape(shape), ttnn.float32, ttnn.TILE_LAYOUT, device)


def test_replays_read_and_write_the_same_handles(device: ttnn.MeshDevice) -> None:
    x, y = allocated(device, 1, 4, 8), allocated(device, 1, 4, 8)
    chain(x, y)
    before = device.num_program_cache_entries()
    trace = ttnn.begin_trace_capture(device, cq_id=0)
    out = chain(x, y)
    gathered = ttnn.all_gather(out, dim=0)
    ttnn.end_trace_capture(device, trace, cq_id=0)
    assert device.num_program_cache_entries() == before + 1  # only the gather's program
    gc.collect()
    (segment,) = device.traces[trace.number].segments
    assert [*segment.outputs.values()] == [out, gathered]  # no intermediate value is an output
    cut = ttnn.ShardTensorToMesh(device, 0)
    join = ttnn.ConcatMeshToTensor(device, 0)
    for _ in range(3):
        a, b = torch.randn(8, 4, 8), torch.randn(8, 4, 8)
        for data, into in ((a, x), (b, y)):
            ttnn.copy_host_to_device_tensor(
                ttnn.from_torch(data, layout=ttnn.TILE_LAYOUT, mesh_mapper=cut), into
            )
        ttnn.execute_trace(device, trace, blocking=False)
        event = ttnn.record_event(device, 0)
        ttnn.wait_for_event(0, event)
        ttnn.event_synchronize(event)
        torch.testing.assert_close(ttnn.to_torch(out, mesh_composer=join), golden(a, b))
        for part in ttnn.get_device_tensors(gathered):
            torch.testing.assert_close(ttnn.to_torch(part), golden(a, b))
    ttnn.release_trace(device, trace)
    with pytest.raises(ttnn.TTNNError, match="execute_trace: the mesh has no trace"):
        ttnn.execute_trace(device, trace)


def test_parts_of_a_mesh_are_a_program_each(device: ttnn.MeshDevice) -> None:
    parts = device.create_submeshes(ttnn.MeshShape(1, 4))
    xs = [ttnn.ones((4, 4), ttnn.float32, device=p) for p in parts]
    counters = [ttnn.zeros((4, 4), ttnn.float32, device=p) for p in parts]
    whole = ttnn.ones((2, 2), ttnn.float32, device=device)
    trace = ttnn.begin_trace_capture(device)
    outs = []
    for x, counter in zip(xs, counters):
        outs.append(ttnn.relu(x @ x))
        ttnn.add_(counter, 1.0)
    double = whole + whole
    ttnn.end_trace_capture(device, trace)
    assert len(device.traces[trace.number].segments) == 3
    for _ in range(4):
        ttnn.execute_trace(device, trace)
    for out, counter in zip(outs, counters):
        assert out.device().shape == (1, 4)
        assert {float(ttnn.to_torch(t)[0, 0]) for t in ttnn.get_device_tensors(out)} == {4.0}
        # Once at the capture, and once per replay.
        assert {float(ttnn.to_torch(t)[0, 0]) for t in ttnn.get_device_tensors(counter)} == {5.0}
    assert double.get_dtype() is ttnn.float32
    one = parts[0]
    inner = ttnn.begin_trace_capture(one)
    out = ttnn.neg(xs[0])
    ttnn.end_trace_capture(one, inner)
    ttnn.execute_trace(one, inner)
    assert float(ttnn.to_torch(ttnn.get_device_tensors(out)[0])[0, 0]) == -1.0
    ttnn.release_trace(one, inner)
    ttnn.release_trace(device, trace)


def test_what_a_replay_would_overwrite(
    device: ttnn.MeshDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TT_METAL_TRACE_ALLOC_TRACKING", "1")
    x = ttnn.ones((2, 2), device=device)
    trace = ttnn.begin_trace_capture(device)
    out = ttnn.relu(x)
    ttnn.end_trace_capture(device, trace)
    with ttnn.corruptible_allocation_scope(device):
        allowed = ttnn.ones((2, 2), device=device)
    ttnn.execute_trace(device, trace)
    later = ttnn.ones((2, 2), device=device)
    with pytest.raises(ttnn.TTNNError, match="1 tensors were made after the capture"):
        ttnn.execute_trace(device, trace)
    ttnn.mark_corruptible(later)
    ttnn.execute_trace(device, trace)
    other = ttnn.relu(x)
    with pytest.raises(ttnn.TTNNError, match="a replay would"):
        ttnn.execute_trace(device, trace)
    ttnn.deallocate(other)
    ttnn.execute_trace(device, trace)
    assert out.is_allocated() and allowed.is_allocated()
    ttnn.release_trace(device, trace)


def test_what_is_on_the_devices_is_no_write(pair: ttnn.MeshDevice) -> None:
    x = ttnn.from_torch(np.ones((1, 2), np.float32), device=pair)
    into = {"layout": ttnn.ROW_MAJOR_LAYOUT, "device": pair}
    trace = ttnn.begin_trace_capture(pair)
    made = [ttnn.empty((1, 2), ttnn.float32, **into), ttnn.empty_like(x), allocated(pair, 1, 2)]
    for t in made:
        ttnn.add(x, ttnn.to_device(x, pair), output_tensor=t)
    host = ttnn.from_torch(np.ones(2))
    ttnn.end_trace_capture(pair, trace)
    ttnn.copy_host_to_device_tensor(ttnn.from_torch(np.full((1, 2), 4.0, np.float32)), x)
    ttnn.execute_trace(pair, trace)
    assert [ttnn.get_device_tensors(t)[1].to_list() for t in made] == [[[8.0, 8.0]]] * 3
    assert host.shape == (2,)
    ttnn.release_trace(pair, trace)


@pytest.mark.parametrize(
    "form",
    [
        lambda x: ttnn.to_layout(x, ttnn.ROW_MAJOR_LAYOUT),
        lambda x: x.to(ttnn.ROW_MAJOR_LAYOUT),
        lambda x: ttnn.to_device(x, x.device()),
        lambda x: ttnn.to_device(x, x.device(), ttnn.L1_MEMORY_CONFIG),
        lambda x: ttnn.to_memory_config(x, ttnn.L1_MEMORY_CONFIG),
        lambda x: ttnn.tilize(ttnn.untilize(x)),
        lambda x: ttnn.typecast(x, ttnn.float32),
    ],
)
def test_a_replay_gives_what_another_form_holds_then(form: Any, pair: ttnn.MeshDevice) -> None:
    x = allocated(pair, 1, 2)
    trace = ttnn.begin_trace_capture(pair)
    last = form(ttnn.neg(x))
    between = ttnn.add(form(ttnn.neg(x)), 1.0)
    ttnn.end_trace_capture(pair, trace)
    host = ttnn.from_torch(np.full((1, 2), 4.0, np.float32), layout=ttnn.TILE_LAYOUT)
    ttnn.copy_host_to_device_tensor(host, x)
    ttnn.execute_trace(pair, trace)
    found = [ttnn.get_device_tensors(t)[1].to_list() for t in (last, between)]
    assert found == [[[-4.0, -4.0]], [[-3.0, -3.0]]]
    ttnn.release_trace(pair, trace)


def test_wrong_orders(device: ttnn.MeshDevice) -> None:
    trace = ttnn.begin_trace_capture(device)
    with pytest.raises(ttnn.TTNNError, match="a trace is being captured on this mesh"):
        ttnn.begin_trace_capture(device)
    with pytest.raises(ttnn.TTNNError, match="on a mesh that shares its devices") as error:
        ttnn.begin_trace_capture(device.create_submesh((1, 1)))
    assert f"captures : {trace} on {device}" in str(error.value)
    with pytest.raises(ttnn.TTNNError, match="this trace is being captured"):
        ttnn.execute_trace(device, trace)
    ttnn.end_trace_capture(device, trace)
    with pytest.raises(ttnn.TTNNError, match="this trace is not being captured"):
        ttnn.end_trace_capture(device, trace)
    ttnn.execute_trace(device, trace)  # an empty trace
    part = device.create_submesh((1, 1))
    for under_way in (device, part):
        other = ttnn.begin_trace_capture(under_way)
        with pytest.raises(ttnn.TTNNError, match=r"number=\d+\), not this one, is being captured"):
            ttnn.execute_trace(device, trace)  # the trace cannot record it
        ttnn.end_trace_capture(under_way, other)
    x = allocated(device, 2, 2)
    with pytest.raises(ttnn.TTNNError, match="copy_host_to_device_tensor: the parts are not alike"):
        ttnn.copy_host_to_device_tensor(ttnn.from_torch(np.ones((3, 2))), x)


def test_a_replay_asks_once_for_the_short_way(
    pair: ttnn.MeshDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = ttnn.from_torch(np.array([[2, 0]]), dtype=ttnn.uint32, device=pair)
    table = ttnn.from_torch(np.eye(3, dtype=np.float32), device=pair)
    trace = ttnn.begin_trace_capture(pair)
    out = ttnn.embedding(ids, table)  # its ids are checked on the host, so there is no fast path
    ttnn.end_trace_capture(pair, trace)
    asked = []
    straight = ts.lang.jit.jit.Jit.straight
    monkeypatch.setattr(
        ts.lang.jit.jit.Jit, "straight", lambda jit, *xs: asked.append(1) or straight(jit, *xs)
    )
    for _ in range(3):
        ttnn.execute_trace(pair, trace)
    assert len(asked) == 1
    assert ttnn.to_torch(ttnn.get_device_tensors(out)[1]).tolist() == [[[0, 0, 1], [1, 0, 0]]]
    ttnn.release_trace(pair, trace)


def test_all_parts_are_waited_for(device: ttnn.MeshDevice) -> None:
    row = device.create_submesh(ttnn.MeshShape(1, 4))
    one = row.create_submesh(ttnn.MeshShape(1, 1))
    alone = next(iter(one.singles().values()))
    assert next(iter(device.parts())) is device and {row, one, alone} <= {*device.parts()}
    ttnn.relu(ttnn.ones((4, 4), ttnn.float32, device=one))
    ttnn.synchronize_device(device)
    assert one.last.stored.is_ready()


def test_no_new_programs(pair: ttnn.MeshDevice) -> None:
    x = ttnn.ones((3, 7), device=pair)
    pair.clear_program_cache()
    ttnn.relu(x)
    ttnn.relu(x)
    assert pair.num_program_cache_entries() == 1
    pair.set_program_cache_misses_allowed(False)
    ttnn.relu(x)
    with pytest.raises(ttnn.TTNNError, match="tanh: it has not run with such arguments"):
        ttnn.tanh(x)
    pair.set_program_cache_misses_allowed(True)
    pair.disable_and_clear_program_cache()
    ttnn.tanh(x)
    assert pair.num_program_cache_entries() == 0
    pair.enable_program_cache()


def test_replays_write_anew_what_was_read_in_between(pair: ttnn.MeshDevice) -> None:
    """From the second replay on, types are not checked again; values, handles and closing still
    work."""
    x = ttnn.from_torch(np.full((1, 4), 1.0, np.float32), device=pair)
    trace = ttnn.begin_trace_capture(pair)
    total = ttnn.all_reduce(ttnn.add(x, 1.0))
    ttnn.add_(x, 1.0)
    ttnn.end_trace_capture(pair, trace)
    start = ttnn.get_device_tensors(x)[0].to_list()[0][0]
    seen = []
    for k in range(4):
        ttnn.execute_trace(pair, trace, blocking=True)
        assert ttnn.get_device_tensors(total)[1].to_list() == [[2 * (start + k + 1)] * 4]
        seen.append(total.value)
        assert ttnn.get_device_tensors(x)[0].to_list() == [[start + k + 1] * 4]
    assert len({*map(id, seen)}) == 4
    assert pair.traces[trace.number].segments[0].straight is not None  # the fast path
    ttnn.deallocate(x)
    with pytest.raises(ttnn.TTNNError, match="the tensor was deallocated"):
        ttnn.execute_trace(pair, trace)
    ttnn.release_trace(pair, trace)
