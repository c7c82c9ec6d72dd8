"""TT-NN's collectives, over the whole mesh and along each of its axes."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from tessera import ttnn

RNG = np.random.default_rng(0)
R, S = ttnn.PlacementReplicate, ttnn.PlacementShard


def on(device: ttnn.MeshDevice, *shape: int, dtype: Any = ttnn.float32) -> Any:
    """Returns a tensor with different parts on each device, and the parts as an array [rows,
    columns, ...]."""
    rows, cols = device.shape
    x = RNG.integers(-50, 50, (rows * cols, *shape)).astype(np.float32)
    whole = x.reshape(rows * cols * shape[0], *shape[1:])
    cut = ttnn.ShardTensorToMesh(device, 0)
    there = ttnn.from_torch(whole, dtype, device=device, mesh_mapper=cut)
    return there, x.reshape(rows, cols, *shape)


def parts(x: ttnn.Tensor) -> Any:
    found = [ttnn.to_torch(t).float().numpy() for t in ttnn.get_device_tensors(x)]
    return np.stack(found).reshape(2, 4, *found[0].shape)


def lines(x: Any, axis: int | None) -> list[tuple[list[tuple[int, int]], list[Any]]]:
    """The groups of devices that a collective joins, with their parts."""
    every = [(r, c) for r in range(2) for c in range(4)]
    if axis is None:
        groups = [every]
    else:
        groups = [[p for p in every if p[1 - axis] == k] for k in range((4, 2)[axis])]
    return [(g, [x[p] for p in g]) for g in groups]


AXES = pytest.mark.parametrize("axis", [None, 0, 1])


@AXES
@pytest.mark.parametrize("dim", [0, -1])
def test_all_gather(axis: int | None, dim: int, device: ttnn.MeshDevice) -> None:
    x, a = on(device, 3, 8)
    got = parts(ttnn.all_gather(x, dim=dim, cluster_axis=axis, num_links=1))
    for places, values in lines(a, axis):
        for p in places:
            np.testing.assert_array_equal(got[p], np.concatenate(values, dim))


@AXES
def test_sums(axis: int | None, device: ttnn.MeshDevice) -> None:
    x, a = on(device, 3, 16)
    whole = parts(ttnn.all_reduce(x, cluster_axis=axis, topology=ttnn.Topology.Ring))
    cut = parts(ttnn.reduce_scatter(x, 1, cluster_axis=axis))
    for places, values in lines(a, axis):
        total = np.sum(values, 0)
        pieces = np.split(total, len(places), 1)
        for p, piece in zip(places, pieces, strict=True):
            np.testing.assert_array_equal(whole[p], total)
            np.testing.assert_array_equal(cut[p], piece)
    low = ttnn.experimental.all_reduce_async(
        x, ttnn.zeros_like(x), cluster_axis=axis, mesh_device=device, dtype=ttnn.bfloat16,
        multi_device_global_semaphore=None, rs_global_semaphores=[], num_links=1,
    )  # fmt: skip
    assert low.dtype is ttnn.bfloat16
    np.testing.assert_allclose(parts(low), whole, rtol=2.0**-8)


@AXES
def test_one_to_all_and_each_to_all(axis: int | None, device: ttnn.MeshDevice) -> None:
    x, a = on(device, 2, 3)
    sender = ttnn.MeshCoordinate(1, 2)
    got = parts(ttnn.broadcast(x, sender, cluster_axis=axis))
    before = device.num_program_cache_entries()
    each = [parts(t) for t in ttnn.all_broadcast(x, cluster_axis=axis)]
    assert device.num_program_cache_entries() <= before + 1
    for places, values in lines(a, axis):
        root = next(i for i, p in enumerate(places) if (axis is None and p == (1, 2))
                    or (axis is not None and p[axis] == sender[axis]))  # fmt: skip
        for p in places:
            np.testing.assert_array_equal(got[p], values[root])
            for found, value in zip(each, values, strict=True):
                np.testing.assert_array_equal(found[p], value)


@pytest.mark.parametrize("axis", [None, 0, 1])
def test_exchanges(axis: int | None, device: ttnn.MeshDevice) -> None:
    x, a = on(device, 3, 8)
    back = parts(ttnn.experimental.all_gather_async_reversed(x, 0, cluster_axis=axis))
    count = len(lines(a, axis)[0][0])
    into = ttnn.zeros((3 * count, 8 // count), ttnn.float32, ttnn.ROW_MAJOR_LAYOUT, device)
    swapped = ttnn.experimental.all_to_all_async(
        x, None, into, in_dim=0, out_dim=1, cluster_axis=axis
    )
    assert swapped is into
    for places, values in lines(a, axis):
        whole = np.concatenate(values)
        for p, part in zip(places, np.split(whole, count, 1), strict=True):
            np.testing.assert_array_equal(back[p], np.concatenate(values[::-1]))
            np.testing.assert_array_equal(parts(swapped)[p], part)
    made = ttnn.allocate_tensor_on_device(x.spec, device)
    total = ttnn.experimental.reduce_scatter_minimal_async(
        ttnn.all_gather(x, 1), 1, persistent_output_buffers=[into, made]
    )
    assert total is made and made.spec == x.spec and x.spec.tile.tile_shape == (32, 32)


def test_one_to_one(device: ttnn.MeshDevice) -> None:
    x, a = on(device, 2, 3)
    got = parts(ttnn.point_to_point(x, (0, 1), (1, 3), topology=ttnn.Topology.Linear))
    want = a.copy()
    want[1, 3] = a[0, 1]
    np.testing.assert_array_equal(got, want)
    into, b = on(device, 2, 3)
    found = ttnn.point_to_point(
        x, receiver_coord=ttnn.MeshCoordinate(0, 0), sender_coord=(1, 1), output_tensor=into
    )
    assert found is into
    b[0, 0] = a[1, 1]
    np.testing.assert_array_equal(parts(into), b)


@AXES
def test_a_partition_undoes_a_gather(axis: int | None, device: ttnn.MeshDevice) -> None:
    x, a = on(device, 3, 8)
    gathered = ttnn.all_gather(x, 1, cluster_axis=axis)
    np.testing.assert_array_equal(parts(ttnn.mesh_partition(gathered, 1, axis)), a)


def test_labels(device: ttnn.MeshDevice) -> None:
    x = np.zeros((4, 8, 8, 16), np.float32)
    both = ttnn.ShardTensor2dMesh(device, (2, 4), (2, 3))
    t = ttnn.from_torch(x, device=device, mesh_mapper=both)
    assert t.tensor_topology().placements() == [S(2), S(3)]
    for result, labels in (
        (ttnn.all_gather(t, 3, cluster_axis=1), [S(2), R()]),
        (ttnn.all_gather(t, 3, cluster_axis=0), [R(), S(3)]),
        (ttnn.all_gather(t, -2, cluster_axis=0), [R(), S(3)]),
        (ttnn.all_reduce(t, cluster_axis=1), [S(2), R()]),
        (ttnn.reduce_scatter(t, 0, cluster_axis=1), [S(2), S(0)]),
        (ttnn.mesh_partition(t, 1, 0), [S(1), S(3)]),
        (ttnn.gelu(t), [S(2), S(3)]),
    ):
        assert result.tensor_topology().placements() == labels
    line = ttnn.from_torch(x, device=device, mesh_mapper=ttnn.ShardTensorToMesh(device, 3))
    assert line.tensor_topology().distribution_shape() == (8,)
    inner = ttnn.all_gather(line, 3, cluster_axis=1).tensor_topology()
    assert (inner.distribution_shape(), inner.placements()) == ((2, 4), [S(3), R()])
    every = ttnn.all_gather(line, 3).tensor_topology()
    assert (every.distribution_shape(), every.placements()) == ((8,), [R()])
    rows = ttnn.from_torch(
        x, device=device, mesh_mapper=ttnn.ShardTensor2dMesh(device, (2, 4), (3, None))
    )
    found = ttnn.reduce_scatter(rows, 3, cluster_axis=1).tensor_topology()
    assert (found.distribution_shape(), found.placements()) == ((8,), [S(3)])


def joined(tensor: ttnn.Tensor) -> np.ndarray[Any, Any]:
    """The whole tensor by its placements: parts concatenated, or one of several equal parts."""
    topology = tensor.tensor_topology()
    parts = [ttnn.to_torch(p).numpy() for p in ttnn.get_device_tensors(tensor)]
    for n, p in reversed([*zip(topology.distribution_shape(), topology.placements())]):
        groups = [parts[i : i + n] for i in range(0, len(parts), n)]
        if isinstance(p, ttnn.PlacementReplicate):
            assert all((part == g[0]).all() for g in groups for part in g), "they are not alike"
            parts = [g[0] for g in groups]
        else:
            parts = [np.concatenate(g, p.dim) for g in groups]
    return parts[0]


COLLECTIVES: dict[str, Any] = {
    "gather 2": lambda t, axis: ttnn.all_gather(t, 2, cluster_axis=axis),
    "gather 3": lambda t, axis: ttnn.all_gather(t, 3, cluster_axis=axis),
    "reduce": lambda t, axis: ttnn.all_reduce(t, cluster_axis=axis),
    "scatter 2": lambda t, axis: ttnn.reduce_scatter(t, -2, cluster_axis=axis),
    "scatter 3": lambda t, axis: ttnn.reduce_scatter(t, 3, cluster_axis=axis),
    "one of all": lambda t, axis: ttnn.all_broadcast(t, cluster_axis=axis)[1],
}
# Without a placement: parts that are concatenated in another order than row by row.
NO_LABEL = {
    ("line", "gather 3", 0): "would interleave",
    ("line", "scatter 3", 0): "no TensorTopology can express",
    ("both", "scatter 3", 0): "no TensorTopology can express",
    ("columns", "scatter 3", 0): "no TensorTopology can express",
}


@pytest.mark.parametrize("axis", [None, 0, 1])
@pytest.mark.parametrize("name", COLLECTIVES)
@pytest.mark.parametrize("lies", ["line", "both", "columns", "rows", "same"])
def test_labels_say_what_the_parts_make(
    lies: str, name: str, axis: int | None, device: ttnn.MeshDevice
) -> None:
    cut = {
        "line": ttnn.ShardTensorToMesh(device, 3), "same": ttnn.ReplicateTensorToMesh(device),
        "both": ttnn.ShardTensor2dMesh(device, (2, 4), (2, 3)),
        "columns": ttnn.ShardTensor2dMesh(device, (2, 4), (None, 3)),
        "rows": ttnn.ShardTensor2dMesh(device, (2, 4), (3, None)),
    }[lies]  # fmt: skip
    x = np.arange(16 * 64, dtype=np.float32).reshape(1, 1, 16, 64)
    t = ttnn.from_torch(x, device=device, mesh_mapper=cut)
    why = NO_LABEL.get((lies, name, axis))
    if why is None:
        joined(COLLECTIVES[name](t, axis))
        return
    assert COLLECTIVES[name](t, axis).tensor_topology() == t.tensor_topology()
    strict = ttnn.manage_config("strict_ccl_topology", True)
    with strict, pytest.raises(ttnn.TTNNError, match=why):
        COLLECTIVES[name](t, axis)


def test_experts(device: ttnn.MeshDevice) -> None:
    """Tokens are sent to their experts and return with each expert's result."""
    batch, seq, hidden, experts, k, devices = 2, 3, 4, 16, 2, 8
    x, a = on(device, batch, 1, seq, hidden)
    chosen = np.stack([
        RNG.permuted(np.tile(np.arange(experts), (batch, 1, seq, 1)), axis=-1)[..., :k]
        for _ in range(devices)
    ])  # fmt: skip
    ids = ttnn.from_torch(chosen.reshape(-1, 1, seq, k), ttnn.uint16, device=device,
                          mesh_mapper=ttnn.ShardTensorToMesh(device, 0))  # fmt: skip
    owner = RNG.permutation(np.repeat(np.arange(devices), experts // devices))
    mapping = (owner[:, None] == np.arange(devices)).astype(np.int32)[None, None]
    table = ttnn.from_torch(mapping, ttnn.uint16, device=device)
    tokens, metadata = ttnn.all_to_all_dispatch(x, ids, table)
    assert tokens.shape == (1, batch * devices, seq, hidden)
    every = chosen.reshape(1, batch * devices, seq, k)
    np.testing.assert_array_equal(parts(metadata)[1, 2], every)
    flat = a.reshape(1, batch * devices, seq, hidden)
    for d in range(devices):
        here = (owner[every] == d).any(-1, keepdims=True)
        np.testing.assert_array_equal(parts(tokens)[divmod(d, 4)], np.where(here, flat, 0))
    # Expert e adds e; each device has the rows of its experts for its own tokens.
    mine = [np.flatnonzero(owner == d) for d in range(devices)]
    rows = np.stack([parts(tokens)[divmod(d, 4)] + e for d in range(devices) for e in mine[d]])
    made = ttnn.from_torch(rows.reshape(-1, batch * devices, seq, hidden), device=device,
                           mesh_mapper=ttnn.ShardTensorToMesh(device, 0))  # fmt: skip
    for order in ((table, metadata), (metadata, table)):  # versions of 2025 have both orders
        back = parts(ttnn.all_to_all_combine(made, *order))
        for d in range(devices):
            own = chosen[d, :, 0]  # [batch, seq, k]
            want = np.stack([a[divmod(d, 4)][:, 0] + own[..., i, None] for i in range(k)])
            np.testing.assert_array_equal(back[divmod(d, 4)], want)
    with pytest.raises(ttnn.TTNNError, match="do not say which tensor has the mapping"):
        ttnn.all_to_all_combine(made, table, table)
    # The sums of a device are stored at the first of its chosen experts, in the order of experts.
    wide = np.zeros((1, batch * devices, seq, experts), np.int32)
    wide[:] = np.arange(experts)[::-1]  # each token chooses all, the last one first
    sums = ttnn.from_torch(
        np.arange(devices, dtype=np.float32)[:, None, None, None] + flat,
        device=device,
        mesh_mapper=ttnn.ShardTensorToMesh(device, 0),
    )
    back = parts(ttnn.all_to_all_combine(
        sums, table, ttnn.from_torch(wide, ttnn.uint16, device=device), local_reduce=True
    ))  # fmt: skip
    for d in range(devices):
        want = np.zeros((experts, batch, seq, hidden), np.float32)
        for e in range(devices):
            want[experts - 1 - mine[e][0]] = a[divmod(d, 4)][:, 0] + e
        np.testing.assert_allclose(back[divmod(d, 4)], want, rtol=1e-6)


def test_wrong_calls(
    device: ttnn.MeshDevice, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    x, _ = on(device, 3, 8)
    for call, says in (
        (lambda: ttnn.all_gather(x, 2), "the tensor has no dim 2"),
        (lambda: ttnn.all_gather(x, 0, cluster_axis=2), "cluster_axis 2 is none of the mesh's"),
        (lambda: ttnn.all_reduce(x, num_links=0), "num_links=0"),
        (lambda: ttnn.all_reduce(x, colour="red"), "it has no argument 'colour'"),
        (lambda: ttnn.mesh_partition(x, 0), "dim 0 of 3 is not divided by 8 devices"),
        (lambda: ttnn.all_gather(ttnn.from_torch(np.ones(2)), 0), "it is on the host"),
    ):
        with pytest.raises(ttnn.TTNNError, match=says):
            call()
    from tessera.core.machine.mesh_graph_text import write
    from tessera.core.machine.presets import preset

    (tmp_path / "t3000.textproto").write_text(write(preset("t3000")))
    monkeypatch.setenv("TT_MESH_GRAPH_DESC_PATH", str(tmp_path / "t3000.textproto"))
    assert (ttnn.get_num_pcie_devices(), ttnn.get_pcie_device_ids()) == (4, [0, 4, 6, 2])
    ttnn.all_reduce(x, num_links=2)
    with pytest.raises(ttnn.TTNNError, match="num_links=3\n  links between neighbours : 2"):
        ttnn.all_reduce(x, num_links=3)


def test_the_older_forms(device: ttnn.MeshDevice) -> None:
    x = torch.rand(1, 1, 32, 256, dtype=torch.bfloat16)
    there = ttnn.from_torch(x, layout=ttnn.TILE_LAYOUT, device=device,
                            mesh_mapper=ttnn.ShardTensorToMesh(device, dim=3))  # fmt: skip
    for found in (
        ttnn.all_gather(there, 3, 0, device, num_links=1, topology=ttnn.Topology.Linear),
        ttnn.all_gather(there, dim=3, cluster_axis=0, mesh_device=device, num_workers=2),
    ):
        pieces = torch.split(x, 32, 3)
        for i, t in enumerate(ttnn.get_device_tensors(found)):
            assert torch.equal(ttnn.to_torch(t), torch.cat([pieces[i % 4], pieces[i % 4 + 4]], 3))
    scattered = ttnn.reduce_scatter(there, 3, 1, device, ttnn.ReduceType.Sum, num_links=1)
    assert scattered.shape == (1, 1, 32, 8)
    with pytest.raises(ttnn.TTNNError, match=r"ReduceType\.Max is not provided"):
        ttnn.reduce_scatter(there, 3, 1, device, ttnn.ReduceType.Max)


@pytest.mark.parametrize("kind", ["rms", "layer"])
def test_norms_of_rows_that_devices_share(kind: str, device: ttnn.MeshDevice) -> None:
    x, w, b = torch.randn(1, 1, 40, 128) + 0.5, torch.randn(128), torch.randn(128)
    cut = ttnn.ShardTensor2dMesh(device, mesh_shape=(2, 4), dims=(None, -1))
    put = partial(ttnn.from_torch, layout=ttnn.TILE_LAYOUT, device=device, mesh_mapper=cut)
    before, after = (getattr(ttnn, f"{kind}_norm_{when}_all_gather") for when in ("pre", "post"))
    part = put(x)
    stats = ttnn.all_gather(before(part, dtype=ttnn.float32), dim=-1, cluster_axis=1)
    assert stats.shape == (1, 1, 40, (64 if kind == "layer" else 32) * 4)
    found = after(part, stats, epsilon=1e-5, weight=put(w), bias=put(b))
    join = ttnn.ConcatMesh2dToTensor(device, mesh_shape=(2, 4), dims=(0, 3))
    norm = torch.nn.functional.layer_norm if kind == "layer" else torch.nn.functional.rms_norm
    want = norm(x, (128,), eps=1e-5) * w + b
    got = ttnn.to_torch(found, mesh_composer=join)
    torch.testing.assert_close(got, want.repeat(2, 1, 1, 1), rtol=2e-5, atol=2e-5)
    with pytest.raises(ttnn.TTNNError, match=rf"ttnn\.all_gather\(ttnn\.{kind}_norm_pre"):
        after(part, put(torch.ones(40, 40)))


MOVES: dict[str, Any] = {
    "gather": lambda x: ttnn.all_gather(x, 3),
    "exchange": lambda x: ttnn.experimental.all_to_all_async_generic(x, in_dim=2, out_dim=3),
    "broadcast": lambda x: ttnn.broadcast(x, (0, 0)),
}


@pytest.mark.parametrize("name", MOVES)
def test_what_is_moved_stays_as_narrow_as_it_is(name: str, device: ttnn.MeshDevice) -> None:
    x = ttnn.ones((1, 1, 8, 16), ttnn.bfloat16, device=device)
    trace = ttnn.begin_trace_capture(device)
    kept = MOVES[name](x)
    ttnn.end_trace_capture(device, trace)
    (segment,) = device.traces[trace.number].segments
    assert kept.dtype is ttnn.bfloat16 and "f32" not in segment.program.plan(x.value).text
    ttnn.release_trace(device, trace)


@pytest.mark.parametrize("axis", [None, 0, 1])
def test_a_part_has_the_bits_of_the_whole(axis: int | None, device: ttnn.MeshDevice) -> None:
    x = np.resize(np.array([-0.0, 1.0, np.inf, np.nan], np.float32), (16, 8))
    whole = ttnn.from_torch(x, device=device)
    back = ttnn.all_gather(ttnn.mesh_partition(whole, 0, axis), 0, cluster_axis=axis)
    for part in ttnn.get_device_tensors(back):
        found = ttnn.to_torch(part).numpy()
        assert (np.signbit(found) == np.signbit(x)).all()
        np.testing.assert_array_equal(found, x)
