"""Tensors to and from devices by TT-NN's mappers and composers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

from tessera import ttnn

RNG = np.random.default_rng(0)
R, S = ttnn.PlacementReplicate, ttnn.PlacementShard


def parts(x: ttnn.Tensor) -> list[Any]:
    return [ttnn.to_torch(t).float().numpy() for t in ttnn.get_device_tensors(x)]


@pytest.mark.parametrize(
    ("placements", "override", "expected"),
    [
        ([R(), R()], None, lambda x, r, c: x),
        ([R(), S(3)], None, lambda x, r, c: np.split(x, 4, 3)[c]),
        ([S(2), R()], None, lambda x, r, c: np.split(x, 2, 2)[r]),
        ([S(2), S(-1)], None, lambda x, r, c: np.split(np.split(x, 2, 2)[r], 4, 3)[c]),
        ([S(3), S(0)], None, None),
        ([R(), S(3)], (1, 8), lambda x, r, c: np.split(x, 8, 3)[4 * r + c]),
        ([S(3)], (8,), lambda x, r, c: np.split(x, 8, 3)[4 * r + c]),
        ([R(), S(3)], (2, 2), lambda x, r, c: np.split(x, 2, 3)[c] if c < 2 else None),
        ([S(1)], (8,), lambda x, r, c: np.split(x, 3, 1)[4 * r + c] if 4 * r + c < 3 else None),
    ],
)  # fmt: skip
def test_mappers(device: ttnn.MeshDevice, placements: Any, override: Any, expected: Any) -> None:
    x = RNG.normal(size=(2, 3, 4, 16)).astype(np.float32)
    config = ttnn.MeshMapperConfig(placements, override and ttnn.MeshShape(override))
    mapper = ttnn.create_mesh_mapper(device, config)
    if expected is None:  # a dim 0 of 2 cannot be split over 4 columns
        with pytest.raises(ttnn.TTNNError, match="dim 0 of 2 is not cut into 4 equal parts"):
            ttnn.from_torch(x, mesh_mapper=mapper)
        return
    host = ttnn.from_torch(torch.from_numpy(x), mesh_mapper=mapper)
    placed = ttnn.to_device(host, device)
    wanted = {(r, c): expected(x, r, c) for r in range(2) for c in range(4)}
    for tensor in (host, placed, ttnn.from_device(placed)):
        at = dict(zip(tensor.tensor_topology().mesh_coords(), parts(tensor)))
        assert {*at} == {k for k, v in wanted.items() if v is not None}
        for place, part in at.items():
            np.testing.assert_array_equal(part, wanted[place])
    lies = placed.tensor_topology()
    assert lies.placements() == placements
    same = ttnn.TensorTopology(lies.distribution_shape(), placements, lies.mesh_coords())
    assert lies == same and hash(lies) == hash(same)


def test_what_is_cut_is_joined_again(device: ttnn.MeshDevice) -> None:
    x = torch.from_numpy(RNG.normal(size=(4, 2, 6, 8)).astype(np.float32))
    for mapper, composer in (
        (ttnn.ShardTensorToMesh(device, dim=3), ttnn.ConcatMeshToTensor(device, dim=3)),
        (
            ttnn.ShardTensor2dMesh(device, (2, 4), (2, 3)),
            ttnn.ConcatMesh2dToTensor(device, (2, 4), (2, 3)),
        ),
        (
            ttnn.ShardTensor2dMesh(device, mesh_shape=(2, 4), dims=(1, 0)),
            ttnn.create_mesh_composer(device, ttnn.MeshComposerConfig(1, 0)),
        ),
    ):
        there = ttnn.from_torch(x, device=device, mesh_mapper=mapper)
        assert torch.equal(ttnn.to_torch(there, mesh_composer=composer), x)
        host = ttnn.distribute_tensor(ttnn.from_torch(x), mapper)
        assert torch.equal(ttnn.to_torch(ttnn.aggregate_tensor(host, composer)), x)
    mapper = ttnn.shard_tensor_to_2d_mesh_mapper(device, mesh_shape=(2, 4), dims=(0, 3))
    there = ttnn.distribute_tensor(ttnn.from_torch(x, device=device), mapper, device)
    composer = ttnn.concat_2d_mesh_to_tensor_composer(device, dims=(0, 3), mesh_shape=(2, 4))
    for parted in (there, ttnn.get_device_tensors(there)):
        assert torch.equal(ttnn.to_torch(ttnn.aggregate_tensor(parted, composer)), x)
    rows = ttnn.ShardTensor2dMesh(device, (2, 4), (0, None))
    with ttnn.distribute(rows):
        there = ttnn.from_torch(x, device=device)
    both = ttnn.ConcatMesh2dToTensor(device, (2, 4), (0, 1))
    with ttnn.distribute(both):
        found = ttnn.to_torch(there)
    assert torch.equal(found, torch.cat([x] * 4, 1))


def test_several_parts_need_a_composer(pair: ttnn.MeshDevice) -> None:
    x = ttnn.from_torch(np.ones((2, 2)), device=pair)
    with pytest.raises(RuntimeError, match=r"Can't convert a tensor distributed on MeshShape\(\[1"):
        ttnn.to_torch(x)
    assert ttnn.to_torch(ttnn.get_device_tensors(x)[1]).shape == (2, 2)


TYPES = {
    ttnn.bfloat16: lambda x: x.astype(ml_dtypes.bfloat16).astype(np.float32),
    ttnn.float32: lambda x: x,
    ttnn.int32: np.trunc,
    ttnn.uint16: lambda x: np.trunc(x) % 65536,
    ttnn.uint32: lambda x: np.trunc(x.astype(np.float64)) % 2**32,
    ttnn.uint8: lambda x: np.trunc(x) % 256,
}


@pytest.mark.parametrize("dtype", TYPES, ids=lambda d: d.name)
def test_element_types_on_the_host_and_on_devices(dtype: Any, pair: ttnn.MeshDevice) -> None:
    x = (RNG.normal(size=(3, 40)) * 1000).astype(np.float32)
    want = TYPES[dtype](x)
    host = ttnn.typecast(ttnn.from_torch(x), dtype)
    there = ttnn.typecast(ttnn.from_torch(x, device=pair, layout=ttnn.TILE_LAYOUT), dtype)
    for tensor in (host, *ttnn.get_device_tensors(there)):
        assert tensor.dtype is dtype
        np.testing.assert_array_equal(ttnn.to_torch(tensor, torch.float64).numpy(), want)


def test_whole_numbers_become_the_types_of_tt_nn() -> None:
    for name, most in {"uint8": 255, "uint16": 2**15 - 1, "uint32": 2**31 - 1}.items():
        host = ttnn.from_torch(np.array([0, most], np.int64), getattr(ttnn, name))
        kind = getattr(torch, {"uint16": "int16", "uint32": "int32"}.get(name, name))
        torch.testing.assert_close(ttnn.to_torch(host), torch.tensor([0, most], dtype=kind))
    for dtype, much in ((ttnn.uint16, 2**16 - 1), (ttnn.uint32, 2**32 - 1)):
        host = ttnn.from_torch(np.array([0, much], np.int64), dtype)
        assert ttnn.to_torch(host, torch.int64).tolist() == [0, much]
        with pytest.raises(ttnn.TTNNError, match=f"which has no {much}"):
            ttnn.to_torch(host)


def test_floats_are_rounded_and_what_is_not_finite_stays(pair: ttnn.MeshDevice) -> None:
    x = torch.tensor(
        [1.001, float("inf"), float("-inf"), float("nan"), 3.38e38], dtype=torch.float64
    )
    for dtype, kind in ((ttnn.bfloat16, torch.bfloat16), (ttnn.float32, torch.float32)):
        host = ttnn.to_torch(ttnn.from_torch(x, dtype))
        torch.testing.assert_close(host, x.to(kind), rtol=0, atol=0, equal_nan=True)
    mask = torch.tensor([torch.finfo(torch.float32).min])
    assert ttnn.to_torch(ttnn.from_torch(mask, ttnn.bfloat16)).isneginf()
    assert ttnn.to_torch(ttnn.from_torch(mask.double(), ttnn.bfloat16)).isneginf()
    assert ttnn.to_torch(ttnn.from_torch(torch.tensor([2**24 + 1]), ttnn.float32)) == 2**24
    blocks = ttnn.from_torch(torch.full((1, 16), 3.4e38), ttnn.bfloat8_b)
    assert torch.isfinite(ttnn.to_torch(blocks)).all()
    assert ttnn.to_torch(ttnn.from_torch(torch.tensor([2.0, -3.0]), ttnn.int32)).tolist() == [2, -3]
    drawn = ttnn.to_torch(ttnn.rand((4, 64), dtype=ttnn.uint8, low=1, high=5))
    assert {*drawn.ravel().tolist()} == {1, 2, 3, 4}


def test_parts_of_the_host_in_a_line(device: ttnn.MeshDevice) -> None:
    x = np.arange(16.0, dtype=np.float32).reshape(2, 8)
    line = ttnn.aggregate_as_tensor([ttnn.from_torch(x[:, [i]]) for i in range(8)])
    join = ttnn.ConcatMeshToTensor(device, dim=1)
    for tensor in (line, ttnn.to_device(line, device)):
        np.testing.assert_array_equal(ttnn.to_torch(tensor, mesh_composer=join), x)
    spec = ttnn.TensorSpec([2, 8], ttnn.bfloat16, ttnn.TILE_LAYOUT, ttnn.BufferType.L1)
    there = ttnn.from_torch(x, spec=spec, device=device)
    assert there.spec == spec and there.memory_config() == ttnn.L1_MEMORY_CONFIG
    host = ttnn.allocate_tensor_on_host(spec, device)
    ttnn.copy_device_to_host_tensor(there, host)
    assert len(host.host_parts()) == 8 and host.spec == spec
    with pytest.raises(ttnn.TTNNError, match="the spec is of another shape"):
        ttnn.from_torch(x[:1], spec=spec)


def blocks(x: Any, bits: int) -> Any:
    """Block floats by their definition, number by number."""
    out = np.zeros_like(x)
    for row, into in zip(x.reshape(-1, x.shape[-1]), out.reshape(-1, x.shape[-1])):
        for start in range(0, len(row), 16):
            block = row[start : start + 16]
            if not block.any():
                continue
            shared = max(int(np.frexp(v)[1]) for v in block if v)
            for i, v in enumerate(block):
                m, e = np.frexp(np.float64(abs(v)))
                whole = int(m * 2**24) >> min(shared - int(e), 31)
                unit = 1 << (24 - bits)
                kept, rest = divmod(whole, unit)
                kept += rest * 2 > unit or (rest * 2 == unit and kept % 2 == 1)
                value = min(kept, 2**bits - 1) * 2.0 ** (shared - bits)
                into[start + i] = np.copysign(value, v)
    return out


@pytest.mark.parametrize("dtype", [ttnn.bfloat8_b, ttnn.bfloat4_b], ids=lambda d: d.name)
def test_block_floats(dtype: Any, pair: ttnn.MeshDevice) -> None:
    x = RNG.normal(size=(6, 40)) * 10.0 ** RNG.integers(-4, 4, (6, 40))
    x[0, :16] = 0.0
    x[1, ::3] = RNG.integers(-200, 200, 14) / 64.0  # values halfway between two block floats
    x = x.astype(np.float32)
    want = blocks(x, dtype.bits)
    host = ttnn.from_torch(x, dtype, layout=ttnn.TILE_LAYOUT)
    np.testing.assert_array_equal(ttnn.to_torch(host).numpy(), want)
    there = ttnn.typecast(ttnn.from_torch(x, device=pair), dtype)
    np.testing.assert_array_equal(parts(there)[1], want)
    with pytest.raises(ttnn.TTNNError, match="is of tiles, not of rows"):
        ttnn.from_torch(x, dtype, layout=ttnn.ROW_MAJOR_LAYOUT)


def test_printing_is_as_in_the_guide(pair: ttnn.MeshDevice) -> None:
    x = np.ones((1, 1, 32, 64), np.float32)
    x[..., 32:] = 2.0
    cut = ttnn.ShardTensorToMesh(pair, dim=3)
    there = ttnn.from_torch(x, device=pair, mesh_mapper=cut, layout=ttnn.TILE_LAYOUT)
    row = "[ 2.00000,  2.00000,  ...,  2.00000,  2.00000]"
    indent = "\n" + " " * 15
    text = (
        f"device_id:1\nttnn.Tensor([[[{row},{indent}{row},{indent}...,{indent}{row},{indent}{row}]]]"
        ", shape=Shape([1, 1, 32, 32]), dtype=DataType::FLOAT32, layout=Layout::TILE)"
    )
    assert repr(there).endswith(text)
    assert repr(there).startswith("device_id:0\nttnn.Tensor([[[[ 1.00000,")


def test_parts_become_one_tensor_again(device: ttnn.MeshDevice) -> None:
    x = RNG.normal(size=(8, 3)).astype(np.float32)
    there = ttnn.from_torch(x, device=device, mesh_mapper=ttnn.ShardTensorToMesh(device, 0))
    ones = ttnn.get_device_tensors(there)
    assert [t.device().get_device_ids() for t in ones] == [[i] for i in range(8)]
    again = ttnn.combine_device_tensors(tensors=[ttnn.neg(t) for t in ones])
    np.testing.assert_array_equal(np.concatenate(parts(again)), -x)
    host = ttnn.from_host_shards([t.cpu() for t in ones], device.shape)
    assert torch.equal(
        ttnn.to_torch(host.to(device), mesh_composer=ttnn.ConcatMeshToTensor(device, 0)),
        torch.from_numpy(x),
    )


@pytest.mark.parametrize("shape", [(1, 8), (8, 1), (2, 4)])
def test_parts_are_found_where_others_have_some(
    shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    x = RNG.normal(size=(8, 3)).astype(np.float32)
    with ttnn.create_mesh_device(ttnn.MeshShape(shape)) as device:
        there = ttnn.from_torch(x, device=device, mesh_mapper=ttnn.ShardTensorToMesh(device, 0))
        text, ids = repr(there), device.get_device_ids()
        # As if another process owned a part: each process reads the parts at its own coordinates.
        monkeypatch.setattr(ttnn.MeshDevice, "all_local", lambda d: d.get_num_devices() == 1)
        assert repr(there) == text
        ones = ttnn.get_device_tensors(there)
        assert [t.device().get_device_ids() for t in ones] == [[i] for i in ids]
        again = ttnn.combine_device_tensors(tensors=ones)
        np.testing.assert_array_equal(np.concatenate(parts(again)), x)


def test_tiles_are_not_seen(pair: ttnn.MeshDevice) -> None:
    x = ttnn.from_torch(np.ones((3, 5)), device=pair, layout=ttnn.TILE_LAYOUT)
    assert (x.shape, x.padded_shape) == ((3, 5), (32, 32))
    assert parts(ttnn.sum(x))[0] == 15.0
    rows = ttnn.to_layout(x, ttnn.ROW_MAJOR_LAYOUT)
    assert (rows.padded_shape, rows.layout) == ((3, 5), ttnn.ROW_MAJOR_LAYOUT)


def test_files(tmp_path: Path, device: ttnn.MeshDevice) -> None:
    x = RNG.normal(size=(8, 2, 32)).astype(np.float32)
    cut = ttnn.ShardTensorToMesh(device, 0)
    for dtype in (ttnn.float32, ttnn.bfloat8_b):
        made = ttnn.from_torch(x, dtype, layout=ttnn.TILE_LAYOUT, mesh_mapper=cut)
        ttnn.dump_tensor(tmp_path / "x.tensorbin", made)
        read = ttnn.load_tensor(tmp_path / "x.tensorbin", device=device)
        assert (read.dtype, read.layout) == (made.dtype, made.layout)
        assert read.tensor_topology() == made.tensor_topology()
        for a, b in zip(parts(read), parts(made), strict=True):
            np.testing.assert_array_equal(a, b)
    with pytest.raises(RuntimeError, match=r"must have \.tensorbin extension"):
        ttnn.load_tensor(str(tmp_path / "x.bin"))
    whole = (tmp_path / "x.tensorbin").read_bytes()
    for bad in (b"", b"no", whole[:-3], whole + b"x"):
        (tmp_path / "y.tensorbin").write_bytes(bad)
        with pytest.raises(ttnn.TTNNError, match="is no tensor of a file"):
            ttnn.load_tensor(tmp_path / "y.tensorbin")
    # An existing file is read, and the given data are ignored.
    kept = {"dtype": ttnn.bfloat16, "layout": ttnn.TILE_LAYOUT, "device": device}
    named = kept | {"cache_file_name": tmp_path / "w" / "cache"}
    first = ttnn.as_tensor(x, **named, memory_config=ttnn.L1_MEMORY_CONFIG)
    again = ttnn.as_tensor(x * 0, **named)
    np.testing.assert_array_equal(parts(first)[0], parts(again)[0])
    assert ttnn.get_memory_config(first) == ttnn.L1_MEMORY_CONFIG


def test_what_does_not_fit_is_an_error(device: ttnn.MeshDevice, pair: ttnn.MeshDevice) -> None:
    x = ttnn.from_torch(np.ones((2, 2)), device=device)
    y = ttnn.from_torch(np.ones((2, 2)), device=pair)
    with pytest.raises(ttnn.TTNNError, match="add: the tensors are on different meshes"):
        ttnn.add(x, y)
    with pytest.raises(ttnn.TTNNError, match="the tensor is not on a device: it is on the host"):
        ttnn.relu(ttnn.from_torch(np.ones(2)))
    ttnn.deallocate(y)
    with pytest.raises(ttnn.TTNNError, match="the tensor was deallocated"):
        ttnn.relu(y)
    with pytest.raises(ttnn.TTNNError, match="relu: it has no argument 'color'"):
        ttnn.relu(x, color=3)
    with pytest.raises(ttnn.TTNNError, match="is neither a mapper nor a composer"):  # noqa: SIM117
        with ttnn.distribute(3):  # type: ignore[arg-type]
            pass


@pytest.mark.parametrize(
    "call",
    [
        lambda x: ttnn.from_torch(np.ones(2), mesh_maper=None),
        lambda x: ttnn.zeros((2, 2), colour=1),
        lambda x: ttnn.as_tensor(np.ones(2), cache="x"),
        lambda x: ttnn.to_layout(x, ttnn.TILE_LAYOUT, padding=1),
        lambda x: ttnn.tilize(x, padding=1),
        lambda x: ttnn.open_mesh_device((1, 1), offst=(0, 1)),
    ],
)  # fmt: skip
def test_an_argument_by_another_name_is_an_error(call: Any, pair: ttnn.MeshDevice) -> None:
    with pytest.raises(ttnn.TTNNError, match="it has no argument"):
        call(ttnn.ones((2, 2), device=pair))


def test_what_is_not_provided_is_not_left_out(pair: ttnn.MeshDevice) -> None:
    x = ttnn.ones((2, 2), device=pair)
    for call in (
        lambda: ttnn.all_reduce(x, math_op="Max"),
        lambda: ttnn.concat([x, x], dim=0, groups=2),
        lambda: ttnn.experimental.paged_update_cache(x, x, update_idxs=[0], batch_offset=1),
    ):
        with pytest.raises(ttnn.TTNNError, match="not provided"):
            call()
